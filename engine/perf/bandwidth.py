"""Memory bandwidth and peak arithmetic where no table knows them: measured on this machine, and kept.

The ceiling is only a ceiling if nothing beats it. A small model lives in a CPU's caches and is read faster than any DRAM, so the
measurement reads a working set no larger than the model's own weights (rounded down to a power of two), the way a decode step
does: matrix times vector. The peak of arithmetic is prefill's ceiling: the best of several large matrix products counts, by what
the engine computes with: NumPy in float32 on a CPU, MLX in half precision on a GPU. ``tokamac bench --machine`` shows all of it
beside the maker's table.

What is measured can only be too low: other programs, the clock and a virtual machine's neighbours slow reading down, nothing
speeds it up. So the highest ever seen counts, replies included, and it is trusted once an idle machine was timed. A reply that
beats it by a tenth proves that the timing was disturbed: the bandwidth is unknown until it was timed again, in idle time or at
the next start, never in a reply.
"""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..device import DeviceKind, device_kind
from ..metrics import rate
from . import measurement_store
from .hardware import Chip, detect

if TYPE_CHECKING:
    import mlx.core as mx

SMALLEST, LARGEST = 8 << 20, 256 << 20
"""Bytes of working set. Below, calls cost more than reading; above, filling it takes longer than measuring.

Where a cache holds part of 256 MiB, the ceiling of a larger model comes out a little high (by a quarter on one server): still
a ceiling."""

BUDGET_S = 0.12
"""Seconds of trials for one shape; there are up to four, and filling the memory comes on top (up to 0.4 s for the largest)."""

BUSY_SHARE = 0.4
"""Load of the last minute, as a share of the cores, above which a CPU is not measured."""

OTHERS_SHARE = 0.25
"""Share of the processors that other programs may use during a trial that is trusted."""

GEMV_COLUMNS = (512, 2048)
"""Widths of the matrices read, as in small and middling models; the faster counts."""

_unkept: "dict[tuple[Path, str], KeptBandwidth]" = {}
"""What could not be written, by file and key: one size has one bandwidth for as long as this process lives."""

_timed: set[tuple[Path, str]] = set()
"""What this process has timed when it was asked for, so that a list of models does not time it for each. Idle time may again."""

SIDE: dict[DeviceKind, int] = {"cpu": 1536, "cuda": 8192, "metal": 4096}
"""Rows and columns: a product takes tens of milliseconds, far above what starting it costs."""

PRODUCT_S = 0.5

COPIED = 256 << 20
"""Bytes copied at once: more than a chip's caches hold."""

COPY_S = 0.5


@dataclass(frozen=True, slots=True)
class KeptBandwidth:
    """The highest bandwidth that was seen on this machine with one size of working set, in GB/s, and whether to trust it.

    trusted: an idle machine was timed, and no reply was faster by a tenth since. again: a reply beat it, so time it again.
    at: when the highest was seen, in seconds since 1970. others: the share of the processors that other programs used then.
    by_reply: a reply reached it. None is unknown.
    """

    gbs: float
    trusted: bool
    again: bool = False
    at: float | None = None
    others: float | None = None
    by_reply: bool = False

    @property
    def condition(self) -> str:
        """How it was come by, for people; of one that is not trusted, why."""
        if not self.trusted:
            return f"{UNTRUSTED}; a reply read {self.gbs:.3g} GB/s"
        when = "" if self.at is None else time.strftime(" on %-d %b %Y", time.localtime(self.at))
        if self.by_reply:
            return f"the highest seen here, by a reply{when}"
        idle = "" if self.others is None else f", other programs using {self.others:.0%} of the processors"
        return f"the highest ever timed here{when}{idle}"


UNTRUSTED = "not measured yet: that is done when the machine is idle"

BEATEN = 1.1
"""How much faster than the kept value a reply must be to prove that it was timed on a disturbed machine."""


def after_timing(known: KeptBandwidth | None, gbs: float, others: float | None, at: float) -> KeptBandwidth | None:
    """Return what is known after a timing. One on a busy machine says nothing. others: None where it does not matter."""
    if others is not None and others > OTHERS_SHARE:
        return known
    if known is not None and known.gbs > gbs:
        return dataclasses.replace(known, trusted=True, again=False)
    return KeptBandwidth(gbs, trusted=True, at=at, others=others)


def after_reply(known: KeptBandwidth | None, gbs: float, at: float) -> KeptBandwidth:
    """Return what is known after a reply that read ``gbs``: never less. What it beats by a tenth is not trusted any more."""
    if known is not None and gbs <= known.gbs:
        return known
    trusted = known is not None and known.trusted and gbs <= BEATEN * known.gbs
    return KeptBandwidth(gbs, trusted=trusted, again=True, at=at, by_reply=True)


@dataclass(frozen=True, slots=True)
class BandwidthRecord:
    """Where the bandwidth of this machine is kept for models that read ``bytes_read`` a step."""

    file: Path
    key: str
    bytes_read: int
    device: DeviceKind

    @classmethod
    def of(cls, chip: Chip, bytes_read: int) -> "BandwidthRecord":
        """Return the record of a chip and a size."""
        device = device_kind()
        key = f"{measurement_store.machine_key(chip, device)} | {bucket(bytes_read)} bytes"
        return cls(store_file(), key, bytes_read, device)

    def read(self) -> KeptBandwidth | None:
        """Return what is kept; None where there is nothing, or it can't be right."""
        return _parsed(measurement_store.load(self.file).get(self.key)) or _unkept.get((self.file, self.key))

    def keep(self, known: KeptBandwidth) -> None:
        """Keep a value; where the file can't be written, for as long as this process lives."""
        measurement_store.keep(self.file, {self.key: dataclasses.asdict(known)})
        if _parsed(measurement_store.load(self.file).get(self.key)) != known:
            _unkept[self.file, self.key] = known

    @property
    def wants_timing(self) -> bool:
        """Whether it was never timed on an idle machine, or a reply has beaten it since."""
        known = self.read()
        return known is None or not known.trusted or known.again

    def time(self) -> Iterator[None]:
        """Time it, a fifth of a second or two a step, and keep what an idle machine gave.

        Half of the trials must have had the machine to themselves.
        """
        samples = []
        for sample in trials(self.bytes_read, self.device):
            samples.append(sample)
            yield
        undisturbed = [each for each in samples if each.others is None or each.others <= OTHERS_SHARE]
        if not undisturbed or 2 * len(undisturbed) < len(samples):
            return
        best = max(undisturbed, key=lambda each: each.gbs)
        known = after_timing(self.read(), best.gbs, best.others, time.time())
        if known is not None:
            self.keep(known)

    def time_now(self) -> None:
        """Time it once in this process, unless others use the machine. Takes up to 1.5 s."""
        if (self.file, self.key) in _timed or (self.device == "cpu" and is_busy()):
            return
        _timed.add((self.file, self.key))
        for _ in self.time():
            pass

    def describe(self, chip: Chip) -> Chip:
        """Return the chip with the bandwidth that is kept, if it is trusted; else with the reason why there is none."""
        known = self.read()
        if known is None or not known.trusted:
            why = UNTRUSTED if known is None else known.condition
            return dataclasses.replace(chip, bandwidth_gbs=None, source="unknown", condition=why)
        return dataclasses.replace(chip, bandwidth_gbs=known.gbs, source="measured", condition=known.condition)


def with_bandwidth(chip: Chip, bytes_read: int) -> Chip:
    """Return ``chip`` with a bandwidth: the table's, else the highest ever seen on this machine, as far as it is trusted.

    Where it was never timed, or a reply has beaten it, it is timed now (up to 1.5 s), unless the machine is busy: unknown then.
    """
    if chip.bandwidth_gbs is not None:
        return chip
    record = BandwidthRecord.of(chip, bytes_read)
    if record.wants_timing:
        record.time_now()
    return record.describe(chip)


def believed(chip: Chip, achieved_gbs: float | None) -> Chip:
    """Return ``chip`` as far as it can be believed while a reply reads ``achieved_gbs``; keeps nothing (see ``learn``).

    A measured bandwidth that a reply beats by a little grows to what was reached. Beaten by more than a tenth, it was measured on a
    disturbed machine and says nothing: unknown. A table's stays: beating that would be a mistake in counting, and should show.
    """
    if chip.source != "measured" or chip.bandwidth_gbs is None or achieved_gbs is None:
        return chip
    if achieved_gbs <= chip.bandwidth_gbs:
        return chip
    known = after_reply(KeptBandwidth(chip.bandwidth_gbs, trusted=True), achieved_gbs, time.time())
    gbs = known.gbs if known.trusted else None
    return dataclasses.replace(
        chip, bandwidth_gbs=gbs, source="measured" if gbs else "unknown", condition=known.condition
    )


def learn(chip: Chip, bytes_read: int, achieved_gbs: float) -> Chip:
    """Keep what a reply reached that read ``bytes_read`` a step, and return the chip as it is known then."""
    if chip.source == "table":
        return chip
    record = BandwidthRecord.of(chip, bytes_read)
    before = record.read()
    known = after_reply(before, achieved_gbs, time.time())
    if known != before:
        record.keep(known)
    return record.describe(chip)


@dataclass(frozen=True, slots=True)
class Sample:
    """One trial: the best of it in GB/s, and the share of the processors that others used; None where it does not matter."""

    gbs: float
    others: float | None


def trials(bytes_read: int, device: DeviceKind) -> Iterator[Sample]:
    """Time reading a working set of ``bytes_read``, a shape of matrix or a way a step."""
    size = bucket(bytes_read)
    runs = _numpy_gemv(size) if device == "cpu" else _mlx_reads(size)
    while True:
        watch = OtherPrograms() if device == "cpu" else None
        speed = next(runs, None)
        if speed is None:
            return
        yield Sample(speed, None if watch is None else watch.share())


class OtherPrograms:
    """How much of this process's processors others use, from its making on; where the kernel does not count that, by the load."""

    def __init__(self) -> None:
        self._busy_s = _busy_s()
        self._own_s, self._wall_s = time.process_time(), time.perf_counter()

    def share(self) -> float:
        """Return the share, 0 to 1."""
        own_s, wall_s = time.process_time() - self._own_s, time.perf_counter() - self._wall_s
        busy_s, cores = _busy_s(), _cores()
        if busy_s is None or self._busy_s is None or wall_s <= 0:
            return min(max(os.getloadavg()[0] - own_s / 60, 0.0) / cores, 1.0)
        return min(max(busy_s - self._busy_s - own_s, 0.0) / (cores * wall_s), 1.0)


def _busy_s() -> float | None:
    """Return the seconds in which this process's processors were busy until now, by Linux's count; None elsewhere."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = 0
        for name, *counts in (line.split() for line in lines if line.startswith("cpu")):
            if name in mine:
                user, nice, system, _idle, _waiting, *rest = map(int, counts[:8])
                ticks += user + nice + system + sum(rest)
        return ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _parsed(value: object) -> KeptBandwidth | None:
    """Return a kept value; None where it can't be right. A bare number is of version 0.1, which kept what an idle machine gave."""
    given = value if isinstance(value, dict) else {"gbs": value, "trusted": True}
    try:
        known = KeptBandwidth(**given)
    except TypeError:
        return None
    numbers = (known.gbs, *(each for each in (known.at, known.others) if each is not None))
    if not all(type(each) in (int, float) and math.isfinite(each) for each in numbers):
        return None
    flags = (known.trusted, known.again, known.by_reply)
    return known if all(type(each) is bool for each in flags) and 0 < known.gbs < 1e6 else None


def measure_bandwidth(bytes_read: int = LARGEST, *, device: DeviceKind | None = None) -> float | None:
    """Return how fast a working set of ``bytes_read`` can be read, in GB/s: the best of what fits into about 1.5 s.

    On a CPU this is NumPy's float32 matrix-vector product on all its threads, which is what it decodes plain weights with. On
    a GPU it is MLX's half-precision one, and a copy (which moves each byte twice), for the working set and for one that no cache
    holds. A busy machine reads slower: measure an idle one. None where nothing could be measured.
    """
    return max((sample.gbs for sample in trials(bytes_read, device or device_kind())), default=None)


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


def _best(run: Callable[[], object], bytes_moved: int) -> float | None:
    """Return the best GB/s of repeated runs; the first only warms up."""
    speed = rate(bytes_moved, best_s(run, BUDGET_S))
    return None if speed is None else speed / 1e9


def _numpy_gemv(size: int) -> Iterator[float | None]:
    """x times W, float32 of ``size`` bytes, wide and narrow, and as the transpose of what lies in memory: the layouts in use."""
    import numpy as np

    values = np.full(size // 4, 0.5, dtype=np.float32)  # no denormals: they would be slower
    for columns in GEMV_COLUMNS:
        for matrix in (values.reshape(-1, columns).T, values.reshape(columns, -1)):
            x = np.ones((1, columns), dtype=np.float32)
            yield _best(functools.partial(np.matmul, x, matrix), size)


def _mlx_reads(size: int) -> Iterator[float | None]:
    """W (rows, 4096) float16 of ``size`` bytes times x, and its copy; the same of what no cache holds. Never run on a plain CPU."""
    import mlx.core as mx

    columns = 4096
    for nbytes in (size, LARGEST):
        matrix = mx.ones((max(nbytes // 2 // columns, 1), columns), dtype=mx.float16)
        vectors = mx.random.normal((max((512 << 20) // nbytes, 1), columns, 1)).astype(mx.float16)
        mx.eval(matrix, vectors)
        # Several products in one evaluation, so that a small set is not measured by what launching costs.
        yield _best(functools.partial(_products, matrix, vectors), matrix.nbytes * vectors.shape[0])
        yield _best(functools.partial(_copy, matrix), 2 * matrix.nbytes)


def _products(matrix: "mx.array", vectors: "mx.array") -> None:
    import mlx.core as mx

    mx.eval([matrix @ vector for vector in vectors])


def _copy(matrix: "mx.array") -> None:
    import mlx.core as mx

    mx.eval(matrix + 1)


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
