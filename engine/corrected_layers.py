"""Layers that stand in for mlx-lm's where those don't compute what a config says: see corrections.py.

Frequencies follow transformers' modeling_rope_utils, worked out here in double precision. "Period" is what MLX calls a
frequency: the number that a position is divided by.
"""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn

from tokamac.engine.errors import ContextError

Config = dict[str, Any]


class ScaledRoPE(nn.Module):
    """Rotary embedding with a period of its own for each pair of dimensions, and other ones past ``switch`` tokens.

    attention: what the rotated dimensions are multiplied by.
    """

    def __init__(
        self,
        periods: list[float],
        *,
        traditional: bool,
        attention: float = 1.0,
        long_periods: list[float] | None = None,
        switch: int | None = None,
    ) -> None:
        super().__init__()
        self.dims = 2 * len(periods)
        self.traditional, self.attention, self.switch = traditional, attention, switch
        self._freqs = mx.array(periods, dtype=mx.float32)  # (dims/2,); underscored: not a parameter
        self._long = mx.array(long_periods or periods, dtype=mx.float32)

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """x (B, H, T, D) → the same, rotated as positions offset … offset + T − 1."""
        freqs = self._long if self._beyond(offset, x.shape[-2]) else self._freqs
        if self.attention != 1.0:
            x = mx.concatenate([x[..., : self.dims] * self.attention, x[..., self.dims :]], axis=-1)
        return mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=None, scale=1.0, offset=offset, freqs=freqs
        )

    def _beyond(self, offset: Any, new: int) -> bool:
        if self.switch is None or not isinstance(offset, int) or offset + new <= self.switch:
            return False
        if 0 < offset <= self.switch:  # the cache holds keys rotated by the short factors
            raise ContextError(
                f"this model changes its rotary factors after {self.switch:,} tokens, which a cache can't follow",
                "Start a new chat, or shorten the prompt.",
            )
        return True


class FeedForward(nn.Module):
    """down(GELU(up x)), or down(GELU(gate x) · up x), around the layers of another block, under their names there."""

    def __init__(
        self, block: nn.Module, names: tuple[str, str, str | None], gelu: Callable[[mx.array], mx.array]
    ) -> None:
        super().__init__()
        self._names, self._gelu = names, gelu
        for name in filter(None, names):
            self[name] = block[name]

    def __call__(self, x: mx.array) -> mx.array:
        """x (B, T, D) → the same shape."""
        up, down, gate = self._names
        hidden = self._gelu(self[gate](x)) * self[up](x) if gate else self._gelu(self[up](x))
        out: mx.array = self[down](hidden)
        return out


def yarn(dims: int, traditional: bool, config: Config) -> ScaledRoPE:
    """YaRN; ``truncate`` and ``attention_factor`` are honoured, which mlx-lm's does not."""
    scaling, base = config["rope_scaling"], float(config["rope_theta"])
    factor, pretrained = float(scaling["factor"]), scaling["original_max_position_embeddings"]

    def boundary(rotations: float) -> float:
        # The dimension that turns so many times within the pretraining context.
        return float(dims * math.log(pretrained / (rotations * 2 * math.pi)) / (2 * math.log(base)))

    low, high = boundary(scaling.get("beta_fast") or 32), boundary(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    periods = []
    for i in range(dims // 2):
        period = base ** (2 * i / dims)
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)  # 0: keep the frequency, 1: divide it by the factor
        periods.append(1 / (ramp / (factor * period) + (1 - ramp) / period))
    return ScaledRoPE(periods, traditional=traditional, attention=_yarn_attention(scaling, factor))


def _yarn_attention(scaling: Config, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def longrope(dims: int, traditional: bool, config: Config) -> ScaledRoPE:
    """LongRoPE: short factors up to the pretraining context, long ones beyond; mlx-lm's class takes the long ones always.

    Going beyond changes the rotation of every earlier token, so a cache ends there: ``corrections.context_limit``.
    """
    scaling, base = config["rope_scaling"], float(config["rope_theta"])
    pretrained = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or config["max_position_embeddings"] / pretrained
    attention = scaling.get("short_mscale") or scaling.get("attention_factor")  # the first is Phi-3.5-MoE's
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(pretrained))
    plain = [base ** (2 * i / dims) for i in range(dims // 2)]
    short, long = (
        [period * stretch for period, stretch in zip(plain, scaling[name], strict=True)]
        for name in ("short_factor", "long_factor")
    )
    return ScaledRoPE(short, traditional=traditional, attention=float(attention), long_periods=long, switch=pretrained)
