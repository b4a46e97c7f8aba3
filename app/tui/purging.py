"""Chats that were deleted long ago are removed for ever: once, aside, when nobody uses the chat."""

from pathlib import Path

from tokamac.app.store.errors import StoreError
from tokamac.app.store.store import Store
from tokamac.app.tui.session import Session

LOOK_S = 10.0
"""How often it is asked whether nobody uses the chat."""
QUIET_S = 5.0
"""How long nobody must have used it: while chats are removed, what is said waits to be written."""


def is_time(session: Session) -> bool:
    """Whether neither the user nor the engine has done anything for a while."""
    return not session.busy and session.idle.quiet_s(session.phase_since) >= QUIET_S


def purge(file: Path) -> str:
    """Remove what was deleted long ago from the store; return why that failed, or nothing. For any thread."""
    try:
        with Store.open(file) as store:
            store.purge()
    except StoreError as error:
        return f"Chats that were deleted long ago could not be removed: {error.one_line()}"
    return ""
