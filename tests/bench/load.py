"""Sections load and soak: requests that come while others run, as their reader sees them, and what an hour of them leaves."""

import http.client
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from tests.bench.plan import BenchError, EngineServer, Plan, Remote
from tests.bench.report import Row, Section, Series, alternate, at_most, holds, number, plain, ratios, series
from tests.bench.texts import PROSE
from tests.engine.inside import store_of
from tokamac.engine.events import Finished, TextChunk
from tokamac.engine.options import Sampling
from tokamac.engine.schedule.schedule import STALL_S

# Tokens: of a newcomer's prompt, of the reply that it disturbs at most, of that one's prompt, of the newcomer's reply.
LONG_PROMPT, WRITTEN, SHORT_PROMPT, SHORT_REPLY = 2000, 2000, 32, 8
BEFORE_S = 0.2  # how long the first reply is written before the newcomer comes
DISTURBED = 3  # times the newcomer's wait: so long after it came, the first reply is watched
LOADS = (0.5, 1.0, 2.0)  # arrivals in the time that one request takes alone, on the same side
REQUESTS, FEWER = 24, 6  # requests of a trace; and of the peer's, where that is slow and nobody is patient
SAMPLES = 4
SEED = 11


class Side(Protocol):
    """An engine that streams."""

    def stream(self, prompt: int, number: int, new: int) -> Generator[float, None, None]:
        """Answer a prompt of so many tokens, another one for every ``number``; yield when each piece of text came."""


@dataclass(frozen=True, slots=True)
class Request:
    """Seconds after the first; tokens of the prompt, and of the reply at most."""

    at_s: float
    prompt: int
    new: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What a reader saw of a reply, in seconds: until its first text, a token on average, and the longest pause."""

    ttft_s: float
    token_s: float
    pause_s: float


def trace(rate: float, count: int) -> list[Request]:
    """Return ``count`` requests that come at random, ``rate`` a second on average; the same for the same arguments."""
    rng = random.Random(SEED)
    at, found = 0.0, []
    for _ in range(count):
        found.append(Request(at, rng.choice((32, 64, 128, 256, 512)), rng.choice((16, 32, 48, 64))))
        at += rng.expovariate(rate)
    return found


def seen(side: Side, number: int, request: Request, began: float) -> Seen:
    """Wait for the request's time, ask, and read it to its end."""
    time.sleep(max(0.0, began + request.at_s - time.perf_counter()))
    asked = time.perf_counter()
    times = list(side.stream(request.prompt, number, request.new))
    gaps = [b - a for a, b in pairwise(times)]
    return Seen(times[0] - asked, (times[-1] - times[0]) / max(1, request.new - 1), max(gaps, default=0.0))


class Disturbed:
    """What both sides measure, each in a process of its own."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def alone(self, number: int) -> tuple[float, float]:
        """Return the seconds to the first token of the long prompt with nothing beside it, and a short reply's whole time."""
        long = seen(self._side, 1000 + number, Request(0.0, LONG_PROMPT, SHORT_REPLY), time.perf_counter())
        began = time.perf_counter()
        seen(self._side, 2000 + number, Request(0.0, 128, 40), began)
        return long.ttft_s, time.perf_counter() - began

    def beside(self, number: int) -> tuple[float, float, float]:
        """Return the newcomer's seconds to its first token; of the reply beside it the longest pause then, and a step before."""
        begun, arrived = threading.Event(), [0.0]

        def newcomer() -> Seen:
            begun.wait()
            time.sleep(BEFORE_S)
            arrived[0] = time.perf_counter()
            return seen(self._side, 3000 + number, Request(0.0, LONG_PROMPT, SHORT_REPLY), arrived[0])

        with ThreadPoolExecutor(1) as pool, closing(self._side.stream(SHORT_PROMPT, 4000 + number, WRITTEN)) as reply:
            coming, times = pool.submit(newcomer), []
            for at in reply:
                times.append(at)
                begun.set()
                if coming.done() and at > arrived[0] + DISTURBED * coming.result().ttft_s:
                    break
            came = coming.result()
        gaps = [(b - a, b) for a, b in pairwise(times)]
        before = [at for at in times if at < arrived[0]]
        after = [gap for gap, at in gaps if arrived[0] <= at <= arrived[0] + DISTURBED * came.ttft_s]
        if len(before) < 2 or not after:
            raise BenchError("the reply ended before the newcomer came")
        return came.ttft_s, max(after), (before[-1] - before[0]) / (len(before) - 1)

    def load(self, requests: Sequence[Request], round: int) -> list[Seen]:
        """Answer all requests, each asked for in its time."""
        with ThreadPoolExecutor(len(requests)) as pool:
            began = time.perf_counter()
            asked = [
                pool.submit(seen, self._side, 100 * round + number, request, began)
                for number, request in enumerate(requests)
            ]
            return [each.result() for each in asked]


class EngineSide(Disturbed):
    """The engine, in this process."""

    def __init__(self, model: str) -> None:
        self._model, self._server = model, EngineServer(model)
        super().__init__(self)

    def stream(self, prompt: int, number: int, new: int) -> Generator[float, None, None]:
        """See ``Side``."""
        ids = self._server.prompt(prompt, number)
        for event in self._server.engine.generate(ids, Sampling(temperature=0, max_tokens=new)):
            if isinstance(event, TextChunk):
                yield time.perf_counter()

    def samples(self) -> tuple[int, int, float]:
        """Of several samples of one prompt return its tokens computed, its tokens, and bytes held ÷ those of it and the replies."""
        server, new = EngineServer(self._model, reuse=True), 64
        prompt, engine = server.prompt(LONG_PROMPT, 0), server.engine
        *_, alone = engine.generate(server.prompt(SHORT_PROMPT, 1), Sampling(temperature=0, max_tokens=SHORT_REPLY))
        assert isinstance(alone, Finished)
        a_token = (alone.metrics.kv_bytes_per_step or 0) / (SHORT_PROMPT + SHORT_REPLY // 2)
        before, computed, held = engine.between(mx.get_active_memory), 0, 0
        for _, _, event in engine.generate_many(
            [prompt], Sampling(temperature=1, seed=SEED, max_tokens=new), n=SAMPLES
        ):
            if isinstance(event, Finished):
                computed += event.metrics.prefill_tokens
                held = max(held, engine.between(mx.get_active_memory) - before)
        server.close()
        return computed, LONG_PROMPT, held / (a_token * (LONG_PROMPT + SAMPLES * new))

    def close(self) -> None:
        """Free the model."""
        self._server.close()


class PeerSide(Disturbed):
    """mlx-lm's server, and its readers in this process."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [sys.executable, "-m", "mlx_lm", "server", "--model", folder, "--port", str(self._port)]
        self._process = subprocess.Popen(
            [*command, "--log-level", "ERROR"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._folder = folder
        self._await()
        super().__init__(self)

    def _await(self) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until and self._process.poll() is None:
            try:
                list(self.stream(8, 0, 2))
            except (OSError, http.client.HTTPException):
                time.sleep(0.2)
            else:
                return
        raise BenchError("mlx-lm's server did not start")

    def stream(self, prompt: int, number: int, new: int) -> Generator[float, None, None]:
        """See ``Side``."""
        ids = self._tokenizer.encode(PROSE, add_special_tokens=False)
        begin = (7 * number) % len(ids)
        text = self._tokenizer.decode(list(islice(cycle(ids[begin:] + ids[:begin]), prompt)))
        asked = {
            "model": self._folder, "prompt": text, "max_tokens": new, "temperature": 0.0, "stream": True,
            "logit_bias": {str(self._tokenizer.eos_token_id): -100.0},
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0].get("text"):
                    yield time.perf_counter()
        finally:
            connection.close()

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait(10)


def measure_load(plan: Plan) -> Section:
    """A long prompt beside a reply, samples of one prompt, and a trace of arrivals at three loads."""
    count = plan.count(REQUESTS, 6)
    with Remote(EngineSide, plan.model) as ours:
        ours.call("alone", 99)
        alone, beside = _beside(ours, plan.rounds)
        computed, once, held = ours.call("samples")
        loads = [_loads(ours, alone, count)]
    with Remote(PeerSide, str(Path(plan.folder))) as theirs:
        peer_alone, peer_beside = _beside(theirs, plan.rounds if plan.patient else 1)
        loads.append(_loads(theirs, peer_alone, count if plan.patient else min(count, FEWER)))
    rows = [
        *_newcomer("", alone, beside, judged=True),
        *_newcomer("mlx-lm's server: ", peer_alone, peer_beside, judged=False),
        holds(
            f"{SAMPLES} samples of a prompt of {once:,} tokens: tokens of it computed",
            f"{computed:,}",
            f"≤ {once + SAMPLES:,}",
            met=computed <= once + SAMPLES,
        ),
        holds("their keys and values ÷ one prompt and the replies", number(held), "≤ 1.1", met=held <= 1.1),
    ]
    for at, load in enumerate(LOADS):
        rows += [
            _percentiles(load, who, side[at]) for who, side in zip(("engine", "mlx-lm's server"), loads, strict=True)
        ]
    how = (
        f"As a reader sees it: the engine's events, and the chunks of mlx-lm's server. First a prompt of {LONG_PROMPT:,} tokens "
        f"that comes {BEFORE_S} s after the first text of a reply of up to {WRITTEN:,} tokens; a pause is judged against the stall "
        f"budget of {STALL_S} s and a step and a half. Then {len(loads[0][0])} requests, {len(loads[1][0])} to the server (prompts "
        f"of 32 to 512 tokens, replies of 16 to 64; seeded), that come at random, on average {', '.join(map(str, LOADS))} in the "
        "time that one of 128 and 40 tokens takes alone on the same side: percentiles 50 and 99 over the requests, of the time to "
        "the first text, of the mean time of a token of each reply, and of the longest pause in each.\n\n"
        + _plot(loads)
    )
    return Section("Load: requests that come while others run", rows, how)


def _beside(side: Remote, rounds: int) -> tuple[list[tuple[float, float]], list[tuple[float, float, float]]]:
    """Measure the long prompt alone and beside a reply, in turn."""
    alone, beside = alternate(rounds, *(partial(_call, side, method) for method in ("alone", "beside")))
    return alone, beside


def _call(side: Remote, method: str, round: int) -> Any:
    return side.call(method, round)


def _loads(side: Remote, alone: list[tuple[float, float]], count: int) -> list[list[Seen]]:
    """Answer a trace of ``count`` requests at each load."""
    unit_s = series([found[1] for found in alone]).median
    return [side.call("load", trace(load / unit_s, count), round) for round, load in enumerate(LOADS, 1)]


def _newcomer(
    who: str, alone: list[tuple[float, float]], beside: list[tuple[float, float, float]], *, judged: bool
) -> list[Row]:
    ttft, pause, step = (series([found[at] for found in beside]) for at in range(3))
    slower = ratios(ttft, series([found[0] for found in alone]))
    over = Series(tuple(a / (STALL_S + 1.5 * b) for a, b in zip(pause.values, step.values, strict=True)))
    what = f"{who}a newcomer's time to first token ÷ alone", f"{who}the longest pause it causes"
    if not judged:
        return [plain(what[0], slower), plain(what[1], pause, "s")]
    return [at_most(what[0], slower, 2.2), plain(what[1], pause, "s"), at_most(f"{what[1]} ÷ what it may", over, 1.0)]


def _percentiles(load: float, who: str, found: list[Seen]) -> Row:
    columns = ([each.ttft_s for each in found], [each.token_s for each in found], [each.pause_s for each in found])
    first, token, pause = (tuple(_percentile(values, share) for share in (0.5, 0.99)) for values in columns)
    value = (
        f"first text {number(first[0])} and {number(first[1])} s; a token {number(1e3 * token[0])} and "
        f"{number(1e3 * token[1])} ms; pause {number(pause[0])} and {number(pause[1])} s"
    )
    return Row(f"load {load:g}, {who}", value)


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


WIDTH = 48


def _plot(loads: Sequence[Sequence[list[Seen]]]) -> str:
    """Return the times to first text as bars: the dark part is of half of the requests, all of it of 99 %; one is full a side."""
    lines = ["```text", "time to first text, of half (█) and of 99 % (░) of the requests"]
    for who, side in zip(("engine", "mlx-lm"), loads, strict=True):
        found = [[_percentile([each.ttft_s for each in seen], share) for share in (0.5, 0.99)] for seen in side]
        longest = max(p99 for _, p99 in found)
        lines.append(f"{who}, the whole width is {longest:.2f} s")
        for load, (p50, p99) in zip(LOADS, found, strict=True):
            dark, whole = (round(WIDTH * value / longest) for value in (p50, p99))
            lines.append(f"  load {load:3g} {'█' * dark}{'░' * (whole - dark)}")
    return "\n".join([*lines, "```"])


# Section: what an hour of requests leaves.

SOAK_S, READERS, LOOK_S = 3600, 6, 1.0  # seconds; threads that ask; seconds between two looks at what is held
BITS = (None, None, (8, 4), (4, 4))
GROWTH_MB = 1.0


@dataclass(frozen=True, slots=True)
class Look:
    """Bytes of MLX's arrays beside the prompt cache's, threads of the process, and requests so far."""

    others: int
    threads: int
    requests: int


class Soaked:
    """An engine under mixed load, in a process of its own."""

    def __init__(self, model: str) -> None:
        self._server = EngineServer(model, reuse=True)
        self._server.reply(self._server.prompt(300, 0), 8)
        self._server.engine.between(lambda: store_of(self._server.engine).flush(20.0))  # its threads stay
        self._done = 0

    def soak(self, seconds: float) -> tuple[list[Look], int]:
        """Ask from several threads for so long; return what was seen meanwhile, and the threads that are left at the end."""
        before, until = threading.active_count(), time.monotonic() + seconds
        looks: list[Look] = []
        with ThreadPoolExecutor(READERS) as pool:
            readers = [pool.submit(self._read, number, until) for number in range(READERS)]
            while time.monotonic() < until:
                time.sleep(LOOK_S)
                looks.append(self._look())
            for each in readers:
                each.result()
        return looks, threading.active_count() - before

    def _read(self, number: int, until: float) -> None:
        rng = random.Random(SEED + number)
        while time.monotonic() < until:
            ids = self._server.prompt(rng.randrange(1, 600), rng.randrange(12))
            sampling = Sampling(temperature=1, seed=rng.randrange(100), max_tokens=rng.randrange(1, 64))
            reply = self._server.engine.generate(ids, sampling, kv_bits=rng.choice(BITS), background=rng.random() < 0.2)
            ends, way = rng.randrange(64), rng.random()
            for at, _ in enumerate(reply):
                if way < 0.2 and at == ends:
                    reply.cancel()
                elif way > 0.9 and at == ends:
                    reply.close()
                    break
            self._done += 1

    def _look(self) -> Look:
        engine = self._server.engine
        store = store_of(engine)
        active, kept = engine.between(lambda: (engine.memory().active, store.nbytes))
        return Look(active - kept, threading.active_count(), self._done)

    def close(self) -> None:
        """Free the model."""
        self._server.close()


def measure_soak(plan: Plan) -> Section:
    """Watch what an hour of mixed load leaves."""
    with Remote(Soaked, plan.model) as soaked:
        looks, left = soaked.call("soak", float(plan.count(SOAK_S, 10)))
    tenth = max(1, len(looks) // 10)
    first, last = (sorted(look.others for look in some)[len(some) // 2] for some in (looks[:tenth], looks[-tenth:]))
    growth = (last - first) / 1e6
    rows = [
        Row("requests", f"{looks[-1].requests:,}"),
        Row("threads, at most", str(max(look.threads for look in looks))),
        holds(
            "growth of memory beside the prompt cache, last tenth over first",
            f"{number(growth)} MB",
            f"≤ {GROWTH_MB:g} MB",
            met=growth <= GROWTH_MB,
        ),
        holds("threads left", str(left), "0", met=left == 0),
    ]
    how = (
        f"{READERS} threads ask for {plan.count(SOAK_S, 10)} s: prompts of 1 to 600 tokens that share beginnings, replies of up to "
        "63 tokens, a fifth in the background, keys and values of 16, 8,4 and 4 bits, a fifth cancelled, a tenth closed by their "
        "reader. Counts of bytes and threads, so one run."
    )
    return Section("Soak: what mixed load leaves", rows, how)
