"""Pins: experts that are never evicted. One small JSON file for each model in the cache, `pins/`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from deltafin.errors import DiskError
from deltafin.indexer import Catalog, discard, disk_error, make_directory, publish, read_small, temporary
from deltafin.store.heat import model_file

FOLDER = "pins"
_MOST_NBYTES = 16 << 20
Pair = tuple[int, int]  # layer, expert


class Pins:
    """The pinned experts of one model. Unlike heat a damaged file is an error: nothing is evicted on its word."""

    def __init__(self, cache: Path, catalog: Catalog) -> None:
        self.path = model_file(cache, FOLDER, catalog.identity, "json")
        self._identity = catalog.identity
        self._layers = frozenset(catalog.config.moe_layers)
        self._experts = catalog.config.num_experts

    def read(self) -> set[Pair]:
        """All pinned experts. Raises DiskError."""
        try:
            known = json.loads(read_small(self.path, _MOST_NBYTES))
            if known["version"] != 1 or known["model"] != self._identity:
                raise ValueError
            pairs = {(int(layer), number) for layer, numbers in known["experts"].items() for number in numbers}
        except FileNotFoundError:
            return set()
        except OSError as e:
            raise disk_error(e, self.path, "cannot read the pins") from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise DiskError(f"{self.path}: damaged; remove it and pin again, nothing is evicted meanwhile") from None
        if not all(la in self._layers and type(e) is int and 0 <= e < self._experts for la, e in pairs):
            raise DiskError(f"{self.path}: damaged; remove it and pin again, nothing is evicted meanwhile")
        return pairs

    def stamp(self) -> tuple[int, int] | None:
        """Changes whenever the file does; one stat."""
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino

    def add(self, pairs: Iterable[Pair]) -> int:
        """Pins experts; returns how many were not pinned yet. Raises NoSpace or DiskError."""
        before = self.read()
        after = before | set(pairs)
        if after != before:
            self._write(after)
        return len(after) - len(before)

    def remove(self, pairs: Iterable[Pair]) -> int:
        """Unpins experts; returns how many were pinned. Raises NoSpace or DiskError."""
        before = self.read()
        after = before - set(pairs)
        if after != before:
            self._write(after)
        return len(before) - len(after)

    def _write(self, pairs: set[Pair]) -> None:
        experts: dict[str, list[int]] = {}
        for layer, number in sorted(pairs):
            experts.setdefault(str(layer), []).append(number)
        text = json.dumps({"version": 1, "model": self._identity, "experts": experts})
        part = temporary(self.path.parent, self.path.name)
        try:
            make_directory(self.path.parent)
            part.write_text(text + "\n")
            publish(part, self.path)
        except OSError as e:
            raise disk_error(e, self.path) from None
        finally:
            discard(part)
