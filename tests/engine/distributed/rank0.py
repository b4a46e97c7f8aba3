"""Rank 0 of two processes, driven by lines: each names a model, a split and what to do; each answer is a line of JSON."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.engine.inside import runner_of
from tokamac.engine import Engine, KVSpec, Message, Nodes, Sampling, TokamacError
from tokamac.engine.distributed import team as team_module
from tokamac.engine.distributed.team import allowed_by, join
from tokamac.engine.events import Failed, Finished, TextChunk
from tokamac.engine.lab.scoring import logprobs

GREEDY = Sampling(temperature=0, max_tokens=8)
LONG = Sampling(temperature=0, max_tokens=400)
FIRST = [Message("user", "Hello there, and again.")]
IDS = list(range(10, 42))


def answers(engine: Engine) -> dict[str, Any]:
    """Return what must be the same on one node and on several."""
    first = engine.ask(FIRST, GREEDY)
    longer = [*FIRST, Message("assistant", first.text), Message("user", "go on " * 20)]
    texts, cached = [first.text], []
    for prompt in (longer, [Message("user", "Another one.")], longer, longer[:1]):
        reply = engine.ask(prompt, GREEDY)
        texts.append(reply.text)
        cached.append(reply.metrics.cached_tokens)
    prompts = [[Message("user", "abc" * count)] for count in (1, 5, 20)]
    found: dict[int, str] = {}
    for index, _, event in engine.generate_many(prompts, GREEDY):
        assert not isinstance(event, Failed), event
        if isinstance(event, Finished):
            found[index] = event.text
    seeded = engine.ask(FIRST, Sampling(temperature=1.0, seed=5, max_tokens=8))
    logprobs = engine.between(lambda: engine_rows(engine))
    return {
        "texts": [*texts, *(found[index] for index in sorted(found)), seeded.text],
        "cached": cached,
        "rows": logprobs,
    }


def engine_rows(engine: Engine) -> list[list[float]]:
    return logprobs(runner_of(engine), IDS, 8).tolist()  # type: ignore[return-value]


def held(engine: Engine) -> int:
    """Return the bytes of weights that this process has."""
    return runner_of(engine).runtime.shape.weights


def cancelled(engine: Engine) -> dict[str, Any]:
    """Cancel a reply, then make another."""
    events, reason = engine.generate(FIRST, LONG), ""
    for event in events:
        if isinstance(event, TextChunk):
            events.cancel()
        if isinstance(event, Finished):
            reason = event.reason
    return {"reason": reason, "text": engine.ask(FIRST, GREEDY).text}


class Link:
    """Carries what rank 0 sends to rank 1, and back, until it stalls: then nothing goes any more, and nothing is closed."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._goes = threading.Event()
        self._goes.set()

    def join(self, backend: str, files: Mapping[str, str]) -> Any:
        """Join MLX's group as rank 0, for which rank 1 is at this link."""
        own, other = json.loads(files["MLX_HOSTFILE"])
        threading.Thread(target=self._accept, args=(other[0],), daemon=True).start()
        here = "{}:{}".format(*self._listening.getsockname())
        return JOIN(backend, {**files, "MLX_HOSTFILE": json.dumps([own, [here]])})

    def stall(self) -> None:
        """Let nothing through any more."""
        self._goes.clear()

    def _accept(self, other: str) -> None:
        host, port = other.split(":")
        while True:
            near, _ = self._listening.accept()
            while True:
                try:
                    far = socket.create_connection((host, int(port)))
                    break
                except OSError:  # it does not listen yet
                    time.sleep(0.02)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        while carried := source.recv(65536):
            self._goes.wait()
            sink.sendall(carried)


JOIN = team_module.join_group
LINK = Link()


def lost(engine: Engine, how: str) -> dict[str, Any]:
    """Stop the other process, or the link to it, while a reply is written; say what its reader gets."""
    (pid,) = join(NODES).pids
    sent = False
    try:
        for event in engine.generate(FIRST, LONG):
            if isinstance(event, TextChunk) and not sent:
                sent = True
                if how == "stall":
                    LINK.stall()
                else:
                    os.kill(pid, getattr(signal, how))
    except TokamacError as error:
        return {"error": error.one_line(), "type": type(error).__name__, "pid": pid}
    return {"error": None}


def bounded(engine: Engine) -> dict[str, Any]:
    """Say what the other process allows this one, and what is said of a prompt once that is next to nothing."""
    limit = runner_of(engine).runtime.memory_limit
    found: dict[str, Any] = {"others": limit.others(), "own": replace(limit, others=lambda: None).budget()}
    said = {"room": 1000, "token_bytes": 1}
    limit.others = lambda: allowed_by([said], held(engine), 1)
    try:
        engine.ask(FIRST, GREEDY)
    except TokamacError as error:
        found["error"] = error.one_line()
    return found


NODES = Nodes(2)


def main() -> None:
    """Answer lines until stdin closes."""
    for line in sys.stdin:
        asked = json.loads(line)
        nodes = None if asked["split"] is None else Nodes(2, split=asked["split"])
        kv = KVSpec(**asked.get("kv", {}))
        told: dict[str, Any]
        if asked["do"] == "stall":
            team_module.join_group = LINK.join
            team_module.LINK_SILENCE_S = 2.0  # a little more than a beat
        try:
            with Engine.load(asked["model"], kv=kv, nodes=nodes, unchecked=True, cpu_exact=True) as engine:
                told = {"notes": engine.spec.notes, "weights": held(engine), "stored": engine.spec.weight_bytes}
                match asked["do"]:
                    case "answer":
                        told |= answers(engine)
                    case "cancel":
                        told |= cancelled(engine)
                    case "bound":
                        told |= bounded(engine)
                    case "wait":
                        print(json.dumps({"pids": join(NODES).pids}), flush=True)
                        threading.Event().wait()
                    case how:
                        told |= lost(engine, how)
        except TokamacError as error:
            told = {"refused": error.one_line()}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
