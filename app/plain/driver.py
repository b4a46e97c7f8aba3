"""The session, its engine's process and what is kept of it, stepped on the main thread.

session ─ steps ─▶ Driver ─▶ process, console, recording        process ─ reader's thread ─▶ events ─▶ Driver ─▶ session
"""

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokamac.app.backend.client import BackendEvent, Died, EngineProcess
from tokamac.app.plain.console import Console
from tokamac.app.plain.interrupts import heard, unbroken
from tokamac.app.plain.progress import Rarely
from tokamac.app.plain.titling import Titling
from tokamac.app.tui import units
from tokamac.app.tui.attachments import Draft
from tokamac.app.tui.conversation import Reply
from tokamac.app.tui.phase import Phase
from tokamac.app.tui.prose.messages import ENDINGS
from tokamac.app.tui.recording import Recording
from tokamac.app.tui.run import Begun
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
from tokamac.app.tui.thinking import budget_spent
from tokamac.app.verdict import brief

TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class _Interrupt:
    """Ctrl-C."""


class Driver:
    """Does what the session asks. returned: a prompt that was not sent. failed: whether a reply, or loading a model, failed."""

    def __init__(self, begun: Begun, console: Console) -> None:
        self.session = begun.session
        self.memory = begun.memory
        self.recording: Recording | None = None
        self.returned = Draft()
        self.failed = False
        self._begun = begun
        self._console = console
        self._process: EngineProcess | None = None
        self._life = 0
        self._events: queue.SimpleQueue[tuple[int, BackendEvent] | _Interrupt] = queue.SimpleQueue()
        self._rarely = Rarely()
        self._titling = Titling()

    @unbroken()
    def perform(self, steps: Sequence[Step]) -> None:
        """Do what the session asks, in order."""
        for step in steps:
            self._perform(step)
        if self._process is not None:
            self._process.set_busy(self.session.busy)
        self._begun.keep_awake.tell(self, busy=self.session.busy)

    def _perform(self, step: Step) -> None:
        match step:
            case StartEngine():
                self._start()
            case EndEngine():
                self._end()
            case Ask(request):
                if self._process is not None:
                    self._process.send(request)
            case TurnBegun(turn):
                self._record(lambda recording: recording.begun(turn))
                info = self.session.info
                self._console.begin(info.name if info is not None else self.session.load.model)
            case ReplyGrew(text, kind):
                self._record(lambda recording: recording.grew())
                self._console.grow(text, kind)
            case ReplyEnded(reply):
                self._record(lambda recording: recording.ended(reply))
                self._ended(reply)
            case Moved():
                self._record(lambda recording: recording.moved())
            case Opened():
                self._record(lambda recording: recording.left())
            case Titled(title):
                self._titling.heard(title)
            case DraftReturned(text, attachments):
                self._give_back(Draft(text, attachments))
            case Notice(text, severity):
                self.failed = self.failed or severity == "error"
                self._console.note(text)

    def _give_back(self, draft: Draft) -> None:
        if not self._console.typed:
            return  # nobody is there to write it anew, and what is attached to it would go with the next line
        self.returned = draft
        if draft.attachments:
            names = ", ".join(each.name for each in draft.attachments)
            self._console.note(f"Still attached, for the next prompt: {names}. /detach lets go of the last one.")

    def _record(self, write: Callable[[Recording], None]) -> None:
        if self.recording is not None:
            write(self.recording)

    def _ended(self, reply: Reply) -> None:
        self._console.end()
        self.failed = self.failed or reply.ending in ("lost", "failed")
        cost = "" if reply.metrics is None else brief(reply.metrics, reply.diagnosis)
        spent = "" if reply.thinking_ended_at is None else f"thinking {budget_spent(reply.thinking_ended_at)}"
        said = ", ".join(part for part in (ENDINGS[reply.ending], spent, cost) if part)
        if said:
            self._console.aside(f"({said})")

    # The engine's process -------------------------------------------------------------------------------------------------

    def settle(self, *, loaded: bool = False) -> None:
        """Take what the engine says until nobody waits for a reply. Ctrl-C stops it.

        loaded: wait for a model that is being loaded, too; one that was unloaded is loaded.
        """
        if loaded and self.session.phase is Phase.UNLOADED:
            self.perform(self.session.start())
        self._rarely.begin()
        with heard(lambda: self._events.put(_Interrupt())):
            while self.session.replying or (self.session.busy and (loaded or self.session.queued)):
                match self._next():
                    case None:
                        self.perform(self.session.tick())
                    case _Interrupt():
                        self.perform(self.session.stop())
                    case (life, event):
                        self._take(life, event)
                self._tell_progress()

    def stop(self) -> None:
        """Stop what is waited for, if anything is."""
        if self.session.replying or self.session.queued:
            self.perform(self.session.stop())

    def before_wait(self) -> None:
        """Take what the engine has said by now, and see what may be done while a line is waited for."""
        self._catch_up()
        self.after_wait()
        self._titling.look(self.recording)

    def after_wait(self) -> None:
        """Keep what came of that."""
        self._titling.keep(self.recording)

    def _catch_up(self) -> None:
        while not self._events.empty():
            match self._events.get():
                case (life, event):
                    self._take(life, event)

    def rest(self) -> None:
        """Take what the engine has said, and have an unused model give its memory back, or the chat a title.

        To be called now and then while a line, or a command's process, is waited for, from any thread: no reply runs then, so
        that nothing is recorded. An engine that nobody hears for long seems to be busy and to hang.
        """
        self._catch_up()
        if steps := self.session.rest():
            self.perform(steps)
            self._console.note(
                "The model was not used for a while and gave its memory back; it loads again when you ask."
            )
        elif self._titling.allowed:
            self.perform(self.session.entitle())

    def another(self, on_event: Callable[[BackendEvent], object]) -> EngineProcess:
        """Start another process of the same kind; its log stands beside this one's. Raises OSError."""
        log = self._begun.log
        return EngineProcess(self._begun.command, log.with_stem(f"{log.stem}-guide"), on_event)

    def close(self) -> None:
        """End the engine's process."""
        self._begun.keep_awake.close()
        process, self._process = self._process, None
        self._life += 1
        if process is not None:
            process.close()

    def _next(self) -> tuple[int, BackendEvent] | _Interrupt | None:
        try:
            return self._events.get(timeout=TICK_S)
        except queue.Empty:
            return None

    def _take(self, life: int, event: BackendEvent) -> None:
        if life == self._life:  # else it comes from a process that is no more
            self.perform(self.session.on_event(event))

    def _start(self) -> None:
        self._end()
        life = self._life
        try:
            self._process = EngineProcess(
                self._begun.command, self._begun.log, lambda event: self._events.put((life, event))
            )
        except OSError as error:
            self._events.put((life, Died(f"it could not be started: {error}", "")))

    def _end(self) -> None:
        process, self._process = self._process, None
        self._life += 1
        if process is not None:
            process.kill()

    def _tell_progress(self) -> None:
        if not self._rarely.due():
            return
        session = self.session
        if session.phase is Phase.LOADING and (loading := session.loading) is not None:
            if loading.stage == "warm-up":
                self._console.note(f"warming up {session.load.model}")
                return
            of = "" if loading.total is None else f" of {units.size(loading.total)}"
            verb = "downloading" if loading.stage == "download" else "loading"
            self._console.note(f"{verb} {session.load.model}: {units.size(loading.done)}{of}")
        elif session.phase is Phase.PREFILL and (prefill := session.prefill) is not None:
            done, total = units.count(prefill.done), units.count(prefill.total)
            self._console.note(f"reading the prompt: {done} of {total} tokens")
