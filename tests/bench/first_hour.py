"""``python -m tests.bench.first_hour``: a newcomer's way in keys and seconds, into docs/first-hour.md, with pictures.

The real app on the embedded model, on SmolLM2 (`make models`) and, for the picture, on a seeded model that sees: one that
was trained can't be had without its download. A key is a press that writes no word: names, paths and questions are words.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from tests.app.conftest import text_on
from tests.engine.vision.test_families import build
from tests.golden.vision import picture
from tests.pictures import REAL_MODEL, chatting, idle, save, until
from tests.scripted_engine import SCRIPTED
from tokamac.app.tui.app import TokamacApp
from tokamac.app.tui.screens.dialog import ConsentScreen
from tokamac.app.tui.screens.model import ModelScreen
from tokamac.app.tui.widgets.prompt_input import TextBox
from tokamac.engine import Sampling

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "first-hour.md"
BEGIN, END = "<!-- first hour: python -m tests.bench.first_hour -->\n", "<!-- end of first hour -->\n"
OLLAMA, PICTURES = "https://github.com/ollama/ollama#quickstart", "https://ollama.com/blog/multimodal-models"


@dataclass(frozen=True, slots=True)
class Peer:
    """What the best peer's own document says of a step; keys: None where it gives none that can be counted."""

    keys: int | None
    said: str

    @property
    def cell(self) -> str:
        return self.said if self.keys is None else f"{self.keys}: {self.said}"


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    presses: str
    keys: int
    seconds: float
    peer: Peer

    @property
    def row(self) -> str:
        seconds = f"{self.seconds:,.0f}" if self.seconds >= 10 else f"{self.seconds:.1f}"
        return f"| {self.name} | {self.presses} | {self.keys} | {seconds} | {self.peer.cell} |"


MORE = 2  # keys that a step may take beyond the best peer's
PEERS = {
    "install": Peer(None, "an installer"),
    "first answer": Peer(2, f"[`ollama run gemma3`]({OLLAMA}), Enter, question, Enter, after its download"),
    "real model": Peer(1, f"[`ollama run NAME`]({OLLAMA}), Enter, and its download"),
    "picture": Peer(1, f"[a path in the prompt]({PICTURES}), Enter"),
    "file": Peer(None, "[LM Studio](https://lmstudio.ai/docs/basics/rag): attached; no keys named"),
    "tool": Peer(None, "[LM Studio](https://lmstudio.ai/docs/app/mcp): an edit of `mcp.json`; no keys named"),
}


class Newcomer:
    """Hands at the real chat: what they press is counted."""

    def __init__(self, app: TokamacApp, pilot: Pilot[Any]) -> None:
        self.app, self.pilot = app, pilot
        self.keys = 0

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.pilot.press(key)
            self.keys += 1

    async def write(self, text: str) -> None:
        await self.pilot.press(*text)

    async def answer(self) -> None:
        session = self.app.chat.session
        await until(lambda: session.turns and session.turns[-1].reply is not None, "the reply")

    async def timed(self, name: str, presses: str, work: Callable[[], Awaitable[None]]) -> Step:
        self.keys, began_s = 0, time.monotonic()
        await work()
        return Step(name, presses, self.keys, time.monotonic() - began_s, PEERS[name])


def install() -> Step:
    """Install into a fresh environment, as the README says, and time it."""
    with tempfile.TemporaryDirectory() as scratch:
        began_s = time.monotonic()
        subprocess.run([sys.executable, "-m", "venv", scratch], check=True)
        subprocess.run([f"{scratch}/bin/pip", "install", "-q", str(ROOT)], check=True)
        return Step(
            "install",
            "`make chat`, Enter; timed: a new environment, pip",
            1,
            time.monotonic() - began_s,
            PEERS["install"],
        )


async def asking(hands: Newcomer, text: str) -> None:
    await hands.write(text)
    await hands.press("enter")
    await hands.answer()


async def asking_of(hands: Newcomer, file: str, text: str) -> None:
    prompt = hands.app.view.query_one(TextBox)
    await hands.write(f"@{file}")
    await until(lambda: prompt.completions.display, "the file in the list")
    await hands.press("enter")
    await until(lambda: prompt.attachments, "the file")
    await asking(hands, text)


async def at_the_guide() -> tuple[Step, Step]:
    """Open the chat as one who has nothing yet, ask the embedded model, then choose SmolLM2, which is on the disk."""
    opened_s = time.monotonic()
    async with chatting((), model="guide", kept=True, warm=False) as (app, pilot):
        hands, start_s = Newcomer(app, pilot), time.monotonic() - opened_s
        first = await hands.timed(
            "first answer", "`tokamac`, Enter, question, Enter", lambda: asking(hands, "What is prefill?")
        )

        async def choose() -> None:
            await hands.press("ctrl+o")
            await until(lambda: isinstance(app.screen, ModelScreen), "the models")
            await hands.write("smol")
            await until(lambda: REAL_MODEL in text_on(app.screen), "the model in the list")
            await hands.press("enter")
            await until(lambda: app.chat.session.engine.load.model == REAL_MODEL, "its choice")
            await idle(app, pilot)

        second = await hands.timed("real model", "Ctrl+O, a part of its name, Enter", choose)
    return replace(first, keys=first.keys + 1, seconds=first.seconds + start_s), second


async def at_a_real_model(folder: Path) -> Step:
    (folder / "notes.md").write_text("The dog is called Ada. She is four.\n")
    async with chatting((), model=REAL_MODEL, warm=False) as (app, pilot):
        hands = Newcomer(app, pilot)
        step = await hands.timed(
            "file",
            "`@notes.md`, Enter, question, Enter",
            lambda: asking_of(hands, "notes.md", "What is the dog called?"),
        )
        save(app, "first-file")
    return step


async def at_a_model_that_sees(folder: Path) -> Step:
    build("idefics3", folder / "seeded")
    (folder / "sky.png").write_bytes(picture("photo"))
    async with chatting((), model=str(folder / "seeded"), warm=False, sampling=Sampling(max_tokens=8)) as (app, pilot):
        hands = Newcomer(app, pilot)
        return await hands.timed(
            "picture", "`@sky.png`, Enter, question, Enter", lambda: asking_of(hands, "sky.png", "What is it?")
        )


async def at_a_tool() -> Step:
    async with chatting((), model="calls", engine=SCRIPTED) as (app, pilot):
        hands = Newcomer(app, pilot)

        async def call() -> None:
            await hands.write("/tools on read_file")
            await hands.press("enter")
            await hands.write("What shall I bring?")
            await hands.press("enter")
            await until(lambda: isinstance(app.screen, ConsentScreen), "the question")
            await pilot.pause()
            save(app, "first-tool")
            await hands.press("down", "enter")
            await until(lambda: any(turn.results for turn in app.chat.session.turns), "the tool's result")

        return await hands.timed("tool", "`/tools on read_file`, Enter, question, Enter, ↓, Enter", call)


def table(steps: Sequence[Step]) -> str:
    head = "| step | what is pressed | keys | seconds | the peers' own words |\n| --- | --- | --- | --- | --- |"
    return "\n".join([head, *(step.row for step in steps)])


def tell(steps: Sequence[Step]) -> None:
    """Write the table into the page; exit where a step takes more keys than the peers' and MORE."""
    late = [step.name for step in steps if step.peer.keys is not None and step.keys > step.peer.keys + MORE]
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(steps)}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    print(table(steps))
    if late:
        sys.exit(f"more than {MORE} keys beyond the peers: {', '.join(late)}")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)  # files are attached by their names
        steps = [install(), *asyncio.run(at_the_guide()), asyncio.run(at_a_model_that_sees(Path(name)))]
        steps += [asyncio.run(at_a_real_model(Path(name))), asyncio.run(at_a_tool())]
        os.chdir(ROOT)
    tell(steps)


if __name__ == "__main__":
    main()
