"""What the actions of the chat do that need no screen: both views call these, with themselves as the ``ChatView``.

A function has the form of every command: it takes the view and the text after the slash command. What can't be done raises a
``TokamacError``, which the view shows; the rest is told through the view. ``COMMANDS`` has them by the registry's ids.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import ToolCall
from tokamac.engine.files import expanded
from tokamac.engine.hub.names import nearest
from tokamac.engine.options import KVSpec

from ..backend import chat_server
from ..backend.chat_server import ServerJob
from ..backend.protocol import Load
from ..models.local import hub_cache, must_be_downloaded, require
from ..models.names import is_id, lasting
from ..options import given_adapter, given_draft
from ..profiles import NO_PROFILE, Profile, differing, why_no_name
from ..sanitise import sanitise, sanitise_line
from ..settings import Settings, gigabytes_of, with_one
from ..settings_form import APP_FIELDS, MEMORY_FIELDS, SPEED_FIELDS, Sheet, summary, whole_number
from ..store.store import Store
from ..store.values import StoredChat
from ..tools.tool import Decision
from ..tools.toolbox import Consent, ListedTool, Toolbox
from ..units import size
from . import versions
from .actions import Action, no_action, refusal
from .attachments import Draft
from .conversation import MessageNode
from .listing import excerpt
from .preferences import Preferences, chosen, sentences
from .recording import LEFT, Recording
from .session import Session
from .steps import EnginePhase, Step

if TYPE_CHECKING:
    from ..markdown import OpenableLink

Severity = Literal["information", "warning", "error"]
NOT_SAVED = "Chats are not saved in this session; the reason was shown at the start."


class RefusedError(TokamacError):
    """An action can't be done now; the message says why."""


class CodeCycle:
    """Which code block ``copy_code`` takes: the last one first, then further back, and round again."""

    def __init__(self) -> None:
        self._of: tuple[int, int] | None = None
        self._back = 0

    def next(self, key: int, count: int) -> int:
        """Return how far back to go among the ``count`` blocks up to message ``key``: 1 is the last."""
        self._back = self._back % count + 1 if self._of == (key, count) else 1
        self._of = (key, count)
        return self._back


class LoadChoice:
    """The model, KV settings, adapter and draft model that the user chose: the next start takes them, once they load."""

    def __init__(self) -> None:
        self.model: str | None = None
        self.kv: KVSpec | None = None
        self.adapter: tuple[str, str | None] | None = None
        self.draft: tuple[str, str | None] | None = None

    def settings(self, load: Load, known: Settings) -> Settings:
        """Return ``known`` with what was chosen of ``load``, which has loaded."""
        adapters, drafts = known.adapters, known.drafts
        if self.adapter == (load.model, load.adapter):
            adapters = with_one(adapters, *self.adapter)
        if self.draft == (load.model, load.draft):
            drafts = with_one(drafts, *self.draft)
        model, kv = (
            (load.model if load.model == self.model else known.model),
            (load.kv if load.kv == self.kv else known.kv),
        )
        return replace(known, model=model, kv=kv, adapters=adapters, drafts=drafts)


class ChatView(Protocol):
    """What a command needs of the view that runs it."""

    shows_ids: bool
    """Whether notices name chats by their IDs too."""
    code_cycle: CodeCycle
    chosen: LoadChoice

    @property
    def session(self) -> Session:
        """The chat's state."""

    @property
    def preferences(self) -> Preferences:
        """The settings."""

    @property
    def recording(self) -> Recording | None:
        """What saves the chat; None where nothing does."""

    def perform(self, steps: Sequence[Step]) -> None:
        """Do what the session asks."""

    def tell(self, text: str, severity: Severity = "information") -> None:
        """Tell the user something beside the text."""

    def say(self, text: str) -> None:
        """Show what was asked for."""

    def selected(self) -> MessageNode | None:
        """Return the selected message, or else the last one; None where there is none."""

    def reply(self, make: Callable[[], list[Step]]) -> None:
        """Perform what ``make`` returns, by which a reply may begin, once the engine is ready for one."""

    def go(self, key: int) -> None:
        """Switch to the path through the message ``key``, and show it."""

    def begin_edit(self, key: int, draft: Draft, text: str) -> None:
        """Edit the prompt ``key``, which was ``draft``; ``text``: send this in its place at once."""

    def begin_revision(self, key: int, said: str, text: str) -> None:
        """Edit the reply ``key``, which ``said`` that; ``text``: put this in its place at once."""

    def open_chat(self, chat: str) -> None:
        """Open the stored chat of this ID. Raises StoreError."""

    def find_chat(self, name: str) -> StoredChat:
        """Return the stored chat that the user means by ``name``. Raises StoreError."""

    def begin_new(self) -> bool:
        """Leave the chat for a new one; return whether an unsent prompt stays with it."""

    def copy(self, text: str) -> str:
        """Copy ``text``; return a sentence that says how."""

    def load(self, load: Load) -> None:
        """Load a model, and keep ``chosen`` in the settings once it has loaded."""

    def download(self, model: str) -> None:
        """Download a model, which is not loaded."""

    def show(self) -> None:
        """Show what was changed beside the conversation."""

    def rekey(self) -> None:
        """Hear and name the keys that hold now: some were changed."""

    @property
    def server(self) -> ServerJob:
        """The server on the chat's engine."""

    @property
    def server_url(self) -> str:
        """Where a server answers whose engine this chat uses; "" where the engine is its own."""

    def begin_server(self, port: int) -> None:
        """Start the server, with the engine shared. Raises SharingError."""

    def stop_server(self) -> None:
        """Stop it."""


Command = Callable[[ChatView, str], None]


def recording_of(view: ChatView) -> Recording:
    """Return what saves the chats. Raises RefusedError where nothing does."""
    if view.recording is None:
        raise RefusedError(NOT_SAVED)
    return view.recording


def save_settings(view: ChatView, settings: Settings) -> None:
    """Apply and write the settings; tell why they could not be written."""
    if problem := view.preferences.keep(settings):
        view.tell(problem, "warning")


def apply_choice(view: ChatView, problem: str) -> None:
    """Apply what was chosen for the chat, save it with the chat, and tell the ``problem`` of writing it, if any."""
    view.preferences.give(view.session)
    if view.recording is not None:
        view.recording.keep_own()
    if problem:
        view.tell(problem, "warning")


def _titled(view: ChatView, chat: StoredChat) -> str:
    """Return what a notice calls a chat."""
    title = excerpt(chat.title or chat.draft) or "untitled"
    return f"{title} ({chat.id})" if view.shows_ids else title


# Conversations ------------------------------------------------------------------------------------------------------------


def new_chat(view: ChatView, _: str) -> None:
    """Start another conversation; this one is saved."""
    if view.session.turns:
        view.tell("New chat. The model stays loaded.")
    if view.begin_new():
        view.tell(LEFT)


def title(view: ChatView, text: str) -> None:
    """Give the conversation a title."""
    recording = recording_of(view)
    if recording.chat is None:
        raise RefusedError("This chat has no messages yet, so it can't have a title.")
    if not text:
        raise RefusedError("Write the title after the command: /title Keys and values")
    if recording.retitle(text):
        view.tell("Chat renamed.")


def pin(view: ChatView, name: str) -> None:
    """Pin the chat ``name``, or the open one; a pinned one is pinned no longer."""
    recording = recording_of(view)
    if not (wanted := name or recording.chat):
        raise RefusedError("This chat has no messages yet, so it can't be pinned.")
    found = view.find_chat(wanted) if name else recording.store.chat(wanted)
    pinned = recording.store.pin(found.id, pinned=found.pinned_at is None).pinned_at is not None
    view.tell(f"{'Pinned' if pinned else 'No longer pinned'}: {_titled(view, found)}.")


def folder(view: ChatView, name: str) -> None:
    """Move the open chat to the folder ``name``, or say which there are."""
    recording = recording_of(view)
    if not name:
        known = [f"{sanitise_line(each)} ({count})" for each, count in recording.store.folders()]
        view.say(f"Folders: {', '.join(known)}." if known else "There are no folders yet. /folder NAME makes one.")
        return
    if recording.chat is None:
        raise RefusedError("This chat has no messages yet, so it can't be in a folder.")
    moved = recording.store.move(recording.chat, "" if name.lower() == "none" else name)
    view.tell(
        f"This chat is in the folder {sanitise_line(moved.folder)}." if moved.folder else "This chat is in no folder."
    )


def delete_chat(view: ChatView, name: str) -> None:
    """Delete the chat ``name``, or the open one."""
    recording = recording_of(view)
    if not (wanted := name or recording.chat):
        raise RefusedError("There is nothing to delete yet.")
    found = view.find_chat(wanted) if name else recording.store.chat(wanted)
    delete(view, found, back=view.session.keymap.key("restore_chat"))


def delete(view: ChatView, chat: StoredChat, *, back: str) -> None:
    """Delete ``chat``; the open one once another has begun. back: what restores it. Raises TokamacError."""
    recording = recording_of(view)
    if chat.deleted_at is not None:
        view.tell(f"This chat is already deleted. /restore {chat.id} restores it.")
    elif chat.id != recording.chat and (chat.id == recording.running or chat.id in recording.waiting):
        stops = view.session.keymap.key("stop")
        raise RefusedError(f"A reply is running or queued in this chat: wait, or stop it with {stops}, then delete.")
    elif chat.id != recording.chat:
        recording.store.delete(chat.id)
        view.tell(f"Deleted: {_titled(view, chat)}. {back} restores it.")
    elif view.session.replying:
        raise RefusedError(f"A reply is running: wait, or stop it with {view.session.keymap.key('stop')}, then delete.")
    elif view.session.queued:  # it would be sent in the background, which restores the chat
        takes_back = view.session.keymap.key("earlier")
        raise RefusedError(f"A prompt is queued in this chat: wait, or take it back with {takes_back}, then delete.")
    elif recording.missing():  # after another try
        raise RefusedError("Part of this chat could not be saved. If you delete it now, that part is lost.")
    else:
        unsent = view.begin_new()  # before it is deleted: what is still to be written of a chat would restore it
        recording.store.delete(chat.id)
        draft = " with your unsent prompt" if unsent else ""
        view.tell(f"Deleted: {_titled(view, chat)}. This is a new chat. {back} restores the old one{draft}.")


def restore_chat(view: ChatView, name: str) -> None:
    """Restore and open the chat ``name``, or the one deleted last."""
    store = recording_of(view).store
    found = view.find_chat(name) if name else store.last_deleted()
    if found is None:
        view.tell("No chat is deleted.")
    elif found.deleted_at is None:
        view.tell(f"This chat is not deleted. /open {found.id} opens it.")
    else:
        store.undelete(found.id)
        view.open_chat(found.id)
        view.tell(f"Restored: {_titled(view, found)}.")


def fork(view: ChatView, _: str) -> None:
    """Continue from the selected message in a copy; this chat stays as it is."""
    recording, node = recording_of(view), view.selected()
    stored = None if node is None else recording.stored(node.key)
    if recording.chat is None or stored is None:
        raise RefusedError("There is nothing to continue from yet.")
    view.open_chat(recording.store.fork(recording.chat, stored).id)
    view.tell("This is a copy. The original chat is unchanged.")


def imported(file: Path, path: str) -> str:
    """Create a chat in the store ``file`` from the file at ``path``; return its ID. For any thread. Raises StoreError."""
    from ..export import bring

    archive = bring(expanded(path), now=time.time())
    with Store.open(file) as store:
        return store.adopt(archive).id


def exported(view: ChatView) -> tuple[str, str]:
    """Return the ID of the chat to export, and a sentence on turns that are missing from it, or "". Raises RefusedError."""
    recording = recording_of(view)
    if not view.session.turns:
        raise RefusedError("There is nothing to export yet.")
    if view.session.replying:
        raise RefusedError(f"A reply is running: wait, or stop it with {view.session.keymap.key('stop')}, then export.")
    missing = recording.missing()
    if recording.chat is None:
        raise RefusedError("Nothing of this chat could be saved, so there is nothing to export.")
    return recording.chat, missing


# Keys ---------------------------------------------------------------------------------------------------------------------


def keys(view: ChatView, written: str) -> None:
    """List the keys of the full screen, or change those of one action: ``explain f8, alt+e``, ``explain default``."""
    name, _, wanted = written.partition(" ")
    known = {action.id: action for action in view.preferences.keymap.actions}
    if not name:
        view.say("\n".join(_keys_line(action) for action in known.values()))
    elif name not in known:
        raise RefusedError(f"{sanitise_line(name)}: {no_action(name)}.")
    elif not wanted:
        view.say(f"{_keys_line(known[name])}. /keys {name} f8 gives it that key; /keys {name} default resets it.")
    else:
        chosen = () if wanted == NONE else tuple(key.strip().lower() for key in wanted.split(","))
        view.tell(choose_keys(view, name, None if wanted == USUAL else chosen))


USUAL, NONE = "default", "none"
"""Instead of a key: those of the registry, or none."""


def choose_keys(view: ChatView, action: str, keys: tuple[str, ...] | None) -> str:
    """Give an action these keys, or its usual ones (None), from now on; return what it has, or what of it could not be written.

    Raises RefusedError where it can't have them.
    """
    if keys is not None and (why := refusal(action, keys, view.preferences.settings.keys)):
        raise RefusedError(f"{action} keeps its keys: {sanitise_line(why)}.")
    problem = view.preferences.choose_keys(action, keys)
    view.rekey()
    now = next(each for each in view.preferences.keymap.actions if each.id == action)
    return problem or f"{_keys_line(now)}."


def _keys_line(action: Action) -> str:
    """Return an action's id, label and keys: ``explain (Explain): F2, Ctrl+X E``."""
    held = action.key_names if action.keys else f"no key{f'; {action.usage}' if action.slash else ''}"
    return f"{action.id} ({action.label}): {held}"


# Messages -----------------------------------------------------------------------------------------------------------------


def regenerate(view: ChatView, text: str) -> None:
    """Regenerate the last reply, or write several versions of it at once."""
    _again(view, text, None)


def again(view: ChatView, text: str) -> None:
    """Regenerate the selected reply, or write several versions of it at once."""
    _again(view, text, _selected_key(view))


def _again(view: ChatView, text: str, key: int | None) -> None:
    session, count = view.session, versions.wanted(text)
    if count is None:
        view.reply(lambda: session.regenerate(key))
    else:
        view.reply(lambda: session.write_versions(versions.samples(count, session.settings, session.engine.info), key))


def compare(view: ChatView, text: str) -> None:
    """Write the last reply, or the selected one, with several values of one setting at once."""
    session, key = view.session, _selected_key(view)
    if not text:
        raise RefusedError(f"Write a setting and its values: {versions.EXAMPLES}.")
    view.reply(lambda: session.write_versions(versions.compared(text, session.settings, session.engine.info), key))


def continue_(view: ChatView, _: str) -> None:
    """Continue the selected reply."""
    view.reply(lambda: view.session.continue_reply(_selected_key(view)))


def _selected_key(view: ChatView) -> int | None:
    node = view.selected()
    return None if node is None else node.key


def edit(view: ChatView, text: str) -> None:
    """Edit the selected prompt, or the one that the selected reply answers."""
    node = view.selected()
    if node is None:
        raise RefusedError("There is no message to edit yet.")
    if (prompt := view.session.conversation.prompt_of(node.key)) is None:
        raise RefusedError("There is no prompt to edit here.")
    view.begin_edit(prompt.key, Draft(sanitise(prompt.prompt or ""), prompt.attachments), text)


def edit_reply(view: ChatView, text: str) -> None:
    """Edit the selected reply, or that to the selected prompt."""
    node = view.selected()
    at = None if node is None else view.session.conversation.reply_at(node.key)
    if at is None or at.reply is None:
        raise RefusedError("There is no reply to edit yet.")
    view.begin_revision(at.key, sanitise(at.reply.text), sanitise(text))


def older(view: ChatView, _: str) -> None:
    """Show the previous version."""
    _step(view, -1)


def newer(view: ChatView, _: str) -> None:
    """Show the next version."""
    _step(view, 1)


def _step(view: ChatView, by: int) -> None:
    """Switch to another version of the selected message, or of the last one before it that has several."""
    node = view.selected()
    other = None if node is None else view.session.conversation.tree.beside(node.key, by)
    if other is None:
        raise RefusedError(one_version(view))
    view.go(other)


def one_version(view: ChatView) -> str:
    """Return the sentence that there are no other versions."""
    edits, regenerates = (view.session.keymap.key(action) for action in ("edit", "regenerate"))
    return f"There is only one version. Editing ({edits}) or regenerating ({regenerates}) adds another."


def copy_message(view: ChatView, _: str) -> None:
    """Copy the selected message as it was written, but for control characters."""
    node = view.selected()
    text = "" if node is None else node.prompt or (node.reply.text if node.reply is not None else "")
    if node is not None and node.result is not None:
        text = node.result.text
    if not text:
        raise RefusedError("There is no message to copy yet.")
    view.tell(view.copy(sanitise(text)))


def copy_code(view: ChatView, _: str) -> None:
    """Copy the last code block up to the selected message; again: the one before it."""
    from ..markdown import code_blocks

    node = view.selected()
    path = [] if node is None else view.session.conversation.tree.path_to(node.key)
    blocks = [block for each in path if each.reply is not None for block in code_blocks(each.reply.text)]
    if node is None or not blocks:
        raise RefusedError("There is no code block here.")
    back = view.code_cycle.next(node.key, len(blocks))
    which = f"Code block {len(blocks) - back + 1} of {len(blocks)}. " if len(blocks) > 1 else ""
    view.tell(which + view.copy(sanitise(blocks[-back])))


def links_of(view: ChatView) -> "list[OpenableLink]":
    """Return the links of the selected message, or of the last reply before it that has any. Raises RefusedError."""
    from ..markdown import links

    node = view.selected()
    path = [] if node is None else view.session.conversation.tree.path_to(node.key)
    for each in reversed(path):
        text = each.prompt or (each.reply.text if each.reply is not None else "")
        if found := links(sanitise(text)):
            return found
    raise RefusedError("There is no link here.")


def list_links(view: ChatView, _: str) -> None:
    """Say the links of the last reply that has any."""
    view.say("\n".join(f"{sanitise_line(link.text)}: {link.address}" for link in links_of(view)))


# Models and settings ------------------------------------------------------------------------------------------------------


RELOADING, RELOADING_WITHOUT = "The model is reloading with it.", "The model is reloading without one."


def adapter(view: ChatView, written: str) -> None:
    """Load the model with another adapter, or without one, and keep that for this model; or say which it has."""
    load = view.session.engine.load
    if not written:
        none = "This model has no adapter. /adapter and a folder or a Hugging Face ID adds one."
        view.say(none if load.adapter is None else sanitise_line(load.adapter))
        return
    wanted = given_adapter(written) or None
    view.chosen.adapter = load.model, wanted
    view.tell(RELOADING if wanted else RELOADING_WITHOUT)
    view.load(replace(load, adapter=wanted))


def serve(view: ChatView, written: str) -> None:
    """Start a server on the chat's engine, or say how it is, or stop it."""
    if view.server_url:
        raise RefusedError(f"This chat uses the engine of a server already, which answers at {view.server_url}.")
    if written == "stop":
        if not view.server.on:
            raise RefusedError("There is no server. /serve starts one.")
        view.stop_server()
        return
    if view.server.on:
        view.say(f"{view.server.line}. /serve stop stops it.")
        return
    port = whole_number(written) if written else chat_server.PORT
    if port is None or not 1 <= port <= 65535:
        raise RefusedError("Write /serve and a port, 1 to 65535, or /serve stop.")
    if any(find_spec(name) is None for name in chat_server.NEEDS):
        raise RefusedError("The server needs starlette and uvicorn. Install them: pip install 'tokamac[serve]'.")
    if view.session.engine.phase is EnginePhase.UNLOADED:  # there is no process to serve
        view.perform(view.session.start())
    view.begin_server(port)


def draft(view: ChatView, written: str) -> None:
    """Load the model with another draft model, or without one, and keep that for this model; or say which it has."""
    load = view.session.engine.load
    if not written:
        view.say(no_draft(load.model) if load.draft is None else sanitise_line(load.draft))
        return
    wanted = given_draft(written) or None
    if wanted is not None and not load.speculation:
        raise RefusedError("Guessing ahead is off. Turn it on under /settings, then add a draft model.")
    view.chosen.draft = load.model, wanted
    view.tell(RELOADING if wanted else RELOADING_WITHOUT)
    view.load(replace(load, draft=wanted))


def no_draft(model: str) -> str:
    """Return that a model has no draft model, and which would fit."""
    from tokamac.engine.perf.catalogue import draft_for

    none = "This model has no draft model."
    if (known := draft_for(model)) is None:
        return f"{none} /draft and a folder or a Hugging Face ID adds one; none is known for it."
    more = "" if known.published_bytes is None else f" ({size(known.published_bytes)})"
    return f"{none} {known.id}{more} has the same tokenizer: /draft {known.id} adds it. What if predicts its gain, under Guesses."


def pull(view: ChatView, model: str) -> None:
    """Download a model; it is not loaded."""
    if not is_id(model):
        raise RefusedError("Write /pull and a Hugging Face ID, such as org/name.")
    if must_be_downloaded(model, hub_cache()):
        view.download(model)
    else:
        view.tell(f"{sanitise_line(model)} is already on this disk. /model {sanitise_line(model)} loads it.")


def thinking(view: ChatView, text: str) -> None:
    """Say what the chat template is told in this chat, or change it from the next message on."""
    session = view.session
    if not text:
        view.say(sentences(session.template, session.engine.info))
        return
    template = chosen(text, session.template, session.engine.info)
    apply_choice(view, view.preferences.choose_template(template, own=True))
    view.tell(f"{sentences(template, None)} This applies to this chat, from the next message on.")


def current_sheet(view: ChatView) -> Sheet:
    """Return the settings of the open chat, the model and the app as the form has them."""
    session, preferences = view.session, view.preferences
    limit = gigabytes_of(session.engine.load.memory)
    values = replace(
        preferences.settings,
        unload_after_min=session.idle.after_min,
        memory_gb=limit,
        parallel=session.engine.load.parallel,
        speculation=session.engine.load.speculation,
        cpu_exact=session.engine.load.cpu_exact,
    )
    own = preferences.own.sampling is not None or preferences.own.template is not None
    return Sheet(session.template, session.sampling, session.engine.load.kv, values, own)


def apply_sheet(view: ChatView, sheet: Sheet) -> bool:
    """Apply and keep what was changed in the form; return whether the model is loaded again for it.

    How keys and values are kept goes to the settings once a model has loaded with it. A flag's memory limit is for one run.
    """
    before, session, preferences = current_sheet(view), view.session, view.preferences
    known, engine = preferences.settings, session.engine
    names = [field.name for field in (*MEMORY_FIELDS, *SPEED_FIELDS, *APP_FIELDS)]
    changed = {name: getattr(sheet.settings, name) for name in names}
    changed = {name: value for name, value in changed.items() if value != getattr(before.settings, name)}
    holds = sheet.kv == engine.load.kv and engine.info is not None and not preferences.names_kv(preferences.profile)
    save_settings(view, replace(known, **changed, kv=sheet.kv if holds else known.kv))
    session.idle.after_min = sheet.settings.unload_after_min
    session.tints_guesses = sheet.settings.tint_guesses
    if _is_chosen(sheet, before, sheet.template != before.template, preferences.own.template):
        apply_choice(view, preferences.choose_template(sheet.template, own=sheet.own))
    if _is_chosen(sheet, before, sheet.sampling != before.sampling, preferences.own.sampling):
        apply_choice(view, preferences.choose_sampling(sheet.sampling, own=sheet.own))
    load = replace(
        engine.load,
        kv=sheet.kv,
        memory=sheet.settings.memory_bytes,
        parallel=sheet.settings.parallel,
        speculation=sheet.settings.speculation,
        cpu_exact=sheet.settings.cpu_exact,
    )
    if load == engine.load:
        return False
    view.chosen.kv = sheet.kv
    view.load(load)
    return True


def _is_chosen(sheet: Sheet, before: Sheet, changed: bool, own: object) -> bool:
    """Whether a part of the sheet is to be kept: it has ``changed``, or is the chat's own (``own``) from now on, or no more."""
    return changed or (not before.own if sheet.own else own is not None)


PROFILE_HOW = "/profile save NAME keeps the model, settings and system prompt of this chat."


def profile(view: ChatView, text: str) -> None:
    """List the profiles, apply one to this chat, or keep this chat's setup as one."""
    verb, _, name = text.partition(" ")
    match verb.lower():
        case "":
            view.say(listed_profiles(view))
        case "save":
            view.tell(save_profile(view, name.strip()))
        case "delete":
            view.tell(delete_profile(view, name.strip()))
        case _:
            use_profile(view, "" if text.lower() == NO_PROFILE else text)


def listed_profiles(view: ChatView) -> str:
    """Return the profiles in lines, the open chat's marked."""
    known, now = view.preferences.profiles(), view.preferences.profile
    lines = [f"{'*' if name == now else ' '} {sanitise_line(name)}: {summary(each)}" for name, each in known.items()]
    applies = "/profile NAME applies one, /profile none goes back to the settings."
    return "\n".join([*lines, f"{applies} {PROFILE_HOW}"] if lines else [f"There are no profiles yet. {PROFILE_HOW}"])


def known_profile(view: ChatView, name: str) -> Profile:
    """Return the profile of this name. Raises RefusedError."""
    known = view.preferences.profiles()
    if name in known:
        return known[name]
    if not known:
        raise RefusedError(f"There are no profiles yet. {PROFILE_HOW}")
    near = nearest(name, known)
    meant = f"did you mean {sanitise_line(near)}" if near is not None else f"there are: {', '.join(known)}"
    raise RefusedError(f"There is no profile {sanitise_line(name):.40}; {sanitise_line(meant)}.")


def use_profile(view: ChatView, name: str) -> None:
    """Apply a profile to the open chat, and load its model; "" is none: this chat has the settings of every chat again."""
    preferences, session = view.preferences, view.session
    wanted = known_profile(view, name) if name else Profile()
    load = session.engine.load
    if wanted.model is not None:
        require(wanted.model, name)
        model = lasting(wanted.model)
        load = load.of(model, *preferences.settings.beside(model))
    if preferences.names_kv(name) or preferences.names_kv(preferences.profile):
        load = replace(load, kv=preferences.kv(name))
    apply_choice(view, preferences.choose_profile(name))
    shown = sanitise_line(name)
    said = f"Profile {shown}: applies to this chat from the next message on, and to new chats." if name else PROFILE_OFF
    if load != session.engine.load:
        view.tell(f"{said} Loading {sanitise_line(load.model)}.")
        view.chosen.model = load.model
        view.load(load)
    else:
        view.tell(said)
        view.show()


def use_asked_profile(view: ChatView) -> None:
    """Apply the profile that the command line asked for to a chat that was opened; flags beside it go before it."""
    preferences = view.preferences
    if preferences.asked_profile is not None:
        preferences.own = replace(preferences.for_new_chat, tools=preferences.own.tools)
        apply_choice(view, "")


PROFILE_OFF = "No profile: this chat has the settings of every chat again, and so have new ones."


def save_profile(view: ChatView, name: str, *, again: bool = False) -> str:
    """Keep the model, settings and system prompt of the open chat as a profile, which the chat has from here on; say so.

    again: in place of one that the chat does not have. Raises RefusedError.
    """
    preferences, session = view.preferences, view.session
    if why := why_no_name(name):
        raise RefusedError(f"{why} Write /profile save coding, for example.")
    known, shown = preferences.profiles(), sanitise_line(name)
    if name in known and preferences.profile != name and not again:
        raise RefusedError(f"There is a profile {shown} already. /profile delete {shown} makes room for this one.")
    everywhere = preferences.settings
    options = {
        **differing(session.sampling, everywhere.sampling),
        **differing(session.template, everywhere.template),
        **differing(session.engine.load.kv, everywhere.kv),
    }
    system = session.system if session.system or everywhere.system else None
    made = Profile(session.engine.load.model, system, preferences.tools or None, options)
    problems = [preferences.keep_profile(name, made), preferences.choose_profile(name)]
    apply_choice(view, " ".join(filter(None, problems)))
    view.show()
    return f"{'Changed' if name in known else 'Saved'} the profile {shown}: {summary(made)}."


def delete_profile(view: ChatView, name: str) -> str:
    """Delete a profile, and say so; chats keep what they have of it."""
    known_profile(view, name)
    problem = view.preferences.keep_profile(name, None)
    view.preferences.give(view.session)
    view.show()
    return problem or f"Deleted the profile {sanitise_line(name)}. Chats keep the settings that they have of it."


CONSENTS: Mapping[Consent, str] = {"asks": "asks", "chat": "allowed in this chat", "always": "always allowed"}


def tools(view: ChatView, text: str) -> None:
    """List the tools, turn some on or off in this chat, or have their calls ask again."""
    switch, *names = text.replace(",", " ").split() or [""]
    match switch:
        case "":
            view.say("\n".join([*map(_tool_line, listed_tools(view)), TOOLS_HINT]))
        case "ask":
            known = {each.name for each in listed_tools(view)}
            if unknown := next((name for name in names if name not in known), ""):
                raise RefusedError(f"There is no tool {sanitise_line(unknown):.60}. /tools lists them.")
            view.tell(ask_again(view, names or known))
        case "on" | "off":
            view.tell(*switch_tools(view, names, on=switch == "on"))
        case _:
            view.tell(*switch_tools(view, [switch, *names], on=None))


TOOLS_HINT = (
    "/tools on NAME turns one on in this chat, /tools off NAME off; after /tools ask NAME its calls ask again. "
    "tokamac help tools explains."
)


def _toolbox(view: ChatView) -> Toolbox:
    if view.preferences.toolbox is None:
        raise RefusedError("No tools are available here.")
    return view.preferences.toolbox


def listed_tools(view: ChatView) -> list[ListedTool]:
    """Return all tools and MCP servers, with what holds for them in the open chat. Raises RefusedError."""
    allowed = view.session.conversation.allowed
    return _toolbox(view).listed(view.preferences.tools, allowed, view.preferences.settings.tools.allowed)


def _tool_line(tool: ListedTool) -> str:
    what = "MCP server, " if tool.server else ""
    asks = "" if tool.consent == "asks" else f" ({CONSENTS[tool.consent]})"
    lead = " " * 5 if tool.of_server else f"{'on ' if tool.on else 'off'}  "
    return f"{lead}{sanitise_line(tool.name):<13} {what}{sanitise_line(tool.about)}{asks}"


def switch_tools(view: ChatView, names: Sequence[str], *, on: bool | None) -> tuple[str, Severity]:
    """Turn tools and servers on or off in the open chat, None: each the other way; return what is on now, in a sentence.

    No names: all that are built in, or off, all. Raises TokamacError.
    """
    preferences, info, box = view.preferences, view.session.engine.info, _toolbox(view)
    named = box.check(names or (box.built_in if on else box.names))
    now = [name for name in preferences.tools if name not in named or on]
    now += [name for name in named if name not in preferences.tools and on is not False]
    box.retry(named)
    preferences.choose_tools(now)
    apply_choice(view, "")
    view.show()
    if now and info is not None and not info.takes_tools:
        return f"Tools are on, but {sanitise_line(info.name)} can't call any. Another model may.", "warning"
    asks = not set(now) <= set(view.preferences.settings.tools.allowed)
    on_now = f"Tools on in this chat: {', '.join(now)}.{' Calls ask you first.' if asks else ''}"
    return (on_now if now else "All tools are off."), "information"


def ask_again(view: ChatView, names: Collection[str]) -> str:
    """Take back what the user allowed these tools, for the open chat and for good; return a sentence."""
    for name in names:
        view.session.ask_again(name)
        if name in view.preferences.settings.tools.allowed and (
            problem := view.preferences.allow_tool(name, always=False)
        ):
            view.tell(problem, "warning")
    which = sanitise_line(next(iter(names))) if len(names) == 1 else "all of these tools"
    return f"Every call of {which} asks you again."


def decide(view: ChatView, call: ToolCall, decision: Decision) -> None:
    """Take the user's answer to a call that asks; one for good goes to the settings."""
    if decision == "always" and (problem := view.preferences.allow_tool(call.name, always=True)):
        view.tell(problem, "warning")
    view.perform(view.session.consent(call.id, decision))


COMMANDS: Mapping[str, Command] = {
    "new_chat": new_chat,
    "title": title,
    "pin": pin,
    "folder": folder,
    "delete_chat": delete_chat,
    "restore_chat": restore_chat,
    "fork": fork,
    "regenerate": regenerate,
    "again": again,
    "compare": compare,
    "continue": continue_,
    "edit": edit,
    "edit_reply": edit_reply,
    "older": older,
    "newer": newer,
    "copy_message": copy_message,
    "copy_code": copy_code,
    "links": list_links,
    "adapter": adapter,
    "draft": draft,
    "serve": serve,
    "pull": pull,
    "thinking": thinking,
    "profile": profile,
    "keys": keys,
    "tools": tools,
}
"""By the registry's ids."""
