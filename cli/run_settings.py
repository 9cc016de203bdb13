"""What the jobs of df-run have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from deltafin.cli.options import ByteSize, gathered, options
from deltafin.errors import DeltafinError

_options = options(
    click.option(
        "--save-state",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="F",
        help="Write to F what was computed, to go on from there with --load-state.",
    ),
    click.option(
        "--load-state",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="F",
        help="Go on where F was saved; a prompt follows what was said there.",
    ),
    click.option(
        "--keep-states",
        type=ByteSize(),
        metavar="SIZE",
        help="Most disk for states of chats, which are kept by themselves, so that a conversation goes on without "
        "computing its beginning again (default: a tenth of what is free; 0: none).",
    ),
)


@dataclass(frozen=True, slots=True)
class StateOptions:
    """Where states come from and go to."""

    save_state: Path | None
    load_state: Path | None
    keep_states: int | None


def state_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options; the command takes them as one argument `states`."""
    return _options(gathered("states", StateOptions)(command))


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a job is to show, and to leave behind."""

    states: StateOptions
    max_new: int  # tokens of an answer
    as_json: bool
    stats: bool
    trace: Path | None


@contextmanager
def saving_at_the_end(save: Callable[[Path], None], states: StateOptions) -> Iterator[None]:
    """Does what --save-state asks for, also after a failure or an interruption, which its own failure never hides."""
    try:
        yield
    except BaseException:
        try:
            if states.save_state is not None:
                save(states.save_state)
        except DeltafinError as e:
            click.echo(f"df-run: {e}", err=True)
        raise
    if states.save_state is not None:
        save(states.save_state)
