"""What is asked, as people give it: words, files and pipes, which make one prompt; or a file with a prompt a line.

One prompt: the files and what is piped in, each in a block of its own, and then the question. It comes last, so that another one
about the same file begins with what is computed already. Many: plain lines or JSON lines, read one at a time, however many. A line
that can't be used says why, and the others go on.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from tokamac.engine.errors import TokamacError, access_hint
from tokamac.engine.events import Message
from tokamac.engine.files import NotRegularError, expanded, open_regular
from tokamac.engine.options import Sampling, TemplateOptions

from .chat.attachments import AttachError, PDFError, decoded, fence_for, kind_of, pdf_text
from .options import SAMPLING_FLAGS
from .parser import did_you_mean

STDIN = "-"
HANDED_OVER = (Path("/dev/fd"), Path("/proc/self/fd"))
LONGEST_INPUT = 64_000_000
"""Bytes of a prompt; a context of a million tokens is about 5 MB of text."""
PIECE = 1 << 16
MOST_DIGITS = 9
"""Of a token's id."""
ENDINGS = (".jsonl", ".ndjson")
"""Files whose lines are JSON whatever the first of them looks like."""
FIELDS = ("id", "prompt", "messages", *(field.name for field in fields(Sampling)))
MESSAGE_FIELDS = ("role", "content", "thinking")

Id = str | int
Key = tuple[str, Id]


class InputError(TokamacError):
    """The input, or a file of earlier results, can't be used at all."""


class PromptLineError(TokamacError):
    """One line can't be used."""


@contextmanager
def reading(name: str, flag: str, piped: str) -> Iterator[None]:
    """Say what is wrong with a file that ``flag`` names where it can't be read. piped: how a pipe is read. Raises InputError."""
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
    """Open a file, or a descriptor that this process was started with, as a shell's ``<(command)`` is: somebody writes to it."""
    path = expanded(name)
    return path.open("rb") if is_handed_over(name) else open_regular(path)


def is_handed_over(name: str) -> bool:
    """Whether a path is a descriptor of this process."""
    path = expanded(name)
    return path.parent in HANDED_OVER or path == Path("/dev/stdin")


def compose(argument: str | None, files: Sequence[str]) -> str:
    """Return the whole prompt; "" when there is nothing to ask.

    A pipe is read whether or not ``-`` stands for it. Raises InputError for what is missing, unreadable or not text.
    """
    piped = _standard_input(wanted=argument == STDIN)
    said = "" if argument is None or argument == STDIN else argument.strip()
    blocks = file_blocks(files)
    if piped.strip():
        # Alone it is the prompt itself; beside one it is what the prompt is about.
        blocks.append(_block("Input:", piped) if said or blocks else piped.strip())
    return "\n\n".join([*blocks, said] if said else blocks)


def file_blocks(files: Sequence[str]) -> list[str]:
    """Return the text of each file in a block of its own. Raises InputError."""
    return [_block(f"File {name}:", _read_file(name)) for name in files]


def _standard_input(*, wanted: bool) -> str:
    if sys.stdin is None or (sys.stdin.isatty() and not wanted):
        return ""
    buffer = getattr(sys.stdin, "buffer", None)
    return _text(buffer.read(LONGEST_INPUT + 1), "standard input") if buffer is not None else sys.stdin.read()


def read_schema(name: str) -> str:
    """Return the text of a file with a JSON Schema. Raises InputError."""
    with reading(name, "--schema", f"--schema <(cat {name})"), open_file(name) as file:
        return _text(file.read(LONGEST_INPUT + 1), name)


def _read_file(name: str) -> str:
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
    """Return text under its title, fenced by more backticks than it holds in a row, so that it can't end its own block."""
    fence = fence_for(text)
    return f"{title}\n{fence}\n{text.strip(chr(10))}\n{fence}"


# Many prompts -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EachOptions:
    """What holds for every line: what stands before it, and how it is answered where it does not say so itself."""

    before: str = ""
    system: str | None = None
    sampling: Sampling = Sampling()  # noqa: RUF009  # frozen
    template: TemplateOptions = TemplateOptions()  # noqa: RUF009


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A line of the input. index: among the prompts, from 0. error: why it can't be used; then the rest says nothing."""

    index: int
    id: Id | None = None
    messages: tuple[Message, ...] = ()
    sampling: Sampling = Sampling()  # noqa: RUF009
    error: TokamacError | None = None

    @property
    def key(self) -> Key:
        """What tells its result in a file of results."""
        return ("index", self.index) if self.id is None else ("id", self.id)


def split_lines(read: Callable[[int], bytes]) -> Iterator[bytes | None]:
    """Yield lines without their ends, read in pieces; None for one that is longer than ``LONGEST_INPUT``."""
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
    """Yield the input to read from. Raises InputError where it can't be read."""
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
    """Raise InputError where the input can't be read."""
    if is_handed_over(name):  # opening would take it from who writes
        return
    with opened(name):
        pass


def is_stream(name: str) -> bool:
    """Whether the input can be read only once."""
    return name == STDIN or is_handed_over(name)


def reader(file: BinaryIO) -> Callable[[int], bytes]:
    """Return what reads a file as it comes: what is there of a pipe, not a whole piece.

    By its descriptor, where it has one: Python can't end while a thread waits inside of a buffered stream.
    """
    try:
        descriptor = file.fileno()
    except OSError:  # of no file of the system's
        return file.read
    return lambda size: os.read(descriptor, size)


def count_prompts(name: str) -> int | None:
    """Return how many prompts a file has; None of what can be read once only."""
    if is_stream(name):
        return None
    with opened(name) as file:
        return sum(line is None or bool(line.strip()) for line in split_lines(reader(file)))


def prompt_lines(lines: Iterator[bytes | None], name: str, options: EachOptions) -> Iterator[PromptLine]:
    """Yield the prompts of an input called ``name``: those of plain lines, or of JSON lines where the first one is an object.

    Blank lines are left out. Raises InputError for what is no such input at all.
    """
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
    """Return what an input is called in a sentence."""
    return "standard input" if name == STDIN else name


def _prompt_line(raw: bytes | None, index: int, number: int, options: EachOptions, *, as_json: bool) -> PromptLine:
    """Return what a line asks for; its error where it can't be used."""
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
    """Return a line's object. Raises PromptLineError."""
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
    """Raise PromptLineError for a field that there is not, with the one that was probably meant."""
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
    raise PromptLineError("its id is neither a text nor a whole number", 'Give one, such as "id": "first".')


def _id_or_none(given: Mapping[str, Any]) -> Id | None:
    try:
        return _id(given)
    except PromptLineError:
        return None


def _messages(given: Mapping[str, Any], options: EachOptions) -> tuple[Message, ...]:
    """Return what a line asks, with what holds for all of them. Raises TokamacError."""
    prompt, listed = given.get("prompt"), given.get("messages")
    if (prompt is None) == (listed is None):
        both = "both prompt and messages" if prompt is not None else "neither prompt nor messages"
        raise PromptLineError(f"it has {both}", "Give one of them.")
    if prompt is not None:
        if not isinstance(prompt, str) or not prompt.strip():
            raise PromptLineError(
                "its prompt is not a text" if not isinstance(prompt, str) else "its prompt is empty", "Write one."
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
        raise PromptLineError("none of its messages is the user's", hint)
    return messages


def _sampling(given: Mapping[str, Any], base: Sampling) -> Sampling:
    """Return how a line is answered: as it says, else as the flags do; null says nothing. Raises OptionError."""
    own = {name: value for name, value in given.items() if name not in FIELDS[:3] and value is not None}
    if isinstance(biases := own.get("logit_bias"), dict):  # JSON has no numbers for names
        own["logit_bias"] = {_token(name): bias for name, bias in biases.items()}
    return replace(base, **own) if own else base


def _token(name: str) -> int | str:
    return int(name) if name.isdecimal() and len(name) <= MOST_DIGITS else name
