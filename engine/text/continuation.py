"""Continuing a reply that was cut: the conversation rendered so that it ends inside the assistant's message.

The reply follows the opened turn exactly as the model wrote it. Templates trim finished messages, which would leave something else
to continue from; so the tokens are those of the cut reply, and the prompt cache holds nearly all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import OptionError, TemplateError
from ..events import Message

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PartialReply:
    """What a reply begins with. ids: of the whole prompt, since the first new characters depend on the tokens before."""

    message: Message
    ids: tuple[int, ...]


def unfinished(messages: Sequence[Message]) -> Message:
    """Return the reply that ends a conversation, without what was left of a character when it was cut.

    Raises OptionError where it ends with no reply, or an empty one.
    """
    if not messages or messages[-1].role != "assistant":
        raise OptionError("only a reply can be continued", "Give messages that end with the assistant's.")
    reply = whole_characters(messages[-1])
    if not (reply.content or reply.thinking):
        raise OptionError("the reply is empty, so there is nothing to continue", "Make it again.")
    return reply


def whole_characters(reply: Message) -> Message:
    """Return a reply without the U+FFFD at its end where a character was cut in two."""
    if reply.content:
        return replace(reply, content=reply.content.rstrip("\ufffd"))
    return replace(reply, thinking=reply.thinking.rstrip("\ufffd"))


def continues_thinking(tokenizer: "Tokenizer", reply: Message) -> bool:
    """Whether what follows ``reply`` is thinking: it was cut before the answer."""
    return tokenizer.thinking is not None and bool(reply.thinking) and not reply.content


def render(tokenizer: "Tokenizer", before: Sequence[Message], reply: Message) -> str:
    """Return the conversation ``before`` and ``reply``, open at its end.

    Raises TemplateError where the template fails, or the reply was cut while thinking and this model does not think.
    """
    opened, reply = tokenizer.render(before), tokenizer.plain(reply)
    if tokenizer.thinking is None:
        if not reply.content:
            raise TemplateError(
                "the reply was cut off while its model was thinking, and this model does not think",
                "Regenerate it, or choose the model that began it.",
            )
        return opened + reply.content  # another model's thinking is left out, as templates do
    start, end = tokenizer.thinking
    if not reply.thinking:
        # A turn that opens with thinking, and a reply without: nothing was thought.
        return opened + (f"{end}\n\n" if tokenizer.opens_thinking(opened) else "") + reply.content
    if (cut := _as_template_writes(tokenizer, before, reply)) is not None:
        return cut
    opened += "" if tokenizer.opens_thinking(opened) else start
    return opened + reply.thinking + (end + reply.content if reply.content else "")


def _as_template_writes(tokenizer: "Tokenizer", before: Sequence[Message], reply: Message) -> str | None:
    """Return the conversation with its thinking as the template writes it; None where the template drops any of it."""
    last = reply.content or reply.thinking
    try:
        text = tokenizer.render_cut([*before, reply], "answer" if reply.content else "thinking").rstrip()
    except TemplateError:
        return None
    # The white space that templates trim is where the model continues from, and part of its reply.
    end = next((each for each in (last.rstrip(), last.strip()) if text.endswith(each)), None)
    if end is None or reply.thinking.strip() not in text:
        return None
    return text.removesuffix(end) + last
