"""What df-run is to continue or answer: a text, token ids, or the messages of a conversation."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from deltafin.errors import BadRequest, NotFound

if TYPE_CHECKING:
    from deltafin.runtime import Tokenizer


def prompt_text(stdin: str | None, prompt: str | None, prompt_file: Path | None) -> str | None:
    """The text from whichever option gives it; None if none does."""
    if stdin is not None and stdin != "-":
        raise BadRequest(f"unexpected argument {stdin!r}; give the prompt with --prompt")
    if prompt is not None:
        return prompt
    if prompt_file is None and stdin is None:
        return None
    from_stdin = prompt_file is None or str(prompt_file) == "-"
    if from_stdin and sys.stdin is None:
        raise BadRequest("stdin is closed; give the prompt with --prompt or --prompt-file")
    try:
        raw = sys.stdin.buffer.read() if from_stdin or prompt_file is None else prompt_file.read_bytes()
        return raw.decode()
    except OSError as e:
        raise NotFound(f"{prompt_file}: cannot read the prompt ({e.strerror})") from None
    except UnicodeDecodeError as e:
        where = "stdin" if from_stdin else prompt_file
        raise BadRequest(f"{where}: the prompt is not UTF-8 (byte {e.start})") from None


def token_ids(tokenizer: Tokenizer | None, text: str | None, prompt_ids: str | None) -> list[int]:
    """Ids of the prompt; none if neither is given."""
    if prompt_ids is not None:
        pieces = re.split(r"[\s,]+", prompt_ids.strip())
        if not all(re.fullmatch(r"\d{1,9}", p) for p in pieces):
            raise BadRequest(f"--prompt-ids {prompt_ids[:60]!r}: expected numbers separated by spaces or commas")
        return [int(p) for p in pieces]
    if text is None:
        return []
    if tokenizer is None:
        raise BadRequest("this model has no tokenizer; give the prompt with --prompt-ids")
    ids = tokenizer.encode(text)
    if not ids:
        raise BadRequest("the prompt is empty; a model needs at least one token to continue")
    return ids


def json_file(path: Path, option: str) -> object:
    """What a JSON file of an option holds. Raises NotFound or BadRequest."""
    try:
        return json.loads(path.read_bytes())
    except OSError as e:
        raise NotFound(f"{option} {path}: cannot be read ({e.strerror})") from None
    except (ValueError, RecursionError) as e:
        raise BadRequest(f"{option} {path}: not JSON ({e})") from None
