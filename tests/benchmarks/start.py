"""Section: how soon something is there."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.plan import BenchError, Plan
from tests.benchmarks.report import Section, at_most, holds
from tests.benchmarks.screen import PROMPT_SHOWN
from tests.benchmarks.stats import series
from tests.benchmarks.terminal import Terminal

HEAVY = ("mlx", "mlx_lm", "textual", "transformers", "numpy")
IMPORTED = re.compile(r"^import time:[^|]*\|[^|]*\|\s*([\w.]+)$", re.MULTILINE)


def measure(plan: Plan) -> Section:
    """Time ``tokamac --version`` and the chat's first paint, as whole processes."""
    command, runs = tokamac(), plan.count(20, 3)
    _version_s(command)  # once, so that the files are in the system's cache
    heavy = imports([*command, "--version"]) & set(HEAVY)
    first_paint_s(command, plan.model)
    rows = [
        at_most("`tokamac --version`", series([_version_s(command) for _ in range(runs)]), 0.15, "s"),
        holds("of mlx and textual, it imports", ", ".join(sorted(heavy)) or "none", "none", met=not heavy),
        at_most(
            "first paint of the chat",
            series([first_paint_s(command, plan.model) for _ in range(plan.rounds)]),
            0.7,
            "s",
        ),
    ]
    how = (
        f"Wall time of the whole process (`{_shown(command)}`), after one run to warm the system's file cache. The "
        "imports are those that `python -X importtime` lists for the same command. First paint: from the start of "
        "the process in a pseudo-terminal until the prompt has been drawn; the model loads after that."
    )
    return Section("Start", rows, how)


def tokamac() -> list[str]:
    """Return the installed command, or what it would run where only the source tree is there."""
    script = Path(sys.executable).with_name("tokamac")
    return [str(script)] if script.exists() else [sys.executable, "-m", "tokamac.app.cli"]


def imports(command: Sequence[str]) -> set[str]:
    """Return the top-level names that a Python program imports."""
    program = command if command[0] == sys.executable else [sys.executable, *command]
    traced = [program[0], "-X", "importtime", *program[1:]]
    run = subprocess.run(traced, capture_output=True, text=True, check=True)
    found = {name.split(".")[0] for name in IMPORTED.findall(run.stderr)}
    if "tokamac" not in found:
        raise BenchError("the list of imports was not understood: it lacks tokamac itself")
    return found


def first_paint_s(command: Sequence[str], model: str) -> float:
    """Open the chat in a home of its own; return the seconds until the prompt had been drawn."""
    with tempfile.TemporaryDirectory() as home, Terminal([*command, "chat", model], at_home(Path(home))) as terminal:
        return terminal.wait_for(PROMPT_SHOWN, 30)


def at_home(home: Path) -> dict[str, str]:
    """Return the environment of a program whose user's folders are all below ``home``, the chats in ``home/chats``."""
    folders = ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "TOKAMAC_DATA_DIR")
    return os.environ | dict.fromkeys(folders, str(home))


def _version_s(command: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run([*command, "--version"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def _shown(command: Sequence[str]) -> str:
    return " ".join([Path(command[0]).name, *command[1:], "--version"])
