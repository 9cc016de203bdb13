"""Where fetched spans are kept: in the writable root that has room and evens out a layer's reads."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Sequence

from deltafin.errors import Corrupt, DeltafinError, DiskError, NoSpace
from deltafin.indexer import Catalog, Span
from deltafin.store.digests import Digests
from deltafin.store.eviction import Evictor
from deltafin.store.objectlog import ObjectEntry
from deltafin.store.roots import Root

log = logging.getLogger(__name__)

_SPINE = -1  # stands for the layer of everything that is no expert


class Keeper:
    """Publishes spans to one of several roots. Thread-safe.

    Of the roots with room the one is chosen whose drive would be through first with what it holds of the span's layer:
    so the bytes of each layer go to drives in proportion to their rates. A root that turns out to be full or broken is
    passed over from then on, with a line.
    """

    def __init__(self, catalog: Catalog, roots: Sequence[Root], digests: Digests, evictor: Evictor) -> None:
        self._catalog = catalog
        self._roots = tuple(root for root in roots if root.space is not None)
        self._digests = digests
        self._evictor = evictor
        self._lock = threading.Lock()
        self._layers: dict[int, dict[Root, int]] = {}  # bytes of a layer's experts in each root
        self._failed: dict[Root, DeltafinError] = {}

    def room(self) -> int:
        """Bytes that all roots together may take, without evicting anything."""
        return sum(self._space_room(root) for root in self._usable())

    def publish(
        self, span: Span, view: memoryview, expert: tuple[int, int] | None, *, evict: bool = False
    ) -> ObjectEntry | None:
        """Keeps the bytes of a span. With `evict` colder experts make room for an expert where all is full; None then
        means that it was too cold itself. Raises NoSpace or DiskError when no root takes it.
        """
        layer = _SPINE if expert is None else expert[0]
        tried: set[Root] = set()
        while (root := self._choose(layer, len(view), tried)) is not None:
            if (entry := self._publish(root, span, view, layer)) is not None:
                if expert is not None:
                    with self._lock:
                        self._evictor.kept(root, entry, expert, self._digests.key(span))
                return entry
            tried.add(root)
        if evict and expert is not None:
            for root in self._usable():
                with self._lock:
                    made = root not in tried and self._evictor.make_room(root, len(view), expert)
                    made = made and self._space_take(root, len(view))
                if made and (entry := self._publish(root, span, view, layer)) is not None:
                    with self._lock:
                        self._evictor.kept(root, entry, expert, self._digests.key(span))
                    return entry
            if any(root.space is not None and root.space.limits.budget is not None for root in self._usable()):
                return None
        raise self._refusal()

    def renew(self, span: Span, view: memoryview) -> ObjectEntry | None:
        """Keeps bytes that came once more where the same object is: a damaged one is replaced. None if none is.

        Raises NoSpace or DiskError.
        """
        key, digest = self._digests.key(span), hashlib.sha256(view).digest()
        for root in self._usable():
            if (known := root.log.entries.get(key)) is not None and known.sha256 == digest and root.has(known):
                return root.publish(key, view)
        return None

    def forget_others(self, span: Span, entry: ObjectEntry) -> None:
        """Takes back what roots have on record of a span, unproven, that is not `entry`, which came later."""
        key = self._digests.key(span)
        for root in self._usable():
            known = root.log.entries.get(key)
            if known is not None and not known.proven and known.sha256 != entry.sha256:
                root.log.forget(key)

    def read(self, span: Span, view: memoryview) -> bool:
        """Fills `view` with a span that any process has kept by now; False if none has, or it cannot be read.

        What contradicts a proven digest of another root does not count.
        """
        key = self._digests.key(span)
        for root in self._usable():
            try:
                root.log.refresh_if_grown()
                if (entry := root.find(key)) is not None and not self._digests.disproves(span, entry):
                    root.read_part(entry, 0, view)
                    return True
            except (Corrupt, DiskError):
                continue  # it is fetched again and replaced
        return False

    def _usable(self) -> list[Root]:
        """Looked at each time: in place of a drive that was unplugged a root must not be made on the disk below."""
        return [root for root in self._roots if not root.presence.look() and root not in self._failed]

    def _choose(self, layer: int, nbytes: int, tried: set[Root]) -> Root | None:
        """The best root that has room, which is promised to the caller."""
        usable = [root for root in self._usable() if root not in tried]
        if len(usable) > 1:
            with self._lock:
                held = self._held(layer)
                usable.sort(key=lambda root: (held[root] + nbytes) / root.drive.expected_rate)
                held[usable[0]] += nbytes  # already for the next one, who may come before this is written
        chosen = next((root for root in usable if self._space_take(root, nbytes)), None)
        if len(usable) > 1 and chosen is not usable[0]:
            self._move(layer, nbytes, usable[0], chosen)
        return chosen

    def _move(self, layer: int, nbytes: int, source: Root, target: Root | None) -> None:
        """Bytes that were counted for one root are another's, or nobody's."""
        with self._lock:
            held = self._layers.get(layer, {})
            if source in held:
                held[source] -= nbytes
            if target in held:
                held[target] += nbytes

    def _held(self, layer: int) -> dict[Root, int]:
        """What each root has of a layer's experts by its log; counted once, then kept up."""
        if layer not in self._layers:
            held = dict.fromkeys(self._roots, 0)
            if layer != _SPINE:
                for span in self._catalog.expert_spans(layer, range(self._catalog.config.num_experts)):
                    key = self._digests.key(span)
                    for root in self._roots:
                        entry = root.log.entries.get(key)  # of what is not held only the digest is there
                        held[root] += span.nbytes * (entry is not None and entry.held)
            self._layers[layer] = held
        return self._layers[layer]

    def _publish(self, root: Root, span: Span, view: memoryview, layer: int) -> ObjectEntry | None:
        """None, with a line, if the root is full or broken after all; the last root's error is the caller's to say."""
        assert root.space is not None
        try:
            entry = root.publish(self._digests.key(span), view)
        except BaseException as e:
            root.space.give_back(len(view))  # before anything else: others may be waiting for it
            self._move(layer, len(view), root, None)
            if not isinstance(e, NoSpace | DiskError):
                raise
            self._pass_over(root, e)
            return None
        root.space.wrote(len(view))
        return entry

    def _pass_over(self, root: Root, error: NoSpace | DiskError) -> None:
        """Several threads may find out at once; it is said once, and not at all if there is nowhere else to go."""
        with self._lock:
            first = root not in self._failed
            self._failed[root] = error
            others = any(self._space_room(other) for other in self._usable())
        if isinstance(error, DiskError) and root.presence.failed(error.errno):
            return  # which was said
        if first and others:
            log.warning("%s; going on in the other roots", error)

    def _refusal(self) -> DeltafinError:
        """Why nothing takes it: the first full root's reason, or what failed."""
        usable = self._usable()
        if usable and usable[0].space is not None:
            return usable[0].space.full()
        if self._failed:
            return next(iter(self._failed.values()))
        return NoSpace("every root that may be written to is gone; bring one back or choose another --cache-dir")

    @staticmethod
    def _space_room(root: Root) -> int:
        return root.space.room() if root.space is not None else 0

    @staticmethod
    def _space_take(root: Root, nbytes: int) -> bool:
        return root.space is not None and root.space.take(nbytes)
