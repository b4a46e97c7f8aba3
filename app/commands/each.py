"""``tokamac ask --each``: one answer to each line of a file, several at once, as JSON lines in the order of the input.

    reading (a line at a time) → threads that each wait for one reply → held back until their turn → stdout

At most ``LOOK_AHEAD`` prompts are begun beyond the first one that is not answered yet, so memory stays flat however long the input
is, and a slow answer holds up the others only once they are that far ahead. A line that can't be used, or whose reply fails, is a
result that says so; the others go on. What is unfinished at an interrupt is not written: ``--resume`` computes it.
"""

import fcntl
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tokamac.engine.errors import EngineClosedError, TokamacError, access_hint
from tokamac.engine.events import Finished, MemoryPressure, TextChunk, Truncated
from tokamac.engine.files import open_regular
from tokamac.engine.metrics import rate as rate_of
from tokamac.engine.options import TemplateOptions

from .. import INTERRUPTED
from ..output import Progress, is_terminal, note
from ..prompts import (
    LONGEST_INPUT,
    STDIN,
    EachOptions,
    InputError,
    Key,
    PromptLine,
    called,
    count_prompts,
    is_stream,
    opened,
    prompt_lines,
    reader,
    split_lines,
)
from ..units import rate, seconds
from ..verdict import pressure_sentence
from . import loading

if TYPE_CHECKING:
    from tokamac.engine import Engine

LOOK_AHEAD = 512
"""Prompts that may be begun, or answered and held back, beyond the first that is not answered."""
AT_ONCE = 2
"""Prompts that are asked for at once, as a multiple of the replies that are made at once: so that none waits for the input."""
TICK_S = 0.2
"""How often the bar is drawn."""
RESULT = b'{"id": '
"""How a result begins."""

Result = dict[str, Any]


# Earlier results ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a file of earlier results holds; nothing where there is none. answered: by key; failed lines are not among them, and
    are tried again.

    path: of the file. damaged: lines that are no results. whole_bytes: up to the end of the last whole line; what follows was cut
    off while it was written. ends_line: whether the whole part ends with a newline.
    """

    answered: Counter[Key] = field(default_factory=Counter)
    path: Path | None = None
    damaged: int = 0
    whole_bytes: int = 0
    ends_line: bool = True


def read_earlier(path: Path) -> Earlier:
    """Return what ``path`` holds, and say what of it can't be used. Raises InputError for a file that holds other things."""
    answered: Counter[Key] = Counter()
    others = failed = whole = 0
    ends_line = True
    try:
        with open_regular(path) as file:
            while line := file.readline(LONGEST_INPUT):
                result, ends_line = _result(line), line.endswith(b"\n")
                if result is None and not ends_line and _is_cut_off(line):
                    others, ends_line = others + 1, True  # of what is before it
                    break
                whole += len(line)
                if result is None:
                    others += bool(line.strip())
                elif "error" in result:
                    failed += 1
                else:
                    answered[_key(result)] += 1
    except FileNotFoundError:
        note(f"note: {path} is not there yet, so every prompt is answered")
        return Earlier(path=path)
    except OSError as error:
        hint = access_hint(error, "Check the path given to --resume.")
        raise InputError(f"{path} can't be read: {error.strerror}", hint) from error
    if whole and others and not answered and not failed:
        raise InputError(f"{path} holds no results of --each", "Give --resume a file that they were written to.")
    if others:
        lines = "a line" if others == 1 else f"{others:,} lines"
        note(f"note: {lines} of {path} can't be read; what is missing is answered again")
    return Earlier(answered, path, others, whole, ends_line)


def _is_cut_off(line: bytes) -> bool:
    """Whether the end of a file is the beginning of one of our lines, or what a file system leaves where power failed."""
    return line.startswith(RESULT[: len(line)]) or not line.strip(b"\0")


def _result(line: bytes) -> Result | None:
    try:
        read = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(read, dict) and type(read.get("index")) is int and ("text" in read or "error" in read)
    return read if known and isinstance(read.get("id"), str | int | None) else None


def _key(result: Result) -> Key:
    return ("index", result["index"]) if result.get("id") is None else ("id", result["id"])


@contextmanager
def results_file(earlier: Earlier) -> Iterator[TextIO]:
    """Yield where results go: to stdout; but to the file that is resumed, where stdout is a terminal.

    A line that was cut off at the end of that file goes before anything is appended to it, by us or by the shell's ``>>``.
    Raises InputError.
    """
    file: TextIO | None = None
    path = earlier.path
    try:
        if path is None:
            pass
        elif (descriptor := _stdout_at(path)) is not None:
            _mend(descriptor, earlier)
        elif is_terminal(sys.stdout):
            file = path.open("a", encoding="utf-8")  # closed below
            _mend(file.fileno(), earlier)
    except OSError as error:
        hint = access_hint(error, "Check the path given to --resume.")
        raise InputError(f"{path} can't be written: {error.strerror}", hint) from error
    with nullcontext(sys.stdout) if file is None else file as out:
        yield out


def _stdout_at(path: Path) -> int | None:
    """Return the descriptor of stdout where that is this very file."""
    try:
        descriptor = sys.stdout.fileno()
        same = os.path.samestat(os.fstat(descriptor), path.stat())
    except (OSError, ValueError):
        return None
    if same and not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND:
        note(f"note: > empties {path} before it is read, so nothing of it is left out; append with >>")
    return descriptor if same else None


def _mend(descriptor: int, earlier: Earlier) -> None:
    """Take off what was cut off at the end of a file of results, and go on in a line of its own."""
    if os.fstat(descriptor).st_size > earlier.whole_bytes:
        os.ftruncate(descriptor, earlier.whole_bytes)
    os.lseek(descriptor, 0, os.SEEK_END)
    if not earlier.ends_line:
        os.write(descriptor, b"\n")


def left_out(lines: Iterator[PromptLine], earlier: Earlier) -> Iterator[PromptLine | None]:
    """Yield the prompts that have no result yet; None for one that has."""
    answered = Counter(earlier.answered)
    for line in lines:
        if line.error is None and answered[line.key] > 0:
            answered[line.key] -= 1
            yield None
        else:
            yield line


def has_prompts_left(name: str, earlier: Earlier, options: EachOptions) -> bool:
    """Whether a model has to be loaded for this input; say why not. Raises InputError for what is no input at all."""
    if is_stream(name):
        return True
    with opened(name) as file:
        lines = left_out(prompt_lines(split_lines(reader(file)), name, options), earlier)
        first = next(lines, earlier)
        if first is earlier:
            note(f"note: {name} has no prompts")
            return False
        if first is not None or any(line is not None for line in lines):
            return True
    note(f"note: every prompt of {name} is answered in {earlier.path}")
    return False


# The answers --------------------------------------------------------------------------------------------------------------------


class EachRun:
    """Answers prompts on threads, and hands their results over in order.

    Args:
        engine: answers.
        lines: the prompts; None stands for one that is left out. Read by one thread at a time, and no further than needed.
        template: what the chat template is told.
        threads: prompts that are asked for at once.

    Attributes:
        left_out, taken: prompts so far. done: of those taken, how many came to an end. ended: whether the input has.
        answered, failed: results handed over. tokens: generated so far. stopped: whether ``stop`` was called.
        squeezed: what was done for a prompt when memory was short the first time; None where it never was.
    """

    def __init__(
        self, engine: "Engine", lines: Iterator[PromptLine | None], template: TemplateOptions, threads: int
    ) -> None:
        self._engine, self._lines, self._template = engine, lines, template
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self._results: dict[int, Result | None] = {}  # by place; None: interrupted
        self._written = 0
        self._failure: Exception | None = None
        self._busy_s = self._since_s = 0.0
        self.left_out = self.taken = self.done = self.answered = self.failed = self.tokens = 0
        self.ended = self.stopped = False
        self.squeezed: MemoryPressure | None = None
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]

    def begin(self) -> None:
        """Start."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Begin nothing more, and end what has begun. Safe in a signal handler."""
        self.stopped = True
        self._engine.cancel()

    @property
    def is_over(self) -> bool:
        """Whether every result was handed over."""
        return (self.ended or self.stopped) and self._written == self.done == self.taken

    @property
    def together_tps(self) -> float | None:
        """Tokens a second of all replies, over the time in which there was any; None is unknown."""
        with self._changed:
            now_s = time.monotonic() - self._since_s if self.done < self.taken else 0.0
            return rate_of(self.tokens, self._busy_s + now_s)

    def take(self, timeout_s: float) -> list[Result]:
        """Wait for the next result, no longer than that; return those that are next in order.

        Raises what reading the input raised, once all before it were handed over.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._written in self._results or self.is_over, timeout_s)
            taken = []
            while self._written in self._results:
                taken.append(self._results.pop(self._written))
                self._written += 1
            self._changed.notify_all()
        if self._failure is not None and not taken and self.is_over:
            raise self._failure
        found = [result for result in taken if result is not None]
        failed = sum("error" in result for result in found)
        self.failed, self.answered = self.failed + failed, self.answered + len(found) - failed
        return found

    def close(self) -> None:
        """Wait for the threads; one that waits for a pipe ends with the program."""
        for thread in self._threads:
            thread.join(0.01 if self.stopped else None)

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            place, line = taken
            result = self._answer(line)
            with self._changed:
                self._results[place] = result
                self.done += 1
                if self.done == self.taken:
                    self._busy_s += time.monotonic() - self._since_s
                self._changed.notify_all()

    def _take(self) -> tuple[int, PromptLine] | None:
        """Return the next prompt and its place; None where there is none."""
        with self._reading:
            with self._changed:
                while self.taken - self._written >= LOOK_AHEAD and not self.stopped:
                    self._changed.wait(TICK_S)
            line: PromptLine | None = None
            while line is None:
                if self.stopped or self.ended:
                    return None
                try:
                    line = next(self._lines)
                except StopIteration:
                    self._end()
                    return None
                except Exception as error:  # it can't be read any further
                    self._failure = error
                    self._end()
                    return None
                self.left_out += line is None
            with self._changed:
                if self.done == self.taken:
                    self._since_s = time.monotonic()
                place, self.taken = self.taken, self.taken + 1
            return place, line

    def _end(self) -> None:
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def _answer(self, line: PromptLine) -> Result | None:
        """Return the result of a prompt; None where it was interrupted."""
        head = {"id": line.id, "index": line.index}
        if line.error is not None:
            return {**head, "error": line.error.message, "hint": line.error.hint}
        try:
            return self._reply(line, head)
        except EngineClosedError:
            return None
        except TokamacError as error:
            return {**head, "error": error.message, "hint": error.hint}
        except Exception as error:
            hint = "The other lines go on. Set TOKAMAC_DEBUG=1 and ask it alone for the traceback."
            return {**head, "error": f"this should not happen: {type(error).__name__}: {error}", "hint": hint}

    def _reply(self, line: PromptLine, head: Result) -> Result | None:
        events = self._engine.generate(line.messages, line.sampling, template=self._template)
        more: Result = {}
        tokens: list[Result] = []
        with closing(events):
            for event in events:
                if self.stopped:
                    events.cancel()
                if isinstance(event, Truncated):
                    more["truncated"] = asdict(event)
                if isinstance(event, MemoryPressure):
                    more.setdefault("squeezed", []).append(asdict(event))
                    self.squeezed = self.squeezed or event
                if not isinstance(event, TextChunk | Finished):
                    continue
                tokens += [asdict(token) for token in event.logprobs]
                with self._changed:
                    self.tokens += len(event.ids)
                if isinstance(event, Finished):
                    if event.reason == "cancelled":
                        return None
                    own = {"thinking": event.thinking, "tokens": tokens, "doubts": list(event.doubts)}
                    more |= {name: value for name, value in own.items() if value}
                    told = {"text": event.text, "reason": event.reason, "metrics": asdict(event.metrics)}
                    return {**head, **told, **more}
        return None


def answer_each(
    engine: "Engine", name: str, earlier: Earlier, options: EachOptions, *, parallel: int, verbose: bool
) -> int:
    """Answer every prompt of the input that has no earlier result, and return the exit status. Raises InputError."""
    live = is_terminal(sys.stderr)
    typed = name == STDIN and is_terminal(sys.stdin)  # no bar is drawn over what a person writes
    total = count_prompts(name) if live else None
    with ExitStack() as stack:
        file = stack.enter_context(opened(name))
        lines = prompt_lines(split_lines(reader(file)), name, options)
        out = stack.enter_context(results_file(earlier))
        run = EachRun(engine, left_out(lines, earlier), options.template, AT_ONCE * parallel)
        bar = Progress("answering", unit="prompts", plain=False)
        stack.callback(run.stop)
        stack.callback(bar.clear)
        began_s, squeezed = time.monotonic(), False
        with loading.interrupting(run.stop):
            run.begin()
            while not run.is_over:
                results = run.take(TICK_S)
                if run.squeezed is not None and not squeezed:
                    squeezed = True
                    bar.clear()
                    note(f"note: {pressure_sentence(run.squeezed)}. Results have it as squeezed")
                if results and live and is_terminal(out):
                    bar.clear()
                for result in results:
                    print(json.dumps(result, allow_nan=False), file=out, flush=True)
                if live and not typed:
                    _draw(bar, run, total)
            run.take(0)  # what reading raised
        bar.clear()
        run.close()
        _tell_end(run, time.monotonic() - began_s, called(name), verbose=verbose or live)
        if out is not sys.stdout:
            note(f"note: the results are in {earlier.path}")
        return INTERRUPTED if run.stopped else 1 if run.failed else 0


def _draw(bar: Progress, run: EachRun, total: int | None) -> None:
    done = run.done + run.left_out
    tps = run.together_tps
    together = "" if tps is None else f"{rate(tps)} together"
    failed = f"{run.failed:,} failed" if run.failed else ""
    if total is None and run.ended:
        total = run.taken + run.left_out
    what = ", ".join(part for part in (together, failed) if part)
    bar.update(done, total, what if total else f"{done:,} prompts  {what}")


def _tell_end(run: EachRun, elapsed_s: float, name: str, *, verbose: bool) -> None:
    if run.ended and not run.taken and not run.left_out:
        note(f"note: {name} has no prompts")
    elif verbose:
        before = f"; {run.left_out:,} were answered before" if run.left_out else ""
        speed = "" if run.together_tps is None else f", {rate(run.together_tps)} together"
        note(f"{run.answered:,} answered in {seconds(elapsed_s)}: {run.tokens:,} tokens{speed}{before}")
    if run.failed:
        failed = f"{run.failed:,} of {run.answered + run.failed:,} prompts failed"
        note(f"tokamac: {failed}. Their results say why; --resume tries them again.")
