"""Whether a model fits, before any weight of it is read: from its config and the headers of its files."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokamac.engine.config import read_config
from tokamac.engine.device import DeviceKind
from tokamac.engine.errors import MemoryLimitError
from tokamac.engine.kv import CachePlan
from tokamac.engine.kv.attention_kernel import AttentionDevice
from tokamac.engine.limits import memory
from tokamac.engine.limits.cost import Cost, bits_per_weight
from tokamac.engine.limits.hardware import detect
from tokamac.engine.limits.kv_cost import value_bytes_of
from tokamac.engine.limits.ladder import LEAST_CHUNK, OFFERS, gb, override, refusal
from tokamac.engine.limits.peak import STEP, predict_peak
from tokamac.engine.limits.peak_shape import Order, Shape, shape_of
from tokamac.engine.limits.prefill_chunk import Chunking, prompt_peak
from tokamac.engine.limits.weighing import weigh
from tokamac.engine.options import KVSpec

SMALL_BITS = 4
"""What a model that does not fit is offered to be packed to."""


def check_fits(
    folder: Path, kv: KVSpec, device: DeviceKind, asked: int | None = None, *, more: int = 0
) -> tuple[str, ...]:
    """Raise MemoryLimitError where not even the weights and a few tokens fit, before any weight is read.

    A model that can't be weighed passes: loading says what is wrong with it. Raises OptionError for KV flags that it can't take.
    asked: the limit, where the user set one. more: bytes of weights that are in none of its files.
    Returns what the user should know of what loading costs other programs.
    """
    budget = memory.array_budget() if asked is None else asked
    if budget is None:
        return ()
    weighed = weigh(read_config(folder), device, memory.machine_total(), folder=folder)
    if isinstance(weighed, str):
        return ()
    shape = weighed.shape(weighed.plan(kv), device, detect())
    shape = replace(shape, weights=shape.weights + more)
    least = predict_peak(shape, held=0, new=LEAST_CHUNK, chunk=LEAST_CHUNK)
    if least.total > budget:
        refused = refusal(f"this model, with {LEAST_CHUNK} tokens,", least, budget, [])
        raise _with_smaller(refused, weighed.stored, budget, override(least.total, memory.device_total()))
    left = memory.available()
    given = memory.taken_from_others(least.total, None if left is None else left - memory.held())
    return (f"to make room for this model, {memory.giving_way(given)}",) if given else ()


def context_notes(
    shape: Shape, capacity: int | None, *, chunking: Chunking, asked: int | None = None
) -> tuple[str, ...]:
    """Return what the user should know of a context that can't be filled here; nothing where all of it fits, or that is unknown."""
    shape = replace(shape, force_fused=True)  # as a prompt that is short of memory asks for it
    budget = memory.array_budget() if asked is None else asked
    if capacity is None or budget is None or _context_peak(shape, capacity, chunking) <= budget:
        return ()
    fits = _fitting(shape, capacity, chunking, budget)
    note = f"of the context of {capacity:,} tokens, about {fits:,} fit into the {gb(budget)} of memory that may be used"
    for bits in OFFERS:
        smaller = shape.packed(*bits)
        if smaller != shape and (more := _fitting(smaller, capacity, chunking, budget)) > fits:
            return (f"{note}; with --kv-bits {bits[0]},{bits[1]} about {more:,}",)
    return (note,)


def planned_bytes(shape: Shape, capacity: int | None, *, chunking: Chunking) -> int:
    """Return the peak with the whole context in use; with one chunk where its length is unknown."""
    return _context_peak(shape, capacity or chunking.at(0), chunking)


def shaped(  # noqa: PLR0917
    config: Mapping[str, Any], plan: CachePlan, weights: int, device: AttentionDevice, bytes_of_value: int, order: Order
) -> Shape:
    """Return the shape of a model on this device."""
    return shape_of(config, plan, weights=weights, value_bytes=bytes_of_value, order=order, device=device)


def order_of(device: DeviceKind, dtype: str | None, *, unpacked: bool) -> Order:
    """Return when arrays are computed."""
    if device != "cpu" or dtype not in (None, "float32"):
        return "ahead"
    return "at once" if unpacked else "by layer"


def value_bytes(config: Mapping[str, Any], device: DeviceKind, dtype: str | None) -> int:
    """Return the bytes of an activation: of the type asked for, else of float32 on a CPU and of the checkpoint's on a GPU."""
    if dtype is not None:
        return 4 if dtype == "float32" else 2
    return 4 if device == "cpu" else value_bytes_of(config)


def _context_peak(shape: Shape, tokens: int, chunking: Chunking) -> int:
    return prompt_peak(shape, chunking, held=0, new=max(0, tokens - 1), reply=1).total


def _fitting(shape: Shape, capacity: int, chunking: Chunking, budget: int) -> int:
    """Return the most tokens that fit, in whole steps of growth."""
    low, high = 0, capacity // STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _context_peak(shape, middle * STEP, chunking) <= budget else (low, middle - 1)
    return low * STEP


def _with_smaller(error: MemoryLimitError, stored: Cost, budget: int, beyond: str) -> MemoryLimitError:
    """Return the refusal with what would help: fewer bits, where that would fit; then how to go beyond the limit."""
    packed = round(stored.parameters * bits_per_weight(SMALL_BITS, 64) / 8)
    if packed < min(stored.weight_bytes, budget):
        hint = f"At {SMALL_BITS} bits its weights would take about {gb(packed)}: tokamac convert --bits {SMALL_BITS}."
    else:
        hint = "Take a smaller model, or close other programs."
    return MemoryLimitError(error.message, hint + beyond)
