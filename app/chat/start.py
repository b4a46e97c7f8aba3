"""Start of every chat, full-screen or plain: options, session, store."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.engine.hub.names import GUIDE
from tokamac.engine.options import KVSpec, Nodes, Sampling, TemplateOptions

from .. import settings
from ..backend import keep_awake
from ..backend.keep_awake import KeepAwake
from ..backend.processes import working_folder
from ..text.sanitise import sanitise_line

if TYPE_CHECKING:
    from ..backend.sharing import CardFinder
    from ..store.store import Store
    from .preferences import Preferences
    from .session import Session


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Command-line options; None means as in the settings.

    Attributes:
        prompt_cache: False disables reuse of earlier turns.
        memory: byte limit of the model.
        adapter, draft: "" disables the settings' one.
        parallel: max parallel replies. cpu_exact: no rounding on a CPU.
        nodes: processes that share the model; None is one.
        engine: overrides the command of the engine process.
        server: may use the engine of the same user's server.
        profile: by name; "" is none; None: the last chosen one.
        chat: a stored chat's ID or prefix. resume: open the last chat. prompt: file sent first.
        private: begin with a chat of which nothing is kept.
        read: settings already read.
        store_path, settings_path, log_path: default to the user's folders.
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
    pace: int | None = None
    nodes: Nodes | None = None
    system: str | None = None
    profile: str | None = None
    engine: Sequence[str] | None = None
    server: bool = True
    chat: str | None = None
    resume: bool = False
    prompt: str | None = None
    private: bool = False
    read: settings.LoadedSettings | None = None
    store_path: Path | None = None
    settings_path: Path | None = None
    log_path: Path | None = None


@dataclass(frozen=True, slots=True)
class ChatStart:
    """Everything a chat needs to start.

    Attributes:
        command: of the engine process, which logs to ``log``.
        warnings: problems of the settings.
        finder: finds an engine to share.
    """

    session: "Session"
    preferences: "Preferences"
    command: tuple[str, ...]
    log: Path
    keep_awake: KeepAwake
    warnings: tuple[str, ...]
    finder: "CardFinder"


def begin(options: ChatOptions) -> ChatStart:
    from ..backend.client import CHILD_COMMAND
    from ..backend.protocol import Load
    from ..backend.sharing import CardFinder
    from ..models.local import is_gone, lasting
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
    named = options.model or of_profile
    model, warnings = lasting(named or known.model), list(read.warnings)
    if named is None and is_gone(model):
        warnings.append(
            f"{sanitise_line(model)}, the model used last, is not on this disk. This is the guide; /model chooses another."
        )
        model = GUIDE
    preferences.asked_model = None if named is None else model
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
        private=options.private,
        wired=known.wired,
        pace=known.pace if options.pace is None else options.pace,
        pace_on_battery=known.pace_on_battery if options.pace is None else None,
        nodes=options.nodes,
    )
    session = Session(load, preferences.sampling, preferences.system, time.monotonic)
    log = options.log_path or _default_log()
    preferences.toolbox = Toolbox(known, working_folder(), log.with_stem(f"{log.stem}-mcp"))
    if problem := preferences.hold(own, session):
        warnings.append(problem)
    session.idle.after_min, session.keymap = known.unload_after_min, preferences.keymap
    session.tints_guesses = known.tint_guesses
    command = tuple(options.engine or CHILD_COMMAND)
    awake = KeepAwake(keep_awake.program(), lambda: preferences.settings.keep_awake)
    finder = CardFinder(off=not options.server or options.engine is not None)
    return ChatStart(session, preferences, command, log, awake, tuple(warnings), finder)


def found(options: ChatOptions) -> ChatOptions:
    """Resolve the chat's ID before a screen opens. Raises StoreError."""
    if options.chat is None:
        return options
    store, chosen = open_store(options)
    store.close()
    return replace(options, chat=chosen)


def open_store(options: ChatOptions) -> "tuple[Store, str | None]":
    """Return the store and the ID to open; None: a new chat. Raises StoreError."""
    from ..store.store import Store
    from ..store.values import NoChatError, StoreError

    store = Store.open(options.store_path)
    try:
        chosen = store.chat(options.chat) if options.chat is not None else store.latest() if options.resume else None
        if chosen is not None and chosen.deleted_at is not None:
            raise StoreError(f"Chat {chosen.id} was deleted", "`tokamac chats` lists the others.")
    except NoChatError as error:
        store.close()
        raise NoChatError(error.message, "`tokamac chats` lists them.") from None
    except BaseException:
        store.close()
        raise
    return store, None if chosen is None else chosen.id


def _default_log() -> Path:
    from platformdirs import user_log_path

    return user_log_path("tokamac") / "engine.log"
