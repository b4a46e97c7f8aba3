"""What is said after a download that failed: that something is kept only where it is; a model only where one is called so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hub.hub_server import Hub
from tokamac.engine.hub.cache import meant
from tokamac.engine.hub.download import ADVICE

Client = Callable[..., dict[str, Any]]
NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:9"}


def test_where_nothing_has_arrived_nothing_is_said_to_be_kept(client: Client) -> None:
    assert client("resolve", "org/tiny", **NOWHERE)["hint"] == "Check the network."


def test_where_something_has_arrived_it_is_said_to_be_kept(client: Client) -> None:
    assert client("resolve", "org/tiny", "--cancel-at", "200000")["hint"] == ADVICE
    assert client("resolve", "org/tiny", **NOWHERE)["hint"] == f"Check the network. {ADVICE}"


def test_what_is_whole_already_does_not_count_as_arrived(client: Client) -> None:
    assert "result" in client("resolve", "org/tiny")
    assert client("pull", "org/tiny", **NOWHERE)["hint"] == "Check the network."


@pytest.mark.parametrize(("status", "hint"), [(503, "Try again later."), (429, "Wait some minutes.")])
def test_a_hub_that_fails_before_the_first_byte(hub: Hub, client: Client, status: int, hint: str) -> None:
    hub.status = status
    assert client("resolve", "org/tiny")["hint"] == hint


def test_an_id_that_the_hub_does_not_know_is_compared_with_those_that_are_known(client: Client) -> None:
    unknown = client("resolve", "mlx-community/Qwen3-8B-4bitt")
    assert unknown["error"] == "ModelNotFoundError"
    assert unknown["hint"] == "Did you mean mlx-community/Qwen3-8B-4bit? For a private model set HF_TOKEN."
    assert client("resolve", "org/nothing")["hint"] == "Check the spelling. For a private model set HF_TOKEN."


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("guid", "guide"),
        ("QWEN3-8B-4BIT", "mlx-community/Qwen3-8B-4bit"),
        ("Qwen3-8B", "mlx-community/Qwen3-8B-4bit"),
        ("mine-7", "someone/mine-7b"),
        ("mlx-community/Qwen3-8B-4bit", None),  # it is what was asked for
        ("gpt2", None),
        ("nonsense", None),
        ("org/name", None),
        ("", None),
    ],
)
def test_names_that_are_nearly_right(tmp_path: Path, name: str, found: str | None) -> None:
    (tmp_path / "models--someone--mine-7b").mkdir()
    assert meant(name, tmp_path) == found
