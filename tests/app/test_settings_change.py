"""Settings that several windows change: what one changes is written, what others changed stays."""

import fcntl
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.widgets import Input, OptionList, TextArea

from tokamac.app import settings
from tokamac.app.chat.preferences import Preferences
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.settings import Settings, merged
from tokamac.app.tui.screens.settings import SystemScreen
from tokamac.engine.options import KVSpec, Sampling

Start = Callable[..., Any]
PROMPTS = st.dictionaries(st.sampled_from("abcd"), st.sampled_from("xyz"), max_size=4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokamac" / "settings.toml"


def window(path: Path) -> Preferences:
    read = settings.load(path)
    return Preferences(read.settings, path, told=read.warnings)


def stored(path: Path) -> Settings:
    return settings.load(path).settings


def test_two_windows_keep_what_the_other_changed(path: Path) -> None:
    settings.save(path, Settings(system_prompts={"old": "Old."}))
    a, b = window(path), window(path)
    assert b.keep(replace(b.settings, system_prompts={"old": "Old.", "terse": "Be brief."})) == ""
    assert b.keep(replace(b.settings, theme="nord")) == ""
    assert a.keep(replace(a.settings, panel=False)) == ""
    assert stored(path) == Settings(panel=False, theme="nord", system_prompts={"old": "Old.", "terse": "Be brief."}), (
        "both windows' changes"
    )
    assert a.keep(replace(a.settings, system_prompts={"own": "Mine."})) == ""
    assert stored(path).system_prompts == {"terse": "Be brief.", "own": "Mine."}, "the deleted one alone is gone"
    assert a.settings.theme == "", "what the other window chose does not hold here"


def test_what_was_written_by_hand_meanwhile_stays(path: Path) -> None:
    a = window(path)
    path.parent.mkdir(parents=True)
    path.write_text('unload_after_min = 5\nfuture = 1\n[sampling]\ntop_k = 5\n[keys]\nleave = "f10"\n')
    assert a.keep(replace(a.settings, sampling=Sampling(temperature=0.5))) != "", "an unknown key is named"
    assert stored(path) == Settings(
        unload_after_min=5, sampling=Sampling(temperature=0.5, top_k=5), keys={"leave": ("f10",)}
    )
    assert "future = 1\n" in path.read_text()
    assert a.keep(replace(a.settings, panel=False)) == "", "and named once"


def test_what_can_not_hold_together_is_what_was_chosen_last(path: Path) -> None:
    held, wanted, other = KVSpec(), KVSpec(keep=600), KVSpec(window=512, keep=4)
    with pytest.raises(Exception, match="keep"):
        replace(other, keep=600)
    assert merged(Settings(kv=other), Settings(kv=held), Settings(kv=wanted)).kv == wanted


@given(now=PROMPTS, held=PROMPTS, wanted=PROMPTS)
def test_entries_are_merged_name_by_name(now: dict[str, str], held: dict[str, str], wanted: dict[str, str]) -> None:
    def of(prompts: dict[str, str]) -> Settings:
        return Settings(system_prompts=prompts)

    found = merged(of(now), of(held), of(wanted)).system_prompts
    for name in "abcd":
        changed = held.get(name) != wanted.get(name)
        assert found.get(name) == (wanted if changed else now).get(name)


def test_a_file_that_is_damaged_meanwhile_is_moved_aside_and_said(path: Path) -> None:
    settings.save(path, Settings(theme="nord", system_prompts={"terse": "Be brief."}))
    a = window(path)
    path.write_text("theme = [")
    said = a.keep(replace(a.settings, panel=False))
    assert "damaged" in said
    assert "settings.damaged.toml" in said
    assert path.with_name("settings.damaged.toml").read_text() == "theme = ["
    assert stored(path) == Settings(theme="nord", panel=False, system_prompts={"terse": "Be brief."})


def test_a_damaged_file_that_can_not_be_moved_is_not_written_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = window(path)
    path.parent.mkdir(parents=True)
    path.write_text("theme = [")
    monkeypatch.setattr(settings, "MOST_ASIDE", 2)
    path.with_name("settings.damaged.toml").write_text("an older one")
    said = a.keep(replace(a.settings, panel=False))
    assert "could not be written" in said
    assert "damaged" in said
    assert path.read_text() == "theme = ["


def test_a_file_that_can_not_be_read_is_left_alone_and_the_change_is_written_later(path: Path) -> None:
    a = window(path)
    path.mkdir(parents=True)
    assert "could not be written" in a.keep(replace(a.settings, theme="nord"))
    assert path.is_dir()
    path.rmdir()
    assert a.keep(replace(a.settings, panel=False)) == ""
    assert stored(path) == Settings(theme="nord", panel=False)


def test_a_window_that_keeps_the_lock_is_waited_for_but_not_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = window(path)
    path.parent.mkdir(parents=True)
    with path.with_name(".settings.toml.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(settings, "PATIENCE_S", 0.05)
        assert "another tokamac keeps it busy" in a.keep(replace(a.settings, panel=False))
        assert not path.exists()
        monkeypatch.setattr(settings, "PATIENCE_S", 60.0)
        release = threading.Timer(0.1, lambda: fcntl.flock(other, fcntl.LOCK_UN))
        release.start()
        assert a.keep(replace(a.settings, panel=False)) == ""
        release.join()
    assert stored(path) == Settings(panel=False)


def test_many_windows_at_once_lose_nothing(path: Path) -> None:
    windows = [window(path) for _ in range(6)]

    def work(number: int) -> None:
        for step in range(5):
            held = windows[number].settings
            prompts = {**held.system_prompts, f"{number}-{step}": "x"}
            assert windows[number].keep(replace(held, system_prompts=prompts)) == ""

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(windows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(stored(path).system_prompts) == {f"{number}-{step}" for number in range(6) for step in range(5)}


async def test_the_library_shows_and_keeps_what_another_window_saved(chat: Start, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    async with chat("fast", size=(100, 40)) as c:
        await c.phase(EnginePhase.IDLE)
        other = window(file)
        assert other.keep(replace(other.settings, theme="nord", system_prompts={"theirs": "Be theirs."})) == ""
        await c.pilot.press("ctrl+b")
        assert (stored(file).panel, stored(file).theme) == (False, "nord")
        screen = await c.opened("ctrl+s", SystemScreen)
        assert screen.query_one("#library", OptionList).option_count == 1
        screen.query_one("#system", TextArea).text = "Be mine."
        screen.query_one("#name", Input).value = "mine"
        screen.query_one("#name", Input).focus()
        await c.pilot.press("enter")
        assert stored(file).system_prompts == {"theirs": "Be theirs.", "mine": "Be mine."}
