"""The prompt of ``tokamac ask``: the files, what is piped in, each in a block of its own, and then the question.

The question comes last, so that another one about the same file begins with what is computed already.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tokamac.app.fence import fence_for
from tokamac.engine.errors import TokamacError, access_hint
from tokamac.engine.regular_files import NotRegularError, open_regular

STDIN = "-"

HANDED_OVER = (Path("/dev/fd"), Path("/proc/self/fd"))

LONGEST_INPUT = 64_000_000
"""Bytes of a file or a pipe; a context of a million tokens is about 5 MB of text."""


class InputError(TokamacError):
    """A file or standard input can't be used as text."""


def compose(argument: str | None, files: Sequence[str]) -> str:
    """Return the whole prompt; "" when there is nothing to ask.

    A pipe is read whether or not ``-`` stands for it. Raises InputError for what is missing, unreadable or not text.
    """
    piped = _standard_input(wanted=argument == STDIN)
    said = "" if argument is None or argument == STDIN else argument.strip()
    blocks = [_block(f"File {name}:", _read_file(name)) for name in files]
    if piped.strip():
        # Alone it is the prompt itself; beside one it is what the prompt is about.
        blocks.append(_block("Input:", piped) if said or blocks else piped.strip())
    return "\n\n".join([*blocks, said] if said else blocks)


def _standard_input(*, wanted: bool) -> str:
    if sys.stdin is None or (sys.stdin.isatty() and not wanted):
        return ""
    buffer = getattr(sys.stdin, "buffer", None)
    return _text(buffer.read(LONGEST_INPUT + 1), "standard input") if buffer is not None else sys.stdin.read()


def _read_file(name: str) -> str:
    try:
        path = Path(name).expanduser()
        with path.open("rb") if _is_handed_over(path) else open_regular(path) as file:
            return _text(file.read(LONGEST_INPUT + 1), name)
    except NotRegularError as error:
        raise InputError(
            f"{name} can't be read: {error.strerror}", f"Pipe it in instead: tokamac ask PROMPT < {name}"
        ) from error
    except IsADirectoryError as error:
        raise InputError(f"{name} is a folder", "Name the files in it, each with -f.") from error
    except FileNotFoundError as error:
        raise InputError(f"there is no file {name}", "Check the path given to -f.") from error
    except OSError as error:
        raise InputError(
            f"{name} can't be read: {error.strerror}", access_hint(error, "Check its permissions.")
        ) from error


def _is_handed_over(path: Path) -> bool:
    """Whether a path is a descriptor that this process was started with, as a shell's ``<(command)`` is: somebody writes to it."""
    return path.parent in HANDED_OVER or path == Path("/dev/stdin")


def _text(data: bytes, name: str) -> str:
    if len(data) > LONGEST_INPUT:
        raise InputError(
            f"{name} has more than {LONGEST_INPUT // 10**6} MB", "No context holds that: give a part of it."
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text", "Only text can be read; convert it first.") from error
    if "\0" in text:
        raise InputError(f"{name} is a binary file", "Only text can be read; convert it first.")
    return text


def _block(title: str, text: str) -> str:
    """Return text under its title, fenced by more backticks than it holds in a row, so that it can't end its own block."""
    fence = fence_for(text)
    return f"{title}\n{fence}\n{text.strip(chr(10))}\n{fence}"
