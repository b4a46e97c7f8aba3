"""The chat: transcript, gauges, prompt. It turns keys into wishes, gives them to the session, and does what the session says."""

import time
from collections.abc import Callable

from textual import on
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from tokamac.app.backend.wire import Loaded, Stats
from tokamac.app.sanitise import sanitise
from tokamac.app.settings import Settings
from tokamac.app.store.store import Store
from tokamac.app.tui.actions import bindings
from tokamac.app.tui.attachments import Draft
from tokamac.app.tui.bridge import Bridge, EngineSaid
from tokamac.app.tui.composer import Composer
from tokamac.app.tui.history import History
from tokamac.app.tui.memory import Memory
from tokamac.app.tui.pace import share_on
from tokamac.app.tui.phase import Phase
from tokamac.app.tui.prose.code import Back
from tokamac.app.tui.recording import Recording
from tokamac.app.tui.screens.chats import Pick
from tokamac.app.tui.session import Session
from tokamac.app.tui.steps import (
    Ask,
    DraftReturned,
    EndEngine,
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
from tokamac.app.tui.stock import Stock
from tokamac.app.tui.tree import Node
from tokamac.app.tui.what_ifs import WhatIfs
from tokamac.app.tui.widgets.chips import Chips
from tokamac.app.tui.widgets.covered import Columns, Stack
from tokamac.app.tui.widgets.gauges import Gauges
from tokamac.app.tui.widgets.heading import Heading
from tokamac.app.tui.widgets.prompt import Prompt
from tokamac.app.tui.widgets.status import Activity, StatusLine
from tokamac.app.tui.widgets.transcript import Transcript
from tokamac.app.tui.wishes.beginning import begin
from tokamac.app.tui.wishes.picking import keep_picked
from tokamac.app.tui.wishes.table import WISHES
from tokamac.app.tui.wishes.writing import submit
from tokamac.engine.hub_names import GUIDE
from tokamac.engine.options import KVSpec

NARROW = 90  # below this many columns the gauges would take the room that the text needs
SMALLEST = (40, 12)
REFRESH_S = 0.4
REST_LOOK_S = 10.0  # how often it is asked whether an unused model is to give the chat a title, or its memory back

OpenStore = Callable[[], tuple[Store, Pick | None] | None]
"""Opens the store of conversations, and says which one to begin with; None: nothing is kept. Raises StoreError."""


class ChatScreen(Screen[None]):
    """The main screen."""

    BINDINGS = bindings()

    def __init__(self, session: Session, bridge: Bridge, memory: Memory, open_store: OpenStore) -> None:
        super().__init__()
        self.session = session
        self.bridge = bridge
        self.memory = memory
        self.what_ifs = WhatIfs(session, bridge)
        self.stock = Stock(self)
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
        self.bridge.set_busy(self.session.busy)
        self.show()
        # While a model writes, its figures are shown as they come and the cursor is still: each wake takes the model's time.
        writing = self.session.phase is Phase.DECODING
        (self._ticker.resume if self.session.busy and not writing else self._ticker.pause)()
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
                info = self.session.info
                name = info.name if info else self.session.load.model
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
            was = self.session.phase
            if isinstance(message.event, Loaded):
                keep_picked(self)
            steps = self.session.on_event(message.event)
            self.what_ifs.take(self.app, message.event)
            if self.session.busy and self.session.phase is was and all(isinstance(s, ReplyGrew) for s in steps):
                # Text comes often: the transcript draws it at its own pace, or together with new figures.
                for step in steps:
                    self._perform(step)
                if isinstance(message.event, Stats):
                    self.query_one(Transcript).look(now=True)
                    self.show()
            else:
                self.perform(steps)
            if self.session.phase is Phase.IDLE and was is not Phase.IDLE:
                self.query_one(Prompt).await_pause()  # what was written meanwhile can be read ahead now
                self.perform(self.session.point(self.query_one(Transcript).chosen))

    def _tick(self) -> None:
        self.perform(self.session.tick()) if self.session.phase is Phase.STOPPING else self.show()

    def _rest(self) -> None:
        if steps := self.session.rest() or (self.recording.entitle() if self.recording is not None else []):
            self.perform(steps)

    def show(self) -> None:
        """Bring activity, status and gauges up to date."""
        transcript = self.query_one(Transcript)
        transcript.greet(guide=self.session.load.model == GUIDE)
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
        self.perform(self.session.pause(message.draft.text, message.draft.attachments))
        self._record(lambda recording: recording.drafted(self.composer.unsent.whole))

    @on(Prompt.Changed)
    def written(self) -> None:
        """Know that the user writes."""
        self.session.idle.seen()

    def pointed(self) -> Node | None:
        """Return the message that is pointed at, or else the last one; None where there is none."""
        tree = self.session.talk.tree
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
