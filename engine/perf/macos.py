"""What macOS says of the machine: a seam to the running system, what is read from its answers, and whether it slows the chip down.

`System` is all that is ever asked. On a Mac, `Darwin` answers through libSystem, in microseconds and without starting a process: a
fork copies the page tables of a process that maps a whole model, and stalls the thread that decodes. Only the GPU's cores need a
program, once a process. Elsewhere `system()` is None. `Darwin` was not run by the tests, for want of a Mac: they play recorded
answers through `System`.

The chip is slowed down because of its heat, or by Low Power Mode. Heat counts from the thermal pressure "heavy" on: macOS's own
load advisory calls "moderate" acceptable and what is above it bad (PowerManagement, SystemLoad.c). "nominal" proves nothing: chips
were seen to slow down under it (angristan/MacThrottle#19), so a reply can be known to have been slowed, never the opposite.
"""

import ctypes
import functools
import re
import subprocess
import sys
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from ..metrics import Throttle

TIMEOUT_S = 5.0
"""What a program may take to answer."""

IOREG = ("/usr/sbin/ioreg", "-rc", "AGXAccelerator", "-d1")
PROFILER = ("/usr/sbin/system_profiler", "SPDisplaysDataType")

THERMAL_PRESSURE = "com.apple.system.thermalpressurelevel"
"""The notification whose state is 0 nominal, 1 moderate, 2 heavy, 3 trapping, 4 sleeping (OSThermalNotification.h)."""
THERMAL_HEAVY = 2

HOST_VM_INFO64 = 4
"""The flavor of ``host_statistics64`` that counts pages (mach/host_info.h)."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of the whole machine, as ``host_statistics64`` counts them. size: bytes of one.

    free includes speculative. purgeable are also among active or inactive. file_backed and anonymous split what is not wired.
    compressor: pages that hold compressed ones.
    """

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
    """A running macOS. None: it does not say."""

    def integer(self, name: str) -> int | None:
        """Return a number of ``sysctlbyname``."""

    def text(self, name: str) -> str | None:
        """Return a text of ``sysctlbyname``."""

    def pages(self) -> Pages | None:
        """Return what the machine's memory holds."""

    def notified(self, name: str) -> int | None:
        """Return the state of a notification of libnotify, such as the thermal pressure."""

    def low_power(self) -> bool | None:
        """Return whether Low Power Mode is on."""

    def output(self, *command: str) -> str | None:
        """Return what a program prints. Starts a process: never within a reply."""


class _VMStatistics64(ctypes.Structure):
    """``struct vm_statistics64`` of mach/vm_statistics.h, up to the fields that every supported macOS fills."""

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
    """macOS as libSystem answers for it. Not run by the tests."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("/usr/lib/libSystem.B.dylib")
        # size_t arguments take a whole register: a plain int would leave its upper half undefined.
        self._lib.sysctlbyname.argtypes = (
            ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t,
        )  # fmt: skip
        self._lib.mach_host_self.restype = ctypes.c_uint32
        self._host = self._lib.mach_host_self()  # each call takes a reference to the port: once is enough

    def integer(self, name: str) -> int | None:
        """A number of ``sysctlbyname``."""
        raw = self._sysctl(name)
        return int.from_bytes(raw, sys.byteorder) if raw is not None and len(raw) in (4, 8) else None

    def text(self, name: str) -> str | None:
        """A text of ``sysctlbyname``."""
        raw = self._sysctl(name)
        return None if raw is None else raw.rstrip(b"\0").decode("utf-8", "replace")

    def pages(self) -> Pages | None:
        """What ``host_statistics64`` counts."""
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
        """The state of a notification, registered for this one look."""
        token, state = ctypes.c_int(), ctypes.c_uint64()
        if self._lib.notify_register_check(name.encode(), ctypes.byref(token)):
            return None
        try:
            failed = self._lib.notify_get_state(token, ctypes.byref(state))
        finally:
            self._lib.notify_cancel(token)
        return None if failed else int(state.value)

    def low_power(self) -> bool | None:
        """``NSProcessInfo.isLowPowerModeEnabled``, through the Objective-C runtime."""
        objc = ctypes.CDLL("/usr/lib/libobjc.A.dylib")
        ctypes.CDLL("/System/Library/Frameworks/Foundation.framework/Foundation")
        for function in (objc.objc_getClass, objc.sel_registerName):
            function.restype, function.argtypes = ctypes.c_void_p, (ctypes.c_char_p,)

        def send(receiver: int, selector: bytes, result: Any) -> Any:
            call = ctypes.CFUNCTYPE(result, ctypes.c_void_p, ctypes.c_void_p)(("objc_msgSend", objc))
            return call(receiver, objc.sel_registerName(selector))

        info = send(objc.objc_getClass(b"NSProcessInfo"), b"processInfo", ctypes.c_void_p)
        return bool(send(info, b"isLowPowerModeEnabled", ctypes.c_bool)) if info else None

    def output(self, *command: str) -> str | None:
        """What a program prints."""
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
    """Return the macOS this process runs on; None elsewhere."""
    return Darwin() if sys.platform == "darwin" else None


def run(*command: str) -> str | None:
    """Return what a program prints; None where it is missing, fails or takes longer than ``TIMEOUT_S``.

    An absolute path and ``close_fds=False`` let Python spawn it without a fork.
    """
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=True, close_fds=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace")


def parse_ioreg_cores(text: str) -> int | None:
    """Return ``gpu-core-count`` from `ioreg -rc AGXAccelerator -d1`; the largest where several accelerators are listed."""
    counts = [int(count) for count in re.findall(r'^\s*"gpu-core-count"\s*=\s*(\d+)\s*$', text, re.MULTILINE)]
    return max(counts, default=None)


def parse_profiler_cores(text: str) -> int | None:
    """Return the GPU cores from `system_profiler SPDisplaysDataType`.

    Only a number alone counts: SPHardwareDataType has a line of the same name for the CPU, "16 (12 performance and …)".
    """
    found = re.search(r"^\s*Total Number of Cores:\s*(\d+)\s*$", text, re.MULTILINE | re.IGNORECASE)
    return int(found.group(1)) if found else None


def parse_chip_name(text: str) -> str | None:
    """Return the chip's name from the sysctl ``machdep.cpu.brand_string``."""
    return text.split("(", maxsplit=1)[0].strip() or None


def chip_name(asked: System) -> str | None:
    """Return the chip's name; None where the system does not say."""
    text = asked.text("machdep.cpu.brand_string")
    return parse_chip_name(text) if text else None


@functools.lru_cache(maxsize=1)
def gpu_cores(asked: System) -> int | None:
    """Return how many GPU cores the chip has: they tell its bins apart. Starts a process or two, once."""
    sources: tuple[tuple[tuple[str, ...], Callable[[str], int | None]], ...] = (
        (IOREG, parse_ioreg_cores),
        (PROFILER, parse_profiler_cores),
    )
    for command, parse in sources:
        if (text := asked.output(*command)) and (cores := parse(text)):
            return cores
    return None


def throttled(asked: System) -> bool | None:
    """Return whether the system holds the chip back because of its heat; None where it does not tell."""
    level = asked.notified(THERMAL_PRESSURE)
    return None if level is None else level >= THERMAL_HEAVY


EVERY_S = 5.0
"""A chip takes longer to get hot."""


class ThrottleWatch:
    """Remembers for one reply what slowed the chip down (``seen``). mac: None where no system tells."""

    def __init__(self, mac: System | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.seen: tuple[Throttle, ...] = ()
        self._from_start: tuple[Throttle, ...] = ()
        self._mac = mac
        self._clock = clock
        self._due_s: float | None = None

    def look(self, *, now: bool = False) -> None:
        """Ask, if the last time is long enough ago; or in any case."""
        if self._mac is None or (not now and self._due_s is not None and self._clock() < self._due_s):
            return
        now_on = throttles(self._mac)
        if self._due_s is None:
            self._from_start = now_on
        self.seen += tuple(each for each in now_on if each not in self.seen)
        self._due_s = self._clock() + EVERY_S

    @property
    def explains_gaps(self) -> tuple[Throttle, ...]:
        """What may have made single gaps longer than others: heat, and a mode that was not on from the first token."""
        return tuple(each for each in self.seen if each == "thermal" or each not in self._from_start)


def throttles(mac: System) -> tuple[Throttle, ...]:
    """Return what the system says now that it slows the chip down for; nothing where it does not tell."""
    states: dict[Throttle, bool | None] = {"thermal": throttled(mac), "low power": mac.low_power()}
    return tuple(name for name, on in states.items() if on)
