"""Reads the file of a state: the header first, and not a byte further if anything in it is not as it must be."""

from __future__ import annotations

import json
import os
import stat
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import xxhash

from deltafin.errors import BadRequest, Corrupt, DeltafinError, NotFound
from deltafin.indexer import ModelConfig, disk_error
from deltafin.runtime.states.identifying import VERSION, Identity
from deltafin.runtime.states.layout import (
    DIGEST_NBYTES,
    MAGIC,
    MOST_JSON_NBYTES,
    PREFIX,
    Ids,
    LayerState,
    encode_json,
    header,
    layer_bytes,
    new_layer,
    pieces,
    sizes,
)

_ADVICE = "give another one, or compute the state again from its text"
_SHOWN = 80  # characters of what a file says


class StateReader:
    """A state's file, open, with a header that fits the model and digests that fit the header.

    Opening allocates no more than the ids take; `layers` is what takes memory. `advice` ends a complaint about damage.
    Raises NotFound, BadRequest (of another model, spine, arithmetic or format), Corrupt (damaged, cut short, or no
    state at all) and DiskError, and so do its methods.
    """

    def __init__(
        self,
        path: Path,
        identity: Identity,
        config: ModelConfig,
        *,
        follow_links: bool = True,
        advice: str = _ADVICE,
    ) -> None:
        self.path = path
        self._advice = advice
        self._config = config
        self._file = _opened(path, follow_links)
        try:
            self.nbytes = os.fstat(self._file.fileno()).st_size
            self.ids, self.pending, self._digests = self._read_head(identity)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def layers(self) -> tuple[LayerState, ...]:
        """Every layer in memory of its own, each compared with its digest. Once."""
        if hasattr(os, "posix_fadvise"):  # reads ahead further
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        found = []
        for layer, wanted in enumerate(self._digests):
            state = new_layer(self._config, layer, len(self.ids))
            digest = xxhash.xxh3_128()
            for view in layer_bytes(state):
                for piece in pieces(view):
                    self._fill(piece)
                    digest.update(piece)
            if digest.digest() != wanted:
                raise Corrupt(f"{self.path}: layer {layer} of this state does not match its digest; {self._advice}")
            found.append(state)
        return tuple(found)

    def touch(self) -> None:
        """Notes that it was used, for whoever throws the least recently used away."""
        try:
            os.utime(self._file.fileno())
        except OSError:
            pass  # a place that is only read: nothing is thrown away there either

    def _read_head(self, identity: Identity) -> tuple[Ids, Ids, list[bytes]]:
        prefix = self._read(PREFIX.size)
        magic, version, text_nbytes, text_digest = PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise Corrupt(f"{self.path}: this is no state of Deltafin; {self._advice}")
        if version != VERSION:
            raise BadRequest(
                f"{self.path}: a state in format {version}, and this Deltafin reads format {VERSION}; "
                "use the Deltafin that wrote it, or compute the state again from its text"
            )
        if text_nbytes > MOST_JSON_NBYTES:
            raise Corrupt(f"{self.path}: the header of this state is damaged; {self._advice}")
        text = self._read(text_nbytes)
        if xxhash.xxh3_128(text).digest() != text_digest:
            raise Corrupt(f"{self.path}: the header of this state is damaged; {self._advice}")
        tokens, pending = self._check_header(text, identity)
        size = sizes(len(prefix) + len(text), self._config, tokens, pending)
        if self.nbytes != size.whole:
            found = f"{self.nbytes:,} bytes, and a state of {tokens:,} tokens has {size.whole:,}"
            raise Corrupt(f"{self.path}: {found}; {self._advice}")
        ids = self._read(size.ids)
        self._file.seek(size.layers, os.SEEK_CUR)
        digests = self._read(size.digests)
        self._file.seek(size.head + size.ids)
        if xxhash.xxh3_128(prefix + text + ids + digests[:-DIGEST_NBYTES]).digest() != digests[-DIGEST_NBYTES:]:
            raise Corrupt(f"{self.path}: the ids or the digests of this state are damaged; {self._advice}")
        array = np.frombuffer(ids, "<u4")
        if int(array.max()) >= self._config.vocab_size:
            raise Corrupt(f"{self.path}: this state holds ids outside the vocabulary of the model; {self._advice}")
        ends = range(0, len(digests) - DIGEST_NBYTES, DIGEST_NBYTES)
        return array[:tokens], array[tokens:], [digests[at : at + DIGEST_NBYTES] for at in ends]

    def _check_header(self, text: bytes, identity: Identity) -> tuple[int, int]:
        """How many tokens the state has, and how many are pending, if it is one that this model can go on from."""
        try:
            found = json.loads(text)
            if not isinstance(found, dict) or encode_json(found) != text:
                raise ValueError
            model, tokens, pending = found.pop("model"), found["tokens"], found["pending"]
            if not isinstance(model, str) or type(tokens) is not int or type(pending) is not int:
                raise ValueError
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise Corrupt(f"{self.path}: the header of this state makes no sense; {self._advice}") from None
        wanted = header(identity, self._config, tokens, pending)
        if found != wanted:
            raise self._foreign(found, wanted, model, identity.weights.model)
        most = self._config.max_positions
        if not 1 <= tokens <= most or not 0 <= pending <= most:
            raise Corrupt(
                f"{self.path}: a state of {_shown(tokens)} tokens and {_shown(pending)} more; the model has {most:,} "
                f"positions; {self._advice}"
            )
        return tokens, pending

    def _foreign(self, found: dict[str, object], wanted: dict[str, object], model: str, ours: str) -> DeltafinError:
        """Why the state cannot be gone on from: the first thing that differs, and what would help."""
        differs = {key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key)}
        if differs & {"shards", "config"}:
            return BadRequest(f"{self.path}: a state of {_shown(model)}, not of {ours}; use it with its own model")
        if "changed" in differs:
            return BadRequest(
                f"{self.path}: a state of {ours}, whose shards were written to or copied since; compute the state "
                "again from its text (cp -p and rsync -t keep the times that tell)"
            )
        if "arithmetic" in differs:
            return BadRequest(
                f"{self.path}: a state of arithmetic {_shown(found.get('arithmetic'))}, and this Deltafin computes "
                f"with {wanted['arithmetic']}; use the Deltafin that wrote it, or compute the state again from its text"
            )
        if "spine" in differs:
            theirs = _shown(found.get("spine"))
            return BadRequest(
                f"{self.path}: a state of the {theirs} spine, and this model is open with {wanted['spine']}; "
                f"open it with --spine {theirs.split(' ')[0]}, or compute the state again from its text"
            )
        return Corrupt(f"{self.path}: the shapes of this state are not those of {ours}; {self._advice}")

    def _read(self, nbytes: int) -> bytes:
        data = bytearray(min(nbytes, max(0, self.nbytes - self._file.tell())))
        if len(data) < nbytes:
            raise Corrupt(f"{self.path}: {self.nbytes:,} bytes are no whole state; {self._advice}")
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        try:
            while len(view):
                count = self._file.readinto(view)
                if not count:
                    raise Corrupt(f"{self.path}: this state became shorter while it was read; {self._advice}")
                view = view[count:]
        except OSError as e:
            raise disk_error(e, self.path, "cannot read the state") from None


def _opened(path: Path, follow_links: bool) -> FileIO:
    # A pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        raise NotFound(f"{path}: no such state; give a file that --save-state wrote") from None
    except OSError as e:
        raise disk_error(e, path, "cannot read the state") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadRequest(f"{path}: not a file; give one that --save-state wrote")
    return FileIO(fd, "rb")


def _shown(value: object) -> str:
    """What a file says, short and in one line."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 2] + ".."
