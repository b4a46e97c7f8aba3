"""The chat screen: transcript, gauges, prompt. It turns keys into actions, and draws the steps of the session."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.events import Key, Paste, Resize
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from tokamac.engine.events import Live, ToolCall
from tokamac.engine.hub.names import GUIDE

from ... import INTERRUPTED
from ...backend.processes import ChatServer
from ...backend.protocol import ReplyEvent
from ...chat import commands, recording, setup
from ...chat.attachments import Draft
from ...chat.controller import Bridge, ChatController, Composer, RefusedError, Severity, UserChoice
from ...chat.conversation import Turn
from ...chat.external_programs import EditorError, edit_text, editor_command
from ...chat.figures import pointed_at, primer_is_new
from ...chat.preferences import Preferences
from ...chat.session import Session
from ...chat.steps import (
    AskConsent,
    DraftReturned,
    Elsewhere,
    EnginePhase,
    Moved,
    Notice,
    Opened,
    PromptFailed,
    PromptRefused,
    Pruned,
    ReplyEnded,
    ReplyGrew,
    Resumed,
    Revised,
    Step,
    Titled,
    ToolAnswered,
    TurnBegun,
    VersionEnded,
    VersionGrew,
    VersionsBegun,
)
from ...store.store import Store
from ...store.values import StoreError, title_of
from ...text.sanitise import sanitise, sanitise_line
from ...tools.calls import Decision
from ..actions import Dialogs, PromptActions
from ..theme import FAINT
from ..widgets.prompt_input import Chips, Completions, Prompt
from ..widgets.status import NARROW, Activity, Gauges, StatusLine
from ..widgets.transcript import SIDE, WIDEST, Transcript, bindings, share_on
from .dialog import ChoiceScreen, ConsentScreen, EngineSaid, TextScreen

if TYPE_CHECKING:
    from ...chat.versions import Versions
    from ..model_library import ModelLibrary
    from .versions import VersionsScreen

PRIVATE_TITLE = "Private chat · nothing is kept"
LOOP_GRACE = 256  # tokens: some seconds to read that a reply repeats itself, and to press a key
ESCAPED_S = 3.0  # how soon the second Esc must come
QUITS_WITHIN_S = 3.0  # how soon the second Ctrl+C must come; the notice that asks for it is shown as long


def is_growth(step: Step) -> bool:
    """Whether the step is more text of a reply, on screen or in the background."""
    return isinstance(step.step if isinstance(step, Elsewhere) else step, ReplyGrew | VersionGrew)


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

# Opens the store of conversations, and returns the ID of the one to open; None: nothing is saved. Raises StoreError.
OpenStore = Callable[[], tuple[Store, str | None] | None]
NOTICE_S: dict[Severity, float] = {"information": 5, "warning": 12, "error": 20}


class ChatScreen(Screen[None]):
    """The main screen, and the ``ChatView`` of its ``chat``."""

    BINDINGS = bindings()

    def __init__(self, session: Session, bridge: Bridge, preferences: Preferences, open_store: OpenStore) -> None:
        super().__init__()
        session.loop_grace = LOOP_GRACE
        self._prompt = Prompt()
        server = ChatServer(
            spawn=lambda work: self.run_worker(work, group="server"), changed=self._server_changed, told=self.tell
        )
        composer = Composer(self._prompt, lambda: session.queued)
        self.chat = ChatController(session, bridge, preferences, self, composer, server=server)
        self.chat.clipboard = lambda text: self.app.copy_to_clipboard(text)  # noqa: PLW0108  # there is no app yet
        bridge.post = lambda event, number: self.post_message(EngineSaid(event, number))
        self._prompt.completions.prompts = lambda: commands.listed_prompts(self.chat)
        self.dialogs = Dialogs(self.chat, self, lambda: self.library)
        self.writing = PromptActions(self.chat, self, self._prompt)
        self.open_store = open_store
        self._library: ModelLibrary | None = None
        self.first_prompt = ""  # a file that is sent at the start
        self._keymap = session.keymap
        self._quits_until = 0.0  # until then, Ctrl+C quits
        self._escaped = False  # the last key was Esc, in an empty input box
        self._versions: VersionsScreen | None = None  # that is open
        self._early: list[Draft] | None = []  # what was sent before the start was complete; None from then on

    @property
    def library(self) -> "ModelLibrary":
        """The models, once they are wanted."""
        if self._library is None:
            from ..model_library import ModelLibrary

            self._library = ModelLibrary(
                self.chat, lambda work, group: self.run_worker(work, group=group, exclusive=group == "look")
            )
        return self._library

    def compose(self) -> ComposeResult:
        with Columns(id="main"):
            with Stack(id="talk"):
                yield Heading()
                tour, keymap = not self.chat.preferences.settings.toured, self.chat.preferences.keymap
                yield Transcript(tour=tour, keymap=keymap, act=self.do, write=self.type)
                yield Activity()
                yield Chips()
                yield self._prompt
                yield self._prompt.completions
            with VerticalScroll(id="panel", can_focus=False):
                yield Gauges()
                yield Static(id="server", markup=False)
        yield StatusLine(self.chat.preferences.keymap.actions)
        yield Static(id="too-small", markup=False)

    def on_mount(self) -> None:
        if not self._composed:  # the app quits in its first moment
            return
        self._prompt.focus()
        self._ticker = self.set_interval(REFRESH_S, self._tick, pause=True)
        self.redraw()
        self.call_after_refresh(self.begin)
        self.watch(self.query_one(Transcript), "chosen", self.redraw, init=False)
        self.watch(self.query_one(Transcript), "scroll_y", self._head, init=False)
        self.set_interval(REST_LOOK_S, self._rest)

    def begin(self) -> None:
        """Load the model and open the store, once the first frame is drawn."""
        chat, transcript = self.chat, self.query_one(Transcript)
        chat.perform(chat.session.start())
        self.watch(transcript, "selected", lambda key: chat.perform(chat.session.select(key)), init=False)
        if not chat.preferences.settings.toured:  # the tour is on the screen
            chat.save_settings(replace(chat.preferences.settings, toured=True))
        self.begin_recording()
        if self.first_prompt:
            chat.attempt(lambda: commands.send_prompt(chat, self.first_prompt, ""))
        early, self._early = self._early or [], None
        for draft in early:
            self.writing.submit(draft)

    def begin_recording(self) -> None:
        """Save the chat from here on, and open the one that was asked for."""
        chat, status = self.chat, self.query_one(StatusLine)
        try:
            opened = self.open_store()
            if opened is None:
                return
            store, wanted = opened
            self._purge_later(store)
            chat.record(store, wanted)
            if chat.private:
                chat.keep_nothing()
        except StoreError as error:
            if chat.recording is None:
                status.unsaved = lambda: True
                self.tell(f"Chats are not saved: {error.one_line()}", "error")
                return
            self.tell(error.one_line(), "error")
        status.unsaved = lambda: chat.recording is not None and chat.recording.unsaved

    def _purge_later(self, store: Store) -> None:
        def look() -> None:
            if recording.is_time(self.chat.session):
                timer.stop()
                self.run_worker(purge, thread=True, group="files")

        def purge() -> None:
            if problem := recording.purge(store.file):
                self.app.call_from_thread(self.tell, problem, "warning")

        timer = self.set_interval(recording.LOOK_S, look)

    @property
    def focus_chain(self) -> list[Widget]:
        return sorted(super().focus_chain, key=lambda widget: isinstance(widget, Prompt))

    def on_unmount(self) -> None:
        self.chat.close_recording()
        self.chat.preferences.close()

    @property
    def _composed(self) -> bool:
        return self._prompt.is_attached

    def on_resize(self, event: Resize) -> None:
        if not self._composed:
            return
        width, height = event.size
        tiny = width < SMALLEST[0] or height < SMALLEST[1]
        self.set_class(tiny, "-tiny")
        if not tiny and self.focused is None:
            self._prompt.focus()  # it lost the focus when it was hidden
        self.set_class(height < 30, "-short")
        self.set_class(width < NARROW, "-narrow")
        if tiny:
            said = f"{width}×{height} is too small: tokamac needs {SMALLEST[0]}×{SMALLEST[1]}."
            self.query_one("#too-small", Static).update(Content(said))
        self.show_panel()
        self.call_after_refresh(self.redraw)

    # What the chat asks of its view ---------------------------------------------------------------------------------------

    @property
    def selected(self) -> int | None:
        return self.query_one(Transcript).selected

    def tell(self, text: str, severity: Severity = "information") -> None:
        self.notify(sanitise(text), severity=severity, markup=False, timeout=NOTICE_S[severity])

    def show(self, text: str) -> None:
        """Show what was asked for: a line beside the text, or more of them in a dialog."""
        if "\n" in text:
            self.app.push_screen(TextScreen(sanitise(text)))
        else:
            self.tell(text)

    def forget(self, *, private: bool) -> None:
        del private  # what was typed is in the chat alone
        self.writing.forget()

    def edited(self, text: str) -> str:
        try:
            command = editor_command()
            with self.app.suspend():
                return edit_text(command, text)
        except EditorError as error:
            raise RefusedError(str(error)) from None

    def open(self, action: str, argument: str = "") -> None:
        if (own := self.ACTIONS.get(action)) is not None:
            own(self, argument)
        elif (written := PromptActions.ACTIONS.get(action)) is not None:
            written(self.writing, argument)
        else:
            Dialogs.ACTIONS[action](self.dialogs, argument)

    def opened(self, chat: str) -> None:
        del chat
        self._prompt.focus()

    def turn_to(self, key: int | None = None) -> None:
        transcript = self.query_one(Transcript)
        if key is None:
            self._prompt.focus()
        elif transcript.has_focus:
            transcript.select_message(key)

    def wait(self) -> None:
        """Do not wait: it is seen that the model loads."""

    def choose(self, choice: UserChoice, then: Callable[[int], None]) -> None:
        def answered(answer: int | None) -> None:
            if answer is not None:
                then(answer)

        self.app.push_screen(ChoiceScreen(choice), answered)

    def later(self, work: Callable[[], list[Step]]) -> None:
        self.post_message(Later(work))

    @on(Later)
    def do_later(self, message: Later) -> None:
        message.stop()
        self.chat.perform(message.work())

    def aside(self, work: Callable[[], Callable[[], None]]) -> None:
        def run() -> None:
            self.app.call_from_thread(self.chat.attempt, work())

        self.run_worker(run, thread=True, group="files")

    def quit(self) -> None:
        if asks := self.library.before_quitting():
            self.tell(asks, "warning")
        else:
            self.app.exit(0)

    def ask(self, key: int, draft: Draft, text: str = "") -> None:
        session, is_reply = self.chat.session, self.chat.session.conversation.tree.nodes[key].is_reply
        if text:
            steps = session.revise(key, text) if is_reply else session.edit(key, text, draft.attachments)
            self.chat.perform(steps)
            return
        if self.chat.composer.begin_edit(key, draft, reply=is_reply):
            self.tell("Your other edit is saved: edit that message again to continue it.")
        self._prompt.focus()
        self.redraw()
        new = "keeps your text as a new version of the reply" if is_reply else "sends your edit as a new version"
        self.tell(f"Enter {new}{'' if is_reply else ' (the old one is kept)'}. Esc cancels.")

    # Steps ----------------------------------------------------------------------------------------------------------------

    def draw(self, step: Step | None = None) -> None:
        transcript, pruned = self.query_one(Transcript), self.chat.session.conversation.pruned
        match step:
            case None:
                self._draw_beside()
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
                self.chat.tell_versions_ended(versions)
            case Moved(turns) | Revised(turns):
                transcript.show_turns(turns, pruned)
            case Opened(turns):
                self._hide_versions()
                transcript.show_turns(turns, pruned)
            case Pruned():
                transcript.prune(self.chat.session.turns, pruned)
            case Titled(title):
                if self.chat.recording is not None:
                    self.chat.recording.entitled(title)
            case Elsewhere(step=inner):
                if isinstance(inner, ToolAnswered):
                    self._close_consent(inner.result.call)
                self.chat.tell_elsewhere(step)
            case PromptRefused(_, draft):  # the line above the input box says why
                if draft is not None:
                    self.chat.composer.give_back(draft)
            case PromptFailed(key, failed):
                if not self.chat.composer.unsent.whole and self.chat.composer.editing is None:
                    self.chat.composer.begin_edit(key, failed)
            case DraftReturned(text, attachments):
                self.chat.composer.give_back(Draft(text, attachments))
                if self.chat.composer.editing is not None:
                    self.tell("Your unanswered prompt is back in the input box after the edit.")
            case Notice(text, severity):
                self.tell(text, severity)
            case AskConsent(call, preview):
                screen = ConsentScreen(call, self.chat.title_elsewhere, preview)
                self.app.push_screen(screen, partial(self._decided, call))
            case ToolAnswered(key, result):
                self._close_consent(result.call)
                transcript.answer(result, key)
            case _:
                pass

    def _draw_beside(self) -> None:
        self.show_panel()
        self.redraw()
        # While a model writes, its figures are shown as they come and the cursor is still: each wake takes the model's time.
        engine = self.chat.session.engine
        writing = engine.phase is EnginePhase.DECODING
        (self._ticker.resume if engine.busy and not writing else self._ticker.pause)()
        self._prompt.cursor_blink = not writing

    def _show_versions(self, versions: "Versions") -> None:
        from .versions import VersionsScreen

        def closed(_: None) -> None:
            if self._versions is shown:
                self._versions = None
            self._prompt.focus()
            self.redraw()

        self._hide_versions()
        self._versions = shown = VersionsScreen(versions, self.chat, self.do)
        self.app.push_screen(shown, closed)

    def _hide_versions(self) -> None:
        if self._versions is not None:
            self._versions.close()

    def _decided(self, call: ToolCall, decision: Decision | None) -> None:
        """Take the answer to a call; none stops the reply, where it still waits."""
        if decision is not None:
            setup.decide(self.chat, call, decision)
        elif self.chat.session.tools.waiting == call:
            self.chat.perform(self.chat.session.stop())

    def _close_consent(self, call: ToolCall) -> None:
        if isinstance(self.app.screen, ConsentScreen) and self.app.screen.call == call:
            self.app.screen.dismiss(None)

    def _begin(self, turn: Turn, *, again: bool) -> None:
        session, info = self.chat.session, self.chat.session.engine.info
        name = info.name if info else session.engine.load.model
        share = share_on(info.device if info else "")
        self.query_one(Transcript).begin(turn, name, share=share, again=again, tinted=session.tints_guesses)

    def on_engine_said(self, message: EngineSaid) -> None:
        """Take what the engine's process says, unless it is one that was ended."""
        message.stop()
        chat, event = self.chat, message.event
        if message.process_number != chat.bridge.process_number:
            return
        was = chat.session.engine.phase
        steps = chat.receive(event)
        self.dialogs.pass_on(event)
        if chat.session.engine.busy and chat.session.engine.phase is was and all(is_growth(step) for step in steps):
            # Text comes often: the transcript draws it at its own pace, or together with new figures.
            for step in steps:
                chat.apply(step)
            if self._versions is not None:
                self._versions.look()
            elif isinstance(event, ReplyEvent) and isinstance(event.event, Live):
                self.query_one(Transcript).look(now=True)
                self.redraw()
        else:
            chat.perform(steps)
        if chat.session.engine.phase is EnginePhase.IDLE and was is not EnginePhase.IDLE:
            self._prompt.await_pause()  # what was written meanwhile can be read ahead now
            chat.perform(chat.session.select(self.selected))

    def _tick(self) -> None:
        session = self.chat.session
        if session.engine.phase is EnginePhase.STOPPING:
            self.chat.perform(session.check_cancel())
        else:
            self.redraw()

    def _rest(self) -> None:
        recorded = self.chat.recording
        if recorded is not None and recorded.look():
            self._head()
        steps = self.chat.session.unload_if_idle() or (recorded.entitle() if recorded is not None else [])
        if steps:
            self.chat.perform(steps)

    # What is beside the transcript ----------------------------------------------------------------------------------------

    def redraw(self) -> None:
        """Draw what changed beside the transcript."""
        session, transcript = self.chat.session, self.query_one(Transcript)
        if self._keymap is not session.keymap:
            self._rekey()
        transcript.greet(guide=session.engine.load.model == GUIDE)
        self._head()
        compacting = "compacting the chat" if session.compactor.running else ""
        library = self._library.activity() if self._library else ""
        server = "" if self._panel_shown else self.chat.server.job.line  # the panel has it
        self.query_one(Activity).show(
            session,
            time.monotonic(),
            following=transcript.following,
            aside=" · ".join(filter(None, (compacting, library, server))),
            elsewhere=self.chat.title_elsewhere,
        )
        running = "" if self.chat.shell is None else self.chat.shell.text
        self.query_one(Chips).show(session, self._prompt.draft, self.chat.reading, running)
        essentials, selecting = not self._panel_shown, transcript.selected is not None
        self.query_one(StatusLine).show(session, essentials=essentials, selecting=selecting, chosen=transcript.chosen)
        if self._panel_shown:
            shown = pointed_at(session, transcript.selected)
            self.query_one(Gauges).show(shown, every=self.chat.preferences.settings.all_figures)

    def _rekey(self) -> None:
        self._keymap = known = self.chat.session.keymap
        self.app.set_keymap(known.changed)
        self.query_one(StatusLine).rekey(known.actions)
        self.query_one(Transcript).rekey(known)

    def _head(self) -> None:
        recorded = self.chat.recording
        title = PRIVATE_TITLE if self.chat.private else recorded.title if recorded is not None else ""
        self.app.sub_title = title
        turns = self.chat.session.turns if title and self.query_one(Transcript).scroll_y < 1 else []
        self.query_one(Heading).show("" if turns and title == title_of(turns[0].prompt) else title)

    @property
    def _panel_shown(self) -> bool:
        return self.chat.preferences.settings.panel and self.size.width >= NARROW

    def show_panel(self) -> None:
        self.query_one("#panel").display = self._panel_shown

    def _server_changed(self) -> None:
        server = self.chat.server.job
        self.chat.session.serving = server.on
        line = self.query_one("#server", Static)
        line.display = server.on
        line.update(server.line.replace(" · ", "\n"))
        self.redraw()

    # Actions --------------------------------------------------------------------------------------------------------------

    def do(self, action: str, argument: str = "") -> None:
        """Do an action, and tell why where it can't be done."""
        self._escaped = self._escaped and action == "stop"
        commands.do(self.chat, action, argument)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if parameters == ("keep_going",):
            return self.chat.session.loop is not None
        return super().check_action(action, parameters)

    def action_do(self, action: str) -> None:
        self.do(action)

    def stop(self, _: str) -> None:
        """Close the completions, or stop what runs, a shell command first; else clear the selection and cancel an edit.

        Twice in an empty box, it edits an earlier prompt.
        """
        chat, prompt, twice = self.chat, self._prompt, self._escaped
        self._escaped = False
        if prompt.completions.display:
            prompt.completions.withdraw()
        elif chat.shell is not None:
            chat.shell.stop()
        elif chat.session.engine.busy or chat.session.engine.replying or chat.session.compacting:
            chat.perform(chat.session.stop())
        elif not prompt.has_focus or prompt.draft.whole or chat.composer.editing is not None or not chat.session.turns:
            self.clear_selection()
            if chat.composer.editing is not None:
                chat.composer.end_edit()
                self.redraw()
            prompt.focus()
        elif twice:
            self.dialogs.edit_earlier("")
        else:
            self.clear_selection()
            self._escaped = True
            self.notify("Esc again edits an earlier prompt.", timeout=ESCAPED_S)

    def copy_or_quit(self, _: str) -> None:
        """Copy what is selected; else stop what runs; else quit, at the second press."""
        chat, now = self.chat, time.monotonic()
        text = self.get_selected_text() or self._prompt.selected_text
        if text:
            self.tell(chat.copy(text))
        elif chat.shell is not None:
            chat.shell.stop()
        elif chat.session.engine.replying or chat.session.queued:
            chat.perform(chat.session.stop())
        elif now < self._quits_until:
            self.app.exit(INTERRUPTED)
        else:
            self._quits_until = now + QUITS_WITHIN_S
            kept = " Your draft is kept." if chat.composer.unsent.whole and chat.recording is not None else ""
            key = chat.session.keymap.key("copy")
            self.notify(f"Press {key} again to quit.{kept}", timeout=QUITS_WITHIN_S, markup=False)

    def cut_or_lead(self, _: str) -> None:
        """Cut what is selected in the input box; else show what a letter after this key does."""
        if self._prompt.has_focus and self._prompt.selected_text:
            self._prompt.action_cut()
        else:
            self.dialogs.leader("")

    def suspend(self, _: str) -> None:
        """Give the terminal to the shell."""
        driver = self.app._driver
        if driver is None or not driver.can_suspend or os.getpgrp() == os.getsid(0):
            # Who leads the session has no shell above: nobody could continue it.
            undoes = self.chat.session.keymap.key("undo")
            raise RefusedError(f"There is no shell here to go back to. {undoes} undoes.")
        with self.app.suspend():  # the terminal is the shell's before the job stops
            os.killpg(os.getpgrp(), signal.SIGSTOP)  # the whole job: a make or uv that waits must stop too

    def messages(self, key: str) -> None:
        """Let a message be selected; ``key``: select this one."""
        transcript = self.query_one(Transcript)
        transcript.focus()
        if key:
            transcript.select_message(int(key))

    def scroll(self, by: Callable[[Transcript], object]) -> None:
        by(self.query_one(Transcript))
        self.call_after_refresh(self.redraw)

    def follow(self, _: str) -> None:
        self.query_one(Transcript).follow()
        self.redraw()

    def toggle_panel(self, _: str) -> None:
        panel = not self.chat.preferences.settings.panel
        self.chat.save_settings(replace(self.chat.preferences.settings, panel=panel))
        self._panel_changed(tells=panel)

    def all_figures(self, _: str) -> None:
        """Show every figure in the panel, or few."""
        known = self.chat.preferences.settings
        self.chat.save_settings(replace(known, panel=True, all_figures=not known.panel or not known.all_figures))
        self._panel_changed(tells=True)

    def _panel_changed(self, *, tells: bool) -> None:
        self.show_panel()
        self.redraw()
        width = self.size.width
        if tells and width < NARROW:
            self.tell(f"The side panel needs {NARROW} columns; this window has {width}. /explain shows all figures.")

    def gauges(self, _: str) -> None:
        """Select a figure of the side panel, and show the panel for that."""
        panel = self.query_one("#panel")
        if not panel.display and not self.chat.preferences.settings.panel:
            self.toggle_panel("")
        if panel.display:
            self.query_one(Gauges).focus()
        else:
            explains = self.chat.session.keymap.key("explain")
            self.tell(f"The window is too narrow for the gauges. {explains} explains the last reply.")

    ACTIONS: ClassVar[Mapping[str, Callable[["ChatScreen", str], None]]] = {
        "stop": stop,
        "keep_going": lambda self, _: self.chat.perform(self.chat.session.keep_going()),
        "unload": lambda self, _: self.chat.perform(self.chat.session.unload()),
        "toggle_panel": toggle_panel,
        "all_figures": all_figures,
        "palette": lambda self, _: self.app.action_command_palette(),
        "messages": messages,
        "gauges": gauges,
        "scroll_top": lambda self, _: self.scroll(lambda transcript: transcript.scroll_home(animate=False)),
        "scroll_end": follow,
        "page_up": lambda self, _: self.scroll(lambda transcript: transcript.page(-1)),
        "page_down": lambda self, _: self.scroll(lambda transcript: transcript.page(1)),
        "copy": copy_or_quit,
        "leader": cut_or_lead,
        "suspend": suspend,
        "leave": lambda self, _: self.quit(),
    }

    # Keys, clicks and the input box ---------------------------------------------------------------------------------------

    def on_key(self, event: Key) -> None:
        """Write in the prompt wherever the focus is."""
        if event.is_printable and event.character and not event.character.isspace():
            event.stop()
            self.type(event.character)

    def on_paste(self, event: Paste) -> None:
        if not self._prompt.has_focus:
            event.stop()
            self.set_focus(self._prompt)
            self._prompt.post_message(Paste(event.text))

    def type(self, text: str) -> None:
        """Write ``text`` in the prompt."""
        self.set_focus(self._prompt)
        self._prompt.type(text)

    @on(Gauges.Switched)
    def switch_figures(self) -> None:
        self.do("all_figures")

    @on(Transcript.FiguresClicked)
    def explain(self, message: Transcript.FiguresClicked) -> None:
        self.chat.attempt(lambda: self.dialogs.explain_reply(message.key))

    @on(Prompt.Submitted)
    def submit(self, message: Prompt.Submitted) -> None:
        if self._early is None:
            self.writing.submit(message.draft)
        else:
            self._early.append(message.draft)

    @on(Transcript.LinkClicked)
    def open_link(self, message: Transcript.LinkClicked) -> None:
        if message.opens:
            self.dialogs.open_link(message.address)
        else:
            self.tell(f"{message.address}\nCtrl+click opens it.")

    @on(Transcript.CodeClicked)
    def copy_clicked(self, message: Transcript.CodeClicked) -> None:
        self.tell(self.chat.copy(message.text))

    @on(Prompt.Picked)
    def attach(self, message: Prompt.Picked) -> None:
        self.do("attach", message.path)

    @on(Prompt.Paused)
    def read_ahead(self, message: Prompt.Paused) -> None:
        """Have the engine read what is written so far, and keep it as a draft."""
        text, attachments = message.draft.text, message.draft.attachments
        session, recorded = self.chat.session, self.chat.recording
        self.chat.perform(session.draft_paused(text if self.writing.is_prompt(text) else "", attachments))
        if recorded is not None:
            recorded.drafted(self.chat.composer.unsent.whole)

    @on(Prompt.Changed)
    def written(self) -> None:
        self._escaped = False
        self.chat.session.idle.seen()
