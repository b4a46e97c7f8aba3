"""AWQ: scales input channels, so that what packing loses falls on those that matter least."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from tokamac.engine.errors import OptionError

from . import gptq
from .options import Options
from .packing import (
    OTHERWISE,
    Choices,
    Ends,
    Search,
    check_plain,
    packed_arrays,
    uniform,
    with_packed,
    working,
)
from .report import StageDone, StageProgress
from .source import Packed, Source, check_finite, clone, dequantized, fresh, layer_paths, leaves
from .streaming import Inputs, Streamed, streamable_source

# Lin et al., arXiv 2306.00978. Columns are multiplied by s = (root mean square of their inputs)^α, and the norm or layer
# before them is divided by it. α is the one of GRID with the least error of the layers' outputs, tr(D H Dᵀ) with H = Σ x xᵀ
# and D what packing changes, on some rows of each. Scales and biases of groups are the search's: between a group's two
# ends, as mlx-lm's awq has them, its result was worse than plain search. Which layers follow which norm is mlx-lm's table.


# Of `streaming.LENGTH` tokens.
SEQUENCES = 16

STAGE = "scaling and packing by awq"
GRID = tuple(step / 10 for step in range(10))
ROWS = 128  # of each layer, evenly spread, that α is chosen on
LEAST = 1e-4  # of a channel's scale before scales are centred: its inputs may all be 0


def check(config: Mapping[str, Any], module: Any, options: Options) -> None:
    from mlx_lm.quant.awq import AWQ_MODEL_CONFIGS

    check_plain("awq", options)
    kind = str(config.get("model_type"))
    if kind not in AWQ_MODEL_CONFIGS:
        known = ", ".join(sorted(AWQ_MODEL_CONFIGS))
        raise OptionError(f"awq does not know the architecture {kind} (it knows {known})", OTHERWISE)
    for layer in module.layers:
        if not _fits(layer, AWQ_MODEL_CONFIGS[kind]):
            raise OptionError(f"awq's rules for {kind} do not fit the layers of this model", OTHERWISE)
        for path, linear in leaves(layer):
            if gptq.is_linear(linear) and linear.weight.shape[-1] % options.group:
                width = f"{path} has rows of {linear.weight.shape[-1]} weights"
                raise OptionError(f"awq needs rows that groups of {options.group} divide, and {width}", OTHERWISE)


def pack(
    source: Source, options: Options, chosen: Choices, sequences: Sequence[Sequence[int]], progress: StageProgress
) -> Source:
    """Return ``source`` with its blocks' linear layers scaled and packed as ``chosen``.

    sequences: of equal length. Raises ConversionError, and OptionError for unknown tokens.
    """
    blocks = _Blocks(source, options, chosen)
    within = tuple(f"{path}." for path in blocks.paths)
    inside = {path for path, _ in leaves(source.module) if path.startswith(within)}
    ends = Ends(source, chosen, inside)

    def add(inputs: Inputs) -> None:
        ends.add(inputs.path, inputs.rows)
        if inputs.path in inside:
            blocks.add(inputs)

    def layer_done(done: int, total: int) -> None:
        if done <= len(blocks.paths):
            blocks.pack(done - 1)
        progress(StageDone(STAGE, done, total))

    Streamed(streamable_source(source), progress=layer_done).observe(sequences, add)
    return with_packed(source, {**blocks.packed, **ends.packed()}, blocks.changed)


def peak_bytes(source: Source, options: Options, chosen: Choices) -> int:
    return gptq.peak_bytes(source, options, chosen, SEQUENCES)


class _Blocks:
    def __init__(self, source: Source, options: Options, chosen: Choices) -> None:
        from mlx_lm.quant.awq import AWQ_MODEL_CONFIGS

        self.paths = layer_paths(source.module)
        self.packed: dict[str, Packed] = {}
        self.changed: dict[str, mx.array] = {}
        self._source, self._chosen, self._packing = source, chosen, uniform(options)
        self._rules = AWQ_MODEL_CONFIGS[str(source.config["model_type"])].scale_configs
        self._left = fresh(source)
        self._sums: dict[str, np.ndarray] = {}

    def add(self, inputs: Inputs) -> None:
        squares = gptq.squares_of(inputs.rows)
        before = self._sums.get(inputs.path)
        self._sums[inputs.path] = squares if before is None else before + squares

    def pack(self, number: int) -> None:
        from mlx_lm.quant.awq import apply_scale, submodule_from_key

        path = self.paths[number]
        block = self._filled(path, self._source.module.layers[number])
        importance = {name: np.diag(squares) for name, squares in self._sums.items()}
        for rule in self._rules:
            if rule.use_config is not None and not rule.use_config(block):
                continue
            inside, prefix = (block[rule.block], f"{path}.{rule.block}") if rule.block else (block, path)
            layers = {f"{prefix}.{name}": submodule_from_key(inside, name) for name in rule.layers}
            seen = next((self._sums[name] for name in layers if name in self._sums), None)
            if seen is None:
                continue
            scales = self._best({name: layer.weight for name, layer in layers.items()}, seen)
            apply_scale(submodule_from_key(block, rule.prev), list(layers.values()), mx.array(scales))
            importance |= {name: importance[name] / scales**2 for name in layers if name in importance}
        self._collect(path, block, importance)
        self._sums.clear()

    def _filled(self, path: str, template: nn.Module) -> Any:
        block = clone(template)
        for name, parameter in tree_flatten(block.parameters()):
            weight = self._left.pop(f"{path}.{name}")
            floating = mx.issubdtype(parameter.dtype, mx.floating)
            block.update(tree_unflatten([(name, working(f"{path}.{name}", weight) if floating else weight)]))
        return block

    def _best(self, weights: Mapping[str, mx.array], squares: np.ndarray) -> np.ndarray:
        """Return the factors (in,) float32 with the least output error of what is packed; ones where nothing is."""
        diagonal = np.diag(squares)
        rows = {name: _some(weight) for name, weight in weights.items() if self._chosen.get(name) == self._packing}
        found, least = np.ones(len(diagonal), np.float32), np.inf
        for power in GRID if rows else ():
            scales = np.maximum(np.sqrt(diagonal / (diagonal.mean() or 1)) ** power, LEAST).astype(np.float32)
            scales /= np.sqrt(scales.max() * scales.min())
            error = sum(self._error(name, each, scales, squares) for name, each in rows.items())
            if error < least:
                found, least = scales, error
        return found

    def _error(self, name: str, rows: np.ndarray, scales: np.ndarray, squares: np.ndarray) -> float:
        dtype = self._source.weights[f"{name}.weight"].dtype
        quantizer = Search({name: np.diag(squares) / scales**2})
        arrays = quantizer.pack(name, mx.array(rows * scales).astype(dtype), self._packing)
        changes = np.array(dequantized(arrays, self._packing).astype(mx.float32)) / scales - rows
        return float(np.einsum("ij,ij->", changes @ squares, changes))

    def _collect(self, path: str, block: Any, importance: Mapping[str, np.ndarray]) -> None:
        weights = self._source.weights
        for name, array in tree_flatten(block.parameters()):
            whole = f"{path}.{name}"
            module = whole.removesuffix(".weight")
            if whole not in weights:
                continue
            cast = array.astype(weights[whole].dtype)
            check_finite(whole, cast, hint=OTHERWISE)
            if name.endswith(".weight") and self._chosen.get(module) == self._packing and module in importance:
                stack = np.broadcast_to(importance[module], (array.shape[0], array.shape[-1]))
                quantizer = Search({module: np.ascontiguousarray(stack) if array.ndim > 2 else importance[module]})
                arrays = quantizer.pack(module, cast, self._packing)
                self.packed[module] = packed_arrays(arrays, module, self._packing)
            else:
                self.changed[whole] = cast
        mx.eval(list(self.changed.values()))


def _some(weight: mx.array) -> np.ndarray:
    rows = weight.reshape(-1, weight.shape[-1])
    return np.array(rows[:: max(1, rows.shape[0] // ROWS)])


def _fits(layer: Any, rules: Any) -> bool:
    from mlx_lm.quant.awq import submodule_from_key

    try:
        inspect.signature(type(layer).__call__).bind(layer, None, mask=None)
        for rule in rules.scale_configs:
            if rule.use_config is not None and not rule.use_config(layer):
                continue
            submodule_from_key(layer, rule.prev)
            for name in rule.layers:
                submodule_from_key(layer[rule.block] if rule.block else layer, name)
    except (TypeError, KeyError, AttributeError):
        return False
    return True
