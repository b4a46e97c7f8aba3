"""Recorded requests without what they said: fields, types, order and lengths stay, every sentence is a number of characters."""

import json
import re
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[1] / "app/serve/fixtures"
PLAIN = re.compile(r"[\w.,:;/@+=<>#$^*|&()\[\]{}!?%-]{1,64}")  # one word: a name, a kind, a value
LONG_ID = re.compile(r"[0-9a-f]{8,}")
LENGTH = re.compile(r"⟨(\d+)⟩")
VERBATIM = ("arguments", "pattern", "enum", "const", "required")
WORDS = "the server reads what a client sends and answers in the words that it knows as long as there is one left "


def without_words(value: Any, field: str = "") -> Any:
    if isinstance(value, dict):
        return {name: without_words(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [without_words(each, field) for each in value]
    if not isinstance(value, str) or field in VERBATIM:
        return value
    return LONG_ID.sub(lambda found: "0" * len(found[0]), value) if PLAIN.fullmatch(value) else f"⟨{len(value)}⟩"


def with_words(value: Any) -> Any:
    """Return a request of the lengths that were recorded."""
    if isinstance(value, dict):
        return {name: with_words(each) for name, each in value.items()}
    if isinstance(value, list):
        return [with_words(each) for each in value]
    if not isinstance(value, str) or (found := LENGTH.fullmatch(value)) is None:
        return value
    length = int(found[1])
    return (WORDS * (length // len(WORDS) + 1))[:length]


def recorded() -> list[dict[str, Any]]:
    """Return the requests: client, path, model, body."""
    return [each for file in sorted(FIXTURES.glob("*.json")) for each in json.loads(file.read_text(encoding="utf-8"))]
