"""The rows of the list of conversations: a chat on one line, a message that was found on one, and below it where it was said."""

import re

from rich.cells import cell_len
from textual.content import Content

from tokamac.app.sanitise import sanitise, sanitise_line
from tokamac.app.store.values import Chat, Hit
from tokamac.app.tui.listing import ago, excerpt
from tokamac.app.tui.model_rows import short_name
from tokamac.app.tui.theme import FAINT
from tokamac.engine.events import Role

LEAST_TITLE = 24
"""Cells that a title keeps; what else there is of a chat gives way to it, the id last: it is what ``--chat`` takes."""
LEAD = 24
"""Characters before the first match that are shown, so that it is seen in a narrow list too."""
WHO: dict[Role, str] = {"user": "you: ", "assistant": "", "system": "system: "}


def chat_row(chat: Chat, *, held: bool, seconds: float, room: int) -> Content:
    """Return a chat's row of ``room`` cells. held: it is the one on the screen. seconds: since it was last written to."""
    title = sanitise_line(chat.title) or ("draft: " + excerpt(chat.draft) if chat.draft else "untitled")
    here = Content.styled("● ", "$text-primary") if held else Content("  ")
    model = short_name(chat.model)
    choices = ((ago(seconds), model, chat.id), (model, chat.id), (chat.id,))
    notes = [" · ".join(part for part in parts if part) for parts in choices]
    left = room - 2 - min(cell_len(title), LEAST_TITLE)
    note = next((f"  {each}" for each in notes if cell_len(each) + 2 <= left), "")
    row = here + Content(title).truncate(max(room - 2 - cell_len(note), 1), ellipsis=True)
    return row + Content.styled(note, FAINT)


def hit_row(hit: Hit) -> Content:
    """Return what was found, with its matches marked, and the chat it was said in. A list that does not wrap cuts both lines."""
    snippet, end = Content(""), 0
    for begin, stop in hit.marks:
        before = _one_line(hit.snippet[end:begin])
        if end == 0 and len(before) > LEAD:
            before = "…" + before[-LEAD:]
        snippet += Content(before) + Content.styled(_one_line(hit.snippet[begin:stop]), "bold $text-primary")
        end = stop
    found = Content("  ") + Content.styled(WHO[hit.role], FAINT) + snippet + Content(_one_line(hit.snippet[end:]))
    return found + Content.styled(f"\n      in {sanitise_line(hit.title)}", FAINT)


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", sanitise(text))
