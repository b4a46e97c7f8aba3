"""AWQ by mlx-lm: scales salient input channels and clips group ranges (Lin et al., arXiv 2306.00978)."""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from tokamac.engine.device import device_kind
from tokamac.engine.errors import OptionError
from tokamac.engine.perf.config_cost import Packing

from .options import Options
from .packing import (
    FLOAT_BYTES,
    OTHERWISE,
    Choices,
    Silent,
    attention_bytes,
    check_plain,
    packed_arrays,
    running,
    uniform,
    with_packed,
    working,
)
from .report import StageDone, StageProgress
from .source import Method, Packed, Source, check_finite, clone, fresh, layer_paths, leaves, override
from .streaming import LENGTH, rows_here

# Columns are multiplied by factors that the preceding norm or layer is divided by; factors and clipping are kept where
# they lower a block's error. Layers with a window are calibrated with full causal attention.

# mlx-lm packs the embedding too, and computes block inputs from that, without e.g. Gemma's factor. Here the
# first block's true inputs stand in for it. mlx-lm's list of blocks is a generator here: it reads a block on
# request and takes over the result at the next request, so one block is in memory.


# Of `calibration.LENGTH` tokens. AWQ takes means of inputs and compares a block's errors, which needs fewer tokens than
# GPTQ's sums of products, and it runs every block some sixty times.
SEQUENCES = 8

STAGE = "scaling and packing by awq"


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
            if _is_linear(linear) and linear.weight.shape[-1] % options.group:
                width = f"{path} has rows of {linear.weight.shape[-1]} weights"
                raise OptionError(f"awq needs rows that groups of {options.group} divide, and {width}", OTHERWISE)


def pack(
    source: Source, options: Options, chosen: Choices, sequences: Sequence[Sequence[int]], progress: StageProgress
) -> Source:
    """Return ``source`` with its blocks' linear layers scaled, clipped and packed as ``chosen``.

    sequences: of equal length. Raises ConversionError, and OptionError for unknown tokens.
    """
    from mlx_lm.quant import awq

    # Our model is the language model already, wherever its class keeps it.
    rules = replace(awq.AWQ_MODEL_CONFIGS[str(source.config["model_type"])], lm_key=None)
    blocks = _Blocks(source, uniform(options), chosen, progress)
    run_layer = partial(awq.run_layer, batch_size=_at_once(source.module, len(sequences), len(sequences[0])))
    with running("awq", awq, tqdm=Silent(), run_layer=run_layer):
        hidden = _entering(source, rules, mx.array([list(sequence) for sequence in sequences]))
        model = _Blockwise(rules.embed, blocks.one_by_one())
        # Given as the token ids, which mlx-lm only hands to the embedding and asks for the sequences' length.
        awq.awq_quantize(model, hidden, rules, group_size=options.group, bits=options.packed_bits)
    return with_packed(source, blocks.packed, blocks.changed)


def peak_bytes(source: Source, options: Options, chosen: Choices) -> int:  # noqa: ARG001
    blocks = [
        [tuple(each.weight.shape) for _, each in leaves(layer) if _is_linear(each)] for layer in source.module.layers
    ]
    sizes: list[int] = [sum(math.prod(shape) for shape in shapes) for shapes in blocks]
    # For all tokens: what is kept of a layer's inputs, and its outputs twice; the block's own inputs, outputs and their errors.
    values: int = max(sum(shape[-1] + 2 * shape[-2] for shape in shapes) + 8 * shapes[0][-1] for shapes in blocks)
    kept = sum(sizes) * options.packed_bits // 8 + FLOAT_BYTES * (4 * max(sizes) + SEQUENCES * LENGTH * values)
    return kept + attention_bytes(source.config, SEQUENCES)


def _at_once(module: Any, sequences: int, length: int) -> int:
    sizes = (each.weight.shape[-2] * each.weight.shape[-1] for _, each in leaves(module) if _is_linear(each))
    rows = rows_here(2 * max(sizes, default=1))
    return sequences if rows is None else min(max(rows // length, 1), sequences)


class _Blocks:
    def __init__(self, source: Source, packing: Packing, chosen: Choices, progress: StageProgress) -> None:
        self.packed: dict[str, Packed] = {}
        self.changed: dict[str, mx.array] = {}
        self._source, self._packing, self._chosen, self._progress = source, packing, chosen, progress
        self._on_cpu = device_kind() == "cpu"

    def one_by_one(self) -> Iterator[nn.Module]:
        left = fresh(self._source)
        paths, layers = layer_paths(self._source.module), self._source.module.layers
        for done, (path, template) in enumerate(zip(paths, layers, strict=True), start=1):
            block = self._filled(path, template, left)
            yield block
            self._collect(path, block)
            self._progress(StageDone(STAGE, done, len(paths)))

    def _filled(self, path: str, template: nn.Module, left: dict[str, mx.array]) -> Any:
        block = clone(template)
        for name, parameter in tree_flatten(block.parameters()):
            weight = left.pop(f"{path}.{name}")
            floating = mx.issubdtype(parameter.dtype, mx.floating)
            block.update(tree_unflatten([(name, working(f"{path}.{name}", weight) if floating else weight)]))
        for name, leaf in leaves(block):
            if "to_quantized" in dir(leaf):
                self._prepare(leaf, packs=self._chosen.get(f"{path}.{name}") == self._packing)
        return block

    def _prepare(self, leaf: Any, *, packs: bool) -> None:
        methods: dict[str, Method] = {}
        if self._on_cpu and isinstance(leaf, nn.Linear):
            methods |= {"__call__": _multiply, "to_quantized": _multiplying}
        if not packs or not _is_linear(leaf):
            methods["to_quantized"] = _itself
        if methods:
            override(leaf, **methods)

    def _collect(self, path: str, block: Any) -> None:
        weights = self._source.weights
        packed = {f"{path}.{name}": leaf for name, leaf in leaves(block) if "scales" in leaf}
        for whole, leaf in packed.items():
            dtype = weights[f"{whole}.weight"].dtype
            arrays = (leaf.weight, leaf.scales.astype(dtype), leaf.biases.astype(dtype))
            self.packed[whole] = packed_arrays(arrays, whole, self._packing)
        for leaf_name, array in tree_flatten(block.parameters()):
            name = f"{path}.{leaf_name}"
            # AWQ leaves the inputs it saw with a layer that it did not pack.
            if name in weights and name.removesuffix(".weight") not in packed:
                self.changed[name] = array.astype(weights[name].dtype)
                check_finite(name, self.changed[name], hint=OTHERWISE)


class _Blockwise(nn.Module):
    def __init__(self, embed: str, layers: Iterator[nn.Module]) -> None:
        super().__init__()
        self.model = {embed: _Hidden()}
        self.layers = layers


class _Hidden(nn.Module):
    def __call__(self, hidden: mx.array) -> mx.array:
        return hidden

    def to_quantized(self, **_: object) -> "_Hidden":
        return self


class _ReachedError(Exception):
    """Ends a run at the first block."""


def _entering(source: Source, rules: Any, ids: mx.array) -> mx.array:
    found: list[mx.array] = []

    def stop(_: nn.Module, x: mx.array) -> mx.array:
        found.append(x)
        raise _ReachedError

    model: Any = clone(source.module).eval()
    weights = fresh(source)
    known = next(weight.shape[0] for name, weight in weights.items() if name.endswith(f"{rules.embed}.weight"))
    if int(mx.max(ids)) >= known:  # MLX would read past the end of the table
        raise OptionError("the text has tokens that the model does not know", "Use the model's own tokenizer.")
    # Lazy: nothing is read but what the first block's inputs need.
    model.update(tree_unflatten([(name, _float32(weight)) for name, weight in weights.items()]))
    del weights
    override(model.layers[0][rules.scale_configs[0].prev], __call__=stop)
    try:
        model(ids)
    except _ReachedError:
        mx.eval(found)
    return found[0]


def _float32(weight: mx.array) -> mx.array:
    return weight.astype(mx.float32) if mx.issubdtype(weight.dtype, mx.floating) else weight


def _multiply(layer: Any, x: mx.array) -> mx.array:
    # AWQ runs a block some sixty times, and MLX's CPU product is slow there.
    return _dense(layer.weight, layer, x)


def _multiplying(layer: Any, **how: Any) -> Any:
    packed = nn.Linear.to_quantized(layer, **how)
    override(packed, __call__=_multiply_packed)
    return packed


def _multiply_packed(layer: Any, x: mx.array) -> mx.array:
    how = {"group_size": layer.group_size, "bits": layer.bits}
    return _dense(mx.dequantize(layer.weight, layer.scales, layer.biases, **how), layer, x)


def _dense(weight: mx.array, layer: Any, x: mx.array) -> mx.array:
    from tokamac.engine.cpu.layers import DenseLinear

    return DenseLinear(weight, layer.get("bias"))(x)


def _itself(module: nn.Module, **_: object) -> nn.Module:
    return module


def _is_linear(layer: Any) -> bool:
    from mlx_lm.models.switch_layers import SwitchLinear

    return isinstance(layer, nn.Linear | SwitchLinear)


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
