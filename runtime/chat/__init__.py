"""K3's chat format: what does the model read for a conversation, and what do its ids say?

`Conversation` to ids with `prompt` (or `pieces` and `encode`), ids of an answer to events with `ChatParser` or to a
whole `Answer` with `parse`; `Dialogue` keeps both sides of a conversation that goes on. `from_openai` reads messages as
OpenAI's API has them. Control tokens are ids, never text, in both directions: whatever a user, a tool or the model
spells out is text and comes back as it was.

The room knows the format and a tokenizer, no model: who chooses the ids and when to stop is not its business.
"""

from deltafin.runtime.chat.dialogue import Dialogue
from deltafin.runtime.chat.events import (
    Answer,
    ContentText,
    Event,
    Finish,
    Finished,
    ReasoningText,
    ReasoningWasContent,
    ToolCallArguments,
    ToolCallBegan,
)
from deltafin.runtime.chat.incoming import from_openai, tools_of
from deltafin.runtime.chat.messages import (
    AssistantMessage,
    Content,
    JsonObject,
    Message,
    SystemMessage,
    ToolCall,
    ToolResult,
    UserMessage,
    thinking_of,
)
from deltafin.runtime.chat.parse import ChatParser, invented_id, parse
from deltafin.runtime.chat.render import Conversation, Prompt, encode, follow_up, pieces, prompt
from deltafin.runtime.chat.wire import Control, Piece

__all__ = [
    "Answer",
    "AssistantMessage",
    "ChatParser",
    "Content",
    "ContentText",
    "Control",
    "Conversation",
    "Dialogue",
    "Event",
    "Finish",
    "Finished",
    "JsonObject",
    "Message",
    "Piece",
    "Prompt",
    "ReasoningText",
    "ReasoningWasContent",
    "SystemMessage",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallBegan",
    "ToolResult",
    "UserMessage",
    "encode",
    "follow_up",
    "from_openai",
    "invented_id",
    "parse",
    "pieces",
    "prompt",
    "thinking_of",
    "tools_of",
]
