"""How a prompt is cut into chunks, and what to do where its prefill would not fit into memory.

The steps, from what costs nothing to refusing:

    1  clear MLX's pool of unused buffers       costs nothing
    2  fused attention, where MLX prefers not    somewhat slower attention, no scores
    3  smaller chunks                           slower prefill, smaller temporaries
    4  shrink the prompt cache in memory        other prompts are computed again
    5  refuse, with numbers, and offer keys and values that would fit

Fused attention goes before smaller chunks: it does the same arithmetic at a lower rate, in attention alone, while each halving
of the chunk reads all weights twice as often. The context that the user set is never changed here. All of it is pure: the engine
acts on it (engine/prefill_budget.py).

Chunks depend on model, chip and depth, never on a clock, and a prompt is cut at multiples of the chunk, counted from its first
token. So it is cut alike on a busy machine and on an idle one, and rounding (of packed keys and values above all: a key at the edge
between two levels falls to either side) does not depend on the machine's load. Within a chunk, a CPU's kernels are given pieces as
others wait: a token's bits are the same in any.

    a GPU       large chunks keep it busy, small ones keep memory and the wait for a cancellation low. A dense model loses nothing
                in chunks of 512. A mixture does: few rows for each expert multiply badly, and each chunk reads all experts. It
                takes the smallest chunk with which the roofline predicts a prefill of TOLERANCE × that with mlx-lm's 2,048, or less
    deep down   beyond DEEP tokens 512 at most: one chunk's attention must end before the GPU's watchdog does (mlx-lm#1087)
    a plain CPU by the model's operations alone: measured speed moves with the machine's load
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ..device import DeviceKind
from ..errors import MemoryLimitError
from .peak_memory import ModelShape, Peak, grown, predict_peak
from .roofline import CHUNK, LatencyModel
from .workload import Workload

LEAST_CHUNK = 32
"""Tokens; below, a prefill takes many times as long and hardly less memory."""

OFFERS = ((8, 8), (8, 4), (4, 4))
"""Bits of keys and values to offer, those that harm least first (BENCHMARKS.md, `tokamac bench --kv-quality`)."""

_WHERE = "In the chat that is /settings, in Python KVSpec."
"""Where those who gave no flags set the same."""

WINDOW_STEP = 256

USUAL: dict[DeviceKind, int] = {"metal": 512, "cuda": 2048, "cpu": 256}
"""Prompt tokens computed at once where nothing asks for more or fewer. To keep a GPU busy; not tuned on one here."""

LARGEST = 4096
LEAST = 64
"""Tokens; every chunk reads all weights again, whatever it has of them."""

PROMPT = 8192
"""Tokens of the prompt by which chunks are compared."""

TOLERANCE = 1.1
"""What a prefill in smaller chunks may take of the time of one in mlx-lm's."""

ROWS = 64
"""Rows for each expert that are enough, where no published latency tells."""

DENSE_S, MIXTURE_S = 2.0, 4.0
"""What a chunk should take at most: a reply is cancelled between two. A mixture's may take longer, for what it saves."""

DEEP = 1 << 16
"""Tokens held from which chunks are small."""

SHALLOW = 4096
"""Tokens held up to which chunks are as at the first; from there on they are chosen anew at each power of two."""

CPU_FLOPS = 1e11
"""Float32 operations a second that a plain CPU is taken to do: two cores of a laptop, roughly. A chunk should take a second."""

StepName = Literal["pool", "fused", "chunk", "prompt cache"]


@dataclass(frozen=True, slots=True)
class MitigationStep:
    """One step. amount: bytes given back by the pool or the prompt cache, or not taken by fused attention; tokens of a chunk."""

    name: StepName
    amount: int


@dataclass(frozen=True, slots=True)
class Mitigation:
    """Steps to take (``rungs``), in order, and where they lead. peak: what is predicted then. missing: bytes still too many.

    fused: whether fused attention is asked for wherever there is a kernel.
    """

    rungs: tuple[MitigationStep, ...]
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
    least_chunk: int = LEAST_CHUNK,
    fused_at: Callable[[int], Peak] | None = None,
) -> Mitigation:
    """Return what to do so that a prefill fits ``budget`` bytes; nothing where it is unknown, or all fits.

    peak_at: the peak of prefilling in chunks of N tokens; fused_at: the same with fused attention asked for. pool: bytes of
    unused buffers held for reuse. The prompt cache can give back at most what the peak counts of it.
    """
    peak = peak_at(chunk)
    if budget is None or peak.total + pool <= budget:
        return Mitigation((), chunk, peak, 0)
    rungs = [MitigationStep("pool", pool)] if pool else []
    saved = 0 if fused_at is None or peak.total <= budget else peak.total - fused_at(chunk).total
    if fused_at is not None and saved > 0:
        rungs.append(MitigationStep("fused", saved))
        peak_at = fused_at
    smaller, peak = _smaller(peak_at, budget, chunk, min(least_chunk, chunk))
    if smaller != chunk:
        rungs.append(MitigationStep("chunk", smaller))
    if 0 < (over := peak.total - budget) <= peak.prompt_cache:
        rungs.append(MitigationStep("prompt cache", over))
        peak = replace(peak, prompt_cache=peak.prompt_cache - over)
    return Mitigation(tuple(rungs), smaller, peak, max(0, peak.total - budget), fused=saved > 0)


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
    rungs = (*found.rungs, MitigationStep("prompt cache", held))
    return Mitigation(rungs, found.chunk, peak, max(0, peak.total - goal), fused=found.fused)


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
    listed = ", ".join(f"{name} {gb(size)}" for name, size in parts.items() if size)
    would = " or ".join(f"{offer.flags} ({gb(offer.total)})" for offer in found)
    hint = (
        f"It would fit with {would}. {_WHERE}"
        if would
        else "Close other programs, shorten it, or take a smaller model."
    )
    needed, most = told_apart(peak.total, budget)
    return MemoryLimitError(
        f"{what} needs {needed} of memory ({listed}), and {most} may be used", f"{hint}{override(peak.total, there_is)}"
    )


def override(needed: int, there_is: int | None) -> str:
    """Return, to be put after a hint, how to go beyond the limit; nothing where the machine has less than is needed."""
    if there_is is None or needed > there_is:
        return ""
    return f" --memory {math.ceil(needed / 1e6) / 1e3:g} overrides the limit, as memory_gb of /settings does, and in Python memory."


def told_apart(first: int, second: int) -> tuple[str, str]:
    """Return two sizes as text, with as many digits as it takes to see that they differ."""
    if first == second or gb(first) != gb(second):
        return gb(first), gb(second)
    return f"{first:,} bytes", f"{second:,} bytes"


def gb(size: int) -> str:
    """Return bytes as text: MB below a tenth of a GB."""
    return f"{size / 1e9:.2f} GB" if size >= 10**8 else f"{size / 1e6:.1f} MB"


def _token_bytes(shape: ModelShape) -> int:
    return sum(layer.key_bytes + layer.value_token_bytes for layer in shape.layers)


@dataclass(frozen=True, slots=True)
class Chunking:
    """The chunks of a model's prompts on a device.

    latency: as published for the chip, the same in every process; None where there is none. whole: a chunk is computed at once,
    however long it takes. piece: tokens that are read at once where a token's bits are the same in a piece of any size, so that a
    chunk may be cut anywhere; None where they are not.
    """

    work: Workload
    device: DeviceKind
    latency: LatencyModel | None
    whole: bool = False
    piece: int | None = None

    def at(self, depth: int) -> int:
        """Return the tokens to compute at once after ``depth``: a power of two, never more than at a lesser depth."""
        held = _level(depth)
        if self.device == "cpu":
            return _on_cpu(self.work)
        enough = self._enough(held)
        most = min(enough, USUAL["metal"]) if held >= DEEP and self.device == "metal" else max(enough, self._usual)
        return self._soon(most, min(enough, most), held)

    def bands(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (begin, end, chunk) for the stretches of start…stop that are computed in chunks of one size."""
        begin = start
        while begin < stop:
            chunk, end = self.at(begin), _next_level(begin)
            while end < stop and self.at(end) == chunk:
                end = _next_level(end)
            yield begin, min(end, stop), chunk
            begin = end

    def token_s(self, depth: int) -> float | None:
        """Return the seconds that a token should take after ``depth``, in a chunk; None is unknown."""
        seconds = None if self.device == "cpu" else self._prefill_s(self.at(depth), depth)
        return None if seconds is None else seconds / PROMPT

    @property
    def _usual(self) -> int:
        return USUAL[self.device]

    def _enough(self, held: int) -> int:
        """Return the smallest chunk that costs little of the speed."""
        if self._prefill_s(CHUNK, held) is None:
            return self._enough_rows()
        size = LEAST
        while size < CHUNK and self._too_slow(size, held):
            size *= 2
        return size

    def _too_slow(self, size: int, held: int) -> bool:
        seconds, reference = self._prefill_s(size, held), self._prefill_s(CHUNK, held)
        return seconds is not None and reference is not None and seconds > TOLERANCE * reference

    def _enough_rows(self) -> int:
        size = self._usual
        if self.work.expert_bytes and self.work.active:
            while size < LARGEST and size * self.work.active < ROWS:
                size *= 2
        return size

    def _soon(self, size: int, least: int, held: int) -> int:
        """Return the size, halved while a chunk takes too long, to ``least`` at most."""
        longest_s = MIXTURE_S if self.work.expert_bytes else DENSE_S
        while size > max(least, LEAST):
            seconds = self._prefill_s(size, held)
            if seconds is None or seconds * size <= longest_s * PROMPT:
                break
            size //= 2
        return size

    def _prefill_s(self, chunk: int, held: int) -> float | None:
        return None if self.latency is None else self.latency.prefill_s(self.work, PROMPT, held, chunk)


def whole_chunks(chunking: Chunking, tokens: int) -> int:
    """Return how many of the first ``tokens`` come before the last cut."""
    return next((end - end % chunk for _, end, chunk in reversed([*chunking.bands(0, tokens)])), 0)


def prompt_peak(
    shape: ModelShape,
    chunking: Chunking,
    *,
    held: int,
    new: int,
    most: int = LARGEST,
    slots: int | None = None,
    reply: int = 0,
    prompt_cache: int = 0,
) -> Peak:
    """Return the peak (see predict_peak) of a prompt that is cut so, into chunks of ``most`` tokens at most."""
    end = held + new
    bands = [*chunking.bands(held, end)] or [(held, held, most)]
    peaks = (
        predict_peak(
            shape,
            held=begin,
            new=stop - begin,
            chunk=min(chunk, most),
            slots=slots if begin == held else None,
            reply=reply if stop == end else 0,
            prompt_cache=prompt_cache,
        )
        for begin, stop, chunk in bands
    )
    return max(peaks, key=lambda peak: peak.total)


def slots_after(chunking: Chunking, prompt: int, reply: int) -> int:
    """Return the slots of caches that grow, after a prompt that is cut so and a reply of so many tokens."""
    slots = 0
    for begin, stop, chunk in chunking.bands(0, prompt):
        for start in range(begin, stop, chunk):
            slots = grown(slots, min(start + chunk, stop))
    while slots < prompt + reply:
        slots = grown(slots, slots + 1)
    return slots


def _on_cpu(work: Workload) -> int:
    size = USUAL["cpu"]
    while size > LEAST and 2 * (work.prefill_parameters or 0) * size > CPU_FLOPS:
        size //= 2
    return size


def _level(depth: int) -> int:
    """Return the depth, rounded down to a power of two; 0 below SHALLOW."""
    return 0 if depth < SHALLOW else 1 << (depth.bit_length() - 1)


def _next_level(depth: int) -> int:
    return SHALLOW if depth < SHALLOW else 2 * _level(depth)
