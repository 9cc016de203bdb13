"""The commands: df-index, df-fetch, df-run, df-serve, df-bench, df-plan.

Each parses, calls one function of a room, prints. Results go to stdout, progress and statistics to stderr. Exit
status: 0 done, 1 failed (one line on stderr says why and what to do), 2 wrong usage, 130 interrupted. Rooms are
imported inside the commands, so that --help answers at once.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable

import click

from deltafin import __version__
from deltafin.cli.lines import one_line
from deltafin.errors import DeltafinError, NoMemory

COMMANDS = {
    "df-index": "where every byte of a model lies: build, show, check, list",
    "df-fetch": "bring a model's bytes to this machine, look at them, check, place and remove them",
    "df-run": "continue a prompt with a model, answer a file of requests (batch), say how likely texts are (score)",
    "df-serve": "answer requests of OpenAI's API with a model, for as long as it takes",
    "df-bench": "measure this machine in the terms the engine works in: kernels, io, http, roots, tokens and more",
    "df-plan": "say what this machine will do with a model, before it is downloaded; and doctor",
}

_INTERRUPTED = 130
_OPEN_FILES, _MANY_OPEN_FILES = 64, 1024  # that every command needs; that it asks for where it may
_ADDRESS_SPACE_NBYTES = 160_000_000  # with less not even the libraries load, and some of them say so in their own way


def main() -> int:
    """Lists the commands, for `python -m deltafin`."""
    if sys.argv[1:] not in ([], ["--help"], ["-h"]):
        print(f"deltafin: takes no arguments; the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    print(f"deltafin {__version__}: the whole of Kimi K3 on one ordinary machine\n")
    for name, what in COMMANDS.items():
        print(f"  {name:10} {what}")
    print("\nEach takes --help.")
    return 0


def index_main() -> None:
    def command() -> click.Command:
        from deltafin.cli.index import index

        return index

    sys.exit(_execute(command, "df-index"))


def fetch_main() -> None:
    def command() -> click.Command:
        from deltafin.cli.fetch import fetch

        return fetch

    sys.exit(_execute(command, "df-fetch"))


def run_main() -> None:
    def command() -> click.Command:
        from deltafin.cli.run import run

        return run

    sys.exit(_execute(command, "df-run"))


def serve_main() -> None:
    def command() -> click.Command:
        from deltafin.cli.serve import serve

        return serve

    sys.exit(_execute(command, "df-serve"))


def bench_main() -> None:
    def command() -> click.Command:
        from deltafin.cli.bench import bench

        return bench

    sys.exit(_execute(command, "df-bench"))


def plan_main() -> None:
    def command() -> click.Command:
        from deltafin.cli.plan import plan

        return plan

    sys.exit(_execute(command, "df-plan"))


def _execute(load: Callable[[], click.Command], name: str) -> int:
    """Runs a command and turns whatever ends it into an exit status and at most one line."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by the caller: what would go there is not wanted
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    try:
        _prepare()
        result = load().main(prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as e:
        return e.exit_code
    except click.ClickException as e:
        e.show()
        return e.exit_code
    except (KeyboardInterrupt, click.Abort) as e:
        if isinstance(e, KeyboardInterrupt) or isinstance(e.__cause__, KeyboardInterrupt):
            # All is let go of. Another interrupt could only spoil the ending, so it ends at once.
            signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
        _complain(f"\n{name}: interrupted; what was finished is kept")
        return _INTERRUPTED
    except DeltafinError as e:
        _complain(f"{name}: {one_line(str(e))}")
        return e.exit_status
    except BrokenPipeError:
        _drop_output()
        return 1
    except MemoryError:
        _complain(f"{name}: out of memory; close other programs, or raise its limit (ulimit -v)")
        return 1
    except RuntimeError as e:
        if "start new thread" not in str(e):
            raise
        _complain(f"{name}: cannot start a thread; raise the limit of memory (ulimit -v) or of processes (ulimit -u)")
        return 1
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENFILE):
            _complain(f"{name}: too many open files; allow at least {_OPEN_FILES} (ulimit -n {_OPEN_FILES})")
            return 1
        if e.errno != errno.ENOSPC or e.filename is not None:
            raise
        _complain(f"{name}: cannot write the output: {e.strerror}")
        _drop_output()
        return 1


def _prepare() -> None:
    """Settings of the process, before anything large is imported. Raises DeltafinError where too little is allowed."""
    import resource

    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY and space < _ADDRESS_SPACE_NBYTES:
        need, have = _ADDRESS_SPACE_NBYTES // 1_000_000, space // 1_000_000
        raise NoMemory(f"address space: {need} MB are needed, {have} allowed; raise the limit (ulimit -v)")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _OPEN_FILES:
        raise DeltafinError(f"open files: {_OPEN_FILES} are needed, {hard} allowed; run ulimit -n {_OPEN_FILES} first")
    if soft != resource.RLIM_INFINITY and soft < _MANY_OPEN_FILES:
        more = _MANY_OPEN_FILES if hard == resource.RLIM_INFINITY else min(_MANY_OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, more), hard))
    # numpy's library would start a thread for each core, each with memory of its own, and nothing here multiplies
    # with it; where it may not, it sends itself the signal of Ctrl-C.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _complain(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        pass  # nobody can be told; the exit status says it


def _drop_output() -> None:
    """The reader of our output has left, or its disk is full: nothing more may be written, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
