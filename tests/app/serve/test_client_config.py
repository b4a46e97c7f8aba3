"""What is pasted into editors and agents is what they can read, and has the token where one is needed."""

import json
import re
import tomllib

import pytest

from tokamac.app.serve.clients import client_config


def sections(host: str, key: str = "none") -> dict[str, str]:
    """Return what is told, by the first word of each title."""
    found = client_config(host, 8080, "org/model", *([] if key == "none" else [key]))
    return {re.split(r"[ :,]", each, maxsplit=1)[0]: each.split("\n", 1)[1] for each in found[2:].split("\n\n# ")}


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("fd00::1", "[fd00::1]")],
)
def test_each_names_the_address_and_the_model(host: str, url: str) -> None:
    told = sections(host)
    assert len(told) == 10
    for name, text in told.items():
        assert f"http://{url}:8080" in text, name
        assert "org/model" in text or name == "programs", name


def test_each_is_in_the_form_of_its_program() -> None:
    told = sections("127.0.0.1")
    codex = tomllib.loads(told["Codex"])
    assert codex["model_providers"][codex["model_provider"]]["base_url"] == "http://127.0.0.1:8080/v1"
    assert json.loads(told["Zed"])["language_models"]["openai_compatible"]["Tokamac"]["available_models"]
    assert json.loads(told["opencode"])["provider"]["tokamac"]["models"] == {"org/model": {}}


def test_where_a_token_is_needed_each_has_it() -> None:
    told = client_config("127.0.0.1", 8080, "org/model", "SECRET")
    for each in told[2:].split("\n\n# "):
        assert "SECRET" in each, each
    codex = tomllib.loads(sections("127.0.0.1", "SECRET")["Codex"])
    assert codex["model_providers"]["tokamac"]["env_key"] == "TOKAMAC_API_KEY"
