"""Which kind of request a body is."""

from __future__ import annotations

from deltafin.runtime.openai.chatbody import read_chat
from deltafin.runtime.openai.task import CHAT, Endpoint, Serving, Task
from deltafin.runtime.openai.textbody import read_text


def read_body(endpoint: Endpoint, body: object, serving: Serving, *, seed: int = 0) -> Task:
    """The task of a body sent to an endpoint. `seed` is what draws go by if the body gives none. Raises BadBody."""
    read = read_chat if endpoint == CHAT else read_text
    return read(body, serving, seed=seed)
