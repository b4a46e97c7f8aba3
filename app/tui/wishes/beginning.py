"""What happens once, when the screen is there: the engine starts, the conversations are opened, the tour was shown."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from tokamac.app.store.errors import StoreError
from tokamac.app.tui.recording import Recording
from tokamac.app.tui.widgets.transcript import Transcript
from tokamac.app.tui.wishes.conversation import open_chat

if TYPE_CHECKING:
    from tokamac.app.tui.screens.chat import ChatScreen


def begin(chat: "ChatScreen") -> None:
    """Start the engine, and open the conversations while it loads."""
    chat.perform(chat.session.start())
    chat.watch(chat.query_one(Transcript), "chosen", lambda key: chat.perform(chat.session.point(key)), init=False)
    if not chat.memory.settings.toured:  # the tour is on the screen
        chat.keep(replace(chat.memory.settings, toured=True))
    _open_store(chat)


def _open_store(chat: "ChatScreen") -> None:
    def not_kept(why: str) -> None:
        chat.notify(why, severity="error", markup=False, timeout=20)

    try:
        opened = chat.open_store()
    except StoreError as error:
        not_kept(f"Chats are not kept: {error.one_line()}")
        return
    if opened is not None:
        store, pick = opened
        chat.recording = Recording(chat.session, store, chat.memory, not_kept, time.monotonic)
        if pick is not None:
            open_chat(chat, pick)
