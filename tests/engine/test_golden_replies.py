"""Replies stay the same, to the bit, whatever way they are made: see ``tests/golden/replies.py``."""

import json
from pathlib import Path

import pytest

from tests.golden.replies import ENGINES, FILE, MACHINE, replies

STORED = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.skipif(STORED["machine"] != MACHINE, reason="taken on another kind of processor")
@pytest.mark.parametrize("name", ENGINES)
def test_replies_are_the_golden_ones(name: str, tmp_path: Path) -> None:
    assert dict(replies(name, tmp_path)) == STORED["replies"][name]
