"""Layers that add an adapter's change without modifying the weights."""

# Unlike mlx-lm's DoRA layer, which does it for every token, norms are computed once.

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

if TYPE_CHECKING:
    from .adapters import Change

Kind = Literal["linear", "experts", "embedding"]


@dataclass(frozen=True, slots=True)
class Base:
    """An adaptable layer: y (…, outputs) of x (…, inputs), or of token ids."""

    kind: Kind
    outputs: int
    inputs: int
    stack: int | None = None


@dataclass(frozen=True, slots=True)
class Adapted:
    module: Any

    def added(self) -> list[mx.array]:
        return [self.module[name] for name in ("lora_a", "lora_b", "gain") if name in self.module]


class DoRALinear(nn.Module):
    """y = g (x Wᵀ + s x Dᵀ Uᵀ) + b with g = m ÷ ‖W + s U D‖, row by row."""

    def __init__(self, linear: Any, change: "Change") -> None:
        super().__init__()
        self.linear = linear
        self.scale = change.scale
        self.lora_a, self.lora_b = change.down.T, change.up.T
        assert change.magnitude is not None
        whole = _weight(linear).astype(mx.float32)
        whole = whole + change.scale * (change.up.astype(mx.float32) @ change.down.astype(mx.float32))
        self.gain = change.magnitude.astype(mx.float32) / mx.linalg.norm(whole, axis=-1)

    def __call__(self, x: mx.array) -> mx.array:
        """x (…, in) → (…, out)."""
        y = self.linear(x)
        bias = self.linear.get("bias")
        plain = y if bias is None else y - bias
        z = (x @ self.lora_a) @ self.lora_b
        scaled: mx.array = (self.gain * (plain + self.scale * z)).astype(y.dtype)
        return scaled if bias is None else scaled + bias


def base_of(module: nn.Module) -> Base | None:
    if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
        return Base("experts", module.output_dims, module.input_dims, module.num_experts)
    if isinstance(module, nn.Linear | nn.QuantizedLinear):
        return Base("linear", *_shape(module))
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        return Base("embedding", *_shape(module))
    return None


def adapted(module: Any, change: "Change", dtype: mx.Dtype | None) -> Adapted:
    base = base_of(module)
    assert base is not None
    layer: Any
    if base.kind == "experts":
        layer = LoRASwitchLinear.from_base(module, r=change.rank, scale=change.scale)
        layer.lora_a, layer.lora_b = change.down, change.up
    elif base.kind == "embedding":
        layer = LoRAEmbedding(base.outputs, base.inputs, r=change.rank, scale=change.scale)
        layer.embedding, layer.lora_a, layer.lora_b = module, change.up, change.down
    elif change.magnitude is not None:
        layer = DoRALinear(module, change)
    else:
        layer = LoRALinear(base.inputs, base.outputs, r=change.rank, scale=change.scale)
        layer.linear, layer.lora_a, layer.lora_b = module, change.down.T, change.up.T
    for name in ("lora_a", "lora_b"):
        layer[name] = mx.contiguous(layer[name] if dtype is None else layer[name].astype(dtype))
    layer.eval()
    return Adapted(layer)


def _shape(module: Any) -> tuple[int, int]:
    rows, columns = module.weight.shape
    return rows, columns * 32 // module.bits if "scales" in module else columns


def _weight(linear: Any) -> mx.array:
    if "scales" not in linear:
        weight: mx.array = linear.weight
        return weight
    # In float32 where scales are floating numbers: the weights are, whatever type their scales are stored in.
    scales, biases = (
        array.astype(mx.float32) if array is not None and mx.issubdtype(array.dtype, mx.floating) else array
        for array in (linear.scales, linear.get("biases"))
    )
    how = {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}
    return mx.dequantize(linear.weight, scales, biases, **how)
