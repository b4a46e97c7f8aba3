"""Rank 0 of two processes, driven by lines: each names a model, a split and what to do; each answer is a line of JSON."""

import json
import os
import signal
import sys
import threading
import time
from typing import Any

from tokamac.engine import Engine, KVSpec, Message, Nodes, Sampling, TokamacError
from tokamac.engine.distributed.team import join
from tokamac.engine.events import Failed, Finished, TextChunk

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
    return engine._runner.logprobs(IDS, 8).tolist()  # type: ignore[return-value]


def held(engine: Engine) -> int:
    """Return the bytes of weights that this process has."""
    return engine._runner.runtime.shape.weights


def cancelled(engine: Engine) -> dict[str, Any]:
    """Cancel a reply, then make another."""
    events, reason = engine.generate(FIRST, LONG), ""
    for event in events:
        if isinstance(event, TextChunk):
            events.cancel()
        if isinstance(event, Finished):
            reason = event.reason
    return {"reason": reason, "text": engine.ask(FIRST, GREEDY).text}


def lost(engine: Engine, how: str) -> dict[str, Any]:
    """Stop the other process while a reply is written; say what its reader gets, and after how many seconds."""
    (pid,) = join(NODES).pids
    began, sent = 0.0, False
    try:
        for event in engine.generate(FIRST, LONG):
            if isinstance(event, TextChunk) and not sent:
                began, sent = time.monotonic(), True
                os.kill(pid, getattr(signal, how))
    except TokamacError as error:
        return {
            "error": error.one_line(),
            "type": type(error).__name__,
            "after_s": time.monotonic() - began,
            "pid": pid,
        }
    return {"error": None}


NODES = Nodes(2)


def main() -> None:
    """Answer lines until stdin closes."""
    for line in sys.stdin:
        asked = json.loads(line)
        nodes = None if asked["split"] is None else Nodes(2, split=asked["split"])
        kv = KVSpec(**asked.get("kv", {}))
        told: dict[str, Any]
        try:
            with Engine.load(asked["model"], kv=kv, nodes=nodes, unchecked=True, cpu_exact=True) as engine:
                told = {
                    "notes": engine.spec.notes,
                    "weights": held(engine),
                    "stored": engine.spec.weight_bytes,
                }
                match asked["do"]:
                    case "answer":
                        told |= answers(engine)
                    case "cancel":
                        told |= cancelled(engine)
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
