"""Measured memory bandwidth and peak arithmetic, kept per machine."""

# Small models sit in CPU caches, so the working set read (matrix × vector) is no larger than the weights. Peak: best
# large product, as the engine computes (NumPy float32 on a CPU, MLX half on a GPU). Disturbances only lower results:
# the highest counts, replies' too; one beating it by a tenth proves a bad timing, so it is unknown until re-timed.

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
from . import hardware
from .hardware import Chip, detect

if TYPE_CHECKING:
    import mlx.core as mx

# Bytes of working set. Below, calls cost more than reading; above, filling it takes longer than measuring. Where a
# cache holds part of 256 MiB, the ceiling of a larger model comes out a little high (by a quarter on one server): still
# a ceiling.
SMALLEST, LARGEST = 8 << 20, 256 << 20

# Seconds of trials for one shape; there are up to four, and filling the memory comes on top (up to 0.4 s for the
# largest).
BUDGET_S = 0.12

BUSY_SHARE = 0.4  # load of the last minute, as a share of the cores, above which a CPU is not measured

OTHERS_SHARE = 0.25  # share of the processors that other programs may use during a trial that is trusted

GEMV_COLUMNS = (512, 2048)  # widths of the matrices read, as in small and middling models; the faster counts

# What could not be written, by file and key: one size has one bandwidth for as long as this process lives.
_unkept: "dict[tuple[Path, str], KeptBandwidth]" = {}

# What this process has timed when it was asked for, so that a list of models does not time it for each. Idle time may
# again.
_timed: set[tuple[Path, str]] = set()

# Rows and columns: a product takes tens of milliseconds, far above what starting it costs.
SIDE: dict[DeviceKind, int] = {"cpu": 1536, "cuda": 8192, "metal": 4096}

PRODUCT_S = 0.5

COPIED = 256 << 20  # bytes copied at once: more than a chip's caches hold

COPY_S = 0.5


@dataclass(frozen=True, slots=True)
class KeptBandwidth:
    """Highest bandwidth seen for a working-set size, GB/s.

    trusted: timed idle, and not beaten by a tenth. at: Unix seconds. others: CPU share of other programs.
    """

    gbs: float
    trusted: bool
    again: bool = False
    at: float | None = None
    others: float | None = None
    by_reply: bool = False

    @property
    def condition(self) -> str:
        if not self.trusted:
            return f"{UNTRUSTED}; a reply read {self.gbs:.3g} GB/s"
        when = "" if self.at is None else time.strftime(" on %-d %b %Y", time.localtime(self.at))
        if self.by_reply:
            return f"the highest seen here, by a reply{when}"
        idle = "" if self.others is None else f", other programs using {self.others:.0%} of the processors"
        return f"the highest ever timed here{when}{idle}"


UNTRUSTED = "not measured yet: that is done when the machine is idle"

BEATEN = 1.1  # how much faster than the kept value a reply must be to prove that it was timed on a disturbed machine


def after_timing(known: KeptBandwidth | None, gbs: float, others: float | None, at: float) -> KeptBandwidth | None:
    if others is not None and others > OTHERS_SHARE:
        return known
    if known is not None and known.gbs > gbs:
        return dataclasses.replace(known, trusted=True, again=False)
    return KeptBandwidth(gbs, trusted=True, at=at, others=others)


def after_reply(known: KeptBandwidth | None, gbs: float, at: float) -> KeptBandwidth:
    """Update with a reply's bandwidth: never lower; untrusted if beaten by a tenth."""
    if known is not None and gbs <= known.gbs:
        return known
    trusted = known is not None and known.trusted and gbs <= BEATEN * known.gbs
    return KeptBandwidth(gbs, trusted=trusted, again=True, at=at, by_reply=True)


@dataclass(frozen=True, slots=True)
class BandwidthRecord:
    file: Path
    key: str
    bytes_read: int
    device: DeviceKind

    @classmethod
    def measured(cls, chip: Chip, bytes_read: int) -> "BandwidthRecord":
        device = device_kind()
        key = f"{hardware.machine_key(chip, device)} | {bucket(bytes_read)} bytes"
        return cls(store_file(), key, bytes_read, device)

    def of_another_size(self) -> KeptBandwidth | None:
        """Return the nearest trusted size's value, smaller first, since smaller sets read no slower."""
        machine, own, kept = self.key.rpartition("|")[0], bucket(self.bytes_read), hardware.load(self.file)
        sizes = [SMALLEST << power for power in range((LARGEST // SMALLEST).bit_length())]
        nearest = (*reversed([size for size in sizes if size < own]), *(size for size in sizes if size > own))
        found = (_parsed(kept.get(f"{machine}| {size} bytes")) for size in nearest)
        return next((each for each in found if each is not None and each.trusted), None)

    def read(self) -> KeptBandwidth | None:
        return _parsed(hardware.load(self.file).get(self.key)) or _unkept.get((self.file, self.key))

    def keep(self, known: KeptBandwidth) -> None:
        hardware.keep(self.file, {self.key: dataclasses.asdict(known)})
        if _parsed(hardware.load(self.file).get(self.key)) != known:
            _unkept[self.file, self.key] = known

    @property
    def wants_timing(self) -> bool:
        known = self.read()
        return known is None or not known.trusted or known.again

    def time(self) -> Iterator[None]:
        """Time it, a fifth of a second or two per step; keep it if half the trials ran on an idle machine."""
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
        if (self.file, self.key) in _timed or (self.device == "cpu" and is_busy()):
            return
        _timed.add((self.file, self.key))
        for _ in self.time():
            pass

    def describe(self, chip: Chip) -> Chip:
        known = self.read()
        if known is not None and known.trusted:
            return dataclasses.replace(chip, bandwidth_gbs=known.gbs, source="measured", condition=known.condition)
        other = self.of_another_size()
        if other is not None and (known is None or known.gbs <= other.gbs):  # else a reply has disproved that one, too
            condition = f"{other.condition}, for models of another size"
            return dataclasses.replace(chip, bandwidth_gbs=other.gbs, source="measured", condition=condition)
        why = UNTRUSTED if known is None else known.condition
        return dataclasses.replace(chip, bandwidth_gbs=None, source="unknown", condition=why)


def with_bandwidth(chip: Chip, bytes_read: int) -> Chip:
    """Return ``chip`` with the table's bandwidth, else the trusted measured one, timed if needed (≤ 1.5 s)."""
    if chip.bandwidth_gbs is not None:
        return chip
    record = BandwidthRecord.measured(chip, bytes_read)
    if record.wants_timing:
        record.time_now()
    return record.describe(chip)


def believed(chip: Chip, achieved_gbs: float | None) -> Chip:
    """Return ``chip`` adjusted to a running reply: slightly higher is adopted, over a tenth makes it unknown."""
    # A table's value stays: beating it is a counting error, and should show.
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
    if chip.source == "table":
        return chip
    record = BandwidthRecord.measured(chip, bytes_read)
    before = record.read()
    known = after_reply(before, achieved_gbs, time.time())
    if known != before:
        record.keep(known)
    return record.describe(chip)


@dataclass(frozen=True, slots=True)
class Sample:
    """The best GB/s of a trial, and the CPU share of other programs."""

    gbs: float
    others: float | None


def trials(bytes_read: int, device: DeviceKind) -> Iterator[Sample]:
    size = bucket(bytes_read)
    runs = _numpy_gemv(size) if device == "cpu" else _mlx_reads(size)
    while True:
        watch = OtherPrograms() if device == "cpu" else None
        speed = next(runs, None)
        if speed is None:
            return
        yield Sample(speed, None if watch is None else watch.share())


class OtherPrograms:
    """CPU share of other programs since creation; from the load average where the kernel has no count."""

    def __init__(self) -> None:
        self._busy_s = _busy_s()
        self._own_s, self._wall_s = time.process_time(), time.perf_counter()

    def share(self) -> float:
        own_s, wall_s = time.process_time() - self._own_s, time.perf_counter() - self._wall_s
        busy_s, cores = _busy_s(), _cores()
        if busy_s is None or self._busy_s is None or wall_s <= 0:
            return min(max(os.getloadavg()[0] - own_s / 60, 0.0) / cores, 1.0)
        return min(max(busy_s - self._busy_s - own_s, 0.0) / (cores * wall_s), 1.0)


def _busy_s() -> float | None:
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
    """Return GB/s for a working set, best within about 1.5 s; None on failure."""
    # CPU: NumPy float32 matrix-vector on all threads, as plain decode. GPU: MLX half precision, and a copy.
    return max((sample.gbs for sample in trials(bytes_read, device or device_kind())), default=None)


def is_busy(own_s: float = 0.0) -> bool:
    """Whether others use much of the CPU. own_s: CPU seconds of the measurement itself."""
    return os.getloadavg()[0] - own_s / 60 > BUSY_SHARE * (os.cpu_count() or 1)


def bucket(bytes_read: int) -> int:
    """Round down to a power of two in range: a smaller set reads no slower, so it bounds."""
    return 1 << (min(max(bytes_read, SMALLEST), LARGEST).bit_length() - 1)


def store_file() -> Path:
    return hardware.store_file("bandwidth.json")


def _best(run: Callable[[], object], bytes_moved: int) -> float | None:
    speed = rate(bytes_moved, best_s(run, BUDGET_S))
    return None if speed is None else speed / 1e9


def _numpy_gemv(size: int) -> Iterator[float | None]:
    """float32 x times W of ``size`` bytes: wide, narrow and transposed."""
    import numpy as np

    values = np.full(size // 4, 0.5, dtype=np.float32)  # no denormals: they would be slower
    for columns in GEMV_COLUMNS:
        for matrix in (values.reshape(-1, columns).T, values.reshape(columns, -1)):
            x = np.ones((1, columns), dtype=np.float32)
            yield _best(functools.partial(np.matmul, x, matrix), size)


def _mlx_reads(size: int) -> Iterator[float | None]:
    """float16 W (rows, 4096) times x, and its copy; cached and uncached. GPU only."""
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
    side = SIDE[device]
    multiply = _numpy_product(side) if device == "cpu" else _mlx_product(side)
    operations_per_s = rate(2 * side**3, best_s(multiply, PRODUCT_S))
    assert operations_per_s is not None  # a product takes time
    return operations_per_s / 1e12


def best_s(run: Callable[[], object], budget_s: float) -> float:
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
    import mlx.core as mx

    values = mx.full((side, side), 0.5, dtype=mx.bfloat16)
    mx.eval(values)
    return lambda: mx.eval(values @ values)


@dataclass(frozen=True, slots=True)
class MachineReport:
    """Machine measurements, GB/s (10^9); None is unknown.

    tflops: float32 on a CPU, else half. busy: others ran, so all is too low.
    """

    table: Chip
    device: DeviceKind
    copy_gbs: float | None
    read_gbs: float | None
    tflops: float
    busy: bool


def measure_machine() -> MachineReport:
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
