"""What chip this is, and what its maker's table says of it.

The table is assets/chips.json; every row names its source and a blank stays unknown. One name can mean several bandwidths
(M3 Max, M4 Max and M5 Max come in two bins), so a chip is found by its name *and* its GPU cores.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Literal

Source = Literal["table", "measured", "unknown"]

Units = Literal["neural", "shaders"]
"""What multiplies matrices on an Apple GPU (neural.py)."""


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip as far as it is known. None is unknown, never guessed.

    bandwidth_gbs: memory bandwidth, 10^9 bytes a second; ``source`` says where it comes from, ``citation`` who published it.
    fp16_tflops: dense half-precision peak, 10^12 operations a second; nax_fp16_tflops with neural accelerators, an estimate.
    peak_source: where fp16_tflops comes from. units: what multiplies matrices here; None is whatever a chip of this name can, as
    for one that is only named. other_bin: the table has no bin with these cores: the bandwidth is others'.
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
    from tokamac.engine.device import device_kind
    from tokamac.engine.limits import macos

    if (mac := macos.system()) is not None:
        from tokamac.engine.limits.neural import has_accelerators, matrix_units_of

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
