"""Where a model would run: this machine, or one that is only named; what is known of it, and what is not.

What macOS lets a GPU use is not tabulated: it moves with the system's version and settings, and the machine itself is asked. Of a
Mac that is only named, the memory is known, and that two thirds of it may be used: the least that any is reported to allow.
"""

import difflib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..device import DeviceKind
from ..errors import OptionError
from . import memory
from .bandwidth import LARGEST, with_bandwidth
from .hardware import Chip, detect, lookup, plain_name, table
from .measurement_store import machine_key
from .memory import MemoryFit
from .roofline import Fitted, HostLimited, LatencyModel, fitted

if TYPE_CHECKING:
    from ..kv.plan import CachePlan
    from .workload import Workload


GIB = 1 << 30
"""Memory is sold in GiB, whatever its maker writes."""

KNOWN_CHIPS = "It has Apple M1 to M6 with Pro, Max and Ultra, and a few NVIDIA cards."

SURE_SHARE = 2 / 3
"""Of a Mac's memory, what its GPU may surely use. Reported by default: 10.67 of 16 GB (exo-explore/exo#1672), 11.84 of 16 GB
(AlexsJones/llmfit#754), 107.5 of 128 GiB (antirez/ds4#893); "usually 0.75" (ml-explore/mlx#64)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, as far as it is known. Bytes; None is unknown.

    budget_bytes: what the model may use: read on this machine, else what is certain. latency: how fast kernels are on its chip,
    where that was published. local: it is this machine, so measurements made here apply. by_size: the chip's bandwidth was measured
    for one size of model, and ``reading`` gives that for another. available_bytes: what no other program has to give way for now.
    """

    chip: Chip
    memory_bytes: int | None
    budget_bytes: int | None
    latency: LatencyModel | None
    device: DeviceKind
    local: bool = False
    by_size: bool = False
    available_bytes: int | None = None

    def reading(self, bytes_read: int) -> "Machine":
        """Return this machine with its bandwidth for a model that reads ``bytes_read`` a step.

        A table has one for all. A measured one is kept by size, and measured now where it was not (up to 1.5 s).
        """
        if not self.by_size:
            return self
        unmeasured = replace(self.chip, bandwidth_gbs=None, source="unknown")
        return replace(self, chip=with_bandwidth(unmeasured, bytes_read))

    def latency_of(self, work: "Workload", plan: "CachePlan", *, by_kernels: bool) -> LatencyModel | None:
        """Return the latency of a model: as published, else as measured here and kept. Measures nothing.

        Of a CPU's own kernels it is that of whole steps, and with rounded rows, where such were timed.
        """
        from .timing import LatencyProfiler, TimedModel

        if isinstance(self.latency, Fitted):
            return HostLimited(self.latency)
        if self.latency is not None or not self.local:
            return self.latency
        exact = TimedModel(work, plan, by_kernels, self.device, machine_key(self.chip, self.device))
        choices = ((True, True), (True, False), (False, True), (False, False)) if by_kernels else ((False, False),)
        forms = (replace(exact, stepped=stepped, rounded=rounded) for stepped, rounded in choices)
        return next(filter(None, (LatencyProfiler(each).latency() for each in forms)), None)

    def fit(self, *, weights: int, kv: int, working: int) -> MemoryFit:
        """Return whether these bytes fit. Between what is sure and all of a Mac's memory, it is unknown."""
        budget, available = self.budget_bytes, self.available_bytes
        fit = memory.fit(weights=weights, kv=kv, working=working, budget=budget, available=available)
        unsure = self.memory_bytes is not None and fit.total <= self.memory_bytes and not self.local
        return replace(fit, fits=None) if fit.fits is False and unsure else fit

    @property
    def budget_rule(self) -> str | None:
        """One sentence on the budget, where it was not read; None where it was, or is unknown."""
        if self.local or self.budget_bytes is None or self.memory_bytes is None:
            return None
        if self.device == "cuda":
            return "all of the card's memory"
        total, sure = self.memory_bytes / 1e9, self.budget_bytes / 1e9
        return (
            f"macOS lets a GPU use two thirds of {total:.1f} GB ({sure:.1f} GB) or more; only that Mac knows how much"
        )


def here(bytes_read: int = LARGEST, *, limit: int | None = None) -> Machine:
    """Return this machine. Where no table knows its bandwidth, it is measured once for models that read
    ``bytes_read`` a step.

    For another model it is that of its own size: ``reading``. limit: bytes that may be used, where the user set them.
    """
    from ..device import device_kind

    device = device_kind()
    found = detect()
    chip = _with_peak(with_bandwidth(found, bytes_read), device)
    latency, by_size = fitted(chip), found.bandwidth_gbs is None
    return Machine(
        chip,
        memory.device_total(),
        memory.array_budget() if limit is None else limit,
        latency,
        device,
        local=True,
        by_size=by_size,
        available_bytes=memory.available(),
    )


def elsewhere(chip_name: str, gpu_cores: int | None = None, memory_gb: float | None = None) -> Machine:
    """Return a machine with a chip of the table. memory_gb: as its maker says it, that is in GiB.

    Raises OptionError for a chip that is not in the table, and where only the GPU cores tell two bandwidths apart.
    """
    name = _named(chip_name)
    rows = (row for row in table() if plain_name(row["chip"]) == name)
    bins = [row["gpu_cores"] for row in rows if row["gpu_cores"] is not None]
    if gpu_cores is not None and not bins:
        raise OptionError(f"--gpu-cores does not apply to {name}", "Leave it out.")
    if gpu_cores is not None and gpu_cores not in bins:
        known = ", ".join(map(str, bins))
        raise OptionError(f"no {name} in the table has {gpu_cores} GPU cores", f"Known: {known}.")
    chip = lookup(name, gpu_cores)
    if chip.bandwidth_gbs is None:
        cores = " or ".join(map(str, bins))
        raise OptionError(f"{name} has several memory bandwidths", f"Say how many GPU cores it has: {cores}.")
    return _machine(chip, memory_gb)


def everywhere(memory_gb: float | None = None) -> tuple[Machine, ...]:
    """Return a machine for every chip of the table, in its order. memory_gb: of the Macs; a card comes with its own."""
    chips = [lookup(row["chip"], row["gpu_cores"]) for row in table()]
    return tuple(_machine(chip, memory_gb if _is_apple(chip) else None) for chip in chips)


def _with_peak(chip: Chip, device: DeviceKind) -> Chip:
    """The chip with the peak of its arithmetic: the table's, else the one measured and kept, if it was."""
    from .timing import kept_tflops

    if chip.fp16_tflops is not None or (tflops := kept_tflops(machine_key(chip, device))) is None:
        return chip
    return replace(chip, fp16_tflops=tflops, peak_source="measured")


def _machine(chip: Chip, memory_gb: float | None) -> Machine:
    apple = _is_apple(chip)
    gb = memory_gb if memory_gb is not None or apple else _card_memory_gb(chip.name)
    total = None if gb is None else round(gb * GIB)
    budget = total if total is None or not apple else round(SURE_SHARE * total)
    return Machine(chip, total, budget, fitted(chip), "metal" if apple else "cuda")


def _is_apple(chip: Chip) -> bool:
    return chip.name.startswith("Apple")


def _named(asked: str) -> str:
    """Return the table's name for a chip; its maker and its case may be left out. Raises OptionError."""
    names = dict.fromkeys(plain_name(row["chip"]) for row in table())
    wanted = " ".join(asked.split()).casefold()
    for name in names:
        if wanted in (name.casefold(), name.partition(" ")[2].casefold()):
            return name
    short = {name.partition(" ")[2].casefold(): name for name in names}
    close = difflib.get_close_matches(wanted.removeprefix("apple ").removeprefix("nvidia "), short, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(short[each] for each in close)}?" if close else KNOWN_CHIPS
    raise OptionError(f"no chip {asked!r} is in the table", hint)


def _card_memory_gb(name: str) -> float | None:
    """Return the memory of a card, which comes in one size only."""
    sizes = {row["memory_gb"] for row in table() if plain_name(row["chip"]) == name}
    size = str(sizes.pop()) if len(sizes) == 1 else ""
    return float(size) if size.isdecimal() else None
