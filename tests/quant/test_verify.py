"""Two models on one text: the figures worked by hand, and that they tell a good conversion from a bad one."""

import itertools
import json
import math
import shutil

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx.utils import tree_flatten

from tests.quant.quant_models import build, make_source
from tokamac.engine.errors import OptionError
from tokamac.engine.model.config import read_config
from tokamac.quant import report as quality_module
from tokamac.quant.evaluation import sample, verify
from tokamac.quant.report import MOST_KL, TOLERATED, TYPICAL_KL, Quality, compare, concerns, typical_kl
from tokamac.quant.streaming import Streamed, streamable_folder

IDS = [(11 * i * i + 5 * i) % 320 for i in range(40)]
LN2, LN4 = math.log(2), math.log(4)


def logs(rows):
    return mx.log(mx.array(rows))


def test_figures_worked_by_hand():
    reference = logs([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])
    other = logs([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])
    found = compare(reference, other, [2, 0, 1])
    # Only the first position differs: ½ ln 2 − ¼ ln 2.
    kls = [LN2 / 4, 0, 0]
    assert found.kl == pytest.approx(LN2 / 12)
    assert found.kl_se == pytest.approx(np.std(kls, ddof=1) / math.sqrt(3))
    assert found.top1 == pytest.approx(2 / 3)
    # Token 0 after the first, 1 after the second: ½ and ½ in the reference, ¼ and ½ in the other.
    assert found.reference_perplexity == pytest.approx(2)
    assert found.reference_perplexity_se == pytest.approx(0)
    assert found.perplexity == pytest.approx(math.exp((LN4 + LN2) / 2))
    assert found.perplexity_ratio == pytest.approx(math.sqrt(2))
    # The differences are ln 2 and 0: their standard error is ½ ln 2.
    assert found.perplexity_ratio_se == pytest.approx(math.sqrt(2) * LN2 / 2)
    assert found.positions == 3


def test_a_model_equals_itself():
    rows = mx.random.normal((50, 30), key=mx.random.key(1))
    same = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    found = compare(same, same, [i % 30 for i in range(50)])
    assert (found.kl, found.kl_se, found.top1, found.perplexity_ratio, found.perplexity_ratio_se) == (0, 0, 1, 1, 0)
    assert concerns(found, 2.0) == concerns(found, 16.0) == ()


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 90), st.integers(2, 40), st.integers(0, 2**31))
def test_comparing_in_blocks_changes_nothing(positions, words, seed):
    rng = np.random.default_rng(seed)
    a, b = (np.log(rng.dirichlet(np.ones(words), positions)).astype(np.float32) for _ in range(2))
    ids = rng.integers(0, words, positions).tolist()
    found = compare(mx.array(a), mx.array(b), ids)
    a, b = a.astype(np.float64), b.astype(np.float64)
    kls = np.sum(np.exp(a) * (a - b), axis=-1)
    assert found.kl == pytest.approx(max(kls.mean(), 0), rel=1e-3, abs=1e-5)
    assert found.top1 == pytest.approx(np.mean(a.argmax(-1) == b.argmax(-1)))
    gains = [a[i, ids[i + 1]] - b[i, ids[i + 1]] for i in range(positions - 1)]
    assert found.perplexity_ratio == pytest.approx(math.exp(np.mean(gains)), rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_no_number_is_none_and_a_concern(bad):
    reference = logs([[0.5, 0.5]] * 4)
    other = mx.concatenate([reference[:2], mx.full((1, 2), bad), reference[3:]])
    found = compare(reference, other, [0, 1, 0, 1])
    assert (found.kl, found.kl_se) == (None, None)
    assert (found.perplexity, found.perplexity_se, found.perplexity_ratio, found.perplexity_ratio_se) == (None,) * 4
    assert found.reference_perplexity == pytest.approx(2)
    assert (found.top1 is None) == math.isnan(bad)
    assert len(concerns(found, 4.5)) == 1


def test_a_word_that_only_the_other_rules_out_is_infinitely_far():
    found = compare(logs([[0.5, 0.5]]), logs([[1.0, 0.0]]), [0])
    assert (found.kl, found.top1, found.perplexity, found.positions) == (None, 1.0, None, 1)


def test_of_one_token_there_is_a_kl_and_no_error():
    found = compare(logs([[0.5, 0.5]]), logs([[0.25, 0.75]]), [0])
    assert found.kl == pytest.approx(0.5 * math.log(4 / 3))
    assert (found.kl_se, found.perplexity_ratio) == (None, None)


def test_other_vocabularies_are_refused():
    with pytest.raises(OptionError, match="vocabularies"):
        compare(logs([[0.5, 0.5]]), logs([[0.2, 0.3, 0.5]]), [0])


def test_the_typical_kl_passes_through_the_published_points_and_falls_with_bits():
    for bits, kl in TYPICAL_KL:
        assert typical_kl(bits) == pytest.approx(kl)
    assert typical_kl(1.0) == TYPICAL_KL[-1][1]
    assert typical_kl(16.0) == typical_kl(8.5)
    # Halfway between 4.6 and 5.6 bits: the geometric mean.
    assert typical_kl(5.1) == pytest.approx(math.sqrt(0.0719 * 0.0222))
    steps = [typical_kl(bits / 10) for bits in range(15, 120)]
    assert steps == sorted(steps, reverse=True)


def measured(kl, ratio, *, kl_se=0.0, ratio_se=0.0):
    return Quality(kl, kl_se, 0.9, 10.0, 0.1, 10.0 * ratio, 0.1, ratio, ratio_se, 256)


@pytest.mark.parametrize("bits", [2.5, 3.5, 4.5, 6.5, 8.5])
def test_concerns_begin_at_four_times_what_is_typical_or_where_a_model_is_poor(bits):
    limit = min(TOLERATED * typical_kl(bits), MOST_KL)
    assert concerns(measured(0.9 * limit, math.exp(0.9 * limit)), bits) == ()
    (far,) = concerns(measured(1.1 * limit, 1.0), bits)
    assert f"{bits:.2f} bits per weight" in far
    (worse,) = concerns(measured(0.0, math.exp(1.1 * limit)), bits)
    assert "perplexity" in worse
    assert len(concerns(measured(1.1 * limit, math.exp(1.1 * limit)), bits)) == 2
    assert concerns(measured(0.0, 0.5), bits) == ()  # better by chance is no concern
    # The same figures from a text too short to be sure of them.
    unsure = measured(1.1 * limit, math.exp(1.1 * limit), kl_se=limit, ratio_se=limit * math.exp(1.1 * limit))
    assert concerns(unsure, bits) == ()


def packed(tmp_path, kind, bits):
    """The model of that kind as mlx's own quantizer packs it."""
    out = tmp_path / f"{bits}bit"
    out.mkdir()
    model, config = build(kind)
    nn.quantize(model, group_size=64, bits=bits)
    mx.save_safetensors(str(out / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (out / "config.json").write_text(json.dumps({**config, "quantization": {"group_size": 64, "bits": bits}}))
    return out


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_fewer_bits_are_farther_in_every_figure(tmp_path, kind):
    reference = Streamed(streamable_folder(make_source(tmp_path, kind)))
    itself = verify(reference, reference, IDS)
    assert (itself.quality.kl, itself.layers) == (pytest.approx(0, abs=1e-6), (0.0, 0.0))
    found = [verify(reference, Streamed(streamable_folder(packed(tmp_path, kind, bits))), IDS) for bits in (8, 4, 2)]
    for better, worse in itertools.pairwise(found):
        assert better.quality.kl < worse.quality.kl
        assert better.quality.top1 >= worse.quality.top1
        assert all(a < b for a, b in zip(better.layers, worse.layers, strict=True))
    assert all(comparison.quality.positions == len(IDS) for comparison in found)


def test_a_layers_error_is_that_of_its_output(tmp_path):
    """One layer of two is damaged: what comes before it is untouched, and its own error is as computed whole."""
    folder = make_source(tmp_path, "llama")
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    arrays = mx.load(str(folder / "model.safetensors"))
    arrays["model.layers.1.mlp.down_proj.weight"] *= 2
    mx.save_safetensors(str(damaged / "model.safetensors"), arrays)
    found = verify(*(Streamed(streamable_folder(each)) for each in (folder, damaged)), IDS)

    def last_layer(weights):
        model, _ = build("llama")
        model.load_weights(list(weights.items()))
        model.set_dtype(mx.float32)
        x = model.model.embed_tokens(mx.array([IDS]))
        for layer in model.layers:
            x = layer(x, "causal")
        return x

    y, other = last_layer(mx.load(str(folder / "model.safetensors"))), last_layer(arrays)
    assert found.layers[0] == 0
    assert found.layers[1] == pytest.approx((mx.linalg.norm(y - other) / mx.linalg.norm(y)).item(), rel=1e-3)


def test_models_of_other_shapes_have_no_layer_errors(tmp_path):
    models = []
    for layers in (2, 3):
        (tmp_path / str(layers)).mkdir()
        models.append(
            Streamed(streamable_folder(make_source(tmp_path / str(layers), "tied", num_hidden_layers=layers)))
        )
    assert verify(*models, IDS).layers == ()
    assert verify(*models[::-1], IDS).layers == ()


TEXT = "A model is verified on a text.\nIt has some lines, and every fifth stretch is held back.\n" * 40


def test_a_sample_is_the_models_own_tokens(tmp_path):
    folder = make_source(tmp_path, "llama")
    found = sample(folder, read_config(folder), "llama", TEXT, tokens=32)
    assert found.unable is None
    assert 2 <= len(found.ids) <= 32
    assert found == sample(folder, read_config(folder), "llama", TEXT, tokens=32)


def test_without_a_tokenizer_there_is_no_sample_and_a_reason(tmp_path):
    folder = make_source(tmp_path, "llama", tokenizer=False)
    found = sample(folder, read_config(folder), "llama", TEXT)
    assert found.ids == ()
    assert "tokenizer" in found.unable


def test_a_tokenizer_of_another_model_makes_no_sample(tmp_path):
    folder = make_source(tmp_path, "llama")
    found = sample(folder, {**read_config(folder), "vocab_size": 3}, "llama", TEXT)
    assert found.ids == ()
    assert "does not know" in found.unable


def test_blocks_are_smaller_than_the_texts_here():
    assert len(IDS) > quality_module.BLOCK
