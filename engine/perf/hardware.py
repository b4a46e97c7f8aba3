"""The chip, its table entry (assets/chips.json, sources cited), and MLX's use of neural accelerators."""

# Names are ambiguous (M3, M4, M5 Max have two bins), hence name and GPU cores. M5's accelerators triple prefill, but
# need macOS 26.2 and a matching wheel (``is_nax_available``, mlx/backend/metal/device.cpp, CMakeLists.txt); pip picks
# older wheels if Python reports macOS 16 (python/cpython#135675). A wheel's Tag names its target.

import contextlib
import ctypes
import functools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Protocol

from ..device import DeviceKind, usable_cores
from ..files import atomic_write, read_text
from ..kv.costs import AttentionDevice
from ..metrics import Throttle
from ..requirements import pip_install

# What macOS says of the machine: a seam to the running system, what is read from its answers, and whether it slows the
# chip down.

TIMEOUT_S = 5.0  # what a program may take to answer

IOREG = ("/usr/sbin/ioreg", "-rc", "AGXAccelerator", "-d1")
PROFILER = ("/usr/sbin/system_profiler", "SPDisplaysDataType")

# The notification whose state is 0 nominal, 1 moderate, 2 heavy, 3 trapping, 4 sleeping (OSThermalNotification.h).
THERMAL_PRESSURE = "com.apple.system.thermalpressurelevel"
THERMAL_HEAVY = 2

PLUGGED_IN = -2.0  # kIOPSTimeRemainingUnlimited (IOPowerSources.h); on battery seconds, or -1 while they are estimated

HOST_VM_INFO64 = 4  # the flavor of `host_statistics64` that counts pages (mach/host_info.h)


@dataclass(frozen=True, slots=True)
class Pages:
    """``host_statistics64`` page counts. free includes speculative; purgeable overlap active/inactive."""

    size: int
    free: int
    active: int
    inactive: int
    wired: int
    speculative: int
    purgeable: int
    file_backed: int
    anonymous: int
    compressor: int


class System(Hashable, Protocol):
    """A running macOS; None: not reported."""

    def integer(self, name: str) -> int | None:
        """Read a ``sysctlbyname`` number."""

    def text(self, name: str) -> str | None:
        """Read a ``sysctlbyname`` text."""

    def pages(self) -> Pages | None:
        """Read memory page counts."""

    def notified(self, name: str) -> int | None:
        """Read a libnotify state, e.g. thermal pressure."""

    def low_power(self) -> bool | None:
        """Whether Low Power Mode is on."""

    def on_battery(self) -> bool | None:
        """Whether a battery powers the machine."""

    def output(self, *command: str) -> str | None:
        """Run a program; return its output. Never during a reply."""


class _VMStatistics64(ctypes.Structure):
    """``struct vm_statistics64`` (mach/vm_statistics.h), fields common to all supported macOS."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("free", "active", "inactive", "wire")),
        *(
            (name, ctypes.c_uint64)
            for name in (
                "zero_fill", "reactivations", "pageins", "pageouts", "faults", "cow_faults", "lookups", "hits", "purges",
            )
        ),
        *((name, ctypes.c_uint32) for name in ("purgeable", "speculative")),
        *((name, ctypes.c_uint64) for name in ("decompressions", "compressions", "swapins", "swapouts")),
        *((name, ctypes.c_uint32) for name in ("compressor", "throttled", "external", "internal")),
        ("uncompressed_in_compressor", ctypes.c_uint64),
    )  # fmt: skip


class Darwin:
    """macOS through libSystem. Untested."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("/usr/lib/libSystem.B.dylib")
        # size_t arguments take a whole register: a plain int would leave its upper half undefined.
        self._lib.sysctlbyname.argtypes = (
            ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t,
        )  # fmt: skip
        self._lib.mach_host_self.restype = ctypes.c_uint32
        self._host = self._lib.mach_host_self()  # each call takes a reference to the port: once is enough

    def integer(self, name: str) -> int | None:
        raw = self._sysctl(name)
        return int.from_bytes(raw, sys.byteorder) if raw is not None and len(raw) in (4, 8) else None

    def text(self, name: str) -> str | None:
        raw = self._sysctl(name)
        return None if raw is None else raw.rstrip(b"\0").decode("utf-8", "replace")

    def pages(self) -> Pages | None:
        found, size = _VMStatistics64(), self.integer("hw.pagesize")
        count = ctypes.c_uint32(ctypes.sizeof(found) // 4)
        failed = self._lib.host_statistics64(self._host, HOST_VM_INFO64, ctypes.byref(found), ctypes.byref(count))
        if failed or size is None:
            return None
        return Pages(
            size,
            found.free,
            found.active,
            found.inactive,
            found.wire,
            found.speculative,
            found.purgeable,
            found.external,
            found.internal,
            found.compressor,
        )

    def notified(self, name: str) -> int | None:
        token, state = ctypes.c_int(), ctypes.c_uint64()
        if self._lib.notify_register_check(name.encode(), ctypes.byref(token)):
            return None
        try:
            failed = self._lib.notify_get_state(token, ctypes.byref(state))
        finally:
            self._lib.notify_cancel(token)
        return None if failed else int(state.value)

    def low_power(self) -> bool | None:
        objc = ctypes.CDLL("/usr/lib/libobjc.A.dylib")
        ctypes.CDLL("/System/Library/Frameworks/Foundation.framework/Foundation")
        for function in (objc.objc_getClass, objc.sel_registerName):
            function.restype, function.argtypes = ctypes.c_void_p, (ctypes.c_char_p,)

        def send(receiver: int, selector: bytes, result: Any) -> Any:
            call = ctypes.CFUNCTYPE(result, ctypes.c_void_p, ctypes.c_void_p)(("objc_msgSend", objc))
            return call(receiver, objc.sel_registerName(selector))

        info = send(objc.objc_getClass(b"NSProcessInfo"), b"processInfo", ctypes.c_void_p)
        return bool(send(info, b"isLowPowerModeEnabled", ctypes.c_bool)) if info else None

    def on_battery(self) -> bool | None:
        kit = ctypes.CDLL("/System/Library/Frameworks/IOKit.framework/IOKit")
        kit.IOPSGetTimeRemainingEstimate.restype = ctypes.c_double
        return bool(kit.IOPSGetTimeRemainingEstimate() != PLUGGED_IN)

    def output(self, *command: str) -> str | None:
        return run(*command)

    def _sysctl(self, name: str) -> bytes | None:
        size = ctypes.c_size_t()
        if self._lib.sysctlbyname(name.encode(), None, ctypes.byref(size), None, 0):
            return None
        buffer = ctypes.create_string_buffer(size.value)
        if self._lib.sysctlbyname(name.encode(), buffer, ctypes.byref(size), None, 0):
            return None
        return buffer.raw[: size.value]


@functools.cache
def system() -> System | None:
    return Darwin() if sys.platform == "darwin" else None


def run(*command: str) -> str | None:
    """Return a program's output; None on failure or after ``TIMEOUT_S``."""
    # An absolute path and ``close_fds=False`` let Python spawn without a fork.
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=True, close_fds=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace")


def parse_ioreg_cores(text: str) -> int | None:
    counts = [int(count) for count in re.findall(r'^\s*"gpu-core-count"\s*=\s*(\d+)\s*$', text, re.MULTILINE)]
    return max(counts, default=None)


def parse_profiler_cores(text: str) -> int | None:
    # Bare numbers only: SPHardwareDataType's CPU line has the same name.
    found = re.search(r"^\s*Total Number of Cores:\s*(\d+)\s*$", text, re.MULTILINE | re.IGNORECASE)
    return int(found.group(1)) if found else None


def parse_chip_name(text: str) -> str | None:
    return text.split("(", maxsplit=1)[0].strip() or None


def chip_name(asked: System) -> str | None:
    text = asked.text("machdep.cpu.brand_string")
    return parse_chip_name(text) if text else None


@functools.lru_cache(maxsize=1)
def gpu_cores(asked: System) -> int | None:
    sources: tuple[tuple[tuple[str, ...], Callable[[str], int | None]], ...] = (
        (IOREG, parse_ioreg_cores),
        (PROFILER, parse_profiler_cores),
    )
    for command, parse in sources:
        if (text := asked.output(*command)) and (cores := parse(text)):
            return cores
    return None


def throttled(asked: System) -> bool | None:
    level = asked.notified(THERMAL_PRESSURE)
    return None if level is None else level >= THERMAL_HEAVY


SUPPLIES = Path("/sys/class/power_supply")  # Linux: a folder each, Documentation/ABI/testing/sysfs-class-power


def on_battery(mac: System | None, supplies: Path = SUPPLIES) -> bool:
    """Whether a battery powers this machine."""
    if mac is not None:
        return bool(mac.on_battery())
    if sys.platform != "linux":
        return False
    told = {}
    for name in ("type", "status", "scope"):
        for file in supplies.glob(f"*/{name}"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                told[file.parent, name] = read_text(file).strip()
    return any(
        told.get((each, "status")) == "Discharging" and told.get((each, "scope")) != "Device"  # a mouse has one, too
        for (each, name), value in told.items()
        if name == "type" and value == "Battery"
    )


class PowerShare:
    """Returns the share of the time that the device may work."""

    LOOKS_S = 30.0

    def __init__(
        self,
        percent: int,
        on_battery: int | None,
        battery: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plugged, self._unplugged = percent / 100, (percent if on_battery is None else on_battery) / 100
        self._battery, self._clock = battery, clock
        self._due_s, self._now = -1.0, self._plugged

    def __call__(self) -> float:
        if self._plugged != self._unplugged and self._clock() >= self._due_s:
            self._due_s = self._clock() + self.LOOKS_S
            self._now = self._unplugged if self._battery() else self._plugged
        return self._now


EVERY_S = 5.0  # a chip takes longer to get hot


class ThrottleWatch:
    """Throttles ``seen`` during a reply. mac: None if unavailable."""

    def __init__(self, mac: System | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.seen: tuple[Throttle, ...] = ()
        self._from_start: tuple[Throttle, ...] = ()
        self._mac = mac
        self._clock = clock
        self._due_s: float | None = None

    def look(self, *, now: bool = False) -> None:
        if self._mac is None or (not now and self._due_s is not None and self._clock() < self._due_s):
            return
        now_on = throttles(self._mac)
        if self._due_s is None:
            self._from_start = now_on
        self.seen += tuple(each for each in now_on if each not in self.seen)
        self._due_s = self._clock() + EVERY_S

    @property
    def explains_gaps(self) -> tuple[Throttle, ...]:
        """Causes of single slow gaps: heat, or a mode switched on midway."""
        return tuple(each for each in self.seen if each == "thermal" or each not in self._from_start)


UNTOLD = ThrottleWatch(None)  # where no system tells


def throttles(mac: System) -> tuple[Throttle, ...]:
    states: dict[Throttle, bool | None] = {"thermal": throttled(mac), "low power": mac.low_power()}
    return tuple(name for name, on in states.items() if on)


Source = Literal["table", "measured", "unknown"]

Units = Literal["neural", "shaders"]  # what multiplies matrices on an Apple GPU


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip; None is unknown.

    bandwidth_gbs: 10^9 B/s. fp16_tflops: dense, 10^12/s; nax_fp16_tflops: an estimate. units: None if only named.
    other_bin: cores not in the table. condition: how bandwidth was measured.
    """

    name: str
    gpu_cores: int | None
    bandwidth_gbs: float | None
    fp16_tflops: float | None
    source: Source
    citation: str = ""
    nax_fp16_tflops: float | None = None
    peak_source: Source = "unknown"
    units: Units | None = None
    other_bin: bool = False
    condition: str = ""

    @property
    def label(self) -> str:
        return chip_label(self.name, self.gpu_cores)


def chip_label(name: str, gpu_cores: int | None) -> str:
    return name if gpu_cores is None else f"{name}, {gpu_cores}-core GPU"


@functools.cache
def known_chips() -> tuple[Mapping[str, Any], ...]:
    text = resources.files("tokamac.assets").joinpath("chips.json").read_text(encoding="utf-8")
    return tuple(json.loads(text))


def plain_name(name: str) -> str:
    """Strip suffixes: ``Apple M1 (Virtual)`` → ``Apple M1``."""
    return name.split("(", maxsplit=1)[0].strip()


def lookup(name: str, gpu_cores: int | None = None) -> Chip:
    """Look up a chip; None where bins differ. Unknown cores get the common values, marked."""
    rows = [row for row in known_chips() if plain_name(row["chip"]) == plain_name(name)]
    exact = [row for row in rows if row["gpu_cores"] == gpu_cores]
    # With one row and no core count (every NVIDIA card), that row it is; cores that no row has tell no bin.
    fitting = exact or rows
    bandwidth = _common(fitting, "bandwidth_gbs")
    peak = _common(exact or (rows if gpu_cores is None else []), "fp16_tflops")
    return Chip(
        name=plain_name(name),
        gpu_cores=gpu_cores if gpu_cores is not None else _common(rows, "gpu_cores"),
        bandwidth_gbs=bandwidth,
        fp16_tflops=peak,
        source="unknown" if bandwidth is None else "table",
        citation="" if bandwidth is None else fitting[0]["source"],
        peak_source="unknown" if peak is None else "table",
        other_bin=bandwidth is not None and gpu_cores is not None and not exact,
        nax_fp16_tflops=_common(exact or (rows if gpu_cores is None else []), "nax_fp16_tflops_est"),
    )


def detect() -> Chip:
    """Return MLX's chip; measures nothing. macOS part tested on recordings only."""
    from ..device import device_kind

    if (mac := system()) is not None:
        chip = lookup(chip_name(mac) or "unknown chip", gpu_cores(mac))
        units = matrix_units_of(mac, chip.name).units if has_accelerators(chip.name, None) else None
        return replace(chip, units=units)
    import mlx.core as mx

    name = str(mx.device_info().get("device_name") or "unknown device")
    # A CPU's name stands for boards of very different memory: never in the table.
    return Chip(name, None, None, None, "unknown") if device_kind() == "cpu" else lookup(name)


def _common(rows: Sequence[Mapping[str, Any]], key: str) -> Any:
    values = {row[key] for row in rows}
    return values.pop() if len(values) == 1 else None


NEURAL = 5  # the generation from which MLX multiplies matrices on the GPU's neural accelerators (macOS 26.2 and later)


def units_of(chip: Chip) -> str:
    if chip.units is not None:
        return chip.units
    generation = generation_of(chip.name)
    return "neural" if generation is not None and generation >= NEURAL else "shaders"


def generation_of(name: str) -> int | None:
    found = re.match(r"Apple M(\d+)\b", name)
    return int(found.group(1)) if found else None


DISTRIBUTION = "mlx-metal"

FROM = (26, 2)  # the macOS from which there are accelerators to use

REINSTALL = f"SYSTEM_VERSION_COMPAT=0 {pip_install('--force-reinstall', 'mlx', 'mlx-metal')}"


@dataclass(frozen=True, slots=True)
class MatrixUnits:
    units: Units
    advice: str | None = None


def attention_device(kind: DeviceKind, chip: Chip | None) -> AttentionDevice:
    return AttentionDevice(kind, neural=kind == "metal" and chip is not None and units_of(chip) == "neural")


def matrix_units(
    tags: Sequence[str] | None, version: str | None, chip_name: str, architecture: str | None
) -> MatrixUnits:
    """Return the matrix units and advice. tags: the wheel's; version: macOS ("26.2")."""
    if not has_accelerators(chip_name, architecture):
        return MatrixUnits("shaders")
    found = None if version is None else _numbers(version)
    old = found is not None and found < FROM
    named = f"macOS {version}"
    if tags is None:
        wheel = f"This MLX was not installed as a wheel, so whether it uses the neural accelerators of {chip_name} is not known"
        return MatrixUnits("shaders", f"{wheel}: prefill is expected of its shaders. The wheel that does: {REINSTALL}")
    targets = (re.search(r"macosx_(\d+_\d+)", tag) for tag in tags)  # py3-none-macosx_26_0_arm64
    built = max((_numbers(found[1]) for found in targets if found), default=(0, 0))
    if built < (FROM[0], 0):
        update = f"Update macOS to {FROM[0]}.{FROM[1]} or later, then: " if old else ""
        target = f"macOS {built[0]}" if built[0] else "another system"
        slow = f"The installed MLX was built for {target} and leaves the neural accelerators of {chip_name} unused"
        return MatrixUnits("shaders", f"{slow}: prefill takes three to four times as long. {update}{REINSTALL}")
    if old:
        needs = f"The neural accelerators of {chip_name} need macOS {FROM[0]}.{FROM[1]}, for which the installed MLX was built"
        return MatrixUnits("shaders", f"{needs}; this is {named}, where it may fail. Update macOS.")
    return MatrixUnits("neural")


def has_accelerators(chip_name: str, architecture: str | None) -> bool:
    if found := re.fullmatch(r"applegpu_g(\d+)([a-z])", architecture or ""):
        return int(found[1]) >= (18 if found[2] == "p" else 17)
    generation = generation_of(chip_name)
    return generation is not None and generation >= NEURAL


def wheel_tags() -> tuple[str, ...] | None:
    from importlib import metadata

    try:
        text = metadata.distribution(DISTRIBUTION).read_text("WHEEL")
    except metadata.PackageNotFoundError:
        return None
    return None if text is None else parse_tags(text)


def parse_tags(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"^Tag:\s*(\S+)\s*$", text, re.MULTILINE))


def matrix_units_of(asked: System, chip_name: str) -> MatrixUnits:
    import mlx.core as mx

    architecture = mx.device_info().get("architecture")
    version = asked.text("kern.osproductversion")
    return matrix_units(wheel_tags(), version, chip_name, None if architecture is None else str(architecture))


def advice() -> str | None:
    mac = system()
    return None if mac is None else matrix_units_of(mac, chip_name(mac) or "this chip").advice


def _numbers(text: str) -> tuple[int, int]:
    major, minor, *_ = [*re.findall(r"\d+", text), "0", "0"]
    return int(major), int(minor)


# Measurements of this machine, kept in small JSON files: {what was measured, where and with what: a number}.


def store_file(name: str) -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("tokamac")) / name


def machine_key(chip: Chip, device: DeviceKind) -> str:
    cores = usable_cores() if device == "cpu" else chip.gpu_cores
    return f"{chip.name} | {cores} cores | {device} | {_versions('numpy' if device == 'cpu' else 'mlx')}"


@cache
def _versions(library: str) -> str:
    from importlib import metadata

    return f"mlx {metadata.version('mlx')} {library} {metadata.version(library)}"


def read(file: Path, key: str) -> float | None:
    return read_all(file).get(key)


def read_all(file: Path) -> dict[str, float]:
    numbers = {key: value for key, value in load(file).items() if type(value) in (int, float)}
    return {key: float(value) for key, value in numbers.items() if 0 < value < 1e6}


def keep(file: Path, values: Mapping[str, Any]) -> None:
    """Merge into a file (mode 0600) atomically; ignore write errors."""
    write(file, {**load(file), **values})


def write(file: Path, values: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(values, indent=1)
        with atomic_write(file, f".{file.stem}-") as whole:
            whole.write(text.encode())


def load(file: Path) -> dict[str, Any]:
    try:
        kept = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError):  # the last: of brackets without end
        return {}
    return kept if isinstance(kept, dict) else {}
