"""What is on this disk, and what the picker lists of it, of downloads and of the catalogue. No screen, no hub."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import make_tiny
from tokamac.app.backend.protocol import Figures, ModelLine, WhatIf
from tokamac.app.chat.jobs import Download, DownloadStage
from tokamac.app.chat.models import (
    MOST,
    CatalogueOffer,
    Estimates,
    Folders,
    LocalModels,
    ModelRow,
    OnDisk,
    best_guess,
    hub_cache,
    is_id,
    models_on_disk,
    must_be_downloaded,
    names_on_disk,
    rows,
)
from tokamac.app.tui.screens.model import detail, row_line
from tokamac.assets import asset_path
from tokamac.engine.options import KVSpec

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


def test_a_cache_that_is_not_there_has_the_embedded_model_alone(tmp_path: Path) -> None:
    assert [each.model for each in models_on_disk(tmp_path / "none", []).models] == ["guide"]
    assert hub_cache({"HF_HOME": "/x"}) == Path("/x/hub")
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


def line(model: str, verdict: str = "runs well") -> ModelLine:
    return ModelLine(model, 7, 10, 10, verdict, Figures(expected_tps=50.0, reason="needs 1 GB of 2 GB"), 4.5)


def estimated(*best: str, hopeless: str = "") -> Estimates:
    made = Estimates(lambda _: 1)
    made.catalogue = {name: line(name, "does not fit" if name == hopeless else "runs well") for name in best}
    made.best = best
    return made


DISK = LocalModels(
    (
        OnDisk("guide", "embedded", Path(), 1),
        OnDisk("org/Mine", "cache", Path(), 2),
        OnDisk("org/part", "cache", Path(), 3, whole=False),
    )
)
OFFERS = [CatalogueOffer(name, 9) for name in ("org/a", "org/b", "org/Mine", "org/c")]


def named(found: list[ModelRow]) -> list[str]:
    return [row.id for row in found]


def test_the_sections_stand_in_order_and_nothing_is_there_twice() -> None:
    found = rows("", DISK, OFFERS, estimated("org/c", "org/a", "org/b", "org/Mine", hopeless="org/b"), ())
    assert named(found) == [
        "downloads:org/part",
        "embedded:guide",
        "disk:org/Mine",
        "recommended:org/c",
        "recommended:org/a",
    ]


def test_while_nothing_is_weighed_the_list_is_there_and_says_that_more_comes() -> None:
    found = rows("", DISK, OFFERS, Estimates(lambda _: 1), ())
    assert [row.model for row in found if row.pending] == ["guide", "org/Mine", "org/a", "org/b", "org/c"]
    assert found[-1].nbytes == 9


def test_words_narrow_the_list_also_to_what_does_not_fit() -> None:
    estimates = estimated("org/c", "org/a", "org/b", hopeless="org/b")
    assert named(rows("ORG b", DISK, OFFERS, estimates, ())) == ["recommended:org/b"]
    assert named(rows("org/mine", DISK, OFFERS, estimates, ())) == ["typed:org/mine", "disk:org/Mine"]
    assert named(rows("org/Mine", DISK, OFFERS, estimates, ())) == ["disk:org/Mine"]
    assert named(rows("nothing like it", DISK, OFFERS, estimates, ())) == ["typed:nothing like it"]


def test_a_folder_that_is_typed_is_offered(tmp_path: Path) -> None:
    (row,) = rows(str(tmp_path), DISK, OFFERS, estimated("org/a"), ())
    assert (row.section, row.home) == ("typed", "folder")


def test_a_download_is_listed_as_such_wherever_it_was_before() -> None:
    going = (Download("org/a", DownloadStage.RUNNING, 1, 10), Download("org/part", DownloadStage.WAITING))
    found = rows("", DISK, OFFERS, estimated("org/a"), going)
    assert named(found)[:2] == ["downloads:org/a", "downloads:org/part"]
    assert sum(row.model == "org/a" for row in found) == 1


def test_the_first_guess_is_the_largest_that_leaves_half_of_the_memory() -> None:
    offers = [CatalogueOffer("s", 1), CatalogueOffer("l", 4), CatalogueOffer("xl", 9), CatalogueOffer("unknown", None)]
    assert [each.model for each in best_guess(offers, 10)][:2] == ["l", "s"]
    assert best_guess(offers, None) == offers


def test_of_questions_that_were_displaced_the_answers_are_asked_for_again() -> None:
    numbers = iter(range(10))
    estimates = Estimates(lambda _: next(numbers))
    estimates.want(["guide"], KVSpec())  # 0: disk, 1: the catalogue
    assert estimates.take(WhatIf(0, None, done=1, total=1, line=line("guide")))
    assert not estimates.take(WhatIf(7, None))
    estimates.again()
    assert not estimates.take(WhatIf(1, None, done=3, total=9))
    estimates.want(["guide"], KVSpec())
    assert estimates.take(WhatIf(2, None, done=1, total=9, line=line("org/a")))
    assert (estimates.disk.keys(), estimates.catalogue.keys(), estimates.progress) == ({"guide"}, {"org/a"}, (1, 9))
    estimates.want(["guide"], KVSpec(key_bits=8, value_bits=8))
    assert estimates.disk == {}


def test_another_memory_limit_makes_all_answers_old() -> None:
    numbers = iter(range(10))
    estimates = Estimates(lambda _: next(numbers))
    estimates.want(["guide"], KVSpec())
    estimates.take(WhatIf(0, None, done=1, total=1, line=line("guide")))
    estimates.want(["guide"], KVSpec(), 14 * 10**9)  # 2: disk, 3: the catalogue
    assert estimates.disk == {}
    assert not estimates.take(WhatIf(1, None, done=1, total=9, line=line("org/a")))
    assert estimates.take(WhatIf(3, None, done=1, total=9, line=line("org/a")))


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
