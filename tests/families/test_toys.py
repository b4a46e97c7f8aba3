"""Each language model class of mlx-lm, tiny: nothing passes our caches by, and each flag is honoured or refused with its reason."""

import importlib
import importlib.util
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from tests.engine.kv import models as zoo
from tests.engine.kv.models import MovingReference, Reference, built, feed, largest_difference, tokens
from tests.engine.kv.test_pinned import assert_moves
from tests.engine.kv.test_rows import begin, step_together_and_alone
from tests.engine.speculation.scripted import Decoding, always_right, always_wrong, at_random
from tests.families import TOYS, walked
from tokamac.engine import KVSpec, ModelUnsupportedError, OptionError
from tokamac.engine.cpu.layers import DenseLinear, logits_width, use_kernels
from tokamac.engine.kv.attention import leaves, map_leaves, recording
from tokamac.engine.kv.cache import Cache, why_alone
from tokamac.engine.kv.plan import CachePlan, plan_caches
from tokamac.engine.kv.snapshot import most_taken_back
from tokamac.engine.model.config_rules import check_config
from tokamac.engine.model.loader import bound_positions, position_rows
from tokamac.engine.perf.cost import part_of, tensors_of

TOKENS = 100
"""More than a ring of zoo.WINDOW or WINDOW tokens holds with the 64 that it keeps to rewind into."""
CUTS = [60, 1, 1, 30, 1]
WINDOW, KEEP = 24, 4


@dataclass
class Family:
    """A model, and the logits (T, V) of a prompt read at once with the default caches."""

    name: str
    model: Any
    config: dict[str, Any]
    ids: mx.array
    whole: mx.array

    def plan(self, spec: KVSpec) -> CachePlan:
        return plan_caches(self.model, self.config, spec)

    def logits(self, caches: list[Any], *, cut: bool) -> mx.array:
        return feed(self.model, caches, self.ids, CUTS if cut else [])

    def by_position(self, plan: CachePlan) -> mx.array:
        """Return what the plan promises: full attention masked by position where a cache is ours, each token encoded once."""
        from mlx_lm.models.cache import make_prompt_cache

        planned = {layer.path: layer for layer in plan.layers}

        def stand_in(path: tuple[int, ...], own: Any) -> Any:
            layer = planned[path]
            if layer.ours is None:
                return own
            keep = layer.keep if isinstance(layer.keep, int) else 0
            codecs = layer.ours.key_codec, layer.ours.value_codec
            if layer.ours.rotation is None:
                return Reference(*codecs, layer.window, keep)
            assert layer.window is not None
            return MovingReference(*codecs, layer.window, keep, layer.ours.rotation.move)

        logits: mx.array = self.model(self.ids, cache=map_leaves(make_prompt_cache(self.model), stand_in))[0]
        return logits


@pytest.mark.parametrize("name", walked(zoo.NAMES, TOYS))
def test_a_class_of_mlx_lm(name: str, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    """One seeded model of the class, and whatever must hold of any."""
    model, config = built(name)
    ids = tokens(TOKENS)
    family = Family(name, model, config, ids, feed(model, plan_caches(model, config, KVSpec()).make(), ids, []))
    for what, check in {
        "by default logits are mlx-lm's own": check_default,
        "how a prompt is cut changes no logits": check_cuts,
        "each of our caches is attended to once in a pass": check_attended_once,
        "eight bits are close, or refused": check_eight_bits,
        "a window is honoured or refused": check_window,
        "several sequences at once are each what it is alone, or refused": check_rows,
        "with drafts it says the same": check_drafts,
        "pinned keys move as the model itself moves them": lambda family: assert_moves(family.model, family.config),
        "its parts are told apart": check_parts,
    }.items():
        with subtests.test(what):
            check(family)
    with subtests.test("a table of positions is known, and never read beyond its end"):
        check_positions(family, monkeypatch)  # last: it bounds the table
    for tied in (True, False):
        if not (tied and name == "baichuan_m1"):  # its class always has a head of its own
            with subtests.test("on a CPU no piece of a prompt computes its logits", tied=tied):
                check_logits_left_out(name, monkeypatch, tied=tied)


def ours(caches: list[Any]) -> list[Cache]:
    return [cache for _, cache in leaves(caches) if isinstance(cache, Cache)]


def check_default(family: Family) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    plan = family.plan(KVSpec())
    # mlx-lm's plamo3 sees one token more in prefill than in decoding; ours sees it in both.
    cut = family.name != "plamo3"
    wanted = family.logits(make_prompt_cache(family.model), cut=cut)
    off = largest_difference(family.logits(plan.make(), cut=cut), wanted)
    slides = any(layer.kind == "window" and layer.ours for layer in plan.layers)
    # The slots of a ring lie in another order than mlx-lm's, so the same sums round otherwise.
    assert off <= (5e-5 if slides else 0), f"{family.name}: {off}"


def check_cuts(family: Family) -> None:
    cut = family.logits(family.plan(KVSpec()).make(), cut=True)
    assert largest_difference(cut, family.whole) < 1e-4


def check_attended_once(family: Family) -> None:
    plan = family.plan(KVSpec())
    caches = plan.make()
    seen: Counter[int] = Counter()
    for count in (5, 1):
        seen.clear()
        with recording(lambda keys, values, cache: seen.update([id(cache)])):
            feed(family.model, caches, tokens(count), [])
        assert [seen[id(cache)] for cache in ours(caches)] == [zoo.BORROWED.get(family.name, 1)] * len(ours(caches))
    kept = {layer.note for layer in plan.layers if layer.ours is None and layer.kind != "state"}
    if family.name in zoo.KEPT:
        assert all(zoo.KEPT[family.name] in note for note in kept)
    assert bool(kept) == (family.name in zoo.KEPT)


def check_logits_left_out(name: str, monkeypatch: pytest.MonkeyPatch, *, tied: bool) -> None:
    model, config = built(name, tie_word_embeddings=tied)
    use_kernels(model, logits=logits_width(model))
    widths, multiply = set(), DenseLinear._multiply

    def watched(layer: DenseLinear, x: mx.array) -> mx.array:
        rows = multiply(layer, x)
        widths.add(rows.shape[-1])
        return rows

    caches = plan_caches(model, config, KVSpec()).make()
    with monkeypatch.context() as patched:
        patched.setattr(DenseLinear, "_multiply", watched)
        logits = model(tokens(9), cache=caches)
        mx.eval([cache.state for cache in caches])
    assert logits.shape[-1] == zoo.VOCABULARY
    assert zoo.VOCABULARY not in widths


def check_positions(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table is what is looked up by where tokens stand, rather than by which they are: the class itself says which it is."""
    name, model, config = family.name, family.model, family.config
    rows, look_up = [], nn.Embedding.__call__

    def watched(table: nn.Embedding, ids: mx.array) -> mx.array:
        if ids.flatten().tolist() == [0, 1, 2, 3, 4]:
            rows.append(len(table.weight))
        return look_up(table, ids)

    with monkeypatch.context() as patched:
        patched.setattr(nn.Embedding, "__call__", watched)
        model(mx.full((1, 5), 7), cache=plan_caches(model, config, KVSpec()).make())
    assert [*filter(None, [position_rows(model)])] == rows
    assert bool(rows) == (name in {"gpt2", "gpt_bigcode"})
    if not rows:
        return
    before = model(tokens(40))
    bound_positions(model)
    assert largest_difference(model(tokens(40)), before) == 0
    beyond = model(tokens(rows[0] + 3))[0, :, 0]
    assert bool(mx.all(mx.isnan(beyond[rows[0] :])))


def refusal(family: Family) -> str | None:
    """Return why no cache of a family is ours, or None where some are."""
    if ours(family.plan(KVSpec()).make()):
        return None
    return zoo.KEPT.get(family.name, "recurrent state stays")


def check_eight_bits(family: Family) -> None:
    if reason := refusal(family):
        with pytest.raises(OptionError, match=reason):
            family.plan(KVSpec(8, 8))
        return
    plan = family.plan(KVSpec(8, 8))
    packed = family.logits(plan.make(), cut=True)
    assert largest_difference(packed, family.by_position(plan)) < 1e-3
    off = mx.linalg.norm(packed - family.whole, axis=-1) / mx.linalg.norm(family.whole, axis=-1)
    # By token, and in the middle: a router that stands on the edge chooses other experts for a token or two.
    assert float(mx.median(off).item()) < 0.03


def check_window(family: Family) -> None:
    spec = KVSpec(window=WINDOW, keep=KEEP)
    if reason := zoo.UNBOUNDED.get(family.name) or refusal(family):
        with pytest.raises(OptionError, match=reason):
            family.plan(spec)
        return
    plan = family.plan(spec)
    caches = plan.make()
    logits = family.logits(caches, cut=True)
    assert largest_difference(logits, family.by_position(plan)) < 1e-4
    assert largest_difference(logits, family.logits(plan.make(), cut=False)) < 1e-4
    bounded = sum(layer.bytes_at(10 * TOKENS) for layer in plan.layers if layer.ours)
    assert sum(cache.nbytes for cache in ours(caches)) == bounded


ALONE = {
    # Architectures that take one sequence at a time: what they trip over, or how they find positions.
    "afm7": "how many keys",
    "deepseek_v41": "window",
    "gpt_bigcode": "length-1 arrays",
    "iquestloopcoder": "update_and_fetch",
    "llama4": "maybe_trim_front",
}


def check_rows(family: Family) -> None:
    model, config = family.model, family.config
    make = plan_caches(model, config, KVSpec()).make
    why = why_alone(model, config, make)
    assert (ALONE[family.name] in why) if family.name in ALONE else not why
    if why:
        return
    lanes, alone = ([begin(model, make, length, seed) for seed, length in enumerate((2, 9, 21))] for _ in range(2))
    for at in range(3):
        assert step_together_and_alone(model, lanes, alone, [tokens(1, 50 + 10 * at + seed) for seed in range(3)])


def check_drafts(family: Family) -> None:
    model, new = family.model, 40
    make = plan_caches(model, family.config, KVSpec()).make
    prompt: list[int] = tokens(9, 5)[0].tolist()  # type: ignore[assignment]
    plain = Decoding(model, make(0), prompt, most=new).run()
    for drafter in (always_right, always_wrong, at_random):
        found = Decoding(model, make(0), prompt, drafter=drafter([*prompt, *plain], zoo.VOCABULARY), most=new)
        assert found.run() == plain
        if drafter is always_right and most_taken_back(found.lane.caches):
            assert found.passes < new / 2


def check_parts(family: Family) -> None:
    tensors = tensors_of(family.model)
    for tensor in tensors:
        part = part_of(tensor, family.config)
        if len(tensor.shape) == 2 and tensor.shape[0] == zoo.VOCABULARY:
            assert part in ("embedding", "head"), tensor
        elif len(tensor.shape) >= 2 and min(tensor.shape) > 4 and "norm" not in tensor.name:
            assert part != "norms and other" or "ngram_embeddings.post_projs" in tensor.name, tensor
    assert any(part_of(tensor, family.config) == "embedding" for tensor in tensors)


def test_every_architecture_is_here_or_left_out_with_a_reason() -> None:
    import mlx_lm.models

    folder = Path(mlx_lm.models.__path__[0])
    made = {
        path.stem for path in folder.glob("*.py") if re.search(r"^class ModelArgs\b", path.read_text(), re.MULTILINE)
    }
    assert made == {*zoo.NAMES, *zoo.LEFT_OUT}


@pytest.mark.skipif(mx.metal.is_available(), reason="here they do run")
@pytest.mark.parametrize("name", zoo.METAL)
def test_what_is_left_out_as_metal_is_metal(name: str) -> None:
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict({**zoo.BASE, "model_type": name, **zoo.METAL[name]}))
    with pytest.raises(RuntimeError, match="Metal"):
        model(tokens(4))


def test_what_is_left_out_for_other_reasons_still_has_them() -> None:
    from mlx_lm.models import phi3small, prism_hadamard_qwen35

    assert importlib.util.find_spec("hf_olmo") is None
    with pytest.raises(ValueError, match="Hadamard pack"):
        prism_hadamard_qwen35.ModelArgs(model_type="prism_hadamard_qwen35", text_config={})
    with pytest.raises(ModelUnsupportedError, match="sees those after it"):
        check_config({"model_type": "phi3small"}, phi3small.ModelArgs)
