"""Machine requirements of MLX's wheels, and the remedy where one is not met."""

# Also a script for any Python from 3.6 on, with nothing installed, so that it can run before pip:
# ``python3 -I engine/requirements.py`` ends with one line on stderr and status 1 if something is missing.

# Hence the old syntax. The calls that ask macOS are tested on recorded answers only.

import platform
import shlex
import subprocess
import sys

OLDEST_PYTHON = (3, 11)
# The newest that all dependencies have wheels for; a newer one is not refused, since pip may build what is missing.
NEWEST_PYTHON = (3, 14)

OLDEST_MACOS = (14,)  # MLX's oldest wheel for macOS

GET_PYTHON = (
    "Install one with `brew install python`, from python.org, or with `uv python install 3.13`, and try again; "
    "or name one: make chat PYTHON=/path/to/python3."
)


def unmet(system: str, machine: str, translated: bool, macos: str, python: "tuple[int, ...]") -> str:
    """Return in one line why Tokamac can't be installed on such a machine, and the remedy; "" if it can."""
    if tuple(python) < OLDEST_PYTHON:
        return f"Tokamac needs Python 3.11 or later, and this is {'.'.join(map(str, python))}. {GET_PYTHON}"
    if system == "darwin":
        return _unmet_on_mac(machine, translated, macos)
    if not system.startswith("linux"):
        return f"Tokamac needs macOS or Linux: MLX has no build for {system}. On Windows use WSL 2."
    return ""


def _unmet_on_mac(machine: str, translated: bool, macos: str) -> str:
    if translated:
        return "This Python is an Intel one that Rosetta translates, and MLX needs an arm64 one. " + GET_PYTHON
    if machine != "arm64":
        return "MLX needs Apple silicon (M1 or later), and this Mac has an Intel processor. Tokamac can't run on it."
    major = macos.split(".", 1)[0]
    if major.isdigit() and (int(major),) < OLDEST_MACOS:
        return f"MLX needs macOS 14 or later, and this is macOS {macos}. Update it in System Settings › General."
    return ""


def newer_python(python: "tuple[int, ...]") -> str:
    if tuple(python[:2]) <= NEWEST_PYTHON:
        return ""
    return f"Python {python[0]}.{python[1]} is newer than 3.14: some packages may have no wheel for it yet, and pip builds them."


def pip_install(*what: str) -> str:
    """Return the command that installs into this Python: ``pip`` on the PATH is often another one's."""
    return " ".join(map(shlex.quote, (sys.executable, "-m", "pip", "install", *what)))


def unmet_here() -> str:
    mac = sys.platform == "darwin"
    translated = mac and _sysctl("sysctl.proc_translated") == "1"
    # Not platform.mac_ver(): a Python built with an older SDK is told "16.0" on macOS 26 (python/cpython#135675).
    macos = _sysctl("kern.osproductversion") if mac else ""
    return unmet(sys.platform, platform.machine(), translated, macos, tuple(sys.version_info[:3]))


def _sysctl(name: str) -> str:
    try:
        done = subprocess.run(  # noqa: UP022
            ["/usr/sbin/sysctl", "-n", name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("ascii", "replace").strip()


if __name__ == "__main__":
    lacking = unmet_here()
    sys.stderr.writelines(line + "\n" for line in (newer_python(tuple(sys.version_info[:3])), lacking) if line)
    sys.exit(1 if lacking else 0)
