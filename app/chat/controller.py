"""The chat that both views show: its session, engine, settings, store and unsent text, and the way from one chat to another.

What an action does is in ``commands`` and ``setup``, over a ``Chat``; a view is what a ``Chat`` asks of a screen or a terminal.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from tokamac.engine.errors import TokamacError
from tokamac.engine.options import KVSpec

from ..backend.client import BackendEvent
from ..backend.keep_awake import KeepAwake
from ..backend.processes import ChatServer, ShellCommand
from ..backend.protocol import AskWhatIf, ChatCase, Load, Loaded, Question, Request, WhatIf
from ..backend.sharing import CardFinder, ChatEngine
from ..settings import Settings, with_one
from ..store.store import Store
from ..store.values import Attachment, StoredChat, StoreError, ToolResult
from ..text import units
from ..text.sanitise import sanitise_line
from ..tools.calls import Line, ToolError
from . import figures
from .attachments import Draft, apart, joined
from .conversation import MessageNode, Reply
from .external_programs import copy_text, forget_copied
from .listing import ending_text, excerpt
from .preferences import ChatOverrides, Preferences
from .recording import LEFT, Recording
from .session import Session
from .settings_form import whole_number
from .steps import (
    Ask,
    AskConsent,
    Elsewhere,
    EndEngine,
    Notice,
    PromptRefused,
    ReplyEnded,
    RunTool,
    StartEngine,
    Step,
    StopTools,
    TurnBegun,
)
from .versions import Versions

Severity = Literal["information", "warning", "error"]
PRIVATE = "This chat is private: nothing of it is kept. /private ends and forgets it."
NOT_SAVED = "Chats are not saved in this session; the reason was shown at the start."
GOES_ON = "The reply goes on in the background; {} shows it."
GIVEN_UP = "The reply was stopped: this chat can't be saved, so it would be lost."


class RefusedError(TokamacError):
    """An action can't be done now; the message says why."""


@dataclass(frozen=True, slots=True)
class UserChoice:
    """A question to the user, and what they can answer."""

    title: str
    lines: tuple[Line, ...]
    answers: tuple[str, ...]


class ChatView(Protocol):
    """What a screen, or a terminal, does for the chat."""

    @property
    def selected(self) -> int | None:
        """The message that the user selected."""

    def tell(self, text: str, severity: Severity = "information") -> None:
        """Tell the user something beside the text."""

    def show(self, text: str) -> None:
        """Show what was asked for."""

    def draw(self, step: Step | None = None) -> None:
        """Draw a step of the session; None: what was changed beside the conversation."""

    def ask(self, key: int, draft: Draft, text: str) -> None:
        """Have the user edit the message ``key``, which was ``draft``; ``text``: put this in its place at once."""

    def edited(self, text: str) -> str:
        """Return what the user's editor makes of ``text``. Raises RefusedError."""

    def open(self, action: str, argument: str = "") -> None:
        """Do an action that looks different on a screen and in lines: most open a dialog, or list something."""

    def choose(self, choice: UserChoice, then: Callable[[int], None]) -> None:
        """Have the user answer; ``then`` gets the answer's index, and nothing where there is none."""

    def opened(self, chat: str) -> None:
        """Another chat is open; "" is a new one."""

    def forget(self, *, private: bool) -> None:
        """Forget what was typed. private: and remember no more of it."""

    def turn_to(self, key: int | None = None) -> None:
        """Let the user go on from the message ``key``, or from the input."""

    def wait(self) -> None:
        """Wait until the model has loaded, where nobody can see that it does."""

    def later(self, work: Callable[[], list[Step]]) -> None:
        """Have the chat's thread perform what ``work`` returns; called from any thread."""

    def aside(self, work: Callable[[], Callable[[], None]]) -> None:
        """Do ``work``, which may take long, and then on the chat's thread what it returns."""

    def quit(self) -> None:
        """Leave the chat; ask once more while models are downloaded or converted."""


class InputBox(Protocol):
    """Where the user writes."""

    @property
    def draft(self) -> Draft:
        """What is written."""

    def put(self, draft: Draft) -> None:
        """Replace what is written."""

    def give_back(self, text: str, attachments: tuple[Attachment, ...] = ()) -> None:
        """Put what was not sent before what is written."""

    def mark(self, editing: Literal["", "prompt", "reply"]) -> None:
        """Show what is edited here."""


class Composer:
    """The unsent text: the input box and what waits behind it. editing: the message that is edited in the box, if any.

    An edit that is left for another one stays with its message: it is in the box again when that message is edited again.
    """

    def __init__(self, box: InputBox, queued: Callable[[], Sequence[Draft]] = tuple) -> None:
        self.editing: int | None = None
        self._input = box
        self._queued = queued
        self._aside = Draft()  # the draft, while a message is edited
        self._edited = Draft()  # that message as it was
        self._left: dict[int, Draft] = {}  # edits that were left for another one

    @property
    def written(self) -> Draft:
        """What stands in the box."""
        return self._input.draft

    @property
    def unsent(self) -> Draft:
        """All unsent text. An edit that has changed nothing does not count."""
        return joined([*self._queued(), self.box])

    @property
    def box(self) -> Draft:
        """The unsent text beside what is queued."""
        held = [] if self._is_unchanged else [self._input.draft]
        aside = [] if self.editing is None else [self._aside]
        return joined([*aside, *self._left.values(), *held])

    @property
    def _is_unchanged(self) -> bool:
        return self.editing is not None and self._input.draft == self._edited

    def begin_edit(self, key: int, draft: Draft, *, reply: bool = False) -> bool:
        """Edit the message ``key``, which was ``draft``, in the box; the draft in the box comes back after.

        Returns whether another edit was left for this one.
        """
        if key == self.editing:
            return False
        leaves = self.editing is not None and not self._is_unchanged and bool(self._input.draft.whole)
        if self.editing is None:
            self._aside = self._input.draft
        elif leaves:
            self._left[self.editing] = self._input.draft
        self._edit(key, "reply" if reply else "prompt")
        self._input.put(draft)
        self._edited = self._input.draft
        if (begun := self._left.pop(key, None)) is not None:
            self._input.put(begun)
        return leaves

    def end_edit(self) -> None:
        """End the edit, if there is one, and put the draft back. Edits that were left stay with their messages."""
        if self.editing is not None:
            self._edit(None)
            self._input.put(self._aside)

    def hold(self, draft: Draft) -> None:
        """Replace all unsent text, edits too."""
        self._edit(None)
        self._left.clear()
        self._input.put(draft)

    def give_back(self, draft: Draft) -> None:
        """Put a prompt that was not sent before the draft."""
        if self.editing is None:
            self._input.give_back(draft.text, draft.attachments)
        else:
            self._aside = joined([draft, self._aside])

    def _edit(self, key: int | None, what: Literal["", "prompt", "reply"] = "") -> None:
        self.editing = key
        self._input.mark(what)


class History:
    """The place in the prompts sent before. The text that was in the box is the draft that one comes back to."""

    def __init__(self) -> None:
        self._sent: Sequence[str] = ()
        self._at = -1  # index of the prompt shown; -1 is the draft
        self._draft = Draft()

    def older(self, shown: Draft, sent: Callable[[], Sequence[str]]) -> Draft | None:
        """Return the prompt sent before the one shown; None where there is none. ``sent`` has the newest first."""
        if not self._shows(shown):
            known = sent()
            again = bool(known) and bool(shown.text) and known[0] == shown.text  # a prompt that came back
            self._sent, self._at, self._draft = known[again:], -1, shown
        if self._at + 1 >= len(self._sent):
            return None
        self._at += 1
        return self._here()

    def newer(self, shown: Draft) -> Draft | None:
        """Return the prompt sent after the one shown, at last the draft; None where that is shown."""
        if not self._shows(shown):
            return None
        self._at -= 1
        return self._here()

    def forget(self) -> None:
        """Start from the end: the text in the box was sent."""
        self._at = -1

    def _shows(self, shown: Draft) -> bool:
        return self._at >= 0 and shown == self._here()

    def _here(self) -> Draft:
        return self._draft if self._at < 0 else Draft(self._sent[self._at])


class Bridge:
    """Owns the engine's process. ``post`` is told, from other threads, what it says, and the number of the process."""

    post: Callable[[BackendEvent, int], object]

    def __init__(
        self, command: Sequence[str], log: Path, keep_awake: KeepAwake, finder: CardFinder | None = None
    ) -> None:
        self._command = command
        self._log = log
        self._keep_awake = keep_awake
        self._finder = finder
        self._share: Path | None = None
        self._process: ChatEngine | None = None
        self.process_number = 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.alive

    def another(self) -> "Bridge":
        """Return a bridge to a process of its own, not yet started; its log stands beside this one's."""
        return Bridge(self._command, self._log.with_stem(f"{self._log.stem}-guide"), self._keep_awake)

    def start(self) -> None:
        """Start the process, ending one that runs. What the old one still says has another number."""
        self.end()
        self.process_number += 1
        number = self.process_number
        self._process = ChatEngine(
            self._command, self._log, lambda event: self.post(event, number), finder=self._finder
        )
        if self._share is not None:
            self._process.share(self._share)

    @property
    def server_url(self) -> str:
        """Where the server answers whose engine is used; "" where the engine is the chat's own."""
        return "" if self._process is None else self._process.server_url

    def share(self, path: Path) -> None:
        """Let other programs of the user ask this process, and those that follow it."""
        self._share = path
        if self._process is not None:
            self._process.share(path)

    def end(self) -> None:
        self._keep_awake.tell(self, busy=False)
        process, self._process = self._process, None
        if process is not None:
            process.kill()
        self.process_number += 1

    def ask(self, request: Request) -> None:
        if self._process is not None:
            self._process.send(request)

    def set_busy(self, busy: bool) -> None:
        """Say whether the process is at work: then its silence means that it hangs, and the machine does not sleep."""
        self._keep_awake.tell(self, busy=busy)
        if self._process is not None:
            self._process.set_busy(busy)

    def close(self) -> None:
        """Ask the process to end and wait for it."""
        self._keep_awake.close()
        process, self._process = self._process, None
        self.process_number += 1
        if process is not None:
            process.close()


LEAST_CONTEXT, PROMPT = 4096, 2048  # tokens of the first what-if question


def first_question(session: Session, model: str) -> Question:
    """Return the first case, with the chat's caches, at its context or one long enough to compare at."""
    # The chat's own case precedes it at the context of the panel's ceiling: both show the same number.
    kv, own = session.engine.load.kv, session.engine.load.model
    context = max(figures.context_used(session) or 0, LEAST_CONTEXT)
    at, prompt = figures.context_of_ceiling(session)
    now = ChatCase(own, kv, max(at, 1), min(max(prompt, 1), max(at, 1)))
    draft = session.engine.load.draft or ""
    return Question("table", model, kv=kv, context=context, prompt=min(context, PROMPT), now=now, draft=draft)


class WhatIfs:
    """Sends what-if questions to the engine's process. Where none runs, one is started for questions alone.

    listeners: called with every answer, and when a model was loaded: the process may be new then, and must be asked again.
    """

    def __init__(self, session: Session, bridge: Bridge) -> None:
        self._session = session
        self._bridge = bridge
        self._asked = 0
        self._own_process: int | None = None
        self.listeners: list[Callable[[WhatIf | Loaded], None]] = []

    def ask(self, question: Question) -> int:
        """Send a question, and return the number of its answers."""
        if not self._bridge.running:
            self._bridge.start()
            self._own_process = self._bridge.process_number
        self._asked += 1
        self._bridge.ask(AskWhatIf(self._asked, question))
        return self._asked

    def end(self) -> None:
        """End a process that was started for questions alone."""
        if self._own_process is not None and self._bridge.process_number == self._own_process:
            self._bridge.end()
        self._own_process = None


class CodeCycle:
    """Which code block is copied next: the last one, and again the one before it."""

    def __init__(self) -> None:
        self._of: tuple[int, int] | None = None
        self._back = 0

    def next(self, key: int, count: int) -> int:
        self._back = self._back % count + 1 if self._of == (key, count) else 1
        self._of = (key, count)
        return self._back


class LoadChoice:
    """What the user chose of a model that is loading: the settings keep it once that has loaded."""

    def __init__(self, model: str | None = None) -> None:
        self.model = model
        self.kv: KVSpec | None = None
        self.adapter: tuple[str, str | None] | None = None
        self.draft: tuple[str, str | None] | None = None

    def settings(self, load: Load, known: Settings) -> Settings:
        adapters, drafts = known.adapters, known.drafts
        if self.adapter == (load.model, load.adapter):
            adapters = with_one(adapters, *self.adapter)
        if self.draft == (load.model, load.draft):
            drafts = with_one(drafts, *self.draft)
        model = load.model if load.model == self.model else known.model
        kv = load.kv if load.kv == self.kv else known.kv
        return replace(known, model=model, kv=kv, adapters=adapters, drafts=drafts)


class ChatController:
    """One chat at a time, and what every action works on.

    Attributes:
        lines: whether the view prints lines: then lists are numbered, and notices name chats by their IDs too.
        listed: the last list by its numbers: chats, and messages as CHAT:MESSAGE.
        reading: files that are being read, and go with the next prompt.
        shell: a command that runs, whose output goes with the next prompt.
        told_shadowed: names of prompt files that a command hides, and of which that was told.
        copied: whether anything was copied, so that the user knows where copies are.
    """

    unbroken: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(
        self,
        session: Session,
        bridge: Bridge,
        preferences: Preferences,
        view: ChatView,
        composer: Composer,
        *,
        server: ChatServer,
        lines: bool = False,
    ) -> None:
        self.session = session
        self.bridge = bridge
        self.preferences = preferences
        self.view = view
        self.composer = composer
        self.server = server
        self.lines = lines
        self.recording: Recording | None = None
        self._aside: Recording | None = None  # while the chat is private
        self.what_ifs = WhatIfs(session, bridge)
        self.chosen = LoadChoice(preferences.asked_model)
        self.code_cycle = CodeCycle()
        self.clipboard: Callable[[str], object] | None = None
        self.copied = False
        self.listed: tuple[str, ...] = ()
        self.reading: list[str] = []
        self.shell: ShellCommand | None = None
        self.told_shadowed: set[str] = set()
        preferences.tools_came = self._tools_came

    # The session and its engine -------------------------------------------------------------------------------------------

    def perform(self, steps: Sequence[Step]) -> None:
        """Do what the session asks, and draw what it says."""
        with self.unbroken():
            for step in steps:
                self.apply(step)
            if self.recording is not None:
                self.recording.let_go()
            self.bridge.set_busy(self.session.engine.busy)
            self.view.draw()

    def apply(self, step: Step) -> None:
        """Do one step, without what follows the last of several."""
        if self.recording is not None:
            self.recording.hear(step)
        match step:
            case StartEngine():
                self.bridge.start()
            case EndEngine():
                self.bridge.end()
            case Ask(request):
                self.bridge.ask(request)
            case AskConsent(call):
                try:
                    self.view.draw(replace(step, preview=self.preferences.preview(call)))
                except ToolError as error:
                    why = error.one_line()
                    self.view.later(lambda: self.session.call_failed(call, why))
            case StopTools():
                self.preferences.stop_tools()
            case RunTool(call):
                self.view.draw(step)
                keep = None if self.recording is None else self.recording.keeper()
                self.preferences.run_tool(call, self._tool_ended, keep)
            case _:
                self.view.draw(step)

    def receive(self, event: BackendEvent) -> list[Step]:
        """Return what follows from an event of the engine's process."""
        if isinstance(event, Loaded):
            known = self.preferences.settings
            if (settings := self.chosen.settings(self.session.engine.load, known)) != known:
                self.save_settings(settings)
        return self.session.on_event(event)

    def _tool_ended(self, result: ToolResult) -> None:
        self.view.later(lambda: self.session.tool_ended(result))

    def _tools_came(self, said: str) -> None:
        def come() -> list[Step]:
            self.preferences.give(self.session)
            return [Notice(said)]

        self.view.later(come)

    def load(self, load: Load) -> None:
        """Load a model; ``chosen`` is kept in the settings once it has loaded."""
        self.perform(self.session.choose(load))
        self.view.wait()

    def reply(self, make: Callable[[], list[Step]]) -> None:
        """Perform what ``make`` returns, by which a reply may begin, once the model has loaded."""
        self.view.wait()
        steps = make()
        self.perform(steps)
        if any(isinstance(step, TurnBegun) for step in steps):
            self.view.turn_to()

    def attempt(self, work: Callable[[], None]) -> None:
        """Do ``work``, and tell why where that can't be done."""
        try:
            work()
        except TokamacError as error:
            self.view.tell(error.one_line(), "warning")

    def save_settings(self, settings: Settings) -> None:
        if problem := self.preferences.keep(settings):
            self.view.tell(problem, "warning")

    def apply_choice(self, problem: str) -> None:
        """Let the session have what was chosen for this chat, and save it with the chat."""
        self.preferences.give(self.session)
        if self.recording is not None:
            self.recording.keep_own()
        if problem:
            self.view.tell(problem, "warning")

    def rekey(self) -> None:
        """Let the keys hold that were chosen."""
        if not self.lines:
            self.session.keymap = self.preferences.keymap
            self.view.draw()

    # Messages -------------------------------------------------------------------------------------------------------------

    def selected(self) -> MessageNode | None:
        """Return the selected message, or else the last one; None where there is none."""
        tree = self.session.conversation.tree
        key = self.view.selected or tree.head
        return None if key is None else tree.nodes[key]

    def go(self, key: int) -> None:
        """Switch to the path through the message ``key``, and show it."""
        self.perform(self.session.show_path(key))
        self.view.turn_to(key)

    def copy(self, text: str) -> str:
        """Copy ``text``; return a sentence that says how."""
        known, self.copied = self.copied, True
        return copy_text(text, self.preferences.home, self.clipboard, known=known)

    def still_attaching(self) -> str:
        """Return why the prompt is not whole yet: what is on its way belongs to it; "" where nothing is."""
        if self.reading:
            return "A file is still being read. Try again in a moment."
        stops = self.session.keymap.key("stop")
        return "" if self.shell is None else f"A shell command is still running. {stops} ends it."

    # Chats ----------------------------------------------------------------------------------------------------------------

    def record(self, store: Store, chat: str | None) -> None:
        """Save to ``store`` from here on, and begin with ``chat``. Raises StoreError where that can't be read."""
        self.recording = Recording(
            self.session, store, self.preferences, lambda text: self.view.tell(text, "warning"), time.monotonic
        )
        if chat is None:
            return
        self.open_chat(chat, leaving=False)
        if self.preferences.asked_profile is not None:  # flags beside it go before it
            own = self.preferences.own
            self.preferences.own = replace(self.preferences.for_new_chat, tools=own.tools)
            self.apply_choice("")

    @property
    def private(self) -> bool:
        """Whether nothing of this chat is kept."""
        return self.session.engine.load.private

    def be_private(self, *, private: bool) -> None:
        """Begin a chat of which nothing is kept, or leave it for a new one. Raises RefusedError."""
        session = self.session
        if session.engine.replying or session.queued or session.elsewhere is not None:
            raise RefusedError(f"A reply is running: wait, or stop it with {session.keymap.key('stop')}.")
        if self.server.job.on:
            raise RefusedError("Other programs use this engine. /serve stop stops that.")
        if private:
            self.begin_new()
            self.keep_nothing()
        else:
            self.composer.hold(Draft())
            self.preferences.system_drafts.keep(None, None)
            forget_copied(self.preferences.home)
            session.versions = None
            self.recording, self._aside = self._aside, None
            self.begin_new()
        self.view.forget(private=private)
        session.engine.lost()  # so that another process is started: what this one holds is gone with it
        self.load(replace(session.engine.load, private=private))

    def keep_nothing(self) -> None:
        """Save nothing from here on."""
        self._aside, self.recording = self.recording, None

    def close_recording(self) -> str:
        """Save what was not sent and the reply that runs, but of a private chat nothing; return the file, or ""."""
        recording = self.recording or self._aside
        if recording is None:
            return ""
        recording.close("" if self.recording is None else self.composer.unsent.whole)
        return str(recording.file)

    def find_chat(self, name: str) -> StoredChat:
        """Return a chat by its ID, or by its number in the last list. Raises StoreError."""
        return self.find_place(name)[0]

    def find_place(self, name: str) -> tuple[StoredChat, int | None]:
        """Return a chat, and a message of it after ID:MESSAGE. Raises StoreError.

        A number beyond the list may be a whole ID. It is never the beginning of one: that could be another chat by mistake.
        """
        store, number = recording_of(self).store, whole_number(name) if self.lines else None
        if number is not None and not 0 < number <= len(self.listed):
            if (known := store.known(name)) is None:
                raise StoreError(f"There is no number {name} in the last list", "/chats lists them.")
            return known, None
        chat, sign, written = (name if number is None else self.listed[number - 1]).partition(":")
        if sign and (message := whole_number(written)) is None:
            raise StoreError(f"{written!r:.40} is no number of a message", "Write ID:MESSAGE as a search shows it.")
        return store.chat(chat), message if sign else None

    def begin_new(self) -> bool:
        """Leave the chat for a new one; return whether an unsent prompt stays with it."""
        with self.unbroken():
            stays, unsaved = self._switch(self.preferences.for_new_chat, self.session.new_chat)
            self.composer.hold(unsaved)
        self.view.opened("")
        return stays

    def open_chat(self, wanted: str, *, leaving: bool = True) -> None:
        """Open a stored chat. leaving: a chat is left for it. Raises StoreError, RefusedError."""
        if (recording := self.recording) is None:
            return
        kept, again = recording.kept(wanted), recording.chat == wanted
        with self.unbroken():
            if kept is not None:
                conversation, rest = kept
                stays, unsaved = self._switch(recording.own(wanted), lambda: self.session.show(conversation))
                self.composer.hold(joined([rest, unsaved]))
            elif recording.holds(wanted):
                stays = False
            else:
                tree, draft = recording.read(wanted)
                own, pruned, pinned = recording.own(wanted), recording.pruned_of(wanted), recording.pinned_of(wanted)
                stays, unsaved = self._switch(
                    own, lambda: self.session.open(tree, pruned, pinned), leaving=leaving and not again
                )
                recording.hold(wanted, tree, draft)
                self.composer.hold(unsaved if again else joined([apart(draft), unsaved]))
        if stays:
            self.view.tell(LEFT)
        self.view.draw()  # its title
        self.view.opened(wanted)

    def _switch(
        self, own: ChatOverrides, show: Callable[[], list[Step]], *, leaving: bool = True
    ) -> tuple[bool, Draft]:
        """Show another chat; return whether the unsent prompt stays with the one that is left, and what nothing keeps."""
        if leaving and (why := self.still_attaching()):
            raise RefusedError(why)
        stays, unsaved = self._leave() if leaving else (False, self.composer.unsent)
        running = self.session.replying
        goes_on = self.recording is not None and self.recording.can_go_on()
        if not goes_on:
            self.perform(self.session.give_up())
        if problem := self.preferences.hold(own, self.session):
            self.view.tell(problem, "warning")
        self.perform(show())
        if running:
            text = GOES_ON.format(self.session.keymap.key("chats")) if goes_on else GIVEN_UP
            self.view.tell(text, "information" if goes_on else "warning")
        return stays, unsaved

    def _leave(self) -> tuple[bool, Draft]:
        box, unsent, recording = self.composer.box, self.composer.unsent, self.recording
        saved = recording is not None and recording.drafted(unsent.whole)
        self.composer.hold(Draft())
        if recording is not None:
            recording.leaving(box)
        return (bool(box.whole), Draft()) if saved else (False, unsent)

    # Chats in the background ----------------------------------------------------------------------------------------------

    @property
    def title_elsewhere(self) -> str:
        """The title of the chat in which a reply runs, where that is not the one on screen."""
        elsewhere = self.session.elsewhere
        if elsewhere is None or self.recording is None:
            return ""
        return sanitise_line(self.recording.title_of(elsewhere)) or "untitled"

    def tell_elsewhere(self, elsewhere: Elsewhere) -> None:
        """Tell how a reply in the background ended, or that what waited there was not sent."""
        if self.recording is None:
            return
        title = excerpt(self.recording.title_of(elsewhere.conversation)) or "untitled"
        match elsewhere.step:
            case ReplyEnded(reply) if reply.ending != "tool_calls":
                self._tell_ended(title, reply)
            case PromptRefused(why):
                self.view.tell(f"“{title}”: the queued prompt was not sent. {why}", "warning")

    def _tell_ended(self, title: str, reply: Reply) -> None:
        match reply.ending:
            case "cancelled":
                self.view.tell(f"“{title}”: the reply was stopped. The text so far is saved.")
            case "lost" | "failed":
                self.view.tell(f"“{title}”: the reply {ending_text(reply.ending, reply.reason)}", "error")
            case _:
                tokens = "" if reply.metrics is None else f", {units.count(reply.metrics.generated_tokens)} tokens"
                self.view.tell(f"“{title}”: the reply is done{tokens}. {self.session.keymap.key('chats')} opens it.")

    def tell_versions_ended(self, versions: Versions) -> None:
        """Tell that all versions of a reply are done, where their chat is not on screen."""
        if versions.conversation is not self.session.conversation and not versions.running and self.recording:
            title = excerpt(self.recording.title_of(versions.conversation)) or "untitled"
            opens = f"{self.session.keymap.key('chats')} opens it."
            self.view.tell(f"“{title}”: {len(versions.all)} versions of a reply are done. {opens}")


def recording_of(chat: ChatController) -> Recording:
    """Return what saves the chat. Raises RefusedError where nothing does."""
    if chat.recording is None:
        raise RefusedError(PRIVATE if chat.private else NOT_SAVED)
    return chat.recording
