"""Every architecture of mlx-lm: nothing may pass our caches by, and each flag is honoured or refused with its reason."""

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

from tests.kv import zoo
from tests.kv.models import MovingReference, Reference, feed, largest_difference, seeded, tokens
from tokamac.engine import KVSpec, ModelUnsupportedError, OptionError
from tokamac.engine.kv import Cache, plan_caches
from tokamac.engine.kv.attention import recording
from tokamac.engine.kv.plan import CachePlan
from tokamac.engine.kv.probe import leaves, map_leaves
from tokamac.engine.model import cpu
from tokamac.engine.model.config import ignored_windows, read_config
from tokamac.engine.model.config_rules import check_config
from tokamac.engine.model.loader import bound_positions, position_rows

GOLDEN = Path(__file__).parents[1] / "golden"
TOKENS = 100
"""More than a ring of zoo.WINDOW or WINDOW tokens holds with the 64 that it keeps to rewind into."""
CUTS = [60, 1, 1, 30, 1]
WINDOW, KEEP = 24, 4


def built(name: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """Return a seeded model of mlx-lm's class, and its config with these changes."""
    config = {**zoo.config_of(name), **changes}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **changes}
    module = importlib.import_module(f"mlx_lm.models.{name}")
    return seeded(module.Model(module.ModelArgs.from_dict(config))), config


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


@pytest.fixture(scope="module", params=zoo.NAMES)
def family(request: pytest.FixtureRequest) -> Family:
    model, config = built(request.param)
    ids = tokens(TOKENS)
    return Family(request.param, model, config, ids, feed(model, plan_caches(model, config, KVSpec()).make(), ids, []))


def ours(caches: list[Any]) -> list[Cache]:
    return [cache for _, cache in leaves(caches) if isinstance(cache, Cache)]


def test_by_default_logits_are_mlx_lms_own(family: Family) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    plan = family.plan(KVSpec())
    # mlx-lm's plamo3 sees one token more in prefill than in decoding; ours sees it in both.
    cut = family.name != "plamo3"
    wanted = family.logits(make_prompt_cache(family.model), cut=cut)
    off = largest_difference(family.logits(plan.make(), cut=cut), wanted)
    slides = any(layer.kind == "window" and layer.ours for layer in plan.layers)
    # The slots of a ring lie in another order than mlx-lm's, so the same sums round otherwise.
    assert off <= (5e-5 if slides else 0), f"{family.name}: {off}"


def test_how_a_prompt_is_cut_changes_no_logits(family: Family) -> None:
    cut = family.logits(family.plan(KVSpec()).make(), cut=True)
    assert largest_difference(cut, family.whole) < 1e-4


def test_each_of_our_caches_is_attended_to_once_in_a_pass(family: Family) -> None:
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


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "head"])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_on_a_cpu_no_piece_of_a_prompt_computes_its_logits(
    name: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tied and name == "baichuan_m1":
        pytest.skip("its class has no model without a head of its own")
    model, config = built(name, tie_word_embeddings=tied)
    cpu.unpack(model, logits=cpu.logits_width(model))
    widths, multiply = set(), cpu.DenseLinear._multiply

    def watched(layer: cpu.DenseLinear, x: mx.array) -> mx.array:
        rows = multiply(layer, x)
        widths.add(rows.shape[-1])
        return rows

    monkeypatch.setattr(cpu.DenseLinear, "_multiply", watched)
    caches = plan_caches(model, config, KVSpec()).make()
    widths.clear()
    logits = model(tokens(9), cache=caches)
    mx.eval([cache.state for cache in caches])
    assert logits.shape[-1] == zoo.VOCABULARY
    assert zoo.VOCABULARY not in widths


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_table_of_positions_is_known_and_never_read_beyond_its_end(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table is what is looked up by where tokens stand, rather than by which they are: the class itself says which it is."""
    model, config = built(name)
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


def test_eight_bits_are_close_or_refused(family: Family) -> None:
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


def test_a_window_is_honoured_or_refused(family: Family) -> None:
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


@pytest.mark.parametrize("case", ["gemma2", "ministral3", "mistral", "phi3", "qwen2", "smollm3", "starcoder2"])
def test_an_older_config_without_layer_types_slides_alike(case: str) -> None:
    config = read_config(GOLDEN / f"{case}_window")
    windows = ignored_windows(config, config["num_hidden_layers"])
    assert 16 in windows
    older = {key: value for key, value in config.items() if key != "layer_types"}
    assert ignored_windows(older, len(windows)) == windows
