"""What is left out of a prompt that does not fit its context: the middle.

A conversation keeps its system prompt, its first exchange (it says what all is about) and its newest message; the exchanges after
the first go, oldest first. Only when that is not enough the newest message loses its own middle: a file with a question after it
keeps both its ends. Nothing here is remembered: the same conversation is always cut in the same way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tokamac.engine.errors import ContextError
from tokamac.engine.events import Message, Truncated

REPLY_SHARE = 4
"""The reply gets a quarter of the context, unless it is bounded. Exchanges go by the quarter as well: a cut that moved with every
message would leave nothing of the prompt cache to reuse."""

MARK = "\n[… left out …]\n"


@dataclass(frozen=True, slots=True)
class Words:
    """How messages become token ids. ``render``: a whole conversation; ``encode``, ``decode``: plain text."""

    render: Callable[[Sequence[Message]], list[int]]
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def room_for_prompt(capacity: int, max_tokens: int | None) -> int:
    """Return how many tokens of a context of ``capacity`` the prompt may take, never less than half: the reply gets the rest."""
    reply = capacity // REPLY_SHARE if max_tokens is None else min(max_tokens, capacity // 2)
    return capacity - max(1, reply)


def fit_messages(
    messages: Sequence[Message], words: Words, capacity: int, room: int
) -> tuple[list[int], Truncated | None]:
    """Return the token ids of as much of the conversation as fits ``room`` tokens, and what was left out.

    Raises ContextError when not even the ends of the newest message fit.
    """
    ids = words.render(messages)
    whole, surplus = len(ids), len(ids) - room
    if surplus <= 0:
        return ids, None
    step = max(1, capacity // REPLY_SHARE)
    kept = list(messages)
    goal = -(-surplus // step) * step
    while len(ids) > room and len(shorter := _drop(messages, words, goal)) < len(kept):
        kept, goal = shorter, goal + step
        ids = words.render(kept)
    if len(ids) > room:
        ids = _cut_newest(kept, words, room)
    return ids, Truncated(len(messages) - len(kept), whole - len(ids))


def fit_ids(ids: list[int], room: int) -> tuple[list[int], Truncated | None]:
    """Return the first and the last half of the ids that fit ``room``, and what was left out."""
    if len(ids) <= room:
        return ids, None
    tail = room // 2
    return ids[: room - tail] + ids[len(ids) - tail :], Truncated(0, len(ids) - room)


def _drop(messages: Sequence[Message], words: Words, goal: int) -> list[Message]:
    """Leave out exchanges after the first, oldest first, until their texts amount to ``goal`` tokens; the first goes last."""
    system = [message for message in messages[:1] if message.role == "system"]
    exchanges = _exchanges(messages[len(system) : -1])
    dropped, count = 0, 0
    while count < len(exchanges) and dropped < goal:
        count += 1
        gone = exchanges[count] if count < len(exchanges) else exchanges[0]
        dropped += sum(len(words.encode(message.content)) for message in gone)
    first = exchanges[:1] if count < len(exchanges) else []
    return [*system, *(message for exchange in first + exchanges[count + 1 :] for message in exchange), messages[-1]]


def _exchanges(messages: Sequence[Message]) -> list[list[Message]]:
    """Split a conversation before each user's message, so that roles still take turns when one part is left out."""
    parts: list[list[Message]] = []
    for message in messages:
        if message.role == "user" or not parts:
            parts.append([])
        parts[-1].append(message)
    return parts


def _cut_newest(messages: Sequence[Message], words: Words, room: int) -> list[int]:
    newest = messages[-1]
    text = words.encode(newest.content)
    budget = room - (len(words.render(messages)) - len(text)) - len(words.encode(MARK))
    while budget >= 2:
        tail = budget // 2
        begin, end = words.decode(text[: budget - tail]), words.decode(text[len(text) - tail :])
        cut = begin.rstrip("\ufffd") + MARK + end.lstrip("\ufffd")  # a cut may fall inside a character
        ids = words.render([*messages[:-1], replace(newest, content=cut)])
        if len(ids) <= room:
            return ids
        budget -= max(1, len(ids) - room)  # where the ends meet the mark, tokens join in another way
    raise ContextError(
        f"the conversation does not fit: {room:,} tokens are free for it, and not even its newest message's ends fit",
        "Shorten the system prompt, ask for fewer tokens (--max-tokens, max_tokens), or use a larger context.",
    )
