"""Section: what the chat's screen costs the model."""

import os
import queue
import sys
import tempfile
import time
from pathlib import Path
from typing import TypeVar

from tests.benchmarks.plan import BenchError, Plan
from tests.benchmarks.report import Section, at_least, at_most, plain
from tests.benchmarks.screen_app import ENGINES
from tests.benchmarks.stats import alternate, ratios, series
from tests.benchmarks.terminal import COLUMNS, ROWS, Terminal
from tokamac.app.backend.client import BackendEvent, Died, EngineProcess
from tokamac.app.backend.protocol import Failed, Generate, Load, Loaded, ReplyEvent, decode_reply
from tokamac.app.chat.conversation import Turn, messages
from tokamac.engine.events import Finished
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import Sampling

QUESTION = "Why is decode memory-bound?"
PROMPT_SHOWN = "rite a message"  # the placeholder; its first letter may stand under the cursor
LONGEST_S = 120.0

T = TypeVar("T", Loaded, Finished)


def measure(plan: Plan) -> Section:
    """Decode a reply with the chat's screen on and without one, in turn."""
    new = plan.count(480, 48)
    on, off = alternate(
        plan.many_rounds,
        lambda _: with_screen("long", plan.model, new),
        lambda _: without_screen("long", plan.model, new),
    )
    if any(metrics.generated_tokens != new for metrics in on + off):
        raise BenchError(f"not every reply has {new} tokens")
    tps_on, tps_off = (series([metrics.decode_tps for metrics in side]) for side in (on, off))
    p99_on, p99_off = (
        series([gaps.p99 if (gaps := metrics.itl_ms) else None for metrics in side]) for side in (on, off)
    )
    rows = [
        plain("decode without a screen", tps_off, "tok/s"),
        plain("decode with the screen on", tps_on, "tok/s"),
        at_least("decode, on ÷ off", ratios(tps_on, tps_off), 0.97),
        plain("ITL p99 without a screen", p99_off, "ms"),
        plain("ITL p99 with the screen on", p99_on, "ms"),
        at_most("ITL p99, on ÷ off", ratios(p99_on, p99_off), 2.0),
    ]
    how = (
        f"With: the real chat in a pseudo-terminal of {COLUMNS}×{ROWS} whose output is read all the time; a question "
        "is typed into it. Without: its engine's process alone, sent the same conversation. A fresh process each "
        f"time; figures are the metrics that the engine's process sends when the reply ends. The model computes {new} "
        "tokens at temperature 0 without obeying its end mark, and what is shown for them is a fixed prose with "
        "emphasis, four characters a token, so the screen's work does not depend on the model."
    )
    return Section("Decode with the chat's screen on", rows, how)


def with_screen(engine: str, model: str, tokens: int) -> Metrics:
    """Ask in the chat, whose engine's process is one of ENGINES, for at most so many tokens; return the metrics it sent."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tests.benchmarks.screen_app", engine, model, str(tokens), name]
        with Terminal(command, os.environ) as terminal:
            terminal.wait_for(PROMPT_SHOWN, 30)
            terminal.press(QUESTION)
            time.sleep(0.3)  # a line typed at once may look like a paste
            terminal.press("\r")
            return _noted(folder / "replies", terminal)


def without_screen(engine: str, model: str, tokens: int) -> Metrics:
    """Ask the engine's process alone; return the metrics it sent."""
    said: queue.SimpleQueue[BackendEvent] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory() as name:
        process = EngineProcess(ENGINES[engine], Path(name) / "engine.log", said.put)
        try:
            process.send(Load(model))
            _next(said, Loaded)
            process.send(Generate(1, messages("", [Turn(QUESTION)]), Sampling(temperature=0, max_tokens=tokens)))
            return _next(said, Finished).metrics
        finally:
            process.close()


def _next(said: "queue.SimpleQueue[BackendEvent]", kind: type[T]) -> T:
    while not isinstance(event := _inner(said.get(timeout=LONGEST_S)), kind):
        if isinstance(event, Failed | Died):
            raise BenchError(f"the engine's process failed: {event}")
    return event


def _inner(event: BackendEvent) -> object:
    return event.event if isinstance(event, ReplyEvent) else event


def _noted(replies: Path, terminal: Terminal) -> Metrics:
    until = time.monotonic() + LONGEST_S
    while time.monotonic() < until and terminal.running:
        if replies.exists() and (lines := replies.read_bytes().splitlines()):
            reply = _inner(decode_reply(lines[0]))
            if isinstance(reply, Finished):
                return reply.metrics
            raise BenchError(f"the chat's engine failed: {reply}")
        time.sleep(0.2)
    raise BenchError("no reply ended in the chat")
