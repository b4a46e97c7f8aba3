"""The chat screen: transcript, gauges, prompt. It turns keys into actions, and performs the steps of the session.

Beside the screen itself: what the user has written and not sent (the box, an edit, queued prompts), going back through what was
sent, and the what-if questions between the screens that ask them and the engine's process.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from textual import on
from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.events import Key, Paste, Resize
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import Live, ToolCall
from tokamac.engine.hub.names import GUIDE

from ...backend.chat_server import ChatServer, ServerJob
from ...backend.client import BackendEvent
from ...backend.protocol import AskWhatIf, Load, Loaded, Question, ReplyEvent, WhatIf
from ...backend.sharing import chat_socket
from ...backend.shell import ShellCommand
from ...chat import commands
from ...chat.attachments import Draft, joined
from ...chat.commands import CodeCycle, LoadChoice, Severity, save_settings
from ...chat.conversation import MessageNode, Turn
from ...chat.external_programs import copy_text
from ...chat.figures import pointed_at, primer_is_new
from ...chat.preferences import Preferences
from ...chat.recording import Recording
from ...chat.session import Session
from ...chat.steps import (
    Ask,
    AskConsent,
    DraftReturned,
    Elsewhere,
    EndEngine,
    EnginePhase,
    Moved,
    Notice,
    Opened,
    PromptRefused,
    Pruned,
    ReplyEnded,
    ReplyGrew,
    Resumed,
    Revised,
    RunTool,
    StartEngine,
    Step,
    Titled,
    ToolAnswered,
    TurnBegun,
    VersionEnded,
    VersionGrew,
    VersionsBegun,
)
from ...sanitise import sanitise, sanitise_line
from ...store.store import Store
from ...store.values import StoredChat, StoreError, ToolResult, title_of
from ...tools.tool import Decision
from ..actions import bindings, chats, keys, model, reading, writing
from ..actions.chats import begin
from ..actions.writing import submit
from ..bridge import Bridge, EngineSaid
from ..theme import FAINT
from ..widgets.gauges import NARROW, Gauges
from ..widgets.prompt_input import Chips, Completions, Prompt
from ..widgets.status import Activity, StatusLine
from ..widgets.transcript import SIDE, WIDEST, Transcript, share_on
from . import links
from .tools import ConsentScreen

if TYPE_CHECKING:
    from ...chat.versions import Versions
    from ..model_library import ModelLibrary
    from .versions import VersionsScreen

EDITING = "editing · Esc cancels"
EDITING_REPLY = "editing the reply · Enter keeps it · Esc cancels"
"""On the border of the input box during an edit."""


class Composer:
    """The unsent text: the input box and what waits behind it. editing: the prompt that is edited in the box, if any.

    An edit that is left for another one stays with its message: it is in the box again when that message is edited again.
    """

    def __init__(self, prompt: Prompt, session: Session) -> None:
        self.editing: int | None = None
        self._prompt = prompt
        self._session = session
        self._aside = Draft()  # the draft, while a message is edited
        self._edited = Draft()  # that message as it was
        self._left: dict[int, Draft] = {}  # edits that were left for another one

    @property
    def unsent(self) -> Draft:
        """All unsent text. An edit that has changed nothing does not count."""
        return joined([*self._session.queued, self.box])

    @property
    def box(self) -> Draft:
        """The unsent text beside what is queued."""
        held = [] if self._is_unchanged else [self._prompt.draft]
        aside = [] if self.editing is None else [self._aside]
        return joined([*aside, *self._left.values(), *held])

    @property
    def _is_unchanged(self) -> bool:
        return self.editing is not None and self._prompt.draft == self._edited

    def begin_edit(self, key: int, draft: Draft) -> bool:
        """Edit the prompt ``key``, which was ``draft``, in the box; the draft in the box comes back after.

        Returns whether another edit was left for this one.
        """
        if key == self.editing:
            return False
        leaves = self.editing is not None and not self._is_unchanged and bool(self._prompt.draft.whole)
        if self.editing is None:
            self._aside = self._prompt.draft
        elif leaves:
            self._left[self.editing] = self._prompt.draft
        self._edit(key)
        self._prompt.put(draft)
        self._edited = self._prompt.draft
        if (begun := self._left.pop(key, None)) is not None:
            self._prompt.put(begun)
        return leaves

    def end_edit(self) -> None:
        """End the edit, and put the draft back. Edits that were left stay with their messages."""
        self._edit(None)
        self._prompt.put(self._aside)

    def hold(self, draft: Draft) -> None:
        """Replace all unsent text, edits too."""
        self._edit(None)
        self._left.clear()
        self._prompt.put(draft)

    def give_back(self, draft: Draft) -> None:
        """Put a prompt that was not sent before the draft."""
        if self.editing is None:
            self._prompt.give_back(draft.text, draft.attachments)
        else:
            self._aside = joined([draft, self._aside])

    def _edit(self, key: int | None) -> None:
        self.editing = key
        replies = key is not None and self._session.conversation.tree.nodes[key].is_reply
        self._prompt.border_title = "" if key is None else EDITING_REPLY if replies else EDITING
        self._prompt.obeys = key is None


Sent = Callable[[], Sequence[str]]
"""Returns what was sent, newest first."""


class History:
    """The place in the prompts sent before. The text that was in the box is the draft that one comes back to."""

    def __init__(self) -> None:
        self._sent: Sequence[str] = ()
        self._at = -1  # index of the prompt shown; -1 is the draft
        self._draft = Draft()

    def older(self, shown: Draft, sent: Sent) -> Draft | None:
        """Return the prompt sent before the one shown; None where there is none."""
        if not self._shows(shown):
            self._sent, self._at, self._draft = _others(sent(), shown.text), -1, shown
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


def _others(sent: Sequence[str], text: str) -> Sequence[str]:
    """Return ``sent`` without the newest, where that is in the box: a prompt that came back."""
    return sent[1:] if sent and text and sent[0] == text else sent


class WhatIfs:
    """Opens the what-if screen, sends its questions to the engine's process, and hands it the answers.

    listeners: called with every answer, and when a model was loaded: the process may be new then, and must be asked again.
    """

    def __init__(self, session: Session, bridge: Bridge) -> None:
        self._session = session
        self._bridge = bridge
        self._asked = 0
        self._own_process: int | None = None
        self.listeners: list[Callable[[WhatIf | Loaded], None]] = []

    def open(self, app: App[int], model: str) -> None:
        """Ask about ``model``, which need not be on this disk."""
        # plotext takes a tenth of a second to import: not before it is wanted.
        from ...chat.what_if_form import first_question, known_names
        from .whatif import WhatIfScreen

        start, names = first_question(self._session, model), known_names(model)
        app.push_screen(
            WhatIfScreen(self.ask, start, names, busy=lambda: self._session.engine.busy), lambda _: self.asked_enough()
        )

    def take(self, app: App[int], event: BackendEvent) -> None:
        """Pass on an answer, or that the engine is new; ignore other events."""
        if not isinstance(event, WhatIf | Loaded):
            return
        for listener in self.listeners:
            listener(event)
        if len(app.screen_stack) < 2:
            return
        from .whatif import WhatIfScreen

        for screen in app.screen_stack:
            if isinstance(screen, WhatIfScreen):
                screen.ask(again=True) if isinstance(event, Loaded) else screen.take(event)

    def ask(self, question: Question) -> int:
        """Send a question, and return the number of its answers. Where no process runs, one is started for questions alone."""
        if not self._bridge.running:
            self._bridge.start()
            self._own_process = self._bridge.process_number
        self._asked += 1
        self._bridge.ask(AskWhatIf(self._asked, question))
        return self._asked

    def asked_enough(self) -> None:
        """End a process that was started for questions alone."""
        if self._own_process is not None and self._bridge.process_number == self._own_process:
            self._bridge.end()
        self._own_process = None


def is_growth(step: Step) -> bool:
    """Whether the step is more text of a reply, on screen or in the background."""
    return isinstance(step.step if isinstance(step, Elsewhere) else step, ReplyGrew | VersionGrew)


COMMANDS: dict[str, Callable[["ChatScreen", str], None]] = {
    **commands.COMMANDS,
    "send": writing.send,
    "newline": writing.newline,
    "editor": writing.editor,
    "edit": writing.edit,
    "attach": writing.attach,
    "detach": writing.detach,
    "shell": writing.shell,
    "earlier": writing.earlier,
    "later": writing.later,
    "stop": writing.stop,
    "chats": chats.chats,
    "open": chats.open_,
    "branches": chats.branches,
    "context": chats.context,
    "choose_model": model.choose_model,
    "models": model.models,
    "jobs": model.models,
    "unload": model.unload,
    "system_prompt": model.system_prompt,
    "tools": model.tools,
    "settings": model.settings,
    "profile": model.profile,
    "what_if": model.what_if,
    "convert": model.convert,
    "export": reading.export,
    "import": reading.import_,
    "explain": reading.explain,
    "steps": reading.steps,
    "toggle_panel": reading.toggle_panel,
    "all_figures": reading.all_figures,
    "palette": reading.palette,
    "messages": reading.messages,
    "gauges": reading.gauges,
    "links": reading.links,
    "scroll_top": reading.scroll_top,
    "scroll_end": reading.scroll_end,
    "page_up": reading.page_up,
    "page_down": reading.page_down,
    "copy": keys.copy,
    "leader": keys.leader,
    "keys": keys.keys,
    "undo": keys.undo,
    "redo": keys.redo,
    "suspend": keys.suspend,
    "theme": keys.theme,
    "ask_guide": reading.ask_guide,
    "help": reading.help_,
    "leave": reading.leave,
}
"""By the registry's ids."""


class Later(Message):
    """What is to be done on the screen's thread, told from another one."""

    def __init__(self, work: Callable[[], list[Step]]) -> None:
        super().__init__()
        self.work = work


class Columns(Horizontal):
    """Side by side."""

    BLANK = True


class Stack(Vertical):
    """One above the other. In a wide window, all stand where the transcript's column of text is."""

    BLANK = True

    def on_resize(self, event: Resize) -> None:
        """Keep the column."""
        side = max(0, (event.size.width - WIDEST - 2 * SIDE) // 2)
        for child in self.children:
            if not isinstance(child, Transcript):
                base = 1 if isinstance(child, Prompt | Completions) else 0
                child.styles.margin = (0, side + base)


class Heading(Static):
    """The title of the chat, on one line."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._shown = ""

    def show(self, title: str) -> None:
        """Show ``title``, which may be foreign: it is made safe here."""
        line = sanitise_line(title)
        if line != self._shown:
            self._shown = line
            self.update(Content.styled(line, FAINT), layout=False)  # it is one line high


SMALLEST = (40, 12)
REFRESH_S = 0.4
REST_LOOK_S = 10.0  # how often an unused model may be unloaded, or asked for a title

OpenStore = Callable[[], tuple[Store, str | None] | None]
"""Opens the store of conversations, and returns the ID of the one to open; None: nothing is saved. Raises StoreError."""
NOTICE_S: dict[Severity, float] = {"information": 5, "warning": 12, "error": 20}


class ChatScreen(Screen[None]):
    """The main screen."""

    BINDINGS = bindings()

    def __init__(self, session: Session, bridge: Bridge, preferences: Preferences, open_store: OpenStore) -> None:
        super().__init__()
        self.session = session
        self.bridge = bridge
        self.preferences = preferences
        self.what_ifs = WhatIfs(session, bridge)
        self._library: ModelLibrary | None = None
        self._server = ChatServer(
            spawn=lambda work: self.run_worker(work, group="server"), changed=self._server_changed, told=self.tell
        )
        self.recording: Recording | None = None
        self.automatic_theme = ""  # the one by the terminal's background
        self.shows_ids = False
        self.chosen = LoadChoice()
        self.code_cycle = CodeCycle()
        self.copied = False  # anything, so that the user knows where copies are
        self.history = History()
        self.folded: set[str] = set()  # folders in the list of chats
        self.reading: list[str] = []  # files that are being read
        self.shell: ShellCommand | None = None  # that runs
        self.quits_until = 0.0  # until then, Ctrl+C quits
        self._prompt = Prompt()
        self.composer = Composer(self._prompt, session)
        self.open_store = open_store
        preferences.tools_came = self._tools_came
        self._versions: VersionsScreen | None = None  # that is open
        self._early: list[Draft] | None = []  # what was sent before the start was complete; None from then on

    def compose(self) -> ComposeResult:
        """Yield the parts."""
        with Columns(id="main"):
            with Stack(id="talk"):
                yield Heading()
                tour, keymap = not self.preferences.settings.toured, self.preferences.keymap
                yield Transcript(tour=tour, keymap=keymap, act=self.do, write=self.type)
                yield Activity()
                yield Chips()
                yield self._prompt
                yield self._prompt.completions
            with VerticalScroll(id="panel", can_focus=False):
                yield Gauges()
                yield Static(id="server", markup=False)
        yield StatusLine(self.preferences.keymap.actions)
        yield Static(id="too-small", markup=False)

    def on_mount(self) -> None:
        """Paint first; the engine starts right after."""
        if not self._composed:  # the app quits in its first moment
            return
        self._prompt.focus()
        self.show()
        self.call_after_refresh(begin, self)
        self.watch(self.query_one(Transcript), "chosen", self.show, init=False)
        self.watch(self.query_one(Transcript), "scroll_y", self._head, init=False)
        self._ticker = self.set_interval(REFRESH_S, self._tick, pause=True)
        self.set_interval(REST_LOOK_S, self._rest)

    def begun(self) -> None:
        """The engine is starting and the conversations are open: send what was sent early."""
        early, self._early = self._early or [], None
        for draft in early:
            submit(self, draft)

    @property
    def focus_chain(self) -> list[Widget]:
        """Tab goes from the prompt to the messages, on to the gauges, and back."""
        return sorted(super().focus_chain, key=lambda widget: isinstance(widget, Prompt))

    def on_unmount(self) -> None:
        """Save the unsent prompt and the running reply so far, and close the store."""
        self._record(lambda recording: recording.close(self.composer.unsent.whole))
        self.preferences.close()

    @property
    def _composed(self) -> bool:
        """Whether the parts are mounted: not in an app that quits as it starts."""
        return self._prompt.is_attached

    def on_resize(self, event: Resize) -> None:
        """Fit the parts to the window."""
        if not self._composed:
            return
        width, height = event.size
        tiny = width < SMALLEST[0] or height < SMALLEST[1]
        self.set_class(tiny, "-tiny")
        if not tiny and self.focused is None:
            self.query_one(Prompt).focus()  # it lost the focus when it was hidden
        self.set_class(height < 30, "-short")
        self.set_class(width < NARROW, "-narrow")
        if tiny:
            said = f"{width}×{height} is too small: tokamac needs {SMALLEST[0]}×{SMALLEST[1]}."
            self.query_one("#too-small", Static).update(Content(said))
        self.show_panel()
        self.call_after_refresh(self.show)

    # Steps ----------------------------------------------------------------------------------------------------------------

    def perform(self, steps: Sequence[Step]) -> None:
        """Do what the session asks, in order, and show its state."""
        for step in steps:
            self._perform(step)
        self._record(Recording.let_go)
        self.bridge.set_busy(self.session.engine.busy)
        self.show()
        # While a model writes, its figures are shown as they come and the cursor is still: each wake takes the model's time.
        writing = self.session.engine.phase is EnginePhase.DECODING
        (self._ticker.resume if self.session.engine.busy and not writing else self._ticker.pause)()
        self.query_one(Prompt).cursor_blink = not writing

    def _perform(self, step: Step) -> None:
        transcript = self.query_one(Transcript)
        self._record(lambda recording: recording.hear(step))
        match step:
            case StartEngine():
                self.bridge.start()
            case EndEngine():
                self.bridge.end()
            case Ask(request):
                self.bridge.ask(request)
            case TurnBegun(turn, again):
                self._hide_versions()
                self._begin(turn, again=again)
            case Resumed(turn):
                self._begin(turn, again=True)
            case ReplyGrew(text, kind, guessed):
                transcript.add(text, kind, guessed)
            case ReplyEnded(reply):
                transcript.end(reply)
                if primer_is_new(reply):
                    transcript.prime()
            case VersionsBegun(versions):
                self._show_versions(versions)
            case VersionGrew(_, version, text, kind):
                if self._versions is not None:
                    self._versions.grow(version, text, kind)
            case VersionEnded(versions, version):
                if self._versions is not None:
                    self._versions.ended(version)
                chats.tell_versions_ended(self, versions)
            case Moved(turns):
                transcript.show_turns(turns, self.session.conversation.pruned)
            case Pruned():
                transcript.prune(self.session.turns, self.session.conversation.pruned)
            case Revised(turns):
                transcript.show_turns(turns, self.session.conversation.pruned)
            case Opened(turns):
                self._hide_versions()
                transcript.show_turns(turns, self.session.conversation.pruned)
            case Titled(title):
                self._record(lambda recording: recording.entitled(title))
            case Elsewhere():
                chats.tell_elsewhere(self, step)
            case PromptRefused(_, draft):  # the line above the input box says why
                if draft is not None:
                    self.composer.give_back(draft)
            case DraftReturned(text, attachments):
                self.composer.give_back(Draft(text, attachments))
                if self.composer.editing is not None:
                    self.tell("Your unanswered prompt is back in the input box after the edit.")
            case Notice(text, severity):
                self.tell(text, severity)
            case AskConsent(call):
                screen = ConsentScreen(call, chats.title_elsewhere(self))
                self.app.push_screen(screen, partial(self._decided, call))
            case RunTool(call):
                self.preferences.run_tool(call, self._tool_ended)
            case ToolAnswered(key, result):
                self.close_consent(result.call)
                transcript.answer(result, key)

    def _show_versions(self, versions: "Versions") -> None:
        """Show several versions of a reply over the chat while they are written."""
        from .versions import VersionsScreen

        def closed(_: None) -> None:
            if self._versions is shown:
                self._versions = None
            self._prompt.focus()
            self.show()

        self._hide_versions()
        self._versions = shown = VersionsScreen(versions, self, self.do)
        self.app.push_screen(shown, closed)

    def _hide_versions(self) -> None:
        """Close the versions: another reply, or another chat, is shown."""
        if self._versions is not None:
            self._versions.close()

    def _decided(self, call: ToolCall, decision: Decision | None) -> None:
        """Take the user's answer to a call; Esc stops all of them."""
        if decision is not None:
            commands.decide(self, call, decision)
        elif self.session.tools.waiting == call:
            self.perform(self.session.stop())

    def close_consent(self, call: ToolCall) -> None:
        """Close the question whether ``call`` may be run, which was answered in another way."""
        if isinstance(self.app.screen, ConsentScreen) and self.app.screen.call == call:
            self.app.screen.dismiss(None)

    def _tool_ended(self, result: ToolResult) -> None:
        """Take what came of a call, from its thread."""
        self.post_message(Later(lambda: self.session.tool_ended(result)))

    def _tools_came(self, said: str) -> None:
        """Take the tools of a server that has started, from its thread."""

        def take() -> list[Step]:
            self.preferences.give(self.session)
            return [Notice(said)]

        self.post_message(Later(take))

    @on(Later)
    def do_later(self, message: Later) -> None:
        """Do what another thread left to this one."""
        message.stop()
        self.perform(message.work())

    def _begin(self, turn: Turn, *, again: bool) -> None:
        """Show a reply that grows."""
        info = self.session.engine.info
        name = info.name if info else self.session.engine.load.model
        share, tinted = share_on(info.device if info else ""), self.session.tints_guesses
        self.query_one(Transcript).begin(turn, name, share=share, again=again, tinted=tinted)

    def _record(self, write: Callable[[Recording], object]) -> None:
        if self.recording is not None:
            write(self.recording)

    def on_engine_said(self, message: EngineSaid) -> None:
        """Pass an event on, unless it is from an earlier process."""
        message.stop()
        if message.process_number == self.bridge.process_number:
            was = self.session.engine.phase
            if isinstance(message.event, Loaded):
                known = self.preferences.settings
                if (settings := self.chosen.settings(self.session.engine.load, known)) != known:
                    save_settings(self, settings)
            steps = self.session.on_event(message.event)
            self.what_ifs.take(self.app, message.event)
            reading.told_of_steps(self, message.event)
            if self.session.engine.busy and self.session.engine.phase is was and all(is_growth(s) for s in steps):
                # Text comes often: the transcript draws it at its own pace, or together with new figures.
                for step in steps:
                    self._perform(step)
                if self._versions is not None:
                    self._versions.look()
                elif isinstance(message.event, ReplyEvent) and isinstance(message.event.event, Live):
                    self.query_one(Transcript).look(now=True)
                    self.show()
            else:
                self.perform(steps)
            if self.session.engine.phase is EnginePhase.IDLE and was is not EnginePhase.IDLE:
                self.query_one(Prompt).await_pause()  # what was written meanwhile can be read ahead now
                self.perform(self.session.select(self.query_one(Transcript).selected))

    def _tick(self) -> None:
        self.perform(self.session.check_cancel()) if self.session.engine.phase is EnginePhase.STOPPING else self.show()

    def _rest(self) -> None:
        if steps := self.session.unload_if_idle() or (self.recording.entitle() if self.recording is not None else []):
            self.perform(steps)

    def show(self) -> None:
        """Update activity, status and gauges."""
        transcript = self.query_one(Transcript)
        transcript.greet(guide=self.session.engine.load.model == GUIDE)
        self._head()
        server = "" if self._panel_shown else self.server.line  # the panel has it
        self.query_one(Activity).show(
            self.session,
            time.monotonic(),
            following=transcript.following,
            aside=" · ".join(filter(None, (self._library.activity() if self._library else "", server))),
            elsewhere=chats.title_elsewhere(self),
        )
        running = "" if self.shell is None else self.shell.text
        self.query_one(Chips).show(self.session, self._prompt.draft, self.reading, running)
        essentials, selecting = not self._panel_shown, transcript.selected is not None
        self.query_one(StatusLine).show(
            self.session, essentials=essentials, selecting=selecting, chosen=transcript.chosen
        )
        if self._panel_shown:
            shown = pointed_at(self.session, transcript.selected)
            self.query_one(Gauges).show(shown, every=self.preferences.settings.all_figures)

    def _head(self) -> None:
        """Show the title, unless it is only the first prompt again, which is on screen below it."""
        self.app.sub_title = title = self.recording.title if self.recording is not None else ""
        turns = self.session.turns if title and self.query_one(Transcript).scroll_y < 1 else []
        self.query_one(Heading).show("" if turns and title == title_of(turns[0].prompt) else title)

    @property
    def _panel_shown(self) -> bool:
        return self.preferences.settings.panel and self.size.width >= NARROW

    def show_panel(self) -> None:
        """Show the gauges where they are wanted and fit."""
        self.query_one("#panel").display = self._panel_shown

    # Actions --------------------------------------------------------------------------------------------------------------

    def do(self, action: str, argument: str = "") -> None:
        """Run the registry's action of this id. argument: what was written after its slash command."""
        self.run_command(lambda: COMMANDS[action](self, argument))

    def action_do(self, action: str) -> None:
        """Run the action of a key."""
        self.do(action)

    def run_command(self, command: Callable[[], None]) -> None:
        """Call ``command``; where it can't be done, tell why."""
        try:
            command()
        except TokamacError as error:
            self.tell(error.one_line(), "warning")

    def tell(self, text: str, severity: Severity = "information") -> None:
        """Show a notice."""
        self.notify(sanitise(text), severity=severity, markup=False, timeout=NOTICE_S[severity])

    def say(self, text: str) -> None:
        """Show what was asked for."""
        self.tell(text)

    def selected(self) -> MessageNode | None:
        """Return the selected message, or else the last one; None where there is none."""
        tree = self.session.conversation.tree
        key = self.query_one(Transcript).selected or tree.head
        return None if key is None else tree.nodes[key]

    def reply(self, make: Callable[[], list[Step]]) -> None:
        """Perform what ``make`` returns; where a reply begins by it, the user goes on writing, as after sending."""
        steps = make()
        self.perform(steps)
        if any(isinstance(step, TurnBegun) for step in steps):
            self._prompt.focus()

    def go(self, key: int) -> None:
        """Switch to the path through the message ``key``."""
        self.perform(self.session.show_path(key))
        transcript = self.query_one(Transcript)
        if transcript.has_focus:
            transcript.select_message(key)

    def begin_edit(self, key: int, draft: Draft, text: str = "") -> None:
        """Edit the prompt ``key``, which was ``draft``, in the input box; what the box held comes back after."""
        del text  # the command takes no argument here
        self._begin_edit(key, draft, "Enter sends your edit as a new version (the old one is kept). Esc cancels.")

    def begin_revision(self, key: int, said: str, text: str) -> None:
        """Edit the reply ``key``, which ``said`` that, in the input box, as a prompt is edited."""
        del text
        self._begin_edit(key, Draft(said), "Enter keeps your text as a new version of the reply. Esc cancels.")

    def _begin_edit(self, key: int, draft: Draft, how: str) -> None:
        if self.composer.begin_edit(key, draft):
            self.tell("Your other edit is saved: edit that message again to continue it.")
        self._prompt.focus()
        self.show()
        self.tell(how)

    def cancel_edit(self) -> None:
        """Leave the edited message as it is."""
        if self.composer.editing is not None:
            self.composer.end_edit()
            self.show()

    def open_chat(self, chat: str) -> None:
        """Open the stored chat of this ID. Raises StoreError."""
        chats.open_chat(self, chat)

    def find_chat(self, name: str) -> StoredChat:
        """Return the stored chat whose ID is, or begins with, ``name``. Raises StoreError."""
        if self.recording is None:
            raise StoreError(commands.NOT_SAVED)
        return self.recording.store.chat(name)

    def begin_new(self) -> bool:
        """Leave the chat for a new one; return whether an unsent prompt stays with it."""
        return chats.begin_new(self)

    def copy(self, text: str) -> str:
        """Copy ``text``; return a sentence that says how."""
        known, self.copied = self.copied, True
        return copy_text(text, self.preferences.home, self.app.copy_to_clipboard, known=known)

    def load(self, load: Load) -> None:
        """Load a model; ``chosen`` is kept in the settings once it has loaded."""
        self.perform(self.session.choose(load))

    def download(self, model: str) -> None:
        """Download a model in the background."""
        self.library.downloads.start(model)

    @property
    def library(self) -> "ModelLibrary":
        """The models to choose from. Not imported before somebody asks: the first paint does without."""
        if self._library is None:
            from ..model_library import ModelLibrary

            self._library = ModelLibrary(self)
        return self._library

    @property
    def server(self) -> ServerJob:
        """The server on the chat's engine."""
        return self._server.job

    @property
    def server_url(self) -> str:
        """Where a server answers whose engine this chat uses."""
        return self.bridge.server_url

    def begin_server(self, port: int) -> None:
        """Start the server, with the engine shared."""
        self.bridge.share(chat_socket())
        self._server.begin(port)

    def stop_server(self) -> None:
        """Stop it."""
        self._server.stop()

    def _server_changed(self) -> None:
        self.session.serving = self.server.on
        line = self.query_one("#server", Static)
        line.display = self.server.on
        line.update(self.server.line.replace(" · ", "\n"))
        self.show()

    def rekey(self) -> None:
        """Hear and name the keys that hold now."""
        self.session.keymap = known = self.preferences.keymap
        self.app.set_keymap(known.changed)
        self.query_one(StatusLine).rekey(known.actions)
        self.query_one(Transcript).rekey(known)
        self.show()

    def on_key(self, event: Key) -> None:
        """Write what is typed elsewhere into the prompt."""
        if event.is_printable and event.character and not event.character.isspace():
            event.stop()
            self.type(event.character)

    def on_paste(self, event: Paste) -> None:
        """Paste into the prompt what is pasted elsewhere."""
        if not self._prompt.has_focus:
            event.stop()
            self.set_focus(self._prompt)
            self._prompt.post_message(Paste(event.text))

    def type(self, text: str) -> None:
        """Write ``text`` into the prompt, as if it were typed there. The focus moves at once: more may come."""
        self.set_focus(self._prompt)
        self._prompt.type(text)

    @on(Gauges.Switched)
    def switch_figures(self) -> None:
        """Show every figure, or the few."""
        self.do("all_figures")

    @on(Transcript.FiguresClicked)
    def explain(self, message: Transcript.FiguresClicked) -> None:
        """Explain the reply whose line was clicked."""
        self.run_command(lambda: reading.explain_reply(self, message.key))

    @on(Prompt.Submitted)
    def submit(self, message: Prompt.Submitted) -> None:
        """Send what is written, or run the command in it, once the engine is starting and the store is open."""
        if self._early is None:
            submit(self, message.draft)
        else:
            self._early.append(message.draft)

    @on(Transcript.LinkClicked)
    def open_link(self, message: Transcript.LinkClicked) -> None:
        """Open the link that was clicked, or say where it leads."""
        if message.opens:
            links.open_link(self, message.address)
        else:
            self.tell(f"{message.address}\nCtrl+click opens it.")

    @on(Transcript.CodeClicked)
    def copy_clicked(self, message: Transcript.CodeClicked) -> None:
        """Copy the block whose first line was clicked."""
        self.tell(self.copy(message.text))

    @on(Prompt.Picked)
    def attach(self, message: Prompt.Picked) -> None:
        """Read the file that was chosen."""
        self.do("attach", message.path)

    @on(Prompt.Paused)
    def read_ahead(self, message: Prompt.Paused) -> None:
        """Have the draft read ahead, and save it."""
        text, attachments = message.draft.text, message.draft.attachments
        self.perform(self.session.draft_paused(text if writing.is_prompt(self, text) else "", attachments))
        self._record(lambda recording: recording.drafted(self.composer.unsent.whole))

    @on(Prompt.Changed)
    def written(self) -> None:
        """Note that the user is writing."""
        self.session.idle.seen()
