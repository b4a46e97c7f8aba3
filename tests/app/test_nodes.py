"""What a user starts on two processes: the chat's engine, a server, and commands; when one of them goes, it says so and ends."""

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.app.serve.serving import serving, user
from tests.engine.distributed.test_nodes import children, is_there
from tests.tiny import make_tiny
from tests.waiting import PATIENCE_S, until
from tokamac.app.backend.client import CHILD_COMMAND, BackendEvent, Died, EngineProcess
from tokamac.app.backend.protocol import Generate, Load, Loaded, ReplyEvent, RequestFailed
from tokamac.engine.events import Finished, Message, TextChunk
from tokamac.engine.options import Nodes, Sampling

T = TypeVar("T")
CHAT = "/v1/chat/completions"
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
    while not isinstance(event := events.get(timeout=PATIENCE_S), kind):
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


def test_what_two_nodes_serve_is_what_one_does(tmp_path: Path) -> None:
    """Several at once, a continued prompt, guesses of a draft model, and one who leaves; then both processes end."""
    model = make_tiny(tmp_path / "model")
    bodies = [{"messages": user(text), "temperature": 0, "max_tokens": 24, "n": 2} for text in ("Hello", "a b c " * 40)]
    answers = []
    for nodes in (None, Nodes(2)):
        with serving(str(model), tmp_path / "log", nodes=nodes, draft=str(model)) as served:
            notes = [note.text for note in served.model.info.model_notes]
            assert any("2 nodes hold the model" in note for note in notes) == (nodes is not None), notes
            with ThreadPoolExecutor(2) as threads:
                told = [*threads.map(lambda body: served.ask(CHAT, body), bodies)]
            told.append(served.ask(CHAT, bodies[1]))
            assert [status for status, _ in told] == [200] * 3
            left = served.connection()
            left.request("POST", CHAT, json.dumps({**bodies[0], "max_tokens": 400, "stream": True}))
            assert left.getresponse().read(5) == b"data:"
            left.close()
            told.append(served.ask(CHAT, bodies[0]))
            answers.append([[choice["message"]["content"] for choice in each["choices"]] for _, each in told])
            if nodes is not None:
                (follower,) = followers_of(os.getpid())
    assert answers[0] == answers[1]
    until(lambda: not is_there(follower))


def test_the_plain_chat_runs_on_two_nodes(tmp_path: Path) -> None:
    command = cli("chat", "--plain", "--max-tokens", "5", folder=tmp_path)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        running.stdin.write(b"Hello\n")
        running.stdin.flush()
        assert running.stdout.read(1)
        (follower,) = followers_of(running.pid)
        running.communicate(b"/quit\n", timeout=PATIENCE_S)
    assert running.returncode == 0
    until(lambda: not is_there(follower))


def cli(*command: str, folder: Path) -> list[str]:
    """Return a command with a tiny model that two nodes hold."""
    model = str(make_tiny(folder / "model"))
    return [sys.executable, "-m", "tokamac.app.cli", *command, model, "--unchecked", "--nodes", "2"]


def followers_of(pid: int) -> list[int]:
    """Return the followers that the children of a process have started."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    return [each for child in found.split() for each in children(int(child))]
