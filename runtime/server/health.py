"""Whether answers can be expected: the truth about the engine, not about the process."""

from __future__ import annotations

from typing import Literal

from deltafin.runtime.server.engine import Engine
from deltafin.runtime.server.services import Services

Status = Literal["ok", "stalled", "failed", "stopping"]
STALLED_S = 600.0  # a layer of K3 comes within seconds even from a slow drive, over the network within minutes


def health_of(services: Services) -> tuple[int, dict[str, object]]:
    """A status of HTTP, 200 only if all is well, and what there is to tell."""
    engine = services.engine
    status = status_of(engine)
    told: dict[str, object] = {
        "status": status,
        "model": services.serving.name,
        "engine_alive": engine.alive,
        "since_last_layer_s": round(engine.still_s, 1),
        "running": engine.running,
        "waiting": engine.waiting,
        "missing_experts": services.missing.count,
    }
    return (200 if status == "ok" else 503), told


def status_of(engine: Engine) -> Status:
    if engine.error is not None:
        return "failed"
    if engine.stopping:
        return "stopping"
    if not engine.alive:
        return "failed"
    return "stalled" if engine.still_s > STALLED_S else "ok"
