"""What the routes of the application answer with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deltafin.runtime.openai import Serving
from deltafin.runtime.server.engine import Engine
from deltafin.runtime.server.settings import Settings

if TYPE_CHECKING:
    from deltafin.runtime.server.batches import BatchService
    from deltafin.runtime.server.missing import MissingExperts


@dataclass(frozen=True, slots=True)
class Services:
    """Opened by whoever starts the server, and closed by them after its last answer."""

    engine: Engine
    serving: Serving
    settings: Settings
    missing: MissingExperts
    batches: BatchService | None = None
    aliases: frozenset[str] = field(default_factory=frozenset)  # other names that requests may call the model by

    @property
    def names(self) -> list[str]:
        """That a request may call the model by; the first is its own."""
        return [self.serving.name, *sorted(self.aliases - {self.serving.name})]

    def serves(self, name: str) -> bool:
        return name == self.serving.name or name in self.aliases
