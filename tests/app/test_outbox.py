"""Text leaves the engine's process in batches: the first piece at once, then as often as the device can spare."""

import os

import pytest

from tokamac.app.backend.outbox import FLUSH_S, Outbox
from tokamac.app.backend.protocol import Heartbeat, ReplyEvent, decode_reply
from tokamac.engine.events import Alternative, TextChunk, TokenLogprob


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
        outbox.put(ReplyEvent(1, TextChunk(piece)))
    assert lines(out) == [ReplyEvent(1, TextChunk("a"))]
    outbox.flush()
    assert lines(out) == [ReplyEvent(1, TextChunk("bc"))]


def test_nothing_overtakes_text(pipe: tuple[int, int]) -> None:
    out, outbox = pipe[0], Outbox(pipe[1])
    outbox.put(ReplyEvent(1, TextChunk("a")))
    outbox.put(ReplyEvent(1, TextChunk("b")))
    outbox.put(Heartbeat())
    assert lines(out) == [ReplyEvent(1, TextChunk("a")), ReplyEvent(1, TextChunk("b")), Heartbeat()]


def test_beside_a_model_on_the_cpu_the_screen_is_woken_more_rarely(pipe: tuple[int, int]) -> None:
    outbox = Outbox(pipe[1])
    assert outbox.flush_s == FLUSH_S
    outbox.suit("cpu")
    assert outbox.flush_s > FLUSH_S
    outbox.suit("metal")
    assert outbox.flush_s == FLUSH_S


def test_a_batch_keeps_every_token_of_its_chunks_and_one_kind_of_text(pipe: tuple[int, int]) -> None:
    out, outbox = pipe[0], Outbox(pipe[1])
    outbox.flush_s = 60.0
    a, b = TokenLogprob(7, "b", -0.5, (Alternative(8, "c", -1.0),)), TokenLogprob(9, "d", -0.25)
    outbox.put(ReplyEvent(1, TextChunk("a", ids=(6,))))
    outbox.put(ReplyEvent(1, TextChunk("b", ids=(7,), logprobs=(a,))))
    outbox.put(ReplyEvent(1, TextChunk("d", ids=(9,), logprobs=(b,))))
    outbox.put(ReplyEvent(1, TextChunk("e", "thinking")))
    outbox.put(ReplyEvent(2, TextChunk("f", "thinking")))
    outbox.flush()
    assert lines(out) == [
        ReplyEvent(1, TextChunk("a", ids=(6,))),
        ReplyEvent(1, TextChunk("bd", ids=(7, 9), logprobs=(a, b))),
        ReplyEvent(1, TextChunk("e", "thinking")),
        ReplyEvent(2, TextChunk("f", "thinking")),
    ]
