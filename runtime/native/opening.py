"""Opens the native backend: threads, encoding of the spine, memory."""

from __future__ import annotations

import logging

from deltafin.cext import _math
from deltafin.errors import BadRequest, Missing
from deltafin.runtime.memory import MemoryPlan, Want, available_nbytes, default_budget, own_nbytes, plan_memory
from deltafin.runtime.native.passes import Native, matrices
from deltafin.store import PackFormat, PackSet, Store, spine_pieces, tune

log = logging.getLogger(__name__)

MOST_THREADS = 1024
RELEASED = "released"


def open_native(
    store: Store,
    ram: int | None,
    threads: int | None,
    want: Want | None,
    spine: str | PackSet | None,
    plan: MemoryPlan | None = None,
) -> Native:
    """A backend within `ram` bytes, or with a `plan` that was made before.

    Raises BadRequest where a setting makes no sense or too little fits.
    """
    if plan is not None and (ram is not None or want is not None):
        raise BadRequest("ram and want have no effect beside a plan; leave them out")
    if threads is not None:
        if not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
            raise BadRequest(f"threads is {threads!r}; expected 1 to {MOST_THREADS}")
        _math.set_threads(threads)
    config = store.catalog.config
    packs = choose_packs(store, spine)
    layers = spine_pieces(store.catalog, lambda layer: matrices(config, layer), packs)
    if plan is None:
        plan = plan_memory(_budget(ram), store.catalog, layers, want or Want(), _math.threads())
        if plan.total > (most := own_nbytes() + available_nbytes()):
            log.warning(
                "%.1f GB of memory are planned and %.1f GB available: expect swapping", plan.total / 1e9, most / 1e9
            )
    tune(store, plan.slots)
    return Native(store, layers, plan, packs)


def _budget(ram: int | None) -> int:
    if ram is None:
        return default_budget()
    if not isinstance(ram, int) or ram < 1:
        raise BadRequest(f"ram is {ram!r}; expected a number of bytes")
    return ram


def choose_packs(store: Store, spine: str | PackSet | None) -> PackSet | None:
    """The packs to use. Unasked, those that are as released and have most layers; of two complete sets the smaller."""
    if isinstance(spine, PackSet):
        return spine
    if spine == RELEASED:
        return None
    if spine is None:
        found = max((store.packs(f) for f in (PackFormat.BF12, PackFormat.BF16)), key=lambda packs: len(packs.packs))
        return found if found.packs else None
    try:
        asked = PackFormat(spine)
    except ValueError:
        raise BadRequest(f"spine is {spine!r}; expected {RELEASED}, {', '.join(PackFormat)}") from None
    packs, layers = store.packs(asked), store.catalog.config.num_layers
    if len(packs.packs) < layers:
        raise Missing(
            f"{len(packs.packs)} of {layers} layers of {store.model} are packed as {asked}; "
            f"run: df-fetch spine {store.model} --as {asked}"
        )
    return packs
