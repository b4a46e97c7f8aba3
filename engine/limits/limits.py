"""What a machine allows a model at a context: bytes a step, the rate no kernel can beat, and the one to expect."""

from dataclasses import dataclass, replace

from tokamac.engine.limits.hardware import Chip, Source
from tokamac.engine.limits.metrics import ceiling_tps
from tokamac.engine.limits.prediction import Pace, decode_phase
from tokamac.engine.limits.work import Work


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of decoding at a context of ``context`` tokens. Bytes, GB/s (10^9), tokens a second; None is unknown.

    bandwidth_source: the chip table, a measurement on this machine, or unknown.
    expected_tps: what good kernels reach; unknown until published measurements or this machine's own say it.
    """

    context: int
    weight_bytes_per_token: int | None
    kv_bytes_per_step: int | None
    bytes_per_step: int | None
    bandwidth_gbs: float | None
    bandwidth_source: Source
    ceiling_tps: float | None
    expected_tps: float | None = None


def limits_of(context: int, work: Work, chip: Chip, pace: Pace | None) -> Limits:
    """Return the limits of a model on a chip. pace: None leaves the expected speed unknown."""
    expected = decode_phase(work, chip, pace, context).expected_tps
    known = limits_for(
        context, weight_bytes_per_token=work.weight_bytes(), kv_bytes_per_step=work.kv_bytes(context), chip=chip
    )
    return replace(known, expected_tps=expected)


def limits_for(
    context: int, *, weight_bytes_per_token: int | None, kv_bytes_per_step: int | None, chip: Chip
) -> Limits:
    """Return the limits by the bytes alone that a step reads. An unknown cost leaves the ceiling unknown."""
    unknown = weight_bytes_per_token is None or kv_bytes_per_step is None
    step = None if unknown else (weight_bytes_per_token or 0) + (kv_bytes_per_step or 0)
    return Limits(
        context=context,
        weight_bytes_per_token=weight_bytes_per_token,
        kv_bytes_per_step=kv_bytes_per_step,
        bytes_per_step=step,
        bandwidth_gbs=chip.bandwidth_gbs,
        bandwidth_source=chip.source,
        ceiling_tps=ceiling_tps(chip.bandwidth_gbs, step),
    )
