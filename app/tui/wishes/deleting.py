"""Conversations deleted, and brought back: the one that is open, too."""

from functools import partial
from typing import TYPE_CHECKING

from tokamac.app.store.errors import StoreError
from tokamac.app.store.values import Chat
from tokamac.app.tui.deleting import Said, delete, restore
from tokamac.app.tui.listing import excerpt
from tokamac.app.tui.wishes.conversation import begin_new, open_chat

if TYPE_CHECKING:
    from tokamac.app.tui.recording import Recording
    from tokamac.app.tui.screens.chat import ChatScreen

NOT_KEPT = "Chats are not kept, so none is deleted or brought back; the reason was said at the start."


def delete_chat(chat: "ChatScreen", name: str) -> None:
    """Delete the stored conversation whose id is, or begins with, ``name``; without one, the open one, and begin another."""
    if (recording := chat.recording) is None:
        chat.notify(NOT_KEPT, severity="warning", markup=False)
    elif (wanted := name or recording.chat) is None:
        chat.notify("There is nothing to delete yet.", markup=False, timeout=3)
    else:
        _delete(chat, recording, wanted, back=_restores(chat))


def delete_open(chat: "ChatScreen", held: str) -> bool:
    """Delete the conversation ``held`` for the list of chats, if it is still the open one; return whether that was done."""
    recording = chat.recording
    if recording is None or recording.chat != held:
        return False
    return _delete(chat, recording, held, back=f"Ctrl+Z, or {_restores(chat)} once the list is closed,")


def _delete(chat: "ChatScreen", recording: "Recording", wanted: str, *, back: str) -> bool:
    """Delete what is ``wanted``, unless a reply is being written to it; say what came of that, and return whether it was done."""
    try:
        found = recording.store.chat(wanted)
        if found.id == recording.chat and chat.session.replying:
            stop = chat.session.keymap.key("stop")
            said = Said(f"A reply is being written: wait, or stop it with {stop}, then delete.", refused=True)
        else:
            said = delete(recording, found, partial(begin_new, chat), title=_titled(found), back=back)
    except StoreError as error:
        chat.notify(error.one_line(), severity="error", markup=False)
        return False
    _tell(chat, said)
    return not said.refused


def restore_chat(chat: "ChatScreen", name: str) -> None:
    """Bring back the deleted conversation whose id is, or begins with, ``name``, or the one deleted last; and open it."""
    from tokamac.app.tui.screens.chats import Pick

    if (recording := chat.recording) is None:
        chat.notify(NOT_KEPT, severity="warning", markup=False)
        return
    try:
        found = recording.store.chat(name) if name else recording.store.last_deleted()
        _tell(chat, restore(recording.store, found, lambda found: open_chat(chat, Pick(found)), title=_titled))
    except StoreError as error:
        chat.notify(error.one_line(), severity="error", markup=False)


def _restores(chat: "ChatScreen") -> str:
    return chat.session.keymap.key("restore_chat")


def _tell(chat: "ChatScreen", said: Said) -> None:
    chat.notify(said.text, severity="warning" if said.refused else "information", markup=False, timeout=6)


def _titled(chat: Chat) -> str:
    return excerpt(chat.title or chat.draft) or "untitled"
