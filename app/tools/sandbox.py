"""The tool that runs a command: its limits, and the sandbox of the system, where there is one."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tokamac.engine.options import ToolSpec

from ..backend.processes import ShellCommand, ShellEnding, ShellError, ShellOutput
from ..text.sanitise import reveal, sanitise_line
from .builtin import SECRET_ENDS, SECRET_NAMES
from .calls import LONGEST_SHOWN, Furthest, Line, Preview, ToolError

# In the sandbox a command sees the system's programs, read-only, and the chat's folder, which it may write. It has no
# network, no home, no other process and none of the user's environment. Names that begin with a dot are read-only
# (a Git hook would run outside), and those that usually hold secrets are empty.

USUAL_S, MOST_S = 60, 600
HEAD, TAIL = 14_000, 8_000  # characters of an output that are kept
PROBE_S = 5.0
LEVELS = 3  # of folders in which hidden names are guarded
SHELL = "/bin/sh"
PASSED_ON = ("LANG", "LC_ALL", "LC_CTYPE", "PATH", "TZ")  # no token is in them
READABLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt")
READABLE_ETC = (
    "alternatives", "ca-certificates", "group", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types",
    "nsswitch.conf", "passwd", "ssl/certs", "ssl/openssl.cnf",
)  # fmt: skip
SECRETS = frozenset(
    {".aws", ".azure", ".config", ".docker", ".gnupg", ".kube", ".local", ".netrc", ".npmrc", ".password-store", ".pypirc",
     ".ssh"}
)  # fmt: skip

Kind = Literal["bwrap", "sandbox-exec", ""]

# In Apple's profile language. Paths are parameters, so none can end a string.
MAC_PROFILE = """(version 1)
(deny default)
(allow process-exec process-fork)
(allow signal (target same-sandbox))
(allow sysctl-read)
(allow mach-lookup (global-name "com.apple.system.opendirectoryd.libinfo"))
(allow file-read-metadata)
(allow file-read* (literal "/") (subpath "/usr") (subpath "/bin") (subpath "/sbin") (subpath "/System") (subpath "/Library")
  (subpath "/opt") (subpath "/dev") (subpath "/private/etc") (subpath "/private/var/db/timezone")
  (subpath "/private/var/select") (subpath "/Applications/Xcode.app"))
(deny file-read* (subpath "/Library/Keychains"))
(allow file-write* (literal "/dev/null") (literal "/dev/tty"))
(allow file-read* file-write* (subpath (param "FOLDER")) (subpath (param "TEMPORARY")))
(deny file-write* (regex #"/\\.[^/]"))
(deny file-read* (regex #"/\\.(env|ssh|aws|netrc|gnupg|npmrc|pypirc)") (regex #"\\.(pem|key|p12|pfx|kdbx)$"))
(deny network*)
"""


@cache
def sandbox() -> Kind:
    """Return which sandbox works here; one is tried once."""
    if sys.platform == "darwin":
        return "sandbox-exec" if shutil.which("sandbox-exec") else ""
    if (program := shutil.which("bwrap")) is None:
        return ""
    probe = [program, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    try:
        done = subprocess.run(probe, capture_output=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "bwrap" if done.returncode == 0 else ""  # else user namespaces are forbidden


def bwrap_command(folder: Path, readable: Sequence[Path], command: str) -> list[str]:
    made = ["bwrap", *["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]]
    for each in [*READABLE, *(f"/etc/{name}" for name in READABLE_ETC)]:
        made += ["--ro-bind-try", each, each]
    made += [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--tmpfs",
        "/tmp",
        "--setenv",
        "HOME",
        "/tmp",
        "--setenv",
        "TMPDIR",
        "/tmp",
    ]
    for other in readable:
        made += ["--ro-bind-try", str(other), str(other)]
    made += ["--bind", str(folder), str(folder)]
    for path in _guarded(folder):
        if not is_secret(path.name):
            made += ["--ro-bind", str(path), str(path)]
        else:
            made += ["--tmpfs", str(path)] if path.is_dir() else ["--ro-bind", "/dev/null", str(path)]
    return [*made, "--chdir", str(folder), "--", SHELL, "-c", command]


def _guarded(folder: Path, levels: int = LEVELS) -> Iterator[Path]:
    """Yield what a command may not write, or not see. A link is nothing of itself."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            continue
        if path.name.startswith(".") or is_secret(path.name):
            yield path
        elif levels > 1 and path.is_dir():
            with suppress(OSError):
                yield from _guarded(path, levels - 1)


def is_secret(name: str) -> bool:
    low = name.lower()
    return low in SECRETS or low.startswith(".env") or low in SECRET_NAMES or low.endswith(SECRET_ENDS)


def mac_command(folder: Path, temporary: str, command: str) -> list[str]:
    parameters = [f"-DFOLDER={folder}", f"-DTEMPORARY={temporary}"]
    return ["sandbox-exec", *parameters, "-p", MAC_PROFILE, SHELL, "-c", command]


class RunCommand:
    spec = ToolSpec(
        "run",
        "Run a shell command in the user's folder, and return what it writes. The user sees the command first.",
        {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The command, for sh."},
                "seconds": {
                    "type": "integer",
                    "description": f"How long it may take; {USUAL_S} where nothing is said.",
                },
            },
            "required": ["command"],
        },
    )

    def __init__(self, folders: Sequence[Path], kind: Kind | None = None) -> None:
        self._folder, self._others = (folders[0] if folders else None), folders[1:]
        self._kind = kind
        self._running: set[ShellCommand] = set()
        self._lock = threading.Lock()

    @property
    def kind(self) -> Kind:
        """The sandbox; none where the folder holds the home, whose hidden files it would have to give."""
        home = Path.home().resolve()
        if self._folder is None or home.is_relative_to(self._folder):
            return ""
        return sandbox() if self._kind is None else self._kind

    @property
    def furthest(self) -> Furthest:
        return "chat" if self.kind else "once"

    def preview(self, arguments: Mapping[str, Any]) -> Preview:
        command, seconds = self._read(arguments)
        if len(command) > LONGEST_SHOWN:
            raise ToolError(f"a command has at most {LONGEST_SHOWN:,} characters, so that the user can look it over")
        first, *rest = reveal(command).split("\n")
        lines: list[Line] = [("!", f"run  {first}"), *(("!", f"   │ {line}") for line in rest)]
        output = f"the model gets {HEAD + TAIL:,} characters of its output"
        lines.append(("", f"In {sanitise_line(str(self._folder))}, for {seconds} s at most; {output}."))
        if self.kind:
            lines.append(("note", f"Sandboxed by {self.kind}: it can write in this folder alone, and has no network."))
        else:
            lines.append(("warning", "Not sandboxed: it can do all that you can. Every call asks."))
        return Preview(tuple(lines), self.furthest, "command")

    def run(self, arguments: Mapping[str, Any]) -> str:
        command, seconds = self._read(arguments)
        with tempfile.TemporaryDirectory() as made:
            temporary = str(Path(made).resolve())
            env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
            env |= {"TMPDIR": temporary, "HOME": temporary} if self.kind else {"HOME": str(Path.home())}
            program = self._program(command, temporary)
            output = self._output(
                ShellCommand(command, self._folder or Path(), deadline_s=seconds, program=program, env=env)
            )
        text, left = output.text or "(no output)", len(output.text) - HEAD - TAIL
        if left > 0:
            text = f"{text[:HEAD]}\n[… {left:,} more characters were left out …]\n{text[-TAIL:]}"
        how = f"ended after {seconds} s" if output.ending is ShellEnding.DEADLINE else output.how
        return f"{text}\n[{how}]" if how else text

    def _output(self, running: ShellCommand) -> ShellOutput:
        with self._lock:
            self._running.add(running)
        try:
            return running.run()
        except ShellError as error:
            raise ToolError(error.one_line()) from error
        finally:
            with self._lock:
                self._running.discard(running)

    def stop(self) -> None:
        with self._lock:
            for each in self._running:
                each.stop()

    def _program(self, command: str, temporary: str) -> list[str]:
        assert self._folder is not None
        if self.kind == "bwrap":
            return bwrap_command(self._folder, self._others, command)
        if self.kind == "sandbox-exec":
            return mac_command(self._folder, temporary, command)
        return [SHELL, "-c", command]

    def _read(self, arguments: Mapping[str, Any]) -> tuple[str, int]:
        command, seconds = arguments["command"].strip(), arguments.get("seconds", USUAL_S)
        if not command or "\0" in command:
            raise ToolError("there is no command to run")
        if self._folder is None or not self._folder.is_dir():
            raise ToolError("the user's folder is gone")
        if not 1 <= seconds <= MOST_S:
            raise ToolError(f"seconds is 1 to {MOST_S}")
        return command, seconds
