"""Writes the file of a state, layer by layer; it appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import xxhash

from deltafin.errors import NoSpace
from deltafin.indexer import ModelConfig, discard, disk_error, make_directory, publish, temporary
from deltafin.runtime.states.identifying import Identity
from deltafin.runtime.states.layout import (
    Ids,
    LayerState,
    head_bytes,
    layer_bytes,
    layer_nbytes,
    pieces,
    sizes,
)
from deltafin.store import free_nbytes

_MODE = 0o600  # it holds what was said in private


def new_part(part: Path) -> int:
    """Makes and opens a temporary file that only its owner may read; its descriptor."""
    return os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)


class StateWriter:
    """One state on its way to `final`: every layer in ascending order, then `publish`, or `discard`.

    Written under a temporary name in `folder`, of the same file system. Layers are hashed and written as they come;
    nothing of them is kept. Everything here raises NoSpace or DiskError, and then `discard` is what is left to do.
    """

    def __init__(
        self, final: Path, folder: Path, identity: Identity, config: ModelConfig, ids: Ids, pending: Ids | None = None
    ) -> None:
        """The state after `ids`; `pending` are to be fed before anything else is."""
        waiting = 0 if pending is None else len(pending)
        head = head_bytes(identity, config, len(ids), waiting)
        self.final = final
        self.nbytes = sizes(len(head), config, len(ids), waiting).whole
        self._config, self._tokens = config, len(ids)
        self._digests: list[bytes] = []
        self._all = xxhash.xxh3_128()  # of everything but the layers themselves
        self._part = temporary(folder, final.name)
        try:
            make_directory(folder)
            self._check_space(folder)
            self._file = FileIO(new_part(self._part), "wb")
        except OSError as e:
            raise disk_error(e, final) from None
        try:
            self._write([memoryview(head), ids.view("u1").data], self._all)
            if pending is not None:
                self._write([pending.view("u1").data], self._all)
        except BaseException:
            self.discard()
            raise

    def layer(self, layer: int, state: LayerState) -> None:
        """The next layer; its arrays are only read during the call."""
        assert layer == len(self._digests), f"layer {layer} after {len(self._digests)} layers"
        views = layer_bytes(state)
        nbytes = layer_nbytes(self._config, layer, self._tokens)
        assert sum(map(len, views)) == nbytes, f"layer {layer} is not one of {self._tokens} tokens"
        digest = xxhash.xxh3_128()
        self._write(views, digest)
        self._digests.append(digest.digest())

    @property
    def complete(self) -> bool:
        """Whether every layer has come."""
        return len(self._digests) == self._config.num_layers

    def publish(self) -> None:
        """Makes the file appear; on return it survives a power cut."""
        assert self.complete
        self._write([memoryview(b"".join(self._digests))], self._all)
        self._write([memoryview(self._all.digest())], None)
        try:
            self._file.close()
            make_directory(self.final.parent)
            publish(self._part, self.final)
        except OSError as e:
            raise disk_error(e, self.final) from None

    def discard(self) -> None:
        """Lets go of an unfinished file; after `publish` it does nothing."""
        self._file.close()
        discard(self._part)

    def _check_space(self, folder: Path) -> None:
        """Before half of it is written: a full disk stops others, too."""
        if (free := free_nbytes(folder)) < self.nbytes:
            raise NoSpace(
                f"{self.final}: the state of {self._tokens:,} tokens takes {self.nbytes:,} bytes, and {free:,} are "
                "free there; free some space or choose another place"
            )

    def _write(self, views: Sequence[memoryview], digest: xxhash.xxh3_128 | None) -> None:
        try:
            for piece in (piece for view in views for piece in pieces(view)):
                if digest is not None:
                    digest.update(piece)
                while len(piece):
                    piece = piece[self._file.write(piece) :]
        except OSError as e:
            raise disk_error(e, self.final) from None
