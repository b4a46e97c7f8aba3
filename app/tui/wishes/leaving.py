"""The reply that runs while its chat is left for another: it is stopped, and the user is told what became of it."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tokamac.app.store.errors import StoreError
from tokamac.app.store.store import Store
from tokamac.app.tui.ledger import Ledger

if TYPE_CHECKING:
    from tokamac.app.tui.screens.chat import ChatScreen

KEPT = "The reply was stopped; what was written of it stays in its chat."
EMPTY = "The reply was stopped before its first word; the prompt stays in its chat."
NOT_KEPT = "The reply was stopped, and nothing keeps what was written of it."
Fate = Callable[[], str]
"""Says what became of a reply, once its chat has been left."""


def running(chat: "ChatScreen") -> Fate | None:
    """Return what says the fate of the reply that runs; None where none does."""
    if not chat.session.replying:
        return None
    recording = chat.recording
    if recording is None:
        return lambda: NOT_KEPT
    return partial(_fate, recording.store, recording.ledger, chat.session.turns[-1].reply_key)


def _fate(store: Store, ledger: Ledger, reply: int) -> str:
    """Return what became of the reply of that key. It may be stored at its end only, so that its id is looked up here."""
    if (message := ledger.stored(reply)) is None:
        return NOT_KEPT
    try:
        kept = store.message(message)
    except StoreError:
        return NOT_KEPT
    if kept.state != "stopped":  # how much of it is there was written some time before
        return NOT_KEPT
    return KEPT if kept.text or kept.thinking else EMPTY


def tell(chat: "ChatScreen", stopped: Fate | None) -> None:
    """Say what became of the reply that ran, if one did."""
    if stopped is not None:
        told = stopped()
        chat.notify(told, severity="warning" if told == NOT_KEPT else "information", markup=False, timeout=6)
