"""Two long conversations in turn: both stay computed where memory allows, and the older goes first where it does not."""

from pathlib import Path

import mlx.core as mx
import pytest

from tests.engine.seeded import write_model
from tokamac.engine import Engine, Finished, Sampling
from tokamac.engine.options import PromptCacheSpec
from tokamac.engine.perf import memory
from tokamac.engine.prompt_cache import cache

TOKENS = 1000
NEW = 20
"""Tokens that each turn adds, and as many that it replies with."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 layers of 4 heads: 16 kB a token, so that a conversation takes more than its share of memory."""
    shape = {"num_hidden_layers": 8, "num_key_value_heads": 4, "head_dim": 64}
    return write_model(tmp_path_factory.mktemp("two"), max_position_embeddings=4096, **shape)


@pytest.fixture(autouse=True)
def _small_share(settled_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt cache's share holds one of the conversations, and not two."""
    monkeypatch.setattr(cache, "LEAST_MEMORY", 24 << 20)
    monkeypatch.setattr(cache, "MEMORY_SHARE", 1 << 20)


class Chat:
    """A conversation of token ids that goes on."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine, self._seed = engine, seed
        self.ids = [5 + (i * i + seed * 31) % 250 for i in range(TOKENS)]

    def turn(self) -> int:
        """Go on, and return how many tokens were computed for it."""
        self.ids += [5 + (i * 7 + self._seed) % 250 for i in range(NEW)]
        *_, end = self._engine.generate(self.ids, Sampling(temperature=0, max_tokens=4))
        assert isinstance(end, Finished)
        return end.metrics.prefill_tokens


def test_neither_of_two_is_computed_anew_at_a_switch(folder: Path) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        one, other = Chat(engine, 1), Chat(engine, 2)
        assert (one.turn(), other.turn()) == (TOKENS + NEW, TOKENS + NEW)
        held = engine.between(lambda: engine._runner._store.nbytes)
        assert held > cache.LEAST_MEMORY
        assert [chat.turn() for _ in range(3) for chat in (one, other)] == [NEW] * 6


def test_of_three_the_two_that_were_used_last_stay(folder: Path) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        first, second, third = (Chat(engine, seed) for seed in (1, 2, 3))
        for chat in (first, second, third):
            chat.turn()
        assert (second.turn(), third.turn()) == (NEW, NEW)
        assert first.turn() > TOKENS


def test_where_memory_has_no_room_for_two_one_stays_and_nothing_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        one, other = Chat(engine, 1), Chat(engine, 2)
        one.turn()
        active = engine.between(mx.get_active_memory)
        monkeypatch.setattr(memory, "available", lambda: active + (4 << 20))
        assert other.turn() == TOKENS + NEW
        assert one.turn() > TOKENS
        assert one.turn() == NEW


def test_a_prompt_that_needs_the_room_has_it_and_the_older_conversation_goes_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LEAST_MEMORY", 1 << 30)  # all three would fit the share
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        first, second, third = (Chat(engine, seed) for seed in (1, 2, 3))
        first.turn()
        second.turn()
        third.ids *= 2
        runtime = engine._runner.runtime
        live = engine.between(lambda: engine._runner._store.nbytes)
        peak = cache.predict_peak(runtime.shape, held=0, new=2 * TOKENS + NEW, chunk=512, reply=8).total
        others = engine.between(mx.get_active_memory) - runtime.shape.weights - live
        monkeypatch.setattr(memory, "array_budget", lambda: others + peak + live // 2 + (2 << 20))
        assert third.turn() == 2 * TOKENS + NEW
        monkeypatch.setattr(memory, "array_budget", lambda: 1 << 40)
        assert second.turn() == NEW
        assert first.turn() > TOKENS


def test_a_size_that_the_user_set_is_kept_to(folder: Path) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(memory_bytes=24 << 20, disk=False)) as engine:
        one, other = Chat(engine, 1), Chat(engine, 2)
        one.turn()
        other.turn()
        assert one.turn() > TOKENS
