"""The budget planner on real arrays: within the target, better than packing everything alike, the same every time."""

import json
import math

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from tests.quant.quant_models import build, make_source
from tokamac.engine.errors import ConversionError, OptionError
from tokamac.engine.perf.config_cost import Packing
from tokamac.quant import mixed_precision, sensitivity
from tokamac.quant.choices import choose, packable
from tokamac.quant.methods import Round, Search
from tokamac.quant.mixed_precision import alternatives, plan_budget, sizes
from tokamac.quant.options import Options
from tokamac.quant.plan import make_plan
from tokamac.quant.sensitivity import Alpha, Replay, coarse, references, relative_errors, sample
from tokamac.quant.source import fresh, open_source

IDS = [int(i) for i in np.random.default_rng(5).integers(0, 320, 96)]
UNIFORM = Options(bits=4, group_size=64)


def quiet(_):
    pass


def uneven(folder, kind="llama", layers=6, **changes):
    """Write a source with heavy-tailed weights whose layers matter unequally: each adds a third of what the one before adds."""
    source = make_source(folder, kind, num_hidden_layers=layers, **changes)
    weights = mx.load(str(source / "model.safetensors"))
    noise = np.random.default_rng(11)
    for name, array in weights.items():
        if array.ndim < 2:
            continue
        values = noise.standard_t(5, array.shape).astype(np.float32) / math.sqrt(array.shape[-1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            values *= 2.0 * 3.0 ** -int(name.split(".")[2])
        weights[name] = mx.array(values).astype(mx.bfloat16)
    mx.save_safetensors(str(source / "model.safetensors"), weights)
    return open_source(source)


def divergence(source, chosen, quantizer, ids):
    """KL of a model packed as chosen against its source, in nats a token: computed by mlx-lm's own module in float32."""
    log_chances = []
    for packings in ({}, chosen):
        weights = fresh(source)
        for path, packing in packings.items():
            if packing is not None:
                name = f"{path}.weight"
                weights[name] = coarse(path, weights[name], packing, quantizer)
        model = open_source(source.folder).module
        model.update(tree_unflatten([(name, array.astype(mx.float32)) for name, array in weights.items()]))
        logits = np.asarray(model(mx.array([ids]))[0], np.float64)
        log_chances.append(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    exact, other = log_chances
    return float((np.exp(exact) * (exact - other)).sum(axis=-1).mean())


def bits_per_weight(source, chosen):
    return make_plan(source, UNIFORM, chosen).bits_per_weight


@pytest.mark.parametrize("quantizer", [Round(), Search()], ids=["round", "search"])
def test_a_target_of_the_same_size_beats_packing_everything_alike(tmp_path, quantizer):
    source = uneven(tmp_path)
    uniform = choose(source, UNIFORM)
    target = bits_per_weight(source, uniform)
    chosen, notes = plan_budget(source, Options(target_bpw=target), quantizer, IDS, quiet)
    assert bits_per_weight(source, chosen) <= target
    other_text = IDS[::-1]
    ours, theirs = (divergence(source, each, quantizer, other_text) for each in (chosen, uniform))
    assert ours < 0.5 * theirs
    assert notes == (mixed_precision.NOTES["measured"],)


@pytest.mark.parametrize("kind", ["llama", "tied", "mixtral", "gemma3"])
@pytest.mark.parametrize("target", [3.0, 4.5, 7.25])
def test_what_is_stored_never_exceeds_the_target_and_comes_close_to_it(tmp_path, kind, target):
    source = open_source(make_source(tmp_path, kind))
    chosen, _ = plan_budget(source, Options(target_bpw=target), Round(), IDS[:32], quiet)
    assert 0.97 * target < bits_per_weight(source, chosen) <= target
    assert set(chosen) == {path for path, _ in packable(source)}


def test_the_same_source_gives_the_same_choice_and_stays_unread(tmp_path):
    source = uneven(tmp_path, layers=2)
    first = plan_budget(source, Options(target_bpw=4.0), Search(), IDS, quiet)
    assert plan_budget(source, Options(target_bpw=4.0), Search(), IDS, quiet) == first
    assert set(source.weights) == {name for name, _ in tree_flatten(source.module.parameters())}


def test_a_target_below_the_smallest_packing_says_what_is_possible(tmp_path):
    source = open_source(make_source(tmp_path, "llama"))
    told = []
    with pytest.raises(OptionError, match="the smallest packing of this model has") as failure:
        plan_budget(source, Options(target_bpw=2.2), Round(), IDS, told.append)
    assert told == []
    least = float(failure.value.message.rpartition(" ")[2])
    chosen, _ = plan_budget(source, Options(target_bpw=least), Round(), IDS, quiet)
    assert bits_per_weight(source, chosen) <= least


def test_routers_keep_eight_bits_and_the_embedding_what_was_asked_for(tmp_path):
    source = open_source(make_source(tmp_path, "mixtral"))
    chosen, _ = plan_budget(source, Options(target_bpw=3.5, embed_bits=6), Round(), IDS, quiet)
    routers = [packing for path, packing in chosen.items() if path.endswith("block_sparse_moe.gate")]
    assert len(routers) == 2
    assert all(packing is None or packing.bits >= 8 for packing in routers)
    assert chosen["lm_head"].bits == chosen["model.embed_tokens"].bits == 6


def test_a_group_size_that_was_asked_for_holds(tmp_path):
    source = open_source(make_source(tmp_path, "llama", intermediate_size=160))
    chosen, notes = plan_budget(source, Options(target_bpw=6.0, group_size=128), Round(), IDS, quiet)
    assert {packing.group_size for packing in chosen.values() if packing} == {128}
    assert "rows of 160 weights" in notes[1]


@pytest.mark.parametrize("how", ["guessed", "by kind"])
def test_without_room_or_text_the_target_holds_and_a_note_says_how_it_was_met(tmp_path, monkeypatch, how):
    source = uneven(tmp_path)
    ids = IDS if how == "guessed" else None
    monkeypatch.setattr(sensitivity, "fits", lambda *_: False)
    chosen, notes = plan_budget(source, Options(target_bpw=4.5), Round(), ids, quiet)
    assert bits_per_weight(source, chosen) <= 4.5
    assert notes[0] == mixed_precision.NOTES[how]
    assert all(packing is None or packing.bits >= 3 for packing in chosen.values())


def test_a_guess_gives_more_bits_to_layers_that_change_more(tmp_path, monkeypatch):
    source = uneven(tmp_path)
    monkeypatch.setattr(sensitivity, "fits", lambda *_: False)
    chosen, _ = plan_budget(source, Options(target_bpw=4.5), Round(), IDS, quiet)
    bits = [chosen[f"model.layers.{layer}.mlp.down_proj"].bits for layer in range(6)]
    assert bits[0] > bits[-1]
    assert bits == sorted(bits, reverse=True)


def test_weights_that_are_not_numbers_are_refused_by_name(tmp_path):
    folder = make_source(tmp_path, "llama")
    weights = mx.load(str(folder / "model.safetensors"))
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = mx.where(mx.arange(128) == 3, mx.nan, weights[name].astype(mx.float32)).astype(mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    for ids in (IDS, None):
        with pytest.raises(ConversionError, match="up_proj"):
            plan_budget(open_source(folder), Options(target_bpw=4.5), Round(), ids, quiet)


def test_what_the_source_has_packed_may_stay_so_without_error(tmp_path):
    source = open_source(make_source(tmp_path, "llama"))
    packed = tmp_path / "packed"
    packed.mkdir()
    config = json.loads((source.folder / "config.json").read_text())
    model, _ = build("llama")
    from mlx import nn

    nn.quantize(model, group_size=64, bits=4)
    mx.save_safetensors(str(packed / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (packed / "config.json").write_text(json.dumps({**config, "quantization": {"group_size": 64, "bits": 4}}))
    again = open_source(packed)
    target = bits_per_weight(again, choose(again, UNIFORM))
    chosen, _ = plan_budget(again, Options(target_bpw=target), Round(), IDS, quiet)
    assert set(chosen.values()) == {Packing(4, 64)}


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_sizes_are_those_of_the_plan(tmp_path, kind):
    source = open_source(make_source(tmp_path, kind))
    among = alternatives(source, Options())
    counted = sizes(source, Options(), among)
    generator = np.random.default_rng(1)
    for _ in range(5):
        chosen = {path: each[generator.integers(len(each))] for path, each in among.items()}
        plan = make_plan(source, UNIFORM, chosen)
        assert plan.weight_bytes == counted.fixed + sum(counted.of[path][chosen[path]] for path in chosen)
        assert plan.parameters == counted.parameters


@pytest.mark.parametrize("kind", ["llama", "tied", "mixtral"])
def test_a_replay_gives_what_a_whole_reading_gives(tmp_path, kind):
    source = uneven(tmp_path, kind, layers=3)
    replay = Replay(source, IDS)
    for path in [path for path, _ in packable(source)][::3]:
        packing = Packing(3, 64)
        changed = coarse(path, replay.weight(path).astype(mx.bfloat16), packing, Round())
        whole = divergence(source, {path: packing}, Round(), IDS)
        assert replay.divergence(path, changed) == pytest.approx(whole, rel=1e-3, abs=1e-7)
        assert replay.divergence(path, replay.weight(path)) == pytest.approx(0, abs=1e-9)


def test_relative_errors_weigh_channels_by_their_inputs():
    weight = mx.array(np.random.default_rng(2).standard_normal((64, 128)).astype(np.float32))
    importance_of = np.where(np.arange(128) < 64, 1.0, 0.0).astype(np.float32)
    made = coarse("x", weight, Packing(3, 64), Round())
    half = slice(0, 64)
    expected = float((mx.sum(mx.square(made - weight)[:, half]) / mx.sum(mx.square(weight)[:, half])).item())
    found = relative_errors("x", weight, [Packing(3, 64)], Round(), importance_of)
    assert found[Packing(3, 64)] == pytest.approx(expected, rel=1e-5)
    assert relative_errors("x", mx.zeros((4, 64)), [Packing(4, 64)], Round()) == {Packing(4, 64): 0.0}


def test_a_sample_takes_whole_rows_of_every_expert():
    stack = mx.broadcast_to(mx.arange(1024)[None, :, None], (4, 1024, 512))
    rows = sample(stack)
    assert rows.shape[0] == 4
    assert rows.shape[2] == 512
    assert rows.size <= 2 << 18
    assert sample(mx.zeros((8, 64))).shape == (8, 64)


def test_alpha_lies_between_those_that_were_taken():
    alpha = Alpha(((2, 4.0), (4, 1.0)))
    assert [alpha.at(bits) for bits in (2, 4, 8, None)] == [4.0, 1.0, 1.0, 1.0]
    assert alpha.at(3) == pytest.approx(2.0)
    assert alpha.at_least(2.0).taken == ((2, 4.0), (4, 2.0))


def test_references_are_the_nearest_there_are():
    every = tuple(Packing(bits, group) for bits in (2, 3, 4, 8) for group in (32, 64, 128))
    assert references((*every, None)) == (Packing(2, 64), Packing(4, 64))
    assert references((Packing(8, 32), None)) == (Packing(8, 32),)
    assert references((None,)) == ()
