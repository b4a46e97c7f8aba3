"""External programs: clipboard tool, browser, editor."""

# Without a clipboard tool, text goes to the terminal (OSC 52) and to a file. The editor is $VISUAL, $EDITOR or an
# installed one; its temporary file is removed afterwards.

import base64
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tokamac.engine.files import read_bytes, read_text

from ..backend.client import how_ended
from ..text.sanitise import safe_link, sanitise

TOOLS: tuple[tuple[str, ...], ...] = (("pbcopy",), ("wl-copy",))
# What writes the clipboard's picture. AppleScript writes data as text: «data PNGf89504E47…».
PASTES = {
    "osascript": ("osascript", "-e", "the clipboard as «class PNGf»"),
    "wl-paste": ("wl-paste", "-t", "image/png"),
    "xclip": ("xclip", "-selection", "clipboard", "-t", "image/png", "-o"),
}
APPLE_DATA = re.compile("«data PNGf((?:[0-9A-F]{2})+)»".encode())
FILE = "copied.txt"
# What pbcopy must find: it reads its input in the encoding of the locale, and without one in MacRoman.
UTF8 = {"LC_ALL": "", "LC_CTYPE": "UTF-8"}
OPENING_S = 10.0
PATIENCE_S = 2.0  # a tool that takes longer hangs


class NotTakenError(Exception):
    """No program accepted the text or address; the message is a clause."""


def copy_text(text: str, folder: Path, terminal: Callable[[str], object] | None = None, *, known: bool = False) -> str:
    """Copy with the system's tool, else to a file in ``folder``; return a sentence on which.

    Args:
        folder: private to the user.
        terminal: sends OSC 52. Terminals don't confirm it, so the file is written as well.
    """
    file = folder / FILE
    try:
        return f"Copied {size_of(text)} ({copy_by_tool(text)})."
    except NotTakenError as error:
        problem = f"Not copied ({error})"
    if terminal is not None:
        terminal(text)
    try:
        write_private(file, text)
    except OSError as error:
        saved = f"{file} can't be written: {error.strerror}."
    else:
        if known and terminal is not None:
            return f"Copied {size_of(text)}."
        quits = "Nothing to paste? Until you quit, the text is also in"
        saved = f"{quits} {file}." if terminal is not None else f"The text, {size_of(text)}, is in {file}."
    if terminal is not None:
        return f"Copied {size_of(text)}. {saved}"
    return f"{problem}. {saved}"


def forget_copied(folder: Path) -> None:
    with suppress(OSError):
        (folder / FILE).unlink(missing_ok=True)


def copy_by_tool(text: str) -> str:
    """Return the tool's name. Raises NotTakenError."""
    if os.environ.get("SSH_CONNECTION"):
        raise NotTakenError("over SSH, a tool would copy on the remote machine")
    tool = _tool()
    if tool is None:
        raise NotTakenError("this system has no pbcopy, and no wl-copy under Wayland")
    quiet = subprocess.DEVNULL
    environment = {**os.environ, **UTF8} if tool[0] == "pbcopy" else None
    try:
        subprocess.run(
            tool, input=text.encode(), check=True, timeout=PATIENCE_S, stdout=quiet, stderr=quiet, env=environment
        )
    except subprocess.TimeoutExpired:
        raise NotTakenError(f"{tool[0]} did not finish within {PATIENCE_S:g} s") from None
    except subprocess.CalledProcessError as error:
        raise NotTakenError(f"{tool[0]} failed with exit status {error.returncode}") from None
    except OSError as error:
        raise NotTakenError(f"{tool[0]} can't be run: {error.strerror}") from None
    return tool[0]


def copied_picture() -> bytes:
    """Return the PNG in the clipboard. Raises NotTakenError."""
    if os.environ.get("SSH_CONNECTION"):
        raise NotTakenError("over SSH, the clipboard is the other machine's")
    wanted = {"wl-paste": "WAYLAND_DISPLAY", "xclip": "DISPLAY"}
    name = next((each for each in PASTES if wanted.get(each, "PATH") in os.environ and shutil.which(each)), None)
    if name is None:
        raise NotTakenError("this system has no osascript, wl-paste or xclip")
    try:
        done = subprocess.run(
            PASTES[name], capture_output=True, timeout=OPENING_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise NotTakenError(f"{name} did not finish within {OPENING_S:g} s") from None
    except OSError as error:
        raise NotTakenError(f"{name} can't be run: {error.strerror}") from None
    data = done.stdout
    if name == "osascript":
        told = APPLE_DATA.fullmatch(data.strip())
        data = b"" if told is None else bytes.fromhex(told[1].decode("ascii"))
    if done.returncode or not data:
        raise NotTakenError("the clipboard holds no picture")
    return data


def open_address(address: str) -> None:
    """Raises NotTakenError."""
    if not safe_link(address):
        raise NotTakenError("only web and mail addresses can be opened")
    if os.environ.get("SSH_CONNECTION"):
        raise NotTakenError("over SSH, it would open on the remote machine")
    program = "open" if sys.platform == "darwin" else "xdg-open"
    if program == "xdg-open" and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        raise NotTakenError("there is no desktop here")  # a browser for terminals would draw over the chat
    quiet = subprocess.DEVNULL
    try:
        subprocess.run((program, address), check=True, timeout=OPENING_S, stdin=quiet, stdout=quiet, stderr=quiet)
    except subprocess.TimeoutExpired:
        return  # it waits for the browser that it has started
    except (OSError, subprocess.CalledProcessError):
        raise NotTakenError(f"{program} can't open it") from None


def write_private(file: Path, text: str) -> None:
    """Replace ``file`` with owner-only permissions. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # Anew, so that no link is followed and no older file's rights are kept.
    file.unlink(missing_ok=True)
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8", newline="") as opened:
        opened.write(text)


def size_of(text: str) -> str:
    return f"{len(text):,} character{'' if len(text) == 1 else 's'}"


def through_tmux(text: str) -> str:
    """Return the tmux passthrough sequence, which needs ``allow-passthrough``."""
    sequence = f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\a"
    return "\x1bPtmux;" + sequence.replace("\x1b", "\x1b\x1b") + "\x1b\\"


def _tool() -> Sequence[str] | None:
    if "WAYLAND_DISPLAY" not in os.environ:
        return TOOLS[0] if shutil.which("pbcopy") else None
    return next((tool for tool in TOOLS if shutil.which(tool[0])), None)


FALLBACKS = ("nano", "vi")  # editors where none is set, as on a Mac

# Programs that open a window and exit at once unless told to wait: the first of these flags is added where none is
# given.
WAIT_FLAGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("code", "code-insiders", "codium", "cursor", "windsurf", "subl", "zed", "zeditor", "mate", "bbedit", "atom"),
        ("--wait", "-w"),
    ),
    **dict.fromkeys(("gvim", "mvim"), ("--nofork", "-f")),
    "open": ("-W", "--wait-apps"),
}


LARGEST_BYTES = 64_000_000  # of what an editor saved: no context holds more


class EditorError(Exception):
    """There is no editor, or it failed; the message says which and what to do."""


def editor_command(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the user's editor as a command that waits. Raises EditorError if none."""
    given = (environment.get("VISUAL") or environment.get("EDITOR") or "").strip()
    if not given:
        found = next((name for name in FALLBACKS if shutil.which(name, path=environment.get("PATH"))), None)
        if found is None:
            raise EditorError("No editor is set: set EDITOR, for example to vi or nano, and restart tokamac.")
        return [found]
    try:
        command = shlex.split(given)
    except ValueError as error:
        raise EditorError(f"EDITOR is {given!r}, which is not a valid command: {error}.") from None
    return _waiting(command)


def _waiting(command: list[str]) -> list[str]:
    flags = WAIT_FLAGS.get(Path(command[0]).name, ()) if command else ()
    if not flags or not set(flags).isdisjoint(command):
        return command
    return [command[0], flags[0], *command[1:]]


def edit_text(command: Sequence[str], text: str) -> str:
    """Return the edited, sanitized text. Raises EditorError, naming the file a failed editor leaves."""
    handle, name = tempfile.mkstemp(prefix="tokamac-", suffix=".md")
    file = Path(name)
    keep = False
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        status = subprocess.run([*command, name], check=False).returncode
        keep = read_bytes(file, LARGEST_BYTES) != text.encode()
        if status:
            saved = f" What it saved is in {name}." if keep else ""
            raise EditorError(f"{command[0]} {how_ended(status)}; the prompt is unchanged.{saved}")
        written = sanitise(read_text(file, LARGEST_BYTES).rstrip("\n"))
        keep = False
        return written
    except UnicodeDecodeError:
        raise EditorError(f"What {command[0]} saved in {name} is not UTF-8; the prompt is unchanged.") from None
    except OSError as error:
        raise EditorError(f"{command[0]} could not be used: {error}.") from error
    finally:
        if not keep:
            file.unlink(missing_ok=True)
