"""Attachments of a prompt: files, long pasted texts, shell output."""

# Only paths that the user typed are read: regular files below a size limit, text or PDF. PDF extraction runs in
# a child process (this module: bytes on stdin, JSON on stdout), so a malicious file costs at most the deadline.
# Attachments precede the prompt's words, each in a fence that its content can't close:
#
#     File notes.md:
#     ```
#     content
#     ```
#
#     the user's words

import codecs
import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING
from urllib.parse import unquote

from tokamac.engine.errors import PictureError, TokamacError, access_hint
from tokamac.engine.files import NotRegularError, TooLargeError, exists, expanded, is_dir, is_file, read_bytes
from tokamac.engine.vision.cost import PicturePrice
from tokamac.engine.vision.picture import SUFFIXES, Picture

from ..store.values import PICTURE, Attachment, pictures_of
from ..text import units
from ..text.sanitise import sanitise, sanitise_line

if TYPE_CHECKING:
    from ..backend.processes import ShellOutput

DEADLINE_S = 60.0
LARGEST_CHARACTERS = 4_000_000


class PDFError(TokamacError):
    """The text of a PDF can't be extracted."""


def pdf_text(data: bytes) -> str:
    """Return a PDF's text, a blank line between pages. Raises PDFError."""
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise PDFError(f"extracting its text took more than {DEADLINE_S:g} s", "Attach a part of it.") from None
    try:
        told = json.loads(done.stdout)
    except ValueError:
        raise PDFError(f"reading it failed with exit status {done.returncode}", "It may be damaged.") from None
    if "error" in told:
        raise PDFError(told["error"], "It may be damaged or encrypted.")
    text: str = told["text"]
    if not text.strip():
        raise PDFError("it contains no text, only images", "An OCR program can add the text.")
    return text


def _extract(data: bytes) -> str:
    from pypdf import PdfReader

    pages: list[str] = []
    left = LARGEST_CHARACTERS
    for page in PdfReader(io.BytesIO(data)).pages:
        pages.append(page.extract_text())
        left -= len(pages[-1])
        if left < 0:
            break  # the caller refuses it for its length
    return "\n\n".join(pages)


def main() -> None:
    try:
        told = {"text": _extract(sys.stdin.buffer.read())}
    except Exception as error:  # whatever a foreign file makes of a foreign library is one sentence
        told = {"error": " ".join(f"{error}".split())[:200] or type(error).__name__}
    print(json.dumps(told))


if __name__ == "__main__":
    main()


def fence_for(text: str) -> str:
    """Return a fence longer than any backtick run in ``text``, at least three."""
    return "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))


LONG_PASTE_CHARACTERS = 2_000
LONG_PASTE_LINES = 30  # a longer paste would bury the text around it

_PASTE = "paste"
_PASTED = "pasted text"
_COMMAND = "command"
LONGEST_COMMAND = 80  # characters of a command in the name of its output; the text has all of it
_KINDS = {
    "markdown": frozenset({".md", ".markdown"}),
    "csv": frozenset({".csv", ".tsv"}),
    "pdf": frozenset({".pdf"}),
    "text": frozenset({"", ".txt", ".text", ".log", ".rst"}),
    PICTURE: frozenset(SUFFIXES),
}
_BLOCK = re.compile(
    r"(?:File (?P<file>[^\n]+)|Pasted text (?P<number>[0-9]+)|Shell command (?P<command>[^\n]+)):\n"
    r"(?P<fence>`{3,})\n(?P<text>(?s:.*?))\n(?P=fence)(?:\n\n|\Z)"
)
_NUMBER = re.compile(rf"{_PASTED} ([0-9]+)")


@dataclass(frozen=True, slots=True)
class Draft:
    text: str = ""
    attachments: tuple[Attachment, ...] = ()

    @property
    def whole(self) -> str:
        return whole(self.text, self.attachments)

    @property
    def images(self) -> tuple[Picture, ...]:
        return pictures_of(self.attachments)


def whole(words: str, attachments: Iterable[Attachment]) -> str:
    blocks = [_block(attachment) for attachment in attachments if attachment.kind != PICTURE]
    return "\n\n".join([*blocks, words] if words else blocks)


def picture_attachment(typed: str, path: Path) -> Attachment:
    """Return a picture's file as an attachment. Raises AttachError."""
    try:
        found = Picture.of(path, sanitise_line(typed))
    except PictureError as error:
        raise AttachError(error.message, error.hint) from error
    return Attachment(found.name, found.encoded, PICTURE)


def pasted_picture(data: bytes) -> Attachment:
    """Return the clipboard's picture, named by its hash: pasted again, it is the same. Raises AttachError."""
    try:
        found = Picture.of(data, f"clipboard-{hashlib.sha256(data).hexdigest()[:6]}.png")
    except PictureError as error:
        raise AttachError(error.message, error.hint) from error
    return Attachment(found.name, found.encoded, PICTURE)


def dropped(text: str) -> str | None:
    """Return the picture's path that a terminal writes when a file is dropped on it; None for other text."""
    try:
        words = shlex.split(text.strip())
    except ValueError:
        return None
    path = unquote(words[0].removeprefix("file://")) if len(words) == 1 and words[0].startswith("file://") else None
    path = words[0] if path is None and len(words) == 1 else path
    absolute = path is not None and PurePath(path).is_absolute()
    return path if absolute and path and kind_of(path) == PICTURE and is_file(path) else None


def size_text(attachment: Attachment, tokens: int | None, price: PicturePrice | None) -> str:
    if attachment.kind == PICTURE:
        return units.size(picture_bytes(attachment)) if price is None else price_text(price)
    if tokens is None:
        return f"{units.count(len(attachment.text))} characters"
    return f"{units.count(tokens)} token{'' if tokens == 1 else 's'}"


def price_text(price: PicturePrice) -> str:
    """``3,840 × 2,160, seen at 1,568 × 882, 1,196 tokens, about 2.1 s``."""
    size, seen = (f"{width:,} × {height:,}" for width, height in (price.size, price.seen))
    scaled = "" if size == seen else f", seen at {seen}"
    takes = "" if price.seconds is None else f", about {units.seconds(price.seconds)}"
    return f"{size}{scaled}, {units.count(price.tokens)} tokens{takes}"


def picture_bytes(attachment: Attachment) -> int:
    return len(attachment.text) * 3 // 4


def apart(message: str) -> Draft:
    """Inverse of ``whole``; a text that merely looks like an attachment counts as one."""
    found: list[Attachment] = []
    at = 0
    while block := _BLOCK.match(message, at):
        at = block.end()
        if block["command"] is not None:
            found.append(Attachment(f"!{block['command']}", block["text"], _COMMAND))
        elif block["number"] is not None:
            found.append(Attachment(f"{_PASTED} {block['number']}", block["text"], _PASTE))
        else:
            found.append(Attachment(block["file"], block["text"], kind_of(block["file"])))
    return Draft(message[at:], tuple(found))


def joined(drafts: Sequence[Draft]) -> Draft:
    words = "\n\n".join(draft.text for draft in drafts if draft.text)
    return Draft(words, tuple(attachment for draft in drafts for attachment in draft.attachments))


def attachment(name: str, text: str) -> Attachment:
    shown = sanitise_line(name)
    return Attachment(shown, sanitise(text).strip("\n"), kind_of(shown))


def is_long(text: str) -> bool:
    return len(text) > LONG_PASTE_CHARACTERS or text.count("\n") >= LONG_PASTE_LINES


def pasted(text: str, beside: Iterable[Attachment]) -> Attachment:
    """Return a sanitized pasted text as an attachment with a name unused in ``beside``."""
    numbers = [int(number[1]) for each in beside if (number := _NUMBER.fullmatch(each.name))]
    return Attachment(f"{_PASTED} {max(numbers, default=0) + 1}", sanitise(text).strip("\n"), _PASTE)


def output_of(output: "ShellOutput") -> Attachment:
    command = sanitise(output.command).strip()
    name = sanitise_line(command)
    name = name if len(name) <= LONGEST_COMMAND else f"{name[: LONGEST_COMMAND - 1]}…"
    how = f"[{output.how}]" if output.how else ""
    lines = (f"$ {command}", output.text or "[no output]", how)
    return Attachment(f"!{name}", "\n".join(filter(None, lines)), _COMMAND)


def shell_command(text: str) -> str | None:
    """Return the shell command after a leading ``!``; None for a prompt."""
    return text[1:].strip() if text.startswith("!") else None


def unescaped(prompt: str) -> str:
    """Remove the backslash that escapes a prompt's leading ``!``."""
    return prompt[1:] if prompt.startswith("\\!") else prompt


def kind_of(name: str) -> str:
    """Return ``markdown``, ``csv``, ``pdf``, ``text``, ``picture`` or else ``code``."""
    suffix = PurePath(name).suffix.lower()
    return next((kind for kind, suffixes in _KINDS.items() if suffix in suffixes), "code")


def _block(attachment: Attachment) -> str:
    fence = fence_for(attachment.text)
    name = sanitise_line(attachment.name)
    if attachment.kind == _PASTE and _NUMBER.fullmatch(name):
        title = name.capitalize()
    elif attachment.kind == _COMMAND and name.startswith("!"):
        title = f"Shell command {name[1:]}"
    else:
        title = f"File {name}"
    return f"{title}:\n{fence}\n{attachment.text}\n{fence}"


LARGEST_TEXT_BYTES = 4_000_000  # about a million tokens: no context holds more
LARGEST_PDF_BYTES = 64_000_000  # most of a PDF is pictures and fonts
_FILE_KINDS = "Text, code, Markdown, CSV, PDF and pictures can be attached."


class AttachError(TokamacError):
    """A file can't be attached."""


# A path and a range of lines, both included: `main.py:10-40`.
LINES = re.compile(r"(.+):([1-9][0-9]{0,8})-([1-9][0-9]{0,8})")
MOST_IN_FOLDER = 200
LARGEST_FOLDER_CHARACTERS = 2_000_000
_GIT_S = 10.0


def read_named(typed: str, folder: Path) -> Attachment:
    """Read a file, a line range (``main.py:10-40``) or a folder's text files. Raises AttachError."""
    if (ranged := LINES.fullmatch(typed)) and not exists(folder / expanded(typed)):
        return _lines(read_file(ranged[1], folder), int(ranged[2]), int(ranged[3]))
    if is_dir(folder / expanded(typed)):
        return read_folder(typed, folder)
    return read_file(typed, folder)


def _lines(whole: Attachment, first: int, last: int) -> Attachment:
    """Return lines ``first`` to ``last``, 1-based, inclusive."""
    lines = whole.text.split("\n")
    if not first <= last or first > len(lines):
        raise AttachError(f"{whole.name} has lines 1 to {len(lines)}", "Write the range as FILE:FIRST-LAST.")
    last = min(last, len(lines))
    return Attachment(f"{whole.name}:{first}-{last}", "\n".join(lines[first - 1 : last]), whole.kind)


def read_folder(typed: str, folder: Path) -> Attachment:
    """Return all text files below a folder as one attachment. Raises AttachError."""
    # Skips hidden, git-ignored and non-text files; limits the number of files and characters.
    root, name = folder / expanded(typed), sanitise_line(typed.rstrip("/.") or typed)
    found: list[Attachment] = []
    for path in _listed(root):
        with suppress(AttachError):
            if kind_of(path) not in ("pdf", PICTURE):
                found.append(read_file(path, root))
        if len(found) > MOST_IN_FOLDER or sum(len(each.text) for each in found) > LARGEST_FOLDER_CHARACTERS:
            most = f"{MOST_IN_FOLDER} text files or {LARGEST_FOLDER_CHARACTERS // 10**6} MB"
            raise AttachError(f"{name} holds more than {most}", "Attach a folder inside it, or its files one by one.")
    if not found:
        raise AttachError(f"There are no text files in {name}", "Attach a file by its path.")
    files = "1 file" if len(found) == 1 else f"{len(found)} files"
    return Attachment(f"{name}/ ({files})", whole("", found), "text")


def _listed(root: Path) -> list[str]:
    """List files below ``root`` by git where it works, else all that aren't hidden."""
    command = [
        "git",
        "-C",
        str(root),
        "-c",
        "core.fsmonitor=false",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_S, check=False)
        listed = done.stdout.decode("utf-8", "replace").split("\0") if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired):
        listed = None
    if listed is None:
        listed = []
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(each for each in folders if not each.startswith(".") and each not in _DEPENDENCIES)
            listed += [os.path.relpath(Path(folder, each), root) for each in files if not each.startswith(".")]
            if len(listed) > 50 * MOST_IN_FOLDER:
                break
    inside = (each for each in listed if each and not any(part.startswith(".") for part in PurePath(each).parts))
    return sorted(each for each in inside if not (root / each).is_symlink())


_DEPENDENCIES = frozenset({"__pycache__", "node_modules", "target", "venv"})


def read_file(typed: str, folder: Path) -> Attachment:
    """Return a file as an attachment; a PDF may take seconds.

    Raises:
        AttachError: missing, unreadable, not a regular file, too large, or neither text nor a PDF with text.
    """
    if kind_of(typed) == PICTURE:
        return picture_attachment(typed, folder / expanded(typed))
    name = sanitise_line(typed)
    is_pdf = kind_of(typed) == "pdf"
    try:
        path = folder / expanded(typed)
        data = _read(path, name, LARGEST_PDF_BYTES if is_pdf else LARGEST_TEXT_BYTES)
        text = pdf_text(data) if is_pdf else decoded(data, name)
    except FileNotFoundError:
        raise AttachError(f"There is no file {name}", "Check its path.") from None
    except IsADirectoryError:
        raise AttachError(f"{name} is a folder", "Attach the files in it one by one.") from None
    except (OSError, RuntimeError, ValueError) as error:  # no such home, a name with a NUL
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        hint = "Check its permissions."
        hint = access_hint(error, hint) if isinstance(error, OSError) else hint
        raise AttachError(f"{name} can't be read: {reason}", hint) from error
    except PDFError as error:
        raise AttachError(f"{name} can't be attached: {error.message}", error.hint) from error
    if len(text) > LARGEST_TEXT_BYTES:
        raise AttachError(
            f"{name} holds {len(text):,} characters", "That is more than any context holds: attach a part of it."
        )
    return attachment(typed, text)


def _read(path: Path, name: str, most: int) -> bytes:
    try:
        return read_bytes(path, most)
    except NotRegularError as error:
        raise AttachError(f"{name} is not a regular file", _FILE_KINDS) from error
    except TooLargeError as error:
        size = path.stat().st_size / 1e6
        raise AttachError(f"{name} has {size:,.1f} MB; the limit is {most // 10**6}", "Attach a part of it.") from error


def decoded(data: bytes, name: str) -> str:
    """Decode UTF-8, or UTF-16 with a BOM. Raises AttachError for other data."""
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    binary = b"\0" in data and encoding != "utf-16"
    try:
        text = "" if binary else data.decode(encoding)
    except UnicodeDecodeError:
        raise AttachError(f"{name} is not UTF-8 text", "If it is text, save it as UTF-8.") from None
    if binary or "\0" in text:
        raise AttachError(f"{name} is a binary file", _FILE_KINDS)
    return text
