"""Settings survive a round trip; what can't be used is said, kept, and never fatal."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamac.app import settings
from tokamac.app.settings import Settings
from tokamac.engine.options import KVSpec, Sampling

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)


@given(
    st.builds(
        Settings,
        model=TEXT,
        theme=TEXT,
        system=TEXT,
        panel=st.booleans(),
        unknown=st.dictionaries(
            TEXT.map("x".__add__), st.integers() | TEXT | st.booleans() | st.lists(TEXT, max_size=2), max_size=3
        ),
    )
)
def test_what_is_written_is_read(chosen: Settings) -> None:
    read = settings._read(tomllib.loads(settings.dumps(chosen)), Path("s.toml"))
    assert read.settings == chosen
    assert len(read.warnings) == len(chosen.unknown)


def test_options_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "settings.toml"
    chosen = Settings(
        sampling=Sampling(temperature=0.0, seed=7, stop=("a\n", '"')), kv=KVSpec(8, 4, window=512, keep="system")
    )
    settings.save(path, chosen)
    assert settings.load(path) == settings.Loaded(chosen)
    assert [file.name for file in path.parent.iterdir()] == ["settings.toml"]


def test_no_file_is_the_defaults(tmp_path: Path) -> None:
    assert settings.load(tmp_path / "none.toml") == settings.Loaded(Settings())


def test_a_damaged_file_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(b"model = \xff")
    (warning,) = settings.load(path).warnings
    assert "damaged" in warning
    assert not path.exists()
    assert (tmp_path / "settings.damaged.toml").read_bytes() == b"model = \xff"


def test_unknown_keys_are_named_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('modle = "x"\nsampling = {temprature = 1}\n[future]\na = 2020-01-01\n')
    read = settings.load(path)
    assert [word in " ".join(read.warnings) for word in ("modle", "temprature", "future")] == [True] * 3
    settings.save(path, read.settings)
    assert tomllib.loads(path.read_text())["future"]["a"].year == 2020
    assert tomllib.loads(path.read_text())["sampling"] == {"temprature": 1}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("model = 3", "model"),
        ("[sampling]\ntemperature = -1", "temperature"),
        ('[sampling]\ntop_k = "many"', "top_k"),
        ("[kv]\nkey_bits = 7", "key_bits"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(f"{line}\n")
    read = settings.load(path)
    assert named in read.warnings[0]
    assert read.settings == Settings()


def test_a_valid_value_beside_a_bad_one_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("[sampling]\ntemperature = -1\ntop_k = 5\n")
    assert settings.load(path).settings.sampling == Sampling(top_k=5)
