"""Whether MLX multiplies matrices on the GPU's neural accelerators, which Apple's chips have from the M5 on: three to four times as
fast in prefill.

It takes a macOS from 26.2 on and a library that was built for one (``is_nax_available`` in mlx/backend/metal/device.cpp, and the
conditions of mlx/backend/metal/CMakeLists.txt). The wheels of mlx-metal for macOS 14 and 15 have no such kernels, and pip takes one
of those where Python itself was built with an older SDK and so reports macOS 16 (python/cpython#135675). What is installed says its
wheel's Tag. A build from elsewhere has none, and then nothing is known of its kernels.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from tokamac.engine.device import DeviceKind
from tokamac.engine.kv.attention_kernel import AttentionDevice
from tokamac.engine.limits.fitted import NEURAL, generation_of, units_of
from tokamac.engine.limits.hardware import Chip, Units
from tokamac.engine.limits.macos import System

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
    built = max((_numbers(tag) for tag in _targets(tags)), default=(0, 0))
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
    from tokamac.engine.limits import macos

    mac = macos.system()
    return None if mac is None else matrix_units_of(mac, macos.chip_name(mac) or "this chip").advice


def _targets(tags: Sequence[str]) -> list[str]:
    """Return the systems that wheels were built for: "26_0" of py3-none-macosx_26_0_arm64."""
    return [found[1] for tag in tags if (found := re.search(r"macosx_(\d+_\d+)", tag))]


def _numbers(text: str) -> tuple[int, int]:
    """Return major and minor of 26_0, 26.2 or 26.2.1."""
    major, minor, *_ = [*re.findall(r"\d+", text), "0", "0"]
    return int(major), int(minor)
