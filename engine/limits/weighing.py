"""A model on the scales: its arrays, from its config or from its files, as a device would hold them. No weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.engine.device import DeviceKind
from tokamac.engine.errors import ModelError
from tokamac.engine.limits import memory
from tokamac.engine.limits.config_cost import Packing, cost_of_hollow
from tokamac.engine.limits.cost import Cost, Form, Tensor, cost_of_folder, tensors_of
from tokamac.engine.limits.hardware import Chip
from tokamac.engine.limits.kv_cost import names_unknown_layers, value_bytes_of
from tokamac.engine.limits.leaves import ADDED
from tokamac.engine.limits.neural import attention_device
from tokamac.engine.limits.work import module_of
from tokamac.engine.options import KVSpec

if TYPE_CHECKING:
    from tokamac.engine.adapters import Adapter
    from tokamac.engine.kv.plan import CachePlan
    from tokamac.engine.limits.peak_shape import Order, Shape
    from tokamac.engine.limits.work import Work

MODELS_KEPT = 12
"""Models that stay on the scales: one in all its packings, which are asked for again with each other context, cache or chip."""

ORDERS: "Mapping[Form, Order]" = {"unpacked": "at once", "float32": "by layer", "stored": "ahead"}
"""In which order arrays are computed (peak_shape.Order), by the form of the weights."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """A model as one device holds it. stored: in files; held: in memory, in ``form``. module: mlx-lm's, hollow."""

    config: Mapping[str, Any]
    stored: Cost
    held: Cost
    form: Form
    value_bytes: int
    module: Any = field(repr=False, compare=False)
    _planned: "dict[KVSpec, tuple[CachePlan, Work]]" = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def planned(self, kv: KVSpec) -> "tuple[CachePlan, Work]":
        """Return the plan of its caches and its work with them. Raises OptionError for a flag that they can't take."""
        if kv not in self._planned:
            plan = self.plan(kv)
            self._planned[kv] = plan, self.work(plan)
        return self._planned[kv]

    def plan(self, kv: KVSpec) -> "CachePlan":
        """Return the plan of its caches. Raises OptionError for a flag that they can't take."""
        from tokamac.engine.kv import plan_caches

        return plan_caches(self.module, self.config, kv)

    def work(self, plan: "CachePlan") -> "Work":
        """Return what it asks of a machine."""
        from tokamac.engine.limits.work import work_of

        return work_of(self.module, self.config, self.held, plan)

    def shape(self, plan: "CachePlan", device: DeviceKind, chip: Chip | None = None) -> "Shape":
        """Return what its peak of memory depends on. chip: None is one without neural accelerators."""
        from tokamac.engine.limits.peak_shape import shape_of

        return shape_of(
            self.config,
            plan,
            weights=self.held.weight_bytes,
            value_bytes=self.value_bytes,
            order=ORDERS[self.form],
            device=attention_device(device, chip),
        )


def weigh(
    config: Mapping[str, Any],
    device: DeviceKind,
    memory_bytes: int | None,
    *,
    packing: Packing | None = None,
    folder: Path | None = None,
    adapter: "Adapter | None" = None,
) -> Weighed | str:
    """Return the model of a normalised config on a device of so much memory, or the reason why it can't be weighed.

    packing: instead of the config's own. folder: has the model's files, whose headers say what is stored, unless it is repacked.
    adapter: added to it; raises ModelUnsupportedError where it does not fit.
    """
    if folder is not None and packing is None:
        return _weigh(config, device, memory_bytes, None, folder, adapter)  # files come and go
    if adapter is not None:
        return _weigh(config, device, memory_bytes, packing, None, adapter)
    return _weigh_shape(_Shape(repr(config), config), device, memory_bytes, packing)


@dataclass(frozen=True, slots=True)
class _Shape:
    """A config, known by all that is written in it."""

    text: str
    config: Mapping[str, Any] = field(compare=False)


@lru_cache(maxsize=MODELS_KEPT)
def _weigh_shape(shape: _Shape, device: DeviceKind, memory_bytes: int | None, packing: Packing | None) -> Weighed | str:
    return _weigh(shape.config, device, memory_bytes, packing, None)


def _weigh(  # noqa: PLR0917
    config: Mapping[str, Any],
    device: DeviceKind,
    memory_bytes: int | None,
    packing: Packing | None,
    files: Path | None,
    adapter: "Adapter | None" = None,
) -> Weighed | str:
    if names_unknown_layers(config):
        return "its config names kinds of layers that are not known here"
    value_bytes = 2 if packing else value_bytes_of(config)
    try:
        module = module_of(config, packing=packing)
    except ModelError as error:
        return error.message
    added = _add(adapter, module, config)
    try:
        stored = _cost(module, config, "stored", files, added)
        form = form_on(stored, device, memory_bytes)
        if form == "stored":
            return Weighed(config, stored, stored, form, value_bytes, module)
        held = _cost(module, config, form, files, added)
        module = module_of(config, packing=packing, form=form)
        _add(adapter, module, config)
    except ModelError as error:
        return error.message
    return Weighed(config, stored, held, form, 4, module)


def form_on(stored: Cost, device: DeviceKind, memory_bytes: int | None) -> Form:
    """Return how the engine would hold these weights (engine/cpu.py decides the same from the modules)."""
    if device != "cpu":
        return "stored"
    from tokamac.engine.cpu import MEMORY_SHARE

    stays = ("experts", "norms and other")
    dense = 4 * sum(part.parameters for name, part in stored.parts.items() if name not in stays)
    return "unpacked" if memory_bytes is not None and dense <= MEMORY_SHARE * memory_bytes else "float32"


def form_here(stored: Cost) -> Form:
    """Return how the engine would hold these weights on this machine."""
    from tokamac.engine.device import device_kind

    return form_on(stored, device_kind(), memory.machine_total())


def _add(adapter: "Adapter | None", module: Any, config: Mapping[str, Any]) -> list[Tensor]:
    """Put an adapter into a hollow module, and return its tensors."""
    if adapter is None:
        return []
    from tokamac.engine.adapters import attach, changes_of

    attach(module, changes_of(adapter, module, config), hollow=True)
    return [tensor for tensor in tensors_of(module) if tensor.name.endswith(ADDED)]


def _cost(module: Any, config: Mapping[str, Any], form: Form, folder: Path | None, added: list[Tensor]) -> Cost:
    if folder is None:
        return cost_of_hollow(module, config, form=form)
    return cost_of_folder(folder, config, form=form, added=added)
