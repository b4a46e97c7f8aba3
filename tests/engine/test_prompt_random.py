"""The prompt cache under random use: whatever was said, evicted, stored or damaged before, warm equals cold."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.engine.test_prompt_store import BENCHES, KINDS, LARGE, ask, compute
from tokamac.engine.kv import snapshot
from tokamac.engine.prompt_cache import cache
from tokamac.engine.prompt_cache.folder import Budgets, Folder


class Conversations(RuleBasedStateMachine):
    """Random trees of conversations: go on, say something else, go back, switch, evict, restart with what is on disk."""

    kind: str

    @initialize(budget=st.sampled_from([LARGE, 200_000, 60_000, 0]), stored=st.sampled_from([LARGE, 100_000]))
    def begin(self, budget: int, stored: int) -> None:
        self.bench = BENCHES[self.kind]
        self.folder = tempfile.TemporaryDirectory()
        self.budget, self.budgets = budget, Budgets(total=stored)
        self.said: list[list[int]] = [[1, 2, 3]]
        self.restart()

    @rule(
        which=st.integers(0, 40),
        cut=st.integers(0, 70),
        new=st.lists(st.integers(0, 3), min_size=1, max_size=9),
        reply=st.lists(st.integers(0, 3), max_size=6),
        rests=st.booleans(),
    )
    def send(self, which: int, cut: int, new: list[int], reply: list[int], rests: bool) -> None:
        """Continue some conversation, from its end or from anywhere before."""
        base = self.said[which % len(self.said)]
        prompt = [*base[: max(1, len(base) - cut)], *new]
        ask(self.bench, self.store, prompt, reply)
        self.said.append([*prompt, *reply])
        if rests:
            self.rest()

    @rule(which=st.integers(0, 40))
    def again(self, which: int) -> None:
        """Ask for what was said as it was."""
        ask(self.bench, self.store, self.said[which % len(self.said)], [])

    @rule(which=st.integers(0, 40), pieces=st.integers(1, 3))
    def cancel(self, which: int, pieces: int) -> None:
        """Stop in the middle of a prefill."""
        prompt = [*self.said[which % len(self.said)], 3, 2, 1, 0, 3, 2, 1]
        lease = self.store.acquire(prompt, None)
        with lease:
            compute(self.bench.model, lease, prompt[: len(lease.ids) + pieces])
        self.said.append(prompt)

    @rule()
    def restart(self) -> None:
        """End the process, and begin another."""
        self.store = self.bench.cache(Folder(Path(self.folder.name), self.budgets), "ef" * 16, self.budget)

    @rule(which=st.integers(0, 40), new=st.lists(st.integers(0, 3), min_size=1, max_size=9))
    def resume(self, which: int, new: list[int]) -> None:
        """Rest, end, begin again, and go on with some conversation."""
        self.rest()
        self.restart()
        prompt = [*self.said[which % len(self.said)], *new]
        ask(self.bench, self.store, prompt, [])
        self.said.append(prompt)

    @rule()
    def rest(self) -> None:
        """Have nothing else to do."""
        self.store.flush(10)
        told = self.store.trouble  # one state of some models is larger than the smallest folder: that is said
        assert told is None or (self.budgets.total < 1 << 20 and "exceed the size limit" in told)

    @rule(which=st.integers(0, 40), at=st.integers(0, 1 << 20))
    def damage(self, which: int, at: int) -> None:
        """Flip a bit of some file; and end the process, for what is in memory is not read again."""
        self.restart()
        files = sorted(Path(self.folder.name).rglob("*.kv"))
        if files:
            path = files[which % len(files)]
            data = bytearray(path.read_bytes())
            data[at % len(data)] ^= 1 << at % 8
            path.write_bytes(data)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.store.flush(10)
            self.folder.cleanup()

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "store") or self.store._end is None:
            return
        live, end = self.store._live, self.store._end
        assert live is not None
        assert live.ids == end.ids()
        on_path = set(map(id, end.path()))
        growing = any(snapshot.grows(cache) for cache in live.caches)
        for node in self.store._nodes():
            assert (node.value.piece is None) == (id(node) in on_path) or not growing


@pytest.mark.parametrize("kind", KINDS)
def test_warm_equals_cold_for_random_trees_of_conversations(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in {"BLOCK": 8, "LEAST_TOKENS": 8, "LEAST_TAIL": 2, "PAUSE_S": 0.001}.items():
        monkeypatch.setattr(cache, name, few)
    machine = type("Machine", (Conversations,), {"kind": kind})
    case = machine.TestCase
    case.settings = settings(
        max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case().runTest()
