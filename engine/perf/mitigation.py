"""What to do where a prefill would not fit into memory.

The steps, from what costs nothing to refusing:

    1  clear MLX's pool of unused buffers       costs nothing
    2  fused attention, where MLX prefers not    somewhat slower attention, no scores
    3  smaller chunks                           slower prefill, smaller temporaries
    4  shrink the prompt cache in memory        other prompts are computed again
    5  refuse, with numbers, and offer keys and values that would fit

Fused attention goes before smaller chunks: it does the same arithmetic at a lower rate, in attention alone, while each halving
of the chunk reads all weights twice as often. The context that the user set is never changed here. All of it is pure: the engine
acts on it (engine/schedule/admission.py).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from .. import units
from ..errors import MemoryLimitError
from .peak_memory import ModelShape, Peak

LEAST_CHUNK = 32
"""Tokens; below, a prefill takes many times as long and hardly less memory."""

OFFERS = ((8, 8), (8, 4), (4, 4))
"""Bits of keys and values to offer, those that harm least first (BENCHMARKS.md, `tokamac bench --kv-quality`)."""

_WHERE = "In the chat that is /settings, in Python KVSpec."
"""Where those who gave no flags set the same."""

WINDOW_STEP = 256

StepName = Literal["pool", "fused", "chunk", "prompt cache"]


@dataclass(frozen=True, slots=True)
class MitigationStep:
    """One step. amount: bytes given back by the pool or the prompt cache, or not taken by fused attention; tokens of a chunk."""

    name: StepName
    amount: int


@dataclass(frozen=True, slots=True)
class Mitigation:
    """Steps to take, in order, and where they lead. peak: what is predicted then. missing: bytes still too many.

    fused: whether fused attention is asked for wherever there is a kernel.
    """

    steps: tuple[MitigationStep, ...]
    chunk: int
    peak: Peak
    missing: int
    fused: bool = False


@dataclass(frozen=True, slots=True)
class FittingFlags:
    """Flags under which the same prompt would fit, and the peak then."""

    flags: str
    total: int


def steps(
    peak_at: Callable[[int], Peak],
    budget: int | None,
    *,
    chunk: int,
    pool: int = 0,
    fused_at: Callable[[int], Peak] | None = None,
) -> Mitigation:
    """Return what to do so that a prefill fits ``budget`` bytes; nothing where it is unknown, or all fits.

    peak_at: the peak of prefilling in chunks of N tokens; fused_at: the same with fused attention asked for. pool: bytes of
    unused buffers held for reuse. The prompt cache can give back at most what the peak counts of it.
    """
    peak = peak_at(chunk)
    if budget is None or peak.total + pool <= budget:
        return Mitigation((), chunk, peak, 0)
    taken = [MitigationStep("pool", pool)] if pool else []
    saved = 0 if fused_at is None or peak.total <= budget else peak.total - fused_at(chunk).total
    if fused_at is not None and saved > 0:
        taken.append(MitigationStep("fused", saved))
        peak_at = fused_at
    smaller, peak = _smaller(peak_at, budget, chunk, min(LEAST_CHUNK, chunk))
    if smaller != chunk:
        taken.append(MitigationStep("chunk", smaller))
    if 0 < (over := peak.total - budget) <= peak.prompt_cache:
        taken.append(MitigationStep("prompt cache", over))
        peak = replace(peak, prompt_cache=peak.prompt_cache - over)
    return Mitigation(tuple(taken), smaller, peak, max(0, peak.total - budget), fused=saved > 0)


def relieving(
    peak_at: Callable[[int], Peak],
    goal: int,
    *,
    chunk: int,
    pool: int = 0,
    fused_at: Callable[[int], Peak] | None = None,
) -> Mitigation:
    """Return what brings a prefill that is computed in any case as near to ``goal`` bytes as the steps lead."""
    found = steps(peak_at, goal, chunk=chunk, pool=pool, fused_at=fused_at)
    held = found.peak.prompt_cache
    if not found.missing or not held:
        return found
    peak = replace(found.peak, prompt_cache=0)
    taken = (*found.steps, MitigationStep("prompt cache", held))
    return Mitigation(taken, found.chunk, peak, max(0, peak.total - goal), fused=found.fused)


def _smaller(peak_at: Callable[[int], Peak], budget: int, chunk: int, least: int) -> tuple[int, Peak]:
    """Return the largest chunk, halved as often as need be, that fits; where none does, that which takes least.

    That need not be the smallest: few enough scores are written down by MLX, for all heads at once.
    """
    tried = [(chunk, peak_at(chunk))]
    while tried[-1][1].total > budget and chunk > least:
        chunk = max(least, chunk // 2)
        tried.append((chunk, peak_at(chunk)))
    if tried[-1][1].total <= budget:
        return tried[-1]
    return min(tried, key=lambda each: each[1].total)


def offers(
    shape: ModelShape,
    peak_of: Callable[[ModelShape], Peak],
    budget: int,
    *,
    spare: Callable[[int], int],
    longest: int,
) -> Iterator[FittingFlags]:
    """Yield flags with which the same prompt would fit: the first bits that do, and the largest window that does.

    peak_of: the peak of the same prompt with another shape. spare: the slots beside a window of N tokens. longest: the
    window is smaller than this.
    """
    for bits in OFFERS:
        smaller = shape.packed(*bits)
        fewer = smaller != shape and _token_bytes(smaller) < _token_bytes(shape)
        if fewer and (total := peak_of(smaller).total) <= budget:
            yield FittingFlags(
                f"--kv-bits {bits[0]},{bits[1]}" if bits[0] != bits[1] else f"--kv-bits {bits[0]}", total
            )
            break
    if not all(layer.ours for layer in shape.layers):
        return  # no window applies to a cache of the model's own
    low, high = 0, (longest - 1) // WINDOW_STEP
    while low < high:  # the peak never falls as the window grows
        middle = (low + high + 1) // 2
        window = middle * WINDOW_STEP
        fits = peak_of(shape.windowed(window, spare(window))).total <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    if low:
        window = low * WINDOW_STEP
        yield FittingFlags(f"--kv-window {window}", peak_of(shape.windowed(window, spare(window))).total)


def refusal(
    what: str, peak: Peak, budget: int, found: list[FittingFlags], *, there_is: int | None = None
) -> MemoryLimitError:
    """Return the error that refuses ``what``, with its numbers, and what would fit. there_is: the machine's memory."""
    parts = {
        "weights": peak.weights,
        "KV cache": peak.kv,
        "temporaries": peak.working,
        "prompt cache": peak.prompt_cache,
    }
    listed = ", ".join(f"{name} {units.size(part)}" for name, part in parts.items() if part)
    would = " or ".join(f"{offer.flags} ({units.size(offer.total)})" for offer in found)
    hint = (
        f"It would fit with {would}. {_WHERE}"
        if would
        else "Close other programs, shorten it, or take a smaller model."
    )
    needed, most = units.sizes(peak.total, budget)
    return MemoryLimitError(
        f"{what} needs {needed} of memory ({listed}), and {most} may be used", f"{hint}{override(peak.total, there_is)}"
    )


def override(needed: int, there_is: int | None) -> str:
    """Return, to be put after a hint, how to go beyond the limit; nothing where the machine has less than is needed."""
    if there_is is None or needed > there_is:
        return ""
    return f" --memory {math.ceil(needed / 1e6) / 1e3:g} overrides the limit, as memory_gb of /settings does, and in Python memory."


def _token_bytes(shape: ModelShape) -> int:
    return sum(layer.key_bytes + layer.value_token_bytes for layer in shape.layers)
