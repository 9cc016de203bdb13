"""What does a token cost here? Seconds by cause, bytes asked of the store and of the device, one pass after another.

Written for the stand-in of Kimi K3's full shape (`store.make_standin`), but any open model will do.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deltafin.runtime.clock import LayerTimes
from deltafin.runtime.model import Model
from deltafin.runtime.observer import LayerProgress


@dataclass(frozen=True, slots=True)
class TokenCost:
    """One pass of one row: what it took to know the token that follows."""

    id: int
    wall_s: float
    expert_nbytes: int
    spine_nbytes: int  # of the layers and the final norms, as stored
    head_nbytes: int
    row_nbytes: int  # of the embedding
    read_nbytes: int  # of all that, what was not in memory
    device_nbytes: int | None  # read from the device for this process, not from the page cache; None if unknown
    head_s: float
    parts: LayerTimes  # sums over the layers


@dataclass(frozen=True, slots=True)
class Report:
    start_id: int
    tokens: tuple[TokenCost, ...]
    peak_rss_nbytes: int  # of the process so far


def measure(
    model: Model, *, tokens: int, start_id: int | None = None, progress: Callable[[int], None] = lambda layers: None
) -> Report:
    """Continues one token greedily, past end tokens; `progress` counts layers over all passes."""
    start_id = model.config.bos_id if start_id is None else start_id
    costs: list[TokenCost] = []
    before = _Counters.now(model)
    generated = model.generate(
        model.sequence(), [start_id], max_new=tokens, stop_ids=(), observer=LayerProgress(progress)
    )
    for token in generated:
        after = _Counters.now(model)
        costs.append(before.cost(after, token, model))
        before = after
    return Report(start_id, tuple(costs), _peak_rss_nbytes())


@dataclass(frozen=True, slots=True)
class _Counters:
    at_s: float
    counts: dict[str, int]
    read_nbytes: int
    device_nbytes: int | None

    @classmethod
    def now(cls, model: Model) -> _Counters:
        return cls(time.monotonic(), model.store.stats.snapshot(), model.store.stats.read_nbytes, device_nbytes())

    def cost(self, after: _Counters, token: int, model: Model) -> TokenCost:
        known = self.device_nbytes is not None and after.device_nbytes is not None
        times = model.last_pass
        assert times is not None
        return TokenCost(
            id=token,
            wall_s=after.at_s - self.at_s,
            expert_nbytes=self._more(after, "expert_visits") * model.store.catalog.expert_nbytes,
            spine_nbytes=self._more(after, "spine_nbytes"),
            head_nbytes=self._more(after, "head_nbytes"),
            row_nbytes=self._more(after, "embedding_nbytes"),
            read_nbytes=after.read_nbytes - self.read_nbytes,
            device_nbytes=(after.device_nbytes or 0) - (self.device_nbytes or 0) if known else None,
            head_s=times.head_s,
            parts=times.sums(),
        )

    def _more(self, after: _Counters, name: str) -> int:
        return after.counts[name] - self.counts[name]


def device_nbytes() -> int | None:
    """Bytes that the system has read from devices for this process; None where it does not say."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["read_bytes"])
    except (OSError, KeyError, ValueError):
        return None


def _peak_rss_nbytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
