"""What an action on a conversation would cost, before it is taken."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message."""

    text: str


@dataclass(frozen=True, slots=True)
class Regenerate:
    """Generate the last reply again."""


@dataclass(frozen=True, slots=True)
class Continue:
    """Go on with the last reply, which was cut."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the text of message ``index``, and answer it again."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Branch:
    """Go on from message ``index`` in a chat of its own, with a message that is still to be written."""

    index: int


Action = Send | Regenerate | Continue | Edit | Branch


@dataclass(frozen=True, slots=True)
class Price:
    """What a prompt takes until its first token.

    prompt_tokens: all of it. tokens: of them, to be computed. disk_bytes: keys and values to be read from disk. seconds: both
    together, by what was measured since the model was loaded. estimated: no prompt of a good length was read since then, and the
    seconds are what the arithmetic expects (``Engine.predict``); they are None until the machine's pace is known, too.
    """

    prompt_tokens: int
    tokens: int
    disk_bytes: int
    seconds: float | None
    estimated: bool = False
