"""The dialogs that have a process behind them, as they are drawn in each of its stages: the guide, converting, choosing a model.

The processes are scripted, and what is known of models is said by hand: nothing in a picture is of this machine.
"""

import json
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Button, Input

from tests.app.album import THEMES, Album, nothing_of_this_machine, written
from tests.app.conftest import Chat
from tests.app.test_convert_screen import DONE, PLAN, QUALITY
from tokamac.app.backend.client import Died
from tokamac.app.backend.protocol import Answer, Figures, ModelLine, Question, WhatIf, Where
from tokamac.app.chat.jobs import ConversionJob, Downloads
from tokamac.app.chat.jobs import ConversionPhase as Converting
from tokamac.app.chat.models import CatalogueOffer, Estimates, LocalModels, OnDisk
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.tui.bridge import EngineSaid
from tokamac.app.tui.screens.help import GuideScreen
from tokamac.app.tui.screens.model import ConvertScreen, ModelScreen
from tokamac.app.tui.screens.whatif import WhatIfScreen
from tokamac.app.units import size

Start = Callable[..., Any]
GB = 10**9
PLACE = "Apple M4 Max, 40 GPU cores"
BYTES_PER_S = 200_000_000


@pytest.fixture(autouse=True)
def _fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_of_this_machine(tmp_path, monkeypatch)


# The guide ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theme", THEMES)
async def test_the_guide_is_drawn_as_before_and_one_that_is_gone_is_started_again(
    chat: Start, tmp_path: Path, theme: str
) -> None:
    written(theme, tmp_path / "settings.toml")
    album = Album(theme)
    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        c.app.chat.do("ask_guide")
        await c.until(lambda: isinstance(c.app.screen, GuideScreen), "the guide")
        await album.take_at(c, "guide")
        screen = c.app.screen
        screen.query_one(Input).value = "Why is decode slow?"
        await c.pilot.press("enter")
        await c.until(lambda: screen.guide_chat.said and screen.guide_chat.said[-1].over, "an answer")
        await album.take_at(c, "guide-answer")
        screen.on_engine_said(EngineSaid(Died("killed by signal 9", ""), screen._bridge.life))
        await album.take_at(c, "guide-gone")
        screen.query_one(Input).value = "And now?"
        await c.pilot.press("enter")
        await c.until(lambda: screen.guide_chat.said[-1].over, "an answer of the one that was started again")
        assert not screen.guide_chat.problem
    album.check()


# Converting ---------------------------------------------------------------------------------------------------------------

AFFINE = {"bits": 4, "group_size": 64, "mode": "affine"}
WIDER = {"bits": 6, "group_size": 64, "mode": "affine"}
PARTS = [
    {"part": "embedding", "packing": WIDER, "tensors": 1, "parameters": 622_329_856, "nbytes": 505_643_008},
    {"part": "attention", "packing": AFFINE, "tensors": 144, "parameters": 1_509_949_440, "nbytes": 849_346_560},
    {"part": "mlp", "packing": AFFINE, "tensors": 72, "parameters": 3_623_878_656, "nbytes": 2_038_431_744},
    {"part": "mlp", "packing": WIDER, "tensors": 36, "parameters": 1_811_939_328, "nbytes": 1_472_200_704},
    {"part": "output", "packing": WIDER, "tensors": 1, "parameters": 622_329_856, "nbytes": 505_643_008},
    {"part": "norms and other", "packing": None, "tensors": 145, "parameters": 308_224, "nbytes": 616_448},
]
SIZES_OF = {"path": "Qwen3-8B-mixed_4_6", "bits_per_weight": 5.25, "source_bytes": 16_381_470_720}
LINES = {
    "plan": {
        **PLAN, **SIZES_OF, "weight_bytes": 5_371_881_472, "output_bytes": 5_387_000_000, "seconds": 74.0, "parts": PARTS,
        "peak_memory_bytes": 1_350_000_000, "parameters": 8_190_735_360, "notes": [],
        "disk": {"needed": 5_387_000_000, "free": 91_000_000_000, "fits": True},
    },
    "expected": {"event": "expected", "before_tps": 28.0, "after_tps": 71.4, "context": 4096},
    "done": {
        **DONE, **SIZES_OF, "weight_bytes": 5_371_881_472, "seconds": 79.0, "peak_memory_bytes": 1_320_000_000,
        "quality": {**QUALITY, "relative_error": 0.06, "concerns": []},
    },
}  # fmt: skip
CHILD = f"""
import json, signal, sys, time
lines = json.loads({json.dumps(LINES)!r})
say = lambda **line: print(json.dumps(line), flush=True)
signal.signal(signal.SIGINT, signal.default_int_handler)
source, asked = sys.argv[-1], sys.argv[1:]
if source == "org/nowhere":
    say(event="error", error="org/nowhere is not whole on this disk", hint="Download it with `tokamac models pull org/nowhere`.")
    sys.exit(1)
if "--dry-run" in asked:
    say(**lines["plan"])
    sys.exit(0)
if "--recipe=mixed_4_6" in asked:
    say(event="stage", stage="converting", done=0, total=16_381_470_720, unit="bytes", peak_memory_bytes=900_000_000)
    say(event="tensor", name="model.layers.11.mlp.up_proj.weight", done=132, total=399)
    say(event="stage", stage="converting", done=5_405_885_337, total=16_381_470_720, unit="bytes", peak_memory_bytes=1_320_000_000)
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        sys.exit(130)
say(**lines["expected"])
say(**lines["done"])
"""


@pytest.mark.parametrize("theme", THEMES)
async def test_converting_is_drawn_as_before_in_all_its_stages(chat: Start, tmp_path: Path, theme: str) -> None:
    written(theme, tmp_path / "settings.toml")
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    album = Album(theme)
    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        screen = ConvertScreen("org/nowhere", [sys.executable, str(script)])
        screen.job = ConversionJob(lambda: 0.0 if screen.job.stage is None else screen.job.stage.done / BYTES_PER_S)
        await c.app.push_screen(screen)

        async def becomes(phase: Converting) -> None:
            await c.until(lambda: screen.job.phase is phase, phase.name)

        async def press(name: str) -> None:
            screen.query_one(f"#{name}", Button).press()
            await c.pilot.pause()

        await album.take_at(c, "convert")
        await press("plan")
        await c.until(lambda: screen.job.problem, "the refusal")
        await album.take_at(c, "convert-refused")
        screen.query_one("#source", Input).value = "Qwen/Qwen3-8B"
        screen.query_one("#recipe", Input).value = "mixed_4_6"
        await press("plan")
        await becomes(Converting.PLANNED)
        await album.take_at(c, "convert-plan")
        await press("convert")
        await c.until(lambda: "left" in screen.job.text(), "progress")
        await album.take_at(c, "convert-run")
        await press("stop")
        await becomes(Converting.FORM)
        await album.take_at(c, "convert-stopped")
        screen.query_one("#recipe", Input).value = ""
        screen.query_one("#target_bpw", Input).value = "5.25"
        await press("convert")
        await becomes(Converting.DONE)
        await album.take_at(c, "convert-done")
    album.check()


# Choosing a model ---------------------------------------------------------------------------------------------------------


def line(model: str, gigabytes: float, billions: float, tps: float | None, verdict: str) -> ModelLine:
    """What a machine makes of a model of so large a download and so many weights."""
    memory, weights = round(gigabytes * GB * 1.15), round(billions * GB)
    figures = Figures(
        memory, 45 * GB, memory <= 45 * GB, None if tps is None else tps * 1.3, tps, billions / 2.2,
        f"needs {size(memory)} of 45 GB",
    )  # fmt: skip
    bits = gigabytes * 8 / billions
    return ModelLine(model, round(gigabytes * GB), weights, weights, verdict, figures, bits)


CATALOGUE = (
    line("mlx-community/gemma-3-27b-it-qat-4bit", 16.9, 27.4, 25.1, "runs well"),
    line("mlx-community/Qwen3-14B-4bit", 8.32, 14.8, 45.2, "runs well"),
    line("mlx-community/Qwen3-30B-A3B-4bit", 17.2, 30.5, 97.1, "runs well"),
    line("mlx-community/gpt-oss-20b-MXFP4-Q8", 12.1, 20.9, None, "fits, speed unknown"),
    line("mlx-community/Llama-3.3-70B-Instruct-4bit", 39.7, 70.6, 9.7, "slow"),
    line("mlx-community/Qwen3-32B-8bit", 34.8, 32.8, 12.4, "tight"),
    line("mlx-community/Llama-3.2-3B-Instruct-4bit", 1.81, 3.21, 178.0, "runs well"),
    line("mlx-community/Qwen3-235B-A22B-4bit", 132.0, 235.0, None, "does not fit"),
)
HERE = (
    line("guide", 0.0072, 0.0112, 2600.0, "runs well"),
    line("mlx-community/Qwen3-8B-4bit", 4.61, 8.19, 80.6, "runs well"),
    line("/models/Qwen3-8B-mixed_4_6", 5.39, 8.19, 71.4, "runs well"),
)
DISK = LocalModels(
    (
        OnDisk("guide", "embedded", Path("guide"), 7_200_000),
        OnDisk("/models/Qwen3-8B-mixed_4_6", "folder", Path("/models/Qwen3-8B-mixed_4_6"), 5_387_000_000),
        OnDisk("mlx-community/Qwen3-8B-4bit", "cache", Path("cache"), 4_622_000_000),
        OnDisk("mlx-community/Mistral-7B-Instruct-v0.3-4bit", "cache", Path("part"), 1_020_000_000, whole=False),
    ),
    free_bytes=91 * GB,
)
PULL = """
import json, time
for done in (3_000_000_000, 3_040_000_000):
    print(json.dumps({"event": "progress", "done": done, "total": 8_320_000_000}), flush=True)
time.sleep(600)
"""


def stocked(c: Chat, folder: Path) -> None:
    """Have the picker know of these models, none of them weighed yet, and downloads be those of a script."""
    stock, seconds = c.app.chat.library, count(0.0, 1.0)
    stock._offers = [CatalogueOffer(each.model, each.download_bytes) for each in CATALOGUE]
    stock.estimates = Estimates(lambda _: 0)
    stock.estimates.weighed = (3, len(CATALOGUE))
    script = folder / "pull.py"
    script.write_text(PULL)
    stock.downloads = Downloads(
        [sys.executable, str(script)],
        lambda: next(seconds),
        spawn=lambda work: c.app.chat.run_worker(work, group="downloads"),
        changed=stock._changed,
        ended=stock._ended,
    )


def weighed(c: Chat) -> None:
    """All of them are weighed now."""
    estimates = c.app.chat.library.estimates
    estimates.disk = {each.model: each for each in HERE}
    estimates.catalogue = {each.model: each for each in CATALOGUE}
    estimates.best, estimates.place = tuple(estimates.catalogue), PLACE
    c.app.screen.refresh_rows()


@pytest.mark.parametrize("theme", THEMES)
async def test_the_picker_is_drawn_as_before_with_all_its_kinds_of_rows(
    chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theme: str
) -> None:
    monkeypatch.setattr("tokamac.app.tui.model_library.models_on_disk", lambda *_: DISK)
    written(theme, tmp_path / "settings.toml")
    album = Album(theme)
    async with chat("guide") as c:
        await c.phase(EnginePhase.IDLE)
        stocked(c, tmp_path)
        c.app.chat.do("choose_model")
        await c.until(lambda: isinstance(c.app.screen, ModelScreen) and c.app.chat.library.looked, "the picker")
        await album.take_at(c, "model-weighing")
        weighed(c)
        await album.take_at(c, "model-list")
        c.app.chat.library.downloads.start(CATALOGUE[1].model)
        await c.until(lambda: (going := c.app.chat.library.downloads.running) and going.left_s, "some bytes")
        await c.pilot.press("up", "up")
        await album.take_at(c, "model-download")
        await c.pilot.press(*"8b", "down", "ctrl+d")
        await album.take_at(c, "model-remove")
    album.check()


# What if ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theme", THEMES)
async def test_what_if_draws_the_catalogue_and_a_refusal_as_before(chat: Start, tmp_path: Path, theme: str) -> None:
    written(theme, tmp_path / "settings.toml")
    album, asked = Album(theme), []

    def ask(question: Question) -> int:
        asked.append(question)
        return len(asked)

    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        question = Question("table", "Qwen3-8B-4bit", where=Where("Apple M4 Max", 40, 64))
        screen = WhatIfScreen(ask, question, (), busy=lambda: False)
        await c.app.push_screen(screen)
        await c.pilot.pause()
        screen.take(
            WhatIf(len(asked), None, "No model is called Qwen3-8B-4bit. See `tokamac models` for those that are known.")
        )
        await album.take_at(c, "what-if-refused")
        screen.query_one("#tabs").active = "models"
        await c.until(lambda: asked[-1].wanted == "models", "the question")
        screen.take(WhatIf(len(asked), Answer("", PLACE, models=CATALOGUE)))
        await album.take_at(c, "what-if-models")
    album.check()
