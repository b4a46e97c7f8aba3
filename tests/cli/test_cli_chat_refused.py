"""``tokamac chat --plain``: a prompt that is refused is told why, and given back only to who can write it anew."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.plain_chat import Terminal, last_path, piped

pytestmark = pytest.mark.usefixtures("data")

WHY = "The prompt has "
STILL = "Still attached to the next prompt: "


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A file that the context of ``tiny-context`` has no room for."""
    path = tmp_path / "notes.md"
    path.write_text("keys and values " * 20)
    return path


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    shown = Terminal("tiny-context", "--plain")
    yield shown
    shown.end()


def prompts(data: Path) -> list[tuple[str, int]]:
    return [(m.text, len(m.attachments)) for m in last_path(data) if m.role == "user"]


def test_in_a_pipe_what_was_refused_does_not_go_with_the_next_line(data: Path, notes: Path) -> None:
    status, out, err = piped(f"/attach {notes}\nWhat is it?\nyes\n", "tiny-context")
    assert status == 1
    assert err.count(WHY) == 1
    assert STILL not in err
    assert "Decode reads" in out
    assert prompts(data) == [("What is it?", 1), ("yes", 0)]


def test_on_a_terminal_it_is_written_again_and_what_goes_with_it_named(
    data: Path, notes: Path, terminal: Terminal
) -> None:
    terminal.until("you> ")
    terminal.type(f"/attach {notes}\n")
    terminal.until("Attached to the next prompt")
    terminal.until("you> ")
    terminal.type("yes\n")
    terminal.until("(failed)")
    terminal.until(WHY)
    terminal.until(f"{STILL}{notes}. /detach removes the last one.")
    terminal.until("you> yes")
    terminal.type("\x15/detach\n")
    terminal.until("Removed from the next prompt")
    terminal.until("you> yes")
    terminal.type("\n")
    terminal.until("Decode reads")
    assert terminal.leave() == 0
    assert prompts(data) == [("yes", 1), ("yes", 0)]
