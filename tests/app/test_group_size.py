"""A group size that the settings hold for all models, and a model that can't have it: it loads, and a note says so."""

from pathlib import Path

import pytest

from tests.tiny import make_tiny
from tokamac.app.backend.child import load_engine
from tokamac.app.backend.protocol import Load
from tokamac.engine.errors import OptionError
from tokamac.engine.options import KVSpec


def notes_of(request: Load) -> tuple[str, ...]:
    engine, info = load_engine(request, lambda _: None)
    engine.close()
    return info.notes


def test_a_stored_group_size_gives_way_with_a_note(tmp_path: Path) -> None:
    folder = str(make_tiny(tmp_path / "model"))
    first, *_ = notes_of(Load(folder, KVSpec(8, 8, group_size=128), prompt_cache=False))
    assert (
        first
        == "this model can't use KV groups of 128: its head dimension is not a multiple of it; the default is used"
    )
    assert not any("KV groups" in note for note in notes_of(Load(folder, KVSpec(8, 8, 64), prompt_cache=False)))


def test_what_else_can_not_be_had_is_still_refused(tmp_path: Path) -> None:
    folder = str(make_tiny(tmp_path / "model", head_size=80))
    for group_size in (64, 128):
        with pytest.raises(OptionError, match="can't be packed"):
            notes_of(Load(folder, KVSpec(8, 8, group_size), prompt_cache=False))
