"""Ctrl+O and F4: the picker over the chat, and the dialog that converts."""

import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.app import App
from textual.widgets import Button, Input, Select, Static

from tests.app.chat.test_models import cached
from tests.engine.hub.hub_server import Hub, safetensors, serve
from tests.tiny import make_tiny
from tokamac.app.backend.engine_client import answers
from tokamac.app.backend.processes import (
    ConvertedLine,
    Converter,
    Ended,
    Expected,
    Planned,
    Refused,
    StageLine,
    converter_command,
    decode_conversion,
)
from tokamac.app.backend.protocol import Answer, Question
from tokamac.app.chat.attachments import Draft
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.chat.steps import EnginePhase as ChatPhase
from tokamac.app.models.jobs import (
    ConversionForm,
    ConversionJob,
    ConversionPhase,
    Conversions,
    Download,
    plan_text,
    result_text,
)
from tokamac.app.tui.screens.model import ConvertScreen, ModelList, ModelScreen
from tokamac.app.tui.widgets.prompt_input import Prompt

Start = Callable[..., Any]
WEIGHTS = safetensors(600_000)


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {
        "config.json": b'{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}',
        "tokenizer.json": b'{"model": {}}' * 50,
        "model.safetensors": WEIGHTS,
    }
    with serve(Hub(files=files)) as running:
        yield running


@pytest.fixture
def cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face cache of the test's own, with one whole model, and the hub on this machine."""
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    for name, value in {**settings, "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "hf" / "hub"
    cached(folder, "org/mine")
    return folder


class Picker:
    """The open picker: what a user types, and what they see."""

    def __init__(self, chat: Any) -> None:
        self.chat = chat
        self.screen: ModelScreen = chat.app.screen

    @property
    def list(self) -> ModelList:
        return self.screen.query_one(ModelList)

    @property
    def pointed(self) -> str:
        row = self.list.selected
        return "" if row is None else row.id

    @property
    def keys(self) -> str:
        return str(self.screen.query_one(".box").border_subtitle)

    @property
    def detail(self) -> str:
        return str(self.screen.query_one("#detail", Static).render())

    @property
    def text(self) -> str:
        return str(self.chat.screen_text())

    async def type(self, text: str) -> None:
        self.screen.query_one(Input).value = text
        await self.chat.pilot.pause()

    async def press(self, *keys: str) -> None:
        await self.chat.pilot.press(*keys)

    async def until(self, condition: Callable[[], object], what: str = "") -> None:
        await self.chat.until(condition, what)


async def picker(chat: Any) -> Picker:
    await chat.phase(EnginePhase.IDLE)
    await chat.opened("ctrl+o", ModelScreen)
    return Picker(chat)


# The list -----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cache")
async def test_the_list_is_there_at_once_and_fills_in(chat: Start) -> None:
    async with chat("fast", size=(120, 40)) as c:
        p = await picker(c)
        assert "Start here · " in p.text
        assert "Recommended for " in p.text, "before anything is estimated"
        await p.until(lambda: "org/mine" in p.text, "the disk")
        await p.type("org/mine")
        await p.until(lambda: "32.0 bits" in p.text, "what this machine makes of it")
        assert "needs" in p.detail
        assert "Ctrl+D removes" in p.keys
        await p.type("Qwen3-0.6B-4bit")
        await p.until(lambda: "4.5 bits" in p.text, "a model of the catalogue")
        assert "351 MB to download" in p.detail
        assert "Enter downloads and loads" in p.keys


@pytest.mark.usefixtures("cache")
async def test_the_keyboard_types_and_points_without_leaving_the_line(chat: Start) -> None:
    async with chat("guide") as c:
        p = await picker(c)
        await p.until(lambda: p.pointed == "embedded:guide", "the loaded model")
        assert "Ctrl+E unloads" in p.keys
        await p.press("down")
        assert p.pointed == "disk:org/mine"
        await p.press("up", *"mine")
        assert p.pointed == "disk:org/mine"
        await p.press("escape")
        assert not isinstance(c.app.screen, ModelScreen)


@pytest.mark.usefixtures("cache")
async def test_a_home_that_nobody_has_can_be_typed(chat: Start) -> None:
    async with chat("guide") as c:
        p = await picker(c)
        await p.press("~", "m")
        await p.until(lambda: p.pointed == "typed:~m", "what was typed")


@pytest.mark.usefixtures("cache")
async def test_news_of_a_model_while_the_picker_is_being_left_finds_whatever_is_still_there(chat: Start) -> None:
    async with chat("fast") as c:
        for part in ("#head", "Input", "ModelList"):
            screen = await c.opened("ctrl+o", ModelScreen)
            await screen.query_one(part).remove()
            screen.refresh_rows()
            await c.app.pop_screen()
            assert c.app.screen is c.app.view


@pytest.mark.usefixtures("cache")
async def test_it_fits_every_terminal(chat: Start) -> None:
    async with chat("fast", size=(40, 12)) as c:
        p = await picker(c)
        for size in ((40, 12), (80, 24), (250, 80)):
            await c.pilot.resize_terminal(*size)
            await p.until(lambda: "mine" in p.text and "guide" in p.text, "the disk")
            assert p.list.size.height >= 3


# Downloads ----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cache")
async def test_a_pause_in_typing_searches_the_hub(chat: Start, hub: Hub) -> None:
    tags = ["mlx", "license:mit", "conversational"]
    hub.listed = [
        {"id": f"x/Tiny-{n}\x1b[31m", "tags": tags, "pipeline_tag": "text-generation", "downloads": n} for n in (1, 2)
    ]
    async with chat("fast", size=(120, 40)) as c:
        p = await picker(c)
        await p.type("tiny")
        await p.until(lambda: "searching" in p.text, "the search")
        await p.until(lambda: "hub:x/Tiny-2\x1b[31m" in [row.id for row in c.app.view.library.rows("tiny")], "results")
        await p.until(lambda: "On Hugging Face" in p.text and "Tiny-2" in p.text, "them on the screen")
        assert "\x1b" not in p.text
        hub.status = 404
        await p.type("nothing else")
        await p.until(lambda: "HTTP 404" in p.text, "why there is nothing")


@pytest.mark.usefixtures("cache")
async def test_a_conversion_is_marked_told_and_asked_about_before_quitting(chat: Start, tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    async with chat("fast", size=(100, 40)) as c:
        library = c.app.view.library
        library.conversions._converter = Converter([sys.executable, str(script)])
        library.conversions.begin(ConversionForm("slow"), dry_run=False)
        await c.until(lambda: "slow: converting 25 %" in c.screen_text(), "the progress")
        await c.pilot.press("ctrl+q")
        await c.until(lambda: "again quits" in c.notices, "the question")
        p = await picker(c)
        await p.until(lambda: "converting:slow" in [row.id for row in library.rows("")], "the mark")
        await p.press("escape")
        library.conversions.stop()
        await c.until(lambda: "slow was not converted. Stopped." in c.notices, "the end")
        library.conversions.begin(ConversionForm("good"), dry_run=False)
        await c.until(lambda: "good is converted: small" in c.notices, "the result")


def partial(cache: Path) -> Path:
    return cache / "models--org--tiny" / "blobs" / f"{hashlib.sha256(WEIGHTS).hexdigest()}.incomplete"


async def begin_stalled(c: Any, hub: Hub, cache: Path) -> Picker:
    """Begin a download that comes no further than 200,000 bytes of the weights."""
    hub.stall_at = 200_000
    p = await picker(c)
    await p.type("org/tiny")
    assert p.pointed == "typed:org/tiny"
    await p.press("ctrl+g")
    await p.until(lambda: p.pointed == "downloads:org/tiny", "the download")
    await p.until(lambda: partial(cache).exists() and partial(cache).stat().st_size > 0, "some bytes")
    return p


@pytest.mark.usefixtures("cache")
async def test_a_download_is_paused_and_goes_on_beside_the_chat(chat: Start, hub: Hub, cache: Path) -> None:
    async with chat("fast", ready=False) as c:
        p = await begin_stalled(c, hub, cache)
        assert "Ctrl+G pauses" in p.keys
        await p.press("escape")
        assert (await c.ask("hello")) != ""
        assert "downloading tiny" in c.screen_text()
        p = await picker(c)
        await p.type("tiny")
        await p.press("ctrl+g")
        await p.until(lambda: "paused at" in p.text, "the pause")
        arrived = partial(cache).stat().st_size
        hub.stall_at = None
        hub.resume.set()
        await p.press("ctrl+g")
        await c.until(lambda: "tiny is downloaded" in c.notices, "the model")
        assert hub.gets("model.safetensors")[-1] == f"bytes={arrived}-"
        await p.until(lambda: p.pointed == "disk:org/tiny", "its place on the disk")


@pytest.mark.usefixtures("cache")
async def test_after_a_restart_the_unfinished_is_offered_or_cancelled(chat: Start, hub: Hub, cache: Path) -> None:
    async with chat("fast", ready=False) as c:
        await begin_stalled(c, hub, cache)
    async with chat("fast") as c:
        p = await picker(c)
        await p.until(lambda: "paused at" in p.text, "what is unfinished")
        await p.type("tiny")
        assert "Ctrl+K cancels" in p.keys
        await p.press("ctrl+k")
        await p.until(lambda: not (cache / "models--org--tiny").exists(), "the removal")
        await p.until(lambda: p.pointed == "typed:tiny", "nothing of it")


@pytest.mark.usefixtures("cache")
async def test_enter_on_what_is_not_here_downloads_loads_and_keeps_the_draft(chat: Start, cache: Path) -> None:
    async with chat("fast") as c:
        p = await picker(c)
        c.prompt.insert("a draft")
        await p.type("org/tiny")
        await p.press("enter")
        await c.until(lambda: "Downloading org/tiny. It loads when it is complete." in c.notices, "a notice")
        await c.until(lambda: "called 'org/tiny'" in c.notices, "the load, which this engine refuses")
        assert (cache / "models--org--tiny" / "refs" / "main").exists()
        assert c.prompt.text == "a draft"


@pytest.mark.usefixtures("cache")
async def test_what_has_arrived_waits_for_a_reply_and_not_for_another_choice(chat: Start) -> None:
    async with chat("slow") as c:
        await c.send("hello")
        await c.until(lambda: c.session.engine.replying, "a reply")
        c.app.view.library._ended(Download("org/tiny", loads=True))
        c.app.view.library.choose("steady")
        await c.until(lambda: "tiny is downloaded" in c.notices, "a notice")
        await c.phase(EnginePhase.IDLE)
        assert c.session.engine.load.model == "steady"


# Removing, unloading ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cache")
async def test_removing_asks_once_with_the_size_and_esc_keeps_it(chat: Start, cache: Path) -> None:
    async with chat("fast") as c:
        p = await picker(c)
        await p.until(lambda: "mine" in p.text, "the disk")
        await p.type("mine")
        await p.press("ctrl+d")
        assert "Delete 1.5" in p.detail
        await p.press("escape")
        assert isinstance(c.app.screen, ModelScreen)
        assert "Remove" not in p.detail
        await p.press("ctrl+d", "ctrl+d")
        await p.until(lambda: not (cache / "models--org--mine").exists(), "the removal")
        await c.until(lambda: "mine is removed; 1.5" in c.notices, "what was freed")


@pytest.mark.usefixtures("cache")
async def test_the_loaded_and_embedded_model_stay_and_a_folder_leaves_the_list(chat: Start, tmp_path: Path) -> None:
    own = make_tiny(tmp_path / "own")
    async with chat("guide", ready=False) as c:
        c.app.view.library._folders.remember(str(own))
        p = await picker(c)
        await p.until(lambda: p.pointed == "embedded:guide", "the loaded model")
        await p.press("ctrl+d")
        assert "Press Ctrl+E to unload it first" in p.detail
        await p.press("ctrl+e")
        await c.phase(EnginePhase.UNLOADED)
        await p.until(lambda: p.pointed == "embedded:guide", "it stays selected")
        await p.press("ctrl+d")
        assert "part of the program" in p.detail
        await p.type("own")
        await p.press("ctrl+d")
        await p.until(lambda: "own" not in [row.model for row in c.app.view.library.rows("") if row.home == "folder"])
        assert (own / "config.json").exists()


@pytest.mark.usefixtures("cache")
async def test_with_no_model_loaded_the_picker_still_weighs_and_leaves_no_process(chat: Start) -> None:
    async with chat("fast") as c:
        c.app.view.do("unload")
        await c.phase(EnginePhase.UNLOADED)
        assert not c.app.chat.bridge.running
        await c.pilot.press("ctrl+o")
        await c.until(lambda: "org/mine" in c.app.view.library.estimates.disk, "an estimate")
        await c.pilot.press("escape")
        await c.until(lambda: not c.app.chat.bridge.running, "its end")
        assert c.session.engine.phase is EnginePhase.UNLOADED


async def test_what_is_written_for_the_app_loads_no_model_and_a_prompt_does(chat: Start) -> None:
    async with chat("fast") as c:
        c.app.view.do("unload")
        await c.phase(EnginePhase.UNLOADED)
        for text in ("/", "/model small", "!ls"):
            c.prompt.put(Draft(text))
            c.prompt.post_message(Prompt.Paused(c.prompt.draft))
            await c.pilot.pause()
            assert c.session.engine.phase is EnginePhase.UNLOADED
        c.prompt.put(Draft("What is decode?"))
        await c.phase(EnginePhase.IDLE)


@pytest.mark.usefixtures("cache")
async def test_commands_of_the_prompt_do_the_same(chat: Start) -> None:
    async with chat("fast") as c:
        c.app.view.do("pull", "not an id")
        await c.until(lambda: "no model 'not an id'" in c.notices, "a notice")
        c.app.view.do("pull", "org/mine")
        await c.until(lambda: "already on this disk" in c.notices, "a notice")
        c.app.view.do("pull", "org/tiny")
        await c.until(lambda: "tiny is downloaded" in c.notices, "the model")


# The arithmetic behind it -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cache")
def test_of_models_on_disk_one_that_can_not_be_weighed_is_unknown_and_the_others_are_not(tmp_path: Path) -> None:
    good, odd = make_tiny(tmp_path / "good"), make_tiny(tmp_path / "odd")
    (odd / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    question = Question("disk", "", context=8192, prompt=8192, names=(str(good), str(odd), "org/gone"))
    *steps, answer = answers(question)
    assert isinstance(answer, Answer)
    assert [step.line for step in steps] == list(answer.models)  # type: ignore[union-attr]
    whole, broken, gone = answer.models
    assert (whole.bits_per_weight, whole.figures.fits) == (32.0, True)
    assert {broken.verdict, gone.verdict} == {"unknown whether it fits"}
    assert "org/gone" in gone.figures.reason


# F4: the dialog that converts, on a scripted child process; what a conversion's lines say; and the real command,
# once.

SCREENS = Path(sys.modules[ConvertScreen.__module__].__file__ or "").parent

AFFINE = {"bits": 4, "group_size": 64, "mode": "affine"}

PLAN: dict[str, Any] = {
    "event": "plan", "path": "small", "weight_bytes": 2_000_000, "bits_per_weight": 4.5, "source_bytes": 8_000_000,
    "output_bytes": 2_100_000, "seconds": 61.0, "peak_memory_bytes": 300_000, "quality": None, "parameters": 4_000_000,
    "parts": [
        {"part": "mlp", "packing": AFFINE, "tensors": 6, "parameters": 3_900_000, "nbytes": 1},
        {"part": "norms and other", "packing": None, "tensors": 5, "parameters": 100_000, "nbytes": 2},
    ],
    "disk": {"needed": 2_100_000, "free": 9_000_000_000, "fits": True}, "notes": ["the source has no tokenizer files"],
}  # fmt: skip

QUALITY: dict[str, Any] = {
    "relative_error": 0.08, "kl": 0.031, "perplexity_ratio": 1.021, "kl_se": 0.002, "top1": 0.947, "reference_perplexity": 9.0,
    "reference_perplexity_se": 0.5, "perplexity": 9.2, "perplexity_se": 0.5, "perplexity_ratio_se": 0.004, "positions": 255,
    "layers": [0.01, None], "unable": None, "concerns": ["Its perplexity is 9 times the source's."],
}  # fmt: skip

DONE: dict[str, Any] = {
    "event": "converted", "path": "small", "weight_bytes": 2_000_000, "bits_per_weight": 4.5, "source_bytes": 8_000_000,
    "seconds": 62.0, "peak_memory_bytes": 310_000, "quality": QUALITY,
}  # fmt: skip

# What the child does is in the name of its source; --dry-run always plans.
CHILD = f"""
import json, os, signal, sys, time
say = lambda **line: print(json.dumps(line), flush=True)
signal.signal(signal.SIGINT, signal.default_int_handler)
source, asked = sys.argv[-1], sys.argv[1:]
if "--dry-run" in asked:
    if source == "nowhere":
        say(event="error", error="nowhere is not complete on this disk", hint="Download it.")
        sys.exit(1)
    if source == "contradiction":
        sys.exit("tokamac convert: --bits and --target-bpw contradict each other.")
    print(json.dumps({{**{PLAN!r}, "notes": asked}}), flush=True)
    sys.exit(0)
say(event="tensor", name="model.embed_tokens.weight", done=3, total=12)
say(event="stage", stage="converting", done=2_000_000, total=8_000_000, unit="bytes", peak_memory_bytes=300_000)
if source == "slow":
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
if source == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    say(event="stage", stage="deaf", done=1, total=2, unit="steps", peak_memory_bytes=None)
    time.sleep(600)
if source == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if source == "garbled":
    print("this is no JSON", flush=True)
say(event="expected", before_tps=12.0, after_tps=None, context=4096)
print(json.dumps({DONE!r}), flush=True)
"""

Open = Callable[..., Any]


class Host(App[str | None]):
    CSS_PATH = [SCREENS / "dialog.tcss", SCREENS / "convert.tcss"]  # noqa: RUF012 (Textual's way)


class Dialog:
    """The dialog as a user sees it."""

    def __init__(self, app: Host, screen: ConvertScreen, results: list[str | None]) -> None:
        self.app, self.screen, self.results = app, screen, results

    def text(self, name: str) -> str:
        return str(self.screen.query_one(name, Static).render())

    def press(self, name: str) -> None:
        button = self.screen.query_one(name, Button)
        assert button.display
        button.press()

    async def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 180  # the real command takes seconds, on a machine with nothing else to do
        while not condition():
            assert time.monotonic() < deadline, f"never: {what}; {self.screen.job.phase} {self.text('#problem')}"
            await asyncio.sleep(0.01)

    async def phase(self, phase: ConversionPhase) -> None:
        await self.until(lambda: self.screen.job.phase is phase, phase.name)


def conversions(app: App[Any], command: list[str]) -> Conversions:
    return Conversions(
        command, time.monotonic, spawn=lambda work: app.run_worker(work), changed=lambda: None, ended=lambda _: None
    )


@pytest.fixture
def dialog(tmp_path: Path) -> Open:
    script = tmp_path / "child.py"
    script.write_text(CHILD)

    @asynccontextmanager
    async def start(source: str) -> AsyncIterator[tuple[Dialog, Any]]:
        app, results = Host(), []
        screen = ConvertScreen(source, conversions(app, [sys.executable, str(script)]), tmp_path / "models")
        async with app.run_test(size=(100, 40)) as pilot:
            app.push_screen(screen, results.append)
            await pilot.pause()
            yield Dialog(app, screen, results), pilot

    return start


# Wishes and lines ---------------------------------------------------------------------------------------------------------


def test_a_wish_is_flags_that_nothing_written_can_escape() -> None:
    wish = ConversionForm("--overwrite", output="-o x", bits="3", recipe="mixed_4_6", target_bpw="4.5")
    assert wish.arguments(dry_run=True) == [
        "--json", "--dry-run", "--output=-o x", "--bits=3", "--recipe=mixed_4_6", "--target-bpw=4.5", "--", "--overwrite",
    ]  # fmt: skip
    assert ConversionForm("org/model").arguments(dry_run=False) == ["--json", "--", "org/model"]


def test_the_command_line_understands_every_wish() -> None:
    from tokamac.app.commands import convert

    wish = ConversionForm("-strange name", output="out", bits="3", recipe="mixed_4_6", target_bpw="4.5")
    options = convert.parser().parse_args(wish.arguments(dry_run=True))
    assert (options.source, options.output, options.bits, options.recipe) == ("-strange name", "out", 3, "mixed_4_6")
    assert (options.target_bpw, options.dry_run, options.json) == (4.5, True, True)


def test_lines_are_read_strictly() -> None:
    assert isinstance(decode_conversion(json.dumps(PLAN).encode()), Planned)
    assert isinstance(decode_conversion(json.dumps(DONE).encode()), ConvertedLine)
    for wrong in (
        b"", b"[]", b"null", b"{}", b'{"event":"unknown"}', b'{"event":["plan"]}', b'{"event":"error","error":1,"hint":""}',
        json.dumps({**DONE, "seconds": "long"}).encode(), json.dumps({**PLAN, "more": 1}).encode(), b"\xff", b"[" * 100_000,
    ):  # fmt: skip
        assert isinstance(decode_conversion(wrong), Refused)


def test_what_the_quality_of_a_conversion_says_is_what_is_read() -> None:
    from tokamac.quant.report import Outcome
    from tokamac.quant.report import Quality as Measured

    measured = Measured(0.5, 0.01, 0.9, 9.0, 0.1, 9.9, 0.1, 1.1, 0.01, 255)
    for outcome in (Outcome(4.5), Outcome(4.5, 0.08, measured, (0.1, None)), Outcome(4.5, unable="no tokenizer")):
        found = decode_conversion(json.dumps({**DONE, "quality": outcome.to_json()}).encode())
        assert isinstance(found, ConvertedLine)
        assert found.quality.concerns == outcome.concerns


def a_job(now: list[float]) -> ConversionJob:
    return ConversionJob(lambda: now[0])


def test_the_time_left_is_that_of_the_stage_at_hand() -> None:
    now = [100.0]
    at = a_job(now)
    at.begin(dry_run=False)
    at.receive(StageLine("calibrating", 1, 4, "steps", None))
    now[0] = 130.0
    at.receive(StageLine("converting", 0, 1000, "bytes", 5_000_000))
    now[0] = 140.0
    at.receive(StageLine("converting", 250, 1000, "bytes", 5_000_000))
    assert "25 %" in at.text()
    assert "30 s left" in at.text()
    assert "5.00 MB" in at.text()


def test_nothing_is_promised_before_there_is_a_rate() -> None:
    now = [0.0]
    at = a_job(now)
    at.begin(dry_run=False)
    at.receive(StageLine("converting", 0, 1000, "bytes", None))
    now[0] = 50.0
    assert "left" not in at.text()
    at.receive(StageLine("downloading", 5_000, None, "bytes", None))
    assert "5.00 kB" in at.text()


def test_text_of_others_is_made_safe() -> None:
    at = a_job([0.0])
    at.begin(dry_run=False)
    at.receive(Refused("\x1b]0;evil\x07 failed", "Do\nsomething."))
    at.ended(Ended(1, ""))
    assert "\x1b" not in at.problem
    assert "\n" not in at.problem
    assert "\x1b" not in at.text()


@given(st.sampled_from([0, 1, 2, 130, -9]), st.booleans(), st.booleans(), st.booleans())
def test_however_it_ends_there_is_a_result_or_a_reason(status: int, plans: bool, results: bool, stops: bool) -> None:
    at = a_job([0.0])
    at.begin(dry_run=not results)
    if plans:
        at.receive(decode_conversion(json.dumps(PLAN).encode()))
    if results:
        at.receive(decode_conversion(json.dumps(DONE).encode()))
    if stops:
        at.stop()
    at.ended(Ended(status, ""))
    assert not at.busy
    assert at.problem or at.text()


def test_unknown_prints_as_unknown() -> None:
    plan = decode_conversion(json.dumps({**PLAN, "seconds": None}).encode())
    done = decode_conversion(json.dumps({**DONE, "quality": None}).encode())
    assert isinstance(plan, Planned)
    assert isinstance(done, ConvertedLine)
    assert "unknown" in plan_text(plan)
    small = decode_conversion(
        json.dumps({**PLAN, "quality_seconds": 80.0, "disk": {**PLAN["disk"], "free": 100_000, "fits": False}}).encode()
    )
    assert isinstance(small, Planned)
    assert "about 61 s, plus about 80 s for a quality check" in plan_text(small)
    assert "Warning: this disk is too small by 2.00 MB." in plan_text(small)
    assert "speed  unknown" in result_text(done, None)
    assert "unknown (it was not measured)" in result_text(done, Expected(None, None, 4096, "it was not measured"))
    assert "Not compared" in result_text(done, None)


# The dialog ---------------------------------------------------------------------------------------------------------------


async def test_the_plan_comes_first_and_says_what_was_asked(dialog: Open) -> None:
    async with dialog("org/model") as (d, pilot):
        d.screen.query_one("#bits", Select).value = "3"
        d.screen.query_one("#output", Input).value = "small"
        d.screen.query_one("#source", Input).focus()
        await pilot.press("enter")
        await d.phase(ConversionPhase.PLANNED)
        said = d.text("#said")
        assert "--dry-run" in said
        assert "--bits=3" in said
        assert "/models/small" in said
        assert "Note: --dry-run." in said
        assert "8.00 MB → 2.00 MB, 4.50 bits per weight" in said  # of the weights: the folder holds more
        assert "norms and other" in said
        assert "about 61 s" in said
        await d.until(lambda: d.screen.focused is d.screen.query_one("#convert"), "the next step at hand")


async def test_another_wish_takes_the_plan_away(dialog: Open) -> None:
    async with dialog("org/model") as (d, _):
        d.press("#plan")
        await d.phase(ConversionPhase.PLANNED)
        d.screen.query_one("#target_bpw", Input).value = "4.5"
        await d.phase(ConversionPhase.FORM)
        assert d.text("#said") == ""


async def test_it_converts_and_the_result_is_used_at_once(dialog: Open) -> None:
    async with dialog("good") as (d, _):
        d.press("#convert")
        await d.phase(ConversionPhase.DONE)
        said = d.text("#said")
        assert "8.00 MB → 2.00 MB" in said
        assert "12.0 tok/s → unknown" in said
        assert "94.7 % of 255 positions" in said
        assert "Warning: Its perplexity is 9 times the source's." in said
        d.press("#use")
        await d.until(lambda: d.results, "a result")
        assert d.results == [str(Path("small").absolute())]


async def test_stop_interrupts_and_says_that_it_goes_on_from_there(dialog: Open) -> None:
    async with dialog("slow") as (d, pilot):
        d.press("#convert")
        await d.until(lambda: d.screen.job.stage, "progress")
        assert "3 of 12 tensors" in d.text("#said")
        assert "25 %" in d.text("#said")
        assert all(box.disabled for box in d.screen.query(Input))
        await pilot.press("ctrl+k")
        await d.phase(ConversionPhase.FORM)
        assert "resumes from here" in d.text("#problem")
        await pilot.press("escape")
        await d.until(lambda: d.results, "the end")
        assert d.results == [None]


@pytest.mark.parametrize(
    ("source", "said"),
    [("nowhere", "not complete on this disk. Download it."), ("contradiction", "contradict each other")],
)
async def test_a_refusal_is_told(dialog: Open, source: str, said: str) -> None:
    async with dialog(source) as (d, _):
        d.press("#plan")
        await d.until(lambda: said in d.text("#problem"), "the reason")
        await d.phase(ConversionPhase.FORM)


async def test_the_dialog_is_left_and_opened_again_while_it_converts(dialog: Open) -> None:
    async with dialog("slow") as (d, pilot):
        d.press("#convert")
        await d.until(lambda: d.screen.job.stage, "progress")
        await pilot.press("escape")
        await d.until(lambda: d.results, "the end of the dialog")
        assert d.results == [None]
        running = d.screen._conversions
        assert running.running is not None
        assert running.job.brief() == "converting 25 %"
        another = ConvertScreen("other", running, Path("models"))
        await d.app.push_screen(another)
        await pilot.pause()
        assert another.query_one("#source", Input).value == "slow"
        assert "25 %" in str(another.query_one("#said", Static).render())
        another.query_one("#stop", Button).press()
        await d.until(lambda: running.running is None, "the end")
        assert "resumes from here" in str(another.query_one("#problem", Static).render())


async def test_a_new_folder_is_in_the_models_folder_unless_a_path_is_written(dialog: Open, tmp_path: Path) -> None:
    async with dialog("org/model") as (d, _):
        for written, flag in (("", "--into"), ("mine", "--output"), ("~/mine", "--output"), ("./mine", "--output")):
            d.screen.query_one("#output", Input).value = written
            asked = [
                each for each in d.screen._form().arguments(dry_run=True) if each.startswith(("--into", "--output"))
            ]
            folder = {"": tmp_path / "models", "mine": tmp_path / "models" / "mine"}.get(written, written)
            assert asked == [f"{flag}={folder}"]


async def test_a_process_that_dies_is_told(dialog: Open) -> None:
    async with dialog("killed") as (d, _):
        d.press("#convert")
        await d.until(lambda: "-9" in d.text("#problem"), "the reason")


async def test_a_line_that_is_not_understood_does_not_end_it(dialog: Open) -> None:
    async with dialog("garbled") as (d, _):
        d.press("#convert")
        await d.phase(ConversionPhase.DONE)
        assert "not understood" in d.text("#problem")


async def test_leaving_the_app_leaves_no_process(dialog: Open) -> None:
    async with dialog("slow") as (d, _):
        d.press("#convert")
        await d.until(lambda: d.screen.job.stage, "progress")
        process = d.screen._conversions._converter._process
    await asyncio.wait_for(process.wait(), 60)  # the loop has seen its end too, else it would complain when it closes
    assert not _runs(process.pid)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_process_that_ignores_the_interruption_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    converter, seen = Converter([sys.executable, str(script)]), []
    running = asyncio.create_task(converter.run(ConversionForm("deaf").arguments(dry_run=False), seen.append))
    while not any(isinstance(line, StageLine) and line.stage == "deaf" for line in seen):
        await asyncio.sleep(0.01)
    await converter.interrupt(grace_s=0.1)
    assert (await running).status == -9


# In the chat --------------------------------------------------------------------------------------------------------------


async def test_the_chat_and_the_model_picker_lead_to_it(chat: Open) -> None:
    async with chat("fast", ready=False) as c:
        await c.phase(ChatPhase.IDLE)
        await c.opened("f4", ConvertScreen)
        assert c.app.screen.query_one("#source", Input).value == "fast"
        await c.pilot.press("escape")
        await c.opened("ctrl+o", ModelScreen)
        c.app.screen.query_one(Input).value = "org/other"
        await c.opened("f4", ConvertScreen)
        assert c.app.screen.query_one("#source", Input).value == "org/other"
        c.app.screen.dismiss("/models/new")
        await c.until(lambda: "/models/new" in c.notices, "the new model, which this engine does not know")


@pytest.mark.e2e
async def test_the_real_command_plans_converts_and_says_the_result(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny")
    app, results = Host(), []
    screen = ConvertScreen(str(source), conversions(app, converter_command()), tmp_path / "models")
    async with app.run_test(size=(110, 50)) as pilot:
        app.push_screen(screen, results.append)
        await pilot.pause()
        d = Dialog(app, screen, results)
        d.press("#plan")
        await d.phase(ConversionPhase.PLANNED)
        assert "embedding" in d.text("#said")
        assert str(tmp_path / "models" / "tiny-4bit") in d.text("#said")
        assert "for a quality check" in d.text("#said")
        assert not (tmp_path / "models").exists()
        d.press("#convert")
        await d.phase(ConversionPhase.DONE)
        assert "bits per weight" in d.text("#said")
        assert (tmp_path / "models" / "tiny-4bit" / "config.json").exists()
        d.press("#use")
        await d.until(lambda: results, "the result")
        assert results == [str(tmp_path / "models" / "tiny-4bit")]
