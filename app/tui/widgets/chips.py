"""Above the prompt: the prompts that wait for their turn, and what goes with the one that is being written."""

from collections.abc import Callable, Sequence

from textual.content import Content
from textual.widgets import Static

from tokamac.app.sanitise import sanitise_line
from tokamac.app.store.values import Attachment
from tokamac.app.tui import units
from tokamac.app.tui.attachments import Draft
from tokamac.app.tui.listing import excerpt
from tokamac.app.tui.session import Session
from tokamac.app.tui.theme import FAINT

MOST_WAITING = 3
"""Lines for prompts that wait; more would take the room of the text."""
ROOMY = 24
"""Rows of a window that has room for them; else one is shown."""
OVER = "over the context of {} tokens"
"""Said before it is sent, as the engine would refuse it."""


class Chips(Static):
    """One line a prompt that waits, one for the attachments, and one where they are too much; not there where there are none."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.display = False
        self._shown = Content("")

    def show(self, session: Session, attachments: Sequence[Attachment], reading: Sequence[str]) -> None:
        """Show what waits, what is attached, and the files that are being read."""
        most = MOST_WAITING if self.app.size.height >= ROOMY else 1
        over = session.counts.exceed(session.info, session.load.kv, attachments)
        lines = [*_waiting(session.queued, most), *_attached(attachments, reading, session.tokens, over=over)]
        if over and session.info is not None:
            lines.append(Content.styled(OVER.format(units.count(session.info.capacity)), "$text-error"))
        content = Content("\n").join(lines)
        if not content.is_same(self._shown):
            self._shown = content
            self.display = bool(lines)
            self.update(content)


def _waiting(queued: Sequence[Draft], most: int) -> list[Content]:
    """Return a line for each of the first prompts that wait. Up takes the last one back."""
    lines = [Content.styled("waits  ", "$text-secondary") + Content.styled(_words(draft), FAINT) for draft in queued]
    more = len(lines) - most
    return lines if more <= 0 else [*lines[:most], Content.styled(f"       and {more} more", FAINT)]


def _words(draft: Draft) -> str:
    names = ", ".join(sanitise_line(each.name) for each in draft.attachments)
    return " + ".join(part for part in (excerpt(draft.text), names) if part)


def _attached(
    attachments: Sequence[Attachment],
    reading: Sequence[str],
    tokens: Callable[[Attachment], int | None],
    *,
    over: bool,
) -> list[Content]:
    name, size = ("$text-error", "$text-error") if over else ("$text-primary", FAINT)
    chips = [
        Content.styled(f"+ {sanitise_line(each.name)}", name) + Content.styled(f" {_size(each, tokens(each))}", size)
        for each in attachments
    ]
    chips += [Content.styled(f"reading {sanitise_line(name)} …", FAINT) for name in reading]
    return [Content("   ").join(chips)] if chips else []


def _size(attachment: Attachment, tokens: int | None) -> str:
    if tokens is None:
        return f"{units.count(len(attachment.text))} characters"
    return f"{units.count(tokens)} token{'' if tokens == 1 else 's'}"
