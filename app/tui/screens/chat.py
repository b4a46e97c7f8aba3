"""The chat: transcript, gauges, prompt. It turns keys into wishes, gives them to the session, and does what the session says."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from textual import on
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.screen import Screen
from textual.widgets import Static

from tokamac.app.backend.wire import Load, Loaded, Stats, WhatIf
from tokamac.app.sanitise import sanitise
from tokamac.app.settings import Settings
from tokamac.app.tui.actions import bindings
from tokamac.app.tui.bridge import Bridge, EngineSaid
from tokamac.app.tui.clipboard import copy_text
from tokamac.app.tui.memory import Memory
from tokamac.app.tui.pace import share_on
from tokamac.app.tui.phase import Phase
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
    TurnBegun,
)
from tokamac.app.tui.what_ifs import WhatIfs
from tokamac.app.tui.widgets.covered import Columns, Stack
from tokamac.app.tui.widgets.gauges import Gauges
from tokamac.app.tui.widgets.prompt import Prompt
from tokamac.app.tui.widgets.status import Activity, StatusLine
from tokamac.app.tui.widgets.transcript import Transcript
from tokamac.engine.options import Sampling

if TYPE_CHECKING:
    from tokamac.app.tui.screens.settings import Chosen

NARROW = 90  # below this many columns the gauges would take the room that the text needs
SMALLEST = (40, 12)
REFRESH_S = 0.4
REST_LOOK_S = 10.0  # how often it is asked whether an unused model is to give its memory back


class ChatScreen(Screen[None]):
    """The main screen."""

    BINDINGS = bindings()

    def __init__(self, session: Session, bridge: Bridge, memory: Memory) -> None:
        super().__init__()
        self.session = session
        self.bridge = bridge
        self._memory = memory
        self._panel = memory.settings.panel
        self._picked: str | None = None
        self._what_ifs = WhatIfs(session, bridge)

    def compose(self) -> ComposeResult:
        """Yield the parts."""
        with Columns(id="main"):
            with Stack(id="talk"):
                yield Transcript()
                yield Activity()
                yield Prompt()
            with VerticalScroll(id="panel", can_focus=False):
                yield Gauges()
        yield StatusLine()
        yield Static(id="too-small", markup=False)

    def on_mount(self) -> None:
        """Paint first; the engine starts right after."""
        self.query_one(Prompt).focus()
        self._show()
        self.call_after_refresh(lambda: self.perform(self.session.start()))
        self._ticker = self.set_interval(REFRESH_S, self._tick, pause=True)
        self.set_interval(REST_LOOK_S, self._rest)

    def on_resize(self, event: Resize) -> None:
        """Fit what is shown to the room there is."""
        width, height = event.size
        tiny = width < SMALLEST[0] or height < SMALLEST[1]
        self.set_class(tiny, "-tiny")
        if not tiny and self.focused is None:
            self.query_one(Prompt).focus()  # it lost the focus when it was hidden
        self.set_class(height < 30, "-short")
        if tiny:
            self.query_one("#too-small", Static).update(
                Content(f"{width}×{height} is too small: tokamac needs {SMALLEST[0]}×{SMALLEST[1]}.")
            )
        self._show_panel()
        self.call_after_refresh(self._show)

    # Steps ----------------------------------------------------------------------------------------------------------------

    def perform(self, steps: list[Step]) -> None:
        """Do what the session asks, in order, and show where it is."""
        for step in steps:
            self._perform(step)
        self.bridge.set_busy(self.session.busy)
        self._show()
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
            case ReplyGrew(text, kind):
                transcript.add(text, kind)
            case ReplyEnded(reply):
                transcript.end(reply)
            case Moved(turns) | Opened(turns):
                transcript.show_turns(turns)
            case DraftReturned(text):
                self.query_one(Prompt).give_back(text)
            case Notice(text, severity):
                seconds = 5 if severity == "information" else 12
                self.notify(sanitise(text), severity=severity, markup=False, timeout=seconds)

    def on_engine_said(self, message: EngineSaid) -> None:
        """Pass an event on, unless it comes from a process that is no more."""
        message.stop()
        if message.life == self.bridge.life:
            was = self.session.phase
            if isinstance(message.event, Loaded) and self._picked == self.session.load.model:
                self._keep(replace(self._memory.settings, model=self._picked))
            steps = self.session.on_event(message.event)
            if isinstance(message.event, WhatIf | Loaded):
                self._what_ifs.take(self.app, message.event if isinstance(message.event, WhatIf) else None)
            if self.session.busy and self.session.phase is was and all(isinstance(s, ReplyGrew) for s in steps):
                # Text comes often: the transcript draws it at its own pace, or together with new figures.
                for step in steps:
                    self._perform(step)
                if isinstance(message.event, Stats):
                    self.query_one(Transcript).look(now=True)
                    self._show()
            else:
                self.perform(steps)
            if self.session.phase is Phase.IDLE and was is not Phase.IDLE:
                self.query_one(Prompt).await_pause()  # what was written meanwhile can be read ahead now

    def _tick(self) -> None:
        self.perform(self.session.tick()) if self.session.phase is Phase.STOPPING else self._show()

    def _rest(self) -> None:
        if steps := self.session.rest():
            self.perform(steps)

    def _show(self) -> None:
        transcript = self.query_one(Transcript)
        self.query_one(Activity).show(self.session, time.monotonic(), following=transcript.following)
        self.query_one(StatusLine).show(self.session, essentials=not self._panel_shown)
        if self._panel_shown:
            self.query_one(Gauges).show(self.session)

    @property
    def _panel_shown(self) -> bool:
        return self._panel and self.size.width >= NARROW

    def _show_panel(self) -> None:
        self.query_one("#panel").display = self._panel_shown

    def _keep(self, settings: Settings) -> None:
        if problem := self._memory.keep(settings):
            self.notify(problem, severity="warning", markup=False)

    # Wishes ---------------------------------------------------------------------------------------------------------------

    @on(Prompt.Submitted)
    def submit(self, message: Prompt.Submitted) -> None:
        """Send what is written."""
        text = message.text.strip()
        if not text:
            self.notify("Write something first; Enter sends it.", markup=False, timeout=3)
            return
        self.perform(self.session.submit(text))

    @on(Prompt.Paused)
    def read_ahead(self, message: Prompt.Paused) -> None:
        """Have what is written read while the user writes on."""
        self.perform(self.session.pause(message.text))

    def action_stop(self) -> None:
        """Stop what runs; else let go of a selection."""
        if self.session.busy:
            self.perform(self.session.stop())
        else:
            self.clear_selection()
            self.query_one(Prompt).focus()

    def action_new_chat(self) -> None:
        """Forget the conversation."""
        if self.session.turns:
            self.notify("New chat. The model stays loaded.", markup=False, timeout=3)
        self.perform(self.session.new_chat())
        self.query_one(Prompt).focus()

    def action_regenerate(self) -> None:
        """Make the last reply again."""
        self.perform(self.session.regenerate())

    def action_choose_model(self) -> None:
        """Ask for a model and load it."""
        from tokamac.app.tui.screens.model import ModelScreen

        self.app.push_screen(ModelScreen(self.session.load.model, self._ask_what_if), self._model_chosen)

    def _model_chosen(self, model: str | None) -> None:
        if model is not None:
            self._picked = model
            self.perform(self.session.choose(Load(model, self.session.load.kv, self.session.load.prompt_cache)))

    def action_system_prompt(self) -> None:
        """Edit the system prompt."""
        from tokamac.app.tui.screens.system import SystemScreen

        self.app.push_screen(SystemScreen(self.session.system), self._system_chosen)

    def _system_chosen(self, system: str | None) -> None:
        if system is not None:
            self.session.system = system
            self._keep(replace(self._memory.settings, system=system))
            text = "The system prompt holds from the next message on." if system else "No system prompt."
            self.notify(text, markup=False, timeout=3)

    def action_settings(self) -> None:
        """Edit sampling, KV and memory settings."""
        from tokamac.app.tui.screens.settings import Chosen, SettingsScreen

        recommended = self.session.info.recommended if self.session.info is not None else Sampling()
        current = Chosen(self.session.sampling, self.session.load.kv, self.session.idle.after_min)
        self.app.push_screen(SettingsScreen(current, recommended), self._settings_chosen)

    def _settings_chosen(self, chosen: "Chosen | None") -> None:
        if chosen is None:
            return
        kv, minutes = chosen.kv, chosen.unload_after_min
        self.session.sampling, self.session.idle.after_min = chosen.sampling, minutes
        self._keep(replace(self._memory.settings, sampling=chosen.sampling, kv=kv, unload_after_min=minutes))
        if kv != self.session.load.kv:
            self.perform(self.session.choose(Load(self.session.load.model, kv, self.session.load.prompt_cache)))

    def action_explain(self) -> None:
        """Explain the last reply that was measured."""
        from tokamac.app.tui.screens.explain import ExplainScreen

        replies = [
            turn.reply for turn in self.session.turns if turn.reply is not None and turn.reply.metrics is not None
        ]
        if replies:
            self.app.push_screen(ExplainScreen(replies), self._explained)
        else:
            self.notify("There is no reply to explain yet.", markup=False, timeout=3)

    def _explained(self, wonders: bool | None) -> None:
        if wonders:
            self.action_what_if()

    def action_what_if(self) -> None:
        """Ask what the model would do otherwise, or elsewhere."""
        self._ask_what_if(self.session.load.model)

    def _ask_what_if(self, model: str) -> None:
        self._what_ifs.open(self.app, model)

    def action_toggle_panel(self) -> None:
        """Show or hide the gauges."""
        self._panel = not self._panel
        self._keep(replace(self._memory.settings, panel=self._panel))
        self._show_panel()
        self._show()
        if self._panel and not self._panel_shown:
            self.notify(f"The side panel needs {NARROW} columns; this window has {self.size.width}.", markup=False)

    def action_palette(self) -> None:
        """Open the command palette."""
        self.app.action_command_palette()

    def action_help(self) -> None:
        """Show keys and actions."""
        from tokamac.app.tui.screens.help import HelpScreen

        self.app.push_screen(HelpScreen())

    def action_scroll_end(self) -> None:
        """Jump to the end and follow."""
        self.query_one(Transcript).follow()
        self._show()

    def action_page_up(self) -> None:
        """Scroll up a page."""
        self.query_one(Transcript).page(-1)
        self.call_after_refresh(self._show)

    def action_page_down(self) -> None:
        """Scroll down a page."""
        self.query_one(Transcript).page(1)
        self.call_after_refresh(self._show)

    def action_copy(self) -> None:
        """Copy the selection, and say how."""
        text = self.get_selected_text() or self.query_one(Prompt).selected_text
        if text:
            self.notify(copy_text(self.app, text), markup=False, timeout=3)
        else:
            self.notify(
                "Nothing is selected: drag with the mouse. Ctrl+Q quits, Esc stops a reply.", markup=False, timeout=4
            )

    def action_send(self) -> None:
        """Send what is written."""
        self.query_one(Prompt).submit()

    def action_newline(self) -> None:
        """Start a new line."""
        self.query_one(Prompt).insert("\n")

    def action_leave(self) -> None:
        """Leave the app."""
        self.app.exit(0)
