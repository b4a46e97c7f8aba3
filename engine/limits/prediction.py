"""What a machine will make of a model: the ceiling that physics sets, and the speed to expect of good kernels."""

from dataclasses import dataclass, replace
from typing import Literal, Protocol

from tokamac.engine.limits.fitted import peak_tflops
from tokamac.engine.limits.hardware import Chip
from tokamac.engine.limits.host import calls_of, decodes_by_host, reads_by_host
from tokamac.engine.limits.metrics import ceiling_tps, rate
from tokamac.engine.limits.roofline import ridge_point
from tokamac.engine.limits.work import Work

Bound = Literal["memory", "compute"]

CHUNK = 2048
"""Prompt tokens computed at once in published measurements: mlx-lm's default."""


class Pace(Protocol):
    """How fast a machine really is. Seconds; None is unknown."""

    def decode_s(self, work: Work, context: int, batch: int = 1) -> float | None:
        """Seconds of a decode step at ``context`` tokens in each of ``batch`` sequences."""

    def prefill_s(self, work: Work, tokens: int, cached: int, chunk: int) -> float | None:
        """Seconds of reading ``tokens``, one or more, after ``cached``, up to ``chunk`` at once, and of the first token."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase on the roofline. bytes_read and operations of all of it; intensity is operations a byte.

    bound: which side of the ridge it is on: above, arithmetic limits it. ceiling_s: the least time that physics allows.
    expected_s: with good kernels, never below it. None is unknown. by_host: it is the host's time, which the device waits for.
    """

    tokens: int
    bytes_read: int | None
    operations: int | None
    intensity: float | None
    bound: Bound | None
    ceiling_s: float | None
    expected_s: float | None
    by_host: bool = False

    @property
    def ceiling_tps(self) -> float | None:
        """Tokens a second that nothing can beat."""
        return rate(self.tokens, self.ceiling_s)

    @property
    def expected_tps(self) -> float | None:
        """Tokens a second to expect."""
        return rate(self.tokens, self.expected_s)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Both phases of a reply. prompt tokens, of which ``cached`` are not computed: at most all but the last, which makes the first
    token. Decode at ``context``, ``batch`` at once.

    ridge: operations a byte above which a phase is bound by arithmetic. ttft_s: prefill and the first token, nothing before it.
    """

    prompt: int
    cached: int
    context: int
    batch: int
    ridge: float | None
    prefill: Phase
    decode: Phase

    @property
    def ceiling_tps(self) -> float | None:
        """Tokens a second of all sequences together that no kernel can beat."""
        return self.decode.ceiling_tps

    @property
    def expected_tps(self) -> float | None:
        """Tokens a second of all sequences together to expect."""
        return self.decode.expected_tps

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token to expect."""
        return self.prefill.expected_s


def predict(
    work: Work,
    chip: Chip,
    pace: Pace | None,
    prompt: int,
    context: int,
    *,
    cached: int = 0,
    batch: int = 1,
    chunk: int = CHUNK,
) -> Prediction:
    """Return what ``chip`` makes of ``work``. pace: None leaves what is expected unknown, and the ceilings known.

    The last token of a prompt is always computed: a first token comes of nothing else.
    """
    prompt = max(prompt, 1)
    cached = min(cached, prompt - 1)
    peak = peak_tflops(chip)
    ridge = None if peak is None or chip.bandwidth_gbs is None else ridge_point(chip.bandwidth_gbs, peak)
    return Prediction(
        prompt=prompt,
        cached=cached,
        context=context,
        batch=batch,
        ridge=ridge,
        prefill=prefill_phase(work, chip, pace, prompt - cached, cached, chunk=chunk),
        decode=decode_phase(work, chip, pace, context, batch),
    )


def decode_phase(work: Work, chip: Chip, pace: Pace | None, context: int, batch: int = 1) -> Phase:
    """Return a decode step: one token for each of ``batch`` sequences."""
    operations = None
    if work.prefill_parameters is not None:
        attended = sum(layer.operations(1, max(context - 1, 0)) for layer in work.attention)
        operations = batch * (2 * (work.prefill_parameters + work.head_parameters) + attended)
    expected = None if pace is None else pace.decode_s(work, context, batch)
    phase = _phase(chip, batch, work.step_bytes(context, batch), operations, expected)
    return replace(phase, by_host=decodes_by_host(pace, phase.expected_s))


def prefill_phase(
    work: Work, chip: Chip, pace: Pace | None, tokens: int, cached: int = 0, *, chunk: int = CHUNK
) -> Phase:
    """Return the reading of ``tokens``, one or more, after ``cached``. Every chunk reads the weights; the ceiling counts them
    once."""
    weights, operations = work.weight_bytes(tokens), work.prefill_operations(tokens, cached)
    read = None if weights is None else weights + work.kv_bytes(cached + tokens)
    expected = None if pace is None else pace.prefill_s(work, tokens, cached, chunk)
    phase = _phase(chip, tokens, read, operations, expected)
    return replace(phase, by_host=reads_by_host(pace, phase.expected_s, calls_of(tokens, chunk)))


def _phase(chip: Chip, tokens: int, bytes_read: int | None, operations: int | None, expected_s: float | None) -> Phase:
    per_second, peak = ceiling_tps(chip.bandwidth_gbs, bytes_read), peak_tflops(chip)
    reading = None if per_second is None else 1 / per_second
    computing = None if operations is None or peak is None else operations / (peak * 1e12)
    known = [seconds for seconds in (reading, computing) if seconds is not None]
    least = max(known, default=None)
    bound: Bound | None = None
    if reading is not None and computing is not None:
        bound = "memory" if reading >= computing else "compute"
    return Phase(
        tokens=tokens,
        bytes_read=bytes_read,
        operations=operations,
        intensity=rate(operations, bytes_read) if operations and bytes_read else None,
        bound=bound,
        ceiling_s=least,
        expected_s=None if expected_s is None else max(expected_s, least or 0.0),
    )
