"""What a batch leaves for its client: answers in one file, errors in another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from deltafin.indexer import discard, disk_error
from deltafin.runtime.batch import Results, is_error
from deltafin.runtime.server.batch_records import Tokens
from deltafin.runtime.server.files import OUTPUT, FileStore, write_part


@dataclass(slots=True)
class Outputs:
    """What was written."""

    answers: int = 0
    errors: int = 0
    tokens: Tokens = field(default_factory=Tokens)


def write_outputs(
    results: Path, files: FileStore, names: tuple[str, str], ids: tuple[str, str], check: Callable[[], None]
) -> Outputs:
    """Splits the lines of a batch's results; `names` and `ids` are of the file of answers and that of errors.

    A file that would be empty is not made. Done again after an interruption, it leaves the same files. `check` is
    called now and then, and may raise. Raises NoSpace or DiskError.
    """
    with Results(results):  # which cuts off a line that was never finished
        found = Outputs()
        for wanted, name, file_id in zip((False, True), names, ids, strict=True):
            part = files.part()
            write_part(part, _lines(results, wanted, found, check))
            try:
                if found.errors if wanted else found.answers:
                    files.add(part, name, OUTPUT, file_id)
            finally:
                discard(part)
        return found


def _lines(results: Path, wanted: bool, found: Outputs, check: Callable[[], None]) -> Iterator[bytes]:
    """The errors, if they are `wanted`, or the answers; counts them in `found`."""
    try:
        with open(results, "rb") as file:
            for line in file:
                check()
                answer = json.loads(line)
                if is_error(answer["response"]) != wanted:
                    continue
                if wanted:
                    found.errors += 1
                else:
                    found.answers += 1
                    found.tokens = _added(found.tokens, answer["response"]["body"]["usage"])
                yield line
    except OSError as e:
        raise disk_error(e, results, "cannot read the answers") from None


def _added(tokens: Tokens, usage: dict[str, object]) -> Tokens:
    def detail(name: str, of: str) -> int:
        inner = usage[name]
        assert isinstance(inner, dict)
        return int(inner[of])

    return Tokens(
        tokens.prompt + int(str(usage["prompt_tokens"])),
        tokens.cached + detail("prompt_tokens_details", "cached_tokens"),
        tokens.completion + int(str(usage["completion_tokens"])),
        tokens.reasoning + detail("completion_tokens_details", "reasoning_tokens"),
    )
