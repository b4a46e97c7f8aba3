"""What callers give, checked and made plain on their own thread. No MLX here; an array of another library is read item by item."""

from collections.abc import Iterable

from tokamac.engine.errors import OptionError
from tokamac.engine.events import Message
from tokamac.engine.options import NOTHING_TOLD, Sampling, TemplateOptions
from tokamac.engine.values import index


def given_prompt(prompt: object) -> list[Message] | list[int]:
    """Return a prompt as Messages alone or as token ids alone. Raises OptionError for anything else."""
    items = _items(prompt, "a prompt")
    if not items:
        raise OptionError("the prompt holds no token and no message", "Give token ids, or Messages.")
    if isinstance(items[0], Message | dict):
        return given_messages(items)
    return _ids(items)


def given_question(prompt: object, system: object) -> list[Message] | list[int]:
    """Return a prompt that may also be a text, with a system prompt before it. Raises OptionError for what can't have one."""
    given = [Message("user", given_words(prompt))] if isinstance(prompt, str) else given_prompt(prompt)
    if system is None:
        return given
    first = given[0]
    if not isinstance(first, Message):
        raise OptionError("token ids take no system prompt", "Put it into the ids, or give Messages.")
    if first.role == "system":
        raise OptionError("the messages begin with a system prompt already", "Leave out system, or that message.")
    return [Message("system", given_text(system, "the system prompt")), *given_messages(given)]


def given_messages(messages: object) -> list[Message]:
    """Return a conversation as a list. Raises OptionError for what is no sequence of Messages."""
    items = _items(messages, "a conversation")
    for item in items:
        if isinstance(item, dict):
            raise OptionError("a message is given as a dict", "Use Message(role, content).")
        if not isinstance(item, Message):
            raise OptionError(f"a {_kind(item)} stands among Messages", "Give Messages alone, or token ids alone.")
    return [item for item in items if isinstance(item, Message)]


def given_ids(tokens: object, what: str) -> list[int]:
    """Return one token id or more as plain ints; ``what`` needs them. Raises OptionError for what are none."""
    items = _items(tokens, "a sequence of token ids")
    if not items:
        raise OptionError(f"{what} needs a text, and there is no token", "Give at least one token id.")
    if isinstance(items[0], Message | dict):
        raise OptionError(
            "messages are no token ids", "Use engine.tokenizer.encode(engine.tokenizer.render(messages))."
        )
    return _ids(items)


def given_count(value: object, what: str, *, least: int) -> int:
    """Return a number of tokens as an int. Raises OptionError for what is none, or below ``least``."""
    try:
        count = index(value)
    except TypeError:
        raise OptionError(f"{what} of {value!r:.60} tokens is no whole number", "Give an int.") from None
    if count < least:
        raise OptionError(f"{what} of {count} tokens is too small", f"Use {least} or more.")
    return count


def given_limit(value: object) -> int:
    """Return a limit of memory, in bytes. Raises OptionError for what is none."""
    try:
        nbytes = index(value)
    except TypeError:
        raise OptionError(
            f"a memory limit of {value!r:.60} is no whole number of bytes", "Give an int: 14_000_000_000."
        ) from None
    if nbytes < 1:
        raise OptionError(f"a memory limit of {nbytes} bytes is too small", "Give the bytes that arrays may take.")
    return nbytes


def given_text(text: object, what: str) -> str:
    """Return a text. Raises OptionError for anything else."""
    if not isinstance(text, str):
        raise OptionError(f"{what} is a {_kind(text)}, not a text", "Give a str.")
    return text


def given_words(text: object) -> str:
    """Return a message's text. Raises OptionError for what is none, and for one that is blank."""
    words = given_text(text, "the message")
    if not words.strip():
        raise OptionError("the message is empty", "Write something first.")
    return words


def given_sampling(sampling: object) -> Sampling:
    """Return how to sample; None is the default. Raises OptionError for anything but a Sampling."""
    if sampling is None:
        return Sampling()
    if not isinstance(sampling, Sampling):
        raise OptionError(f"sampling is a {_kind(sampling)}", "Use Sampling(temperature=0), for example.")
    return sampling


def given_template(template: object) -> TemplateOptions:
    """Return what the chat template is told; None is nothing. Raises OptionError for anything but TemplateOptions."""
    if template is None:
        return NOTHING_TOLD
    if not isinstance(template, TemplateOptions):
        raise OptionError(f"template is a {_kind(template)}", 'Use TemplateOptions(thinking="off"), for example.')
    return template


def _items(given: object, what: str) -> list[object]:
    if isinstance(given, str | bytes):
        raise OptionError(
            f"a text is not {what}",
            'Use engine.chat().send(text), [Message("user", text)] or engine.tokenizer.encode(text).',
        )
    if isinstance(given, dict | Message) or not isinstance(given, Iterable):
        raise OptionError(f"a {_kind(given)} is not {what}", "Give a list of token ids, or of Messages.")
    try:
        return list(given)
    except TypeError:  # an array of no dimension says that it can be iterated
        raise OptionError(f"a single number is not {what}", "Give a list of token ids.") from None


def _ids(items: list[object]) -> list[int]:
    ids = []
    for item in items:
        try:
            ids.append(index(item))
        except TypeError:
            raise OptionError(
                f"{item!r:.60} is no token id", "A prompt is token ids alone, or Messages alone."
            ) from None
    return ids


def _kind(value: object) -> str:
    return type(value).__name__
