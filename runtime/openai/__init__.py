"""OpenAI's requests and answers: what does a body ask for, and how is the answer written?

`read_body` turns a body of /v1/chat/completions or /v1/completions into a `Task`, or raises `BadBody`, which names the
field: what cannot be done as asked is refused, never left out. `Answer` takes the tokens of a task as they are chosen,
says when the answer ends, and is written as the API's object, or with `Chunks` piece by piece.

The room does not know who asks, batch or server, nor how tokens are computed.
"""

from deltafin.runtime.openai.answer import Answer
from deltafin.runtime.openai.bodies import read_body
from deltafin.runtime.openai.chunks import Chunks
from deltafin.runtime.openai.errors import BadBody, error_json
from deltafin.runtime.openai.serving import fingerprint, serving_of
from deltafin.runtime.openai.strictjson import parse, write_line
from deltafin.runtime.openai.task import CHAT, ENDPOINTS, TEXT, Endpoint, Serving, Task

__all__ = [
    "CHAT",
    "ENDPOINTS",
    "TEXT",
    "Answer",
    "BadBody",
    "Chunks",
    "Endpoint",
    "Serving",
    "Task",
    "error_json",
    "fingerprint",
    "parse",
    "read_body",
    "serving_of",
    "write_line",
]
