"""The calibration text, and what is cut from it."""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import make_tiny
from tokamac.engine.errors import OptionError
from tokamac.engine.model.config import read_config
from tokamac.engine.text.tokenizer import Tokenizer, load_tokenizer
from tokamac.quant import calibration

SCRIPTS = {
    "Polish": "ąćęłńśżź", "Russian": "абвгдежз", "Chinese": "的一是在", "Japanese": "のはをが", "Korean": "은는이가",
    "Arabic": "ابتثج", "Hindi": "कखगरत", "German": "äöüß", "French": "éèêç",
    "Spanish": "ñ¿áó", "Portuguese": "ãõ", "mathematics": "∫√≤Σ²" + "\\",
}  # fmt: skip
MARKS = (
    "    def ",
    "fn main",
    "SELECT",
    "const ",
    "#!/usr/bin/env bash",
    "<html",
    '{\n  "name"',
    "| planet |",
    "\n- ",
    "\nQ: ",
    "Dear ",
)


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token a byte, so tokens can be read as text again."""
    folder = make_tiny(tmp_path_factory.mktemp("bytes") / "tiny")
    return load_tokenizer(folder, read_config(folder), "tiny")


def text_of(tokenizer: Tokenizer, *sequences: list[int]) -> str:
    return "".join(tokenizer.decode(ids) for ids in sequences)


def numbered(lines: int) -> str:
    return "".join(f"line {number:05d}\n" for number in range(lines))


def test_the_shipped_text_is_varied_and_nothing_in_it_is_filler() -> None:
    text = calibration.text(None)
    assert 50_000 <= len(text.encode()) <= 60_000
    for what, characters in SCRIPTS.items():
        assert any(character in text for character in characters), what
    for mark in MARKS:
        assert mark in text, mark
    lines = Counter(line for line in text.splitlines() if len(line) > 40)
    assert max(lines.values()) == 1
    assert all(character.isprintable() or character in "\n\t" for character in text)
    assert "<|" not in text, "a model's own marks would be read as such"


def test_a_users_text_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_bytes(b"\xef\xbb\xbf" + "Zażółć gęślą jaźń.\n".encode() * 100)
    assert calibration.text(file) == "Zażółć gęślą jaźń.\n" * 100


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 characters"),
        (b" \n" * 2000, "0 characters"),
        (b"short", "5 characters"),
        (b"\xff\xfe" + b"x\0" * 2000, "not UTF-8"),
        (b"abc\0" * 2000, "not text"),
    ],
)
def test_a_text_that_says_nothing_is_refused_by_name(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "mine.txt"
    file.write_bytes(content)
    with pytest.raises(OptionError, match=said) as caught:
        calibration.text(file)
    assert "mine.txt" in caught.value.message
    assert caught.value.hint


def test_a_missing_file_a_folder_and_a_huge_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(OptionError, match="can't be read"):
            calibration.text(path)
    monkeypatch.setattr(calibration, "MOST_BYTES", 1 << 20)
    (tmp_path / "huge.txt").write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(OptionError, match="larger than 1 MiB"):
        calibration.text(tmp_path / "huge.txt")


def test_sequences_are_equally_long_spread_over_the_text_and_the_same_every_time(bytewise: Tokenizer) -> None:
    text = numbered(2000)
    found = calibration.sequences(bytewise, text, 10, 300)
    assert [len(ids) for ids in found] == [300] * 10
    assert found == calibration.sequences(bytewise, text, 10, 300)
    first = [int(text_of(bytewise, ids).split("line ")[1][:5]) for ids in found]
    gaps = [after - before for before, after in pairwise(first)]
    assert min(first) < 30
    assert all(150 <= gap <= 260 for gap in gaps), (
        "a tenth of 2,000 lines from one to the next, what is held back included"
    )


def test_what_is_read_for_verifying_is_never_calibrated_on(bytewise: Tokenizer) -> None:
    text = numbered(2000)
    read = set(text_of(bytewise, *calibration.sequences(bytewise, text, 1000, 110)).split("\n"))
    held = set(text_of(bytewise, calibration.verification_ids(bytewise, text, 10**6)).split("\n"))
    whole = {line for line in held if len(line) == 10}
    assert len(whole) == pytest.approx(400, abs=8), "a fifth of the text"
    assert not whole & read


def test_a_short_verification_takes_a_piece_of_every_stretch(bytewise: Tokenizer) -> None:
    ids = calibration.verification_ids(bytewise, numbered(2000), 201)
    assert len(ids) == 201
    lines = [int(number) for number in re.findall(r"line (\d{5})", text_of(bytewise, ids))]
    assert max(lines) - min(lines) > 1500


def test_a_short_text_is_used_whole(bytewise: Tokenizer) -> None:
    text = numbered(100)
    (only,) = calibration.sequences(bytewise, text, 8, 5000)
    held = calibration.verification_ids(bytewise, text, 5000)
    assert len(only) + len(held) == len(text)
    assert Counter(text_of(bytewise, only) + text_of(bytewise, held)) == Counter(text)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet="ab \n", min_size=40, max_size=3000),
    count=st.integers(1, 40),
    length=st.integers(2, 200),
)
def test_every_text_gives_at_most_what_was_asked_for(bytewise: Tokenizer, text: str, count: int, length: int) -> None:
    found = calibration.sequences(bytewise, text, count, length)
    assert 1 <= len(found) <= count
    assert len({len(ids) for ids in found}) == 1
    assert len(found[0]) <= length or len(found) == 1
    assert sum(map(len, found)) <= len(text)
    assert len(calibration.verification_ids(bytewise, text, length)) <= length


def test_a_mark_of_the_beginning_opens_every_sequence(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "marked")
    marked = load_tokenizer(folder, read_config(folder), "marked")
    encode, first = marked.encode, 257

    def with_mark(text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [first] * add_special_tokens + encode(text)

    marked.encode = with_mark  # type: ignore[method-assign]
    found = calibration.sequences(marked, numbered(500), 3, 100)
    assert [ids[0] for ids in found] == [first] * 3
    assert all(len(ids) == 100 and ids[1:].count(first) == 0 for ids in found)
    assert calibration.verification_ids(marked, numbered(500), 50)[0] == first
