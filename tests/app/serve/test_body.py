"""Long bodies: read in another process, refused before they hold anybody up."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.app.serve.serving import Served, user
from tokamac.app.serve.body import MOST_VALUES, UnreadableBodyError, read_apart, read_object

CHAT = "/v1/chat/completions"
LONG = json.dumps({"messages": user("Prefill reads the prompt. " * 80_000)}).encode()


def outcome(body: bytes, *, apart: bool) -> Mapping[str, Any] | tuple[Any, ...]:
    try:
        return asyncio.run(read_apart(body)) if apart else read_object(body)
    except UnreadableBodyError as error:
        return error.args


ANY = b'{"a": [1, 2.5, null, true, {"b": "\\ud800 \\u00e9 \xc3\xa9"}]}'


@pytest.mark.parametrize("body", [ANY, b'{"a": 1e999}', b"[]", b'{"a": NaN}', b"{", b"\xff"])
def test_a_body_is_read_alike_in_another_process(body: bytes) -> None:
    assert outcome(body, apart=True) == outcome(body, apart=False)


@pytest.mark.parametrize(
    ("body", "code", "why"),
    [
        (LONG, "context_length_exceeded", "at least"),
        (b'{"messages": [' + b"1," * MOST_VALUES + b"1]}", "invalid_json", f"{MOST_VALUES:,} values"),
        (b'{"messages": "' + b"a" * 2**20 + b'"', "invalid_json", "not JSON"),
    ],
)
def test_what_is_too_long_is_refused_and_the_next_is_answered(guide: Served, body: bytes, code: str, why: str) -> None:
    status, told = guide.ask(CHAT, body)
    assert (status, told["error"]["code"]) == (400, code)
    assert why in told["error"]["message"]
    biases = {str(each): 1 for each in range(4000)}
    status, _ = guide.ask(CHAT, {"messages": user("Hi"), "max_tokens": 2, "logit_bias": biases})
    assert status == 200
