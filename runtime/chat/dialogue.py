"""A conversation that goes on, with the ids that the model has read and written so far.

Ids are only ever appended, so a sequence that holds the conversation is fed what is new and nothing is computed twice,
however the model tokenised its own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deltafin.runtime.chat.messages import Message
from deltafin.runtime.chat.parse import ChatParser
from deltafin.runtime.chat.render import Conversation, encode, follow_up
from deltafin.runtime.tokenizer import Tokenizer


class Dialogue:
    """Turns of one conversation: `add` what is said, feed `prompt`, push the answer to `parser`, then `answered`."""

    def __init__(self, tokenizer: Tokenizer, conversation: Conversation, ids: Sequence[int] = ()) -> None:
        """`ids` are of a conversation that went before, whose messages nobody has any more."""
        self.conversation = conversation
        self._tokenizer = tokenizer
        self._ids = list(ids)  # what the answered part of the conversation came to
        self._answered = 0  # messages in it

    @property
    def ids(self) -> list[int]:
        """A copy of what the conversation up to the last answer came to."""
        return list(self._ids)

    def add(self, *messages: Message) -> None:
        self.conversation = replace(self.conversation, messages=(*self.conversation.messages, *messages))

    def prompt(self) -> list[int]:
        """All ids up to the opening of the next answer; they begin with everything that came before, unchanged."""
        return self._ids + encode(follow_up(self.conversation, self._answered), self._tokenizer)

    def parser(self) -> ChatParser:
        """One for the next answer."""
        return ChatParser(self._tokenizer, self.conversation.thinking)

    def answered(self, parser: ChatParser) -> None:
        """Take the answer into the conversation, as far as it went; nothing was added since its prompt.

        A sequence that was fed the prompt and the answer's ids, without an [EOS], has seen the beginning of the next
        prompt.
        """
        parser.finish()
        self._ids = [*self.prompt(), *parser.ids, *encode(parser.closing(), self._tokenizer)]
        self.add(parser.answer.message())
        self._answered = len(self.conversation.messages)
