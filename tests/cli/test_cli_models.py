"""``tokamac models list``: sizes, and what this machine makes of each, with a cache of the test's own."""

import json
import os
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.tiny import make_tiny


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in the cache that the conftest's environment names."""
    from huggingface_hub import constants

    cache = Path(os.environ["HF_HOME"], "hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))  # the client reads the environment when it is imported
    repository = cache / "models--org--tiny"
    make_tiny(repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    return repository


def test_the_list_has_size_bits_fit_and_speed(tokamac: Run, on_disk: Path) -> None:
    done = tokamac("models", "list", "--json")
    (model,) = json.loads(done.out)["models"]
    assert (model["id"], model["whole"], model["fits"], model["bits_per_weight"]) == ("org/tiny", True, True, 32.0)
    assert model["bytes"] == sum(path.stat().st_size for path in (on_disk / "snapshots").rglob("*") if path.is_file())
    assert model["memory_bytes"] > 0


def test_the_list_for_people_says_it_in_words(tokamac: Run, on_disk: Path) -> None:
    shown = tokamac("models")
    assert shown.status == 0
    assert "org/tiny" in shown.out
    assert "32.00" in shown.out
    assert "fits" in shown.out or "runs well" in shown.out
    assert "for 8,192 tokens held" in shown.out
