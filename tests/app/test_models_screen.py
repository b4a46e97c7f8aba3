"""Ctrl+O: the picker over the chat, with the real commands behind it and a small local hub."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input, Static

from tests.app.test_shelf import cached
from tests.hub.hub_server import Hub, safetensors, serve
from tests.tiny import make_tiny
from tokamac.app.backend.advice import answers
from tokamac.app.backend.protocol import Answer, Question
from tokamac.app.chat.jobs import Download, DownloadStage
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.tui.actions.model import take_model
from tokamac.app.tui.screens.model import ModelList, ModelScreen

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


@pytest.fixture(autouse=True)
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
    await chat.pilot.press("ctrl+o")
    await chat.until(lambda: isinstance(chat.app.screen, ModelScreen), "the picker")
    return Picker(chat)


# The list -----------------------------------------------------------------------------------------------------------------


async def test_the_list_is_there_at_once_and_fills_in(chat: Start) -> None:
    async with chat("fast", size=(120, 40)) as c:
        p = await picker(c)
        assert "mlx-community/" in p.text
        await p.until(lambda: "org/mine" in p.text, "the disk")
        await p.type("org/mine")
        await p.until(lambda: "32.0" in p.text, "what this machine makes of it")
        assert "needs" in p.detail
        assert "Ctrl+D removes" in p.keys
        await p.type("Qwen3-0.6B-4bit")
        await p.until(lambda: "4.5" in p.text, "a model of the catalogue")
        assert "351 MB to download" in p.detail
        assert "Enter downloads and loads" in p.keys


async def test_the_keyboard_types_and_points_without_leaving_the_line(chat: Start) -> None:
    async with chat("guide") as c:
        p = await picker(c)
        await p.until(lambda: p.pointed == "embedded:guide", "the loaded model")
        assert "F7 unloads" in p.keys
        await p.press("down")
        assert p.pointed == "disk:org/mine"
        await p.press("up", *"mine")
        assert p.pointed == "disk:org/mine"
        await p.press("escape")
        assert not isinstance(c.app.screen, ModelScreen)


@pytest.mark.parametrize("part", ["#head", "Input", "ModelList"])
async def test_news_of_a_model_while_the_picker_is_being_left_finds_whatever_is_still_there(
    chat: Start, part: str
) -> None:
    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        screen = await c.opened("ctrl+o", ModelScreen)
        await screen.query_one(part).remove()
        screen.refresh_rows()
        await c.app.pop_screen()
        assert c.app.screen is c.app.chat


async def test_names_from_the_disk_are_made_safe_and_hold_no_markup(chat: Start, tmp_path: Path) -> None:
    evil = make_tiny(tmp_path / "[red]x\x1b]52;c;AAAA\x07")
    async with chat("fast", size=(120, 40)) as c:
        c.app.chat.library._folders.remember(str(evil))
        p = await picker(c)
        await p.until(lambda: "[red]x" in p.text, "the folder")
        assert "\x1b" not in p.text


@pytest.mark.parametrize("size", [(40, 12), (80, 24), (250, 80)])
async def test_it_fits_every_terminal(chat: Start, size: tuple[int, int]) -> None:
    async with chat("fast", size=size) as c:
        p = await picker(c)
        await p.until(lambda: "mine" in p.text and "guide" in p.text, "the disk")
        assert p.list.size.height >= 3


# Downloads ----------------------------------------------------------------------------------------------------------------


def partial(cache: Path) -> Path:
    return cache / "models--org--tiny" / "blobs" / f"{hashlib.sha256(WEIGHTS).hexdigest()}.incomplete"


async def begin_stalled(c: Any, hub: Hub, cache: Path) -> Picker:
    """Begin a download that comes no further than 200,000 bytes of the weights."""
    hub.stall_at = 200_000
    p = await picker(c)
    await p.type("org/tiny")
    assert p.pointed == "typed:org/tiny"
    await p.press("f5")
    await p.until(lambda: p.pointed == "downloads:org/tiny", "the download")
    await p.until(lambda: partial(cache).exists() and partial(cache).stat().st_size > 0, "some bytes")
    return p


async def test_a_download_is_paused_and_goes_on_where_it_was_and_the_chat_goes_on(
    chat: Start, hub: Hub, cache: Path
) -> None:
    async with chat("fast") as c:
        p = await begin_stalled(c, hub, cache)
        assert "F5 pauses" in p.keys
        await p.press("escape")
        assert (await c.ask("hello")) != ""
        assert "downloading tiny" in c.screen_text()
        p = await picker(c)
        await p.type("tiny")
        await p.press("f5")
        await p.until(lambda: "paused at" in p.text, "the pause")
        arrived = partial(cache).stat().st_size
        hub.stall_at = None
        hub.resume.set()
        await p.press("f5")
        await c.until(lambda: "tiny is downloaded" in c.notices, "the model")
        assert hub.gets("model.safetensors")[-1] == f"bytes={arrived}-"
        await p.until(lambda: p.pointed == "disk:org/tiny", "its place on the disk")


async def test_after_a_restart_what_is_unfinished_is_offered_and_can_be_cancelled(
    chat: Start, hub: Hub, cache: Path
) -> None:
    async with chat("fast") as c:
        await begin_stalled(c, hub, cache)
    async with chat("fast") as c:
        p = await picker(c)
        await p.until(lambda: "paused at" in p.text, "what is unfinished")
        await p.type("tiny")
        assert "F6 cancels" in p.keys
        await p.press("f6")
        await p.until(lambda: not (cache / "models--org--tiny").exists(), "the removal")
        await p.until(lambda: p.pointed == "typed:tiny", "nothing of it")


async def test_enter_on_what_is_not_here_downloads_it_then_loads_it_and_keeps_the_draft(
    chat: Start, cache: Path
) -> None:
    async with chat("fast") as c:
        p = await picker(c)
        c.prompt.insert("a draft")
        await p.type("org/tiny")
        await p.press("enter")
        await c.until(lambda: "Downloading org/tiny. It loads when it is complete." in c.notices, "a notice")
        await c.until(lambda: "called 'org/tiny'" in c.notices, "the load, which this engine refuses")
        assert (cache / "models--org--tiny" / "refs" / "main").exists()
        assert c.prompt.text == "a draft"


async def test_what_was_wanted_earlier_does_not_replace_what_was_chosen_since(
    chat: Start, hub: Hub, cache: Path
) -> None:
    async with chat("fast") as c:
        hub.stall_at = 200_000
        await c.phase(EnginePhase.IDLE)
        take_model(c.app.chat, "org/tiny")
        await c.until(lambda: partial(cache).exists(), "some bytes")
        take_model(c.app.chat, "steady")
        await c.phase(EnginePhase.IDLE)
        hub.stall_at = None
        hub.resume.set()
        await c.until(lambda: "tiny is downloaded" in c.notices, "the model")
        assert c.session.engine.load.model == "steady"


async def test_what_has_arrived_waits_for_a_reply_and_not_for_another_choice(chat: Start) -> None:
    async with chat("slow") as c:
        await c.phase(EnginePhase.IDLE)
        await c.send("hello")
        await c.until(lambda: c.session.engine.replying, "a reply")
        c.app.chat.library._ended(Download("org/tiny", loads=True))
        take_model(c.app.chat, "steady")
        await c.until(lambda: "tiny is downloaded" in c.notices, "a notice")
        await c.phase(EnginePhase.IDLE)
        assert c.session.engine.load.model == "steady"


async def test_a_download_that_fails_says_why_and_what_to_do(chat: Start, hub: Hub) -> None:
    hub.gated = True
    async with chat("fast") as c:
        p = await picker(c)
        await p.type("org/tiny")
        await p.press("f5")
        await p.until(
            lambda: [each.stage for each in c.app.chat.library.downloads.all] == [DownloadStage.FAILED], "its end"
        )
        assert "HF_TOKEN" in p.detail
        assert p.keys.startswith("Enter retries · F6 cancels")


# Removing, unloading ------------------------------------------------------------------------------------------------------


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


async def test_the_loaded_and_the_embedded_model_stay_and_a_folder_only_leaves_the_list(
    chat: Start, tmp_path: Path
) -> None:
    own = make_tiny(tmp_path / "own")
    async with chat("guide") as c:
        c.app.chat.library._folders.remember(str(own))
        p = await picker(c)
        await p.until(lambda: p.pointed == "embedded:guide", "the loaded model")
        await p.press("ctrl+d")
        assert "Press F7 to unload it first" in p.detail
        await p.press("f7")
        await c.phase(EnginePhase.UNLOADED)
        await p.press("ctrl+d")
        assert "part of the program" in p.detail
        await p.type("own")
        await p.press("ctrl+d")
        await p.until(lambda: "own" not in [row.model for row in c.app.chat.library.rows("") if row.home == "folder"])
        assert (own / "config.json").exists()


async def test_with_no_model_loaded_the_picker_still_weighs_and_leaves_no_process(chat: Start) -> None:
    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        c.app.chat.do("unload")
        await c.phase(EnginePhase.UNLOADED)
        assert not c.app.chat.bridge.running
        await c.pilot.press("ctrl+o")
        await c.until(lambda: "org/mine" in c.app.chat.library.estimates.disk, "an estimate")
        await c.pilot.press("escape")
        await c.until(lambda: not c.app.chat.bridge.running, "its end")
        assert c.session.engine.phase is EnginePhase.UNLOADED


async def test_commands_of_the_prompt_do_the_same(chat: Start) -> None:
    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        c.app.chat.do("pull", "not an id")
        await c.until(lambda: "Write /pull" in c.notices, "a notice")
        c.app.chat.do("pull", "org/mine")
        await c.until(lambda: "already on this disk" in c.notices, "a notice")
        c.app.chat.do("pull", "org/tiny")
        await c.until(lambda: "tiny is downloaded" in c.notices, "the model")


# The arithmetic behind it -------------------------------------------------------------------------------------------------


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
