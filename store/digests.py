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
        """What is on record of a span's content, whether or not the object is there."""
        key = self.key(span)
        return next((entry for root in self._roots if (entry := root.log.entries.get(key)) is not None), None)

    def contradiction(self, span: Span, view: memoryview) -> str | None:
        """Why `view` cannot be the span's bytes by what is on record, or None."""
        key = self.key(span)
        for root in self._roots:
            known = root.log.entries.get(key)
            if known is not None and hashlib.sha256(view).digest() != known.sha256:
                return f"the bytes contradict the digest on record in {root.log.path} (df-fetch rm forgets it)"
        return None


def _shard_id(catalog: Catalog, number: int) -> bytes:
    """32 bytes that name a shard's content: its published SHA-256, else where and what it is."""
    shard, location = catalog.shards[number], catalog.location
    if shard.sha256 is not None:
        return bytes.fromhex(shard.sha256)
    parts = (location.repo or "", location.commit or "", shard.name, str(shard.nbytes), shard.header_sha256)
    return hashlib.sha256("\n".join(("deltafin shard", *parts, shard.etag or "")).encode()).digest()
