"""``tokamac chat --plain`` while nobody writes: the model gives the chat a title; an unused one gives its memory back."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from platformdirs import user_log_path

from tests.cli.plain_chat import PATIENCE_S, Terminal, children, last_path, spawn, until
from tokamac.app.chat.background import SYSTEM
from tokamac.app.plain.repl import HEARD_S, Meanwhile
from tokamac.app.store.store import Store

TOLD = "is unloaded now"
TITLE = "Where decode spends its time"


@pytest.fixture
def hasty(tmp_path: Path, data: Path, terminal: Callable[..., Terminal]) -> Callable[..., Terminal]:
    """Starts a chat on a terminal in which an unused minute passes in a tenth of a second; ``folder`` is where it is kept."""

    def start(scenario: str, settings: str, folder: str = "data") -> Terminal:
        path = tmp_path / f"{folder}.toml"
        path.write_text(settings)
        own = {"TOKAMAC_DATA_DIR": str(tmp_path / folder), "TEST_SETTINGS": str(path), "TEST_HASTE": "600"}
        return terminal(scenario, "--plain", TERM="dumb", NO_COLOR="1", **own)

    return start


def test_an_unused_model_is_unloaded_while_a_line_is_waited_for(hasty: Callable[..., Terminal], data: Path) -> None:
    chat = hasty("fast", "unload_after_min = 1\n")
    chat.until("you> ")
    until(lambda: not children(chat.process.pid))  # nothing was asked yet, and nothing was pressed
    chat.type("hi\n")
    chat.until(TOLD)  # not before the line is whole
    chat.until("every weight once per token")
    chat.until("you> ")
    until(lambda: not children(chat.process.pid))
    chat.type("/edit ho\n")
    chat.until("every weight once per token")
    assert chat.leave() == 0
    assert [message.text for message in last_path(data) if message.role == "user"] == ["ho"]


def test_never_unless_the_user_says_when(hasty: Callable[..., Terminal]) -> None:
    chat = hasty("fast", "")
    chat.until("you> ")
    until(lambda: children(chat.process.pid))
    time.sleep(1)  # ten minutes, in which it was looked ten times
    assert children(chat.process.pid)
    chat.type("\x04")
    assert chat.left() == 0
    assert TOLD.encode() not in chat.shown


def titled(data: Path) -> tuple[str, str]:
    with Store.open(data) as store:
        (chat,) = store.chats()
        return chat.title, chat.title_origin


def entitled(chat: Terminal, data: Path) -> bool:
    """Whether the chat, which waits for a line, has its title: what came meanwhile is written when the line is whole."""
    chat.type("/stop\n")
    chat.until("you> ")
    return titled(data) == (TITLE, "model")


def test_the_model_gives_the_chat_a_title_while_a_line_is_waited_for(
    hasty: Callable[..., Terminal], data: Path
) -> None:
    chat = hasty("entitles", "")
    chat.until("you> ")
    chat.type("hi\n")
    chat.until("you> ")
    assert titled(data) == ("hi", "words")
    until(lambda: entitled(chat, data))
    chat.type("and on\n")
    chat.until("entitles: Title:")
    assert chat.leave() == 0
    assert chat.shown.count(TITLE.encode()) == 2  # both replies; that there is a title interrupts nobody


def test_a_title_gives_way_to_a_prompt(hasty: Callable[..., Terminal], data: Path) -> None:
    log = user_log_path("tokamac") / "engine.log"
    begin = log.stat().st_size if log.exists() else 0
    chat = hasty("entitles-slowly", "")
    chat.until("you> ")
    chat.type("hi\n")
    chat.until("you> ")
    until(lambda: f"warm [('system', {len(SYSTEM)})" in log.read_text()[begin:])  # what asks for a title has been read
    time.sleep(
        0.5
    )  # so that it is being written, which takes three seconds; not before it was looked again, five times
    chat.type("and on\n")
    chat.until("time.**")
    chat.until("you> ")
    assert titled(data) == ("hi", "words")
    chat.type("\x04")
    assert chat.left() == 0
    assert [(m.text[:6], m.state) for m in last_path(data)] == [
        ("hi", "complete"),
        ("Title:", "complete"),
        ("and on", "complete"),
        ("Title:", "complete"),
    ]


@pytest.mark.parametrize(
    ("settings", "own", "title"), [('titles = "words"\n', "/stop\n", "hi"), ("", "/title Mine\n", "Mine")]
)
def test_a_chat_that_is_to_keep_its_words_or_has_a_title_of_the_users_gets_none(
    hasty: Callable[..., Terminal], data: Path, tmp_path: Path, *, settings: str, own: str, title: str
) -> None:
    chat = hasty("entitles", settings)
    for text in (f"hi\n{own}", "/stop\n"):
        chat.until("you> ")
        chat.type(text)
    chat.until("you> ")
    chat.until("you> ")
    another = hasty("entitles", "", "another")  # begun later, which gets one
    another.until("you> ")
    another.type("hi\n")
    another.until("you> ")
    until(lambda: entitled(another, tmp_path / "another" / "chats" / "chats.db"))
    chat.type("/stop\n")
    chat.until("you> ")
    assert titled(data)[0] == title
    for each in (chat, another):
        each.type("\x04")
        assert each.left() == 0


def test_a_pipe_that_is_silent_for_long_does_not_keep_the_model(tmp_path: Path, data: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("unload_after_min = 1\n")
    with spawn("fast", env={**os.environ, "TEST_SETTINGS": str(path), "TEST_HASTE": "600"}) as process:
        until(lambda: children(process.pid))
        until(lambda: not children(process.pid))
        out, err = process.communicate("hi\n", timeout=PATIENCE_S)
    assert "every weight once per token" in out
    assert TOLD in err
    assert process.returncode == 0


def test_work_is_done_while_this_thread_waits_and_at_no_other_time() -> None:
    done: list[int] = []
    reader, writer = os.pipe()

    def work() -> None:
        done.append(1)
        if len(done) == 3:
            os.write(writer, b"x")

    other = Meanwhile(0.01, work)
    time.sleep(0.1)
    assert done == []
    with other.waiting():
        assert os.read(reader, 1) == b"x"
    number = len(done)
    assert number >= 3
    time.sleep(0.1)
    assert len(done) == number
    other.close()
    with other.waiting():
        time.sleep(0.1)
    assert len(done) <= number + 1  # one may have waited for its turn
    os.close(reader)
    os.close(writer)


def test_who_goes_on_waits_for_work_that_has_begun() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        time.sleep(0.1)
        ended.set()

    other = Meanwhile(0.01, work)
    with other.waiting():
        assert begun.wait(PATIENCE_S)
    assert ended.is_set()
    other.close()


def test_ctrl_c_that_wakes_nobody_is_sent_again() -> None:
    heard: list[float] = []
    other = Meanwhile(PATIENCE_S, lambda: None)
    before = signal.signal(
        signal.SIGINT, lambda *_: heard.append(time.monotonic())
    )  # and goes on waiting, as if it had not come
    try:
        with other.waiting():
            os.kill(os.getpid(), signal.SIGINT)
            deadline = time.monotonic() + PATIENCE_S
            while len(heard) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
        assert len(heard) >= 2
        seen = len(heard)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(3 * HEARD_S)
        assert len(heard) == seen + 1  # nobody waits: whoever runs hears it
    finally:
        signal.signal(signal.SIGINT, before)
        other.close()
