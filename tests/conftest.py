"""What all tests share: checkpoints, a hub on loopback that can misbehave, and commands as a user runs them."""

from __future__ import annotations

import importlib.util
import os
import signal
import socketserver
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
GOLDEN_SEED = 20261129

# Nothing outside may change what a test sees: neither the user's tokens and caches nor a proxy.
for _name in list(os.environ):
    if _name.startswith(("HF_", "HUGGING", "DELTAFIN_")) or _name.lower().endswith("_proxy"):
        del os.environ[_name]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it in the background: commands inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("busy", deadline=None)  # an example that takes long says that the machine is busy
settings.load_profile("busy")
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of the many commands would compile the package again
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # torch's idle threads would spin: ten times slower on shared cores


def load(path: Path) -> ModuleType:
    """A program of tools/ or tests/faults, imported by path: neither folder is a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory) -> Path:
    """A home of the tests' own, so that no cache or token of the user's is read or written."""
    home = tmp_path_factory.mktemp("home")
    os.environ["HOME"] = str(home)
    os.environ["HF_HOME"] = str(home / "huggingface")
    os.environ["XDG_CACHE_HOME"] = str(home / "cache")
    return home


@pytest.fixture(scope="session")
def golden() -> Path:
    return ROOT / "tests" / "golden"


@pytest.fixture(scope="session")
def tiny_dir(golden) -> Path:
    return golden / "tiny" / "ckpt"


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    return ROOT / "demo"


@pytest.fixture(scope="session")
def k93_dir(tmp_path_factory, make_checkpoint) -> Path:
    """Generated (29 MB); tests/tools proves that it is the golden checkpoint, byte for byte."""
    out = tmp_path_factory.mktemp("k93") / "ckpt"
    make_checkpoint.generate(out, "k93", GOLDEN_SEED)
    return out


@pytest.fixture(scope="session")
def make_checkpoint() -> ModuleType:
    return load(ROOT / "tools" / "make_checkpoint.py")


@pytest.fixture(scope="session")
def make_fullsize() -> ModuleType:
    return load(ROOT / "tools" / "make_fullsize.py")


@pytest.fixture(scope="session")
def demo_tool() -> ModuleType:
    return load(ROOT / "tools" / "demo.py")


@pytest.fixture(scope="session")
def kill_fetches() -> ModuleType:
    return load(ROOT / "tools" / "kill_fetches.py")


@pytest.fixture(scope="session")
def kill_batches() -> ModuleType:
    return load(ROOT / "tools" / "kill_batches.py")


@pytest.fixture(scope="session")
def kill_server(kill_batches) -> ModuleType:
    """After `kill_batches`, which it takes its requests from."""
    return load(ROOT / "tools" / "kill_server.py")


@pytest.fixture(scope="session")
def server_speed() -> ModuleType:
    return load(ROOT / "tools" / "server_speed.py")


@pytest.fixture(scope="session")
def range_server() -> ModuleType:
    """Prompt, or it would hold back the end of each answer by 40 ms, and that of each test by 100 ms."""
    module = load(ROOT / "tests" / "faults" / "faulty_range_server.py")
    module.Handler.disable_nagle_algorithm = True  # headers and body are written apart
    module.Listener.serve_forever = lambda self, _: socketserver.BaseServer.serve_forever(self, 0.005)
    return module


@pytest.fixture
def hub(range_server, monkeypatch) -> Iterator[Callable[..., object]]:
    """`hub(directory, mode, **args)` starts a hub stand-in that HF_ENDPOINT points to until the test ends."""
    running = []

    def start(root: Path, mode: str = "ok", **args: object):
        server = range_server.FaultServer(root=str(root), mode=mode, args={k: str(v) for k, v in args.items()})
        server.__enter__()
        running.append(server)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        return server

    yield start
    for server in running:
        server.__exit__(None, None, None)


@pytest.fixture(scope="session")
def open_model(tmp_path_factory) -> Callable[..., object]:
    """`open_model(model, **keywords)` is deltafin.open with one cache for the whole run."""
    import deltafin

    cache = tmp_path_factory.mktemp("cache")

    def open_(model: str | Path, **keywords: object):
        return deltafin.open(model, **{"cache_dir": cache, **keywords})

    return open_


@pytest.fixture
def command(tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`command("df-run", "demo", ..)` runs an installed command in a process of its own, with a fresh cache."""

    def run(name: str, *args: object, cache: Path | None = None, **keywords) -> subprocess.CompletedProcess[str]:
        program = Path(sys.executable).with_name(name)
        words = [str(program), *map(str, args)]
        env = {**os.environ, "DELTAFIN_CACHE": str(cache or tmp_path / "cache"), **keywords.pop("env", {})}
        return subprocess.run(words, capture_output=True, text=True, timeout=240, env=env, **keywords)

    return run


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Callable[[int, str], Path]]:
    """`small_disk(nbytes, name)` mounts a tmpfs of that size; skips where nobody may mount."""
    mounted: list[Path] = []

    def mount(nbytes: int, name: str) -> Path:
        where = tmp_path / name
        where.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(where)]
        try:
            subprocess.run(words, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no tmpfs can be mounted here")
        mounted.append(where)
        return where

    yield mount
    for where in mounted:
        subprocess.run(["umount", "-l", str(where)], check=True)
