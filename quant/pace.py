"""About how long a conversion will take: a small piece of it is done for real, and the rest is taken to go at that rate.

Only reading, packing and writing are foreseen. What else a conversion does (looking at a text, measuring sensitivity, verifying)
takes as long as the model's own arithmetic, which nothing here has timed.
"""

import time
from collections.abc import Callable, Mapping

import mlx.core as mx

from tokamac.engine.limits.metrics import rate
from tokamac.quant.method import Quantizer, Round, Search
from tokamac.quant.options import Method
from tokamac.quant.plan import Plan, TensorPlan
from tokamac.quant.source import open_source

SAMPLE_S = 0.3
"""Packing is timed for no longer than this, once it has been set up."""

FIRST_VALUES = 1 << 16
GROWTH = 4
"""Each piece that is packed is so many times larger than the one before: small ones cost more a value."""

ENOUGH_VALUES = 1 << 18
"""A tensor of so many weights is packed at the rate of large ones, and read in a moment."""

_PACKERS: Mapping[Method, Callable[[], Quantizer]] = {"round": Round, "search": Search}
"""Methods that work tensor by tensor; the others run the model."""


def conversion_s(plan: Plan) -> float | None:
    """Return about how many seconds reading, packing and writing will take; None where a sample can't tell.

    Reads one tensor of the source and packs a piece of it. Writing is taken to be as fast as reading. Raises ModelError.
    """
    if plan.options.how not in _PACKERS or plan.options.target_bpw is not None:
        return None
    tensor = _sample(plan)
    weight = open_source(plan.source).weights[tensor.name]
    moved_bps = _reading_bps(weight, tensor)
    if moved_bps is None:
        return None
    moving_s = sum(each.source_bytes + each.nbytes for each in plan.tensors) / moved_bps
    values = sum(each.parameters for each in plan.tensors if each.packing is not None and not each.kept)
    if not values:
        return moving_s
    packed_vps = _packing_vps(weight, tensor, _PACKERS[plan.options.how]())
    return None if packed_vps is None else moving_s + values / packed_vps


def _sample(plan: Plan) -> TensorPlan:
    """Return the tensor to try: the smallest of those that are large enough, packed ones first."""
    packed = [tensor for tensor in plan.tensors if tensor.packing is not None and not tensor.kept]
    among = packed or list(plan.tensors)
    large = [tensor for tensor in among if tensor.parameters >= ENOUGH_VALUES]
    return min(large, key=_parameters) if large else max(among, key=_parameters)


def _parameters(tensor: TensorPlan) -> int:
    return tensor.parameters


def _reading_bps(weight: mx.array, tensor: TensorPlan) -> float | None:
    began_s = time.perf_counter()
    mx.eval(weight)
    return rate(tensor.source_bytes, time.perf_counter() - began_s)


def _packing_vps(weight: mx.array, tensor: TensorPlan, quantizer: Quantizer) -> float | None:
    """Return the values packed a second, of the largest piece there was time for."""
    assert tensor.packing is not None
    rows = weight.reshape(-1, weight.shape[-1])
    path = tensor.name.rpartition(".")[0]
    # What is compiled at the first call is not the tensor's doing.
    mx.eval(*quantizer.pack(path, rows[:1], tensor.packing))
    taken, left_s, found = max(1, FIRST_VALUES // rows.shape[1]), SAMPLE_S, None
    while True:
        began_s = time.perf_counter()
        piece = rows[:taken]
        mx.eval(*quantizer.pack(path, piece, tensor.packing))
        elapsed_s = time.perf_counter() - began_s
        found = rate(piece.size, elapsed_s)
        left_s -= elapsed_s
        if taken >= rows.shape[0] or left_s < GROWTH * elapsed_s:
            return found
        taken *= GROWTH
