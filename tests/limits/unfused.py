"""Attention that writes its scores down, measured: MLX's own products on the CPU device stand for those that a GPU runs where no
kernel is fused, since the arrays are the same. Counts of bytes, the same on every run."""

from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx

from tests.engine.seeded import write_model
from tokamac.engine.generation import Generation
from tokamac.engine.kv import attention, install_seam, plan_caches
from tokamac.engine.kv.attention_kernel import AttentionDevice
from tokamac.engine.model.loader import load_model
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.cost import cost_of_model
from tokamac.engine.perf.peak_memory import predict_peak, shape_of

DEFAULT_KV = KVSpec()


@dataclass(frozen=True)
class Unfused:
    """A call whose attention writes its scores down: ``new`` tokens after ``held``."""

    head_dim: int
    heads: int
    kv_heads: int
    held: int
    new: int
    kv: KVSpec = DEFAULT_KV

    def measure(self, folder: Path) -> tuple[int, int]:
        """Return the predicted peak and MLX's, weights and caches included."""
        install_seam()
        write_model(
            folder,
            num_hidden_layers=4,  # the last one's attention is not computed, since no logits are asked for
            head_dim=self.head_dim,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
        )
        loaded = load_model(folder, dtype=None, device="metal", progress=lambda *_: None)
        plan = plan_caches(loaded.module, loaded.config, self.kv)
        weights = cost_of_model(loaded.module, loaded.config).weight_bytes
        shape = shape_of(
            loaded.config, plan, weights=weights, value_bytes=4, order="ahead", device=AttentionDevice("cpu")
        )
        others = mx.get_active_memory() - weights
        caches = plan.make()
        for cache in caches:
            some = mx.zeros((1, self.kv_heads, self.held, self.head_dim))
            cache.update_and_fetch(some, some)
            mx.eval(cache.state)
        del some
        found = predict_peak(shape, held=self.held, new=self.new, chunk=self.new, slots=caches[0].slots)
        run = Generation(loaded.module, caches, [7] * self.held, ahead=True)
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        with patch.object(attention, "prefers_numpy", lambda *_, **__: False):  # NumPy attends head by head
            assert list(run.prefill([7] * self.new, self.new)) == [self.new]
        return found.total, mx.get_peak_memory() - others


CALLS = (
    Unfused(256, 8, 1, held=2040, new=32),
    Unfused(256, 8, 8, held=1000, new=24),
    Unfused(128, 8, 2, held=2040, new=32),
    Unfused(128, 4, 4, held=600, new=64),
    Unfused(256, 8, 2, held=2040, new=9),
    Unfused(256, 8, 1, held=3500, new=32, kv=KVSpec(key_bits=8, value_bits=4)),
    Unfused(256, 8, 1, held=2040, new=32, kv=KVSpec(window=512)),
    Unfused(128, 4, 4, held=1200, new=80, kv=KVSpec(window=1024)),
)
