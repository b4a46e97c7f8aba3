"""The chat's engine on two processes: when one of them goes, it says so, ends, and can be started again."""

import os
import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.engine.distributed.test_nodes import children, is_there
from tests.engine.helpers import until
from tests.tiny import make_tiny
from tokamac.app.backend.client import CHILD_COMMAND, BackendEvent, Died, EngineProcess
from tokamac.app.backend.protocol import Generate, Load, Loaded, ReplyEvent, RequestFailed
from tokamac.engine.events import Finished, Message, TextChunk
from tokamac.engine.options import Nodes, Sampling

T = TypeVar("T")
LONG = Sampling(temperature=0, max_tokens=400)


@contextmanager
def engine(folder: Path) -> Iterator[tuple[EngineProcess, "queue.Queue[BackendEvent]"]]:
    events: queue.Queue[BackendEvent] = queue.Queue()
    process = EngineProcess(CHILD_COMMAND, folder / "log", events.put)
    try:
        yield process, events
    finally:
        process.kill()
        until(lambda: not process.alive)


def awaited(events: "queue.Queue[BackendEvent]", kind: type[T]) -> T:
    while not isinstance(event := events.get(timeout=120), kind):
        assert kind is Died or not isinstance(event, Died), event
    return event


def replied(events: "queue.Queue[BackendEvent]", kind: type[Any]) -> Any:
    while not isinstance(found := awaited(events, ReplyEvent).event, kind):
        pass
    return found


def test_the_chats_engine_tells_that_a_node_is_gone_and_starts_again(tmp_path: Path) -> None:
    model, prompt = make_tiny(tmp_path / "model"), (Message("user", "Hello"),)
    load = Load(str(model), nodes=Nodes(2))
    with engine(tmp_path) as (process, events):
        process.send(load)
        assert any("nodes hold the model" in note.text for note in awaited(events, Loaded).info.model_notes)
        process.send(Generate(1, prompt, LONG))
        replied(events, TextChunk)
        (follower,) = children(process.pid)
        os.kill(follower, signal.SIGKILL)
        failed = awaited(events, RequestFailed)
        assert failed.id == 1
        assert "node" in failed.error
        assert "node 2 of 2" in awaited(events, Died).last_line
    with engine(tmp_path) as (process, events):
        process.send(load)
        awaited(events, Loaded)
        process.send(Generate(1, prompt, Sampling(temperature=0, max_tokens=3)))
        assert replied(events, Finished).metrics.generated_tokens == 3
        (follower,) = children(process.pid)
        process.kill()
        until(lambda: not is_there(follower))
