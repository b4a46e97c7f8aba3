"""Models on this disk, downloads, which one is chosen, and what the picker says of it."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.app.plain.plain_chat import piped
from tests.tiny import make_tiny
from tokamac.app import settings
from tokamac.app.backend.processes import HubModelLine, Pulled, PullProgress, Refused, Removed, decode_pull
from tokamac.app.backend.protocol import Figures, Load, ModelLine, WhatIf
from tokamac.app.chat import setup
from tokamac.app.chat.controller import RefusedError
from tokamac.app.chat.settings_form import Sheet
from tokamac.app.chat.start import ChatOptions, begin
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.commands.inspect import cases_report
from tokamac.app.models.jobs import AGAIN, ARRIVED, Download, Downloads, DownloadStage
from tokamac.app.models.listing import (
    CatalogueOffer,
    Estimates,
    HubModels,
    ModelRow,
    Removal,
    StartHere,
    rows,
    section_title,
)
from tokamac.app.models.local import (
    MOST,
    Folders,
    LocalModels,
    OnDisk,
    hub_cache,
    is_folder,
    is_id,
    lasting,
    models_on_disk,
    must_be_downloaded,
    names_on_disk,
)
from tokamac.app.settings import CHAT_KV, Settings
from tokamac.app.tui.screens.model import detail, row_line
from tokamac.assets import asset_path
from tokamac.engine.hub.download import ADVICE
from tokamac.engine.options import KVSpec, Sampling
from tokamac.engine.perf.catalogue import Group
from tokamac.engine.perf.what_if import UNMEASURED_KV, WhatIfCase, WhatIfOutcome, elsewhere
from tokamac.quant.report import RECORD, Outcome, Quality

# What is on this disk, and what the picker lists of it, of downloads and of the catalogue. No screen, no hub.

# The disk -----------------------------------------------------------------------------------------------------------------


def cached(cache: Path, name: str, *, reference: str = "main", whole: bool = True) -> Path:
    """Write a tiny model as the hub's cache keeps one."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("a" * 40)
    make_tiny(snapshot)
    if whole:
        path = repository / "refs" / reference
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a" * 40)
    else:
        (snapshot / "model.safetensors").unlink()
        (repository / "blobs").mkdir()
        (repository / "blobs" / "b.incomplete").write_bytes(b"0" * 500)
    return snapshot


def test_what_is_on_disk_with_its_size_and_whether_it_is_whole(tmp_path: Path) -> None:
    whole = cached(tmp_path, "org/whole")
    cached(tmp_path, "org/tagged", reference="v1.0")
    cached(tmp_path, "org/part", whole=False)
    own = make_tiny(tmp_path / "own")
    disk = models_on_disk(tmp_path, [str(own), str(tmp_path / "gone")])
    found = {each.model: each for each in disk.models}
    assert set(found) == {"guide", str(own), "org/whole", "org/tagged@v1.0", "org/part"}
    files = sum(path.stat().st_size for path in whole.iterdir())
    assert files <= found["org/whole"].nbytes <= files + 40  # the reference's own bytes
    assert [each.model for each in disk.models if not each.whole] == ["org/part"]
    assert found["guide"].nbytes == sum(len(path.read_bytes()) for path in asset_path("guide", "model").iterdir())
    assert disk.free_bytes is not None
    assert names_on_disk(tmp_path) == ["guide", "org/tagged", "org/whole"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("mode", [0, 0o444])
@pytest.mark.parametrize("closed", ["hub/models--org--whole", "own", "home/.lmstudio/models/publisher/tiny"])
def test_an_unreadable_folder_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str, mode: int
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cached(tmp_path / "hub", "org/whole")
    for name in ("own", "home/.lmstudio/models/publisher/tiny"):
        make_tiny(tmp_path / name)
    (tmp_path / closed).chmod(mode)
    try:
        found = [each.model for each in models_on_disk(tmp_path / "hub", [str(tmp_path / "own")]).models]
    finally:
        (tmp_path / closed).chmod(0o700)
    assert found[0] == "guide"
    assert len(found) >= 3


def test_a_cache_that_is_not_there_has_the_embedded_model_alone(tmp_path: Path) -> None:
    assert [each.model for each in models_on_disk(tmp_path / "none", []).models] == ["guide"]
    assert hub_cache({"HF_HOME": "/x"}) == Path("/x/hub")
    assert hub_cache({"HF_HOME": "~nobody-of-that-name"}) == Path("~nobody-of-that-name/hub")
    assert hub_cache({"HF_HUB_CACHE": "/y", "HF_HOME": "/x"}) == Path("/y")


def test_only_an_id_that_is_not_here_must_be_downloaded(tmp_path: Path) -> None:
    cached(tmp_path, "org/whole")
    cached(tmp_path, "org/part", whole=False)
    wanted = {
        name: must_be_downloaded(name, tmp_path) for name in ("org/whole", "org/part", "org/new", "guide", "fast")
    }
    assert wanted == {"org/whole": False, "org/part": True, "org/new": True, "guide": False, "fast": False}
    assert must_be_downloaded("org/whole@v2", tmp_path)
    assert not is_id("../up/there")
    assert not is_id("a/b/c")


def test_folders_are_remembered_the_last_one_first_and_forgotten(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "deep" / "folders.json")
    assert folders.all() == ()
    for name in ("/a", "/b", "/a"):
        folders.remember(name)
    assert folders.all() == ("/a", "/b")
    folders.forget("/a")
    assert folders.all() == ("/b",)
    for number in range(MOST + 5):
        folders.remember(f"/{number}")
    assert len(folders.all()) == MOST
    (tmp_path / "deep" / "folders.json").write_text('{"not": "a list"}')
    assert folders.all() == ()


# The list -----------------------------------------------------------------------------------------------------------------


def line(model: str, tps: float | None = 50.0, nbytes: int | None = 7) -> ModelLine:
    figures = Figures(fits=True, expected_tps=tps, reason="needs 1 GB of 2 GB")
    return ModelLine(model, nbytes, 10, 10, "runs well", figures, 4.5)


def estimated(*known: str) -> Estimates:
    made = Estimates(lambda _: 1)
    made.catalogue = {name: line(name) for name in known}
    made.done, made.place = True, "this chip"
    return made


DISK = LocalModels(
    (
        OnDisk("guide", "embedded", Path(), 1),
        OnDisk("org/Mine", "cache", Path(), 2),
        OnDisk("org/part", "cache", Path(), 3, whole=False),
    )
)
OFFERS = [
    CatalogueOffer("org/c", 9, group="recommended", start=StartHere("org/c", 9)),
    CatalogueOffer("org/a", 9, group="recommended"),
    CatalogueOffer("org/Mine", 9, group="recommended"),
    CatalogueOffer("org/b", 9, group="does not fit"),
]


def named(found: list[ModelRow]) -> list[str]:
    return [row.id for row in found]


def test_the_sections_stand_in_order_and_nothing_is_there_twice() -> None:
    found = rows("", DISK, OFFERS, estimated("org/c", "org/a", "org/b", "org/Mine"), ())
    assert named(found) == ["start:org/c", "downloads:org/part", "embedded:guide", "disk:org/Mine", "recommended:org/a"]


def test_the_list_is_there_before_anything_is_estimated_and_nothing_moves() -> None:
    nothing = Estimates(lambda _: 1)
    for text in ("", "org"):
        before = rows(text, DISK, OFFERS, nothing, ())
        assert {row.pending for row in before if row.home != "embedded"} == {True, False}
        after = rows(text, DISK, OFFERS, estimated("org/c", "org/a", "org/b"), ())
        assert named(before) == named(after)
        assert not [row for row in after if row.pending and not row.on_disk]


def test_what_the_hub_found_comes_last_and_not_twice() -> None:
    found = HubModels(
        tuple(
            HubModelLine(name, 5, 4096, "mit", 7, "writing code", mlx=True, config_folder=folder)
            for name, folder in (("org/a", None), ("else/x", "/configs/x"))
        )
    )
    estimates = estimated("org/a")
    estimates.disk["/configs/x"] = line("/configs/x")
    *_, last = rows("org/a", DISK, OFFERS, estimates, (), hub=found)
    assert (last.id, last.nbytes, last.line) == ("hub:else/x", 5, estimates.disk["/configs/x"])
    assert (last.facts.context, last.facts.licence, last.facts.good_for) == (4096, "mit", "writing code")
    assert sum(row.model == "org/a" for row in rows("org/a", DISK, OFFERS, estimates, (), hub=found)) == 1


def test_a_conversion_is_marked_and_can_not_be_removed() -> None:
    (first, *_) = rows("", DISK, (), estimated(), (), conversions={"org/Mine": "converting 4 %"})
    assert (first.id, first.converting) == ("converting:org/Mine", "converting 4 %")
    assert "being converted" in Removal.refusal(first, "guide")


def test_models_of_other_folders_are_found_and_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    mine, theirs = tmp_path / "models" / "small-4bit", tmp_path / ".lmstudio" / "models" / "org" / "Coder-4bit"
    for folder in (mine, theirs, tmp_path / "models" / ".small-4bit.partial"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 512}')
        (folder / "model.safetensors").write_bytes(b"weights")
    gguf = tmp_path / ".lmstudio" / "models" / "org" / "Other"
    gguf.mkdir()
    (gguf / "other.gguf").write_bytes(b"GGUF")
    disk = models_on_disk(tmp_path / "cache", [str(mine)], tmp_path / "models")
    assert [(each.model, each.home, each.context) for each in disk.models[1:]] == [
        (str(mine), "folder", 512), (str(theirs), "other", 512), (str(gguf / "other.gguf"), "other", None),
    ]  # fmt: skip
    disk = models_on_disk(tmp_path / "cache", [], tmp_path / "models")
    assert [each.home for each in disk.models[1:]] == ["models", "other", "other"]
    found = {row.home: row for row in rows("", disk, (), estimated(), ())}
    assert "LM Studio" in Removal.refusal(found["other"], "guide")
    assert str(mine) in Removal.refusal(found["models"], "guide")
    assert next(row for row in rows("coder", disk, (), estimated(), ())).facts.good_for == "writing code"


def test_words_narrow_the_list_also_to_what_does_not_fit() -> None:
    estimates = estimated("org/c", "org/a", "org/b")
    assert named(rows("ORG b", DISK, OFFERS, estimates, ())) == ["does not fit:org/b"]
    assert named(rows("org/mine", DISK, OFFERS, estimates, ())) == ["typed:org/mine", "disk:org/Mine"]
    assert named(rows("org/Mine", DISK, OFFERS, estimates, ())) == ["disk:org/Mine"]
    assert named(rows("nothing like it", DISK, OFFERS, estimates, ())) == ["typed:nothing like it"]


def test_a_folder_that_is_typed_is_offered(tmp_path: Path) -> None:
    (row,) = rows(str(tmp_path), DISK, OFFERS, estimated("org/a"), ())
    assert (row.section, row.home) == ("typed", "folder")


@pytest.mark.parametrize("name", ["~m", "~nobody-of-that-name/x", "a" * 300, f"org/{'a' * 300}", f"/{'a' * 300}/x"])
def test_a_path_that_can_be_none_is_no_folder(tmp_path: Path, name: str) -> None:
    assert not is_folder(name)
    assert lasting(name) == name
    assert must_be_downloaded(name, tmp_path) == is_id(name) == name.startswith("org/")
    assert [(row.section, row.home) for row in rows(name, DISK, OFFERS, estimated("org/a"), ())] == [("typed", None)]
    assert [each.model for each in models_on_disk(tmp_path, [name], Path(name)).models] == ["guide"]
    Folders(tmp_path / "folders.json").remember(name)


def test_a_download_is_listed_as_such_wherever_it_was_before() -> None:
    going = (Download("org/a", DownloadStage.RUNNING, 1, 10), Download("org/part", DownloadStage.WAITING))
    found = rows("", DISK, OFFERS, estimated("org/a"), going)
    assert named(found)[:3] == ["start:org/c", "downloads:org/a", "downloads:org/part"]
    assert sum(row.model == "org/a" for row in found) == 1


def test_the_first_row_says_how_long_it_takes_to_have() -> None:
    assert StartHere("good", 2_280_000_000).wait == "at 100 Mbit/s about 3 min to download"
    assert StartHere("good", 2_280_000_000, 500_000.0).wait == "about 1 h 16 min to download"
    assert StartHere("good", 2_280_000_000, 1e9).wait == "under a minute to download"
    assert StartHere("good", None).wait == "download time unknown"


def test_each_group_stands_under_its_own_heading_the_best_of_it_alone() -> None:
    groups: list[Group] = ["recommended", *["slow"] * 6, "tight", "fit unknown", "does not fit"]
    offers = [CatalogueOffer(f"org/{at}", 9, group=group) for at, group in enumerate(groups)]
    offers[0] = replace(offers[0], start=StartHere("org/0", 9))
    made = estimated()
    found = rows("", LocalModels(), offers, made, ())
    assert [row.section for row in found] == ["start", *["slow"] * 4, "tight", "fit unknown"]
    assert {row.section for row in rows("org", LocalModels(), offers, made, ())} == {"start", *groups[1:]}
    assert section_title("start", made, offers[0].start) == "Start here · at 100 Mbit/s under a minute to download"
    assert section_title("slow", made).startswith("Slow on this chip")
    assert section_title("recommended", Estimates(lambda _: 1)) == "Recommended for this machine, best first"


def test_of_questions_that_were_displaced_the_answers_are_asked_for_again() -> None:
    numbers = iter(range(10))
    estimates = Estimates(lambda _: next(numbers))
    estimates.want(["guide"], KVSpec())  # 0: disk, 1: the catalogue
    assert estimates.receive(WhatIf(0, None, done=1, total=1, line=line("guide")))
    assert not estimates.receive(WhatIf(7, None))
    estimates.again()
    assert not estimates.receive(WhatIf(1, None, done=3, total=9))
    estimates.want(["guide"], KVSpec())
    assert estimates.receive(WhatIf(2, None, done=1, total=9, line=line("org/a")))
    assert (estimates.disk.keys(), estimates.catalogue.keys(), estimates.progress) == ({"guide"}, {"org/a"}, (1, 9))
    estimates.want(["guide"], KVSpec(key_bits=8, value_bits=8))
    assert estimates.disk == {}


def test_another_memory_limit_makes_all_answers_old() -> None:
    numbers = iter(range(10))
    estimates = Estimates(lambda _: next(numbers))
    estimates.want(["guide"], KVSpec())
    estimates.receive(WhatIf(0, None, done=1, total=1, line=line("guide")))
    estimates.want(["guide"], KVSpec(), 14 * 10**9)  # 2: disk, 3: the catalogue
    assert estimates.disk == {}
    assert not estimates.receive(WhatIf(1, None, done=1, total=9, line=line("org/a")))
    assert estimates.receive(WhatIf(3, None, done=1, total=9, line=line("org/a")))


BAD = Quality(3.21, 0.01, 0.31, 9.0, 0.5, 90.0, 5.0, 10.0, 0.4, 255)


def test_a_model_that_answers_worse_than_its_source_says_so_where_it_is_chosen(tmp_path: Path) -> None:
    own = make_tiny(tmp_path / "own")
    outcome = Outcome(4.5, 0.1, BAD)
    made = {
        "format": 1,
        "bits_per_weight": 4.5,
        "options": {"bits": 4, "group_size": None},
        "quality": outcome.to_json(),
    }
    (own / RECORD).write_text(json.dumps(made))
    disk = models_on_disk(tmp_path / "none", [str(own)])
    row = next(row for row in rows("", disk, [], Estimates(lambda _: 0), []) if row.model == str(own))
    assert "worse answers" in row_line(row, 100, loaded=False).plain
    assert (
        "clearly worse than its source's: convert it again with --group-size 32 --embed-bits 8" in detail(row, "").plain
    )
    (own / RECORD).write_text(json.dumps({**made, "format": 2}))
    assert {each.worse for each in models_on_disk(tmp_path / "none", [str(own)]).models} == {""}


@given(st.text(max_size=60), st.integers(30, 140))
def test_a_row_is_as_wide_as_the_list_and_holds_nothing_that_a_terminal_obeys(model: str, width: int) -> None:
    for row in (
        ModelRow(model, "disk", 5, line=line("x")),
        ModelRow(model, "downloads", download=Download(model, DownloadStage.PAUSED, 1, 2)),
        ModelRow(model, "typed"),
    ):
        drawn = row_line(row, width, loaded=True)
        assert drawn.cell_length == width
        for text in (drawn.plain, detail(row, "").plain.replace("\n", "")):
            assert all(char == "\ufffd" or char.isprintable() or not char.isascii() for char in text)
            assert "\x1b" not in text


# What is chosen is remembered as what it was, and only once it is known to load.

Start = Callable[..., Any]
PACKED = KVSpec(key_bits=8, value_bits=8)


def kept(folder: Path) -> KVSpec:
    return settings.load(folder / "settings.toml").settings.kv


@pytest.mark.parametrize(("model", "remembered"), [("unpackable", CHAT_KV), ("fast", PACKED)])
async def test_kv_settings_that_load_are_remembered(
    chat: Start, tmp_path: Path, model: str, remembered: KVSpec
) -> None:
    async with chat(model) as c:
        c.app.view.dialogs.apply(
            Sheet(sampling=Sampling(temperature=0.5), kv=PACKED, settings=Settings(unload_after_min=7))
        )
        assert c.session.engine.phase is EnginePhase.LOADING
        assert kept(tmp_path) == CHAT_KV
        await c.phase(EnginePhase.IDLE)
        assert c.session.engine.load.kv == remembered
        assert kept(tmp_path) == remembered
    assert settings.load(tmp_path / "settings.toml").settings.unload_after_min == 7


async def test_what_the_model_is_loaded_with_loads_it_again_and_is_remembered(chat: Start, tmp_path: Path) -> None:
    changes = {"memory_gb": 3.5, "parallel": 2, "speculation": False, "cpu_exact": True, "wired": "off"}
    async with chat("fast") as c:
        assert setup.current_sheet(c.app.chat).settings == Settings(model="fast", toured=True)
        for name, value in changes.items():
            c.app.view.dialogs.apply(Sheet(settings=replace(Settings(), **{name: value})))
            assert c.session.engine.phase is EnginePhase.LOADING, name
            await c.phase(EnginePhase.IDLE)
            load, held = c.session.engine.load, setup.current_sheet(c.app.chat).settings
            assert (load.memory if name == "memory_gb" else getattr(load, name)) == (
                3_500_000_000 if name == "memory_gb" else value
            )
            assert getattr(held, name) == getattr(settings.load(tmp_path / "settings.toml").settings, name) == value


async def test_the_pace_changes_without_loading_again_and_is_remembered(chat: Start, tmp_path: Path) -> None:
    async with chat("fast") as c:
        setup.pace(c.app.chat, "40%")
        setup.settings(c.app.chat, "pace_on_battery 20")
        assert c.session.engine.phase is EnginePhase.IDLE
        load = c.session.engine.load
        assert (load.pace, load.pace_on_battery) == (40, 20)
        assert load.same_engine(replace(load, pace=100, pace_on_battery=None))
    known = settings.load(tmp_path / "settings.toml").settings
    assert (known.pace, known.pace_on_battery) == (40, 20)


async def test_a_memory_limit_of_a_flag_is_not_remembered(chat: Start, tmp_path: Path) -> None:
    async with chat("fast", memory=2_000_000_000) as c:
        c.app.view.dialogs.apply(Sheet(sampling=Sampling(temperature=0.5), settings=Settings(memory_gb=2.0)))
        assert c.session.engine.phase is EnginePhase.IDLE
    assert settings.load(tmp_path / "settings.toml").settings.memory_gb is None


async def test_kv_settings_that_hold_already_are_remembered_at_once(chat: Start, tmp_path: Path) -> None:
    async with chat("fast", kv=PACKED) as c:
        assert kept(tmp_path) == CHAT_KV  # flags are for one run
        c.app.view.dialogs.apply(Sheet(kv=PACKED))
        assert c.session.engine.phase is EnginePhase.IDLE
        assert kept(tmp_path) == PACKED


async def test_a_folder_is_remembered_by_its_path(chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    whole = str(tmp_path / "models" / "mine")
    assert lasting("models/mine") == lasting("./models/mine/") == lasting(whole) == whole
    assert [lasting(name) for name in ("guide", "org/name", "models/none")] == ["guide", "org/name", "models/none"]
    begun = begin(ChatOptions(model="./models/mine", settings_path=tmp_path / "settings.toml"))
    assert begun.session.engine.load.model == whole
    async with chat("fast") as c:
        c.app.view.library.choose("models/mine")
        assert (c.app.chat.chosen.model, c.session.engine.load.model) == (whole, whole)


def test_plain_tokamac_opens_the_model_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / "data"))
    environment = {**os.environ, "TEST_SETTINGS": str(tmp_path / "settings.toml")}
    for named, failed in (("steady", 0), ("unpackable-and-missing", 1)):  # what does not load was not used
        assert piped("hi\n", named, env=environment)[0] == failed
    assert begin(ChatOptions(settings_path=tmp_path / "settings.toml")).session.engine.load.model == "steady"


@pytest.mark.parametrize("gone", ["/nowhere/mine", "org/gone"])
def test_where_the_model_used_last_is_gone_the_guide_opens_and_says_so(tmp_path: Path, gone: str) -> None:
    settings.save(tmp_path / "settings.toml", Settings(model=gone))
    begun = begin(ChatOptions(settings_path=tmp_path / "settings.toml"))
    assert begun.session.engine.load.model == "guide"
    assert begun.warnings == (
        f"{gone}, the model used last, is not on this disk. This is the guide; /model chooses another.",
    )
    assert begun.preferences.asked_model is None  # so that it opens again once its disk is back


# Adapters, and models that are loaded unchecked --------------------------------------------------------------------------


def test_another_model_is_checked_and_has_what_the_settings_have_for_it() -> None:
    load = Load("one", PACKED, memory=5, unchecked=True, adapter="letters", draft="small")
    assert load.for_model("one", None, None) == load
    known = Settings(adapters={"two": "poems"}, drafts={"two": "smaller", "one": "small"})
    assert load.for_model("two", *known.beside("two")) == Load(
        "two", PACKED, memory=5, adapter="poems", draft="smaller"
    )
    assert known.beside("three") == (None, None)


async def test_a_draft_model_is_chosen_kept_for_its_model_and_taken_away(chat: Start, tmp_path: Path) -> None:
    def kept() -> dict[str, str]:
        return settings.load(tmp_path / "settings.toml").settings.drafts

    async with chat("fast") as c:
        setup.draft(c.app.chat, "org/small")
        await c.phase(EnginePhase.IDLE)
        assert c.session.engine.load.draft == "org/small"
        await c.until(lambda: kept() == {"fast": "org/small"})
        setup.draft(c.app.chat, "none")
        await c.phase(EnginePhase.IDLE)
        assert c.session.engine.load.draft is None
        await c.until(lambda: kept() == {})
    async with chat("fast", speculation=False) as c:
        with pytest.raises(RefusedError, match="Guessing ahead is off"):
            setup.draft(c.app.chat, "org/small")


def test_without_a_draft_model_the_one_that_is_known_is_named() -> None:
    assert "/draft mlx-community/Qwen3-0.6B-4bit adds it" in setup.no_draft("mlx-community/Qwen3-8B-4bit")
    assert "(351 MB)" in setup.no_draft("mlx-community/Qwen3-8B-4bit")
    assert "/draft guide-draft adds it" in setup.no_draft("guide")
    assert "none is known for it" in setup.no_draft("guide-draft")


# The picker's speeds name the context they are for, and the inspection's table says why rows are alike or unknown.

FIGURES = Figures(ceiling_tps=3751.0, expected_tps=106.0, ttft_s=1.09, reason="needs 51.8 MB of 22.9 GB")
LINE = ModelLine("guide", None, 5_770_496, 5_770_496, "runs well", FIGURES, 4.5, 4096)


def test_the_speeds_of_a_model_are_said_with_the_context_that_they_are_for() -> None:
    said = detail(ModelRow("guide", "embedded", 3_270_000, "embedded", on_disk=True, line=LINE), "").plain
    assert said.endswith("at 4,096 tokens: expected 106 tok/s, ceiling 3,751 tok/s, first token 1.1 s")
    assert "needs 51.8 MB of 22.9 GB · at" in said


def test_what_is_to_be_known_of_all_cases_stands_once_below_their_table() -> None:
    place = elsewhere("M4 Max", 40, 64)
    base = WhatIfOutcome(WhatIfCase(), place, ceiling_tps=3751.0, expected_tps=106.0, ttft_s=0.4)
    packed = [WhatIfOutcome(WhatIfCase(kv=KVSpec(8, bits)), place, reason=UNMEASURED_KV) for bits in (8, 4)]
    *_, kv = cases_report([base, *packed]).splitlines()
    assert kv == f"unknown: {UNMEASURED_KV}"
    assert len(cases_report([base]).splitlines()) == 2


def test_a_model_that_could_see_is_said_to_be_text_only() -> None:
    row = ModelRow("guide", "embedded", 3_270_000, "embedded", on_disk=True, line=replace(LINE, text_only=True))
    assert "text only" in detail(row, "").plain
    assert "text only" not in detail(replace(row, line=LINE), "").plain


# Downloads on a scripted child process: one at a time, paused, resumed, cancelled, failed.

# What the child does is in the name of its model; it waits for a file of its own, and what it was asked is noted.
CHILD = """
import json, pathlib, signal, sys, time
say = lambda **line: print(json.dumps(line), flush=True)
signal.signal(signal.SIGINT, signal.default_int_handler)
*_, action, model = sys.argv
here = pathlib.Path(sys.argv[0]).parent
with (here / "asked").open("a") as asked:
    asked.write(" ".join(sys.argv[1:]) + "\\n")
if action == "remove":
    if "kept" in model:
        say(event="error", error="it can't be deleted", hint="Check its permissions.")
        sys.exit(1)
    if "crash" in model:
        sys.exit("it broke")
    say(event="removed", id=model, freed_bytes=5)
    sys.exit(0)
if "full" in model:
    say(event="error", error="org/full needs 9.00 GB and the disk has 1.00 GB free", hint="Free some space.")
    sys.exit(1)
if "mute" in model:
    sys.exit("the hub is gone")
say(event="progress", done=100, total=1000)
try:
    while "slow" in model and not (here / "go").exists():
        time.sleep(0.01)
except KeyboardInterrupt:
    sys.exit(130)
say(event="progress", done=1000, total=1000)
say(event="pulled", id=model, path="/there", bytes=1000)
"""


class Bench:
    """Downloads with a clock of their own, and what came of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "child.py").write_text(CHILD)
        self.now = 0.0
        self.seen: list[Download | None] = []
        self.ended: list[Download] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.downloads = Downloads(
            [sys.executable, str(folder / "child.py")],
            lambda: self.now,
            spawn=lambda work: self.tasks.add(asyncio.create_task(work)),
            changed=lambda: self.seen.append(self.downloads.running),
            ended=self.ended.append,
        )

    @property
    def asked(self) -> list[str]:
        return (self.folder / "asked").read_text().splitlines()

    async def until(self, condition: Callable[[], object]) -> None:
        for _ in range(18_000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(self.downloads.all)

    async def stage(self, model: str, stage: DownloadStage) -> Download:
        await self.until(lambda: (known := self.downloads.find(model)) is not None and known.stage is stage)
        found = self.downloads.find(model)
        assert found is not None
        return found

    async def begun(self, model: str) -> None:
        await self.until(lambda: (known := self.downloads.find(model)) is not None and known.done == 100)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)


# Downloads ----------------------------------------------------------------------------------------------------------------


async def test_a_download_runs_to_its_end_and_is_told_once(bench: Bench) -> None:
    bench.downloads.start("org/quick", loads=True)
    await bench.until(lambda: bench.ended)
    (end,) = bench.ended
    assert (end.model, end.done, end.total, end.loads, end.problem) == ("org/quick", 1000, 1000, True, "")
    assert bench.downloads.all == ()
    assert bench.asked == ["--json -- pull org/quick"]


async def test_a_paused_one_goes_on_when_it_is_asked_to(bench: Bench) -> None:
    bench.downloads.start("org/slow")
    await bench.begun("org/slow")
    bench.downloads.pause("org/slow")
    paused = await bench.stage("org/slow", DownloadStage.PAUSED)
    assert (paused.done, paused.total, paused.rate_bps) == (100, 1000, None)
    (bench.folder / "go").touch()
    bench.downloads.start("org/slow")
    await bench.until(lambda: bench.ended)
    assert bench.asked == ["--json -- pull org/slow"] * 2


async def test_one_after_the_other_and_a_waiting_one_can_be_paused(bench: Bench) -> None:
    for name in ("org/slow", "org/second", "org/third"):
        bench.downloads.start(name)
    await bench.begun("org/slow")
    assert [each.stage for each in bench.downloads.all] == [
        DownloadStage.RUNNING,
        DownloadStage.WAITING,
        DownloadStage.WAITING,
    ]
    bench.downloads.pause("org/second")
    (bench.folder / "go").touch()
    await bench.until(lambda: len(bench.ended) == 2)
    assert [each.model for each in bench.downloads.all] == ["org/second"]


async def test_what_is_cancelled_is_removed_from_the_disk(bench: Bench) -> None:
    bench.downloads.start("org/slow")
    await bench.begun("org/slow")
    bench.downloads.cancel("org/slow")
    await bench.until(lambda: not bench.downloads.all)
    assert bench.asked == ["--json -- pull org/slow", "--unfinished --json -- remove org/slow"]
    assert [(each.stage, each.freed) for each in bench.ended] == [(DownloadStage.CANCELLING, 5)]


async def test_nothing_arrived_is_nothing_removed(
    chat: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    async with chat("fast", ready=False) as c:
        c.app.view.library.downloads.cancel("org/empty")
        await c.until(lambda: "Download of empty cancelled: nothing had arrived." in c.notices, "the notice")


async def test_one_that_waits_is_called_off_and_nothing_is_deleted(bench: Bench) -> None:
    bench.downloads.start("org/slow")
    await bench.begun("org/slow")
    bench.downloads.start("org/kept")  # which could not be deleted
    bench.downloads.cancel("org/kept")
    assert [each.model for each in bench.downloads.all] == ["org/slow"]
    (bench.folder / "go").touch()
    await bench.until(lambda: not bench.downloads.all)
    assert [each.model for each in bench.ended] == ["org/slow"]
    assert bench.asked == ["--json -- pull org/slow"]


async def test_one_that_waits_again_has_what_arrived_removed(bench: Bench) -> None:
    bench.downloads.start("org/slow")
    await bench.begun("org/slow")
    bench.downloads.pause("org/slow")
    await bench.stage("org/slow", DownloadStage.PAUSED)
    bench.downloads.start("org/slow-too")
    await bench.begun("org/slow-too")
    bench.downloads.start("org/slow")
    bench.downloads.cancel("org/slow")
    await bench.until(lambda: bench.downloads.find("org/slow") is None)
    assert bench.asked[-1] == "--unfinished --json -- remove org/slow"


@pytest.mark.parametrize(
    ("model", "why"), [("org/crash", "it broke"), ("org/kept", "it can't be deleted. Check its permissions.")]
)
async def test_what_an_earlier_run_left_can_be_cancelled_and_a_failure_is_told(
    bench: Bench, model: str, why: str
) -> None:
    bench.downloads.cancel(model)
    assert (await bench.stage(model, DownloadStage.FAILED)).problem == why


@pytest.mark.parametrize(("model", "why"), [("org/full", "9.00 GB"), ("org/mute", "the hub is gone")])
async def test_what_fails_says_why_and_can_be_tried_again(bench: Bench, model: str, why: str) -> None:
    bench.downloads.start(model)
    failed = await bench.stage(model, DownloadStage.FAILED)
    assert why in failed.problem
    assert bench.ended == [failed]
    bench.downloads.start(model)
    await bench.until(lambda: len(bench.ended) == 2)


async def test_the_rate_is_that_of_the_last_seconds_and_the_rest_follows(bench: Bench) -> None:
    bench.downloads.start("org/slow")
    await bench.begun("org/slow")
    take = bench.downloads._read_line
    for second, done in ((10, 1100), (20, 3100)):  # ten seconds at 100 bytes a second, then ten at 200
        bench.now = float(second)
        take("org/slow", PullProgress(done, 7100))
    running = bench.downloads.find("org/slow")
    assert (running.rate_bps, running.left_s) == (200.0, 20.0)


@given(st.binary(max_size=60) | st.dictionaries(st.text(max_size=8), st.none() | st.integers()).map(json.dumps))
def test_no_line_of_the_child_breaks_the_reader(line: Any) -> None:
    assert isinstance(decode_pull(line), PullProgress | Pulled | Removed | Refused)


# A download that fails, in the words of the screen: the whole id, what has arrived, and how to try again there.

UNREACHABLE = "no connection to https://huggingface.co ([Errno -2] Name or service not known)"


async def failed(folder: Path, *lines: dict[str, Any], last: str = "") -> Download:
    """A download whose process says these lines and fails."""
    said = "".join(f"print({json.dumps(json.dumps(line))}, flush=True)\n" for line in lines)
    (folder / "child.py").write_text(f"import sys\n{said}sys.exit({last or 1!r})\n")
    ended: list[Download] = []
    tasks: list[asyncio.Task[None]] = []
    downloads = Downloads(
        [sys.executable, str(folder / "child.py")],
        lambda: 0.0,
        spawn=lambda work: tasks.append(asyncio.ensure_future(work)),
        changed=lambda: None,
        ended=ended.append,
    )
    downloads.start("nope/nope", loads=True)
    await asyncio.wait_for(tasks[0], 60)
    (end,) = ended
    assert end.stage is DownloadStage.FAILED
    return end


@pytest.mark.parametrize(
    ("hint", "advice"), [("Check the network.", "Check the network."), (f"Wait. {ADVICE}", f"Wait. {ARRIVED}")]
)
async def test_the_advice_is_that_of_the_screen_and_no_command_is_named(tmp_path: Path, hint: str, advice: str) -> None:
    end = await failed(tmp_path, {"event": "error", "error": UNREACHABLE, "hint": hint})
    assert end.problem == f"{UNREACHABLE}. {advice} {AGAIN}"
    assert "command" not in end.problem


async def test_one_that_ends_without_a_reason_can_be_tried_again_too(tmp_path: Path) -> None:
    assert (await failed(tmp_path, last="the hub is gone")).problem == f"the hub is gone. {AGAIN}"
    assert (await failed(tmp_path)).problem == f"it ended with exit status 1. {AGAIN}"


async def test_a_notice_names_the_whole_id_and_what_was_wrong(chat: Start) -> None:
    async with chat("fast") as c:
        c.app.view.library._ended(Download("nope/nope", DownloadStage.FAILED, problem=f"{UNREACHABLE}. {AGAIN}"))
        said = f"nope/nope: {UNREACHABLE}. Press Enter on it in the list to retry."
        await c.until(lambda: said in c.notices, "the notice")
