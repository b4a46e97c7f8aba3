"""The rows of the list of conversations fit the room there is, and what gives way does so in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tokamac.app.store.values import Hit, StoredChat
from tokamac.app.tui.screens.chats import chat_row, hit_row
from tokamac.engine.events import Role

ID = "0123456789ab"


def chat(title: str, model: str = "org/model") -> StoredChat:
    """A chat of this title."""
    return StoredChat(ID, title, "words", 0.0, 0.0, model)


@pytest.mark.parametrize(
    ("room", "row"),
    [
        (80, f"  {'t' * 40}  5 minutes ago · model · {ID}"),
        (64, f"  {'t' * 23}…  5 minutes ago · model · {ID}"),
        (60, f"  {'t' * 35}…  model · {ID}"),
        (50, f"  {'t' * 25}…  model · {ID}"),
        (40, f"  {'t' * 23}…  {ID}"),
        (20, f"  {'t' * 17}…"),
    ],
)
def test_what_gives_way_to_a_long_title(room: int, row: str) -> None:
    assert chat_row(chat("t" * 40), is_open=False, seconds=300, room=room).plain == row


def test_a_chat_without_a_model_has_no_gap_where_its_name_would_be() -> None:
    row = chat_row(chat("Speed", model=""), is_open=False, seconds=300, room=60).plain
    assert row.strip() == f"Speed  5 minutes ago · {ID}"


def test_a_model_in_a_folder_is_named_by_the_folder() -> None:
    row = chat_row(chat("Speed", model="/models/mine/"), is_open=False, seconds=300, room=60).plain
    assert f" · mine · {ID}" in row


@given(st.text(min_size=1, max_size=90), st.integers(1, 200), st.booleans())
def test_a_row_never_needs_more_than_its_room(title: str, room: int, held: bool) -> None:
    row = chat_row(chat(title), is_open=held, seconds=9e4, room=room).plain
    assert "\n" not in row
    assert cell_len(row) <= max(room, 3)


def hit(snippet: str, *marks: tuple[int, int], role: Role = "user") -> Hit:
    """A message that was found."""
    return Hit(ID, "Speed", 1, role, 0.0, snippet, marks, 0, len(snippet))


@pytest.mark.parametrize(("role", "who"), [("user", "you: "), ("assistant", ""), ("system", "system: ")])
def test_a_hit_says_who_said_it(role: Role, who: str) -> None:
    said, _ = hit_row(hit("bandwidth", (0, 9), role=role)).plain.split("\n")
    assert said == f"  {who}bandwidth"


def test_the_match_is_seen_in_a_narrow_list() -> None:
    before = "many words before what was looked for: "
    said, where = hit_row(hit(before + "bandwidth\n\nand  after", (len(before), len(before) + 9))).plain.split("\n")
    assert said == f"  you: …{before[-24:]}bandwidth and after"
    assert where.strip() == "in Speed"
