"""Memory bandwidth and peak arithmetic where no table knows them: measured on this machine, and kept.

The ceiling is only a ceiling if nothing beats it. A small model lives in a CPU's caches and is read faster than any DRAM, so the
measurement reads a working set no larger than the model's own weights (rounded down to a power of two), the way a decode step
does: matrix times vector. The peak of arithmetic is prefill's ceiling: the best of several large matrix products counts, by what
the engine computes with: NumPy in float32 on a CPU, MLX in half precision on a GPU. ``tokamac bench --machine`` shows all of it
beside the maker's table.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..device import DeviceKind, device_kind
from ..metrics import rate
from . import measurement_store
from .hardware import Chip, detect

SMALLEST, LARGEST = 8 << 20, 256 << 20
"""Bytes of working set. Below, calls cost more than reading; above, filling it takes longer than measuring.

Where a cache holds part of 256 MiB, the ceiling of a larger model comes out a little high (by a quarter on one server): still
a ceiling."""

BUDGET_S = 0.12
"""Seconds of trials for one shape; there are up to four, and filling the memory comes on top (up to 0.4 s for the largest)."""

BUSY_SHARE = 0.4
"""Load of the last minute, as a share of the cores, above which a CPU's measurement is used but not kept."""

BUSY_PATIENCE = 2.0
"""How much longer a busy CPU is tried: the best of many tries is likelier to be an undisturbed one."""

GEMV_COLUMNS = (512, 2048)
"""Widths of the matrices read, as in small and middling models; the faster counts."""

_unkept: dict[tuple[Path, str], float] = {}
"""What was measured and could not be kept, by file and name: one size has one bandwidth for as long as this process lives."""

SIDE: dict[DeviceKind, int] = {"cpu": 1536, "cuda": 8192, "metal": 4096}
"""Rows and columns: a product takes tens of milliseconds, far above what starting it costs."""

PRODUCT_S = 0.5

COPIED = 256 << 20
"""Bytes copied at once: more than a chip's caches hold."""

COPY_S = 0.5


def with_bandwidth(chip: Chip, bytes_read: int) -> Chip:
    """Return ``chip`` with a bandwidth: the table's, else the one kept for this machine, else measured now (up to 1.5 s)."""
    if chip.bandwidth_gbs is not None:
        return chip
    device = device_kind()
    file, key = store_file(), _key(chip, device, bytes_read)
    gbs = measurement_store.read(file, key) or _unkept.get((file, key))
    if gbs is None:
        busy = device == "cpu" and is_busy()
        gbs = measure_bandwidth(bytes_read, device=device)
        if gbs is not None:
            _remember(file, key, gbs, keep=not busy)
    return chip if gbs is None else dataclasses.replace(chip, bandwidth_gbs=gbs, source="measured")


def believed(chip: Chip, achieved_gbs: float | None) -> Chip:
    """Return ``chip`` as far as it can be believed after a reply that read ``achieved_gbs``.

    A measured bandwidth that a reply beats by a little grows to what was reached. Beaten by more than a tenth, it was measured on a
    busy machine and says nothing: unknown. A table's stays: beating that would be a mistake in counting, and should show.
    """
    if chip.source != "measured" or chip.bandwidth_gbs is None or achieved_gbs is None:
        return chip
    if achieved_gbs > 1.1 * chip.bandwidth_gbs:
        return dataclasses.replace(chip, bandwidth_gbs=None, source="unknown")
    return dataclasses.replace(chip, bandwidth_gbs=max(chip.bandwidth_gbs, achieved_gbs))


def learn(chip: Chip, bytes_read: int) -> None:
    """Keep what a reply that read ``bytes_read`` a step proved of a measured bandwidth (``believed``), for the next engine.

    One that was disproved is forgotten, and measured again by the next who needs it.
    """
    file, key = store_file(), _key(chip, device_kind(), bytes_read)
    measurement_store.forget(file, key)
    _unkept.pop((file, key), None)
    if chip.bandwidth_gbs is not None:
        _remember(file, key, chip.bandwidth_gbs, keep=True)


def measure_bandwidth(bytes_read: int = LARGEST, *, device: DeviceKind | None = None) -> float | None:
    """Return how fast a working set of ``bytes_read`` can be read, in GB/s: the best of what fits into about 1.5 s.

    On a CPU this is NumPy's float32 matrix-vector product on all its threads, which is what the engine decodes with there. On a
    GPU it is MLX's half-precision one, and a copy (which moves each byte twice), for the working set and for one that no cache
    holds. A busy machine reads slower: measure an idle one. None where nothing could be measured.
    """
    size = bucket(bytes_read)
    on_cpu = (device or device_kind()) == "cpu"
    speeds = _numpy_gemv(size) if on_cpu else [_mlx_read(size), _mlx_read(LARGEST)]
    return max((speed for speed in speeds if speed is not None), default=None)


def is_busy(own_s: float = 0.0) -> bool:
    """Return whether others use a good part of the CPU: what is measured now would be too low to keep.

    own_s: CPU seconds that the measuring itself has used until now. Of the last minute's load, at most a sixtieth of them is it.
    """
    return os.getloadavg()[0] - own_s / 60 > BUSY_SHARE * (os.cpu_count() or 1)


def bucket(bytes_read: int) -> int:
    """Return the working set to measure: ``bytes_read`` rounded down to a power of two, within the sizes that make sense.

    Down, because a smaller set is read no slower: what is measured then still bounds what the model can do.
    """
    return 1 << (min(max(bytes_read, SMALLEST), LARGEST).bit_length() - 1)


def store_file() -> Path:
    """Return the file that measurements are kept in."""
    return measurement_store.store_file("bandwidth.json")


def _key(chip: Chip, device: DeviceKind, bytes_read: int) -> str:
    return f"{measurement_store.machine_key(chip, device)} | {bucket(bytes_read)} bytes"


def _remember(file: Path, key: str, gbs: float, *, keep: bool) -> None:
    """Keep a measurement, or hold it for this process where it is not to be kept, or can't be."""
    if keep:
        measurement_store.keep(file, {key: gbs})
    if measurement_store.read(file, key) is None:
        _unkept[file, key] = gbs


def _best(run: Callable[[], object], bytes_moved: int) -> float | None:
    """Return the best GB/s of repeated runs; the first only warms up."""
    speed = rate(bytes_moved, best_s(run, BUDGET_S * (BUSY_PATIENCE if is_busy() else 1.0)))
    return None if speed is None else speed / 1e9


def _numpy_gemv(size: int) -> list[float | None]:
    """x times W, float32 of ``size`` bytes, wide and narrow, and as the transpose of what lies in memory: the layouts in use."""
    import numpy as np

    values = np.full(size // 4, 0.5, dtype=np.float32)  # no denormals: they would be slower
    speeds = []
    for columns in GEMV_COLUMNS:
        for matrix in (values.reshape(-1, columns).T, values.reshape(columns, -1)):
            x = np.ones((1, columns), dtype=np.float32)
            speeds.append(_best(functools.partial(np.matmul, x, matrix), size))
    return speeds


def _mlx_read(size: int) -> float | None:
    """W (rows, 4096) float16 of ``size`` bytes times x, and its copy; the faster of the two. Never run on a plain CPU."""
    import mlx.core as mx

    columns = 4096
    matrix = mx.ones((max(size // 2 // columns, 1), columns), dtype=mx.float16)
    vectors = mx.random.normal((max((512 << 20) // size, 1), columns, 1)).astype(mx.float16)
    mx.eval(matrix, vectors)
    # Several products in one evaluation, so that a small set is not measured by what launching costs.
    products = _best(lambda: mx.eval([matrix @ vector for vector in vectors]), matrix.nbytes * vectors.shape[0])
    copies = _best(lambda: mx.eval(matrix + 1), 2 * matrix.nbytes)
    return max((speed for speed in (products, copies) if speed is not None), default=None)


def measure_tflops(device: DeviceKind) -> float:
    """Return the best rate of a square matrix product, in 10^12 operations a second."""
    side = SIDE[device]
    multiply = _numpy_product(side) if device == "cpu" else _mlx_product(side)
    operations_per_s = rate(2 * side**3, best_s(multiply, PRODUCT_S))
    assert operations_per_s is not None  # a product takes time
    return operations_per_s / 1e12


def best_s(run: Callable[[], object], budget_s: float) -> float:
    """Return the shortest time of repeated runs within a budget, in seconds; the first only warms up."""
    run()
    best, end = float("inf"), time.perf_counter() + budget_s
    while (began := time.perf_counter()) < end or best == float("inf"):
        run()
        best = min(best, time.perf_counter() - began)
    return best


def _numpy_product(side: int) -> Callable[[], object]:
    import numpy as np

    values = np.full((side, side), 0.5, dtype=np.float32)
    return lambda: values @ values


def _mlx_product(side: int) -> Callable[[], object]:
    """Never run on a plain CPU."""
    import mlx.core as mx

    values = mx.full((side, side), 0.5, dtype=mx.bfloat16)
    mx.eval(values)
    return lambda: mx.eval(values @ values)


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
        seconds = best_s(lambda: np.copyto(target, source), COPY_S)
    else:
        import mlx.core as mx

        array = mx.full((COPIED // 4,), 0.5, dtype=mx.float32)
        mx.eval(array)
        seconds = best_s(lambda: mx.eval(array + 1.0), COPY_S)
    moved = rate(2 * COPIED, seconds)
    return None if moved is None else moved / 1e9
