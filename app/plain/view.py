"""The view of the plain chat: steps as lines, and waiting for the engine."""

import asyncio
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokamac.engine import metrics as rates
from tokamac.engine.events import ToolCall

from ..backend.client import BackendEvent
from ..backend.processes import ChatServer, converter_command, models_command
from ..backend.protocol import LookAgain, LookedAt, StopLooking
from ..chat import setup
from ..chat.attachments import Draft
from ..chat.connection import WITHOUT_BYTES
from ..chat.controller import Bridge, ChatController, Composer, RefusedError, Severity, UserChoice
from ..chat.conversation import EDITED, ENDINGS, REMEDIES, Reply, Tree, Turn
from ..chat.external_programs import EditorError, edit_text, editor_command
from ..chat.figures import PRIMER, primer_is_new
from ..chat.listing import EXCERPT, ending_text, said_in
from ..chat.preferences import budget_spent
from ..chat.settings_form import whole_number
from ..chat.start import ChatStart
from ..chat.steps import (
    AskConsent,
    DraftReturned,
    EnginePhase,
    Notice,
    PromptFailed,
    PromptRefused,
    ReplyEnded,
    ReplyGrew,
    RunTool,
    Step,
    Titled,
    ToolAnswered,
    TurnBegun,
    VersionEnded,
    VersionsBegun,
)
from ..chat.versions import Versions
from ..models.jobs import ConversionJob, ConversionPhase, Conversions, Download, Downloads, DownloadStage
from ..reports.verdict import figures_text, remark
from ..text import units
from ..text.units import minutes, size
from ..tools.calls import ASKED, Preview, call_line, decision_of, decisions_text, question_of
from .console import Console, LineBox, Meanwhile, interruptible, unbroken

TICK_S = 1.0
LOOK_S = 2.0  # how often, while a line is awaited, the model may be unloaded, or asked for a title


@dataclass(frozen=True, slots=True)
class _Later:
    work: Callable[[], list[Step]]


@dataclass(frozen=True, slots=True)
class _Interrupt:
    """Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The listed versions of ``tree``: message ``keys`` by number, and a line each."""

    tree: Tree
    keys: tuple[int, ...]
    lines: tuple[str, ...]


def outline(tree: Tree) -> Outline:
    shown = {node.key for node in tree.path_to(tree.head)}
    keys, lines = [], []
    for key, depth in _versions(tree):
        keys.append(key)
        lines.append(f"{'  ' * depth}{len(keys)}. {_outline_line(tree, key, shown=key in shown)}")
    return Outline(tree, tuple(keys), tuple(lines))


def _versions(tree: Tree) -> Iterator[tuple[int, int]]:
    todo: list[tuple[int | None, int]] = [(None, 0)]
    while todo:  # a loop: a path may be longer than Python's stack
        at, depth = todo.pop()
        if at is not None and len(tree.siblings(at)) > 1:
            yield at, depth
            depth += 1
        todo += [(key, depth) for key in reversed(tree.children(at))]


def _outline_line(tree: Tree, key: int, *, shown: bool) -> str:
    number, many = tree.place(key)
    turn = sum(each.prompt is not None for each in tree.path_to(key))
    who, said = said_in(tree.nodes[key], EXCERPT)
    return f"turn {turn}, {who}, version {number} of {many}{', shown now' if shown else ''}: {said}"


def last_turn(turns: Sequence[Turn], total: int = 0) -> str:
    """Return the last turn as text. total: turns of the whole path, where these are its beginning."""
    if not turns:
        return "No messages yet."
    turn = turns[-1]
    total = total or len(turns)
    lines = [f"Turn {len(turns)} of {total}."] if total > 1 else []
    lines += [f"system: {text}" for text in turn.system]
    lines += [f"you{_version(turn.place)}: {turn.prompt}"] if turn.key or turn.prompt else []  # else there is no prompt
    lines += [f"attached: {each.name}" for each in turn.attachments]
    lines += [f"system: {text}" for text in turn.between]
    return "\n".join([*lines, *([_reply(turn.reply, turn.reply_place)] if turn.reply is not None else [])])


def _reply(reply: Reply, place: tuple[int, int]) -> str:
    figures = "" if reply.metrics is None else figures_text(reply.metrics)
    parts = (EDITED if reply.edited else "", reply.compared, ending_text(reply.ending, reply.reason), figures)
    said = " · ".join(filter(None, parts))
    return f"{reply.model or 'reply'}{_version(place)}: {reply.text}" + (f"\n({said})" if said else "")


def _version(place: tuple[int, int]) -> str:
    return f" (version {place[0]} of {place[1]})" if place[1] > 1 else ""


class PlainView(ABC):
    """The chat in lines: what they say, and waiting for the engine. The ``ChatView`` of its ``chat``.

    Attributes:
        line: what the next line begins with, and what is attached to it.
        outline: the versions as they were listed last.
        planned: the conversion that was planned last.
        failed: whether something failed, which a script's exit status says.
    """

    def __init__(self, begun: ChatStart, console: Console) -> None:
        self.console = console
        self.line = LineBox()
        self.jobs = BackgroundJobs(self._forget_plan)
        bridge = Bridge(begun.command, begun.log, begun.keep_awake, begun.finder)
        self.chat = ChatController(
            begun.session,
            bridge,
            begun.preferences,
            self,
            Composer(self.line),
            server=self.jobs.server,
            lines=True,
        )
        self.chat.unbroken = unbroken
        self.outline: Outline | None = None
        self.planned: tuple[str, ...] = ()
        self.failed = False
        self._leaving = False
        self._events: queue.SimpleQueue[tuple[int, BackendEvent] | _Later | _Interrupt] = queue.SimpleQueue()
        bridge.post = lambda event, number: self._events.put((number, event))
        self._meanwhile = Meanwhile(LOOK_S, self._rest)
        self._rarely = Rarely()
        self._returned = Draft()  # what was not sent
        self._failed_prompt: PromptFailed | None = None
        self._may_title = False  # as it was when the wait began
        self._title = ""  # by the model, while a line was awaited
        self._asking = False  # an answer is awaited
        self._told = 0  # how many of the versions that are written at once were printed

    # What the chat asks of its view ---------------------------------------------------------------------------------------

    @property
    def selected(self) -> int | None:
        return None

    def tell(self, text: str, severity: Severity = "information") -> None:
        del severity  # a line looks the same
        self.console.note(text)

    def show(self, text: str) -> None:
        self.console.say(text)

    @abstractmethod
    def open(self, action: str, argument: str = "") -> None:
        """Do an action that looks different on a screen and in lines."""

    def opened(self, chat: str) -> None:
        """Print the last turn of a stored chat."""
        if chat and self.console.shown and self.chat.recording is not None:
            title = self.chat.recording.store.chat(chat).title
            self.console.say(f"{title} ({chat})\n{last_turn(self.chat.session.turns)}")

    def turn_to(self, key: int | None = None) -> None:
        """Print the last turn of a path that was switched to."""
        if key is not None:
            self.show(last_turn(self.chat.session.turns))

    def wait(self) -> None:
        self.settle(loaded=True)

    def later(self, work: Callable[[], list[Step]]) -> None:
        self._events.put(_Later(work))

    def aside(self, work: Callable[[], Callable[[], None]]) -> None:
        work()()

    def quit(self) -> None:
        if self.console.typed and (asks := self.jobs.before_quitting()):
            self.tell(asks)
        else:
            self._leaving = True

    def ask(self, key: int, draft: Draft, text: str) -> None:
        """Put ``text`` in place of the message ``key``: without one, what the next line says, or an editor for a reply."""
        if self.chat.session.conversation.tree.nodes[key].is_reply:
            self._revise(key, draft.text, text)
        elif not text and not self.console.typed:
            self.tell("Write the new prompt after the command: /edit TEXT")
        else:
            self.chat.composer.begin_edit(key, draft)
            if text:
                self.send(text)
            else:
                self.tell("The next line is sent as a new version of the last prompt. Ctrl-C cancels the edit.")

    def _revise(self, key: int, said: str, text: str) -> None:
        if not text and not self.console.typed:
            self.tell("Write the new reply after the command: /revise TEXT")
            return
        text = text or self.edited(said).strip()
        if not text or text == said:
            self.tell("The reply is unchanged.")
            return
        self.chat.perform(self.chat.session.revise(key, text))
        self.turn_to(key)

    def forget(self, *, private: bool) -> None:
        self.console.remember(not private)

    def edited(self, text: str) -> str:
        """Return what the user's editor makes of ``text``. Raises RefusedError."""
        try:
            command = editor_command()
            with self.away():
                return edit_text(command, text)
        except EditorError as error:
            raise RefusedError(str(error)) from None

    def draw(self, step: Step | None = None) -> None:
        match step:
            case TurnBegun():
                info = self.chat.session.engine.info
                self.console.begin(info.name if info is not None else self.chat.session.engine.load.model)
            case ReplyGrew(text, kind):
                self.console.grow(text, kind)
            case ReplyEnded(reply):
                self._ended(reply)
            case VersionsBegun(versions):
                self._told = 0
                how = "at once" if versions.all[0].variant.load is None else "with one model after the other"
                self.console.note(f"Writing {len(versions.all)} versions {how}.")
            case VersionEnded(versions):
                self._tell_versions(versions)
            case Titled(title):
                self._title = title
            case PromptFailed(draft=draft) if self.console.typed:
                self._failed_prompt = step
                self._tell_attached(draft)
            case DraftReturned(text, attachments):
                self._give_back(Draft(text, attachments))
            case PromptRefused(why, draft):
                self.failed = True
                self.console.note(why)
                if draft is not None:
                    self._give_back(draft)
            case Notice(text, severity):
                self.failed = self.failed or severity == "error"
                self.console.note(text)
            case AskConsent(call, preview):
                self.later(lambda: self._asked(call, preview))
            case RunTool(call):
                self.console.note(f"calling {call_line(call)}")
            case ToolAnswered(result=result) if result.outcome != "done":
                how = "not run" if result.outcome == "refused" else result.text
                self.console.note(f"{call_line(result.call)}: {how}")
            case _:
                pass

    def choose(self, choice: UserChoice, then: Callable[[int], None]) -> None:
        if not self.console.typed:
            self.failed = True
            raise RefusedError(f"Nobody is here to answer: {choice.title}")
        self.console.quote([("!", choice.title), *choice.lines])
        words = ", ".join(f"[{number}] {answer}" for number, answer in enumerate(choice.answers, 1))
        try:
            number = whole_number(self.console.read(f"{words}> ").strip())
        except (EOFError, KeyboardInterrupt):
            number = None
        if number is not None and 1 <= number <= len(choice.answers):
            then(number - 1)
        else:
            self.tell("Nothing was done.")

    def _asked(self, call: ToolCall, preview: Preview | None) -> list[Step]:
        session = self.chat.session
        if session.tools.waiting != call:
            return []
        self.console.quote([("", "The model wants to call:"), *question_of(call, preview)])
        if not self.console.typed:
            allows = "" if preview is not None else " [tools] allowed in the settings always allows it."
            self.console.note(f"Nobody is here to allow it.{allows}")
            return session.consent(call.id, "deny")
        decisions = ASKED if preview is None else preview.decisions
        while True:
            if (answer := self._read_answer(decisions_text(decisions))) is None:
                return session.stop()
            if (decision := decision_of(answer, decisions)) is None:
                continue
            if decision == "edit":
                return setup.edited_call(self.chat, call)
            if decision == "always" and (problem := self.chat.preferences.allow_tool(call.name, always=True)):
                self.console.note(problem)
            return session.consent(call.id, decision)

    def _read_answer(self, question: str) -> str | None:
        try:
            self._asking = True
            return self.console.read(question)
        except (EOFError, KeyboardInterrupt):
            self.console.aside("")
            return None
        finally:
            self._asking = False

    def _interrupted(self) -> None:
        if self._asking:
            self._asking = False
            raise KeyboardInterrupt
        self._events.put(_Interrupt())

    def _give_back(self, draft: Draft) -> None:
        if not self.console.typed:
            return  # nobody is there to write it anew, and what is attached to it would go with the next line
        self._returned = draft
        self._tell_attached(draft)

    def _tell_attached(self, draft: Draft) -> None:
        if draft.attachments:
            names = ", ".join(each.name for each in draft.attachments)
            self.console.note(f"Still attached to the next prompt: {names}. /detach removes the last one.")

    def _ended(self, reply: Reply) -> None:
        self.console.end()
        self.failed = self.failed or reply.ending in ("lost", "failed")
        measured = (
            [] if reply.metrics is None else [figures_text(reply.metrics), remark(reply.metrics, reply.diagnosis)]
        )
        spent = "" if reply.thinking_ended_at is None else f"thinking {budget_spent(reply.thinking_ended_at)}"
        if reply.reason:
            self.console.note(reply.reason)
        elif reply.ending in ("full", "loop") and not self.console.typed:  # who reads this sees no line of figures
            self.console.note(ENDINGS[reply.ending])
        helps = REMEDIES.get(reply.ending, "") if self.console.typed else ""
        said = " · ".join(part for part in (ENDINGS[reply.ending], helps, spent, *measured) if part)
        if said:
            self.console.aside(f"({said})")
        if self.console.typed and primer_is_new(reply):
            self.console.aside("\n".join(f"{name}: {meaning}" for name, meaning in PRIMER))

    def _tell_versions(self, versions: Versions) -> None:
        """Print ended versions in order; after the last, which one is kept."""
        if self._told == len(versions.all):
            return
        for version in versions.all[self._told :]:
            if (reply := version.reply) is None:
                return
            self._told += 1
            self.console.head(versions.heading(version))
            self.console.grow(reply.text, "answer")
            self._ended(reply)
            if version.variant.load is not None:
                self.console.note(f"{version.variant.name}: {version.state}")
        if versions.caution:
            self.console.note(f"{versions.caution[0].upper()}{versions.caution[1:]}.")
        kept = versions.all.index(versions.kept) + 1
        self.console.note(f"The chat goes on from version {kept}. /older and /newer switch to the others.")

    # Waiting for the engine -----------------------------------------------------------------------------------------------

    def settle(self, *, loaded: bool = False) -> None:
        """Wait until no reply runs or waits; ``loaded``: and until a model has loaded, or has failed to."""
        chat, session = self.chat, self.chat.session
        if loaded and session.engine.phase is EnginePhase.UNLOADED:
            chat.perform(session.start())
        self._rarely.begin()
        with interruptible(self._interrupted):
            while (
                session.engine.replying
                or session.counting
                or session.asking
                or (session.engine.busy and (loaded or session.queued))
            ):
                match self._next():
                    case None:
                        pass
                    case _Interrupt():
                        chat.perform(session.stop())
                    case said:
                        self._hear(said)
                if steps := session.check_cancel():  # an engine that ignores a stop may still say how it is
                    chat.perform(steps)
                self._tell_progress()

    def settle_counts(self) -> None:
        """Wait until what is in the context is counted."""
        with interruptible(self._interrupted):
            while self.chat.session.counts.pending and self.chat.session.engine.phase is EnginePhase.IDLE:
                match self._next():
                    case None | _Interrupt():
                        return
                    case said:
                        self._hear(said)

    def look_again(self, question: LookAgain, take: Callable[[LookedAt], None]) -> None:
        """Ask the engine about the steps of a reply, and wait for all answers."""
        bridge = self.chat.bridge
        number = bridge.process_number
        with interruptible(self._interrupted):
            bridge.ask(question)
            while number == bridge.process_number:
                match self._next():
                    case None:
                        pass
                    case _Interrupt():
                        bridge.ask(StopLooking())
                    case (from_process, LookedAt() as event) if from_process == number and event.id == question.id:
                        take(event)
                        if event.ended:
                            return
                    case said:
                        self._hear(said)
        take(LookedAt(question.id, ended=True, error="The engine stopped."))

    def rest(self) -> None:
        """See to what the engine said, and let it rest; called while something else is waited for."""
        self._catch_up()
        session = self.chat.session
        if steps := session.unload_if_idle():
            self.chat.perform(steps)
            self.console.note("The model was idle and has been unloaded. It reloads when you send a prompt.")
        elif self._may_title:
            self.chat.perform(session.request_title())

    def _rest(self) -> None:
        """Rest while a line is waited for, on another thread."""
        self.chat.session.serving = self.jobs.server.job.on
        self.rest()
        self.console.announce(self.jobs.news)

    def _catch_up(self) -> None:
        while not self._events.empty():
            match self._events.get():
                case _Interrupt():
                    pass  # nothing runs any more that it could stop
                case said:
                    self._hear(said)

    def _next(self) -> tuple[int, BackendEvent] | _Later | _Interrupt | None:
        try:
            return self._events.get(timeout=TICK_S)
        except queue.Empty:
            return None

    def _hear(self, said: tuple[int, BackendEvent] | _Later) -> None:
        match said:
            case _Later(work):
                self.chat.perform(work())
            case (number, event) if number == self.chat.bridge.process_number:  # else of a process that is no more
                self.chat.perform(self.chat.receive(event))

    def _tell_progress(self) -> None:
        if not self._rarely.due():
            return
        session = self.chat.session
        if session.engine.phase is EnginePhase.LOADING and (loading := session.engine.loading) is not None:
            if loading.stage in WITHOUT_BYTES:
                self.console.note(f"{WITHOUT_BYTES[loading.stage]} {session.engine.load.model}")
                return
            of = "" if loading.total is None else f" of {units.size(loading.total)}"
            verb = "downloading" if loading.stage == "download" else "loading"
            self.console.note(f"{verb} {session.engine.load.model}: {units.size(loading.done)}{of}")
        elif session.engine.phase is EnginePhase.PREFILL and (prefill := session.progress.prefill) is not None:
            done, total = units.count(prefill.done), units.count(prefill.total)
            self.console.note(f"reading the prompt: {done} of {total} tokens")
        elif session.versions is not None and session.versions_of(session.conversation):
            self.console.note(session.versions.summary)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Let another program have the terminal; events are read meanwhile. Ctrl-C is for that program."""
        with self.console.holding(), interruptible(lambda: None), self._meanwhile.working():
            yield

    def _forget_plan(self) -> None:
        self.planned = ()

    # Sending --------------------------------------------------------------------------------------------------------------

    def send(self, text: str) -> None:
        """Send ``text``, with what is attached, in place of the prompt that is edited if there is one."""
        chat, draft = self.chat, Draft(text, self.line.draft.attachments)
        if chat.composer.editing is None:
            with unbroken():
                chat.composer.hold(Draft())
                chat.perform(chat.session.submit(draft.text, draft.attachments))
        else:
            self._send_anew(chat.composer.editing, draft)
        if chat.recording is not None:
            chat.recording.drafted(chat.composer.unsent.whole)

    def _send_anew(self, key: int, draft: Draft) -> None:
        """Send ``draft`` in place of the prompt ``key``; where that is refused, it goes on being edited."""
        self.wait()
        with unbroken():
            steps = self.chat.session.edit(key, draft.text, draft.attachments)
            if any(isinstance(step, TurnBegun) for step in steps):
                self.chat.composer.end_edit()
            else:
                self.line.draft = draft
            self.chat.perform(steps)


# They run on a thread with its own loop, using the full screen's ``Downloads`` and ``Conversions``. News are written
# before the next prompt, or immediately while nothing is typed, so they never split a reply.


PROGRESS_S = 30.0  # how often progress is told unasked
END_S = 5.0  # how long processes get to end when the chat does
RESUMES = "The same command resumes it."


@dataclass(frozen=True, slots=True)
class WrittenConversion:
    """A conversion as typed. flags: all but the model."""

    source: str
    flags: tuple[str, ...]

    def arguments(self, *, dry_run: bool) -> list[str]:
        return ["--json", *(["--dry-run"] if dry_run else []), *self.flags, "--", self.source]


class BackgroundJobs:
    """Background jobs. converted: called on the jobs' thread after a conversion."""

    def __init__(self, converted: Callable[[], None]) -> None:
        self._converted = converted
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._said: deque[str] = deque()
        self._told_s = time.monotonic()
        self._asked = False
        self.downloads = Downloads(
            models_command(),
            time.monotonic,
            spawn=self._spawn,
            changed=self._changed,
            ended=self._downloaded,
            again="The same /pull resumes it.",
        )
        self.server = ChatServer(spawn=self._spawn_later, changed=self._changed, told=self._said.append)
        self.conversions: Conversions[WrittenConversion] = Conversions(
            converter_command(), time.monotonic, spawn=self._spawn, changed=self._changed, ended=self._ended
        )

    # For the chat's thread ------------------------------------------------------------------------------------------------

    def download(self, model: str) -> None:
        self._asked = False
        self._call(lambda: self.downloads.start(model))

    def convert(self, conversion: WrittenConversion) -> None:
        self._asked = False
        self._call(lambda: self.conversions.begin(conversion, dry_run=False))

    def lines(self) -> list[str]:
        """Return running jobs, a line each, numbered as for ``stop``."""
        return [_line(download) for download in self.downloads.all] + self._conversion()

    def stop(self, number: int) -> str:
        """Stop job ``number`` (from 1); return the consequence."""
        self._asked = False
        if number <= len(self.downloads.all):
            model = self.downloads.all[number - 1].model
            self._call(lambda: self.downloads.pause(model))
            return f"Stopping the download of {model}. /pull {model} resumes it."
        self._call(self.conversions.stop)
        return "Stopping the conversion after the current tensor. /convert resumes it."

    @property
    def busy(self) -> bool:
        return self.downloads.running is not None or self.conversions.running is not None

    def before_quitting(self) -> str:
        """Return what quitting would interrupt, at the first call only; else ""."""
        if self._asked or not self.busy:
            return ""
        self._asked = True
        return f"Still {'; '.join(self.lines())}. /quit again quits and stops that; it can be resumed."

    def news(self) -> list[str]:
        """Return news: ended jobs, and occasional progress."""
        said = [self._said.popleft() for _ in range(len(self._said))]
        if self.busy and time.monotonic() - self._told_s >= PROGRESS_S:
            self._told_s = time.monotonic()
            said += self.lines()
        return said

    def close(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._spawn, self._end())
            self._thread.join(END_S)

    # On the jobs' thread --------------------------------------------------------------------------------------------------

    def _call(self, work: Callable[[], object]) -> None:
        """Run ``work`` on the jobs' thread, started on first use."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name="jobs", daemon=True)
            self._thread.start()
        done = threading.Event()

        def call() -> None:
            work()
            done.set()

        self._loop.call_soon_threadsafe(call)
        done.wait(END_S)  # so that what is listed next has it

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
        finally:
            loop.close()

    def _spawn_later(self, work: Coroutine[Any, Any, None]) -> None:
        self._call(lambda: self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self) -> None:
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()  # which ends its process
        await asyncio.gather(*others, return_exceptions=True)
        asyncio.get_running_loop().stop()

    def _changed(self) -> None:
        """Do nothing: progress is polled."""

    def _downloaded(self, download: Download) -> None:
        if download.stage is DownloadStage.FAILED:
            self._said.append(f"{download.model} was not downloaded: {download.problem}")
        else:
            arrived = "" if download.total is None else f", {size(download.total)}"
            self._said.append(f"{download.model} is downloaded{arrived}. /model {download.model} loads it.")

    def _ended(self, job: ConversionJob) -> None:
        if job.phase is not ConversionPhase.DONE or job.converted is None:
            self._said.append(job.problem or "The conversion ended.")
            return
        self._said += [line for line in job.text().splitlines() if line]
        self._said.append(f"/model {Path(job.converted.path).absolute()} loads it.")
        self._converted()

    def _conversion(self) -> list[str]:
        running = self.conversions.running
        return [] if running is None else [f"converting {running.source}: {self.conversions.job.brief()}"]


def _line(download: Download) -> str:
    share = rates.share(download.done, download.total)
    at = "" if share is None else f": {100 * share:.0f} % of {size(download.total)}"
    left = "" if download.left_s is None else f", {minutes(download.left_s)} left"
    match download.stage:
        case DownloadStage.WAITING:
            return f"waiting to download {download.model}"
        case DownloadStage.PAUSED | DownloadStage.PAUSING:
            return f"stopped downloading {download.model}{at}"
        case DownloadStage.FAILED:
            return f"could not download {download.model}: {download.problem}"
        case _:
            return f"downloading {download.model}{at}{left}"


RARELY_S = 5.0


class Rarely:
    """Is due every ``RARELY_S`` seconds, first after one interval."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._told_s = time.monotonic()

    def due(self) -> bool:
        """Whether a report is due; resets the timer."""
        if time.monotonic() - self._told_s < RARELY_S:
            return False
        self.begin()
        return True
