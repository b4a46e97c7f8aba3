"""What happens once, when the screen is there: the engine starts, the conversations are opened, the tour was shown."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.app.store.errors import StoreError
from tokamac.app.tui import purging
from tokamac.app.tui.recording import Recording
from tokamac.app.tui.widgets.status import StatusLine
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
    chat.begun()


def _open_store(chat: "ChatScreen") -> None:
    status = chat.query_one(StatusLine)

    def told(what: str) -> None:
        chat.notify(what, severity="warning", markup=False, timeout=20)

    try:
        opened = chat.open_store()
    except StoreError as error:
        chat.notify(f"Chats are not kept: {error.one_line()}", severity="error", markup=False, timeout=20)
        status.unsaved = lambda: True
        return
    if opened is not None:
        store, pick = opened
        chat.recording = recording = Recording(chat.session, store, chat.memory, told, time.monotonic)
        status.unsaved = lambda: recording.unsaved
        _purge_later(chat, store.file)
        if pick is not None:
            open_chat(chat, pick, leaving=False)


def _purge_later(chat: "ChatScreen", file: Path) -> None:
    """Remove what was deleted long ago, once nobody uses the chat."""

    def look() -> None:
        if purging.is_time(chat.session):
            timer.stop()
            chat.run_worker(purge, thread=True, group="files")

    def purge() -> None:
        if problem := purging.purge(file):
            chat.app.call_from_thread(chat.notify, problem, severity="warning", markup=False)

    timer = chat.set_interval(purging.LOOK_S, look)
