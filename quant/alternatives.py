"""The ways in which each tensor of a model could be stored under a budget, and the bytes that each takes."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokamac.engine.limits.config_cost import Packing
from tokamac.quant.choices import Choices, model_rule, packable, part
from tokamac.quant.options import BITS, GROUP_SIZES, UNQUANTIZED, Options
from tokamac.quant.plan import make_plan
from tokamac.quant.source import Source

Alternatives = dict[str, tuple[Packing | None, ...]]
"""By module path, the packings a tensor may get; None is unpacked."""

ROUTER = re.compile(r"(^|\.)(router|gate|shared_expert_gate)(\.(gate|proj|layer|classifier|gate_proj|wg))?$")
"""Modules that choose experts, by their names in model classes."""

ROUTER_BITS = 8
"""The least for a router, as in mlx-lm's rules: a token sent to another expert is no small error, and the tensor is small."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of everything that could be written.

    of: by module path and packing. fixed: what is never packed. parameters: of the whole model.
    """

    of: Mapping[str, Mapping[Packing | None, int]]
    fixed: int
    parameters: int

    @property
    def smallest(self) -> int:
        """Bytes of the smallest model there is."""
        return self.fixed + sum(min(sizes.values()) for sizes in self.of.values())


def alternatives(source: Source, options: Options, least_bits: int = BITS[0]) -> Alternatives:
    """Return every packing that ``options``, the model's rules and its shapes allow, with at least ``least_bits``.

    Where mlx-lm's class of a model forbids packing, that holds. Where it asks for more bits, that holds for routers only: other
    layers are measured. What is packed in the source may stay so. The bits of the embedding and the head may be given.
    """
    return {
        path: tuple(dict.fromkeys(_packings(source, options, path, module, least_bits))) or (None,)
        for path, module in packable(source)
    }


def sizes(source: Source, options: Options, among: Alternatives) -> Sizes:
    """Return the bytes of every alternative, as a plan counts them. Reads no weight."""
    packings = dict.fromkeys(packing for each in among.values() for packing in each)
    of: dict[str, dict[Packing | None, int]] = {path: {} for path in among}
    for packing in packings:
        asked: Choices = {path: packing for path, each in among.items() if packing in each}
        plan = make_plan(source, options, asked)
        written = {tensor.name: tensor.nbytes for tensor in plan.tensors}
        for path in asked:
            of[path][packing] = written[f"{path}.weight"]
    unpacked = make_plan(source, options, {})
    fixed = sum(tensor.nbytes for tensor in unpacked.tensors if tensor.name.removesuffix(".weight") not in among)
    return Sizes(of, fixed, unpacked.parameters)


def _packings(source: Source, options: Options, path: str, module: Any, least_bits: int) -> Iterator[Packing | None]:
    own, shape = model_rule(source, path, module), source.weights[f"{path}.weight"].shape
    if not own or len(shape) < 2 or (given := _given_bits(source, options, path)) == UNQUANTIZED:
        yield None
        return
    floor = _router_bits(own) if ROUTER.search(path) else least_bits
    for bits in BITS if given is None else (given,):
        for group in GROUP_SIZES if options.group_size is None else (options.group_size,):
            if (bits >= floor or given is not None) and shape[-1] % group == 0:
                yield Packing(bits, group)
    if given is None:
        yield None
        yield from _kept(source, options, path)


def _given_bits(source: Source, options: Options, path: str) -> int | None:
    return options.embed_bits if part(source, path) in ("embedding", "head") else None


def _router_bits(own: bool | dict[str, Any]) -> int:
    return max(ROUTER_BITS, own.get("bits", 0) if isinstance(own, dict) else 0)


def _kept(source: Source, options: Options, path: str) -> Iterator[Packing]:
    """Yield the packing that the source has, unless another group size is asked for."""
    if path in source.packed:
        own = source.packed[path].packing
        if options.group_size in (None, own.group_size):
            yield own
