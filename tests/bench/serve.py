"""Section serve: what HTTP adds to the engine's own times, for one client and for many, and what many requests leave."""

import json
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.limits import LARGER
from tests.bench.plan import BenchError, EngineServer, Plan, Remote
from tests.bench.report import Row, Section, alternate, at_least, at_most, holds, number, plain, ratios, series
from tokamac.engine.events import Finished, Message
from tokamac.engine.options import Sampling

STREAMS = 16
WRITTEN = 128  # tokens of each stream
WARM = 40  # replies to a prompt that was read before, whose first text is waited for
REQUESTS = 10_000
GROWTH_MB = 16.0
HOST = "127.0.0.1"
CHAT = "/v1/chat/completions"
TEXT = re.compile(rb'"(?:content|reasoning_content)":"[^"]')


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process holds."""

    resident_bytes: int
    threads: int
    files: int


def use_of(pid: int) -> ProcessUse:
    """Return what a process holds now. Raises BenchError where the system does not tell."""
    folder = Path(f"/proc/{pid}")
    if not folder.exists():
        raise BenchError("only Linux tells what another process holds")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return ProcessUse(
        int(status["VmRSS"].split()[0]) * 1024, int(status["Threads"]), len(list((folder / "fd").iterdir()))
    )


class ServeProcess:
    """``tokamac serve``, in a process of its own."""

    def __init__(self, model: str, *flags: str) -> None:
        command = [
            sys.executable,
            "-m",
            "tokamac.app.cli",
            "serve",
            model,
            "--port",
            "0",
            "--parallel",
            str(STREAMS),
            *flags,
        ]
        self._process = subprocess.Popen(
            [*command, "--max-tokens", str(WRITTEN), "--temp", "0", "--speculation", "off"], stderr=subprocess.PIPE, text=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        assert self._process.stderr is not None
        line = ""
        while "serving " not in line:
            line = self._process.stderr.readline()
            if not line:
                raise BenchError("tokamac serve did not start")
        self.port = int(line.partition(";")[0].rpartition(":")[2])
        self._log = ThreadPoolExecutor(1)
        self._log.submit(self._process.stderr.read)  # a full pipe would hold it up

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(120)
        self._log.shutdown()
        assert self._process.stderr is not None
        self._process.stderr.close()


def asked(prompt: str, new: int, *, then: str = "close") -> bytes:
    """Return a request for a stream. then: what becomes of the connection."""
    told = {"messages": [{"role": "user", "content": prompt}], "max_tokens": new, "min_tokens": new, "stream": True}
    body = json.dumps(told).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {HOST}\r\nConnection: {then}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def first_text_s(stream: socket.socket, request: bytes) -> tuple[float, float]:
    """Return the seconds until a reply's first text here, and the engine's own TTFT. stream: a connection that stays open."""
    began, first_s, seen = time.perf_counter(), 0.0, b""
    stream.sendall(request)
    while not seen.endswith(b"0\r\n\r\n"):
        if not (piece := stream.recv(1 << 16)):
            break
        seen += piece
        if not first_s and TEXT.search(seen):
            first_s = time.perf_counter() - began
    found = re.search(rb'"ttft_s":([0-9.e-]+)', seen)
    if found is None or not first_s:
        raise BenchError(f"the server answered {seen[:200]!r}")
    return first_s, float(found.group(1))


def together_tps(port: int, requests: Sequence[bytes], new: int) -> float:
    """Return the tokens a second of streams that are asked for at once; all are read on this thread."""
    with selectors.DefaultSelector() as reading:
        began = time.perf_counter()
        for request in requests:
            stream = socket.create_connection((HOST, port))
            stream.sendall(request)
            reading.register(stream, selectors.EVENT_READ)
        while reading.get_map():
            for key, _ in reading.select():
                stream = key.fileobj  # type: ignore[assignment]
                if not stream.recv(1 << 16):
                    reading.unregister(stream)
                    stream.close()
        return len(requests) * new / (time.perf_counter() - began)


class ScheduleSide:
    """The engine in this process, asked from as many threads."""

    def __init__(self, model: str) -> None:
        self._server = EngineServer(model, endless=False, reuse=True, parallel=STREAMS)

    def together_tps(self, prompts: Sequence[str], new: int) -> float:
        """Return the tokens a second of replies that are asked for at once."""
        sampling = Sampling(temperature=0, max_tokens=new, min_tokens=new)

        def read(prompt: str) -> int:
            *_, end = self._server.engine.generate([Message("user", prompt)], sampling)
            assert isinstance(end, Finished)
            return end.metrics.generated_tokens

        with ThreadPoolExecutor(len(prompts)) as pool:
            began = time.perf_counter()
            tokens = sum(pool.map(read, prompts))
            return tokens / (time.perf_counter() - began)

    def close(self) -> None:
        """Free the model."""
        self._server.close()


def measure_serve(plan: Plan) -> Section:
    """The first text of a warm stream, sixteen streams at once, and what many requests leave."""
    from tests.engine.helpers import write_model

    with closing(ServeProcess(plan.model)) as server:
        rows = [*_first(plan, server), *_together(plan, server, "guide"), *_left(plan, server)]
    with TemporaryDirectory(prefix="tokamac-seeded-") as folder:
        larger = write_model(Path(folder) / "larger", bits=4, **LARGER)
        with closing(ServeProcess(str(larger))) as server:
            rows += _together(replace(plan, model=str(larger)), server, "88 M weights")
    how = (
        "`tokamac serve` in a process of its own, its engine in another, this one the client, over loopback. First text: "
        f"{WARM} streams one after another on one connection, to a prompt that was read before: from the request to the first "
        f"text here, less the TTFT that the engine measured. Together: {STREAMS} streams of {WRITTEN} tokens asked for at once, "
        "beside as many threads that read `Engine.generate` in one process, in turn. Requests: short ones, a tenth of whose "
        "clients leave at once; bytes, threads and files are counts, so one run (10,000 with --patient)."
    )
    return Section("Serve: what HTTP adds", rows, how)


def _first(plan: Plan, server: ServeProcess) -> list[Row]:
    request = asked("What is prefill?", 4, then="keep-alive")
    with socket.create_connection((HOST, server.port)) as stream:
        first_text_s(stream, request)
        times = [first_text_s(stream, request) for _ in range(plan.count(WARM, 5))]
    own, added = series([1e3 * ttft for _, ttft in times]), series([1e3 * (here - ttft) for here, ttft in times])
    return [plain("the engine's own TTFT, warm", own, "ms"), at_most("first text here, over that", added, 3.0, "ms")]


def _together(plan: Plan, server: ServeProcess, name: str) -> list[Row]:
    new = plan.count(WRITTEN, 16)
    prompts = [f"What is a KV cache? ({number})" for number in range(STREAMS)]
    requests = [asked(prompt, new) for prompt in prompts]
    with Remote(ScheduleSide, plan.model) as engine:
        engine.call("together_tps", prompts, new)
        together_tps(server.port, requests, new)
        here, there = alternate(
            plan.many_rounds,
            lambda _: together_tps(server.port, requests, new),
            lambda _: engine.call("together_tps", prompts, new),
        )
    ours, own = series(here), series(there)
    return [
        plain(f"{name}: {STREAMS} streams, all together", ours, "tok/s"),
        at_least(f"{name}: {STREAMS} streams ÷ {STREAMS} threads on the engine", ratios(ours, own), 0.95),
    ]


def _left(plan: Plan, server: ServeProcess) -> list[Row]:
    count = REQUESTS if plan.patient else plan.count(1000, 60)
    _many(server, count // 10)
    before = use_of(server.pid)
    _many(server, count)
    time.sleep(1)
    after = use_of(server.pid)
    growth = (after.resident_bytes - before.resident_bytes) / 1e6
    return [
        holds(
            f"growth of the server in {count:,} requests",
            f"{number(growth)} MB",
            f"≤ {GROWTH_MB:g} MB",
            met=growth <= GROWTH_MB,
        ),
        holds("threads and files more than before", f"{after.threads - before.threads}, {after.files - before.files}", "0, 0",
              met=after.threads <= before.threads and after.files <= before.files),
    ]  # fmt: skip


def _many(server: ServeProcess, count: int) -> None:
    def one(at: int) -> None:
        with socket.create_connection((HOST, server.port)) as stream:
            stream.sendall(asked(f"What is decode? {at % 50}", 2))
            while at % 10 and stream.recv(1 << 16):
                pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(count)))
