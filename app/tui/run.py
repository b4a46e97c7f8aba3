"""The door to the chat: what the command line calls."""

import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.app import settings
from tokamac.engine.options import KVSpec, Sampling

if TYPE_CHECKING:
    from tokamac.app.tui.app import TokamacApp
    from tokamac.app.tui.bridge import Bridge


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the command line asked for; None takes what the settings remember.

    ``prompt_cache`` False turns off the reuse of earlier turns. ``scripted`` plays a scenario instead of a model, for tests and
    pictures. ``settings_path`` and ``log_path`` default to the user's own folders.
    """

    model: str | None = None
    sampling: Sampling | None = None
    kv: KVSpec | None = None
    prompt_cache: bool = True
    system: str | None = None
    scripted: bool = False
    settings_path: Path | None = None
    log_path: Path | None = None


def run_chat(options: ChatOptions) -> int:
    """Run the chat until the user leaves; return the exit status."""
    app, bridge = build(options)
    gc.freeze()  # what was imported stays: looking through it for garbage, again and again, costs the model's time
    try:
        return app.run() or app.return_code or 0
    finally:
        bridge.close()


def build(options: ChatOptions) -> "tuple[TokamacApp, Bridge]":
    """Return the app and its bridge, not yet running."""
    # Textual takes 0.2 s to import: not before it is known that a screen is wanted.
    from tokamac.app.backend.client import child_command
    from tokamac.app.backend.wire import Load
    from tokamac.app.tui.app import TokamacApp
    from tokamac.app.tui.bridge import Bridge
    from tokamac.app.tui.keys import teach_alt_enter
    from tokamac.app.tui.memory import Memory
    from tokamac.app.tui.session import Session

    teach_alt_enter()
    path = options.settings_path or settings.default_path()
    read = settings.load(path)
    known = read.settings
    load = Load(options.model or known.model, options.kv or known.kv, options.prompt_cache)
    system = known.system if options.system is None else options.system
    session = Session(load, options.sampling or known.sampling, system, time.monotonic)
    session.idle.after_min = known.unload_after_min
    log = options.log_path or _default_log()
    bridge = Bridge(child_command(scripted=options.scripted), log)
    app = TokamacApp(session, bridge, Memory(known, path), read.warnings)
    bridge.post = app.chat.post_message
    return app, bridge


def _default_log() -> Path:
    from platformdirs import user_log_path

    return user_log_path("tokamac") / "engine.log"
