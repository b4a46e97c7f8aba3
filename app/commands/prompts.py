"""Prompts of commands: arguments, files and pipes as one, or a file of them answered in parallel (``ask --each``)."""

import fcntl
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from tokamac.engine.errors import EngineClosedError, TokamacError, access_hint
from tokamac.engine.events import Finished, MemoryPressure, Message, TextChunk, Truncated
from tokamac.engine.files import NotRegularError, expanded, open_regular
from tokamac.engine.metrics import rate as rate_of
from tokamac.engine.options import Sampling, TemplateOptions

from .. import INTERRUPTED
from ..chat.attachments import (
    AttachError,
    Draft,
    PDFError,
    attachment,
    decoded,
    fence_for,
    kind_of,
    pdf_text,
    picture_attachment,
)
from ..options import SAMPLING_FLAGS
from ..parser import did_you_mean
from ..reports.verdict import pressure_sentence
from ..store.values import PICTURE, Attachment
from ..text.sanitise import sanitise_line
from ..text.terminal import Progress, is_terminal, note
from ..text.units import rate, seconds
from . import loading

if TYPE_CHECKING:
    from tokamac.engine import Engine


# One prompt: files and piped text in blocks, then the question. It comes last so that another question on the same file
# reuses the prompt cache. Many: plain or JSON lines, streamed; a bad line is an error and the others go on.


STDIN = "-"
HANDED_OVER = (Path("/dev/fd"), Path("/proc/self/fd"))
LONGEST_INPUT = 64_000_000  # bytes of a prompt; a context of a million tokens is about 5 MB of text
PIECE = 1 << 16
MOST_DIGITS = 9  # of a token's id
ENDINGS = (".jsonl", ".ndjson")  # files whose lines are JSON whatever the first of them looks like
FIELDS = ("id", "prompt", "messages", *(field.name for field in fields(Sampling)))
MESSAGE_FIELDS = ("role", "content", "thinking")

Id = str | int
Key = tuple[str, Id]


class InputError(TokamacError):
    """The input or an earlier results file is unusable."""


class PromptLineError(TokamacError):
    """One line can't be used."""


@contextmanager
def reading(name: str, flag: str, piped: str) -> Iterator[None]:
    """Explain read errors of a file given by ``flag``. piped: how to read a pipe. Raises InputError."""
    try:
        yield
    except NotRegularError as error:
        raise InputError(f"{name} can't be read: {error.strerror}", f"Pipe it in instead: {piped}") from error
    except IsADirectoryError as error:
        raise InputError(f"{name} is a folder", f"Name the files in it, each with {flag}.") from error
    except FileNotFoundError as error:
        raise InputError(f"there is no file {name}", f"Check the path given to {flag}.") from error
    except OSError as error:
        raise InputError(
            f"{name} can't be read: {error.strerror}", access_hint(error, "Check its permissions.")
        ) from error


def open_file(name: str) -> BinaryIO:
    """Open a file, or an inherited descriptor such as a shell's ``<(command)``."""
    path = expanded(name)
    return path.open("rb") if is_handed_over(name) else open_regular(path)


def is_handed_over(name: str) -> bool:
    path = expanded(name)
    return path.parent in HANDED_OVER or path == Path("/dev/stdin")


def compose(argument: str | None, files: Sequence[str]) -> str:
    """Return the whole prompt, or "". Reads a pipe with or without ``-``. Raises InputError."""
    piped = _standard_input(wanted=argument == STDIN)
    said = "" if argument is None or argument == STDIN else argument.strip()
    blocks = file_blocks(files)
    if piped.strip():
        # Alone it is the prompt itself; beside one it is what the prompt is about.
        blocks.append(_block("Input:", piped) if said or blocks else piped.strip())
    return "\n\n".join([*blocks, said] if said else blocks)


def drafted(argument: str | None, files: Sequence[str]) -> Draft:
    """Return the prompt with files and piped text as attachments. Raises InputError."""
    piped = _standard_input(wanted=argument == STDIN)
    said = "" if argument is None or argument == STDIN else argument.strip()
    attached = [attachment(name, _read_file(name)) for name in files]
    if piped.strip() and (said or attached):
        attached.append(attachment("input", piped))
        piped = ""
    return Draft(said or piped.strip(), tuple(attached))


def pictures_apart(files: Sequence[str], images: Sequence[str]) -> tuple[list[str], list[Attachment]]:
    """Return the files that are text, and the pictures. Raises InputError."""
    others = [each for each in files if kind_of(each) != PICTURE]
    try:
        shown = [picture_attachment(each, expanded(each)) for each in files if each not in others]
        return others, [*shown, *(picture_attachment(each, expanded(each)) for each in images)]
    except AttachError as error:
        raise InputError(error.message, error.hint) from error


def file_blocks(files: Sequence[str]) -> list[str]:
    """Return each file in a block. Raises InputError."""
    return [_block(f"File {name}:", _read_file(name)) for name in files]


PAGES: dict[str, str] = {}  # the web pages that the user allowed, by their addresses


def fetch_pages(names: Sequence[str], *, allowed: bool) -> None:
    """Fetch the web pages among the files, each after asking. Raises InputError."""
    if not names:
        return
    from ..tools import web
    from ..tools.calls import ToolError

    for name in filter(web.is_address, names):
        try:
            host = web.check(name).netloc
            if not allowed and not _allows(f"Fetch {sanitise_line(name)} from {sanitise_line(host)}? [y]es, [n]o> "):
                raise InputError(f"{name} was not fetched", "Without a terminal, --allow-web fetches it.")
            PAGES[name] = web.fetch(name).text
        except ToolError as error:
            raise InputError(error.message, error.hint) from error
        note(f"fetched {name}: {len(PAGES[name]):,} characters")


def _allows(question: str) -> bool:
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write(question)
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _standard_input(*, wanted: bool) -> str:
    if sys.stdin is None or (sys.stdin.isatty() and not wanted):
        return ""
    buffer = getattr(sys.stdin, "buffer", None)
    return _text(buffer.read(LONGEST_INPUT + 1), "standard input") if buffer is not None else sys.stdin.read()


def read_schema(name: str) -> str:
    """Raises InputError."""
    with reading(name, "--schema", f"--schema <(cat {name})"), open_file(name) as file:
        return _text(file.read(LONGEST_INPUT + 1), name)


def _read_file(name: str) -> str:
    if name in PAGES:
        return PAGES[name]
    with reading(name, "-f", f"tokamac ask PROMPT < {name}"), open_file(name) as file:
        return _text(file.read(LONGEST_INPUT + 1), name)


def _text(data: bytes, name: str) -> str:
    if len(data) > LONGEST_INPUT:
        raise InputError(
            f"{name} has more than {LONGEST_INPUT // 10**6} MB", "No context holds that: give a part of it."
        )
    try:
        return pdf_text(data) if kind_of(name) == "pdf" else decoded(data, name)
    except PDFError as error:
        raise InputError(f"{name} can't be read: {error.message}", error.hint) from error
    except AttachError as error:
        raise InputError(error.message, "Only text can be read; convert it first.") from error


def _block(title: str, text: str) -> str:
    fence = fence_for(text)
    return f"{title}\n{fence}\n{text.strip(chr(10))}\n{fence}"


# Many prompts -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EachOptions:
    """Defaults for every line: prefix and options."""

    before: str = ""
    system: str | None = None
    sampling: Sampling = Sampling()  # noqa: RUF009  # frozen
    template: TemplateOptions = TemplateOptions()  # noqa: RUF009


@dataclass(frozen=True, slots=True)
class PromptLine:
    """An input line. index: among prompts, from 0. error: why it is unusable; then other fields are void."""

    index: int
    id: Id | None = None
    messages: tuple[Message, ...] = ()
    sampling: Sampling = Sampling()  # noqa: RUF009
    error: TokamacError | None = None

    @property
    def key(self) -> Key:
        return ("index", self.index) if self.id is None else ("id", self.id)


def split_lines(read: Callable[[int], bytes]) -> Iterator[bytes | None]:
    """Yield lines without newlines; None for one longer than ``LONGEST_INPUT``."""
    parts: list[bytes] = []
    length = 0
    while piece := read(PIECE):
        first, *others = piece.split(b"\n")
        for number, part in enumerate((first, *others)):
            if number:
                yield b"".join(parts) if length <= LONGEST_INPUT else None
                parts, length = [], 0
            length += len(part)
            if length <= LONGEST_INPUT:
                parts.append(part)
            else:
                parts.clear()
    if length:
        yield b"".join(parts) if length <= LONGEST_INPUT else None


@contextmanager
def opened(name: str) -> Iterator[BinaryIO]:
    """Raises InputError if unreadable."""
    if name == STDIN:
        if sys.stdin is None:
            raise InputError("there is no standard input to read prompts from", "Name a file: --each prompts.txt.")
        yield sys.stdin.buffer
        return
    with reading(name, "--each", f"tokamac ask --each - < {name}"):
        file = open_file(name)
    with file:
        yield file


def check_input(name: str) -> None:
    if is_handed_over(name):  # opening would take it from who writes
        return
    with opened(name):
        pass


def is_stream(name: str) -> bool:
    return name == STDIN or is_handed_over(name)


def reader(file: BinaryIO) -> Callable[[int], bytes]:
    """Return a function that reads what is available, not full blocks."""
    # Reads the descriptor: Python can't exit while a thread blocks in a buffered stream.
    try:
        descriptor = file.fileno()
    except OSError:  # of no file of the system's
        return file.read
    return lambda size: os.read(descriptor, size)


def count_prompts(name: str) -> int | None:
    """Return the number of prompts; None for a stream."""
    if is_stream(name):
        return None
    with opened(name) as file:
        return sum(line is None or bool(line.strip()) for line in split_lines(reader(file)))


def prompt_lines(lines: Iterator[bytes | None], name: str, options: EachOptions) -> Iterator[PromptLine]:
    """Yield prompts of plain lines, or JSON lines if the first is an object; skips blanks. Raises InputError."""
    as_json: bool | None = True if name.endswith(ENDINGS) else None
    index = 0
    for number, line in enumerate(lines, 1):
        raw = line
        if number == 1 and raw is not None:
            if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise InputError(f"{called(name)} is UTF-16 text", "Save it as UTF-8.")
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if raw is not None and not raw.strip():
            continue
        if as_json is None and raw is not None:
            start = raw.lstrip()
            if start.startswith((b"[{", b"[ {")) or start.rstrip() == b"[":
                hint = "Give an object a line: jq -c '.[]' makes them of it."
                raise InputError(f"{called(name)} is one JSON array, not JSON lines", hint)
            as_json = start.startswith(b"{")
        yield _prompt_line(raw, index, number, options, as_json=bool(as_json))
        index += 1


def called(name: str) -> str:
    return "standard input" if name == STDIN else name


def _prompt_line(raw: bytes | None, index: int, number: int, options: EachOptions, *, as_json: bool) -> PromptLine:
    given: Mapping[str, Any] = {}
    try:
        if raw is None:
            raise PromptLineError(
                f"it is longer than {LONGEST_INPUT // 10**6} MB", "No context holds that: give a part of it."
            )
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise PromptLineError("it is not UTF-8 text", "Save the file as UTF-8.") from None
        given = _object(text) if as_json else {"prompt": text.strip()}
        _check_fields(given)
        messages, sampling = _messages(given, options), _sampling(given, options.sampling)
        return PromptLine(index, _id(given), messages, sampling)
    except TokamacError as error:
        told = PromptLineError(f"line {number}: {error.message}", error.hint)
        return PromptLine(index, _id_or_none(given), error=told)


def _object(text: str) -> Mapping[str, Any]:
    """Raises PromptLineError."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        deep = "it is nested too deep" if isinstance(error, RecursionError) else "a number has too many digits"
        why = error.msg if isinstance(error, json.JSONDecodeError) else deep
        raise PromptLineError(
            f"it is not JSON ({why})", 'Give an object, such as {"prompt": "Why is the sky blue?"}.'
        ) from error
    if not isinstance(given, dict):
        raise PromptLineError("it is not a JSON object", 'Give one, such as {"prompt": "Why is the sky blue?"}.')
    return given


def _check_fields(given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in FIELDS:
            as_flag = SAMPLING_FLAGS.get(f"--{name.replace('_', '-')}")
            meant = (
                f"Did you mean {as_flag}?" if as_flag else did_you_mean(name, FIELDS).removeprefix("; ").capitalize()
            )
            hint = meant or "Use id, prompt or messages, and sampling fields (tokamac help each)."
            raise PromptLineError(f"there is no field {name!r:.60}", hint)


def _id(given: Mapping[str, Any]) -> Id | None:
    value = given.get("id")
    if value is None or isinstance(value, str) or type(value) is int:
        return value
    raise PromptLineError("its id is not a string or a whole number", 'Give one, such as "id": "first".')


def _id_or_none(given: Mapping[str, Any]) -> Id | None:
    try:
        return _id(given)
    except PromptLineError:
        return None


def _messages(given: Mapping[str, Any], options: EachOptions) -> tuple[Message, ...]:
    """Return a line's messages with the common ones. Raises TokamacError."""
    prompt, listed = given.get("prompt"), given.get("messages")
    if (prompt is None) == (listed is None):
        both = "both prompt and messages" if prompt is not None else "neither prompt nor messages"
        raise PromptLineError(f"it has {both}", "Give one of them.")
    if prompt is not None:
        if not isinstance(prompt, str) or not prompt.strip():
            raise PromptLineError(
                "its prompt is not a string" if not isinstance(prompt, str) else "its prompt is empty", "Write one."
            )
        messages = [Message("user", prompt)]
    else:
        messages = _listed(listed)
    if options.before:
        at = next(index for index, each in enumerate(messages) if each.role == "user")
        messages[at] = replace(messages[at], content=f"{options.before}\n\n{messages[at].content}")
    if options.system and messages[0].role != "system":
        messages.insert(0, Message("system", options.system))
    return tuple(messages)


def _listed(listed: object) -> list[Message]:
    hint = 'Give a list such as [{"role": "user", "content": "Why?"}].'
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise PromptLineError("its messages are not a list of objects", hint)
    for each in listed:
        if unknown := [name for name in each if name not in MESSAGE_FIELDS]:
            raise PromptLineError(f"a message has no field {unknown[0]!r:.60}", f"Use {', '.join(MESSAGE_FIELDS)}.")
        if lacking := [name for name in MESSAGE_FIELDS[:2] if name not in each]:
            raise PromptLineError(f"a message has no {lacking[0]}", hint)
    messages = [Message(**each) for each in listed]
    if not any(each.role == "user" for each in messages):
        raise PromptLineError("it has no message of the user", hint)
    return messages


def _sampling(given: Mapping[str, Any], base: Sampling) -> Sampling:
    """Return a line's sampling over the flags'; null is unset. Raises OptionError."""
    own = {name: value for name, value in given.items() if name not in FIELDS[:3] and value is not None}
    if isinstance(biases := own.get("logit_bias"), dict):  # JSON has no numbers for names
        own["logit_bias"] = {_token(name): bias for name, bias in biases.items()}
    return replace(base, **own) if own else base


def _token(name: str) -> int | str:
    return int(name) if name.isdecimal() and len(name) <= MOST_DIGITS else name


#     reading (a line at a time) → a thread per reply → reorder buffer → stdout
#
# At most ``LOOK_AHEAD`` prompts beyond the oldest unanswered one are started, so memory stays flat. A bad line or failed
# reply is an error result; the others go on. Unfinished ones at an interrupt are left to ``--resume``.


LOOK_AHEAD = 512  # prompts that may be begun, or answered and held back, beyond the first that is not answered
# Prompts that are asked for at once, as a multiple of the replies that are made at once: so that none waits for the
# input.
AT_ONCE = 2
TICK_S = 0.2  # how often the bar is drawn
RESULT = b'{"id": '  # how a result begins

Result = dict[str, Any]


# Earlier results ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier results file. answered: by key, without failed lines, which are retried.

    damaged: count of unreadable lines. whole_bytes: end of the last whole line. ends_line: it ends with a newline.
    """

    answered: Counter[Key] = field(default_factory=Counter)
    path: Path | None = None
    damaged: int = 0
    whole_bytes: int = 0
    ends_line: bool = True


def read_earlier(path: Path) -> Earlier:
    """Read earlier results, reporting damage. Raises InputError for other content."""
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
    """Whether a file's tail is a truncated result line, or zeros left by a power failure."""
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
    """Yield the output: stdout, or the resumed file if stdout is a terminal. Raises InputError."""
    # A truncated last line is removed first, also where the shell's ``>>`` appends to that file.
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
    try:
        descriptor = sys.stdout.fileno()
        same = os.path.samestat(os.fstat(descriptor), path.stat())
    except (OSError, ValueError):
        return None
    if same and not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND:
        note(f"note: > empties {path} before it is read, so nothing of it is left out; append with >>")
    return descriptor if same else None


def _mend(descriptor: int, earlier: Earlier) -> None:
    if os.fstat(descriptor).st_size > earlier.whole_bytes:
        os.ftruncate(descriptor, earlier.whole_bytes)
    os.lseek(descriptor, 0, os.SEEK_END)
    if not earlier.ends_line:
        os.write(descriptor, b"\n")


def left_out(lines: Iterator[PromptLine], earlier: Earlier) -> Iterator[PromptLine | None]:
    """Yield prompts; None for one with a result."""
    answered = Counter(earlier.answered)
    for line in lines:
        if line.error is None and answered[line.key] > 0:
            answered[line.key] -= 1
            yield None
        else:
            yield line


def has_prompts_left(name: str, earlier: Earlier, options: EachOptions) -> bool:
    """Whether any prompt is left, so that a model must load. Raises InputError."""
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
    """Answers prompts on threads and returns results in order.

    lines: None for skipped ones; read lazily by one thread at a time. done: ended prompts of those taken.
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
        self.memory_pressure: MemoryPressure | None = None
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Start nothing more and cancel the rest. Safe in a signal handler."""
        self.stopped = True
        self._engine.cancel()

    @property
    def is_over(self) -> bool:
        return (self.ended or self.stopped) and self._written == self.done == self.taken

    @property
    def together_tps(self) -> float | None:
        """Joint tokens/s over the time with any reply running; None is unknown."""
        with self._changed:
            now_s = time.monotonic() - self._since_s if self.done < self.taken else 0.0
            return rate_of(self.tokens, self._busy_s + now_s)

    def wait(self, timeout_s: float) -> list[Result]:
        """Wait up to ``timeout_s``; return the next results in order. Raises input errors after earlier results."""
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
        """Join the threads, except one blocked on a pipe, which ends with the program."""
        for thread in self._threads:
            thread.join(0.01 if self.stopped else None)

    def _work(self) -> None:
        while (taken := self._next_line()) is not None:
            place, line = taken
            result = self._answer(line)
            with self._changed:
                self._results[place] = result
                self.done += 1
                if self.done == self.taken:
                    self._busy_s += time.monotonic() - self._since_s
                self._changed.notify_all()

    def _next_line(self) -> tuple[int, PromptLine] | None:
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
        """Return a prompt's result; None if interrupted."""
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
                    for name in ("memory_pressure", "squeezed"):  # its name until 0.2, for one version more
                        more.setdefault(name, []).append(asdict(event))
                    self.memory_pressure = self.memory_pressure or event
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
    engine: "Engine",
    name: str,
    earlier: Earlier,
    options: EachOptions,
    *,
    parallel: int,
    verbose: bool,
    more: Mapping[str, Any] | None = None,
    hear: Callable[[Result], None] = lambda _: None,
) -> int:
    """Answer all prompts without an earlier result; return the exit status. more: of each result. Raises InputError."""
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
        began_s, told = time.monotonic(), False
        with loading.interrupting(run.stop):
            run.begin()
            while not run.is_over:
                results = run.wait(TICK_S)
                if run.memory_pressure is not None and not told:
                    told = True
                    bar.clear()
                    note(f"note: {pressure_sentence(run.memory_pressure)}. Results have it as memory_pressure")
                if results and live and is_terminal(out):
                    bar.clear()
                for result in results:
                    hear(result)
                    print(json.dumps({**result, **(more or {})}, allow_nan=False), file=out, flush=True)
                if live and not typed:
                    _draw(bar, run, total)
            run.wait(0)  # what reading raised
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
