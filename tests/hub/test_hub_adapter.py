"""An adapter of the hub: its files alone, once, and then without a network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hub.hub_server import Hub, safetensors

Client = Callable[..., dict[str, Any]]


def test_an_adapter_is_fetched_without_anything_else_of_its_repository(hub: Hub, client: Client) -> None:
    hub.files |= {"adapter_config.json": b'{"r": 4}', "adapter_model.safetensors": safetensors(2000)}
    wanted = {"adapter_config.json", "adapter_model.safetensors"}
    folder = Path(client("resolve_adapter", "org/tiny")["result"])
    assert {path.name for path in folder.iterdir()} == wanted == hub.fetched()
    asked = len(hub.requests)
    assert client("resolve_adapter", "org/tiny", HF_HUB_OFFLINE="1")["result"] == str(folder)
    assert len(hub.requests) == asked


def test_a_repository_without_an_adapter_is_said_to_have_none(client: Client) -> None:
    failed = client("resolve_adapter", "org/tiny")
    assert failed["error"] == "ModelUnsupportedError"
    assert "adapter_model.safetensors" in failed["message"]
