"""Commands of the plain chat that wait for a process: /convert, /pull, /whatif, /steps and /guide.

Ctrl-C asks the process to stop, as it would in a shell. Progress is told rarely: a screen reader would read it over all else. The
guide has an engine's process of its own, so that the chat and its model stay as they are.
"""

import asyncio
import queue
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tokamac.engine.errors import OptionError
from tokamac.engine.events import TextChunk
from tokamac.engine.hub.names import GUIDE
from tokamac.engine.options import KVSpec

from .. import INTERRUPTED, WRONG_USAGE
from ..backend.client import BackendEvent, EngineProcess
from ..backend.command_process import Ended, LineProcess, Refused, killed_by
from ..backend.converter import ConversionLine, Converter, StageLine, converter_command
from ..backend.protocol import LookedAt, ReplyEvent
from ..backend.puller import (
    HubModelLine,
    Pulled,
    Puller,
    PullLine,
    PullProgress,
    models_command,
    pull_arguments,
    search_arguments,
)
from ..chat.commands import RefusedError
from ..chat.guide_chat import GuideChat
from ..models.conversions import ConversionJob, ConversionPhase
from ..models.local import FOLDERS_FILE, Folders, hub_cache, models_on_disk
from ..settings_form import whole_number
from ..units import count, short, size
from .console import heard
from .jobs import WrittenConversion

if TYPE_CHECKING:
    from .repl import Repl


HEAR_S = 1.0
"""How often the engine is heard during a process."""
BEGUN_S = 0.05
"""How soon a process that was to stop before it had started is asked again."""
MODEL_FIRST = "Put the model first: /{} MODEL FLAGS. The default is the chat's model."
Line = TypeVar("Line")


def run_aside(
    process: LineProcess[Line],
    arguments: Sequence[str],
    take: Callable[[Line], None],
    *,
    meanwhile: Callable[[], None],
    stopping: Callable[[], None] = lambda: None,
) -> Ended:
    """Run ``process`` to its end; return how it ended, with status INTERRUPTED where Ctrl-C stopped it.

    Args:
        process: what to run; Ctrl-C asks it to stop, once, even before it has started.
        arguments: its command line.
        take: is given every line as it comes.
        meanwhile: called now and then, so that the engine is heard.
        stopping: called once, when the process is to stop.

    Raises:
        OSError: it could not be started.
    """
    return asyncio.run(_run_command(process, arguments, take, meanwhile, stopping))


async def _run_command(
    process: LineProcess[Line],
    arguments: Sequence[str],
    take: Callable[[Line], None],
    meanwhile: Callable[[], None],
    stopping: Callable[[], None],
) -> Ended:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    with heard(lambda: loop.call_soon_threadsafe(stop.set)):
        run = asyncio.ensure_future(process.run(arguments, take))
        stopper = asyncio.ensure_future(_stop(process, run, stop, stopping))
        while not (await asyncio.wait({run}, timeout=HEAR_S))[0]:
            meanwhile()
        stopper.cancel()
        end = run.result()
        return replace(end, status=INTERRUPTED) if stop.is_set() and end.status else end


async def _stop(
    process: LineProcess[Line], run: asyncio.Future[Ended], stop: asyncio.Event, stopping: Callable[[], None]
) -> None:
    """Once it is to stop, ask the process to, which may not have begun yet."""
    await stop.wait()
    stopping()
    while not run.done():
        await process.interrupt()
        await asyncio.wait({run}, timeout=BEGUN_S)


def words_of(written: str, model: str) -> tuple[str, list[str]]:
    """Return the model that ``written`` begins with, else ``model``, and the flags, split as in a shell. Raises OptionError."""
    try:
        words = shlex.split(written)
    except ValueError as error:
        raise OptionError(f"{written} can't be read: {error}", "Close the quotation marks.") from None
    return (words[0], words[1:]) if words and not words[0].startswith("-") else (model, words)


def misplaced(command: str, written: str, end: Ended) -> str:
    """Return a hint where arguments were refused that begin with a flag, so that the model may come last; else nothing."""
    return MODEL_FIRST.format(command) if end.status == WRONG_USAGE and written.startswith("-") else ""


def why(end: Ended) -> str:
    """Return what ended a process that failed: a signal, or what its own last words say."""
    if end.status < 0:
        return killed_by(-end.status)
    return end.last_line or f"exit status {end.status}"


PROGRESS_S = 5.0


class Rarely:
    """Is due every ``PROGRESS_S`` seconds, for the first time that long after it began."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Something begins, or was said of it."""
        self._told_s = time.monotonic()

    def due(self) -> bool:
        """Whether it is time to say something; whoever asks is expected to do it."""
        if time.monotonic() - self._told_s < PROGRESS_S:
            return False
        self.begin()
        return True


PLANNED_TYPED = " in the background. /jobs shows how far it is, and stops it."
PLANNED_PIPED = ". Ctrl-C stops it; /convert resumes it."
OURS = ("--dry-run", "--json")
"""Flags that are added where they belong; kept with a plan, they would plan it again for ever."""


def convert(repl: "Repl", written: str) -> None:
    """Plan a quantization, or run the last plan: in the background where a person types, else at once."""
    if (running := repl.jobs.conversions.running) is not None:
        raise RefusedError(f"{running.source} is still being converted. /jobs shows how far it is, and stops it.")
    if repl.planned and not written and repl.console.typed:
        *flags, _, model = repl.planned
        repl.jobs.convert(WrittenConversion(model, tuple(flags)))
        repl.tell(f"Converting {model} in the background. /jobs shows how far it is, and stops it.")
        return
    if repl.planned and not written:
        if _run(repl, repl.planned, dry_run=False) is ConversionPhase.DONE:
            repl.planned = ()
        return
    repl.planned = ()
    model, flags = words_of(written, repl.session.engine.load.model)
    placed = any(flag.startswith(("-o", "--output", "--into")) for flag in flags)
    into = () if placed else (f"--into={repl.preferences.settings.models_path}",)
    arguments = (*into, *(flag for flag in flags if flag not in OURS), "--", model)
    if _run(repl, arguments, dry_run=True, written=written) is ConversionPhase.PLANNED:
        repl.planned = arguments
        repl.tell(f"/convert without arguments runs this plan{PLANNED_TYPED if repl.console.typed else PLANNED_PIPED}")


def _run(repl: "Repl", arguments: tuple[str, ...], *, dry_run: bool, written: str = "") -> ConversionPhase:
    """Plan or convert, and tell the result; return the phase it ends in. written: the command's argument."""
    job, rarely = ConversionJob(time.monotonic), Rarely()
    job.begin(dry_run=dry_run)

    def take(line: ConversionLine) -> None:
        job.take(line)
        if isinstance(line, StageLine) and rarely.due():
            repl.tell(f"{line.stage}: {_share(line)}")

    how = ["--json", *(["--dry-run"] if dry_run else []), *arguments]
    try:
        converter = Converter(converter_command())
        end = run_aside(converter, how, take, meanwhile=repl.driver.rest, stopping=job.stop)
    except OSError as error:
        repl.tell(f"The conversion could not be started: {error}")
        return ConversionPhase.FORM
    job.ended(end)
    if text := job.text():
        repl.say(text)
    if job.problem:
        repl.tell(job.problem)
    if remark := misplaced("convert", written, end):
        repl.tell(remark)
    if job.converted is not None:
        repl.tell(f"/model {Path(job.converted.path).absolute()} loads it.")
    return job.phase


def _share(at: StageLine) -> str:
    written = size if at.unit == "bytes" else count
    of = "" if at.total is None else f" of {written(at.total)}"
    return f"{written(at.done)}{of}{'' if at.unit == 'bytes' else ' steps'}"


def pull(repl: "Repl", model: str) -> None:
    """Download a model, in the background where a person types; what has arrived is kept where that is stopped."""
    if repl.console.typed:
        repl.jobs.download(model)
        repl.tell(f"Downloading {model} in the background. /jobs shows how far it is, and stops it.")
        return
    repl.tell(f"Downloading {model}. Ctrl-C stops it; the same command resumes it.")
    download = _Download(repl, model)
    try:
        end = run_aside(Puller(models_command()), pull_arguments(model), download.take, meanwhile=repl.driver.rest)
    except OSError as error:
        repl.tell(f"{model} was not downloaded: {error}")
    else:
        repl.tell(download.result(end))


class _Download:
    """Hears a download, and tells its progress now and then."""

    def __init__(self, repl: "Repl", model: str) -> None:
        self._console = repl.console
        self._model = model
        self._rarely = Rarely()
        self._said = ""

    def take(self, line: PullLine) -> None:
        match line:
            case PullProgress(done, total):
                if self._rarely.due():
                    of = "" if total is None else f" of {size(total)}"
                    self._console.note(f"downloading {self._model}: {size(done)}{of}")
            case Pulled(bytes=nbytes):
                self._said = f"{self._model} is downloaded, {size(nbytes)}. /model {self._model} loads it."
            case Refused(error, hint):
                self._said = f"{self._model} was not downloaded: {error}. {hint}".strip()
            case _:
                pass

    def result(self, end: Ended) -> str:
        """Return what came of it, as a sentence."""
        if end.status == INTERRUPTED:
            return f"Stopped. /pull {self._model} resumes it."
        return self._said or f"{self._model} was not downloaded: {why(end)}"


def models(repl: "Repl", written: str) -> None:
    """List the models on this disk, or search Hugging Face: ``/models search WORDS``."""
    word, _, words = written.partition(" ")
    if word == "search" and words.strip():
        repl.tell("Searching Hugging Face. Ctrl-C stops it.")
        found: dict[str, HubModelLine] = {}
        problem: list[str] = []

        def take(line: PullLine) -> None:
            match line:
                case HubModelLine():
                    found[line.id] = line
                case Refused(error, hint):
                    problem.append(f"{error}. {hint}".strip())
                case _:
                    pass

        try:
            end = run_aside(Puller(models_command()), search_arguments(words), take, meanwhile=repl.driver.rest)
        except OSError as error:
            repl.tell(f"The search could not be started: {error}")
            return
        for each in found.values():
            facts = (
                size(each.nbytes),
                f"context {short(each.context)}",
                each.licence or "licence unknown",
                each.good_for,
            )
            repl.say(f"{each.id}: {', '.join(fact for fact in facts if fact)}")
        if problem or end.status:
            repl.tell("Stopped." if end.status == INTERRUPTED else (problem or [why(end)])[0])
        else:
            repl.tell("/pull and an ID downloads one." if found else "Nothing found for these words that runs here.")
    elif written:
        repl.tell("Write /models to list the models here, or /models search and some words.")
    else:
        folder = repl.preferences.settings.models_path
        for model in models_on_disk(hub_cache(), Folders(repl.preferences.home / FOLDERS_FILE).all(), folder).models:
            state = "" if model.whole else ", incomplete: /pull resumes it"
            context = "" if model.context is None else f", context {short(model.context)}"
            place = f", in {model.path.parent}" if model.home in ("models", "other") else ""
            repl.say(f"{model.model}: {size(model.nbytes)}{context}{place}{state}")
        repl.console.aside("/model and a name loads one. /models search and some words asks Hugging Face.")


def what_if(repl: "Repl", written: str) -> None:
    """Compare a model in other precisions, with other caches and contexts, here or on another chip."""
    from ..chat.what_if_form import first_question

    model, flags = words_of(written, repl.session.engine.load.model)
    asked = first_question(repl.session, model)
    own_size = any(flag.startswith(("--context", "--prompt")) for flag in flags)
    size = () if own_size else (f"--context={asked.context}", f"--prompt={asked.prompt}")
    lines: list[str] = []
    inspect = LineProcess([sys.executable, "-m", "tokamac.app.cli", "inspect", "--table"], _text)
    try:
        asks = [*size, *_kv_flags(asked.kv, flags), *flags, "--", model]
        end = run_aside(inspect, asks, lines.append, meanwhile=repl.driver.rest)
    except OSError as error:
        repl.tell(f"The comparison could not be started: {error}")
        return
    if lines:
        repl.say("\n".join(lines))
    for remark in (_remark(end), misplaced("whatif", written, end)):
        if remark:
            repl.tell(remark)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\n")


def _remark(end: Ended) -> str:
    """Return a remark on the result, or why there is none; "" where there is nothing to remark."""
    if end.status == INTERRUPTED:
        return "Stopped."
    if end.status < 0 or (end.status and not end.last_line):
        return f"The comparison failed: {why(end)}"
    return end.last_line


def _kv_flags(kv: KVSpec, own: Sequence[str]) -> Iterator[str]:
    """Yield the flags that ask for ``kv``, as far as the command has them, and the user's ``own`` don't ask for another.

    What goes with other bits, or another window, is not the chat's either: the two together may be refused.
    """
    given = {flag.partition("=")[0] for flag in own}
    if kv.quantized and "--kv-bits" not in given:
        yield f"--kv-bits={kv.key_bits},{kv.value_bits}"
        yield f"--kv-group-size={kv.group_size}"
    if kv.window is not None and "--kv-window" not in given:
        yield f"--kv-window={kv.window}"
        yield f"--kv-keep={kv.keep}"


TAIL = 40
"""Characters of what a new version goes on from."""
LISTED_STEPS = 12
"""Slow steps that /steps lists."""


def steps(repl: "Repl", written: str) -> None:
    """List the steps of the last reply, explain one of them, or go on from it with another token."""
    from ..reply_steps import ReplySteps, visible, why_not

    found = repl.session.conversation.reply_at(None)
    if found is None or found.reply is None:
        raise RefusedError("There is no reply to walk through yet.")
    shown = ReplySteps(found.reply)
    if not written:
        repl.say("\n".join(shown.summary(LISTED_STEPS)))
        repl.console.aside(f"/steps and a number from 1 to {len(shown):,} explains a step and its likely tokens.")
        return
    number, choice = _numbers(written)
    if shown.recorded and not 1 <= number <= len(shown):
        raise RefusedError(f"This reply has {len(shown):,} steps.")
    repl.driver.settle(loaded=True)
    if why := why_not(repl.session, found.reply):
        shown.take(LookedAt(found.key, ended=True, error=why))
    else:
        question = shown.question(found.key, repl.session.prompt_before(found.key), repl.session.template)
        repl.driver.look_again(question, shown.take)
    if not 1 <= number <= len(shown):
        raise RefusedError(f"This reply has {len(shown):,} steps.")
    if choice is not None:
        begun = shown.branch(number - 1, choice)
        tail = visible((begun.thinking + begun.text)[-TAIL:])
        repl.tell(f"A new version of the reply goes on from “…{tail}”.")
        repl.reply(lambda: repl.session.branch_from(found.key, begun))
        return
    lines = (f"{line.label:<9} {line.text}".rstrip() for line in shown.lines(number - 1))
    repl.say("\n".join([shown.title(number - 1), *lines]))
    if remark := shown.status():
        repl.tell(remark)


def _numbers(written: str) -> tuple[int, int | None]:
    """Return the step that is asked for, and which of its other tokens to go on with, if that is asked. Raises RefusedError."""
    numbers = [whole_number(word) for word in written.split()]
    match numbers:
        case [int(step)]:
            return step, None
        case [int(step), int(choice)]:
            return step, choice
        case _:
            raise RefusedError(
                "Write the number of a step after the command: /steps 12. /steps 12 2 continues with its token 2."
            )


Events = queue.SimpleQueue[BackendEvent | None]
"""What the guide's process says; None is Ctrl-C."""


def ask(repl: "Repl", question: str) -> None:
    """Ask the guide, which remembers no earlier question; its process ends after the answer."""
    if not question:
        repl.tell("Write the question after the command: /guide What does --kv-bits 8,4 do?")
        return
    events: Events = queue.SimpleQueue()
    with heard(lambda: events.put(None)):
        try:
            process = repl.driver.another(events.put)
        except OSError as error:
            repl.tell(f"The guide could not be started: {error}")
            return
        try:
            said = _answer(repl, process, question, events)
        finally:
            process.kill()
    if said:
        repl.tell(said)


def _answer(repl: "Repl", process: EngineProcess, question: str, events: Events) -> str:
    """Print the answer as it comes; return a remark on how it ended, or nothing."""
    guide = GuideChat()
    for request in (*guide.start(), *guide.ask(question)):
        process.send(request)
    process.set_busy(True)
    repl.console.begin(GUIDE)
    for event in as_they_come(events, meanwhile=repl.driver.rest):
        if event is None:
            break
        if isinstance(event, ReplyEvent) and isinstance(event.event, TextChunk):
            repl.console.grow(event.event.text, event.event.kind)
        for request in guide.on_event(event):
            process.send(request)
        if not guide.busy:
            break
    repl.console.end()
    return "The guide was stopped." if guide.busy else guide.problem


def as_they_come(events: Events, *, meanwhile: Callable[[], None]) -> Iterator[BackendEvent | None]:
    """Yield what the guide's process says, for ever. meanwhile: called now and then, so that the chat's own engine is heard.

    By the clock: while the guide answers there is always something to be heard of it.
    """
    heard_s = time.monotonic()
    while True:
        if time.monotonic() - heard_s >= HEAR_S:
            heard_s = time.monotonic()
            meanwhile()
        try:
            yield events.get(timeout=HEAR_S)
        except queue.Empty:
            continue
