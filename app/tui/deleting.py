"""Conversations deleted, and brought back: what may be, what is done, and what is said of it, on a screen or in lines."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokamac.app.store.store import Store
from tokamac.app.store.values import Chat

if TYPE_CHECKING:
    from tokamac.app.tui.recording import Recording

NOT_WHOLE = "Not all of this chat could be saved: deleted now, it could not be brought back whole."


@dataclass(frozen=True, slots=True)
class Said:
    """What the user is told. refused: nothing was done, for a reason that matters."""

    text: str
    refused: bool = False


def delete(recording: "Recording", chat: Chat, begin_new: Callable[[], bool], *, title: str, back: str) -> Said:
    """Delete ``chat``; if it is the open one, after another was begun. back: what brings it back. Raises StoreError.

    begin_new: leaves the open one; returns whether what was not sent stays with it.
    """
    if chat.deleted_at is not None:
        return Said(f"It is deleted already: /restore {chat.id} brings it back.")
    if chat.id != recording.chat:
        recording.store.delete(chat.id)
        return Said(f"Deleted: {title}. {back} brings it back.")
    if recording.lacking():  # after another try
        return Said(NOT_WHOLE, refused=True)
    unsent = begin_new()  # before it is deleted: what is still to be written of a chat would bring it back
    recording.store.delete(chat.id)
    draft = ", with what was not sent" if unsent else ""
    return Said(f"Deleted, and a new chat begun: {title}. {back} brings it back{draft}.")


def restore(store: Store, chat: Chat | None, open_it: Callable[[str], object], *, title: Callable[[Chat], str]) -> Said:
    """Bring ``chat`` back and open it by its id. None: there is none to bring back. Raises StoreError."""
    if chat is None:
        return Said("No chat is deleted.")
    if chat.deleted_at is None:
        return Said(f"It is not deleted: /open {chat.id} opens it.")
    store.undelete(chat.id)
    open_it(chat.id)
    return Said(f"Brought back: {title(chat)}.")
