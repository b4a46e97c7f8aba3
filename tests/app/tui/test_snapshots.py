"""Every screen and dialog as it is drawn, in each of its stages, against what was drawn before (see album.py)."""

import json
import re
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partialmethod
from itertools import count
from pathlib import Path

import pytest
from textual.command import CommandList, CommandPalette
from textual.containers import VerticalScroll
from textual.widgets import Button, DataTable, Input, OptionList, Select, TabbedContent

from tests.app.conftest import Chat, Start, reply_of
from tests.app.tui.album import (
    SIZES,
    THEME,
    THEMES,
    WIDE,
    Album,
    StillClock,
    colours,
    figures,
    nothing_of_this_machine,
    resized,
    written,
)
from tests.app.tui.test_models import DONE, PLAN, QUALITY
from tests.scripted_engine import CHIP, KV_BYTES_PER_TOKEN, LATENCY, SITUATION, WEIGHT_BYTES, WORK
from tokamac.app.backend.client import Died
from tokamac.app.backend.engine_client import answers
from tokamac.app.backend.protocol import (
    Answer,
    EngineMessage,
    Figures,
    Load,
    ModelLine,
    Question,
    ReplyEvent,
    RequestFailed,
    WhatIf,
    Where,
)
from tokamac.app.chat.attachments import Draft
from tokamac.app.chat.conversation import Reply
from tokamac.app.chat.figures import FIGURES, explain
from tokamac.app.chat.recording import measured
from tokamac.app.chat.steps import Ask, EnginePhase, StartEngine, Step
from tokamac.app.models.jobs import ConversionJob, Conversions, Downloads
from tokamac.app.models.jobs import ConversionPhase as Converting
from tokamac.app.models.listing import CatalogueOffer, Estimates, StartHere
from tokamac.app.models.local import LocalModels, OnDisk
from tokamac.app.store.store import Store
from tokamac.app.text.units import size as units_size
from tokamac.app.tui.markdown.turns import ReplyMessage
from tokamac.app.tui.screens.dialog import EngineSaid
from tokamac.app.tui.screens.explain import FigureScreen
from tokamac.app.tui.screens.help import GuideScreen
from tokamac.app.tui.screens.model import ConvertScreen, ModelScreen
from tokamac.app.tui.screens.settings import SettingsScreen
from tokamac.app.tui.screens.whatif import WhatIfScreen
from tokamac.app.tui.widgets.status import Gauges
from tokamac.engine.events import Finished, Live, LoadProgress, PrefillProgress, TextChunk
from tokamac.engine.metrics import Outlier
from tokamac.engine.perf.catalogue import Group
from tokamac.engine.perf.diagnosis import diagnose

DAY_S = 86400.0
ANSWER = """Decode reads **every weight once per token**.

1. Prefill: *bound by arithmetic*.
2. Decode: *bound by bandwidth*.

```python
ceiling_tps = bandwidth_gbs * 1e9 / bytes_per_step
```

| phase | bound by |
| --- | --- |
| prefill | arithmetic |
| decode | `bandwidth` |

> The first question is which phase was slow.
"""


@pytest.fixture
def fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chats, one of them with two versions of a prompt, and nothing of this machine."""
    nothing_of_this_machine(tmp_path, monkeypatch)
    files = tmp_path / "files"
    (files / "notes").mkdir(parents=True)
    for name in ("answers.md", "notes/april.txt", "notes/may.txt", "roofline.py"):
        (files / name).write_text("Decode is bound by bandwidth.\n" * 40)
    monkeypatch.chdir(files)
    metrics = figures()
    reply = measured(Reply("", metrics=metrics, diagnosis=diagnose(metrics, WORK, CHIP, LATENCY, SITUATION)))
    with Store.open(tmp_path / "chats" / "chats.db", clock=lambda: time.time() - 3.5 * DAY_S) as store:
        for prompts in (("What is a cache?",), ("What is decode?", "Why is decode slow?")):
            chat = store.new_chat(model="org/fast")
            for prompt in prompts:
                asked = store.add_message(chat.id, None, "user", prompt)
                begun = store.begin_reply(chat.id, asked.id, model="org/fast")
                store.finish_reply(begun.id, ANSWER, "Which phase?", metrics=reply)


# What is done before a picture is taken -----------------------------------------------------------------------------------


async def nothing(_: Chat) -> None:
    """What is open is what is wanted."""


async def pointed(c: Chat) -> None:
    """Point at the last message, and wait for what making it again would take."""
    await c.pilot.press("tab")
    await c.until(lambda: c.session.prices.known, "a price")


async def editing(c: Chat) -> None:
    """Write the prompt anew."""
    c.app.view.do("edit")
    await c.until(lambda: c.app.chat.composer.editing is not None, "the edit")


async def offered(c: Chat) -> None:
    """Begin to name a file."""
    c.app.view.do("stop")  # which gives the edit up
    await c.type("Compare ")
    await c.pilot.press("@", "a")
    await c.until(lambda: c.prompt.completions.display, "files")


async def attached(c: Chat) -> None:
    """Attach the first that is offered."""
    await c.pilot.press("enter")
    await c.until(lambda: c.prompt.attachments, "a file")


async def gauged(c: Chat) -> None:
    """Point at a figure of the side panel."""
    c.app.view.do("gauges")
    await c.until(lambda: c.app.view.query_one(Gauges).selected is not None, "a figure")
    await c.pilot.press("down", "down")


async def explained(c: Chat) -> None:
    """Explain the figure that has most behind it."""
    explained = [explain(each, c.session) for each in FIGURES]
    await c.app.push_screen(FigureScreen(explained, FIGURES.index("ceiling")))


async def at_its_end(c: Chat) -> None:
    """Go to the end of what is open."""
    if isinstance(c.app.screen, SettingsScreen):
        c.app.screen.query_one(OptionList).action_last()
    else:
        c.app.screen.query_one(VerticalScroll).scroll_end(animate=False)


async def refused(c: Chat) -> None:
    """Write what no setting can be."""
    await c.write_setting("top_p", "7")
    await c.until(lambda: "out of range" in c.screen_text(), "the reason")


async def taken(c: Chat) -> None:
    """Take a system prompt of the library."""
    library = c.app.screen.query_one("#library", OptionList)
    library.focus()
    library.highlighted = 1
    await c.pilot.press("enter")


async def found(c: Chat) -> None:
    """Look for what was said."""
    c.app.screen.query_one(Input).value = "bandwidth"
    await c.until(lambda: c.app.screen.query_one(OptionList).option_count, "what was said")


async def renamed(c: Chat) -> None:
    """Ask for another title."""
    c.app.screen.query_one(Input).value = ""
    chats = c.app.screen.query_one(OptionList)
    await c.until(lambda: sum(not row.disabled for row in chats.options) == 2, "all chats")  # below a heading
    await c.pilot.press("ctrl+e")


async def priced(c: Chat) -> None:
    """Wait until the versions have their prices."""
    await c.until(lambda: len(re.findall("nothing to re-read|to read again", c.screen_text())) == 2, "two prices")


async def asked_elsewhere(c: Chat) -> None:
    """Ask about a model of the catalogue on a chip of the table: arithmetic that is the same on every machine."""
    screen = c.app.screen
    screen.query_one("#chip", Select).value = "Apple M4 Max|40"
    screen.query_one("#memory", Input).value = "64"
    screen.query_one("#model", Input).value = "Qwen3-8B-4bit"
    await c.until(lambda: screen.query_one("#case-table", DataTable).row_count > 3, "cases")


def turned(tab: str) -> Callable[[Chat], Awaitable[None]]:
    """Another side of the same answer."""

    async def turn(c: Chat) -> None:
        c.app.screen.query_one(TabbedContent).active = tab

    return turn


async def on_every_chip(c: Chat) -> None:
    """Ask of all chips of the table."""
    await turned("chips")(c)
    await c.until(lambda: c.app.screen.query_one("#chip-table", DataTable).row_count > 3, "chips")


async def commands(c: Chat) -> None:
    """Wait for what the palette offers."""
    await c.until(lambda: isinstance(c.app.screen, CommandPalette), "the palette")
    await c.until(lambda: c.app.screen.query_one(CommandList).option_count > 10, "commands")


async def typed(c: Chat) -> None:
    """Name a model that is not here: what else the picker lists is of this machine; filtered, none of that is left."""
    await c.pilot.press(*"org/x")
    await c.until(lambda: "no connection to" in c.screen_text(), "the end of the search")


@dataclass(frozen=True)
class Scene:
    """A picture: the action that opens its screen over the conversation, and no other; what is done there then.

    on: it goes on from the scene before. least: the columns that it needs. points: whether there is something to point at, by more
    than a sign beside it.
    """

    name: str
    action: str = ""
    do: Callable[[Chat], Awaitable[None]] = nothing
    on: bool = False
    least: int = 0
    points: bool = True


SCENES = (
    Scene("chat"), Scene("chat-message", do=pointed, points=False), Scene("chat-edit", do=editing, on=True),
    Scene("chat-files", do=offered, on=True), Scene("chat-attached", do=attached, on=True),
    Scene("chat-gauges", do=gauged, least=100), Scene("figure", do=explained, points=False),
    Scene("help", "help", points=False), Scene("help-end", do=at_its_end, on=True, points=False),
    Scene("explain", "explain", points=False), Scene("explain-end", do=at_its_end, on=True, points=False),
    Scene("settings", "settings"), Scene("settings-end", do=at_its_end, on=True),
    Scene("settings-refused", do=refused, on=True), Scene("system", "system_prompt"),
    Scene("system-taken", do=taken, on=True), Scene("chats", "chats"), Scene("chats-found", do=found, on=True),
    Scene("chats-rename", do=renamed, on=True), Scene("branches", "branches", priced),
    Scene("what-if", "what_if", asked_elsewhere), Scene("what-if-curve", do=turned("curve"), on=True, points=False),
    Scene("what-if-roof", do=turned("roof"), on=True, points=False), Scene("what-if-chips", do=on_every_chip, on=True),
    Scene("palette", "palette", commands),
)  # fmt: skip
MODEL = Scene("model", "choose_model", typed)  # the last one: it has the engine's process weigh the whole catalogue


async def tidied(c: Chat) -> None:
    """Nothing is open, nothing is written, and the end of the conversation is read."""
    if c.app.screen is not c.app.view:
        await c.app.pop_screen()
    c.prompt.put(Draft())
    c.prompt.focus()
    c.app.view.do("scroll_end")


async def opened(c: Chat, scene: Scene) -> None:
    """Open what is wanted, and do what is to be done there."""
    if not scene.on:
        await tidied(c)
    if scene.action:
        c.app.view.do(scene.action)
        await c.until(lambda: c.app.screen is not c.app.view, scene.name)
    await scene.do(c)


async def pictures(c: Chat, album: Album, *sizes: tuple[int, int]) -> None:
    """Every screen at these sizes; at the second beside the first, those that are kept in it."""
    await c.phase(EnginePhase.IDLE)
    await c.until(lambda: len(c.session.turns) == 1, "the conversation")
    c.session.conversation.progress.metrics = figures()
    for size, scenes in [*((size, SCENES) for size in sizes), *((size, (MODEL,)) for size in sizes)]:
        await resized(c, size)
        for scene in scenes:
            if scene.least <= size[0] and (size == sizes[0] or scene.name in WIDE):
                await opened(c, scene)
                await album.take(c, scene.name, points=scene.points)
        if c.app.screen is not c.app.view:
            await c.app.pop_screen()


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.usefixtures("fixed")
async def test_every_screen_is_drawn_as_before_and_in_sixteen_colours(chat: Start, tmp_path: Path, theme: str) -> None:
    written(theme, tmp_path / "settings.toml")
    album = Album(theme)
    async with chat("fast", size=SIZES[0], resume=True, ready=False) as c:
        await pictures(c, album, *(SIZES if theme == THEME else SIZES[:1]))
    album.check()


@pytest.mark.usefixtures("fixed")
async def test_no_color_shows_what_is_pointed_at(chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    written("tokamac-dark", tmp_path / "settings.toml")
    album = Album("no-color", points="reverse|bold underline")
    async with chat("fast", size=SIZES[1], resume=True, ready=False) as c:
        await pictures(c, album, SIZES[1])
    for scene, (name, picture) in zip((*SCENES, MODEL), album.found.items(), strict=True):
        assert not colours(picture), name
        if scene.points:
            assert album.has_pointed(picture), name


async def test_the_first_theme_is_of_the_background_and_terminal_colours_a_choice(chat: Start, tmp_path: Path) -> None:
    async with chat("fast", ready=False) as c:
        assert c.app.theme == "tokamac-dark"  # a pseudo-terminal says nothing of its background
        assert not c.app.native_ansi_color
    written("terminal", tmp_path / "settings.toml")
    async with chat("fast", ready=False) as c:
        assert c.app.theme == "terminal"
        assert c.app.native_ansi_color


# The dialogs that have a process behind them, as they are drawn in each of its stages: the guide, converting,
# choosing a model.

GB = 10**9
PLACE = "Apple M4 Max, 40-core GPU"
BYTES_PER_S = 200_000_000


@pytest.fixture
def _fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_of_this_machine(tmp_path, monkeypatch)


# The guide ----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_fixed")
@pytest.mark.parametrize("theme", THEMES)
async def test_the_guide_is_drawn_as_before_and_started_again(chat: Start, tmp_path: Path, theme: str) -> None:
    written(theme, tmp_path / "settings.toml")
    album = Album(theme)
    async with chat("fast") as c:
        c.app.view.do("ask_guide")
        await c.until(lambda: isinstance(c.app.screen, GuideScreen), "the guide")
        await album.take_at(c, "guide")
        screen = c.app.screen
        screen.query_one(Input).value = "Why is decode slow?"
        await c.pilot.press("enter")
        await c.until(lambda: screen.guide_chat.said and screen.guide_chat.said[-1].over, "an answer")
        await album.take_at(c, "guide-answer")
        screen.post_message(EngineSaid(Died("killed by signal 9", ""), screen._bridge.process_number))
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


@pytest.mark.usefixtures("_fixed")
@pytest.mark.parametrize("theme", THEMES)
async def test_converting_is_drawn_as_before_in_all_its_stages(chat: Start, tmp_path: Path, theme: str) -> None:
    written(theme, tmp_path / "settings.toml")
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    album = Album(theme)
    async with chat("fast") as c:
        command = [sys.executable, str(script)]
        spawn = c.app.run_worker
        jobs = Conversions(command, time.monotonic, spawn=spawn, changed=lambda: None, ended=lambda _: None)
        jobs.job = ConversionJob(lambda: 0.0 if jobs.job.stage is None else jobs.job.stage.done / BYTES_PER_S)
        screen = ConvertScreen("org/nowhere", jobs, Path("/models"))
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
        f"needs {units_size(memory)} of 45 GB",
    )  # fmt: skip
    bits = gigabytes * 8 / billions
    return ModelLine(model, round(gigabytes * GB), weights, weights, verdict, figures, bits)


CATALOGUE = (
    line("mlx-community/gemma-3-27b-it-qat-4bit", 16.9, 27.4, 25.1, "runs well"),
    line("mlx-community/Qwen3-14B-4bit", 8.32, 14.8, 45.2, "runs well"),
    line("mlx-community/Qwen3-30B-A3B-4bit", 17.2, 30.5, 97.1, "runs well"),
    line("mlx-community/gpt-oss-20b-MXFP4-Q8", 12.1, 20.9, None, "fits, speed unknown"),
    line("mlx-community/Llama-3.2-3B-Instruct-4bit", 1.81, 3.21, 178.0, "runs well"),
    line("mlx-community/Llama-3.3-70B-Instruct-4bit", 39.7, 70.6, 9.7, "slow"),
    line("mlx-community/Qwen3-32B-8bit", 34.8, 32.8, 12.4, "tight"),
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
    stock, seconds = c.app.view.library, count(0.0, 1.0)
    first, *others = [(each.model, each.download_bytes) for each in CATALOGUE]
    groups: tuple[Group, ...] = (*["recommended"] * 4, "slow", "tight", "does not fit")
    stock._offers = [
        CatalogueOffer(*first, group="recommended", start=StartHere(*first)),
        *(CatalogueOffer(*offer, group=group) for offer, group in zip(others, groups, strict=True)),
    ]
    stock.estimates = Estimates(lambda _: 0)
    script = folder / "pull.py"
    script.write_text(PULL)
    stock.downloads = Downloads(
        [sys.executable, str(script)],
        lambda: next(seconds),
        spawn=lambda work: c.app.view.run_worker(work, group="downloads"),
        changed=stock._changed,
        ended=stock._ended,
    )


def weighed(c: Chat) -> None:
    """All of them are weighed now."""
    estimates = c.app.view.library.estimates
    estimates.disk = {each.model: each for each in HERE}
    estimates.catalogue = {each.model: each for each in CATALOGUE}
    estimates.done, estimates.place = True, PLACE
    c.app.screen.refresh_rows()


@pytest.mark.usefixtures("_fixed")
@pytest.mark.parametrize("theme", THEMES)
async def test_the_picker_is_as_before(
    chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theme: str
) -> None:
    monkeypatch.setattr("tokamac.app.tui.model_library.models_on_disk", lambda *_: DISK)
    written(theme, tmp_path / "settings.toml")
    album = Album(theme)
    async with chat("guide") as c:
        stocked(c, tmp_path)
        c.app.view.do("choose_model")
        await c.until(lambda: isinstance(c.app.screen, ModelScreen) and c.app.view.library.looked, "the picker")
        await album.take_at(c, "model-weighing")
        weighed(c)
        await album.take_at(c, "model-list")
        c.app.view.library.downloads.start(CATALOGUE[1].model)
        await c.until(lambda: (going := c.app.view.library.downloads.running) and going.left_s, "some bytes")
        await c.pilot.press("up", "up")
        await album.take_at(c, "model-download")
        await c.pilot.press(*"8b", "down", "ctrl+d")
        await album.take_at(c, "model-remove")
    album.check()


# What if ------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_fixed")
@pytest.mark.parametrize("theme", THEMES)
async def test_what_if_draws_the_catalogue_and_a_refusal_as_before(chat: Start, tmp_path: Path, theme: str) -> None:
    written(theme, tmp_path / "settings.toml")
    album, asked = Album(theme), []

    def ask(question: Question) -> int:
        asked.append(question)
        return len(asked)

    async with chat("fast") as c:
        question = Question("table", "Qwen3-8B-4bit", where=Where("Apple M4 Max", 40, 64))
        screen = WhatIfScreen(ask, question, (), busy=lambda: False)
        await c.app.push_screen(screen)
        await c.pilot.pause()
        screen.receive(
            WhatIf(len(asked), None, "No model is called Qwen3-8B-4bit. See `tokamac models` for those that are known.")
        )
        await album.take_at(c, "what-if-refused")
        screen.query_one("#tabs").active = "models"
        await c.until(lambda: asked[-1].wanted == "models", "the question")
        screen.receive(WhatIf(len(asked), Answer("", PLACE, models=CATALOGUE)))
        await album.take_at(c, "what-if-models")
        screen.query_one("#tabs").active = "guesses"
        await c.until(lambda: asked[-1].wanted == "guesses", "the question")
        for event in answers(replace(question, wanted="guesses")):
            screen.receive(WhatIf(len(asked), event))
        await album.take_at(c, "what-if-guesses")
    album.check()


# The chat as it is drawn from its first start on: the tour, a reply that is read for and written, loading, no
# model.

THOUGHT = "They ask about decode. Each step reads all weights, so that bandwidth is the limit."
SAID = """Decode reads **every weight once per token**, so its speed is set by memory.

1. Prefill: *bound by arithmetic*.
2. Decode: *bound by"""


def unheard(c: Chat, steps: list[Step]) -> None:
    """Do what the session asks, but for what the engine would be asked."""
    c.app.chat.perform([step for step in steps if not isinstance(step, Ask | StartEngine)])


def said(c: Chat, *events: EngineMessage) -> None:
    """Let the engine say this."""
    for event in events:
        c.app.view.on_engine_said(EngineSaid(event, c.app.chat.bridge.process_number))


def live() -> Live:
    """A reply of which 42 tokens are written."""
    metrics = replace(figures(), generated_tokens=42, total_s=None, decode_tps=50.0)
    gaps = (19.0, 20.0, 21.0, 20.0, 41.0, 19.0, 20.0, 20.0)
    kv = metrics.prompt_tokens * KV_BYTES_PER_TOKEN
    outliers = (Outlier(17, 41.0, ("pool cleared",)),)
    return Live(metrics, 1242, gaps, WEIGHT_BYTES + kv, achieved_gbs=122.0, outliers=outliers)


@pytest.mark.parametrize("theme", [THEME, "terminal"])
async def test_each_chat_is_as_before(chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theme: str) -> None:
    nothing_of_this_machine(tmp_path, monkeypatch)
    clock = StillClock()
    monkeypatch.setattr("tokamac.app.chat.start.time", clock)
    monkeypatch.setattr("tokamac.app.tui.screens.chat.time", clock)
    monkeypatch.setattr(ReplyMessage, "__init__", partialmethod(ReplyMessage.__init__, clock=clock.monotonic))
    written(theme, tmp_path / "settings.toml", toured=False)
    album = Album(theme)
    async with chat("fast", size=SIZES[0]) as c:
        await album.take_at(c, "chat-tour")
        await c.app.push_screen(FigureScreen([explain(each, c.session) for each in FIGURES], FIGURES.index("gaps")))
        await album.take_at(c, "figure-unknown")
        await c.app.pop_screen()
        monkeypatch.setattr(
            c.app.chat.bridge, "set_busy", lambda busy: None
        )  # it is asked nothing, and need not answer
        unheard(c, c.session.submit("Why is decode slow?"))
        unheard(c, c.session.submit("And what would help?"))
        said(c, ReplyEvent(reply_of(c.session), PrefillProgress(1000, 1200, 1000)))
        clock.now_s += 2.0
        said(c, ReplyEvent(reply_of(c.session), PrefillProgress(1100, 1200, 1000)))
        await album.take_at(c, "chat-reading")
        said(
            c, ReplyEvent(reply_of(c.session), TextChunk(THOUGHT, "thinking")), ReplyEvent(reply_of(c.session), live())
        )
        await album.take_at(c, "chat-thinking")
        clock.now_s += 1.5
        said(c, ReplyEvent(reply_of(c.session), TextChunk(SAID)), ReplyEvent(reply_of(c.session), live()))
        await album.take_at(c, "chat-writing")
        unheard(c, c.session.stop())
        await album.take_at(c, "chat-stopping")
        said(c, ReplyEvent(reply_of(c.session), Finished("cancelled", SAID, live().metrics, THOUGHT)))
        unheard(c, c.session.choose(Load("org/another")))
        said(c, LoadProgress("weights", WEIGHT_BYTES // 3, WEIGHT_BYTES))
        await album.take_at(c, "chat-loading")
        c.session.engine._last_working = None  # else it goes back to the one before
        said(c, RequestFailed(None, "org/another is not whole on this disk", "Download it."))
        await album.take_at(c, "chat-failed")
    album.check()
