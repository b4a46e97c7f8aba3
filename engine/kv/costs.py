"""Sizes of KV caches and the attention kernel that will run, from shapes alone. No MLX."""

from dataclasses import dataclass
from typing import Literal

from ..device import DeviceKind
from ..options import GROUP_SIZES

# Affine groups (https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html):
# ``bits`` per value, a scale and a bias per ``group_size`` values of one head and token.


ROTATED_KEY_BITS = 4  # keys of this many bits or fewer are rotated unless the caller says otherwise
STEP = 256  # slots are made in multiples of this many tokens
# Behind a shared prefix: several replies each hold a tail of their own, and to copy it while it is short costs next to
# nothing.
SHORT_STEP = 32
# A full store grows by a sixteenth, so an append copies 16 tokens on average at any depth, for at most 6 % of spare
# room.
GROWTH = 16


def bytes_per_value(bits: int, group_size: int, value_bytes: int = 2) -> float:
    """Return bytes per number. value_bytes: of the model's type, also for scales and biases."""
    return float(value_bytes) if bits == 16 else bits / 8 + 2 * value_bytes / group_size


def token_bytes(heads: int, dim: int, bits: int, group_size: int, scale_bytes: int) -> int:
    return round(heads * dim * bytes_per_value(bits, group_size, scale_bytes))


def group_for(dim: int, wanted: int) -> int | None:
    return max((size for size in GROUP_SIZES if size <= wanted and dim % size == 0), default=None)


def rounded(slots: int, step: int = STEP) -> int:
    return -(-slots // step) * step


def grown(slots: int, stop: int, step: int = STEP) -> int:
    return slots if stop <= slots else rounded(max(stop, slots + slots // GROWTH), step)


# ``mx.fast.scaled_dot_product_attention`` either runs a fused kernel or falls back to two products and a
# softmax that store (heads, queries, keys) scores, which sets memory use (perf/peak_memory.py) and speed. The
# conditions are MLX 0.32.4's (``mlx/backend/{metal,cuda,no_gpu}``,
# ``ScaledDotProductAttention::use_fallback``, ``eval_gpu``), read from the machine code of the shipped
# libraries, since the public source (846d176) is older. Both macOS libraries' ``use_fallback``, emulated,
# agreed on 30,000 random calls. A test fails when MLX's version changes. Ignored: ``MLX_SDPA_*`` variables,
# and training.


MLX_VERSION = "0.32.4"  # the release whose conditions are written here

# vector: few queries, one pass over the keys; two-pass: the keys split among threadgroups. full: tiles of queries and
# keys. blocked: tiles of 256 queries, whose scores are written down. cudnn: cuDNN's fused attention. unfused: all
# scores written down.
Kernel = Literal["vector", "vector two-pass", "full", "blocked", "cudnn", "unfused"]

MaskKind = Literal["none", "causal", "bool", "additive"]  # causal: the word, not an array. bool, additive: an array.

Number = Literal["float16", "bfloat16", "float32"]

VECTOR_QUERIES = 8  # queries up to which Metal's vector kernels run
BLOCK_BYTES = 1 << 28  # gathered rows, or scores, that a layer which chooses among entries computes at once, at most
BLOCK_QUERIES = 256  # queries in a tile of `blocked`

# Queries times keys from which NumPy attends, although its arguments must be evaluated first. Measured on two x86 cores
# with a model of 6 layers, 4 heads on 2, D 64: time to the first token of 16 new tokens after 2,000 was 74 ms without
# NumPy and 27 with it, of 64 after 2,000 258 and 41, of 256 alone 174 and 60; of 2 after 2,000 it was the same.
NUMPY_SCORES = 1 << 14

# The same where keys or values are packed. Two kernels round differently in the last digit, and that may move a later
# layer's key to the next step of its scale: how a prompt was cut would show in its logits. Above, there is no choice:
# MLX takes ten times as long.
NUMPY_SCORES_PACKED = 1 << 17

_FULL_SIZES = frozenset({64, 72, 80, 96, 128, 192, 256})
_VECTOR_SIZES = frozenset({64, 96, 128, 192, 256, 512})
_VECTOR_PAIRS = frozenset({(96, 64), (192, 128)})
_CUDA_VECTOR_SIZES = frozenset({64, 96, 128})
_D512_KEYS = 1024
_LARGE_ARCHITECTURES = ("d", "s")
_CUDNN_SIZE = 128


@dataclass(frozen=True, slots=True)
class AttentionDevice:
    """The device that computes.

    neural: Metal has neural accelerators (NAX: M5 and later, MLX's macOS 26 build on macOS 26.2 or later).
    architecture: as in ``mx.device_info`` ("applegpu_g16s"); None counts as a small GPU.
    tf32: float32 products may use TF32, MLX's default.
    """

    kind: DeviceKind
    neural: bool = False
    architecture: str | None = None
    tf32: bool = True


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention call of a layer: queries (batch, query_heads, queries, size), keys (batch, heads, keys, size).

    written_out: the model's own code multiplies (e.g. for a soft cap), without a kernel.
    """

    query_heads: int
    heads: int
    queries: int
    keys: int
    size: int
    value_size: int
    mask: MaskKind
    number: Number = "bfloat16"
    sinks: bool = False
    batch: int = 1
    written_out: bool = False

    @property
    def has_array(self) -> bool:
        return self.mask in {"bool", "additive"}

    @property
    def repeats(self) -> int:
        return self.query_heads // self.heads


def kernel_of(call: AttentionCall, device: AttentionDevice, *, force_fused: bool = False) -> Kernel:
    """Return the kernel MLX runs. force_fused: where MLX would raise, "unfused"."""
    if call.written_out or not has_fused_kernel(call, device):
        return "blocked" if not call.written_out and _is_blocked(call, device) and not force_fused else "unfused"
    if device.kind == "cuda":
        return "cudnn" if _cudnn(call) else "vector"
    if not force_fused and _is_blocked(call, device):
        return "blocked"
    if not force_fused and not _is_preferred(call, device):
        return "unfused"
    if call.queries > VECTOR_QUERIES:
        return "full"
    large = (device.architecture or "").endswith(_LARGE_ARCHITECTURES) and call.keys >= 1024
    return "vector two-pass" if large or (call.repeats > 1 and call.keys >= 4096) else "vector"


def has_fused_kernel(call: AttentionCall, device: AttentionDevice) -> bool:
    """Whether MLX would honour ``force_fused=True``; by default it may prefer the other path."""
    if device.kind == "cpu" or call.written_out:
        return False
    if device.kind == "cuda":
        return _cudnn(call) or _cuda_vector(call)
    return _metal_full(call, device) if call.queries > VECTOR_QUERIES else _metal_vector(call)


def _metal_full(call: AttentionCall, device: AttentionDevice) -> bool:
    wide = call.size == 512 and _runs_neural(call, device)
    sizes = call.size == call.value_size and (call.size in _FULL_SIZES or wide)
    if not sizes and (call.size, call.value_size) != (96, 64):
        return False
    return call.mask != "causal" or call.queries <= call.keys


def _metal_vector(call: AttentionCall) -> bool:
    same = call.size == call.value_size and call.size in _VECTOR_SIZES
    if not same and (call.size, call.value_size) not in _VECTOR_PAIRS:
        return False
    if call.queries > call.keys or call.queries * call.repeats > 32:
        return False
    if call.size != 512:
        return True
    return call.queries == 1 and call.repeats == 8 and not call.has_array and call.keys >= _D512_KEYS


def _is_preferred(call: AttentionCall, device: AttentionDevice) -> bool:
    causal, count = call.mask == "causal", call.queries
    if call.size == 512 and count > VECTOR_QUERIES:
        tiles = -(-count // 32) * call.batch * call.query_heads
        return causal and count >= 1024 and tiles >= 1024
    if call.size == 256 and count > VECTOR_QUERIES:
        if device.neural:
            return _runs_neural(call, device) and (causal or call.has_array) and count >= 1024
        return causal and call.number != "float32" and count >= 2048 and count == call.keys
    if count > VECTOR_QUERIES:
        return call.size != 192
    return (call.size, call.value_size) != (192, 192)


def _is_blocked(call: AttentionCall, device: AttentionDevice) -> bool:
    return (
        device.kind == "metal"
        and not device.neural
        and call.number != "float32"
        and call.size == call.value_size == 512
        and call.mask == "causal"
        and not call.sinks
        and 1024 <= call.queries <= call.keys
    )


def _runs_neural(call: AttentionCall, device: AttentionDevice) -> bool:
    return device.neural and (device.tf32 or call.number != "float32")


def _cudnn(call: AttentionCall) -> bool:
    sizes = (call.size, call.value_size)
    return (
        call.number != "float32"
        and call.queries > 1
        and not (call.mask == "causal" and call.queries > call.keys)
        and all(size % 8 == 0 and size <= _CUDNN_SIZE for size in sizes)
    )


def _cuda_vector(call: AttentionCall) -> bool:
    return call.size == call.value_size in _CUDA_VECTOR_SIZES and call.queries < 4 and not call.has_array


def multiplies_packed(tokens: int, device: DeviceKind) -> bool:
    """Whether a call multiplies packed keys and values instead of decoding them for the fused kernel."""
    # 2-core x86, MLX 0.32.4, float32, 8 heads on 4, D 64, ms packed / decoded at depth 4,096: 1 token 2.5 / 5.3
    # (8 bits), 2.8 / 9.2 (4 bits); 8 tokens 20 / 23, 21 / 23; 32 equal; depth doesn't matter. GPU not measured:
    # packed for one token as in mlx-lm.
    return tokens <= (8 if device == "cpu" else 1)
