"""What is known of the content of each span: what any root's log has on record."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from deltafin.indexer import Catalog, Span
from deltafin.store.objectlog import ObjectEntry, span_key
from deltafin.store.roots import Root


class Digests:
    """Names spans and knows their digests. Thread-safe."""

    def __init__(self, catalog: Catalog, roots: Sequence[Root]) -> None:
        self.shard_ids = tuple(_shard_id(catalog, i) for i in range(len(catalog.shards)))
        self._roots = roots

    def key(self, span: Span) -> bytes:
        """How object logs name a span: independent of catalogs, paths and hosts."""
        return span_key(self.shard_ids[span.shard], span.offset, span.nbytes)

    def known(self, span: Span) -> ObjectEntry | None:
        """What is on record of a span's content, whether or not the object is there; rather what is proven."""
        key = self.key(span)
        first = None
        for root in self._roots:
            if (entry := root.log.entries.get(key)) is None:
                continue
            if entry.proven:
                return entry
            first = first or entry
        return first

    def disproves(self, span: Span, entry: ObjectEntry) -> bool:
        """Whether a root's record of a span contradicts what another root knows to be proven."""
        if entry.proven or len(self._roots) == 1:
            return False
        known = self.known(span)
        return known is not None and known.proven and known.sha256 != entry.sha256

    def contradiction(self, span: Span, view: memoryview, *, unproven: bool = True) -> str | None:
        """Why `view` cannot be the span's bytes by what is on record, or None; without `unproven` by what is proven."""
        key = self.key(span)
        entries = [(root, entry) for root in self._roots if (entry := root.log.entries.get(key)) is not None]
        if proven := [(root, entry) for root, entry in entries if entry.proven]:
            entries = proven
        elif not unproven:
            return None
        if not entries:
            return None
        digest = hashlib.sha256(view).digest()
        for root, entry in entries:
            if digest != entry.sha256:
                what, advice = ("digest on record", " (df-fetch rm forgets it)")
                if entry.proven:
                    what, advice = "proven digest on record", ""
                return f"the bytes contradict the {what} in {root.log.path}{advice}"
        return None


def _shard_id(catalog: Catalog, number: int) -> bytes:
    """32 bytes that name a shard's content: its published SHA-256, else where and what it is."""
    shard, location = catalog.shards[number], catalog.location
    if shard.sha256 is not None:
        return bytes.fromhex(shard.sha256)
    parts = (location.repo or "", location.commit or "", shard.name, str(shard.nbytes), shard.header_sha256)
    return hashlib.sha256("\n".join(("deltafin shard", *parts, shard.etag or "")).encode()).digest()
