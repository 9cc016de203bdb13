"""The store answers one question: bring me these bytes.

Callers name spans, layers or experts and never see whether they came from an object in a root, from an
original shard read in place, or over HTTP. It promises that bytes which contradict a known digest are
never returned, that what it keeps appears whole or not at all, and that offline means no socket. It
knows nothing of arithmetic, tokens or sequences, and never imports torch.
"""

from deltafin.store.bulk import FetchPlan, fetch, free_nbytes, measure_rate, plan_fetch
from deltafin.store.check import Status, VerifyReport, nbytes_to_verify, read_status, removable, remove, verify
from deltafin.store.opening import default_cache, is_offline, open_catalog, open_store
from deltafin.store.selection import Item, all_items, expert_items, pair_items, parse_numbers, spine_items
from deltafin.store.stats import StoreStats
from deltafin.store.store import Store

__all__ = [
    "FetchPlan",
    "Item",
    "Status",
    "Store",
    "StoreStats",
    "VerifyReport",
    "all_items",
    "default_cache",
    "expert_items",
    "fetch",
    "free_nbytes",
    "is_offline",
    "measure_rate",
    "nbytes_to_verify",
    "open_catalog",
    "open_store",
    "pair_items",
    "parse_numbers",
    "plan_fetch",
    "read_status",
    "removable",
    "remove",
    "spine_items",
    "verify",
]
