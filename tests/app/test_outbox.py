"""Text leaves the engine's process in batches: the first piece at once, then as often as the device can spare."""

import os

import pytest

from tokamac.app.backend.outbox import FLUSH_S, Outbox
from tokamac.app.backend.protocol import Heartbeat, Text, decode_reply


def lines(fd: int) -> list[object]:
    os.set_blocking(fd, False)
    try:
        return [decode_reply(line) for line in os.read(fd, 1 << 16).splitlines(keepends=True)]
    except BlockingIOError:
        return []


@pytest.fixture
def pipe() -> tuple[int, int]:
    return os.pipe()


def test_the_first_text_goes_at_once_and_what_follows_waits(pipe: tuple[int, int]) -> None:
    out, outbox = pipe[0], Outbox(pipe[1])
    outbox.suit("cpu")
    for piece in ("a", "b", "c"):
        outbox.text(1, piece, "answer")
    assert lines(out) == [Text(1, "a")]
    outbox.flush()
    assert lines(out) == [Text(1, "bc")]


def test_nothing_overtakes_text(pipe: tuple[int, int]) -> None:
    out, outbox = pipe[0], Outbox(pipe[1])
    outbox.text(1, "a", "answer")
    outbox.text(1, "b", "answer")
    outbox.put(Heartbeat())
    assert lines(out) == [Text(1, "a"), Text(1, "b"), Heartbeat()]


def test_beside_a_model_on_the_cpu_the_screen_is_woken_more_rarely(pipe: tuple[int, int]) -> None:
    outbox = Outbox(pipe[1])
    assert outbox.flush_s == FLUSH_S
    outbox.suit("cpu")
    assert outbox.flush_s > FLUSH_S
    outbox.suit("metal")
    assert outbox.flush_s == FLUSH_S
