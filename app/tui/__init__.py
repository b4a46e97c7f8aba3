"""The full-screen chat, from its options to its exit status. Textual is imported only once a screen is wanted.

Nothing in this folder imports MLX or the engine itself: the engine is another process (tokamac.app.backend).
"""

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from .. import settings
from ..chat.external_programs import forget_copied
from ..chat.start import ChatOptions, begin, open_store
from .terminal_background import BackgroundQuery, guess

if TYPE_CHECKING:
    from .app import TokamacApp
    from .bridge import Bridge


FRAMES_PER_S = 160
"""Textual may let two frames pass before it shows a key: at its own 60, a typist would notice."""
OLD_THRESHOLD = 200
"""Collections of the middle generation until one of everything; Python's own default is 10."""


def run_chat(options: ChatOptions) -> int:
    """Run the chat until the user leaves; return the exit status."""
    gc.disable()  # until all is imported: modules are no garbage, and looking through them takes 20 ms
    try:
        read = options.read or settings.load(options.settings_path or settings.default_path())
        options = replace(options, read=read)
        if read.settings.theme or "NO_COLOR" in os.environ:
            app, bridge = build(options, lambda: guess(os.environ))  # should the user want "automatic" later
        else:
            with BackgroundQuery() as background:
                app, bridge = build(options, background.is_dark)
        look_for_garbage_rarely()
    finally:
        gc.enable()
    try:
        return app.run() or app.return_code or 0
    finally:
        bridge.close()
        if app.chat.copied:
            forget_copied(app.chat.preferences.home)


def look_for_garbage_rarely() -> None:
    """Collect garbage rarely, and never among the imported modules: Python's defaults cost 50 ms every few seconds."""
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, OLD_THRESHOLD)


def build(options: ChatOptions, is_dark: Callable[[], bool] = lambda: True) -> "tuple[TokamacApp, Bridge]":
    """Return the app and its bridge, not yet running. is_dark: says whether the terminal is, once Textual is imported."""
    os.environ.setdefault("TEXTUAL_FPS", str(FRAMES_PER_S))  # read when Textual is imported
    # Textual takes 0.2 s to import: not before it is known that a screen is wanted.
    from .app import TokamacApp, keep_reverse, teach_alt_enter
    from .bridge import Bridge

    teach_alt_enter()
    keep_reverse()
    begun = begin(options)
    bridge = Bridge(begun.command, begun.log, begun.keep_awake, begun.finder)
    app = TokamacApp(
        begun.session, bridge, begun.preferences, lambda: open_store(options), begun.warnings, dark=is_dark()
    )
    bridge.post = app.chat.post_message
    return app, bridge
