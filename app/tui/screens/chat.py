"""The chat: transcript, gauges, prompt. It turns keys into wishes, gives them to the session, and does what the session says.

Containers of which nothing is seen: what they hold covers them, so that Textual need not draw them line by line.

The first row: which chat this is.

What the user writes and has not sent: the box, what it held before a message was edited, and the prompts that wait.

Going back through what was sent before, without losing what is being written. Pure; newest first, as the store tells it.

Questions "what if" between the screens that ask them and the engine's process. An answer is known by its question's number.

Every action's id, and what it does.
"""

import time
from collections.abc import Callable, Sequence

from textual import on
from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from tokamac.app.backend.client import BackendEvent
from tokamac.app.backend.protocol import AskWhatIf, Loaded, Question, ReplyEvent, WhatIf
from tokamac.app.chat.actions import bindings
from tokamac.app.chat.attachments import Draft, joined
from tokamac.app.chat.conversation import MessageNode
from tokamac.app.chat.preferences import Preferences
from tokamac.app.chat.recording import Recording
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import (
    Ask,
    DraftReturned,
    EndEngine,
    EnginePhase,
    Moved,
    Notice,
    Opened,
    ReplyEnded,
    ReplyGrew,
    StartEngine,
    Step,
    Titled,
    TurnBegun,
)
from tokamac.app.sanitise import sanitise, sanitise_line
from tokamac.app.settings import Settings
from tokamac.app.store.store import Store
from tokamac.app.tui.actions import chats, model, reading, writing
from tokamac.app.tui.actions.chats import begin
from tokamac.app.tui.actions.model import keep_picked
from tokamac.app.tui.actions.writing import submit
from tokamac.app.tui.bridge import Bridge, EngineSaid
from tokamac.app.tui.markdown.parse import Back
from tokamac.app.tui.model_library import ModelLibrary
from tokamac.app.tui.screens.chats import Pick
from tokamac.app.tui.theme import FAINT
from tokamac.app.tui.widgets.gauges import NARROW, Gauges
from tokamac.app.tui.widgets.prompt_input import Chips, Prompt
from tokamac.app.tui.widgets.status import Activity, StatusLine
from tokamac.app.tui.widgets.transcript import Transcript, share_on
from tokamac.engine.events import Live
from tokamac.engine.hub.cache import GUIDE
from tokamac.engine.options import KVSpec

EDITING = "editing · Esc gives it up"
"""On the box's border as long as it holds a message to be written anew."""


class Composer:
    """The box and what stands behind it. editing: the prompt that the box holds to be written anew; None: it holds the draft.

    An edit that is left for another one is its message's: it is in the box again when that message is edited again.
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
        """All that is written and not sent. An edit that has changed nothing is not."""
        held = [] if self._is_unchanged else [self._prompt.draft]
        aside = [] if self.editing is None else [self._aside]
        return joined([*self._session.queued, *aside, *self._left.values(), *held])

    @property
    def _is_unchanged(self) -> bool:
        return self.editing is not None and self._prompt.draft == self._edited

    def begin_edit(self, key: int, draft: Draft) -> bool:
        """Write the prompt ``key`` anew in the box, which holds ``draft`` for that, or what was written of it already.

        What the box held comes back after. Returns whether another edit was left for this one.
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
        """Give the box back to what it held before a message was edited. Edits that were left stay with their messages."""
        self._edit(None)
        self._prompt.put(self._aside)

    def hold(self, draft: Draft) -> None:
        """Hold ``draft`` in place of all that was held, edits too."""
        self._edit(None)
        self._left.clear()
        self._prompt.put(draft)

    def give_back(self, draft: Draft) -> None:
        """Take a prompt that will not be sent: before what is written, or before the draft while a message is edited."""
        if self.editing is None:
            self._prompt.give_back(draft.text, draft.attachments)
        else:
            self._aside = joined([draft, self._aside])

    def _edit(self, key: int | None) -> None:
        self.editing = key
        self._prompt.border_title = "" if key is None else EDITING
        self._prompt.obeys = key is None


Sent = Callable[[], Sequence[str]]
"""Returns what was sent, newest first."""


class History:
    """Where one is in what was sent. What stood in the box before, or was changed there, is the draft one comes back to."""

    def __init__(self) -> None:
        self._sent: Sequence[str] = ()
        self._at = -1  # of what is shown in what was sent; -1 is the draft
        self._draft = Draft()

    def older(self, shown: Draft, sent: Sent) -> Draft | None:
        """Return what was sent before what the box shows; None where nothing was."""
        if not self._shows(shown):
            self._sent, self._at, self._draft = _others(sent(), shown.text), -1, shown
        if self._at + 1 >= len(self._sent):
            return None
        self._at += 1
        return self._here()

    def newer(self, shown: Draft) -> Draft | None:
        """Return what was sent after what the box shows, at last the draft; None where the box shows that."""
        if not self._shows(shown):
            return None
        self._at -= 1
        return self._here()

    def forget(self) -> None:
        """Begin anew: what the box held was sent."""
        self._at = -1

    def _shows(self, shown: Draft) -> bool:
        return self._at >= 0 and shown == self._here()

    def _here(self) -> Draft:
        return self._draft if self._at < 0 else Draft(self._sent[self._at])


def _others(sent: Sequence[str], text: str) -> Sequence[str]:
    """Return what was sent without the last, where that is what stands in the box: a prompt that came back."""
    return sent[1:] if sent and text and sent[0] == text else sent


class WhatIfs:
    """Opens the screen over ``app``, sends what it asks, and hands it what comes.

    listeners: told every answer, and when a model was loaded: the process may be new then, and has to be asked again.
    """

    def __init__(self, session: Session, bridge: Bridge) -> None:
        self._session = session
        self._bridge = bridge
        self._asked = 0
        self._own_life: int | None = None
        self.listeners: list[Callable[[WhatIf | Loaded], None]] = []

    def open(self, app: App[int], model: str) -> None:
        """Ask about ``model``, which need not be here."""
        # plotext takes a tenth of a second to import: not before it is wanted.
        from tokamac.app.chat.what_if_form import first_question, known_names
        from tokamac.app.tui.screens.whatif import WhatIfScreen

        start, names = first_question(self._session, model), known_names(model)
        app.push_screen(
            WhatIfScreen(self.ask, start, names, busy=lambda: self._session.engine.busy), lambda _: self.asked_enough()
        )

    def take(self, app: App[int], event: BackendEvent) -> None:
        """Give an answer to who asked, or say that the engine is new; other events are none of its business."""
        if not isinstance(event, WhatIf | Loaded):
            return
        for listener in self.listeners:
            listener(event)
        if len(app.screen_stack) < 2:
            return
        from tokamac.app.tui.screens.whatif import WhatIfScreen

        for screen in app.screen_stack:
            if isinstance(screen, WhatIfScreen):
                screen.ask(again=True) if isinstance(event, Loaded) else screen.take(event)

    def ask(self, question: Question) -> int:
        """Send a question, and return the number that its answers will have.

        Where no process runs, since no model is loaded, one is started for this alone.
        """
        if not self._bridge.running:
            self._bridge.start()
            self._own_life = self._bridge.life
        self._asked += 1
        self._bridge.ask(AskWhatIf(self._asked, question))
        return self._asked

    def asked_enough(self) -> None:
        """End a process that was started for questions alone."""
        if self._own_life is not None and self._bridge.life == self._own_life:
            self._bridge.end()
        self._own_life = None


Wish = Callable[["ChatScreen", str], None]

WISHES: dict[str, Wish] = {
    "send": writing.send,
    "newline": writing.newline,
    "editor": writing.editor,
    "attach": writing.attach,
    "detach": writing.detach,
    "earlier": writing.earlier,
    "later": writing.later,
    "stop": writing.stop,
    "new_chat": chats.new_chat,
    "chats": chats.chats,
    "open": chats.open_,
    "title": chats.title,
    "delete_chat": chats.delete_chat,
    "restore_chat": chats.restore_chat,
    "export": reading.export,
    "import": reading.import_,
    "branches": chats.branches,
    "regenerate": chats.regenerate,
    "edit": chats.edit,
    "again": chats.again,
    "continue": chats.continue_,
    "older": chats.older,
    "newer": chats.newer,
    "fork": chats.fork,
    "choose_model": model.choose_model,
    "pull": model.pull,
    "adapter": model.adapter,
    "unload": model.unload,
    "system_prompt": model.system_prompt,
    "settings": model.settings,
    "thinking": model.thinking,
    "explain": reading.explain,
    "what_if": model.what_if,
    "convert": model.convert,
    "toggle_panel": reading.toggle_panel,
    "palette": reading.palette,
    "messages": reading.messages,
    "gauges": reading.gauges,
    "copy_message": reading.copy_message,
    "copy_code": reading.copy_code,
    "scroll_end": reading.scroll_end,
    "page_up": reading.page_up,
    "page_down": reading.page_down,
    "copy": reading.copy,
    "ask_guide": reading.ask_guide,
    "help": reading.help_,
    "leave": reading.leave,
}


class Columns(Horizontal):
    """Side by side."""

    BLANK = True


class Stack(Vertical):
    """One above the other."""

    BLANK = True


class Heading(Static):
    """The title of the chat, on one line; blank while it has none."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._shown = ""

    def show(self, title: str) -> None:
        """Show ``title``, which may be anybody's: it is made safe here."""
        line = sanitise_line(title)
        if line != self._shown:
            self._shown = line
            self.update(Content.styled(line, FAINT), layout=False)  # it is one line high


SMALLEST = (40, 12)
REFRESH_S = 0.4
REST_LOOK_S = 10.0  # how often it is asked whether an unused model is to give the chat a title, or its memory back

OpenStore = Callable[[], tuple[Store, Pick | None] | None]
"""Opens the store of conversations, and says which one to begin with; None: nothing is kept. Raises StoreError."""


class ChatScreen(Screen[None]):
    """The main screen."""

    BINDINGS = bindings()

    def __init__(self, session: Session, bridge: Bridge, memory: Preferences, open_store: OpenStore) -> None:
        super().__init__()
        self.session = session
        self.bridge = bridge
        self.memory = memory
        self.what_ifs = WhatIfs(session, bridge)
        self.stock = ModelLibrary(self)
        self.recording: Recording | None = None
        self.picked: str | None = None
        self.picked_kv: KVSpec | None = None
        self.picked_adapter: tuple[str, str | None] | None = None
        self.code_back = Back()
        self.history = History()
        self.reading: list[str] = []  # files that are about to be attached
        self._prompt = Prompt()
        self.composer = Composer(self._prompt, session)
        self.open_store = open_store
        self._early: list[Draft] | None = []  # what was sent before all had begun; None from then on

    def compose(self) -> ComposeResult:
        """Yield the parts."""
        with Columns(id="main"):
            with Stack(id="talk"):
                yield Heading()
                yield Transcript(tour=not self.memory.settings.toured, keymap=self.memory.keymap)
                yield Activity()
                yield Chips()
                yield self._prompt
                yield self._prompt.offers
            with VerticalScroll(id="panel", can_focus=False):
                yield Gauges()
        yield StatusLine(self.memory.keymap.actions)
        yield Static(id="too-small", markup=False)

    def on_mount(self) -> None:
        """Paint first; the engine starts right after."""
        if not self._composed:  # the app is left in its first moment
            return
        self._prompt.focus()
        self.show()
        self.call_after_refresh(begin, self)
        self._ticker = self.set_interval(REFRESH_S, self._tick, pause=True)
        self.set_interval(REST_LOOK_S, self._rest)

    def begun(self) -> None:
        """The engine starts and the conversations are open: send what was sent before."""
        early, self._early = self._early or [], None
        for draft in early:
            submit(self, draft)

    @property
    def focus_chain(self) -> list[Widget]:
        """Tab goes from the prompt to the messages, on to the gauges, and back."""
        return sorted(super().focus_chain, key=lambda widget: isinstance(widget, Prompt))

    def on_unmount(self) -> None:
        """Keep what stands in the prompt, and close the store: a reply that runs is kept as far as it came."""
        self._record(lambda recording: recording.close(self.composer.unsent.whole))

    @property
    def _composed(self) -> bool:
        """Whether the parts are there: they are not yet, or no more, in an app that is left as it begins."""
        return self._prompt.is_attached

    def on_resize(self, event: Resize) -> None:
        """Fit what is shown to the room there is."""
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

    def perform(self, steps: list[Step]) -> None:
        """Do what the session asks, in order, and show where it is."""
        for step in steps:
            self._perform(step)
        self.bridge.set_busy(self.session.engine.busy)
        self.show()
        # While a model writes, its figures are shown as they come and the cursor is still: each wake takes the model's time.
        writing = self.session.engine.phase is EnginePhase.DECODING
        (self._ticker.resume if self.session.engine.busy and not writing else self._ticker.pause)()
        self.query_one(Prompt).cursor_blink = not writing

    def _perform(self, step: Step) -> None:
        transcript = self.query_one(Transcript)
        match step:
            case StartEngine():
                self.bridge.start()
            case EndEngine():
                self.bridge.end()
            case Ask(request):
                self.bridge.ask(request)
            case TurnBegun(turn, again):
                info = self.session.engine.info
                name = info.name if info else self.session.engine.load.model
                transcript.begin(turn, name, share=share_on(info.device if info else ""), again=again)
                self._record(lambda recording: recording.begun(turn))
            case ReplyGrew(text, kind):
                transcript.add(text, kind)
                self._record(lambda recording: recording.grew())
            case ReplyEnded(reply):
                transcript.end(reply)
                self._record(lambda recording: recording.ended(reply))
            case Moved(turns):
                transcript.show_turns(turns)
                self._record(lambda recording: recording.moved())
            case Opened(turns):
                transcript.show_turns(turns)
                self._record(lambda recording: recording.left())
            case Titled(title):
                self._record(lambda recording: recording.entitled(title))
            case DraftReturned(text, attachments):
                self.composer.give_back(Draft(text, attachments))
                if self.composer.editing is not None:
                    self.notify("What was not answered is in the box again after the edit.", markup=False)
            case Notice(text, severity):
                seconds = 5 if severity == "information" else 12
                self.notify(sanitise(text), severity=severity, markup=False, timeout=seconds)

    def _record(self, write: Callable[[Recording], object]) -> None:
        if self.recording is not None:
            write(self.recording)

    def on_engine_said(self, message: EngineSaid) -> None:
        """Pass an event on, unless it comes from a process that is no more."""
        message.stop()
        if message.life == self.bridge.life:
            was = self.session.engine.phase
            if isinstance(message.event, Loaded):
                keep_picked(self)
            steps = self.session.on_event(message.event)
            self.what_ifs.take(self.app, message.event)
            if (
                self.session.engine.busy
                and self.session.engine.phase is was
                and all(isinstance(s, ReplyGrew) for s in steps)
            ):
                # Text comes often: the transcript draws it at its own pace, or together with new figures.
                for step in steps:
                    self._perform(step)
                if isinstance(message.event, ReplyEvent) and isinstance(message.event.event, Live):
                    self.query_one(Transcript).look(now=True)
                    self.show()
            else:
                self.perform(steps)
            if self.session.engine.phase is EnginePhase.IDLE and was is not EnginePhase.IDLE:
                self.query_one(Prompt).await_pause()  # what was written meanwhile can be read ahead now
                self.perform(self.session.select(self.query_one(Transcript).chosen))

    def _tick(self) -> None:
        self.perform(self.session.check_cancel()) if self.session.engine.phase is EnginePhase.STOPPING else self.show()

    def _rest(self) -> None:
        if steps := self.session.unload_if_idle() or (self.recording.entitle() if self.recording is not None else []):
            self.perform(steps)

    def show(self) -> None:
        """Bring activity, status and gauges up to date."""
        transcript = self.query_one(Transcript)
        transcript.greet(guide=self.session.engine.load.model == GUIDE)
        self.app.sub_title = title = self.recording.title if self.recording is not None else ""
        self.query_one(Heading).show(title)
        self.query_one(Activity).show(
            self.session, time.monotonic(), following=transcript.following, aside=self.stock.activity()
        )
        self.query_one(Chips).show(self.session, self._prompt.attachments, self.reading)
        essentials, pointing = not self._panel_shown, transcript.chosen is not None
        self.query_one(StatusLine).show(self.session, essentials=essentials, pointing=pointing)
        if self._panel_shown:
            self.query_one(Gauges).show(self.session)

    @property
    def _panel_shown(self) -> bool:
        return self.memory.settings.panel and self.size.width >= NARROW

    def show_panel(self) -> None:
        """Show the gauges where they are wanted and have room."""
        self.query_one("#panel").display = self._panel_shown

    # Wishes ---------------------------------------------------------------------------------------------------------------

    def do(self, action: str, argument: str = "") -> None:
        """Do what the registry's action of this id stands for. argument: what was written after its slash command."""
        WISHES[action](self, argument)

    def action_do(self, action: str) -> None:
        """Do what a key stands for."""
        self.do(action)

    @on(Prompt.Submitted)
    def submit(self, message: Prompt.Submitted) -> None:
        """Send what is written, or do the command that it is: once there is an engine to send it to, and a store to keep it."""
        if self._early is None:
            submit(self, message.draft)
        else:
            self._early.append(message.draft)

    @on(Prompt.Picked)
    def attach(self, message: Prompt.Picked) -> None:
        """Read the file that was chosen."""
        self.do("attach", message.path)

    @on(Prompt.Paused)
    def read_ahead(self, message: Prompt.Paused) -> None:
        """Have what is written read while the user writes on, and keep it."""
        self.perform(self.session.draft_paused(message.draft.text, message.draft.attachments))
        self._record(lambda recording: recording.drafted(self.composer.unsent.whole))

    @on(Prompt.Changed)
    def written(self) -> None:
        """Know that the user writes."""
        self.session.idle.seen()

    def pointed(self) -> MessageNode | None:
        """Return the message that is pointed at, or else the last one; None where there is none."""
        tree = self.session.conversation.tree
        key = self.query_one(Transcript).chosen or tree.head
        return None if key is None else tree.nodes[key]

    def begin_edit(self, key: int, draft: Draft) -> None:
        """Write the prompt ``key`` anew in the box, which holds ``draft`` for that; what it held comes back after."""
        if self.composer.begin_edit(key, draft):
            self.notify("What was written of the other message stays with it: edit it again to go on.", markup=False)
        self._prompt.focus()
        self.show()
        self.notify("Enter sends it in place of the old one, which stays beside it. Esc gives it up.", markup=False)

    def let_go_of_edit(self) -> None:
        """Leave the message that is edited as it is."""
        if self.composer.editing is not None:
            self.composer.end_edit()
            self.show()

    def keep(self, settings: Settings) -> None:
        """Hold and write the settings."""
        if problem := self.memory.keep(settings):
            self.notify(problem, severity="warning", markup=False)
