"""Text cut to cells."""

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tokamac.app.tui.theme import end_of

NAMES = st.text(st.sampled_from("abc-/模型🙂"), max_size=30)


@given(NAMES, st.integers(2, 40))
def test_as_much_of_the_end_as_has_room(name: str, most: int) -> None:
    found = end_of(name, most)
    assert cell_len(found) <= most
    if found == name:
        return
    assert cell_len(name) > most
    assert found[0] == "…"
    assert name.endswith(found[1:])
    left_out = name[: len(name) - len(found[1:])]
    assert cell_len(f"…{left_out[-1]}{found[1:]}") > most  # nothing more would fit
