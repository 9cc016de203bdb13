"""Checkpoints to take apart, hubs that say more, less or worse than they should, and df-index without a new process."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest

from deltafin.indexer import Catalog, RetryPolicy, build_catalog, parse_model

ROOT = Path(__file__).resolve().parents[2]

# Insists as long as the real one, but never sleeps: a test that waits tests nothing.
QUICK = RetryPolicy(
    attempts=5,
    total_attempts=40,
    first_contact_attempts=2,
    backoff_s=0.005,
    max_backoff_s=0.02,
    max_pause_s=3.0,
    connect_timeout_s=2.0,
    read_timeout_s=20.0,
)


@dataclass(frozen=True)
class Stored:
    """A tensor in a shard, bytes and all."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def called(self, name: str) -> Stored:
        return replace(self, name=name)


class Checkpoint:
    """A copy of a checkpoint of which any part can be changed. It reads and writes shards with code of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, number: int) -> Path:
        return next(self.folder.glob(f"model-{number:05d}-of-*.safetensors"))

    def header(self, number: int) -> tuple[int, dict[str, dict]]:
        """Where the data starts, and the entries."""
        blob = self.path(number).read_bytes()
        (length,) = struct.unpack_from("<Q", blob)
        header = json.loads(blob[8 : 8 + length])
        header.pop("__metadata__", None)
        return 8 + length, header

    def tensors(self, number: int) -> list[Stored]:
        """In the order of their data."""
        start, header = self.header(number)
        blob = self.path(number).read_bytes()
        spans = sorted((e["data_offsets"], name) for name, e in header.items())
        return [
            Stored(name, header[name]["dtype"], tuple(header[name]["shape"]), blob[start + begin : start + end])
            for (begin, end), name in spans
        ]

    def write(self, number: int, tensors: list[Stored], data_start: int = 0) -> None:
        """`data_start` is where the data begins at the earliest; the header is padded up to there."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for t in tensors:
            header[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [at, at + len(t.data)]}
            at += len(t.data)
        text = json.dumps(header).encode()
        text += b" " * (data_start - 8 - len(text))
        self.path(number).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t.data for t in tensors))

    def edit(self, number: int, change: Callable[[list[Stored]], list[Stored]]) -> Path:
        self.write(number, change(self.tensors(number)))
        return self.path(number)

    def edit_config(self, change: Callable[[dict], object]) -> None:
        path = self.folder / "config.json"
        config = json.loads(path.read_bytes())
        change(config)
        path.write_text(json.dumps(config))


@pytest.fixture
def tiny_copy(tiny_dir, tmp_path) -> Checkpoint:
    """Nine layers of 16 experts; layer L is in shard L+1, the globals in 10, the vision stubs in 11 and 12."""
    return Checkpoint(Path(shutil.copytree(tiny_dir, tmp_path / "tiny")))


@pytest.fixture(scope="session")
def checkpoint() -> type[Checkpoint]:
    return Checkpoint


@pytest.fixture(scope="session")
def quick() -> RetryPolicy:
    return QUICK


@pytest.fixture(scope="session")
def impatient() -> Callable[[str], RetryPolicy]:
    """`impatient(mode)` waits for silent servers only as long as a test can, and for others as long as it takes."""
    return lambda mode: replace(QUICK, read_timeout_s=0.25) if mode == "stall" else QUICK


@pytest.fixture
def build(tmp_path) -> Callable[..., Catalog]:
    """`build(model)` indexes a directory or repository in this process and opens the catalog until the test ends."""
    opened: list[Catalog] = []

    def run(model: str | Path, name: str = "built", policy: RetryPolicy = QUICK, **keywords) -> Catalog:
        source = parse_model(str(model), tmp_path / "cache", name=name, **keywords).source(policy)
        path = tmp_path / "catalogs" / f"{name}.catalog"
        try:
            build_catalog(source, path, name)
        finally:
            source.close()
        opened.append(Catalog(path))
        return opened[-1]

    yield run
    for catalog in opened:
        catalog.close()


@dataclass(frozen=True)
class Ran:
    status: int
    stdout: str
    stderr: str

    @property
    def line(self) -> str:
        """The one line on stderr; anything else is a failure."""
        assert self.stderr.endswith("\n") and self.stderr.count("\n") == 1, self.stderr
        return self.stderr.strip()


@pytest.fixture
def df_index(tmp_path, monkeypatch, capsys) -> Iterator[Callable[..., Ran]]:
    """`df_index("build", "demo")` is the command's own entry point, called here: a process costs half a second."""
    from deltafin.cli import index_main

    logger = logging.getLogger("deltafin")
    before = list(logger.handlers), logger.propagate, logger.level
    monkeypatch.setenv("DELTAFIN_CACHE", str(tmp_path / "cache"))

    def run(*words: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["df-index", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            index_main()
        out, err = capsys.readouterr()
        return Ran(exit_.value.code, out, err)

    yield run
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


@pytest.fixture(scope="session")
def fault_tool() -> Callable[[str], ModuleType]:
    """A script of tests/faults by name; the folder is no package."""
    import importlib.util

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "faults" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def bad_shards(tmp_path_factory, fault_tool) -> Path:
    """The folder of tests/faults/bad_safetensors.py, with its manifest.json."""
    tool, out = fault_tool("bad_safetensors"), tmp_path_factory.mktemp("bad")
    maker = tool.Maker(str(out), 1)
    tool.build(maker)
    maker.finish()
    return out


@pytest.fixture(scope="session")
def certificate(tmp_path_factory) -> Path:
    """A certificate for loopback and its key in one file."""
    folder = tmp_path_factory.mktemp("tls")
    words = [
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
        "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", "key", "-out", "crt",
    ]  # fmt: skip
    try:
        subprocess.run(words, cwd=folder, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("openssl is not here to make a certificate")
    (folder / "both").write_bytes((folder / "key").read_bytes() + (folder / "crt").read_bytes())
    return folder / "both"


@pytest.fixture
def behave(range_server, monkeypatch) -> Callable[[str, Callable], None]:
    """`behave(name, answer)` teaches the hub stand-in another mode: `answer(handler, request)`."""
    return lambda name, answer: monkeypatch.setitem(range_server.MODES, name, answer)


@pytest.fixture
def listing(range_server, monkeypatch) -> Callable[..., None]:
    """From now on the hub lists sizes and digests as the real one does; `listing(lie)` lets `lie` edit the answer."""

    def entry(catalogue, name: str) -> dict:
        file = catalogue.find(name)
        raw = file.read(0, file.size)
        if name.endswith((".safetensors", ".model")):
            lfs = {"sha256": hashlib.sha256(raw).hexdigest(), "size": file.size, "pointerSize": 134}
            return {"rfilename": name, "size": file.size, "blobId": "c" * 40, "lfs": lfs}
        blob = hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()
        return {"rfilename": name, "size": file.size, "blobId": blob}

    def install(lie: Callable[[dict], object] = lambda answer: None) -> None:
        def api(handler, path):
            repo = "/".join(path.split("/")[3:5])
            siblings = [entry(handler.state.catalogue, n) for n in handler.state.catalogue.names()]
            answer = {"id": repo, "sha": handler.commit(), "siblings": siblings}
            answer = lie(answer) or answer
            handler.reply(200, {"Content-Type": "application/json"}, json.dumps(answer).encode(), False)

        monkeypatch.setattr(range_server.Handler, "_api", api)

    return install


@pytest.fixture(scope="session")
def k3_dir(tmp_path_factory, make_fullsize) -> Iterator[Path]:
    """Kimi K3 in full size, as sparse files."""
    folder = tmp_path_factory.mktemp("fullsize") / "Kimi-K3"
    make_fullsize.write(folder)
    yield folder
    for path in folder.iterdir():  # tools that copy or archive old temporary folders would not know the holes
        path.unlink()
