"""The door to the chat: what the command line calls."""

import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.app import keep_awake, settings
from tokamac.app.keep_awake import KeepAwake
from tokamac.engine.options import KVSpec, Sampling, TemplateOptions

if TYPE_CHECKING:
    from tokamac.app.chat.preferences import Preferences
    from tokamac.app.chat.session import Session
    from tokamac.app.store.store import Store
    from tokamac.app.tui.app import TokamacApp
    from tokamac.app.tui.bridge import Bridge
    from tokamac.app.tui.screens.chats import Pick


FRAMES_PER_S = 160
"""At most. Textual may let two frames pass before it shows a key: at its own 60 that is longer than a hand takes for at once."""
OLD_THRESHOLD = 200
"""So many collections of the middle generation until one of everything; Python's own is 10."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the command line asked for; None takes what the settings remember.

    adapter: added to the model; "" is none, whatever the settings have for it. prompt_cache: False turns off the reuse of earlier
    turns. memory: bytes that a model may take. engine: the command that starts the engine's process, where it is not the usual
    one. chat: the stored conversation to open, or the beginning of its id; resume: open the last one. read: the settings, where
    they have been read already. settings_path, log_path, store_path: the user's own folders by default.
    """

    model: str | None = None
    sampling: Sampling | None = None
    template: TemplateOptions | None = None
    kv: KVSpec | None = None
    prompt_cache: bool = True
    memory: int | None = None
    unchecked: bool = False
    adapter: str | None = None
    system: str | None = None
    engine: Sequence[str] | None = None
    chat: str | None = None
    resume: bool = False
    read: settings.LoadedSettings | None = None
    store_path: Path | None = None
    settings_path: Path | None = None
    log_path: Path | None = None


@dataclass(frozen=True, slots=True)
class ChatStart:
    """A chat that is about to begin, on a screen or without. command: starts the engine's process; log: where that writes.

    keep_awake: keeps the machine from sleeping while that works. warnings: what was wrong with the settings.
    """

    session: "Session"
    memory: "Preferences"
    command: tuple[str, ...]
    log: Path
    keep_awake: KeepAwake
    warnings: tuple[str, ...]


def run_chat(options: ChatOptions) -> int:
    """Run the chat until the user leaves; return the exit status."""
    app, bridge = build(options)
    look_for_garbage_rarely()
    try:
        return app.run() or app.return_code or 0
    finally:
        bridge.close()


def look_for_garbage_rarely() -> None:
    """Spare the screen's process pauses of 50 ms, in which no key echoes and which come, by Python's defaults, every few seconds.

    What was imported stays, and is never looked through again; all the rest is, but not as often.
    """
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, OLD_THRESHOLD)


def build(options: ChatOptions) -> "tuple[TokamacApp, Bridge]":
    """Return the app and its bridge, not yet running."""
    os.environ.setdefault("TEXTUAL_FPS", str(FRAMES_PER_S))  # read when Textual is imported
    # Textual takes 0.2 s to import: not before it is known that a screen is wanted.
    from tokamac.app.tui.app import TokamacApp, teach_alt_enter
    from tokamac.app.tui.bridge import Bridge

    teach_alt_enter()
    begun = begin(options)
    bridge = Bridge(begun.command, begun.log, begun.keep_awake)
    app = TokamacApp(begun.session, bridge, begun.memory, lambda: _open_picked(options), begun.warnings)
    bridge.post = app.chat.post_message
    return app, bridge


def begin(options: ChatOptions) -> ChatStart:
    """Return what every chat begins with: its session, and the settings that hold in it."""
    from tokamac.app.backend.client import CHILD_COMMAND
    from tokamac.app.backend.protocol import Load
    from tokamac.app.chat.models import lasting
    from tokamac.app.chat.preferences import ChatOverrides, Preferences
    from tokamac.app.chat.session import Session

    path = options.settings_path or settings.default_path()
    read = options.read or settings.load(path)
    known = read.settings
    limit = known.memory_bytes if options.memory is None else options.memory
    model = lasting(options.model or known.model)
    adapter = known.adapters.get(model) if options.adapter is None else options.adapter or None
    load = Load(model, options.kv or known.kv, options.prompt_cache, limit, options.unchecked, adapter)
    memory = Preferences(known, path, ChatOverrides(options.sampling, options.system, options.template), read.warnings)
    session = Session(load, memory.sampling, memory.system, time.monotonic)
    session.template = memory.template
    session.idle.after_min, session.keymap = known.unload_after_min, memory.keymap
    command = tuple(options.engine or CHILD_COMMAND)
    awake = KeepAwake(keep_awake.program(), lambda: memory.settings.keep_awake)
    return ChatStart(session, memory, command, options.log_path or _default_log(), awake, tuple(read.warnings))


def found(options: ChatOptions) -> ChatOptions:
    """Return ``options`` with the whole id of the chat that is asked for, before a screen opens. Raises StoreError."""
    if options.chat is None:
        return options
    store, chosen = open_store(options)
    store.close()
    return replace(options, chat=chosen)


def open_store(options: ChatOptions) -> "tuple[Store, str | None]":
    """Return the store of conversations, and the one to begin with; None is a new one. Raises StoreError."""
    from tokamac.app.store.store import Store
    from tokamac.app.store.values import StoreError

    store = Store.open(options.store_path)
    try:
        chosen = store.chat(options.chat) if options.chat is not None else store.latest() if options.resume else None
        if chosen is not None and chosen.deleted_at is not None:
            raise StoreError(f"Chat {chosen.id} was deleted", "`tokamac chats` lists the others.")
    except BaseException:
        store.close()
        raise
    return store, None if chosen is None else chosen.id


def _open_picked(options: ChatOptions) -> "tuple[Store, Pick | None]":
    from tokamac.app.tui.screens.chats import Pick

    store, chosen = open_store(options)
    return store, None if chosen is None else Pick(chosen)


def _default_log() -> Path:
    from platformdirs import user_log_path

    return user_log_path("tokamac") / "engine.log"
