"""The plain chat's loop: a prompt and its reply, or a slash command of the registry.

Ctrl-C stops a reply or a command; twice at the prompt it quits with 130, and at once in a script. The end of input quits with 0, or
with 1 in a script in which a reply, or loading a model, failed.

    session ─ steps ─▶ Driver ─▶ process, console, recording        process ─ reader's thread ─▶ events ─▶ Driver ─▶ session

The main thread steps the session; only while it waits for a line, another one does, which unloads an unused model and asks for a
title. The store belongs to the main thread: it is asked before the wait, and the title is written after it.
"""

import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tokamac.engine.events import ToolCall

from .. import INTERRUPTED, units
from ..backend.chat_server import ServerJob
from ..backend.client import BackendEvent, EngineProcess
from ..backend.protocol import Load, LookAgain, LookedAt, StopLooking
from ..backend.sharing import ChatEngine, chat_socket
from ..chat.actions import ACTIONS, Keymap
from ..chat.attachments import Draft, apart, joined, unescaped
from ..chat.commands import CodeCycle, LoadChoice, RefusedError, Severity, save_settings, use_asked_profile
from ..chat.connection import WITHOUT_BYTES
from ..chat.conversation import ENDINGS, MessageNode, Reply
from ..chat.external_programs import EditorError, copy_text, edit_text, editor_command
from ..chat.figures import PRIMER, primer_is_new
from ..chat.preferences import Preferences, budget_spent
from ..chat.recording import LEFT, Recording, purge
from ..chat.session import Session
from ..chat.start import ChatOptions, ChatStart, begin, open_store
from ..chat.steps import (
    Ask,
    AskConsent,
    DraftReturned,
    EndEngine,
    EnginePhase,
    Notice,
    PromptRefused,
    ReplyEnded,
    ReplyGrew,
    RunTool,
    StartEngine,
    Step,
    Titled,
    ToolAnswered,
    TurnBegun,
    VersionEnded,
    VersionsBegun,
)
from ..chat.versions import Versions
from ..output import note
from ..settings_form import whole_number
from ..store.values import StoredChat, StoreError
from ..tools.tool import call_line, call_lines, decision_of
from ..verdict import figures_text, remark
from . import processes
from .commands import Outline, last_turn
from .console import Console, LineComposer, heard, noticed, unbroken
from .jobs import RESUMES, BackgroundJobs
from .processes import Rarely

TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class _Later:
    """Work for the main thread."""

    work: Callable[[], list[Step]]


@dataclass(frozen=True, slots=True)
class _Interrupt:
    """Ctrl-C."""


class Driver:
    """Does what the session asks. returned: a prompt that was not sent. failed: whether a reply, or loading a model, failed."""

    def __init__(self, begun: ChatStart, console: Console) -> None:
        self.session = begun.session
        self.preferences = begun.preferences
        self.recording: Recording | None = None
        self.returned = Draft()
        self.failed = False
        self._begun = begun
        self._console = console
        self._process: ChatEngine | None = None
        self._share: Path | None = None
        self._process_number = 0
        self._events: queue.SimpleQueue[tuple[int, BackendEvent] | _Later | _Interrupt] = queue.SimpleQueue()
        self._rarely = Rarely()
        self._may_title = False  # as it was when the wait began
        self.preferences.tools_came = lambda said: self.later(lambda: self._tools_came(said))
        self._title = ""  # by the model, while a line was awaited
        self._asking = False  # an answer is awaited
        self._told = 0  # how many of the versions that are written at once were printed

    @unbroken()
    def perform(self, steps: Sequence[Step]) -> None:
        """Do what the session asks, in order."""
        for step in steps:
            self._perform(step)
        self._record(Recording.let_go)
        if self._process is not None:
            self._process.set_busy(self.session.engine.busy)
        self._begun.keep_awake.tell(self, busy=self.session.engine.busy)

    def _perform(self, step: Step) -> None:
        self._record(lambda recording: recording.hear(step))
        match step:
            case StartEngine():
                self._start()
            case EndEngine():
                self._end()
            case Ask(request):
                if self._process is not None:
                    self._process.send(request)
            case TurnBegun():
                info = self.session.engine.info
                self._console.begin(info.name if info is not None else self.session.engine.load.model)
            case ReplyGrew(text, kind):
                self._console.grow(text, kind)
            case ReplyEnded(reply):
                self._ended(reply)
            case VersionsBegun(versions):
                self._told = 0
                self._console.note(f"Writing {len(versions.all)} versions at once.")
            case VersionEnded(versions):
                self._tell_versions(versions)
            case Titled(title):
                self._title = title
            case DraftReturned(text, attachments):
                self._give_back(Draft(text, attachments))
            case PromptRefused(why, draft):
                self.failed = True
                self._console.note(why)
                if draft is not None:
                    self._give_back(draft)
            case Notice(text, severity):
                self.failed = self.failed or severity == "error"
                self._console.note(text)
            case AskConsent(call):
                self._events.put(_Later(lambda: self._asked(call)))
            case RunTool(call):
                self._console.note(f"calling {call_line(call)}")
                self.preferences.run_tool(call, lambda result: self.later(lambda: self.session.tool_ended(result)))
            case ToolAnswered(result=result):
                if result.outcome != "done":
                    self._console.note(
                        f"{call_line(result.call)}: {'not run' if result.outcome == 'refused' else result.text}"
                    )

    def later(self, work: Callable[[], list[Step]]) -> None:
        """Have ``work`` done on the main thread, from any other, once it looks."""
        self._events.put(_Later(work))

    def _tools_came(self, said: str) -> list[Step]:
        self.preferences.give(self.session)
        return [Notice(said)]

    def _asked(self, call: ToolCall) -> list[Step]:
        """Ask the user whether ``call`` may be run: where nobody types, it may not."""
        if self.session.tools.waiting != call:
            return []
        self._console.quote("\n".join(["The model wants to call:", *call_lines(call)]))
        if not self._console.typed:
            self._console.note("No one is here to allow it. [tools] allowed in the settings allows it for good.")
            return self.session.consent(call.id, "deny")
        while True:
            if (answer := self._read_answer()) is None:
                return self.session.stop()
            if (decision := decision_of(answer)) is None:
                continue
            if decision == "always" and (problem := self.preferences.allow_tool(call.name, always=True)):
                self._console.note(problem)
            return self.session.consent(call.id, decision)

    def _read_answer(self) -> str | None:
        """Return what the user types at the question; None at Ctrl-C, or at the end of the input."""
        try:
            self._asking = True
            return self._console.read("allow it? [o]nce, in this [c]hat, [a]lways, [d]eny> ")
        except (EOFError, KeyboardInterrupt):
            self._console.aside("")
            return None
        finally:
            self._asking = False

    def _interrupted(self) -> None:
        """Hear Ctrl-C between two steps; while an answer is awaited, no step comes, so there it ends the wait."""
        if self._asking:
            self._asking = False
            raise KeyboardInterrupt
        self._events.put(_Interrupt())

    def _give_back(self, draft: Draft) -> None:
        if not self._console.typed:
            return  # nobody is there to write it anew, and what is attached to it would go with the next line
        self.returned = draft
        if draft.attachments:
            names = ", ".join(each.name for each in draft.attachments)
            self._console.note(f"Still attached to the next prompt: {names}. /detach removes the last one.")

    def _record(self, write: Callable[[Recording], None]) -> None:
        if self.recording is not None:
            write(self.recording)

    def _ended(self, reply: Reply) -> None:
        self._console.end()
        self.failed = self.failed or reply.ending in ("lost", "failed")
        measured = (
            [] if reply.metrics is None else [figures_text(reply.metrics), remark(reply.metrics, reply.diagnosis)]
        )
        spent = "" if reply.thinking_ended_at is None else f"thinking {budget_spent(reply.thinking_ended_at)}"
        if reply.reason:
            self._console.note(reply.reason)
        said = " · ".join(part for part in (ENDINGS[reply.ending], spent, *measured) if part)
        if said:
            self._console.aside(f"({said})")
        if self._console.typed and primer_is_new(reply):
            self._console.aside("\n".join(f"{name}: {meaning}" for name, meaning in PRIMER))

    def _tell_versions(self, versions: Versions) -> None:
        """Print the versions that have ended, in their order; after the last, which one the chat goes on from."""
        if self._told == len(versions.all):
            return
        for version in versions.all[self._told :]:
            if (reply := version.reply) is None:
                return
            self._told += 1
            self._console.head(versions.heading(version))
            self._console.grow(reply.text, "answer")
            self._ended(reply)
        if versions.caution:
            self._console.note(f"{versions.caution[0].upper()}{versions.caution[1:]}.")
        kept = versions.all.index(versions.kept) + 1
        self._console.note(f"The chat goes on from version {kept}. /older and /newer switch to the others.")

    # The engine's process -------------------------------------------------------------------------------------------------

    def settle(self, *, loaded: bool = False) -> None:
        """Take what the engine says until nobody waits for a reply. Ctrl-C stops it.

        loaded: wait for a model that is being loaded, too; one that was unloaded is loaded.
        """
        if loaded and self.session.engine.phase is EnginePhase.UNLOADED:
            self.perform(self.session.start())
        self._rarely.begin()
        with heard(self._interrupted):
            session = self.session
            while session.engine.replying or session.counting or (session.engine.busy and (loaded or session.queued)):
                match self._next():
                    case None:
                        pass
                    case _Interrupt():
                        self.perform(self.session.stop())
                    case said:
                        self._do(said)
                if steps := self.session.check_cancel():  # an engine that ignores a stop may still say how it is
                    self.perform(steps)
                self._tell_progress()

    def settle_counts(self) -> None:
        """Take what the engine says until what was asked of it is counted, or it is busy."""
        with heard(self._interrupted):
            while self.session.counts.pending and self.session.engine.phase is EnginePhase.IDLE:
                match self._next():
                    case None | _Interrupt():
                        return
                    case said:
                        self._do(said)

    def stop(self) -> bool:
        """Stop what is waited for; return whether anything is."""
        waited = self.session.engine.replying or bool(self.session.queued)
        if waited:
            self.perform(self.session.stop())
        return waited

    def before_wait(self) -> None:
        """Take what the engine has said by now, and see what may be done while a line is waited for."""
        self._catch_up()
        self.after_wait()
        self._may_title = self.recording is not None and self.recording.may_be_entitled()

    def after_wait(self) -> None:
        """Keep what came of that."""
        title, self._title = self._title, ""
        if title and self.recording is not None:
            self.recording.entitled(title)

    def _catch_up(self) -> None:
        while not self._events.empty():
            match self._events.get():
                case _Interrupt():
                    pass  # nothing runs any more that it could stop
                case said:
                    self._do(said)

    def rest(self) -> None:
        """Take what the engine has said, and have an unused model give its memory back, or the chat a title.

        To be called now and then while a line, or a command's process, is waited for, from any thread: no reply runs then, so
        that nothing is recorded. An engine that nobody hears for long seems to be busy and to hang.
        """
        self._catch_up()
        if steps := self.session.unload_if_idle():
            self.perform(steps)
            self._console.note("The model was idle and has been unloaded. It reloads when you send a prompt.")
        elif self._may_title:
            self.perform(self.session.request_title())

    def another(self, on_event: Callable[[BackendEvent], object]) -> EngineProcess:
        """Start another process of the same kind; its log stands beside this one's. Raises OSError."""
        log = self._begun.log
        return EngineProcess(self._begun.command, log.with_stem(f"{log.stem}-guide"), on_event)

    @property
    def server_url(self) -> str:
        """Where the server answers whose engine is used; "" where the engine is the chat's own."""
        return "" if self._process is None else self._process.server_url

    def share(self, path: Path) -> None:
        """Let other programs of the user ask this process, and those that follow it."""
        self._share = path
        if self._process is not None:
            self._process.share(path)

    def look_again(self, question: LookAgain, take: Callable[[LookedAt], None]) -> None:
        """Give ``take`` what the engine tells of a reply's tokens, until that ends. Ctrl-C stops it."""
        number, process = self._process_number, self._process
        with heard(self._interrupted):
            if process is not None:
                process.send(question)
            while process is not None and number == self._process_number:
                match self._next():
                    case None:
                        pass
                    case _Interrupt():
                        process.send(StopLooking())
                    case (from_process, LookedAt() as event) if from_process == number and event.id == question.id:
                        take(event)
                        if event.ended:
                            return
                    case said:
                        self._do(said)
        take(LookedAt(question.id, ended=True, error="The engine stopped."))

    def close(self) -> None:
        """End the engine's process."""
        self._begun.keep_awake.close()
        self.preferences.close()
        process, self._process = self._process, None
        self._process_number += 1
        if process is not None:
            process.close()

    def _next(self) -> tuple[int, BackendEvent] | _Later | _Interrupt | None:
        try:
            return self._events.get(timeout=TICK_S)
        except queue.Empty:
            return None

    def _do(self, said: tuple[int, BackendEvent] | _Later) -> None:
        match said:
            case _Later(work):
                self.perform(work())
            case (number, event) if number == self._process_number:  # else it comes from a process that is no more
                self.perform(self.session.on_event(event))

    def _start(self) -> None:
        self._end()
        number = self._process_number
        self._process = ChatEngine(
            self._begun.command,
            self._begun.log,
            lambda event: self._events.put((number, event)),
            finder=self._begun.finder,
        )
        if self._share is not None:
            self._process.share(self._share)

    def _end(self) -> None:
        process, self._process = self._process, None
        self._process_number += 1
        if process is not None:
            process.kill()

    def _tell_progress(self) -> None:
        if not self._rarely.due():
            return
        session = self.session
        if session.engine.phase is EnginePhase.LOADING and (loading := session.engine.loading) is not None:
            if loading.stage in WITHOUT_BYTES:
                self._console.note(f"{WITHOUT_BYTES[loading.stage]} {session.engine.load.model}")
                return
            of = "" if loading.total is None else f" of {units.size(loading.total)}"
            verb = "downloading" if loading.stage == "download" else "loading"
            self._console.note(f"{verb} {session.engine.load.model}: {units.size(loading.done)}{of}")
        elif session.engine.phase is EnginePhase.PREFILL and (prefill := session.prefill) is not None:
            done, total = units.count(prefill.done), units.count(prefill.total)
            self._console.note(f"reading the prompt: {done} of {total} tokens")
        elif session.versions is not None and session.versions_of(session.conversation):
            self._console.note(session.versions.summary)


HEARD_S = 0.2
"""A thread that is woken by Ctrl-C has stopped waiting by then."""


class Meanwhile:
    """Has ``work`` done on a thread about every ``every_s`` seconds while the main one is ``waiting`` or lets it be
    ``working``, and at no other time.

    Ctrl-C is lost on readline where it comes between the prompt and the wait for a key: Python has noted it, and nothing wakes the
    thread that waits. So this one hears of it too, and sends it again where the other goes on waiting.
    """

    def __init__(self, every_s: float, work: Callable[[], None]) -> None:
        self._every_s = every_s
        self._work = work
        self._waits = 0  # how many have begun
        self._over = threading.Event()
        self._turn = threading.Lock()
        self._turn.acquire()
        self._ear, self._mouth = os.pipe()
        for end in (self._ear, self._mouth):
            os.set_blocking(end, False)
        threading.Thread(target=self._run, name="meanwhile", daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let work be done, and see to it that Ctrl-C wakes this thread. Called on the main thread."""
        with self.working():
            before = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(before)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let work be done; what has begun is over when this ends. Called on the main thread, whatever Ctrl-C does there."""
        with suppress(BlockingIOError):  # what an earlier wait was woken by
            os.read(self._ear, 4096)
        self._waits += 1
        self._turn.release()
        try:
            yield
        finally:
            with unbroken():  # without its turn back, this thread could not give it away again
                self._turn.acquire()

    def close(self) -> None:
        """Do no more. The two ends of the pipe stay open: a wait may still name one to the signal's handler."""
        self._over.set()
        os.write(self._mouth, b"\0")

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C must wake the thread that waits
        while not self._over.is_set():
            if not select.select([self._ear], [], [], self._every_s)[0]:
                with self._turn:
                    self._work()
                continue
            with suppress(BlockingIOError):
                if signal.SIGINT in os.read(self._ear, 4096):
                    self._see_that_it_woke(self._waits)

    def _see_that_it_woke(self, wait: int) -> None:
        threading.Event().wait(HEARD_S)
        if self._turn.acquire(blocking=False):  # nobody took it back: the wait goes on
            self._turn.release()
            if wait == self._waits:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


class NoKeys(Keymap):
    """The registry without keys."""

    def __init__(self) -> None:
        super().__init__(tuple(action.for_plain for action in ACTIONS))

    def key(self, action: str) -> str:
        """Return how a text names what the action of this id is done with."""
        return "Ctrl-C" if action == "stop" else super().key(action)


MOST_SENT = 200
LOOK_S = 2.0
"""How often, while a line is awaited, the model may be unloaded, or asked for a title."""
ENDED = "No model is loaded, so the chat ends here. The rest of the input is not read."
"""Of a script, in which nobody can choose another model. Commands work without one."""
GREETING = "/help lists the commands. Ctrl-C stops a reply; /quit or Ctrl-D quits."
Obey = Callable[["Repl", str], bool]
"""Runs the slash command in a text; returns whether it is one."""


def run_plain(options: ChatOptions) -> int:
    """Run the chat until the user quits, or the input ends; return the exit status.

    Raises StoreError for a chat that is not there.
    """
    from .commands import completed, obey

    console, begun = Console(), begin(options)
    begun.session.keymap, begun.session.attended = NoKeys(), console.typed
    repl = Repl(begun, console)
    try:
        for warning in begun.warnings:
            console.note(warning)
        repl.open_store(options)
        console.prepare(repl.sent(), completed)
        repl.driver.perform(repl.driver.session.start())
        return repl.run(obey)
    finally:
        repl.close()


class Repl:
    """One plain chat, the ``ChatView`` of its commands. jobs: what runs beside it.

    listed: IDs of the chats that were listed last. outline: the versions that were. planned: the flags and the model of the
    conversion that was planned last. leaving: the user quits.
    """

    def __init__(self, begun: ChatStart, console: Console) -> None:
        self.driver = Driver(begun, console)
        self.console = console
        self.composer = LineComposer()
        self.shows_ids = True
        self.code_cycle = CodeCycle()
        self.chosen = LoadChoice()
        self.listed: tuple[str, ...] = ()
        self.outline: Outline | None = None
        self.planned: tuple[str, ...] = ()
        self.leaving = False
        self.jobs = BackgroundJobs(self._forget_plan)
        self._meanwhile = Meanwhile(LOOK_S, self._rest)

    # What commands need ---------------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The chat's state."""
        return self.driver.session

    @property
    def preferences(self) -> Preferences:
        """The settings."""
        return self.driver.preferences

    @property
    def recording(self) -> Recording | None:
        """What saves the chat; None where nothing does."""
        return self.driver.recording

    def perform(self, steps: Sequence[Step]) -> None:
        """Do what the session asks."""
        self.driver.perform(steps)

    def tell(self, text: str, severity: Severity = "information") -> None:
        """Write a note beside the text."""
        del severity  # a line looks the same
        self.console.note(text)

    def say(self, text: str) -> None:
        """Write what was asked for."""
        self.console.say(text)

    def selected(self) -> MessageNode | None:
        """Return the last message."""
        tree = self.session.conversation.tree
        return None if tree.head is None else tree.nodes[tree.head]

    def reply(self, make: Callable[[], list[Step]]) -> None:
        """Perform what ``make`` returns once a model is loaded."""
        self.driver.settle(loaded=True)
        self.perform(make())

    def go(self, key: int) -> None:
        """Switch to the path through the message ``key``, and print its end."""
        self.perform(self.session.show_path(key))
        self.say(last_turn(self.session.turns))

    def begin_edit(self, key: int, draft: Draft, text: str) -> None:
        """Send ``text``, or what the next line says, in place of the prompt ``key``."""
        if not text and not self.console.typed:
            self.tell("Write the new prompt after the command: /edit TEXT")
            return
        self.composer.begin_edit(key, draft)
        if text:
            self.ask(text)
        else:
            self.tell("The next line is sent as a new version of the last prompt. Ctrl-C cancels the edit.")

    @unbroken()
    def begin_new(self) -> bool:
        """Leave the chat for a new one; return whether an unsent prompt stays with it."""
        unsent, unkept = self.composer.unsent, self.keep_draft()
        self.preferences.hold(self.preferences.for_new_chat, self.session)
        self.perform(self.session.new_chat())
        self.composer.hold(unkept)
        return bool(unsent.whole) and not unkept.whole

    def begin_revision(self, key: int, said: str, text: str) -> None:
        """Put ``text`` in place of the reply ``key``; where a person types, without one: what their editor makes of it."""
        if not text and not self.console.typed:
            self.tell("Write the new reply after the command: /revise TEXT")
            return
        if not text:
            try:
                command = editor_command()
                with self.away():
                    text = edit_text(command, said).strip()
            except EditorError as error:
                raise RefusedError(str(error)) from None
        if not text or text == said:
            self.tell("The reply is unchanged.")
            return
        self.perform(self.session.revise(key, text))
        self.say(last_turn(self.session.turns))

    def find_chat(self, name: str) -> StoredChat:
        """Return a chat by its number in the last list, or by its ID. Raises StoreError.

        A number beyond the list may be a whole ID. It is never the beginning of one: that could be another chat by mistake.
        """
        assert self.recording is not None  # whoever asks has looked
        store = self.recording.store
        if (number := whole_number(name)) is None:
            return store.chat(name)
        if 0 < number <= len(self.listed):
            return store.chat(self.listed[number - 1])
        if (chat := store.known(name)) is None:
            raise StoreError(f"There is no number {name} in the last list", "/chats lists them.")
        return chat

    def copy(self, text: str) -> str:
        """Copy ``text``; the terminal is asked for nothing."""
        return copy_text(text, self.preferences.home)

    def load(self, load: Load) -> None:
        """Load a model, wait for it, and keep ``chosen`` in the settings once it has loaded."""
        self.perform(self.session.choose(load))
        self.driver.settle(loaded=True)
        known = self.preferences.settings
        if (
            self.session.engine.info is not None
            and (settings := self.chosen.settings(self.session.engine.load, known)) != known
        ):
            save_settings(self, settings)

    def download(self, model: str) -> None:
        """Download a model: in the background where somebody types, else wait for it."""
        processes.pull(self, model)

    @property
    def server(self) -> ServerJob:
        """The server on the chat's engine."""
        return self.jobs.server.job

    @property
    def server_url(self) -> str:
        """Where a server answers whose engine this chat uses."""
        return self.driver.server_url

    def begin_server(self, port: int) -> None:
        """Start the server, with the engine shared."""
        self.driver.share(chat_socket())
        self.jobs.serve(port)

    def stop_server(self) -> None:
        """Stop it."""
        self.jobs.stop_server()

    def show(self) -> None:
        """Do nothing: lines stand."""

    def rekey(self) -> None:
        """Do nothing: lines have no keys."""

    # The loop -------------------------------------------------------------------------------------------------------------

    def run(self, obey: Obey) -> int:
        """Read and reply until the user leaves; return the exit status."""
        self.console.aside(GREETING)
        interrupts, goes_on = 0, True
        while goes_on and not self.leaving:
            try:
                text = self._read()
                interrupts = 0
                goes_on = self._take_line(obey, text)
            except EOFError:
                self.console.aside("")
                break
            except KeyboardInterrupt:
                self.console.aside("")
                interrupts += 1
                if interrupts > 1 or not self.console.typed:
                    return INTERRUPTED
                self.console.note("Press Ctrl-C again to quit.")
                self.composer.end_edit()
        recording = self.driver.recording
        if recording is not None and recording.chat is not None:
            self.console.aside(f"To continue: tokamac chat --chat {recording.chat}")
        return int(self.driver.failed and not self.console.typed)

    def _take_line(self, obey: Obey, text: str) -> bool:
        """Do what the line asks for; return whether the chat goes on. Raises KeyboardInterrupt where nobody types."""
        with noticed() as interrupted:
            commanded = self._do(obey, text)
            if interrupted() and not self.console.typed:
                raise KeyboardInterrupt
        if not self.console.typed and self.driver.session.engine.phase is EnginePhase.FAILED:
            self.driver.failed = True
            if not commanded:
                self.console.note(ENDED)
                return False
        self._take_back()
        return True

    def _do(self, obey: Obey, text: str) -> bool:
        """Do what the line asks for, and wait until nobody waits for a reply; return whether it is a command.

        Raises KeyboardInterrupt where nobody types.
        """
        begun = commanded = False
        while True:
            try:
                if not begun:
                    begun = commanded = True
                    commanded = obey(self, text)
                    if not commanded:
                        self._prompted(unescaped(text.strip()))
                self.driver.settle()
                return commanded
            except KeyboardInterrupt:  # also just before settle hears of it itself
                if not self.console.typed:
                    raise
                if not self.driver.stop():
                    self.console.note("Stopped.")

    def _prompted(self, text: str) -> None:
        """Ask ``text``. Nothing, in place of a prompt that was given back, gives that one up; what goes with it stays."""
        composer, draft = self.composer, self.composer.draft
        offered = draft.text if self.console.typed and self.console.shown and composer.editing is None else ""
        if offered and not text:
            composer.hold(Draft("", draft.attachments))
        elif text or draft.attachments:
            self.ask(text)

    def _read(self) -> str:
        """Return the next line. Raises EOFError, KeyboardInterrupt."""
        for line in self.jobs.news():
            self.console.note(line)
        self.driver.before_wait()
        try:
            with self._meanwhile.waiting():
                return self.console.read("you> ", self.composer.draft.text if self.console.typed else "")
        finally:
            self.driver.after_wait()

    def _rest(self) -> None:
        """See to what can be done while a line is waited for, on another thread."""
        self.session.serving = self.server.on
        self.driver.rest()
        self.console.announce(self.jobs.news)

    def _forget_plan(self) -> None:
        self.planned = ()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Let another program have the terminal; the engine is heard meanwhile. Ctrl-C is for that program."""
        with self.console.holding(), heard(lambda: None), self._meanwhile.working():
            yield

    def ask(self, text: str) -> None:
        """Send ``text``, with what is attached, in place of the prompt that is edited if there is one."""
        composer, draft = self.composer, Draft(text, self.composer.draft.attachments)
        if composer.editing is None:
            with unbroken():
                composer.hold(Draft())
                self.driver.perform(self.driver.session.submit(draft.text, draft.attachments))
        else:
            self._ask_anew(composer.editing, draft)
        if self.driver.recording is not None:
            self.driver.recording.drafted(composer.unsent.whole)

    def _ask_anew(self, key: int, draft: Draft) -> None:
        """Send ``draft`` in place of the prompt ``key``; where that is refused, it goes on being edited."""
        self.driver.settle(loaded=True)
        with unbroken():
            steps = self.driver.session.edit(key, draft.text, draft.attachments)
            if any(isinstance(step, TurnBegun) for step in steps):
                self.composer.end_edit()
            else:
                self.composer.draft = draft
            self.driver.perform(steps)

    def _take_back(self) -> None:
        """Put what was not sent before the next line."""
        returned, self.driver.returned = self.driver.returned, Draft()
        if returned.whole:
            self.composer.give_back(returned)

    # What is saved --------------------------------------------------------------------------------------------------------

    def open_store(self, options: ChatOptions) -> None:
        """Open the store, and the chat to begin with. Raises StoreError where that one is not there."""
        try:
            store, chosen = open_store(options)
        except StoreError as error:
            if options.chat is not None:
                raise
            note(f"Chats are not saved: {error.one_line()}")
            return
        driver = self.driver
        driver.recording = Recording(driver.session, store, driver.preferences, self.console.note, time.monotonic)
        if chosen is not None:
            self.open_chat(chosen)
            use_asked_profile(self)
        elif options.resume:
            self.console.note("There is no saved chat yet. This is a new one.")

    @unbroken()
    def open_chat(self, chat: str) -> None:
        """Open a stored chat, and print its last turn. Raises StoreError."""
        driver, recording = self.driver, self.driver.recording
        if recording is None:
            return
        unkept = self.keep_draft()  # before it is read: the chat may be the one that is held
        left = recording.chat
        (tree, draft), own = recording.read(chat), recording.own(chat)
        if chat != left and self.composer.unsent.whole and not unkept.whole:
            self.tell(LEFT)
        driver.preferences.hold(own, driver.session)
        driver.perform(driver.session.open(tree, recording.pruned_of(chat)))
        recording.hold(chat, tree, draft)
        self.composer.hold(joined([apart(draft), unkept]))
        if self.console.shown:
            self.console.say(f"{recording.store.chat(chat).title} ({chat})\n{last_turn(driver.session.turns)}")

    def keep_draft(self) -> Draft:
        """Keep what was not sent with the chat that is held; return what nothing keeps."""
        recording, unsent = self.driver.recording, self.composer.unsent
        return Draft() if recording is not None and recording.drafted(unsent.whole) else unsent

    def sent(self) -> list[str]:
        """Return what the user sent before, newest first."""
        recording = self.driver.recording
        return [] if recording is None else recording.store.history(MOST_SENT)

    def close(self) -> None:
        """Keep what was not sent and the reply that runs, remove what was deleted long ago, and end the engine."""
        try:
            if (recording := self.driver.recording) is not None:
                recording.close(self.composer.unsent.whole)
                if problem := purge(recording.store.file):
                    self.console.note(problem)
        finally:
            self._meanwhile.close()
            if self.jobs.busy:
                self.console.note(f"Stopped {'; '.join(self.jobs.lines())}. {RESUMES}")
            self.jobs.close()
            self.driver.close()
