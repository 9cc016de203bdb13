"""A sequence in a file that somebody names: `save_state` and `load_state`."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import abc
from dataclasses import dataclass
from pathlib import Path

from deltafin.errors import BadRequest
from deltafin.indexer import discard, disk_error, make_directory, stale_files, temporary
from deltafin.runtime.model import Model
from deltafin.runtime.sequence import Sequence
from deltafin.runtime.states.identifying import identity
from deltafin.runtime.states.layout import LayerState, ids_array
from deltafin.runtime.states.reading import StateReader
from deltafin.runtime.states.writing import StateWriter, new_part


def check_place(path: str | Path, model: Model) -> None:
    """Whether `save_state` will be able to write there; for whoever would only know after hours of computing.

    Leaves nothing there but the folder. Raises BadRequest, NoSpace or DiskError.
    """
    path = Path(path)
    identity(model)
    _refuse(path)
    part = temporary(path.parent, path.name)
    try:
        make_directory(path.parent)
        os.close(new_part(part))
    except OSError as e:
        raise disk_error(e, path) from None
    finally:
        discard(part)


def save_state(path: str | Path, model: Model, seq: Sequence, pending: abc.Sequence[int] = ()) -> int:
    """Writes what `seq` has seen and remembers to a file, which only its owner may read; returns its bytes.

    `pending` are tokens to feed before anything else is: the last one chosen, which no pass has read yet.
    The file appears whole or not at all; one that is there is replaced then. Raises BadRequest, NoSpace or DiskError.
    """
    path = Path(path)
    which = identity(model)
    if seq.owner is not model:
        raise BadRequest("the sequence belongs to another model; save it with its own")
    if not len(seq):
        raise BadRequest(f"{path}: nothing to save: the sequence has seen no token yet")
    _refuse(path)
    _clear(path)
    ids = ids_array(seq.ids, model.config)
    writer = StateWriter(path, path.parent, which, model.config, ids, ids_array(pending, model.config))
    try:
        for layer, state in enumerate(layers_of(seq)):
            writer.layer(layer, state)
        writer.publish()
    finally:
        writer.discard()
    return writer.nbytes


@dataclass(frozen=True, slots=True)
class Saved:
    """A sequence, and the tokens that are to be fed to it before anything else."""

    seq: Sequence
    pending: tuple[int, ...]


def load_state(path: str | Path, model: Model) -> Saved:
    """The sequence that was saved; it goes on as if it had never stopped, and needs the file no more.

    Raises NotFound, BadRequest (of another model, spine, arithmetic or format), Corrupt, DiskError or NoMemory.
    """
    which = identity(model)
    with StateReader(Path(path), which, model.config) as reader:
        return Saved(restore_from(reader, model), tuple(reader.pending.tolist()))


def restore_from(reader: StateReader, model: Model) -> Sequence:
    """The sequence of a file whose header is good. Raises NoMemory before anything is read; then as the reader does."""
    model.make_room(len(reader.ids))
    return model.restore(reader.ids.tolist(), reader.layers())


def layers_of(seq: Sequence) -> tuple[LayerState, ...]:
    state = seq.state
    assert isinstance(state, tuple)
    return state


def _refuse(path: Path) -> None:
    """What is there and is no file is not replaced."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as e:
        raise disk_error(e, path) from None
    except ValueError:  # a null byte, or a character that names of files cannot have
        raise BadRequest(f"{path}: no file can be called that; choose another name") from None
    if not stat.S_ISREG(mode):
        raise BadRequest(f"{path}: not a file; a state is written to a file of its own")


def _clear(path: Path) -> None:
    """Removes what killed writers of this very file left behind."""
    for stale in stale_files(path.parent):
        if stale.name.startswith(f".{path.name}."):
            with contextlib.suppress(OSError):
                discard(stale)
