"""Conversations set aside, and brought back: the one that is open, too."""

from typing import TYPE_CHECKING

from tokamac.app.store.errors import StoreError
from tokamac.app.store.values import Chat
from tokamac.app.tui.listing import excerpt, last_deleted
from tokamac.app.tui.wishes.conversation import begin_new, open_chat

if TYPE_CHECKING:
    from tokamac.app.tui.recording import Recording
    from tokamac.app.tui.screens.chat import ChatScreen

NOT_KEPT = "Chats are not kept, so none is deleted or brought back; the reason was said at the start."


def delete_chat(chat: "ChatScreen", name: str) -> None:
    """Delete the stored conversation whose id is, or begins with, ``name``; without one, the open one, and begin another."""
    if (recording := chat.recording) is None:
        chat.notify(NOT_KEPT, severity="warning", markup=False)
        return
    try:
        _delete(chat, recording, name)
    except StoreError as error:
        chat.notify(error.one_line(), severity="error", markup=False)


def _delete(chat: "ChatScreen", recording: "Recording", name: str) -> None:
    held, restores = recording.chat, chat.session.keymap.key("restore_chat")
    wanted = name or held
    if wanted is None:
        chat.notify("There is nothing to delete yet.", markup=False, timeout=3)
        return
    found = recording.store.chat(wanted)
    if found.deleted_at is not None:
        chat.notify(f"It is deleted already: /restore {found.id} brings it back.", markup=False, timeout=5)
    elif found.id != held:
        recording.store.delete(found.id)
        chat.notify(f"Deleted: {_named(found)}. {restores} brings it back.", markup=False, timeout=6)
    elif why := _why_not(chat, recording):
        chat.notify(why, severity="warning", markup=False, timeout=6)
    else:
        begin_new(chat)  # before it is deleted: what is still to be written of a chat would bring it back
        recording.store.delete(found.id)
        chat.notify(f"Deleted, and a new chat begun. {restores} brings it back.", markup=False, timeout=6)


def _why_not(chat: "ChatScreen", recording: "Recording") -> str:
    """Return why the open chat can't be deleted now; "" where it can."""
    if chat.session.replying:
        return f"A reply is being written: wait, or stop it with {chat.session.keymap.key('stop')}, then delete."
    if recording.lacking():  # after another try
        return "Not all of this chat could be saved: deleted now, it could not be brought back whole."
    return ""


def restore_chat(chat: "ChatScreen", name: str) -> None:
    """Bring back the deleted conversation whose id is, or begins with, ``name``, or the one deleted last; and open it."""
    from tokamac.app.tui.screens.chats import Pick

    if (recording := chat.recording) is None:
        chat.notify(NOT_KEPT, severity="warning", markup=False)
        return
    try:
        found = recording.store.chat(name) if name else last_deleted(recording.store)
        if found is not None and found.deleted_at is not None:
            recording.store.undelete(found.id)
    except StoreError as error:
        chat.notify(error.one_line(), severity="error", markup=False)
        return
    if found is None:
        chat.notify("No chat is deleted.", markup=False, timeout=3)
    elif found.deleted_at is None:
        chat.notify(f"It is not deleted: /open {found.id} opens it.", markup=False, timeout=5)
    else:
        open_chat(chat, Pick(found.id))
        chat.notify(f"Brought back: {_named(found)}.", markup=False, timeout=4)


def _named(chat: Chat) -> str:
    return excerpt(chat.title or chat.draft) or "untitled"
