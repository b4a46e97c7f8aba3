"""How long the way of one reply through the code is. Its limits stand in tests/house.toml, and may only fall there.

Counted is what a loaded, warm engine runs on all threads, in float16, as a Mac computes: MLX's and mlx-lm's Python is among it.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

from tests.test_house import REPLY_PATH
from tokamac import engine as package
from tokamac.engine import Engine, Finished, Message, PromptCacheSpec, Sampling, TextChunk

ROOT = Path(package.__file__).parents[1]
GREEDY = Sampling(temperature=0, max_tokens=48)


class Trace:
    """Counts calls by code, to the first text and after it. A thread that made the first text goes on in the second part."""

    def __init__(self) -> None:
        self.first: Counter[CodeType] = Counter()
        self.rest: Counter[CodeType] = Counter()
        self.tokens = 0
        self._made = TextChunk.__init__.__code__
        self._counts: dict[int, Counter[CodeType]] | None = None

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or self._counts is None:
            return
        thread = threading.get_ident()
        self._counts.setdefault(thread, self.first)[frame.f_code] += 1
        if frame.f_code is self._made:
            self._counts[thread] = self.rest

    def run(self, engine: Engine) -> None:
        self._counts = {}
        for event in engine.generate([Message("user", "Why is the sky blue? Explain at length.")], GREEDY):
            if isinstance(event, TextChunk):
                self._counts[threading.get_ident()] = self.rest
            if isinstance(event, Finished):
                self._counts, self.tokens = None, event.metrics.generated_tokens


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trace]:
    trace, cache = Trace(), PromptCacheSpec(folder=tmp_path_factory.mktemp("cache"))
    before = threading.getprofile()
    threading.setprofile(trace)  # before the engine's thread begins
    try:
        with Engine.load("guide", dtype="float16", speculation=None, prompt_cache=cache) as engine:
            list(
                engine.generate(
                    [Message("user", "Write a long story about a lighthouse keeper.")], Sampling(max_tokens=4)
                )
            )
            sys.setprofile(trace)
            trace.run(engine)
            sys.setprofile(None)
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(before)


def test_it_goes_through_few_files(trace: Trace) -> None:
    files = {Path(code.co_filename) for code in trace.first}
    ours = sorted(str(file.relative_to(ROOT)) for file in files if ROOT in file.parents)
    print(len(ours), *ours)
    assert len(ours) <= REPLY_PATH["files"], ours


def test_the_first_text_takes_few_calls(trace: Trace) -> None:
    print(trace.first.total())
    assert trace.first.total() <= REPLY_PATH["calls_to_first_text"]


def test_a_token_takes_few_calls(trace: Trace) -> None:
    calls = trace.rest.total() / (trace.tokens - 1)
    print(f"{calls:.0f} calls a token, of {trace.tokens}")
    assert calls <= REPLY_PATH["calls_a_token"]
