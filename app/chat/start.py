"""How every chat starts, on a screen or without one: what the command line asked for, the session, the store of conversations."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.engine.options import KVSpec, Nodes, Sampling, TemplateOptions

from .. import settings
from ..backend import keep_awake
from ..backend.keep_awake import KeepAwake
from ..backend.shell import working_folder

if TYPE_CHECKING:
    from ..backend.sharing import CardFinder
    from ..store.store import Store
    from .preferences import Preferences
    from .session import Session


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the command line asked for; None takes what the settings say.

    Attributes:
        prompt_cache: False turns off the reuse of earlier turns.
        memory: bytes that a model may take.
        adapter: is added to the model; "" is none, whatever the settings have for it.
        parallel: replies at once at most; None is what the settings say. speculation: whether tokens are guessed; the same.
        draft: the draft model; "" is none, whatever the settings have for the model. cpu_exact: a CPU rounds nothing.
        nodes: the processes that hold the model together; None is one alone.
        engine: the command that starts the engine's process, where it is not the usual one.
        server: whether the engine of a server of the same user is used, where one has the model.
        profile: the name of one in the settings, for this run; "" is none; None is the one that was chosen last.
        chat: the stored conversation to open, or the beginning of its ID.
        resume: open the last conversation.
        read: the settings, where they have been read already.
        store_path, settings_path, log_path: default to the user's own folders.
    """

    model: str | None = None
    sampling: Sampling | None = None
    template: TemplateOptions | None = None
    kv: KVSpec | None = None
    prompt_cache: bool = True
    memory: int | None = None
    unchecked: bool = False
    adapter: str | None = None
    parallel: int | None = None
    speculation: bool | None = None
    draft: str | None = None
    cpu_exact: bool = False
    nodes: Nodes | None = None
    system: str | None = None
    profile: str | None = None
    engine: Sequence[str] | None = None
    server: bool = True
    chat: str | None = None
    resume: bool = False
    read: settings.LoadedSettings | None = None
    store_path: Path | None = None
    settings_path: Path | None = None
    log_path: Path | None = None


@dataclass(frozen=True, slots=True)
class ChatStart:
    """A chat about to start.

    Attributes:
        command: starts the engine's process, which writes to ``log``.
        keep_awake: keeps the machine from sleeping while the engine works.
        warnings: what was wrong with the settings.
        finder: finds an engine that may be used in place of one of the chat's own.
    """

    session: "Session"
    preferences: "Preferences"
    command: tuple[str, ...]
    log: Path
    keep_awake: KeepAwake
    warnings: tuple[str, ...]
    finder: "CardFinder"


def begin(options: ChatOptions) -> ChatStart:
    """Return what every chat starts with: its session, and the settings that apply to it."""
    from ..backend.client import CHILD_COMMAND
    from ..backend.protocol import Load
    from ..backend.sharing import CardFinder
    from ..models.names import lasting
    from ..tools.toolbox import Toolbox
    from .preferences import ChatOverrides, Preferences
    from .session import Session

    path = options.settings_path or settings.default_path()
    read = options.read or settings.load(path)
    known = read.settings
    limit = known.memory_bytes if options.memory is None else options.memory
    given = ChatOverrides(options.sampling, options.system, options.template)
    preferences = Preferences(known, path, given, read.warnings, options.profile)
    own = preferences.for_new_chat
    # A profile that was only chosen before has loaded its model then, and the user may have picked another one since.
    of_profile = known.profiles[own.profile].model if options.profile and own.profile else None
    model = lasting(options.model or of_profile or known.model)
    adapter = known.adapters.get(model) if options.adapter is None else options.adapter or None
    kv = options.kv or preferences.kv(own.profile)
    parallel = known.parallel if options.parallel is None else options.parallel
    draft = known.drafts.get(model) if options.draft is None else options.draft or None
    guesses = known.speculation or bool(options.draft) if options.speculation is None else options.speculation
    load = Load(
        model,
        kv,
        options.prompt_cache,
        limit,
        options.unchecked,
        adapter,
        parallel,
        guesses,
        draft,
        cpu_exact=options.cpu_exact or known.cpu_exact,
        nodes=options.nodes,
    )
    session = Session(load, preferences.sampling, preferences.system, time.monotonic)
    log = options.log_path or _default_log()
    preferences.toolbox = Toolbox(known, working_folder(), log.with_stem(f"{log.stem}-mcp"))
    preferences.hold(own, session)
    session.idle.after_min, session.keymap = known.unload_after_min, preferences.keymap
    session.tints_guesses = known.tint_guesses
    command = tuple(options.engine or CHILD_COMMAND)
    awake = KeepAwake(keep_awake.program(), lambda: preferences.settings.keep_awake)
    finder = CardFinder(off=not options.server or options.engine is not None)
    return ChatStart(session, preferences, command, log, awake, tuple(read.warnings), finder)


def found(options: ChatOptions) -> ChatOptions:
    """Return ``options`` with the whole ID of the chat to open, before a screen opens. Raises StoreError."""
    if options.chat is None:
        return options
    store, chosen = open_store(options)
    store.close()
    return replace(options, chat=chosen)


def open_store(options: ChatOptions) -> "tuple[Store, str | None]":
    """Return the store of conversations, and the ID of the one to open; None: a new one. Raises StoreError."""
    from ..store.store import Store
    from ..store.values import StoreError

    store = Store.open(options.store_path)
    try:
        chosen = store.chat(options.chat) if options.chat is not None else store.latest() if options.resume else None
        if chosen is not None and chosen.deleted_at is not None:
            raise StoreError(f"Chat {chosen.id} was deleted", "`tokamac chats` lists the others.")
    except BaseException:
        store.close()
        raise
    return store, None if chosen is None else chosen.id


def _default_log() -> Path:
    from platformdirs import user_log_path

    return user_log_path("tokamac") / "engine.log"
