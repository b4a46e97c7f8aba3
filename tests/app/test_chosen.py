"""What is chosen is remembered as what it was, and only once it is known to load."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.plain_chat import piped
from tokamac.app import settings
from tokamac.app.backend.protocol import Load
from tokamac.app.chat import commands
from tokamac.app.chat.models import lasting
from tokamac.app.chat.start import ChatOptions, begin
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.settings import CHAT_KV, Settings
from tokamac.app.tui.actions import model as wishes
from tokamac.app.tui.screens.settings import Chosen
from tokamac.engine.options import KVSpec, Sampling

Start = Callable[..., Any]
PACKED = KVSpec(key_bits=8, value_bits=8)


def kept(folder: Path) -> KVSpec:
    return settings.load(folder / "settings.toml").settings.kv


@pytest.mark.parametrize(("model", "remembered"), [("unpackable", CHAT_KV), ("fast", PACKED)])
async def test_kv_settings_are_remembered_once_a_model_loads_with_them(
    chat: Start, tmp_path: Path, model: str, remembered: KVSpec
) -> None:
    async with chat(model) as c:
        await c.phase(EnginePhase.IDLE)
        wishes._apply(c.app.chat, Chosen(Sampling(temperature=0.5), PACKED, 7, own=False))
        assert c.session.engine.phase is EnginePhase.LOADING
        assert kept(tmp_path) == CHAT_KV
        await c.phase(EnginePhase.IDLE)
        assert c.session.engine.load.kv == remembered
        assert kept(tmp_path) == remembered
    assert settings.load(tmp_path / "settings.toml").settings.unload_after_min == 7


async def test_a_memory_limit_loads_the_model_again_and_is_remembered(chat: Start, tmp_path: Path) -> None:
    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        wishes._apply(c.app.chat, Chosen(Sampling(), CHAT_KV, None, own=False, memory_gb=3.5))
        assert c.session.engine.phase is EnginePhase.LOADING
        await c.phase(EnginePhase.IDLE)
        assert c.session.engine.load.memory == 3_500_000_000
    assert settings.load(tmp_path / "settings.toml").settings.memory_gb == 3.5


async def test_a_memory_limit_of_a_flag_is_not_remembered(chat: Start, tmp_path: Path) -> None:
    async with chat("fast", memory=2_000_000_000) as c:
        await c.phase(EnginePhase.IDLE)
        wishes._apply(c.app.chat, Chosen(Sampling(temperature=0.5), CHAT_KV, None, own=False, memory_gb=2.0))
        assert c.session.engine.phase is EnginePhase.IDLE
    assert settings.load(tmp_path / "settings.toml").settings.memory_gb is None


async def test_kv_settings_that_hold_already_are_remembered_at_once(chat: Start, tmp_path: Path) -> None:
    async with chat("fast", kv=PACKED) as c:
        await c.phase(EnginePhase.IDLE)
        assert kept(tmp_path) == CHAT_KV  # flags are for one run
        wishes._apply(c.app.chat, Chosen(Sampling(), PACKED, 0, own=False))
        assert c.session.engine.phase is EnginePhase.IDLE
        assert kept(tmp_path) == PACKED


@pytest.mark.parametrize(
    ("model", "failed", "remembered"),
    [("unpackable", 1, CHAT_KV), ("fast", 0, replace(CHAT_KV, key_bits=8, value_bits=8))],
)
def test_the_same_in_plain_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, failed: int, remembered: KVSpec
) -> None:
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / "data"))
    environment = {**os.environ, "TEST_SETTINGS": str(tmp_path / "settings.toml")}
    status, out, err = piped("hi\n/settings key_bits 8\n/settings value_bits 8\nhi\n", model, env=environment)
    assert (status, "every weight once" in out) == (failed, True), err
    assert kept(tmp_path) == remembered


async def test_a_folder_is_remembered_by_its_whole_path(
    chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    whole = str(tmp_path / "models" / "mine")
    assert lasting("models/mine") == lasting("./models/mine/") == lasting(whole) == whole
    assert [lasting(name) for name in ("guide", "org/name", "models/none")] == ["guide", "org/name", "models/none"]
    begun = begin(ChatOptions(model="./models/mine", settings_path=tmp_path / "settings.toml"))
    assert begun.session.engine.load.model == whole
    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        wishes.take_model(c.app.chat, "models/mine")
        assert (c.app.chat.chosen.model, c.session.engine.load.model) == (whole, whole)


# Adapters, and models that are loaded unchecked --------------------------------------------------------------------------


def test_another_model_is_checked_and_has_the_adapter_that_the_settings_have_for_it() -> None:
    load = Load("one", PACKED, memory=5, unchecked=True, adapter="letters")
    assert load.of("one", None) == load
    assert load.of("two", "poems") == Load("two", PACKED, memory=5, adapter="poems")


async def test_what_is_unchecked_does_not_stay_so_when_another_model_is_picked(chat: Start, tmp_path: Path) -> None:
    settings.save(tmp_path / "settings.toml", Settings(adapters={"guide": "poems"}))
    async with chat("fast", unchecked=True, adapter="letters") as c:
        await c.phase(EnginePhase.IDLE)
        assert (c.session.engine.load.unchecked, c.session.engine.load.adapter) == (True, "letters")
        wishes.load_model(c.app.chat, "guide")
        await c.phase(EnginePhase.IDLE)
        assert (c.session.engine.load.unchecked, c.session.engine.load.adapter) == (False, "poems")


async def test_an_adapter_is_chosen_kept_for_its_model_and_taken_away(chat: Start, tmp_path: Path) -> None:
    def held() -> dict[str, str]:
        return settings.load(tmp_path / "settings.toml").settings.adapters

    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        commands.adapter(c.app.chat, "org/letters")
        assert held() == {}
        await c.phase(EnginePhase.IDLE)
        assert c.session.engine.load.adapter == "org/letters"
        assert held() == {"fast": "org/letters"}
        commands.adapter(c.app.chat, "none")
        await c.phase(EnginePhase.IDLE)
        assert c.session.engine.load.adapter is None
        assert held() == {}
