"""Nothing a terminal would obey passes, however the text is cut."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from tokamac.app.sanitise import LONGEST_SEQUENCE, REPLACEMENT, Sanitiser, bare, sanitise, sanitise_line

FORBIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]"
)
HOSTILE = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "\x1b",
                "\x1b[31m",
                "\x1b]52;c;ZWNobw==\x07",
                "\x1b]0;t\x1b\\",
                "\x1bP1$q\x1b\\",
                "\x9b1m",
                "\x9d",
                "\x9c",
                "\r",
                "\n",
                "\u202e",
            ]
        ),
        st.characters(max_codepoint=0xA0),
        st.characters(),
    ),
    max_size=60,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(HOSTILE, st.lists(st.integers(0, 400), max_size=8))
def test_any_cutting_gives_the_same_text_and_nothing_forbidden(text: str, cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    stream = Sanitiser()
    chunked = "".join(stream.feed(text[a:b]) for a, b in pairwise(edges))
    assert chunked == sanitise(text)
    assert not FORBIDDEN.search(chunked)


@pytest.mark.parametrize(
    "code",
    [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x61C, 0xD800],
)
def test_every_control_is_replaced_alone(code: int) -> None:
    assert not FORBIDDEN.search(sanitise(f"a{chr(code)}b"))


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain é 🦊 text\n\tindented", "plain é 🦊 text\n\tindented"),
        ("a\x1b[31;1mred\x1b[0m b", f"a{REPLACEMENT}red{REPLACEMENT} b"),
        ("x\x1b]52;c;c2VjcmV0\x07y", f"x{REPLACEMENT}y"),
        ("x\x1b]8;;http://e\x1b\\y", f"x{REPLACEMENT}y"),
        ("a\r\nb\rc\u2028d", "a\nb\nc\nd"),
        ("open \x1b]0;title\nnext line", f"open {REPLACEMENT}\nnext line"),
        ("\x1b(Bok", f"{REPLACEMENT}ok"),
        ("a\x9b2Jb", f"a{REPLACEMENT}b"),
        ("a family 👨‍👩‍👧 and a flag 🏳️‍🌈", "a family 👨‍👩‍👧 and a flag 🏳️‍🌈"),
    ],
)
def test_known_cases(raw: str, shown: str) -> None:
    assert sanitise(raw) == shown


def test_a_sequence_without_end_does_not_swallow_the_reply() -> None:
    assert sanitise("\x1b]0;" + "x" * (LONGEST_SEQUENCE + 100)).endswith("x" * 50)


def test_a_line_stays_a_line() -> None:
    assert sanitise_line("a\n\x1b[2Jb\tc") == f"a {REPLACEMENT}b c"


@settings(max_examples=300, deadline=None)
@given(HOSTILE)
def test_the_last_gate_takes_away_and_keeps_the_cells(text: str) -> None:
    row = bare(text)
    assert not FORBIDDEN.search(row)
    assert not set(row) & {"\n", "\t"}
    assert cell_len(row) == cell_len(text)
