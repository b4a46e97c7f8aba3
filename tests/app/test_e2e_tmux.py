"""The whole product as a person uses it: the command, a terminal, the engine's process and the embedded model."""

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.app.tmux import Size, Tmux
from tokamac.app.store.store import Store
from tokamac.app.store.values import StoredMessage

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed: nothing to run the chat in"),
]
Start = Callable[..., Any]
EMPTY = "Write a message"
LOADED = " bpw"  # in the side panel
COLOUR = re.compile(r"\x1b\[(?:[0-9;:]*;)?(?:[349][0-8]|10[0-7])[;:m]")
ATTEMPTS = 12


class Home:
    """A user's folders, and what the store in them holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def environment(self) -> dict[str, str]:
        names = ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME")
        ours = dict.fromkeys((*names, "TOKAMAC_DATA_DIR", "TOKAMAC_CACHE_DIR"), str(self.folder))
        return ours | {"OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LC_ALL": "C.UTF-8"}

    def messages(self) -> list[StoredMessage]:
        """The path that is read in the newest chat."""
        with closing(Store.open(self.folder / "chats" / "chats.db")) as store:
            newest = store.latest()
            return [] if newest is None else store.path(newest.id)

    def versions(self) -> int:
        """How many replies stand beside the last one."""
        return self.messages()[-1].siblings


@contextmanager
def chat(
    folder: Path, *flags: str, size: Size = (100, 30), term: str = "xterm-256color", **environment: str
) -> Iterator[tuple[Tmux, Home]]:
    home = Home(folder)
    command = [sys.executable, "-m", "tokamac.app.cli", "chat", *flags]
    with Tmux(command, folder, size, term, home.environment | environment) as tmux:
        tmux.shows(EMPTY)
        yield tmux, home


def ask(tmux: Tmux, home: Home, question: str) -> None:
    """Send a question and wait for its whole reply."""
    tmux.write(question)
    tmux.shows(question)
    tmux.press("Enter")
    tmux.until(lambda: ended(home, question), f"a reply to {question!r}")


def ended(home: Home, question: str) -> bool:
    kept = home.messages()
    return len(kept) > 1 and kept[-2].text == question and kept[-1].state != "partial"


def stop_one(tmux: Tmux, home: Home) -> None:
    """Stop a reply. The model is small, and may be quicker than the key: then ask again."""
    for attempt in range(ATTEMPTS):
        question = f"What is prefill, what is decode, what is a ceiling, and which keys are there? ({attempt})"
        tmux.write(question)
        tmux.shows(f"({attempt})")
        tmux.press("Enter", "Escape")
        tmux.until(lambda question=question: ended(home, question), "the end of the reply")
        if home.messages()[-1].state == "stopped":
            return
    pytest.fail(f"none of {ATTEMPTS} replies was stopped")


def leave(tmux: Tmux) -> None:
    tmux.press("C-q")
    tmux.until(lambda: tmux.exit_status is not None, "the end of the program")
    assert tmux.exit_status == 0


def test_a_first_run_to_a_chat_that_is_continued(tmp_path: Path) -> None:
    with chat(tmp_path) as (tmux, home):
        tmux.shows(LOADED)
        ask(tmux, home, "What is prefill?")
        tmux.shows("What is prefill?")
        answer = home.messages()[-1]
        assert answer.text
        assert answer.metrics is not None
        stop_one(tmux, home)
        tmux.shows("stopped")
        tmux.press("C-r")
        tmux.until(lambda: home.versions() == 2 and home.messages()[-1].state != "partial", "another reply")
        tmux.shows("‹ 2 of 2 ›")
        tmux.press("C-n")
        ask(tmux, home, "Which keys make a new line?")
        tmux.press("C-l")
        tmux.shows("Conversations")
        tmux.write("ceiling")
        tmux.shows("what is a ceiling")
        tmux.press("Enter")
        tmux.shows("‹ 2 of 2 ›")
        leave(tmux)
        before = home.messages()
    with chat(tmp_path, "--continue") as (tmux, home):
        tmux.shows(before[-2].text.rpartition(" ")[2])
        ask(tmux, home, "What does TTFT mean?")
        assert [message.id for message in home.messages()[:-2]] == [message.id for message in before]
        leave(tmux)


@pytest.mark.parametrize("term", ["xterm-256color", "screen"])
def test_without_colours(tmp_path: Path, term: str) -> None:
    with chat(tmp_path, term=term, NO_COLOR="1") as (tmux, home):
        tmux.shows(LOADED)
        ask(tmux, home, "What is prefill?")
        assert not COLOUR.search(tmux.screen(colours=True))
        leave(tmux)


@pytest.mark.parametrize(("size", "term"), [((40, 12), "screen"), ((250, 80), "xterm-256color")])
def test_the_smallest_and_the_largest_window(tmp_path: Path, size: Size, term: str) -> None:
    with chat(tmp_path, size=size, term=term) as (tmux, home):
        ask(tmux, home, "What is prefill?")
        assert COLOUR.search(tmux.screen(colours=True))
        for other in ((100, 30), (39, 11), (250, 80), (40, 12), size):
            tmux.resize(other)
            tmux.until(lambda other=other: fits(tmux, other), f"a screen of {other}")
            tmux.shows("too small" if other == (39, 11) else EMPTY)
        leave(tmux)


def fits(tmux: Tmux, size: Size) -> bool:
    lines = tmux.screen().splitlines()
    time.sleep(0.1)  # two looks alike: it has been drawn
    return len(lines) == size[1] and max(map(len, lines)) <= size[0] and tmux.screen().splitlines() == lines
