"""The full-screen chat, from its options to its exit status. Textual is imported only once a screen is wanted.

Nothing in this folder imports MLX or the engine itself: the engine is another process (tokamac.app.backend).
"""

import gc
import os
from typing import TYPE_CHECKING

from ..chat.start import ChatOptions, begin, open_store

if TYPE_CHECKING:
    from .app import TokamacApp
    from .bridge import Bridge


FRAMES_PER_S = 160
"""Textual may let two frames pass before it shows a key: at its own 60, a typist would notice."""
OLD_THRESHOLD = 200
"""Collections of the middle generation until one of everything; Python's own default is 10."""


def run_chat(options: ChatOptions) -> int:
    """Run the chat until the user leaves; return the exit status."""
    app, bridge = build(options)
    look_for_garbage_rarely()
    try:
        return app.run() or app.return_code or 0
    finally:
        bridge.close()


def look_for_garbage_rarely() -> None:
    """Collect garbage rarely, and never among the imported modules: Python's defaults cost 50 ms every few seconds."""
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, OLD_THRESHOLD)


def build(options: ChatOptions) -> "tuple[TokamacApp, Bridge]":
    """Return the app and its bridge, not yet running."""
    os.environ.setdefault("TEXTUAL_FPS", str(FRAMES_PER_S))  # read when Textual is imported
    # Textual takes 0.2 s to import: not before it is known that a screen is wanted.
    from .app import TokamacApp, teach_alt_enter
    from .bridge import Bridge

    teach_alt_enter()
    begun = begin(options)
    bridge = Bridge(begun.command, begun.log, begun.keep_awake)
    app = TokamacApp(begun.session, bridge, begun.preferences, lambda: open_store(options), begun.warnings)
    bridge.post = app.chat.post_message
    return app, bridge
