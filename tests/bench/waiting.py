"""Sections waiting and soak_serve: the longest pause that a large request causes in streams; what hours of mixed clients leave."""

import http.client
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.bench.plan import BenchError, Plan
from tests.bench.report import Row, Section, at_most, holds, plain, series
from tests.bench.serve import CHAT, HOST, ProcessUse, ServeProcess, use_of
from tests.bench.texts import PROSE

STREAMS, WRITTEN = 8, 3000  # streams that are watched; tokens of each
AFTER_S = 1.0  # how long a pause may begin after the answer
LONGEST_PAUSE_S = 0.25
SIZES_MB, BIASES = (1, 8, 31), 40_000
SETTLED_S = 4.0
MOST_LEFT_MB = 16
MEMORY_GB = "1"  # of the engine: its prompt cache takes a tenth
CLIENTS, LOOK_S, MOST_CHANGE = 6, 5.0, 0.02
WARM = 10_000  # requests, or half of the time: until then what has a bound fills, encoded texts last
MINUTES = 120
MINUTES_NAME = "TOKAMAC_SOAK_MIN"


def chat(text: str, new: int, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": new, **more}


def large_bodies() -> dict[str, bytes]:
    """Return what is sent beside the streams, by name."""
    found = {"a short prompt": chat("What is decode?", 5)}
    for megabytes in SIZES_MB:
        times = megabytes * 2**20 * 98 // 100 // len(json.dumps(PROSE)) + 1
        found[f"a prompt of {megabytes} MB"] = chat(PROSE * times, 5)
    found[f"{BIASES:,} logit biases"] = chat("Hi", 5, logit_bias={str(each): 1 for each in range(BIASES)})
    return {name: json.dumps(told).encode() for name, told in found.items()}


def post(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    """Return the status and the answer."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=600)) as connection:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()


class Streams:
    """Readers of streams that never end. times: of each, when a piece came; None between two streams."""

    def __init__(self, port: int) -> None:
        self._port, self._stop = port, threading.Event()
        self.times: list[list[float | None]] = [[] for _ in range(STREAMS)]
        self._threads = [threading.Thread(target=self._read, args=(number,), daemon=True) for number in range(STREAMS)]
        for each in self._threads:
            each.start()

    def _read(self, number: int) -> None:
        body = chat(f"Count from {number}.", WRITTEN, min_tokens=WRITTEN, stream=True, loop_check=False)
        while not self._stop.is_set():
            with closing(http.client.HTTPConnection(HOST, self._port, timeout=600)) as connection:
                connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
                for line in connection.getresponse():
                    if line.startswith(b"data: {"):
                        self.times[number].append(time.perf_counter())
                    if self._stop.is_set():
                        break
            self.times[number].append(None)

    def pause(self, begin: float, end: float) -> float:
        """Return the longest pause of any stream that lies in this time, in part."""
        gaps = [
            b - a
            for times in self.times
            for a, b in pairwise(list(times))
            if a is not None and b is not None and b >= begin and a <= end
        ]
        return max(gaps, default=0.0)

    def close(self) -> None:
        self._stop.set()
        for each in self._threads:
            each.join(30)


def children(pid: int) -> list[int]:
    """Return the processes that a process has."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def held(pid: int) -> ProcessUse:
    """Return what a server and its engines hold."""
    found = [use_of(each) for each in (pid, *children(pid))]
    return ProcessUse(
        *(sum(values) for values in zip(*((u.resident_bytes, u.threads, u.files) for u in found), strict=True))
    )


def measure_waiting(plan: Plan) -> Section:
    """The longest pause in eight streams, beside large requests."""
    bodies, pauses, answers = large_bodies(), dict[str, list[float]](), dict[str, list[float]]()
    with closing(ServeProcess(plan.model, "--memory", MEMORY_GB)) as server, closing(Streams(server.port)) as streams:
        time.sleep(2 * SETTLED_S)
        for _ in range(plan.rounds):
            for name, body in bodies.items():
                time.sleep(SETTLED_S)
                began = time.perf_counter()
                post(server.port, CHAT, body)
                answered = time.perf_counter()
                time.sleep(AFTER_S)
                pauses.setdefault(name, []).append(streams.pause(began, answered + AFTER_S))
                answers.setdefault(name, []).append(answered - began)
    rows = [at_most(f"longest pause, {name}", series(found), LONGEST_PAUSE_S, "s") for name, found in pauses.items()]
    rows += [plain(f"until the answer to {name}", series(found), "s") for name, found in answers.items()]
    left = left_by(bodies, plan.model) / 1e6
    rows.append(
        holds(
            "memory of server and engine, after all of these twice over before",
            f"{left:+.0f} MB",
            f"≤ {MOST_LEFT_MB} MB",
            met=left <= MOST_LEFT_MB,
        )
    )
    how = (
        f"`tokamac serve`, {STREAMS} streams, and one client that sends each of these in turn: the longest time between two "
        f"pieces of any stream, from the request to {AFTER_S:g} s after its answer. A prompt that can't fit is refused; the "
        "first row is what a short one does to them, on this machine with these readers on it. Memory is that of a server of its "
        "own, after its first short prompt and after all, with nothing beside them: streams would fill the prompt cache meanwhile."
    )
    return Section("Waiting: what a large request does to other streams", rows, how)


def left_by(bodies: Mapping[str, bytes], model: str) -> int:
    """Return the bytes that a server and its engine hold more after each of these bodies, twice, than after the first."""
    with closing(ServeProcess(model, "--memory", MEMORY_GB)) as server:
        before = 0
        for body in (*bodies.values(), *bodies.values()):
            post(server.port, CHAT, body)
            time.sleep(SETTLED_S if not before else AFTER_S)
            before = before or held(server.pid).resident_bytes
        time.sleep(SETTLED_S)
        return held(server.pid).resident_bytes - before


@dataclass
class Clients:
    """Mixed clients of a server until ``stop``. answers: by status."""

    port: int
    stop: threading.Event = field(default_factory=threading.Event)
    answers: Counter[int] = field(default_factory=Counter)

    def run(self, number: int) -> None:
        rng, bodies = random.Random(number), large_bodies()
        del bodies["a prompt of 31 MB"], bodies["a prompt of 8 MB"]
        kinds: list[Callable[[random.Random], None]] = [
            self._whole,
            self._stream,
            self._leave,
            self._others,
            self._stream,
        ]
        while not self.stop.is_set():
            if rng.random() < 0.02:
                self._ask(CHAT, rng.choice([*bodies.values()]))
            else:
                rng.choice(kinds)(rng)

    def _ask(self, path: str, body: bytes | Mapping[str, Any]) -> None:
        status, _ = post(self.port, path, body if isinstance(body, bytes) else json.dumps(body).encode())
        self.answers[status] += 1

    def _text(self, rng: random.Random) -> str:
        number = rng.choice((rng.randrange(12), rng.randrange(1 << 30)))  # half are new: the prompt cache is full soon
        return f"({number}) {PROSE[: rng.choice((20, 200, 900))]} What is decode?"

    def _whole(self, rng: random.Random) -> None:
        self._ask(CHAT, chat(self._text(rng), rng.randrange(1, 48), seed=rng.randrange(4), temperature=1))

    def _stream(self, rng: random.Random) -> None:
        self._ask("/v1/messages", chat(self._text(rng), rng.randrange(1, 48), stream=True))

    def _others(self, rng: random.Random) -> None:
        text = self._text(rng)
        path, body = rng.choice(
            [
                ("/v1/completions", {"prompt": text, "max_tokens": 8}),
                ("/v1/responses", {"input": text, "max_output_tokens": 8}),
                ("/v1/messages/count_tokens", {"messages": chat(text, 1)["messages"]}),
                ("/api/chat", {"model": "guide", **chat(text, 8), "options": {"num_predict": 8}}),
            ]
        )
        self._ask(path, body)

    def _leave(self, rng: random.Random) -> None:
        with closing(http.client.HTTPConnection(HOST, self.port, timeout=60)) as connection:
            connection.request("POST", CHAT, json.dumps(chat(self._text(rng), 200, stream=True)))
            if rng.random() < 0.5:
                connection.getresponse().read(50)


@contextmanager
def clients(port: int) -> Iterator[Clients]:
    """Have clients ask until the block ends."""
    asking = Clients(port)
    with ThreadPoolExecutor(CLIENTS) as pool:
        running = [pool.submit(asking.run, number) for number in range(CLIENTS)]
        try:
            yield asking
        finally:
            asking.stop.set()
        for each in running:
            each.result()


@dataclass(frozen=True, slots=True)
class Soaked:
    """What was seen. fifths: the medians of each after the warm-up."""

    answers: Mapping[int, int]
    fifths: list[ProcessUse]

    @property
    def growth(self) -> float:
        """Of memory, as a share."""
        return self.fifths[-1].resident_bytes / self.fifths[0].resident_bytes - 1


def soak(model: str, seconds: float) -> Soaked:
    """Ask a server for so long. Raises BenchError where it ends."""
    with closing(ServeProcess(model, "--memory", MEMORY_GB)) as server, clients(server.port) as asking:
        looks, until = list[ProcessUse](), time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(LOOK_S)
            if sum(list(asking.answers.values())) >= WARM or time.monotonic() > until - seconds / 2:
                looks.append(held(server.pid))
            if not children(server.pid):
                raise BenchError("the engine has ended")
        asking.stop.set()
    parts = [looks[part * len(looks) // 5 : (part + 1) * len(looks) // 5] for part in range(5)]
    return Soaked(dict(asking.answers), [_median(part) for part in parts if part])


def _median(looks: list[ProcessUse]) -> ProcessUse:
    middle = len(looks) // 2
    return ProcessUse(
        *(sorted(getattr(each, name) for each in looks)[middle] for name in ("resident_bytes", "threads", "files"))
    )


def measure_soak_serve(plan: Plan) -> Section:
    """Watch what hours of mixed clients leave."""
    minutes = float(os.environ.get(MINUTES_NAME, MINUTES))
    found = soak(plan.model, 30.0 if plan.quick else 60 * minutes)
    bad = {status: count for status, count in found.answers.items() if status >= 500 and status != 503}
    files = [each.files for each in found.fifths]
    rows = [
        Row("requests", f"{sum(found.answers.values()):,}"),
        holds("answers by status", ", ".join(f"{a}: {n:,}" for a, n in sorted(found.answers.items())), "no 500", met=not bad),
        holds("memory of server and engine, last fifth over first", f"{found.growth:+.1%}", f"±{MOST_CHANGE:.0%}",
              met=abs(found.growth) <= MOST_CHANGE),
        Row("the fifths", ", ".join(f"{each.resident_bytes / 1e6:.0f}" for each in found.fifths) + " MB"),
        holds("open files, the same", f"{files[0]} → {files[-1]}", f"±{MOST_CHANGE:.0%}",
              met=abs(files[-1] - files[0]) <= max(CLIENTS, MOST_CHANGE * files[0])),
    ]  # fmt: skip
    how = (
        f"`tokamac serve --memory {MEMORY_GB}`, {CLIENTS} clients for {minutes:g} minutes: chats, messages, responses, "
        "completions, counts, Ollama's chat, streamed and whole, a fifth of them leaving; now and then a prompt of 1 MB or "
        f"40,000 biases. Looked at every {LOOK_S:g} s, after {WARM:,} requests or half of the time, in which the prompt cache "
        "in memory and the encoded texts fill to their bounds; that on the disk grows on. Counts of bytes and files, so one run."
    )
    return Section("Soak of the server: what mixed clients leave", rows, how)
