"""What chip this is, what its maker's table says of it, and whether MLX uses its neural accelerators.

The table is assets/chips.json; every row names its source and a blank stays unknown. One name can mean several bandwidths (M3
Max, M4 Max and M5 Max come in two bins), so a chip is found by its name *and* its GPU cores.

Apple's chips multiply matrices on neural accelerators from the M5 on, which makes prefill three to four times as fast. That takes
macOS 26.2 or later and an MLX built for it (``is_nax_available`` in mlx/backend/metal/device.cpp, and the conditions of
mlx/backend/metal/CMakeLists.txt). The wheels of mlx-metal for macOS 14 and 15 lack these kernels, and pip takes one of those
where Python itself was built with an older SDK and so reports macOS 16 (python/cpython#135675). An installed wheel names its
target in its Tag; a build from elsewhere has none, and then nothing is known of its kernels.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Literal

from ..device import DeviceKind
from ..kv.attention_kernel import AttentionDevice
from .macos import System

Source = Literal["table", "measured", "unknown"]

Units = Literal["neural", "shaders"]
"""What multiplies matrices on an Apple GPU."""


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip as far as it is known. None is unknown, never guessed.

    bandwidth_gbs: memory bandwidth, 10^9 bytes a second; ``source`` says where it comes from, ``citation`` who published it.
    fp16_tflops: dense half-precision peak, 10^12 operations a second; nax_fp16_tflops with neural accelerators, an estimate.
    peak_source: where fp16_tflops comes from. units: what multiplies matrices here; None is whatever a chip of this name can, as
    for one that is only named. other_bin: the table has no bin with these cores: the bandwidth is others'. condition:
    how a bandwidth was measured, or why none is known, for people.
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
        """Its name, with its GPU where there are several."""
        return chip_label(self.name, self.gpu_cores)


def chip_label(name: str, gpu_cores: int | None) -> str:
    """Return what a chip is called, with its GPU where there are several: ``Apple M1, 7-core GPU``."""
    return name if gpu_cores is None else f"{name}, {gpu_cores}-core GPU"


@functools.cache
def table() -> tuple[Mapping[str, Any], ...]:
    """Return the rows of the chip table, in its order."""
    text = resources.files("tokamac.assets").joinpath("chips.json").read_text(encoding="utf-8")
    return tuple(json.loads(text))


def plain_name(name: str) -> str:
    """Return a chip's name without what virtual machines and the table append: ``Apple M1 (Virtual)`` → ``Apple M1``."""
    return name.split("(", maxsplit=1)[0].strip()


def lookup(name: str, gpu_cores: int | None = None) -> Chip:
    """Return what the table knows of a chip. Where bins differ and the cores don't tell, the value is None.

    Cores that no row has get what all bins have in common, marked so: of M5 Ultra and M6 the table has a single bin.
    """
    rows = [row for row in table() if plain_name(row["chip"]) == plain_name(name)]
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
    """Return the chip MLX computes on. Quick; measures nothing (see bandwidth.with_bandwidth). Touches the device.

    The macOS part needs a Mac and has only been tested on recorded outputs.
    """
    from ..device import device_kind
    from . import macos

    if (mac := macos.system()) is not None:
        chip = lookup(macos.chip_name(mac) or "unknown chip", macos.gpu_cores(mac))
        units = matrix_units_of(mac, chip.name).units if has_accelerators(chip.name, None) else None
        return replace(chip, units=units)
    import mlx.core as mx

    name = str(mx.device_info().get("device_name") or "unknown device")
    # A CPU's name stands for boards of very different memory: never in the table.
    return Chip(name, None, None, None, "unknown") if device_kind() == "cpu" else lookup(name)


def _common(rows: Sequence[Mapping[str, Any]], key: str) -> Any:
    """Return the value all rows share, None where they differ or there are none."""
    values = {row[key] for row in rows}
    return values.pop() if len(values) == 1 else None


NEURAL = 5
"""The generation from which MLX multiplies matrices on the GPU's neural accelerators (macOS 26.2 and later)."""


def units_of(chip: Chip) -> str:
    """Return what multiplies matrices: "shaders", or "neural" accelerators. Of a chip that is only named, what it can."""
    if chip.units is not None:
        return chip.units
    generation = generation_of(chip.name)
    return "neural" if generation is not None and generation >= NEURAL else "shaders"


def generation_of(name: str) -> int | None:
    """Return the generation of an Apple M chip by its name; None for another chip."""
    found = re.match(r"Apple M(\d+)\b", name)
    return int(found.group(1)) if found else None


DISTRIBUTION = "mlx-metal"

FROM = (26, 2)
"""The macOS from which there are accelerators to use."""

REINSTALL = "SYSTEM_VERSION_COMPAT=0 pip install --force-reinstall mlx mlx-metal"


@dataclass(frozen=True, slots=True)
class MatrixUnits:
    """What multiplies matrices here. advice: how to have accelerators used that are not; None where there is nothing to do."""

    units: Units
    advice: str | None = None


def attention_device(kind: DeviceKind, chip: Chip | None) -> AttentionDevice:
    """Return what attention runs on, as far as it decides the kernel. chip: None is one without accelerators."""
    return AttentionDevice(kind, neural=kind == "metal" and chip is not None and units_of(chip) == "neural")


def matrix_units(
    tags: Sequence[str] | None, version: str | None, chip_name: str, architecture: str | None
) -> MatrixUnits:
    """Return what multiplies matrices, and what to do where it is not what the chip could.

    tags: of the installed wheel; None where MLX came without one. version: of macOS, "26.2"; None is unknown, and then the wheel
    alone decides. architecture: as MLX names it, "applegpu_g17s"; None takes the chip's name.
    """
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
    """Whether the GPU has neural accelerators: by its architecture, as MLX asks, else by the chip's name."""
    if found := re.fullmatch(r"applegpu_g(\d+)([a-z])", architecture or ""):
        return int(found[1]) >= (18 if found[2] == "p" else 17)
    generation = generation_of(chip_name)
    return generation is not None and generation >= NEURAL


def wheel_tags() -> tuple[str, ...] | None:
    """Return the tags of the installed wheel of MLX's Metal backend; None where it is none."""
    from importlib import metadata

    try:
        text = metadata.distribution(DISTRIBUTION).read_text("WHEEL")
    except metadata.PackageNotFoundError:
        return None
    return None if text is None else parse_tags(text)


def parse_tags(text: str) -> tuple[str, ...]:
    """Return the tags that a wheel's WHEEL file names."""
    return tuple(re.findall(r"^Tag:\s*(\S+)\s*$", text, re.MULTILINE))


def matrix_units_of(asked: System, chip_name: str) -> MatrixUnits:
    """Return what multiplies matrices on this Mac. Touches the device."""
    import mlx.core as mx

    architecture = mx.device_info().get("architecture")
    version = asked.text("kern.osproductversion")
    return matrix_units(wheel_tags(), version, chip_name, None if architecture is None else str(architecture))


def advice() -> str | None:
    """Return what to do about this machine's MLX, in a sentence; None where there is nothing to do. Touches the device."""
    from . import macos

    mac = macos.system()
    return None if mac is None else matrix_units_of(mac, macos.chip_name(mac) or "this chip").advice


def _numbers(text: str) -> tuple[int, int]:
    """Return major and minor of 26_0, 26.2 or 26.2.1."""
    major, minor, *_ = [*re.findall(r"\d+", text), "0", "0"]
    return int(major), int(minor)
