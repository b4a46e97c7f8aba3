"""The guide to the app itself, asked in a process of its own: the chat and its model stay as they are.

Commands of this program as processes of their own, waited for. Ctrl-C asks one to stop, as it would in a shell.

How a process that was waited for ended, where it did not do what it was for.

How often it is said how far something has come: more would be read out over everything else.

Plain ``/convert``: with a model, and flags as ``tokamac convert`` takes them, the plan; alone, after that, the conversion.

Plain ``/pull``: a model is downloaded, and waited for.

Plain ``/whatif``: what ``tokamac inspect --table`` says, of the chat's case where the flags ask for no other.
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

from tokamac.app.backend.client import BackendEvent, EngineProcess
from tokamac.app.backend.protocol import ReplyEvent
from tokamac.app.backend.subprocess import (
    ConversionLine,
    Converter,
    Ended,
    LineProcess,
    Pulled,
    Puller,
    PullLine,
    PullProgress,
    PullRefused,
    StageLine,
    converter_command,
    killed_by,
    models_command,
    pull_arguments,
)
from tokamac.app.chat.jobs import ConversionPhase, Guidance, Standing
from tokamac.app.chat.models import hub_cache, is_id, must_be_downloaded
from tokamac.app.output import INTERRUPTED, WRONG_USAGE
from tokamac.app.plain.console import heard
from tokamac.app.units import count, size
from tokamac.engine.errors import OptionError
from tokamac.engine.events import TextChunk
from tokamac.engine.hub.cache import GUIDE
from tokamac.engine.options import KVSpec

if TYPE_CHECKING:
    from tokamac.app.plain.repl import Repl


HEAR_S = 1.0
"""How often the engine is heard while a process is waited for."""
BEGUN_S = 0.05
"""How soon a process that was to stop before it had begun is asked again."""
MODEL_FIRST = "The model comes first: /{} MODEL FLAGS. Without one it is the chat's."
Line = TypeVar("Line")


def run_aside(
    process: LineProcess[Line],
    arguments: Sequence[str],
    take: Callable[[Line], None],
    *,
    meanwhile: Callable[[], None],
    stopping: Callable[[], None] = lambda: None,
) -> Ended:
    """Run ``process`` to its end, and hand every line to ``take`` as it comes; return how it ended. Raises OSError.

    Ctrl-C asks it to stop, once, be it as soon as it has begun. Where that was asked and the process did not end with status 0, the
    status that is returned is INTERRUPTED, whatever its own was: one that had hardly begun, or had to be killed, has another.

    meanwhile: called now and then, so that the engine is heard. stopping: called once, when the process is to stop.
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
    """Return the model that ``written`` begins with, or else ``model``, and the flags after it, cut as a shell does.

    Raises OptionError.
    """
    try:
        words = shlex.split(written)
    except ValueError as error:
        raise OptionError(f"{written} can't be read: {error}", "Close the quotation marks.") from None
    return (words[0], words[1:]) if words and not words[0].startswith("-") else (model, words)


def misplaced(command: str, written: str, end: Ended) -> str:
    """Return what to add where arguments were refused and a model may stand behind flags, which is not understood; else nothing."""
    return MODEL_FIRST.format(command) if end.status == WRONG_USAGE and written.startswith("-") else ""


def why(end: Ended) -> str:
    """Return what ended a process that failed: a signal, or what its own last words say."""
    if end.status < 0:
        return killed_by(-end.status)
    return end.last_line or f"exit status {end.status}"


PROGRESS_S = 5.0


class Rarely:
    """Is due every ``PROGRESS_S``, for the first time so long after it began."""

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


OURS = ("--dry-run", "--json")
"""Flags that are given where they belong; kept with a plan, they would have it planned again for ever."""


def convert(repl: "Repl", written: str) -> None:
    """Say what packing a model into fewer bits would do, or do what was planned last."""
    if repl.planned and not written:
        if _run(repl, repl.planned, dry_run=False) is ConversionPhase.DONE:
            repl.planned = ()
        return
    repl.planned = ()
    model, flags = words_of(written, repl.driver.session.engine.load.model)
    arguments = (*(flag for flag in flags if flag not in OURS), "--", model)
    if _run(repl, arguments, dry_run=True, written=written) is ConversionPhase.PLANNED:
        repl.planned = arguments
        repl.console.note("/convert alone does it. Ctrl-C stops it; /convert goes on from there.")


def _run(repl: "Repl", arguments: tuple[str, ...], *, dry_run: bool, written: str = "") -> ConversionPhase:
    """Plan or convert, and say what came of it; return where it stands. written: what the user gave the command."""
    standing, rarely = Standing(time.monotonic), Rarely()
    standing.begin(dry_run=dry_run)

    def take(line: ConversionLine) -> None:
        standing.take(line)
        if isinstance(line, StageLine) and rarely.due():
            repl.console.note(f"{line.stage}: {_share(line)}")

    how = ["--json", *(["--dry-run"] if dry_run else []), *arguments]
    try:
        converter = Converter(converter_command())
        end = run_aside(converter, how, take, meanwhile=repl.driver.rest, stopping=standing.stop)
    except OSError as error:
        repl.console.note(f"It could not be begun: {error}")
        return ConversionPhase.FORM
    standing.ended(end)
    if text := standing.text():
        repl.console.say(text)
    if standing.problem:
        repl.console.note(standing.problem)
    if remark := misplaced("convert", written, end):
        repl.console.note(remark)
    if standing.converted is not None:
        repl.console.note(f"/model {Path(standing.converted.path).absolute()} loads it.")
    return standing.phase


def _share(at: StageLine) -> str:
    written = size if at.unit == "bytes" else count
    of = "" if at.total is None else f" of {written(at.total)}"
    return f"{written(at.done)}{of}{'' if at.unit == 'bytes' else ' steps'}"


def pull(repl: "Repl", model: str) -> None:
    """Download a model; what has arrived stays where that is stopped."""
    say = repl.console.note
    if not is_id(model):
        say("Write /pull and a Hugging Face id, such as org/name.")
        return
    if not must_be_downloaded(model, hub_cache()):
        say(f"{model} is here already. /model {model} loads it.")
        return
    say(f"Downloading {model}. Ctrl-C stops it; the same command goes on from there.")
    download = _Download(repl, model)
    try:
        end = run_aside(Puller(models_command()), pull_arguments(model), download.take, meanwhile=repl.driver.rest)
    except OSError as error:
        say(f"{model} was not downloaded: {error}")
    else:
        say(download.result(end))


class _Download:
    """Hears a download, and says now and then how far it is."""

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
                self._said = f"{self._model} is here, {size(nbytes)}. /model {self._model} loads it."
            case PullRefused(error, hint):
                self._said = f"{self._model} was not downloaded: {error}. {hint}".strip()
            case _:
                pass

    def result(self, end: Ended) -> str:
        """Return what came of it, as a sentence."""
        if end.status == INTERRUPTED:
            return f"Stopped: /pull {self._model} goes on from there."
        return self._said or f"{self._model} was not downloaded: {why(end)}"


def what_if(repl: "Repl", written: str) -> None:
    """Say what a model, this one or another, would do in other precisions, with other caches and contexts, here or elsewhere."""
    from tokamac.app.chat.what_if_form import first_question

    model, flags = words_of(written, repl.driver.session.engine.load.model)
    asked = first_question(repl.driver.session, model)
    own_size = any(flag.startswith(("--context", "--prompt")) for flag in flags)
    size = () if own_size else (f"--context={asked.context}", f"--prompt={asked.prompt}")
    lines: list[str] = []
    inspect = LineProcess([sys.executable, "-m", "tokamac.app.cli", "inspect", "--table"], _text)
    try:
        asks = [*size, *_kv_flags(asked.kv, flags), *flags, "--", model]
        end = run_aside(inspect, asks, lines.append, meanwhile=repl.driver.rest)
    except OSError as error:
        repl.console.note(f"It can't be said: {error}")
        return
    if lines:
        repl.console.say("\n".join(lines))
    for remark in (_remark(end), misplaced("whatif", written, end)):
        if remark:
            repl.console.note(remark)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\n")


def _remark(end: Ended) -> str:
    """Return what there is to say beside what was found, or why nothing was; nothing where there is nothing to say."""
    if end.status == INTERRUPTED:
        return "Stopped."
    if end.status < 0 or (end.status and not end.last_line):
        return f"It can't be said: {why(end)}"
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


Events = queue.SimpleQueue[BackendEvent | None]
"""What the guide's process says; None is Ctrl-C."""


def ask(repl: "Repl", question: str) -> None:
    """Ask the guide, which remembers no question before; it gives its memory back after the answer."""
    if not question:
        repl.console.note("Write the question after the command: /guide What does --kv-bits 8,4 do?")
        return
    events: Events = queue.SimpleQueue()
    with heard(lambda: events.put(None)):
        try:
            process = repl.driver.another(events.put)
        except OSError as error:
            repl.console.note(f"The guide could not be started: {error}")
            return
        try:
            said = _answer(repl, process, question, events)
        finally:
            process.kill()
    if said:
        repl.console.note(said)


def _answer(repl: "Repl", process: EngineProcess, question: str, events: Events) -> str:
    """Write the answer as it comes; return what is to be said of its end, or nothing."""
    guidance = Guidance()
    for request in (*guidance.start(), *guidance.ask(question)):
        process.send(request)
    process.set_busy(True)
    repl.console.begin(GUIDE)
    for event in as_they_come(events, meanwhile=repl.driver.rest):
        if event is None:
            break
        if isinstance(event, ReplyEvent) and isinstance(event.event, TextChunk):
            repl.console.grow(event.event.text, event.event.kind)
        for request in guidance.on_event(event):
            process.send(request)
        if not guidance.busy:
            break
    repl.console.end()
    return "The guide was stopped." if guidance.busy else guidance.problem


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
