"""A reply that failed: why, in sentences, and the prompts that go back to the box for it. Pure."""

from collections.abc import Sequence

from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui.attachments import Draft, joined
from tokamac.app.tui.conversation import Reply
from tokamac.app.tui.steps import DraftReturned, Step

LONGEST = 600
"""Characters of a reason: it is kept, and what a model's own code says may have no end."""


def reason(error: str, hint: str) -> str:
    """Return what failed and what to do as sentences on one line. Both may be foreign text: made safe to show."""
    said = " ".join(part for part in (f"{sanitise_line(error).rstrip('. ')}.", sanitise_line(hint)) if part)
    said = said[:1].upper() + said[1:]
    return said if len(said) <= LONGEST else f"{said[: LONGEST - 1]}…"


def unanswered(sent: Draft | None, said: Reply) -> list[Draft]:
    """Return the prompt that is the user's again: the one that was ``sent`` from the box, if nothing was ``said`` to it."""
    return [] if sent is None or said.text or said.thinking else [sent]


def returned(drafts: Sequence[Draft]) -> list[Step]:
    """Return what gives ``drafts`` back as one, in their order; nothing where there are none."""
    back = joined(drafts)
    return [DraftReturned(back.text, back.attachments)] if drafts else []
