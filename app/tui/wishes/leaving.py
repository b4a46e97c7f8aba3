"""The reply that runs while its chat is left for another: it is stopped, and the user is told what became of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokamac.app.store.errors import StoreError
from tokamac.app.store.store import Store

if TYPE_CHECKING:
    from tokamac.app.tui.screens.chat import ChatScreen

KEPT = "The reply was stopped; what was written of it stays in its chat."
EMPTY = "The reply was stopped before its first word; the prompt stays in its chat."
NOT_KEPT = "The reply was stopped, and nothing keeps what was written of it."


@dataclass(frozen=True, slots=True)
class Running:
    """A reply that runs. message: its id in ``store``; None where it is not there, and no store where chats are not kept."""

    store: Store | None
    message: int | None

    def told(self) -> str:
        """Return what became of it, as the store says: for when its chat has been left."""
        if self.store is None or self.message is None:
            return NOT_KEPT
        try:
            kept = self.store.message(self.message)
        except StoreError:
            return NOT_KEPT
        if kept.state != "stopped":  # how much of it is there was written some time before
            return NOT_KEPT
        return KEPT if kept.text or kept.thinking else EMPTY


def running(chat: "ChatScreen") -> Running | None:
    """Return the reply that runs; None where none does."""
    if not chat.session.replying:
        return None
    recording = chat.recording
    if recording is None:
        return Running(None, None)
    return Running(recording.store, recording.stored(chat.session.turns[-1].reply_key))


def tell(chat: "ChatScreen", stopped: Running | None) -> None:
    """Say what became of the reply that ran, if one did."""
    if stopped is not None:
        told = stopped.told()
        chat.notify(told, severity="warning" if told == NOT_KEPT else "information", markup=False, timeout=6)
