"""What is known of a batch besides its requests and answers, as the API shows it and as it is on the drive."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Literal, cast, get_args

from deltafin.runtime.batch import LineError
from deltafin.runtime.openai import ENDPOINTS, Endpoint

PREFIX = "batch_"

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled"]
_OVER: tuple[Status, ...] = ("completed", "failed", "cancelled")
TIMES = ("in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled")


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of all answers of a batch."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def as_json(self) -> dict[str, object]:
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.completion,
        }


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch. What its answers depend on besides the requests is fixed when it is made."""

    id: str
    endpoint: Endpoint
    input_file_id: str
    model: str  # its name when the batch was made
    fingerprint: str
    max_new: int
    most_tokens: int | None
    created: float  # seconds since 1970
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    times: dict[str, int] = field(default_factory=dict)  # when it came to each status
    errors: tuple[LineError, ...] = ()
    total: int = 0  # requests
    completed: int = 0
    failed: int = 0
    output_id: str | None = None  # of the file with answers: chosen before it is written
    error_id: str | None = None
    has_output: bool = False  # whether these files were written: none is without lines
    has_errors: bool = False
    usage: Tokens | None = None

    @property
    def is_over(self) -> bool:
        return self.status in _OVER

    def to(self, status: Status, now: float) -> BatchRecord:
        return replace(self, status=status, times={**self.times, status: int(now)})

    def as_json(self) -> dict[str, object]:
        """The object of the API. It never expires: there is no time by which answers are there."""
        errors = {"object": "list", "data": [e.as_json() for e in self.errors]} if self.errors else None
        found: dict[str, object] = {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": int(self.created),
            "expires_at": None,
            "expired_at": None,
        }
        found |= {f"{name}_at": self.times.get(name) for name in TIMES}
        found["request_counts"] = {"total": self.total, "completed": self.completed, "failed": self.failed}
        found["usage"] = None if self.usage is None else self.usage.as_json()
        found["metadata"] = self.metadata
        return found

    def as_record(self) -> dict[str, object]:
        """For the drive; `read` takes it back."""
        return asdict(self)

    @classmethod
    def read(cls, value: dict[str, object]) -> BatchRecord:
        """Raises ValueError if it is damaged."""
        try:
            record = cls(**value)  # type: ignore[arg-type]
            errors = tuple(LineError(**e) for e in cast(list[dict[str, str]], value["errors"]))  # type: ignore[arg-type]
            usage = value["usage"]
            tokens = None if usage is None else Tokens(**cast(dict[str, int], usage))
        except (TypeError, KeyError) as e:
            raise ValueError(f"not the record of a batch ({e})") from None
        if record.endpoint not in ENDPOINTS or record.status not in get_args(Status):
            raise ValueError("not the record of a batch (endpoint or status is unknown)")
        return replace(record, errors=errors, usage=tokens)
