"""What this machine can do, measured now, beside what its maker's table says: ``tokamac bench --machine``."""

from dataclasses import dataclass

from tokamac.engine.device import DeviceKind, device_kind
from tokamac.engine.limits.arithmetic import best_s, measure_tflops
from tokamac.engine.limits.bandwidth import is_busy, measure_bandwidth
from tokamac.engine.limits.hardware import Chip, detect
from tokamac.engine.limits.metrics import rate

COPIED = 256 << 20
"""Bytes copied at once: more than a chip's caches hold."""

BUDGET_S = 0.5


@dataclass(frozen=True, slots=True)
class MachineReport:
    """Measurements of this machine. GB/s are 10^9 bytes; None is what could not be measured.

    table: what the chip table knows. copy_gbs: bytes read and written by a copy. read_gbs: bytes read by a matrix times a vector.
    tflops: a matrix product, in float32 on a CPU, else in half precision. busy: others used the machine, so that all is too low.
    """

    table: Chip
    device: DeviceKind
    copy_gbs: float | None
    read_gbs: float | None
    tflops: float
    busy: bool


def measure_machine() -> MachineReport:
    """Measure for about two seconds. Touches the device."""
    device, busy = device_kind(), is_busy()
    return MachineReport(
        table=detect(),
        device=device,
        copy_gbs=_copy_gbs(device),
        read_gbs=measure_bandwidth(device=device),
        tflops=measure_tflops(device),
        busy=busy,
    )


def _copy_gbs(device: DeviceKind) -> float | None:
    if device == "cpu":
        import numpy as np

        source = np.full(COPIED // 4, 0.5, dtype=np.float32)
        target = np.empty_like(source)
        seconds = best_s(lambda: np.copyto(target, source), BUDGET_S)
    else:
        import mlx.core as mx

        array = mx.full((COPIED // 4,), 0.5, dtype=mx.float32)
        mx.eval(array)
        seconds = best_s(lambda: mx.eval(array + 1.0), BUDGET_S)
    moved = rate(2 * COPIED, seconds)
    return None if moved is None else moved / 1e9
