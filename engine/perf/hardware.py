"""Whether MLX multiplies matrices on the GPU's neural accelerators, which Apple's chips have from the M5 on: three to four times as
fast in prefill.

It takes a macOS from 26.2 on and a library that was built for one (``is_nax_available`` in mlx/backend/metal/device.cpp, and the
conditions of mlx/backend/metal/CMakeLists.txt). The wheels of mlx-metal for macOS 14 and 15 have no such kernels, and pip takes one
of those where Python itself was built with an older SDK and so reports macOS 16 (python/cpython#135675). What is installed says its
wheel's Tag. A build from elsewhere has none, and then nothing is known of its kernels.

What chip this is, and what its maker's table says of it.

The table is assets/chips.json; every row names its source and a blank stays unknown. One name can mean several bandwidths
(M3 Max, M4 Max and M5 Max come in two bins), so a chip is found by its name *and* its GPU cores.

The models people run, by name: their shapes, and the repositories that hold them packed for MLX.

The table is assets/models.json. A config there has the fields that decide what a model costs and what its caches keep, no others;
every row names the source of each, and what was in none is null. So a model can be weighed before it is downloaded.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata, resources
from typing import Any, Literal

from tokamac.engine.device import DeviceKind
from tokamac.engine.kv.attention_kernel import AttentionDevice
from tokamac.engine.model.config import normalise
from tokamac.engine.perf.config_cost import Packing, cost_of_config
from tokamac.engine.perf.cost import Cost, text_config
from tokamac.engine.perf.macos import System

Source = Literal["table", "measured", "unknown"]

Units = Literal["neural", "shaders"]
"""What multiplies matrices on an Apple GPU."""


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
    from tokamac.engine.perf import macos

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
    from tokamac.engine.perf import macos

    mac = macos.system()
    return None if mac is None else matrix_units_of(mac, macos.chip_name(mac) or "this chip").advice


def _targets(tags: Sequence[str]) -> list[str]:
    """Return the systems that wheels were built for: "26_0" of py3-none-macosx_26_0_arm64."""
    return [found[1] for tag in tags if (found := re.search(r"macosx_(\d+_\d+)", tag))]


def _numbers(text: str) -> tuple[int, int]:
    """Return major and minor of 26_0, 26.2 or 26.2.1."""
    major, minor, *_ = [*re.findall(r"\d+", text), "0", "0"]
    return int(major), int(minor)


@dataclass(frozen=True, slots=True)
class Repository:
    """A packed copy of a model on the hub.

    packing: as mlx-lm's conversion packs; None where ``quantization`` says it module by module, as config.json does.
    stores_head: it holds a tied output head a second time. published_bytes: of all its files, to three digits or better.
    memory_gb: the sizes of memory it is recommended for.
    """

    id: str
    packing: Packing | None
    quantization: Mapping[str, Any] | None
    stores_head: bool
    published_bytes: int | None
    memory_gb: tuple[int, ...]

    @property
    def tail(self) -> str:
        """The id without its owner."""
        return self.id.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model. config: normalised, not packed; None where no source gives it.

    tokenizer_bytes: of the files beside the weights. tower_parameters: vision and audio weights that repositories hold in 16 bits
    and the engine does not load; projector_parameters: more of those, packed like the rest. source: where the config was read.
    """

    name: str
    aliases: tuple[str, ...]
    config: Mapping[str, Any] | None
    repositories: tuple[Repository, ...]
    tokenizer_bytes: int | None
    tower_parameters: int
    projector_parameters: int
    source: str
    note: str

    def config_of(self, repository: Repository) -> dict[str, Any] | None:
        """Return the config of a repository: the model's, with its packing where modules differ and the head it stores."""
        if self.config is None:
            return None
        config = dict(self.config)
        if repository.quantization is not None:
            config["quantization"] = _per_layer(repository.quantization, text_config(config)["num_hidden_layers"])
        return _untied(config) if repository.stores_head else config

    def cost_of(self, repository: Repository) -> Cost | str:
        """Return what a repository's model costs once loaded, or the reason why it can't be said."""
        config = self.config_of(repository)
        if config is None:
            return f"the config of {self.name} is not known here"
        return cost_of_config(config, packing=repository.packing)

    def repository(self, name: str) -> Repository | None:
        """Return the repository with this id, or with this id less its owner."""
        wanted = name.casefold()
        return next((each for each in self.repositories if wanted in (each.id.casefold(), each.tail.casefold())), None)


@cache
def catalogue() -> tuple[CatalogueEntry, ...]:
    """Return the whole table."""
    text = resources.files("tokamac.assets").joinpath("models.json").read_text(encoding="utf-8")
    return tuple(_entry(row) for row in json.loads(text))


def find(name: str) -> CatalogueEntry | None:
    """Return the model of this name, alias or repository id, with or without its owner; case does not matter."""
    return _by_name().get(name.casefold())


def download_bytes(entry: CatalogueEntry, repository: Repository) -> int | None:
    """Return the bytes of a repository's files, computed: weights, towers, tokenizer. None where any of them is unknown."""
    cost = entry.cost_of(repository)
    return None if isinstance(cost, str) else files_bytes(entry, repository, cost.weight_bytes)


def files_bytes(entry: CatalogueEntry, repository: Repository, weight_bytes: int) -> int | None:
    """Return the same where the text model's weights are known already."""
    if entry.tokenizer_bytes is None:
        return None
    projector = 0.0
    if entry.projector_parameters and repository.packing and repository.packing.bits:
        # Only affine repositories have towers here: each group adds a scale and a bias of two bytes.
        projector = entry.projector_parameters * (repository.packing.bits / 8 + 4 / repository.packing.group_size)
    return weight_bytes + 2 * entry.tower_parameters + round(projector) + entry.tokenizer_bytes


@cache
def _by_name() -> dict[str, CatalogueEntry]:
    names: dict[str, CatalogueEntry] = {}
    for entry in catalogue():
        repositories = (name for each in entry.repositories for name in (each.id, each.tail))
        for name in (entry.name, *entry.aliases, *repositories):
            names[name.casefold()] = entry
    return names


def _entry(row: Mapping[str, Any]) -> CatalogueEntry:
    config = row["config"]
    return CatalogueEntry(
        name=row["name"],
        aliases=tuple(row["aliases"]),
        config=normalise(config) if config is not None else None,
        repositories=tuple(_repository(each) for each in row["repositories"]),
        tokenizer_bytes=row.get("tokenizer_bytes"),
        tower_parameters=row.get("tower_parameters", 0),
        projector_parameters=row.get("projector_parameters", 0),
        source=row["source"],
        note=row.get("note", ""),
    )


def _repository(row: Mapping[str, Any]) -> Repository:
    packing = row.get("packing")
    return Repository(
        id=row["id"],
        packing=Packing(**packing) if packing is not None else None,
        quantization=row.get("quantization"),
        stores_head=row.get("stores_head", False),
        published_bytes=row.get("bytes"),
        memory_gb=tuple(row.get("memory_gb", ())),
    )


def _per_layer(quantization: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return config.json's entries, one a module: a star in the table stands for every layer's number."""
    return {
        key.replace("*", str(layer)): entry
        for key, entry in quantization.items()
        for layer in range(layers if "*" in key else 1)
    }


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("text_config")
    if isinstance(nested, dict):
        return {**config, "text_config": {**nested, "tie_word_embeddings": False}}
    return {**config, "tie_word_embeddings": False}
