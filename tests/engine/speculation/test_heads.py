"""A checkpoint's own heads change no text, whatever they hold; they compute what they should, and are counted and named."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests import families
from tests.engine.helpers import write_model
from tests.engine.inside import runtime_of, speculating, speculation_of
from tests.engine.speculation.checkpoints import FAMILIES, QWEN, mtp_parts, write_medusa, write_mtp
from tests.engine.speculation.scripted import EagerDrafting
from tests.engine.speculation.test_replies import NEW, PROMPT
from tests.families import walked
from tokamac.engine import Engine, Finished, KVSpec, MemoryLimitError, PromptCacheSpec, Sampling, Speculation, TextChunk
from tokamac.engine.device import device_kind
from tokamac.engine.model.config import read_config
from tokamac.engine.model.head import backbone_of, keeping_hidden_states
from tokamac.engine.model.weights import MEDUSA_FILE, find_heads
from tokamac.engine.speculation import head_drafters
from tokamac.engine.speculation import speculator as speculation
from tokamac.engine.speculation.drafters import TokenDraft
from tokamac.engine.speculation.head_drafters import KEPT, LONGEST, NO_MEMORY, HiddenStates, LayerDrafter, LoadedHeads
from tokamac.engine.speculation.speculator import HEADS_TOO_DEAR, Speculator

GREEDY = Sampling(temperature=0, max_tokens=NEW)
SEEDED = Sampling(temperature=1, seed=3, max_tokens=NEW)
HEADS = Speculation(lookup=False, branches=False)
KINDS = ("medusa", *FAMILIES)
KV = {
    "16 bits": KVSpec(),
    "packed": KVSpec(key_bits=8, value_bits=4, group_size=32),
    "rotated": KVSpec(key_bits=4, value_bits=2, group_size=32),
    "window": KVSpec(window=48, keep=4),
    "packed window": KVSpec(key_bits=8, value_bits=8, group_size=32, window=48, keep=0),
}

Watch = Callable[[LayerDrafter, HiddenStates, Sequence[int], Sequence[int]], None]


class EagerHeads:
    """In place of ``SharedSpeculation``: has heads guess wherever they can. seen: told each draft of a layer."""

    computes = True

    def __init__(self, heads: LoadedHeads, seen: Watch | None = None) -> None:
        self._heads, self._seen = heads, seen

    def begin(self, _: Any, ids: Sequence[int], made: Sequence[int], sampler: Any, **__: Any) -> Speculator:
        """Return the speculation of a reply."""
        hidden = HiddenStates()
        drafter: Any = self._heads.drafter(hidden, sampler)
        if self._seen is not None:
            draft, seen = drafter.draft, self._seen

            def watched(known: Sequence[int], k: int) -> tuple[int, ...]:
                found: tuple[int, ...] = draft(known, k)
                seen(drafter, hidden, known, found)
                return found

            drafter.draft = watched
        return EagerDrafting(drafter, [*ids, *made], hidden=hidden)

    def ended(self, ids: Sequence[int]) -> None:
        """Keep nothing."""


def written(folder: Path, kind: str, *, knowing: bool) -> Path:
    """Write a model with heads of a kind."""
    return write_medusa(folder, knowing=knowing) if kind == "medusa" else write_mtp(folder, kind, knowing=knowing)


def loaded(folder: Path, **options: Any) -> Engine:
    """Return an engine that never ends a reply by itself."""
    asked: dict[str, Any] = {"speculation": HEADS, "prompt_cache": PromptCacheSpec(disk=False), **options}
    engine = Engine.load(folder, **asked)
    engine.tokenizer.eos_ids = frozenset()
    return engine


def heads_of(engine: Engine) -> LoadedHeads:
    """Return its heads."""
    (heads,) = speculation_of(engine)._heads
    return heads


def both(
    engine: Engine, sampling: Sampling, seen: Watch | None = None, prompt: Sequence[int] = PROMPT
) -> tuple[Finished, Finished]:
    """Return a reply without heads, and with them asked wherever they can be."""
    heads = heads_of(engine)
    with speculating(engine, None):
        plain = engine.ask(list(prompt), sampling)
    with speculating(engine, EagerHeads(heads, seen)):
        return plain, engine.ask(list(prompt), sampling)


# Whatever guesses, the text is the same.


@pytest.mark.parametrize("knowing", [True, False])
@pytest.mark.parametrize("kind", walked(KINDS, families.HEADS))
def test_each_family_says_the_same_and_what_its_heads_know_is_true(kind: str, knowing: bool, tmp_path: Path) -> None:
    with loaded(written(tmp_path / "model", kind, knowing=knowing)) as engine:
        for sampling in (GREEDY, SEEDED):
            plain, found = both(engine, sampling)
            assert found.ids == plain.ids
            metrics = found.metrics
            assert metrics.drafted_tokens
            if not knowing:
                assert metrics.accepted_tokens < metrics.drafted_tokens / 4
            elif sampling is GREEDY:
                assert metrics.accepted_tokens == metrics.drafted_tokens > NEW // 2


@pytest.fixture(scope="module", params=["medusa", "glm4_moe"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Folders of a model whose head is always right, and of one at random."""
    made = tmp_path_factory.mktemp("heads")
    return {knowing: written(made / str(knowing), request.param, knowing=knowing) for knowing in (True, False)}


@pytest.mark.skipif(device_kind() != "cpu", reason="others have no such kernels")
def test_packed_weights_are_computed_by_steps_also_where_heads_read_along(tmp_path: Path) -> None:
    from tokamac.engine.cpu.stepping import steps_of

    with loaded(write_medusa(tmp_path / "model", bits=4)) as engine:
        assert steps_of(runtime_of(engine).model) is not None
        for sampling in (GREEDY, SEEDED):
            plain, found = both(engine, sampling)
            assert found.ids == plain.ids
            assert found.metrics.drafted_tokens


@pytest.mark.parametrize("kv", KV)
def test_every_layout_and_bits_say_the_same(folders: dict[bool, Path], kv: str) -> None:
    for folder in folders.values():
        if kv == "rotated" and read_config(folder)["model_type"] == "glm4_moe":
            continue  # MLX's product of a mixture differs in its last bit with the rows, which few bits make a token of
        with loaded(folder, kv=KV[kv]) as engine:
            plain, found = both(engine, SEEDED)
            assert found.ids == plain.ids
            assert found.metrics.drafted_tokens


@pytest.fixture(scope="module")
def engines(folders: dict[bool, Path]) -> Iterator[tuple[Engine, ...]]:
    """Engines of both."""
    with loaded(folders[True]) as right, loaded(folders[False]) as wrong:
        yield right, wrong


def test_several_replies_at_once_say_what_each_says_alone(folders: dict[bool, Path]) -> None:
    for folder in folders.values():
        with loaded(folder, parallel=3) as engine:
            prompts = [PROMPT, PROMPT[3:], PROMPT[7:]]
            alone = [engine.ask(prompt, SEEDED).ids for prompt in prompts]
            found: dict[int, tuple[int, ...]] = {}
            with speculating(engine, EagerHeads(heads_of(engine))):
                for index, _, event in engine.generate_many(prompts, SEEDED):
                    if isinstance(event, TextChunk | Finished):
                        found[index] = (*found.get(index, ()), *event.ids)
            assert [found[index] for index in range(3)] == alone


# What the ledger makes of it.


class Timed(Speculator):
    """Each pass takes as long as a plain step, each draft a tenth of that, and looking for one nothing."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self._now_s, self._tick_s = 0.0, 0.0
        super().__init__(*given, clock=self._tick, **named)

    def observe(self, token: int, *, steady: bool) -> None:
        self._now_s += 1.0
        super().observe(token, steady=steady)

    def verified(self, draft: TokenDraft, tokens: Sequence[int], rows: int) -> None:
        self._now_s += 1.0
        super().verified(draft, tokens, rows)

    def _tick(self) -> float:
        self._now_s += self._tick_s
        return self._now_s

    def _computed(self, drafter: Any, width: int) -> Any:
        self._tick_s = 0.1
        try:
            return super()._computed(drafter, width)
        finally:
            self._tick_s = 0.0


@pytest.fixture
def use_heads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine, Any], None]:
    """Have an engine's replies be drafted by these heads, timed by the draws, with what was measured forgotten."""
    monkeypatch.setattr(speculation, "Speculator", Timed)

    def use(engine: Engine, heads: Any) -> None:
        for name, value in {"_heads": [heads], "_costs": {}}.items():
            monkeypatch.setattr(speculation_of(engine), name, value)

    return use


def test_heads_that_are_right_are_asked_and_save_passes(
    engines: tuple[Engine, ...], monkeypatch: pytest.MonkeyPatch, use_heads: Callable[[Engine, Any], None]
) -> None:
    monkeypatch.setattr(speculation, "pass_steps", lambda *_, **__: 1.5)
    right, wrong = engines
    for engine in engines:
        heads = heads_of(engine)
        use_heads(engine, replace(heads, step_bytes=1))
        # What passes and drafts took by another clock is forgotten.
        heads.costs._drafts.clear()
        heads.costs._reads.clear()
    plain = right.ask(PROMPT, replace(GREEDY, max_tokens=200))
    metrics = plain.metrics
    assert metrics.accepted_tokens == metrics.drafted_tokens
    assert (metrics.accepted_tokens or 0) > 100
    assert metrics.saved_s > 0
    lost = wrong.ask(PROMPT, replace(GREEDY, max_tokens=200)).metrics
    assert lost.drafted_tokens
    assert lost.saved_s >= -5.0


def test_costly_heads_are_never_called(engines: tuple[Engine, ...], use_heads: Callable[[Engine, Any], None]) -> None:
    for engine in engines:
        plain = engine.ask(PROMPT, GREEDY)
        drafter = StandsStill()
        heads = replace(heads_of(engine), step_bytes=1 << 40, drafter=lambda *_, drafter=drafter: drafter)
        use_heads(engine, heads)
        found = engine.ask(PROMPT, GREEDY)
        assert (found.ids, found.metrics.drafted_tokens) == (plain.ids, None)
        assert found.metrics.undrafted == HEADS_TOO_DEAR


class StandsStill:
    """Takes longer than it could gain, and fails where it is asked."""

    source, most, rests = "mtp", 7, ""

    def reading(self, ids: Sequence[int], most: float) -> float:
        """Return nothing to read."""
        return 0.0

    def drafting(self, width: int) -> float:
        """Return more than any draft is worth."""
        return 10.0 * width

    def rested(self) -> None:
        """Nothing is learned."""


# What a head computes.


@pytest.mark.parametrize("family", walked(FAMILIES, families.HEADS))
def test_a_layer_guesses_what_its_class_computes_of_whole_passes(family: str, tmp_path: Path) -> None:
    _, made, fused = mtp_parts(family)
    drafts: list[tuple[int, list[int], tuple[int, ...]]] = []
    with loaded(write_mtp(tmp_path / "model", family)) as engine:
        _, found = both(engine, GREEDY, lambda _, hidden, ids, draft: drafts.append((hidden.start, list(ids), draft)))
    assert found.metrics.drafted_tokens
    backbone = backbone_of(made)
    layer = backbone.layers.pop()
    starts = set[int]()
    for start, ids, draft in drafts[:12]:
        starts.add(start)
        assert draft == reference(backbone, made, layer, fused, ids, start, len(draft))
    assert len(PROMPT) - 1 in starts


def reference(  # noqa: PLR0917
    backbone: Any, model: Any, layer: Any, fused: dict[str, mx.array], ids: list[int], start: int, width: int
) -> tuple[int, ...]:
    """Return what a layer guesses, from the hidden state at ``start`` on: the model and the layer over all tokens at once."""
    hidden = backbone(mx.array([ids[:-1]]))[:, start:]
    tokens, found = list(ids[start + 1 :]), list[int]()
    while True:
        embedded = normed(backbone.embed_tokens(mx.array([tokens])), fused["enorm"])
        read = mx.concatenate([embedded, normed(hidden, fused["hnorm"])], axis=-1) @ fused["eh_proj"].T
        mask = mx.arange(len(tokens))[:, None] >= mx.arange(len(tokens))[None]
        made = normed(layer(read, mask), fused["norm"])[:, -1:]
        head = model["language_model"].lm_head if "language_model" in model else model.lm_head
        found.append(int(mx.argmax(head(made)[0, -1]).item()))
        if len(found) == width:
            return tuple(found)
        tokens.append(found[-1])
        hidden = mx.concatenate([hidden, made], axis=1)


def normed(x: mx.array, weight: mx.array) -> mx.array:
    """Return x over its root mean square, times a weight."""
    return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


def test_hidden_states_are_kept_by_place_and_no_more_than_are_needed() -> None:
    states = HiddenStates()

    def row(*values: int) -> mx.array:
        return mx.array([[[float(value)] for value in values]])

    def held(start: int, end: int) -> list[float]:
        return states.between(start, end)[0, :, 0].tolist()  # type: ignore[return-value]

    states.passed(10, row(10))
    states.passed(11, row(11, 12, 13))
    assert (states.start, states.end) == (10, 14)
    assert held(11, 13) == [11, 12]
    states.passed(12, row(-12))  # taken back, and read again
    assert held(10, 13) == [10, 11, -12]
    states.passed(20, row(20))  # what lies between was computed beside others
    assert (states.start, states.end) == (20, 21)
    for place in range(21, 200):
        states.passed(place, row(place))
    assert states.end - states.start == KEPT
    assert held(190, 200) == list(range(190, 200))


def test_caches_that_would_grow_long_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_drafters, "LONGEST", 2 * KEPT)
    with loaded(write_mtp(tmp_path / "model", "glm4_moe", knowing=True)) as engine:
        held: list[int] = []
        longer = replace(GREEDY, max_tokens=300)
        plain, found = both(engine, longer, lambda drafter, *_: held.append(drafter._layer.held))
        assert found.ids == plain.ids
        assert found.metrics.accepted_tokens == found.metrics.drafted_tokens
        assert KEPT < max(held) <= 2 * KEPT
        assert any(later < before for before, later in pairwise(held))


def test_without_memory_for_its_caches_a_layer_guesses_no_more_and_says_so(tmp_path: Path) -> None:
    with loaded(write_mtp(tmp_path / "model", "glm4_moe", knowing=True)) as engine:
        layer = heads_of(engine).drafter(HiddenStates(), None)._layer  # type: ignore[arg-type, attr-defined]
        layer._fits = lambda _: False
        rests = set[str]()
        plain, found = both(engine, GREEDY, lambda drafter, *_: rests.add(drafter.rests))
        assert found.ids == plain.ids
        assert (found.metrics.drafted_tokens, rests) == (None, {NO_MEMORY})


def test_a_limit_that_changes_holds_for_its_caches(tmp_path: Path) -> None:
    with loaded(write_mtp(tmp_path / "model", "glm4_moe", knowing=True)) as engine:
        layer = heads_of(engine).drafter(HiddenStates(), None)._layer  # type: ignore[arg-type, attr-defined]
        for limit, fits in ((1 << 50, True), (20_000, False), (None, True)):
            engine.limit_memory(limit)
            assert engine.between(lambda: layer.begin(0)) is fits
        engine.between(layer.forget)


# What there is, and what is said of it.


def test_what_is_there_is_named_counted_and_left_out_on_request(folders: dict[bool, Path]) -> None:
    folder = folders[False]
    (stored,) = find_heads(folder, read_config(folder))
    assert stored.trouble == ""
    with loaded(folder) as engine, loaded(folder, speculation=replace(HEADS, heads=False)) as without:
        heads = heads_of(engine)
        assert stored.nbytes == heads.weight_bytes  # stored in float32
        assert engine.spec.heads == stored.named
        assert engine.spec.heads_bytes == heads.weight_bytes + heads.kv_bytes
        assert any(note.startswith("its own heads guess ahead: ") for note in engine.spec.notes)
        weights = runtime_of(engine).shape.weights - runtime_of(without).shape.weights
        assert weights == engine.spec.heads_bytes
        assert runtime_of(engine).work == runtime_of(without).work  # a plain step reads none of it
        assert (without.spec.heads, without.spec.heads_bytes) == (None, None)
        assert not any("heads" in note for note in without.spec.notes)
    with loaded(folder, speculation=None) as off:
        assert off.spec.heads is None


def edited(folder: Path, **changes: Any) -> Path:
    """Change a folder's config."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def without(folder: Path, file: str, *ends: str) -> Path:
    """Leave tensors out of a file."""
    arrays: Any = mx.load(str(folder / file))
    mx.eval(arrays)
    mx.save_safetensors(str(folder / file), {name: each for name, each in arrays.items() if not name.endswith(ends)})
    return folder


def dropped(folder: Path) -> Path:
    """Leave the heads out, as most conversions do."""
    return without(
        folder,
        "model.safetensors",
        *(name for name in mx.load(str(folder / "model.safetensors")) if ".layers.2." in name),
    )  # type: ignore[union-attr]


TROUBLES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "left out by a conversion": (lambda folder: dropped(write_mtp(folder, "glm4_moe")), "does not hold them"),
    "not whole": (
        lambda folder: without(write_mtp(folder, "glm4_moe"), "model.safetensors", "hnorm.weight"),
        "hnorm is missing",
    ),
    "a layer that is not whole": (
        lambda folder: without(write_mtp(folder, "glm4_moe"), "model.safetensors", ".layers.2.self_attn.q_proj.weight"),
        "not whole",
    ),
    "an embedding of its own": (
        lambda folder: edited(write_mtp(folder, "qwen3_next"), mtp_use_dedicated_embeddings=True),
        "an embedding of their own",
    ),
    "of a family without a form": (
        lambda folder: edited(write_model(folder), num_nextn_predict_layers=1),
        "Tokamac does not know how those of llama models are computed",
    ),
    "Medusa heads of another model": (lambda folder: other_width(folder), "another model's"),
    "Medusa heads that are fewer than said": (
        lambda folder: edited(write_medusa(folder), medusa_num_heads=5),
        "the file 3",
    ),
    "Medusa heads that are named and not there": (
        lambda folder: edited(write_model(folder), medusa_num_heads=4),
        f"there is no {MEDUSA_FILE}",
    ),
    "Medusa heads cut off": (lambda folder: cut(write_medusa(folder) / MEDUSA_FILE), "is damaged"),
}


def other_width(folder: Path) -> Path:
    """Write Medusa heads of a wider model."""
    write_medusa(folder)
    wide = write_medusa(folder.parent / "wide", hidden_size=128)
    (folder / MEDUSA_FILE).write_bytes((wide / MEDUSA_FILE).read_bytes())
    return folder


def cut(file: Path) -> Path:
    """Cut a file off; return its folder."""
    file.write_bytes(file.read_bytes()[:-8])
    return file.parent


@pytest.mark.parametrize("trouble", TROUBLES)
def test_heads_that_cannot_be_used_are_said_and_the_model_runs_without(trouble: str, tmp_path: Path) -> None:
    write, said = TROUBLES[trouble]
    with loaded(write(tmp_path / "model")) as engine:
        (note,) = (note for note in engine.spec.notes if "heads" in note)
        assert "are not used" in note
        assert said in note
        assert engine.spec.heads is None
        assert len(engine.ask(PROMPT, GREEDY).ids) == NEW


def test_heads_that_do_not_fit_beside_the_model_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokamac.engine import loading

    folder = write_medusa(tmp_path / "model")

    def check(*_: Any, more: int, **__: Any) -> tuple[str, ...]:
        if more:
            raise MemoryLimitError("too much", "Take less.")
        return ()

    monkeypatch.setattr(loading, "check_both_fit", check)
    with loaded(folder) as engine:
        assert any("there is no memory for it beside the model" in note for note in engine.spec.notes)
        assert engine.spec.heads is None


def test_nothing_of_a_conversation_stays_in_a_layers_caches(tmp_path: Path) -> None:
    with loaded(write_mtp(tmp_path / "model", "glm4_moe", knowing=True), prompt_cache=None) as engine:
        both(engine, GREEDY)
        layer = heads_of(engine).drafter(HiddenStates(), None)._layer  # type: ignore[arg-type, attr-defined]
        assert layer.held > 0
        engine.ask(PROMPT, GREEDY)
        assert layer.held == 0
        assert layer.caches == []


@pytest.mark.parametrize("family", QWEN)
def test_qwens_norms_are_put_right_where_they_are_published_less_one(family: str, tmp_path: Path) -> None:
    folder = write_mtp(tmp_path / "model", family)
    (stored,) = find_heads(folder, read_config(folder))
    assert stored.less_one


def test_the_door_shows_what_the_head_is_given(tmp_path: Path) -> None:
    with loaded(write_medusa(tmp_path / "model")) as engine:
        model = runtime_of(engine).model

        def look() -> float:
            with keeping_hidden_states() as kept:
                logits = model(mx.array([PROMPT[:4]]))
            return float(mx.abs(model.lm_head(kept[-1]) - logits).max().item())

        assert look() < 1e-4
        assert LONGEST > KEPT
