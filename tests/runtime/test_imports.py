"""Importing the room is cheap and changes nothing."""

from __future__ import annotations

import subprocess
import sys


def _run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_runtime_does_not_import_torch():
    assert _run("import deltafin.runtime, sys; print('torch' in sys.modules)") == "False"


def test_reading_a_trace_and_tokenizing_import_no_torch():
    names = "from deltafin.runtime import Tokenizer, StreamDecoder, TraceWriter, read_trace, expert_uses"
    assert _run(f"{names}; import sys; print('torch' in sys.modules)") == "False"


def test_everything_the_door_promises_is_there():
    import deltafin.runtime as room

    for name in room.__all__:
        assert getattr(room, name) is not None


def test_running_a_model_on_the_cpu_imports_no_torch(tmp_path):
    program = (
        "import sys, atexit; sys.argv = ['df-run', 'demo', '--prompt', '47 + 38 =', '--max-new', '3'];"
        f"sys.argv += ['--cache-dir', {str(tmp_path)!r}];"
        "atexit.register(lambda: print('torch' in sys.modules));"
        "from deltafin.cli import run_main; run_main()"
    )
    assert _run(program).split() == ["85", "False"]
