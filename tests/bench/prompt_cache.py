"""Section prompt_cache: what is saved where a prompt, or its beginning, was computed before, and what that takes."""

import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from tests.bench.plan import EngineServer, Plan, Remote
from tests.bench.report import Row, Section, Series, alternate, at_least, at_most, holds, plain, ratios, series
from tests.bench.texts import PROSE, QUESTIONS
from tests.engine.inside import runner_of, store_of, worker_of
from tokamac.engine.events import Event, Finished, Message
from tokamac.engine.options import PromptCacheSpec, Sampling
from tokamac.engine.prompt_cache.cache import BLOCK, PromptCache
from tokamac.engine.prompt_cache.folder import Budgets, Folder
from tokamac.engine.prompt_cache.memory import Node, common_prefix, insert, match_prefix, split

if TYPE_CHECKING:
    from tokamac.engine.runtime import Runtime


# Labs of the prompt cache, each in a process of its own (see remote): an engine, mlx-lm's cache, an engine while a
# disk works.

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
        worker_of(self.engine).call(lambda: store_of(self.engine).flush(SETTLE_S))
        if trouble := self.engine.cache_trouble():
            raise OSError(trouble)

    def forget(self) -> None:
        """Settle, and forget what is in memory."""
        self.settle()
        worker_of(self.engine).call(store_of(self.engine).clear)

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
        store = store_of(self.engine)
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
        held = worker_of(self.engine).call(lambda: store_of(self.engine).nbytes)
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
        return runner_of(self.engine).runtime

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
        block = BLOCK * runner_of(self._server.engine).runtime.plan.bytes_per_token
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


# Section: what is saved where a prompt, or its beginning, was computed before, and what that takes.

BRANCHES, BRANCH = 8, 64
AHEAD_S = 3.0
ELSEWHERE = 50  # added to a prefix's number: a prefix that nothing else asks for
SHORTEST, LONGEST, VOCABULARY = 2000, 30_000, 150_000
FRESH = 0.05  # one stored prefix in twenty shares no beginning with an earlier one


def measure_prompt_cache(plan: Plan) -> Section:
    """Measure time to the first token, tokens computed, bytes, look-ups, and decoding while the disk is written."""
    with tempfile.TemporaryDirectory(prefix="tokamac-bench-") as place:
        with Remote(PromptLab, plan.model, None) as lab:
            memory, again = _in_memory(plan, lab), _again(plan, lab)
            ours: Stored = lab.call("branches", BRANCHES, BRANCH)
        rows = [*memory, *_from_disk(plan, f"{place}/restart"), *_branches(plan, ours), *again]
        rows += [*_ahead(plan, f"{place}/ahead"), *_look_up(plan), *_writing(plan, place)]
    return Section("Prompt cache", rows, _how(plan))


def _in_memory(plan: Plan, lab: Remote) -> list[Row]:
    def cold(number: int) -> Asked:
        return lab.call("ask_afresh", number, 0)

    def warm(number: int) -> Asked:
        return lab.call("ask", number, 1)

    def back(number: int) -> Asked:
        return lab.call("ask_after_another", number, 2)

    for measured in (cold, warm, back):
        measured(0)  # the first use of everything
    colds, warms, backs = alternate(plan.rounds, cold, warm, back)
    return [
        _computed(f"{PREFIX:,} tokens in memory + {NEW} new: tokens computed", warms),
        plain("TTFT cold", _ttft(colds, 1e3), "ms"),
        plain("TTFT warm, in memory", _ttft(warms, 1e3), "ms"),
        at_most("TTFT warm ÷ cold, in memory", ratios(_ttft(warms), _ttft(colds)), 0.05),
        plain("the same, back from another conversation", ratios(_ttft(backs), _ttft(colds))),
    ]


def _from_disk(plan: Plan, folder: str) -> list[Row]:
    with Remote(PromptLab, plan.model, folder) as writer:
        for number in range(1, plan.rounds + 1):
            writer.call("ask", number, 0)
            writer.call("settle")
    warms, colds = [], []
    for number in range(1, plan.rounds + 1):
        with Remote(PromptLab, plan.model, folder) as reader:
            warms.append(reader.call("ask", number, 1))
            colds.append(reader.call("ask_afresh", number + ELSEWHERE, 1))
    return [
        _computed(f"{PREFIX:,} tokens on disk + {NEW} new, after a restart: tokens computed", warms),
        plain("TTFT warm, from disk after a restart", _ttft(warms, 1e3), "ms"),
        at_most("TTFT warm ÷ cold, from disk after a restart", ratios(_ttft(warms), _ttft(colds)), 0.12),
    ]


def _branches(plan: Plan, ours: Stored) -> list[Row]:
    with Remote(PeerLab, plan.folder) as peer:
        theirs: Stored = peer.call("branches", BRANCHES, BRANCH)
    what = f"{BRANCHES} branches of {BRANCH} off {PREFIX:,} tokens: bytes held ÷ bytes of {PREFIX + BRANCHES * BRANCH:,} tokens"
    return [
        at_most(what, _share(ours), 1.15),
        Row("the engine's, reported and held", _held(ours)),
        plain("the same by mlx-lm's LRUPromptCache", _share(theirs)),
        Row("mlx-lm's, reported and held", _held(theirs)),
    ]


def _again(plan: Plan, lab: Remote) -> list[Row]:
    turns: list[tuple[int, int, int]] = lab.call("regenerated_and_edited", plan.count(8, 2))
    regenerated, edited, differ = (_numbers(column) for column in zip(*turns, strict=True))
    once = _numbers([1] * len(turns))
    return [
        holds("Regenerate: tokens computed, turn by turn", regenerated, once, met=regenerated == once),
        holds("Edit: tokens computed, turn by turn", edited, f"{differ} differ", met=edited == differ),
    ]


def _ahead(plan: Plan, folder: str) -> list[Row]:
    def cold(number: int) -> Asked:
        return lab.call("send", 2 * number, None)

    def warm(number: int) -> Asked:
        return lab.call("send", 2 * number + 1, AHEAD_S)

    with Remote(PromptLab, plan.model, folder) as lab:
        cold(0)  # as a chat that goes on: how fast prefill is, is known
        colds, warms = alternate(plan.rounds, cold, warm)
    what = f"{TEXT:,} tokens being written {AHEAD_S:g} s before Enter"
    return [
        plain(f"{what}: tokens computed after it", series([asked.computed for asked in warms])),
        at_most(f"{what}: TTFT ÷ cold", ratios(_ttft(warms), _ttft(colds)), 0.20),
    ]


def _look_up(plan: Plan) -> list[Row]:
    prefixes = plan.count(1000, 100)
    with Remote(TreeLab, prefixes) as lab:
        taken = series(lab.call("find_ms", prefixes))
    return [at_most(f"looking up {LONGEST:,} tokens among {prefixes:,} prefixes", taken, 5.0, "ms")]


def _writing(plan: Plan, place: str) -> list[Row]:
    new = plan.count(128, 48)
    with Remote(PromptLab, plan.model, f"{place}/writing") as lab:
        quiet, stored = alternate(plan.many_rounds, *(partial(_reply, lab, new, writing) for writing in (False, True)))
    with Remote(WritingLab, plan.model, place) as lab:
        lab.call("decode", new, True)
        alone, beside = alternate(plan.rounds, *(partial(_decode, lab, new, writing) for writing in (False, True)))
    without, meanwhile = (series([rate for rate, _ in runs]) for runs in (alone, beside))
    return [
        plain("decode, all stored before", series(quiet), "tok/s"),
        plain("decode of a reply that begins while the turn before is stored", series(stored), "tok/s"),
        at_least("decode while the disk is written ÷ without", ratios(series(stored), series(quiet)), 0.98),
        plain("one segment takes, written without a pause beside decode", series([taken for _, taken in beside]), "ms"),
        plain("decode beside such writing ÷ without", ratios(meanwhile, without)),
    ]


def _reply(lab: Remote, new: int, writing: bool, number: int) -> float | None:
    rate: float | None = lab.call("decode", 2 * number + writing, new, writing)
    return rate


def _decode(lab: Remote, new: int, writing: bool, _: int) -> tuple[float | None, float | None]:
    figures: tuple[float | None, float | None] = lab.call("decode", new, writing)
    return figures


def _computed(what: str, asked: Sequence[Asked]) -> Row:
    """Return a row of the tokens computed, round by round; the most of them are judged."""
    counts = [each.computed for each in asked]
    return holds(what, _numbers(counts), f"≤ {NEW + 1}", met=max(counts) <= NEW + 1)


def _ttft(asked: Sequence[Asked], per_second: float = 1.0) -> Series:
    return series([each.ttft_s * per_second for each in asked])


def _share(stored: Stored) -> Series:
    return Series((stored.reported / stored.needed,))


def _held(stored: Stored) -> str:
    return f"{stored.reported / 1e6:.2f} MB reported, {stored.grown / 1e6:.2f} MB held"


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _how(plan: Plan) -> str:
    return (
        f"Prompts are token ids of prose that differ from their first token on; the reply is one token. In memory: with nothing "
        f"in memory a prefix and {NEW} tokens (cold), at once the same prefix and {NEW} others (warm), and, after a short prompt "
        f"that begins otherwise, {NEW} others again (back). From disk: one process has {plan.rounds} prefixes answered and stored, "
        "and ends; then, for each, another process loads the model, computes something short past the cache, and asks for the "
        "stored prefix first and then, with all written and nothing in memory, for one that was never asked. The files were "
        "written a moment before, so the system has them in memory; the load is left out. Branches: computed one after another; "
        "bytes as the stores report them, room to grow included, over the bytes of every token held once in the side's own "
        "type. mlx-lm's caches are fetched, continued by its model and inserted as its server does. Held: by how much MLX's "
        f"active memory grew. Regenerate and Edit: one chat of {plan.count(8, 2)} turns, replies of at most {REPLY} tokens; each "
        "question is sent, regenerated, and edited ('…, in short?') and answered again. Differ: the tokens of the rendered prompt "
        "after what it shares with the one before, the template's included. Being written: `Chat.warm` with the text, "
        f"{AHEAD_S:g} s, `Chat.send`; cold is another text, sent at once with nothing in memory; the disk cache is on. Looking up: "
        f"`match_prefix` alone, in prefixes of {SHORTEST:,} to {LONGEST:,} random ids, each of which shares its beginning, up to a "
        f"random place, with an earlier one (one in {1 / FRESH:.0f} does not); so do the prompts looked up. Decode while the disk "
        f"is written: {plan.count(128, 48)} tokens that continue a prompt, asked for while the first segment of that prompt is "
        "on its way to the disk; the others wait until the reply has ended, as always in the product. Without a pause: what "
        "would be if they did not wait; a thread of the engine's process writes files of random bytes as large as "
        f"{BLOCK} tokens' keys and values, "
        "through `Folder.write` (checksum and fsync included), into the system's temporary folder."
    )


class TreeLab:
    """A tree of stored prefixes, without anything that is kept of them."""

    def __init__(self, prefixes: int) -> None:
        self._random = np.random.default_rng(0)
        self._root: Node[None] = Node([], None, 0, None)
        self._stored: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
        while len(self._stored) < prefixes:
            ids, _ = self._prompt(int(self._random.integers(SHORTEST, LONGEST, endpoint=True)))
            node, at = match_prefix(self._root, ids)
            if at < len(ids):
                parent = node if node.stop == at else split(node, at, None, None)
                insert(parent, ids[at:], None)
                self._stored.append(np.asarray(ids, np.int32))

    def find_ms(self, count: int) -> list[float]:
        """Return the milliseconds that each of so many look-ups took."""
        return [self._find_ms() for _ in range(count)]

    def _find_ms(self) -> float:
        ids, shared = self._prompt(LONGEST)
        began = time.perf_counter()
        _, at = match_prefix(self._root, ids)
        taken = (time.perf_counter() - began) * 1e3
        if at < shared:
            raise ValueError(f"{shared} tokens are stored, but {at} were found")
        return taken

    def _prompt(self, length: int) -> tuple[list[int], int]:
        """Return random ids that begin as a stored prefix does, up to a random place; and how many those are."""
        known = np.empty(0, np.int32)
        if self._stored and self._random.random() >= FRESH:
            known = self._stored[self._random.integers(len(self._stored))]
        shared = int(self._random.integers(min(length, len(known)), endpoint=True))
        new = self._random.integers(VOCABULARY, size=length - shared, dtype=np.int32)
        # New objects, as a tokenizer makes them: Python compares an object with itself faster.
        ids: list[int] = np.concatenate([known[:shared], new]).tolist()
        return ids, shared
