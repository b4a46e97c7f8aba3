"""A Mac, played on the CPU device: recorded answers of macOS, and MLX's Metal answers, so that the engine takes Metal's paths."""

import subprocess
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

from tokamac.engine import device
from tokamac.engine.perf import hardware
from tokamac.engine.perf.hardware import Pages

GIB = 1 << 30

IOREG = """+-o AGXAcceleratorG16G  <class AGXAcceleratorG16G, id 0x1, registered, matched, active, busy 0 (309 ms), retain 59>
    {
      "model" = "Apple M4"
      "gpu-core-count" = 10
    }
"""

# A 16 GB M1 Pro, macOS 14.5, at work: vm_stat's figures (whose "free" leaves the speculative pages out).
PAGES = Pages(
    size=16384, free=3451 + 292, active=211037, inactive=209842, wired=150258, speculative=292, purgeable=276,
    file_backed=122200, anonymous=298971, compressor=434189,
)  # fmt: skip

# Macs in use, by their GiB, as people published their vm_stat. That of 24 does not tell files from programs:
# speculative pages are files, and the rest is counted as programs.
CAPTURES: dict[int, Pages] = {
    8: Pages(16384, 4337 + 1606, 105685, 94309, 115653, 1606, 694, 54008, 147592, 166864),
    16: PAGES,
    24: Pages(16384, 19455 + 946, 425314, 425521, 118425, 946, 23960, 946, 850835, 545078),
    48: Pages(16384, 92431 + 72043, 1005889, 951688, 226877, 72043, 19124, 838088, 1191532, 736126),
}

RECOMMENDED_SHARE = 2 / 3  # of its memory: the least that any Mac is reported to recommend for its GPU


@dataclass(eq=False)
class RecordedMac:
    """Answers as a 16 GB Apple M4 gave them. asked: how often each kind of question came; what starts a process is "output"."""

    sysctl: dict[str, int | str] = field(
        default_factory=lambda: {
            "machdep.cpu.brand_string": "Apple M4",
            "kern.memorystatus_vm_pressure_level": 1,
            "kern.osproductversion": "26.2",
            "hw.memsize": 16 * GIB,
            "hw.pagesize": 16384,
        }
    )
    counted: Pages | None = PAGES
    states: dict[str, int] = field(default_factory=lambda: {hardware.THERMAL_PRESSURE: 0})
    low_power_mode: bool | None = False
    unplugged: bool | None = False
    outputs: dict[str, str] = field(default_factory=lambda: {hardware.IOREG[0]: IOREG})
    asked: Counter[str] = field(default_factory=Counter)

    def integer(self, name: str) -> int | None:
        self.asked["integer"] += 1
        value = self.sysctl.get(name)
        return value if isinstance(value, int) else None

    def text(self, name: str) -> str | None:
        self.asked["text"] += 1
        value = self.sysctl.get(name)
        return value if isinstance(value, str) else None

    def pages(self) -> Pages | None:
        self.asked["pages"] += 1
        return self.counted

    def notified(self, name: str) -> int | None:
        self.asked["notified"] += 1
        return self.states.get(name)

    def low_power(self) -> bool | None:
        self.asked["low_power"] += 1
        return self.low_power_mode

    def on_battery(self) -> bool | None:
        return self.unplugged

    def output(self, *command: str) -> str | None:
        self.asked["output"] += 1
        return self.outputs.get(command[0])


@dataclass(eq=False)
class MetalDevice:
    """What MLX says of the GPU, and what was asked of it. wired: the limits that were set. processes: commands started."""

    info: dict[str, Any] = field(
        default_factory=lambda: {
            "device_name": "Apple M4",
            "architecture": "applegpu_g16g",
            "max_buffer_length": 9 * GIB,
            "max_recommended_working_set_size": int(11.84e9),
            "memory_size": 16 * GIB,
            "resource_limit": 499000,
        }
    )
    wired: list[int] = field(default_factory=lambda: [0])
    processes: list[object] = field(default_factory=list)


def play_mac(patch: pytest.MonkeyPatch, mac: RecordedMac) -> None:
    """Let ``mac`` answer for macOS."""
    patch.setattr(hardware, "system", lambda: mac)


def as_captured(mac: "RecordedMac", metal: "MetalDevice", gib: int) -> None:
    """Make both the Mac of ``CAPTURES`` with so much memory."""
    mac.counted = CAPTURES[gib]
    mac.sysctl["hw.memsize"] = metal.info["memory_size"] = gib * GIB
    metal.info["max_recommended_working_set_size"] = int(RECOMMENDED_SHARE * gib * GIB)


def play_metal(patch: pytest.MonkeyPatch) -> MetalDevice:
    """Let the engine take Metal's paths on the device that computes here, and record the processes it starts."""
    metal = MetalDevice()

    def set_wired_limit(limit: int) -> int:
        metal.wired.append(limit)
        return metal.wired[-2]

    class Recorded(subprocess.Popen[Any]):
        def __init__(self, args: Any, *rest: Any, **named: Any) -> None:
            metal.processes.append(args)
            super().__init__(args, *rest, **named)

    patch.setattr(device, "_device_kind", lambda: "metal")
    patch.setattr(mx, "device_info", lambda *_: metal.info)
    patch.setattr(mx, "set_wired_limit", set_wired_limit)
    patch.setattr(subprocess, "Popen", Recorded)
    return metal
