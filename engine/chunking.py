"""How prompts are cut into prefill chunks. Loads no MLX: what a model would take is predicted before it is loaded."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from .device import DeviceKind
from .kv.costs import grown
from .perf.peak_memory import ModelShape, Peak, predict_peak
from .perf.roofline import CHUNK, LatencyModel, Workload

# Chunks depend on model, chip and depth, never on a clock, at multiples from the first token: so rounding
# (above all of packed KV) doesn't depend on load. On a CPU, pieces within a chunk may vary: a token's bits are
# the same in any.
#
#     GPU         dense: 512. Mixtures multiply few rows per expert badly and read all experts per chunk: the smallest
#                 chunk with predicted prefill within TOLERANCE × that of mlx-lm's 2,048
#     deep        beyond DEEP tokens 512 at most: attention must end before the GPU's watchdog (mlx-lm#1087)
#     plain CPU   by the model's operations alone: measured speed varies with load


# Prompt tokens computed at once where nothing asks for more or fewer. To keep a GPU busy; not tuned on one here.
USUAL: dict[DeviceKind, int] = {"metal": 512, "cuda": 2048, "cpu": 256}

LARGEST = 4096
LEAST = 64  # tokens; every chunk reads all weights again, whatever it has of them

PROMPT = 8192  # tokens of the prompt by which chunks are compared

TOLERANCE = 1.1  # what a prefill in smaller chunks may take of the time of one in mlx-lm's

ROWS = 64  # rows for each expert that are enough, where no published latency tells

# What a chunk should take at most: a reply is cancelled between two. A mixture's may take longer, for what it saves.
DENSE_S, MIXTURE_S = 2.0, 4.0

DEEP = 1 << 16  # tokens held from which chunks are small

# Tokens held up to which chunks are as at the first; from there on they are chosen anew at each power of two.
SHALLOW = 4096

# Float32 operations a second that a plain CPU is taken to do: two cores of a laptop, roughly. A chunk should take a
# second.
CPU_FLOPS = 1e11


@dataclass(frozen=True, slots=True)
class Chunking:
    """Prompt chunks of a model on a device.

    latency: published for the chip, or None. whole: never split a chunk for time. piece: tokens per piece if a
    token's bits don't depend on it, else None. first, first_token_s: values up to SHALLOW tokens.
    """

    work: Workload
    device: DeviceKind
    latency: LatencyModel | None
    whole: bool = False
    piece: int | None = None
    first: int = field(init=False, compare=False)
    first_token_s: float | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", self.tokens_at(0))
        object.__setattr__(self, "first_token_s", self.token_s(0))

    def tokens_at(self, depth: int) -> int:
        """Return the chunk after ``depth`` tokens: a power of two, nonincreasing with depth."""
        held = _level(depth)
        if self.device == "cpu":
            return _on_cpu(self.work)
        enough = self._enough(held)
        most = min(enough, USUAL["metal"]) if held >= DEEP and self.device == "metal" else max(enough, self._usual)
        return self._soon(most, min(enough, most), held)

    def bands(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        begin = start
        while begin < stop:
            chunk, end = self.tokens_at(begin), _next_level(begin)
            while end < stop and self.tokens_at(end) == chunk:
                end = _next_level(end)
            yield begin, min(end, stop), chunk
            begin = end

    def token_s(self, depth: int) -> float | None:
        seconds = None if self.device == "cpu" else self._prefill_s(self.tokens_at(depth), depth)
        return None if seconds is None else seconds / PROMPT

    @property
    def _usual(self) -> int:
        return USUAL[self.device]

    def _enough(self, held: int) -> int:
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
    """Return the peak (see predict_peak) of a prompt in chunks of at most ``most`` tokens."""
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
    return 0 if depth < SHALLOW else 1 << (depth.bit_length() - 1)


def _next_level(depth: int) -> int:
    return SHALLOW if depth < SHALLOW else 2 * _level(depth)
