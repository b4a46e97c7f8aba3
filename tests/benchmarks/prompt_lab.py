"""Labs of the prompt cache, each in a process of its own (see remote): an engine, mlx-lm's cache, an engine while a disk works."""

import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from tests.benchmarks.servers import EngineServer
from tests.benchmarks.texts import PROSE, QUESTIONS
from tokamac.engine.events import Event, Finished, Message
from tokamac.engine.options import PromptCacheSpec, Sampling
from tokamac.engine.prompt_cache.cache import BLOCK, PromptCache
from tokamac.engine.prompt_cache.folder import Budgets, Folder
from tokamac.engine.prompt_cache.radix_tree import common_prefix

if TYPE_CHECKING:
    from tokamac.engine.runtime import Runtime

PREFIX, NEW = 2000, 16
TEXT = 1500
REPLY = 24
SETTLE_S = 60.0
FIRST = Sampling(temperature=0, max_tokens=1)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a prompt took: seconds from the request to the first token, and the prompt tokens that were computed."""

    ttft_s: float
    computed: int


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes of keys and values. reported: by who holds them. grown: of MLX's active memory. needed: by each token held once."""

    reported: int
    grown: int
    needed: int


class Prompts:
    """Token ids of prose. Prompts of two numbers differ from their first token on, endings of two numbers from theirs."""

    def __init__(self, prose: list[int]) -> None:
        self.prose = prose
        self._firsts = sorted(set(prose))

    def run(self, number: int, length: int) -> list[int]:
        """Return so many token ids."""
        return [self._firsts[number], *islice(cycle(self.prose), length - 1)][:length]

    def prompt(self, number: int, ending: int, new: int = NEW) -> list[int]:
        """Return the prefix of that number and an ending."""
        return [*self.run(number, PREFIX), *self.run(ending, new)]


class PromptLab:
    """A loaded engine with a prompt cache in memory, and in ``folder`` where one is given."""

    def __init__(self, model: str, folder: str | None) -> None:
        from tokamac.engine import Engine

        spec = PromptCacheSpec(disk=folder is not None, folder=Path(folder) if folder else None)
        self.engine: Engine = Engine.load(model, prompt_cache=spec)
        self._prompts = Prompts(self.engine.tokenizer.encode(PROSE))
        self._warm_up()

    def ask(self, number: int, ending: int) -> Asked:
        """Have a prompt answered with one token. The cache then holds the prompt."""
        return _asked(self.engine.generate(self._prompts.prompt(number, ending), FIRST))

    def settle(self) -> None:
        """Let the disk get all that it is to get."""
        self.engine._worker.call(lambda: self.engine._runner._store.flush(SETTLE_S))
        if trouble := self.engine.cache_trouble():
            raise OSError(trouble)

    def forget(self) -> None:
        """Settle, and forget what is in memory."""
        self.settle()
        self.engine._worker.call(self.engine._runner._store.clear)

    def ask_afresh(self, number: int, ending: int) -> Asked:
        """Forget, then ask: nothing of another conversation has to be set aside first."""
        self.forget()
        return self.ask(number, ending)

    def ask_after_another(self, number: int, ending: int) -> Asked:
        """Have a short prompt answered, for which all else is set aside, and then ask."""
        _asked(self.engine.generate(self._prompts.run(-1, NEW), FIRST))
        return self.ask(number, ending)

    def decode(self, number: int, new: int, writing: bool) -> float | None:
        """Have a prompt answered with one token, and at once, while that is being stored, with so many: return the decode rate.

        Not ``writing``: the second reply waits until all is stored.
        """
        self.ask(number, 0)
        store = self.engine._runner._store
        if not writing:
            self.settle()
        elif isinstance(store, PromptCache) and store._disk is not None:
            until = time.monotonic() + SETTLE_S
            while not store._disk.is_writing and time.monotonic() < until:
                time.sleep(0.0005)
        self.engine.tokenizer.eos_ids = frozenset()
        *_, last = self.engine.generate(self._prompts.prompt(number, 1), Sampling(temperature=0, max_tokens=new))
        assert isinstance(last, Finished)
        return last.metrics.decode_tps

    def branches(self, count: int, tokens: int) -> Stored:
        """Compute so many branches off one prefix, one after another."""
        self.forget()
        before = self.engine.memory().active
        for branch in range(count):
            _asked(self.engine.generate(self._prompts.prompt(0, branch, tokens), FIRST))
        grown = self.engine.memory().active - before
        held = self.engine._worker.call(lambda: self.engine._runner._store.nbytes)
        return Stored(held, grown, (PREFIX + count * tokens) * self._runtime.plan.bytes_per_token)

    def regenerated_and_edited(self, turns: int) -> list[tuple[int, int, int]]:
        """Chat. Return of each turn the tokens computed by Regenerate and by Edit, and how many of the edited prompt differ."""
        self.forget()
        chat, sampling, counts = self.engine.chat(), Sampling(temperature=0, max_tokens=REPLY), []
        for question in islice(cycle(QUESTIONS), turns):
            _asked(chat.send(question, sampling))
            again = _asked(chat.regenerate(sampling))
            asked = len(chat.messages) - 2  # the last is the reply
            before = self._rendered(chat.messages[: asked + 1])
            chat.edit(asked, f"{question.removesuffix('?')}, in short?")
            after = self._rendered(chat.messages)
            edited = _asked(chat.regenerate(sampling))
            counts.append((again.computed, edited.computed, len(after) - common_prefix(before, after)))
        return counts

    def send(self, number: int, ahead_s: float | None) -> Asked:
        """Send a long text in a new chat, which was being written since so many seconds, if any."""
        text = self.engine.tokenizer.decode(self._prompts.run(number, TEXT))
        chat = self.engine.chat()
        self.forget()
        if ahead_s is not None:
            chat.warm(text)
            time.sleep(ahead_s)
        return _asked(chat.send(text, FIRST))

    def close(self) -> None:
        """Free the model."""
        self.engine.close()

    @property
    def _runtime(self) -> "Runtime":
        return self.engine._runner.runtime

    def _warm_up(self) -> None:
        """Use everything once, past the prompt cache; the first use of a kernel is no one's cost here."""
        self.engine.logprobs(self._prompts.run(-1, self._runtime.prefill_chunk + NEW), self._runtime.prefill_chunk)
        _asked(self.engine.generate(self._prompts.run(-1, NEW), FIRST))

    def _rendered(self, messages: tuple[Message, ...]) -> list[int]:
        return self.engine.tokenizer.encode(self.engine.tokenizer.render(messages))


class PeerLab:
    """The same checkpoint in mlx-lm, and its own prompt cache."""

    def __init__(self, folder: str) -> None:
        from mlx_lm import load

        self._model, tokenizer, *_ = load(folder)
        self._prompts = Prompts(tokenizer.encode(PROSE, add_special_tokens=False))

    def branches(self, count: int, tokens: int) -> Stored:
        """Compute the branches as mlx-lm's server does: fetch the nearest, compute the rest, insert."""
        import mlx.core as mx
        from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

        store, caches = LRUPromptCache(), []
        mx.clear_cache()
        before = mx.get_active_memory()
        for branch in range(count):
            ids = self._prompts.prompt(0, branch, tokens)
            found, rest = store.fetch_nearest_cache("model", ids)
            caches = make_prompt_cache(self._model) if found is None else found
            self._model(mx.array([rest]), cache=caches)
            mx.eval([cache.state for cache in caches])
            store.insert_cache("model", ids, caches)
        grown = mx.get_active_memory() - before
        per_token = sum(array.nbytes // array.shape[2] for cache in caches for array in (cache.keys, cache.values))
        return Stored(store.nbytes, grown, (PREFIX + count * tokens) * per_token)


class WritingLab:
    """A loaded engine that reuses nothing, and a thread that writes segments while it decodes."""

    def __init__(self, model: str, place: str) -> None:
        self._server = EngineServer(model)
        self._place = place
        block = BLOCK * self._server.engine._runner.runtime.plan.bytes_per_token
        self._data = np.random.default_rng(0).bytes(block)

    def decode(self, new: int, writing: bool) -> tuple[float | None, float | None]:
        """Return the decode rate, and the milliseconds that each segment took which was written meanwhile."""
        ids = self._server.prompt(2 * NEW, 0)
        if not writing:
            return self._server.reply(ids, new).decode_tps, None
        with tempfile.TemporaryDirectory(dir=self._place) as root, Writing(Path(root), self._data) as thread:
            began, files = time.perf_counter(), thread.files
            rate = self._server.reply(ids, new).decode_tps
            return rate, (time.perf_counter() - began) / max(1, thread.files - files) * 1e3

    def close(self) -> None:
        """Free the model."""
        self._server.close()


class Writing(threading.Thread):
    """Writes segments one after another, from the first one's end to the end of the block. files: written so far."""

    def __init__(self, root: Path, data: bytes) -> None:
        super().__init__(daemon=True)
        self.files = 0
        self._folder = Folder(root, Budgets(daily=1 << 60))
        self._data = data
        self._begun, self._enough = threading.Event(), threading.Event()
        self._failure: OSError | None = None

    def run(self) -> None:
        """Write until it is enough."""
        try:
            while not self._enough.is_set():
                self._folder.write("0" * 32, "benchmark", "0" * 32, f"{self.files:032x}", self._data)
                self.files += 1
                self._begun.set()
        except OSError as error:
            self._failure = error
            self._begun.set()

    def __enter__(self) -> Self:
        self.start()
        self._begun.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._enough.set()
        self.join()
        if self._failure is not None:
            raise self._failure


def _asked(events: Iterator[Event]) -> Asked:
    *_, last = events
    assert isinstance(last, Finished)
    if last.metrics.ttft_s is None:
        raise ValueError("a reply gave no token")
    return Asked(last.metrics.ttft_s, last.metrics.prefill_tokens)
