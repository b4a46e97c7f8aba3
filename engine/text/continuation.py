"""Going on with a reply that was cut: the conversation rendered so that it ends inside the assistant's message.

What was said stands after the opened turn as the model wrote it. Templates trim finished messages, and would leave something else
to go on from; so the tokens are those of the cut reply, and the prompt cache holds nearly all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokamac.engine.errors import OptionError, TemplateError
from tokamac.engine.events import Message
from tokamac.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PartialReply:
    """What a reply begins with. ids: of the whole prompt, for what the first new characters mean depends on those before."""

    said: Message
    ids: tuple[int, ...]


def unfinished(messages: Sequence[Message]) -> Message:
    """Return the reply that ends a conversation, without what was left of a character when it was cut.

    Raises OptionError where it ends with no reply, or one that says nothing.
    """
    if not messages or messages[-1].role != "assistant":
        raise OptionError("only a reply can be continued", "Give messages that end with the assistant's.")
    said = whole_characters(messages[-1])
    if not (said.content or said.thinking):
        raise OptionError("the reply is empty, so there is nothing to continue", "Make it again.")
    return said


def whole_characters(said: Message) -> Message:
    """Return a reply without the U+FFFD that stand at its end where a character was cut in two."""
    if said.content:
        return replace(said, content=said.content.rstrip("\ufffd"))
    return replace(said, thinking=said.thinking.rstrip("\ufffd"))


def goes_on_thinking(tokenizer: Tokenizer, said: Message) -> bool:
    """Whether what follows ``said`` is thinking: it was cut before the answer."""
    return tokenizer.thinking is not None and bool(said.thinking) and not said.content


def render(tokenizer: Tokenizer, before: Sequence[Message], said: Message) -> str:
    """Return the conversation ``before`` and the reply ``said`` to it, open at its end.

    Raises TemplateError where the template fails, or the reply was cut while thinking and this model does not think.
    """
    opened, said = tokenizer.render(before), tokenizer.plain(said)
    if tokenizer.thinking is None:
        if not said.content:
            raise TemplateError(
                "the reply was cut while its model was thinking, and this model does not think",
                "Make it again, or choose the model that began it.",
            )
        return opened + said.content  # what another model thought is left out, as templates do
    start, end = tokenizer.thinking
    if not said.thinking:
        # A turn that opens with thinking, and a reply without: nothing was thought.
        return opened + (f"{end}\n\n" if tokenizer.opens_thinking(opened) else "") + said.content
    if (cut := _as_template_writes(tokenizer, before, said)) is not None:
        return cut
    opened += "" if tokenizer.opens_thinking(opened) else start
    return opened + said.thinking + (end + said.content if said.content else "")


def _as_template_writes(tokenizer: Tokenizer, before: Sequence[Message], said: Message) -> str | None:
    """Return the conversation with its thinking as the template sets it; None where the template drops any of it."""
    last = said.content or said.thinking
    try:
        text = tokenizer.render_cut([*before, said], "answer" if said.content else "thinking").rstrip()
    except TemplateError:
        return None
    # The white space that templates trim is where the model goes on from, and part of what it said.
    ends = next((each for each in (last.rstrip(), last.strip()) if text.endswith(each)), None)
    if ends is None or said.thinking.strip() not in text:
        return None
    return text.removesuffix(ends) + last
