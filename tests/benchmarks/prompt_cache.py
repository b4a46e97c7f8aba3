"""Section: what is saved where a prompt, or its beginning, was computed before, and what that takes."""

import tempfile
import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from tests.benchmarks.plan import Plan
from tests.benchmarks.prompt_lab import BLOCK, NEW, PREFIX, REPLY, TEXT, Asked, PeerLab, PromptLab, Stored, WritingLab
from tests.benchmarks.remote import Remote
from tests.benchmarks.report import Row, Section, at_least, at_most, holds, plain
from tests.benchmarks.stats import Series, alternate, ratios, series
from tokamac.engine.prompt_cache.radix_tree import Node, insert, match_prefix, split

BRANCHES, BRANCH = 8, 64
AHEAD_S = 3.0
ELSEWHERE = 50
"""Added to a prefix's number: a prefix that nothing else asks for."""
SHORTEST, LONGEST, VOCABULARY = 2000, 30_000, 150_000
FRESH = 0.05
"""One stored prefix in twenty shares no beginning with an earlier one."""


def measure(plan: Plan) -> Section:
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
