"""Moments: means of squares, by channel and by expert, and that a streamed model gives those of the whole one."""

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear

from tests.quant.quant_models import build, make_source
from tokamac.quant.source import open_source
from tokamac.quant.streaming import Streamable, Streamed, activation_statistics, streamable_source

TABLE = [[1.0, 2.0], [3.0, -4.0], [0.0, 1.0]]
"""Of token 0, 1 and 2."""


class Block(nn.Module):
    """A linear layer, and a stack of four experts of which each token takes two: 0 and its own."""

    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(2, 2, bias=False)
        self.stack = SwitchLinear(2, 2, 4, bias=False)

    def __call__(self, x, ids):
        own = mx.where(ids == 0, 1, 2)
        self.stack(mx.expand_dims(self.plain(x), (-2, -3)), mx.stack([mx.zeros_like(own), own], axis=-1))
        return x


class Toy(nn.Module):
    """The embedding's rows, seen by a layer that passes them on to the experts."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.layers = [Block()]

    def __call__(self, ids):
        return self.layers[0](self.embedding(ids), ids)


def toy():
    weights = {
        "embedding.weight": TABLE,
        "layers.0.plain.weight": [[1.0, 0.0], [0.0, 2.0]],
        "layers.0.stack.weight": np.ones((4, 2, 2)).tolist(),
    }
    return Streamed(Streamable(Toy(), lambda: {name: mx.array(value) for name, value in weights.items()}))


def test_moments_worked_by_hand():
    found = activation_statistics(toy(), [[0, 1, 1]])
    assert set(found) == {"layers.0.plain", "layers.0.stack"}
    # 1² + 3² + 3² over 3, 2² + 4² + 4² over 3
    np.testing.assert_allclose(found["layers.0.plain"], [19 / 3, 12], rtol=1e-6)
    # The second channel was doubled. Expert 0 saw all three tokens, expert 1 token 0, expert 2 token 1 twice, and expert 3 none:
    # it gets the mean over all rows, of which every token makes two.
    np.testing.assert_allclose(found["layers.0.stack"], [[19 / 3, 48], [1, 16], [9, 64], [19 / 3, 48]], rtol=1e-6)
    assert {each.dtype for each in found.values()} == {np.dtype(np.float32)}


def test_sequences_side_by_side_are_one_text():
    together, apart = activation_statistics(toy(), [[0, 1], [2, 1]]), activation_statistics(toy(), [[0, 1, 2, 1]])
    for path, found in together.items():
        np.testing.assert_allclose(found, apart[path], rtol=1e-6)


def whole_moments(kind, ids):
    """From mlx-lm's own model in float32, whole: every call's input, added up one row after the other."""
    model, _ = build(kind)
    model.set_dtype(mx.float32)
    rows = {}

    def kept(path, x, indices=None, **_):
        x = np.asarray(x)
        chosen = np.zeros(x.shape[:-1], int) if indices is None else np.asarray(indices)[..., None]
        shape = np.broadcast_shapes(x.shape[:-1], chosen.shape)
        flat, experts = np.broadcast_to(x, (*shape, x.shape[-1])), np.broadcast_to(chosen, shape)
        rows[path] = (flat.reshape(-1, x.shape[-1]), experts.reshape(-1))

    paths = {id(module): path for path, module in model.named_modules()}
    with pytest.MonkeyPatch.context() as patch:
        for kind_ in (nn.Linear, SwitchLinear):

            def call(self, x, *args, own=kind_.__call__, **kwargs):
                kept(paths[id(self)], x, *args)
                return own(self, x, *args, **kwargs)

            patch.setattr(kind_, "__call__", call)
        mx.eval(model(mx.array([ids])))
    modules = dict(model.named_modules())
    return {path: by_expert(modules[path], *seen) for path, seen in rows.items()}


def by_expert(module, rows, experts):
    squares = rows.astype(np.float64) ** 2
    if not isinstance(module, SwitchLinear):
        return squares.mean(axis=0)
    each = [squares[experts == number] for number in range(module.num_experts)]
    return np.stack([own.mean(axis=0) if len(own) else squares.mean(axis=0) for own in each])


@pytest.mark.parametrize("length", [6, 48])  # from 64 rows on, mlx-lm sorts them by expert
@pytest.mark.parametrize("kind", ["llama", "mixtral", "tied"])
def test_a_streamed_model_has_the_moments_of_the_whole_one(tmp_path, kind, length):
    ids = [(7 * i * i + 3 * i) % 320 for i in range(length)]
    expected = whole_moments(kind, ids)
    source = open_source(make_source(tmp_path, kind))
    found = activation_statistics(Streamed(streamable_source(source)), [ids])
    assert set(found) == set(expected)
    shapes = {name.removesuffix(".weight"): array.shape for name, array in tree_flatten(source.module.parameters())}
    for path, each in found.items():
        assert each.shape == (*shapes[path][:-2], shapes[path][-1])
        np.testing.assert_allclose(each, expected[path], rtol=1e-4, atol=1e-7)
