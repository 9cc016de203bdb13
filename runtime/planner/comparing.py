"""A run compared with its plan: from figures that were measured before, without measuring anything."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

from deltafin.cext import _math
from deltafin.errors import DeltafinError
from deltafin.indexer import K3_REPO
from deltafin.runtime.model import Model
from deltafin.runtime.planner.machine import Figures, together
from deltafin.runtime.planner.remembered import Outcome, add_outcome, load_figures
from deltafin.runtime.planner.shape import model_shape
from deltafin.runtime.planner.timing import PassTime, Rates, token_time
from deltafin.store import DIRECT_FROM_NBYTES

log = logging.getLogger(__name__)


def predict_tokens(
    model: Model, figures: Figures, *, first: int, count: int, drive: float | None = None
) -> PassTime | None:
    """The average of `count` tokens after `first` rows, for a model as it is open; None where the figures do not do.

    It uses which drives have brought bytes so far, but no time that was taken. `drive` is the rate of all drives
    together where it is known otherwise.
    """
    plan = model.memory
    drive = drive or _drive_rate(model, figures)
    if plan is None or drive is None:
        return None
    catalog = model.store.catalog
    shape = model_shape(catalog, packs=model.packs, published_skew=catalog.location.repo == K3_REPO)
    return token_time(shape, plan, Rates(figures.kernels, figures.overheads, drive), first=first, count=count)


def compare(
    model: Model,
    cache: Path,
    command: str,
    *,
    rows: int,
    tokens: int,
    measured_s: float,
    drive: float | None = None,
) -> tuple[Outcome, PassTime] | None:
    """What a plan would have said of a run's tokens, beside the `measured_s` that they took on average.

    `tokens` of one row each came after `rows` rows. It is noted in the cache's `plans.json`. None, and nothing noted,
    where nothing was measured of this machine, bytes came over the network, or there are no such tokens.
    """
    if tokens < 1 or model.store.stats.snapshot()["http_nbytes"]:
        return None
    figures = load_figures(cache, isa=_math.isa(), threads=_math.threads(), fresh_s=math.inf)
    if figures is None:
        return None
    predicted = predict_tokens(model, figures, first=rows, count=tokens, drive=drive)
    if predicted is None:
        return None
    identity = model.store.catalog.identity
    outcome = Outcome(time.time(), command, identity, tokens, predicted.total_s, measured_s)
    try:
        add_outcome(cache, outcome)
    except DeltafinError as e:
        log.warning("%s; this run is not remembered for df-plan", e)
    return outcome, predicted


def _drive_rate(model: Model, figures: Figures) -> float | None:
    """Bytes a second of the drives that bring this model; infinite where its files are small and stay in memory."""
    small = model.store.catalog.expert_nbytes < DIRECT_FROM_NBYTES
    rates: list[float] = []
    brought: list[int] = []
    for drive in model.store.drives:
        if drive.stats.nbytes == 0:
            continue
        rate = drive.rate or (math.inf if small else _measured(drive.path, figures))
        if rate is None:
            return None
        rates.append(rate)
        brought.append(drive.stats.nbytes)
    if not rates:
        return math.inf
    return math.inf if math.inf in rates else together(rates, brought)


def _measured(path: Path, figures: Figures) -> float | None:
    try:
        return figures.rate_of(str(path.absolute()), path.stat().st_dev)
    except OSError:
        return None
