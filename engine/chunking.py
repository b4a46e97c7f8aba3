"""How a prompt is cut into chunks.

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

from collections.abc import Iterator
from dataclasses import dataclass

from .device import DeviceKind
from .kv.sizes import grown
from .perf.peak_memory import ModelShape, Peak, predict_peak
from .perf.roofline import CHUNK, LatencyModel
from .perf.workload import Workload

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
