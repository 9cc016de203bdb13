"""The whole module, built with AddressSanitizer and UndefinedBehaviorSanitizer, passes the tests of this folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1"


def _package(folder: Path) -> Path:
    """The package as it is, but for its extension."""
    package = folder / "deltafin"
    (package / "cext").mkdir(parents=True)
    for entry in ROOT.iterdir():
        if entry.name != "cext" and not entry.name.startswith(".") and entry.name != "build":
            (package / entry.name).symlink_to(entry)
    (package / "cext" / "__init__.py").symlink_to(ROOT / "cext" / "__init__.py")
    return package


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_module_is_clean_under_sanitizers(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    library = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("gcc has no AddressSanitizer")
    _package(tmp_path)
    words = [sys.executable, "setup.py", "build_ext", f"--build-lib={tmp_path}", f"--build-temp={tmp_path / 'build'}"]
    env = {**os.environ, "CC": "gcc", "CFLAGS": SANITIZE, "LDFLAGS": SANITIZE}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    tests = [str(path) for path in sorted(Path(__file__).parent.glob("test_*.py")) if path.name not in _BUILDERS]
    env = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "LD_PRELOAD": library,
        # Python and numpy keep memory to the end; only our own errors are wanted.
        "ASAN_OPTIONS": "detect_leaks=0,abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    show = "from deltafin.cext import _math; print(_math.__file__)"
    found = subprocess.run([sys.executable, "-c", show], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert found.stdout.startswith(str(tmp_path)), found.stderr
    words = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


_BUILDERS = {"test_replay.py", "test_sanitizers.py"}
