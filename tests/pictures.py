"""Take the documents' pictures: ``python -m tests.pictures [NAME …]`` writes assets/pictures/*.svg.

The real app and its real child process, driven by Textual's pilot: with the embedded model on this machine (``explain``,
``steps``, ``versions``), with a real model (``real``: `make models`), and, for ``mac``, with a scripted engine that plays a Mac.
What it plays is arithmetic, and the documents say so beneath the picture. The user's folders are not read: the pictures have no
models, chats or measurements but those of the run.
"""

import asyncio
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from tests.real.models import SMOLLM2
from tests.scripted_engine import MAC_MODEL, SCRIPTED
from tokamac.app.backend.protocol import Figures, Loaded, WhatIf
from tokamac.app.chat import commands
from tokamac.app.chat.controller import first_question
from tokamac.app.chat.start import ChatOptions
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.settings import Settings
from tokamac.app.settings import save as save_settings
from tokamac.app.tui.app import TokamacApp
from tokamac.app.tui.run import build
from tokamac.app.tui.screens.explain import StepsScreen
from tokamac.app.tui.screens.versions import VersionsScreen
from tokamac.engine import Sampling

PICTURES = Path(__file__).parent.parent / "assets" / "pictures"
# How long an idle engine may take to measure this machine's latency with the model, and how often it is asked for it.
MEASURED_S, LOOK_S = 120.0, 1.0
DRAWN_S = 0.5
# The theme that a terminal's own colours don't change: the pictures look the same whoever takes them.
THEME = "tokamac-dark"
QUESTIONS = ("Why is decode memory-bound?", "What does --kv-bits 8,4 do?")
REAL_MODEL, REVISION = "you/SmolLM2-135M-Instruct-4bit", "0" * 40
CONVERTED = SMOLLM2.converted  # while home is still the user's
CONVERSATION = ("What is the capital of France?", "Write three short sentences about it.")
SPOKEN = ("real",)  # of a conversation with a real model
PLAYED = ("mac",)  # pictures that a scripted engine plays
REAL = ("explain", "steps", "versions")  # pictures of what the embedded model does on this machine
STEP = 6  # how far from a reply's first step to the one that is shown


async def idle(app: TokamacApp, pilot: Pilot[Any]) -> None:
    """Wait until the engine is ready and nothing runs."""
    while app.chat.session.engine.phase is not EnginePhase.IDLE:
        await asyncio.sleep(0.05)
        if app.chat.session.engine.phase is EnginePhase.FAILED and app.chat.session.engine.problem:
            raise RuntimeError(app.chat.session.engine.problem)
    await asyncio.sleep(0.8)  # the screen's own timers
    await pilot.pause()


async def measured(app: TokamacApp) -> None:
    """Wait until this machine's latency with the model is known, so that the pictures show an expected speed."""
    session, what_ifs = app.chat.session, app.chat.what_ifs
    told: list[WhatIf] = []

    def hear(event: WhatIf | Loaded) -> None:
        if isinstance(event, WhatIf):
            told.append(event)

    what_ifs.listeners.append(hear)
    began_s = time.monotonic()
    while not (told and _asked(told[-1]).expected_tps is not None):
        if time.monotonic() - began_s > MEASURED_S:
            why = _asked(told[-1]).reason if told else "nothing was answered"
            raise RuntimeError(
                f"no speed is expected after {MEASURED_S:g} s: {why}. What is timed on a busy machine is not kept."
            )
        what_ifs.ask(first_question(session, session.engine.load.model))
        await asyncio.sleep(LOOK_S)
    what_ifs.listeners.remove(hear)


def _asked(event: WhatIf) -> Figures:
    """Return the figures of the case that was asked about. Raises RuntimeError where it could not be told."""
    if event.answer is None:
        raise RuntimeError(event.error)
    return next(case.figures for case in event.answer.cases if case.change == "as asked")


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait for what takes the engine a while."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > MEASURED_S:
            raise RuntimeError(f"not within {MEASURED_S:g} s: {what}")
        await asyncio.sleep(DRAWN_S)


@contextmanager
def nobody(folder: Path) -> Iterator[None]:
    """Be a user who has nothing yet: ``folder`` is home, and no variable of ours leads elsewhere."""
    ours = [name for name in os.environ if name.startswith(("XDG_", "HF_", "TOKAMAC_"))]
    before = {name: os.environ.pop(name) for name in ours} | {"HOME": os.environ["HOME"]}
    os.environ["HOME"] = str(folder)
    try:
        yield
    finally:
        os.environ.update(before)


def keep_real_model(home: Path) -> None:
    """Put the converted model into the hub's cache of ``home``: a picture shows a name, not a folder of this machine."""
    kept = home / ".cache" / "huggingface" / "hub" / f"models--{REAL_MODEL.replace('/', '--')}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(REVISION)
    shutil.copytree(CONVERTED, kept / "snapshots" / REVISION)


@asynccontextmanager
async def chatting(
    questions: Sequence[str], *, kept: bool = False, warm: bool = True, **options: Any
) -> AsyncIterator[tuple[TokamacApp, Pilot[Any]]]:
    """Open the chat, ask ``questions``, and leave what the screen shows then. kept: the real model is on the disk."""
    with tempfile.TemporaryDirectory() as scratch, nobody(Path(scratch)):
        if kept or options.get("model") == REAL_MODEL:
            keep_real_model(Path(scratch))
        save_settings(Path(scratch) / "settings.toml", Settings(theme=THEME, toured=True))
        app, bridge = build(
            ChatOptions(
                settings_path=Path(scratch) / "settings.toml",
                log_path=Path(scratch) / "engine.log",
                store_path=Path(scratch) / "chats" / "chats.db",
                **options,
            )
        )
        try:
            async with app.run_test(size=(120, 36), notifications=False) as pilot:
                await idle(app, pilot)
                if warm and "engine" not in options:
                    await measured(app)
                for question in questions:
                    app.chat.perform(app.chat.session.submit(question))
                    await asyncio.sleep(0.1)
                    await idle(app, pilot)
                yield app, pilot
        finally:
            bridge.close()


async def take(names: Sequence[str]) -> None:
    """Save what the screen shows, by these names."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    if real := [name for name in REAL if name in names]:
        async with chatting(QUESTIONS) as (app, pilot):
            for name in real:
                await SHOWN[name](app, pilot)
                await asyncio.sleep(DRAWN_S)
                save(app, name)
                await pilot.press("escape")
    if "real" in names:
        async with chatting(CONVERSATION, model=REAL_MODEL, sampling=Sampling(seed=1)) as (app, pilot):
            await pilot.press("ctrl+end")
            save(app, "real")
    if "mac" in names:
        async with chatting(QUESTIONS[:1], model=MAC_MODEL, engine=SCRIPTED) as (app, _):
            save(app, "mac")


async def explain(app: TokamacApp, pilot: Pilot[Any]) -> None:
    """Explain the last reply."""
    del app  # it is the keys that show it
    await pilot.press("f2")


async def steps(app: TokamacApp, pilot: Pilot[Any]) -> None:
    """Walk into the last reply, once its likely tokens are known."""
    await pilot.press("f10")
    await until(lambda: isinstance(app.screen, StepsScreen), "the steps")
    await until(lambda: isinstance(app.screen, StepsScreen) and app.screen._steps.ended, "the likely tokens")
    await pilot.press(*["right"] * STEP)


async def versions(app: TokamacApp, pilot: Pilot[Any]) -> None:
    """Compare some versions of the last reply."""
    await pilot.pause()
    commands.compare(app.chat, "temperature 0 1 2")
    await until(lambda: isinstance(app.screen, VersionsScreen) and not app.screen.versions.running, "the versions")


SHOWN = {"explain": explain, "steps": steps, "versions": versions}


def save(app: TokamacApp, name: str) -> None:
    """Write the screen as a picture, without the web fonts that Textual names: looking at it must not fetch anything."""
    picture = re.sub(r"@font-face \{.*?\}", "", app.export_screenshot(title="tokamac"), flags=re.DOTALL)
    (PICTURES / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(take(sys.argv[1:] or [*REAL, *SPOKEN, *PLAYED]))
