"""Which kernel answers an attention call: arithmetic on shapes, no MLX here.

``mx.fast.scaled_dot_product_attention`` either runs a fused kernel, which never writes the scores down, or falls back to two
products and a softmax, which do: (heads, queries, keys) at once. What decides are the shapes, the mask, the type and the
device. That decides in turn how much memory a call takes (perf/peak_memory.py) and how fast it reads keys and values.

The conditions are those of MLX 0.32.4, upstream in ``mlx/backend/{metal,cuda,no_gpu}``, ``ScaledDotProductAttention::
use_fallback`` and ``eval_gpu``. They were read in the machine code of the shipped libraries (mlx-metal for macOS 15 and 26,
mlx-cuda-13), for the public source of 22 August 2026 (846d176) is older than that release: it has neither ``blocked`` nor a fused
kernel for head size 512. Run under an emulator, ``use_fallback`` of both macOS libraries agreed with this module on 30,000 random
calls. The conditions change with MLX's version: a test fails when another one is installed.

Beside them stand the calls that are not MLX's to answer: NumPy's, and those that multiply packed keys and values.

Not followed: environment variables that change the routing (``MLX_SDPA_*``), and training.
"""

from dataclasses import dataclass
from typing import Literal

from ..device import DeviceKind

MLX_VERSION = "0.32.4"
"""The release whose conditions are written here."""

Kernel = Literal["vector", "vector two-pass", "full", "blocked", "cudnn", "unfused"]
"""vector: few queries, one pass over the keys; two-pass: the keys split among threadgroups. full: tiles of queries and keys.
blocked: tiles of 256 queries, whose scores are written down. cudnn: cuDNN's fused attention. unfused: all scores written down."""

MaskKind = Literal["none", "causal", "bool", "additive"]
"""causal: the word, not an array. bool, additive: an array."""

Number = Literal["float16", "bfloat16", "float32"]

VECTOR_QUERIES = 8
"""Queries up to which Metal's vector kernels run."""
BLOCK_BYTES = 1 << 28
"""Gathered rows, or scores, that a layer which chooses among entries computes at once, at most."""
BLOCK_QUERIES = 256
"""Queries in a tile of ``blocked``."""

NUMPY_SCORES = 1 << 14
"""Queries times keys from which NumPy attends, although its arguments must be evaluated first. Measured on two x86 cores with a
model of 6 layers, 4 heads on 2, D 64: time to the first token of 16 new tokens after 2,000 was 74 ms without NumPy and 27 with it,
of 64 after 2,000 258 and 41, of 256 alone 174 and 60; of 2 after 2,000 it was the same."""

NUMPY_SCORES_PACKED = 1 << 17
"""The same where keys or values are packed. Two kernels round differently in the last digit, and that may move a later layer's key
to the next step of its scale: how a prompt was cut would show in its logits. Above, there is no choice: MLX takes ten times as
long."""

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

    neural: whether Metal has neural accelerators (NAX: M5 and later, with MLX's macOS 26 build on macOS 26.2 or later).
    architecture: Metal's, as ``mx.device_info`` names it ("applegpu_g16s"); None is unknown and taken for a small GPU. tf32:
    whether float32 products may run in TF32, which is MLX's default.
    """

    kind: DeviceKind
    neural: bool = False
    architecture: str | None = None
    tf32: bool = True


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of a layer. Shapes: queries (batch, query_heads, queries, size), keys (batch, heads, keys, size).

    size, value_size: dimensions of a head of queries and keys, and of values. written_out: the model's own code multiplies, as for
    a soft cap, so no kernel is used.
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
        """Whether the mask is an array."""
        return self.mask in {"bool", "additive"}

    @property
    def repeats(self) -> int:
        """Query heads for each key head."""
        return self.query_heads // self.heads


def kernel_of(call: AttentionCall, device: AttentionDevice, *, force_fused: bool = False) -> Kernel:
    """Return what MLX runs for ``call`` on ``device``.

    force_fused: as given to MLX, which raises where no fused kernel exists; here that is "unfused".
    """
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
    """Whether MLX would honour ``force_fused=True``; by default it may still prefer the other path."""
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
    """Whether Metal prefers a fused kernel that it has: for wide heads separate products are faster, unless rows are many."""
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
    """Whether cuDNN takes it. Assumes Ampere or later; single queries would need a cache that MLX has computed already."""
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
    """Whether a call of this many tokens multiplies packed keys and values rather than decode them for the fused kernel.

    Measured on a 2-core x86 CPU (MLX 0.32.4, float32, 8 heads on 4, D 64; in ms, packed / decoded): at depth 512 and 4,096 with
    8 bits 1 token 0.5 / 1.2 and 2.5 / 5.3; with 4 bits 0.5 / 1.3 and 2.8 / 9.2; 8 tokens at 4,096 20 / 23 and 21 / 23; 32 tokens
    equal. So depth does not matter there, and up to 8 tokens packed wins. On a GPU it was not measured by us: one token, as mlx-lm
    does, and the fused kernel, which never writes the scores down, for more.
    """
    return tokens <= (8 if device == "cpu" else 1)
