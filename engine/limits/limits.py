"""What a machine allows a model at a context: bytes a step, and the rate no kernel can beat."""

from dataclasses import dataclass

from tokamac.engine.limits.hardware import Chip, Source
from tokamac.engine.limits.metrics import ceiling_tps


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of decoding at a context of ``context`` tokens. Bytes, GB/s (10^9), tokens a second; None is unknown.

    bandwidth_source: the chip table, a measurement on this machine, or unknown.
    expected_tps: what good kernels reach; not predicted yet.
    """

    context: int
    weight_bytes_per_token: int | None
    kv_bytes_per_step: int | None
    bytes_per_step: int | None
    bandwidth_gbs: float | None
    bandwidth_source: Source
    ceiling_tps: float | None
    expected_tps: float | None = None


def limits_for(
    context: int, *, weight_bytes_per_token: int | None, kv_bytes_per_step: int | None, chip: Chip
) -> Limits:
    """Return the limits of a model (by the bytes a step reads) on a chip. An unknown cost leaves the ceiling unknown."""
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
