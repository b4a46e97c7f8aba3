"""A model run over a short text with the weights of one layer in memory at a time.

    ids ─▶ embedding ─▶ layer ─▶ layer ─▶ … ─▶ norm ─▶ head ─▶ log-probabilities
           each: read its weights, compute, evaluate, let them go

The model is mlx-lm's own, called as a whole. In a copy of its modules, every layer and the big matrices at both ends answer a
call by a copy of theirs with freshly read weights (stages.py). All other parameters are lazy arrays of the first copy; so is a
layer's parameter that the model takes without calling the layer: right as well, and held until the run ends.

On a CPU a layer is cast to float32 and unpacked for its call, as the engine does once for all (engine/cpu.py); elsewhere it keeps
the checkpoint's types. No cache is used: the text is computed in one piece.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from tokamac.engine.config import read_config
from tokamac.engine.device import DeviceKind, device_kind
from tokamac.engine.model import build_model
from tokamac.engine.shards import find_shards
from tokamac.quant.modules import clone
from tokamac.quant.observing import Observer
from tokamac.quant.source import Source, fresh
from tokamac.quant.stages import ENDS, Block, End, Read, Reader

Watch = Callable[[int, mx.array], None]
"""Is given a layer's number and its output (1, n, dims), evaluated."""

LayersDone = Callable[[int, int], None]
"""Is told the layers computed so far, and all."""


@dataclass(frozen=True, slots=True)
class Streamable:
    """A model whose weights can be read as often as need be.

    module: mlx-lm's, packed or not as the weights are; its own arrays are neither read nor changed.
    read: names every parameter of the module. A run opens twice, and holds of what it got only what is said above.
    """

    module: nn.Module
    read: Read


def streamable_folder(folder: Path, *, unchecked: bool = False) -> Streamable:
    """Return the model in ``folder``, packed or not, built as the engine builds it. unchecked: see there. Raises ModelError."""
    find_shards(folder)

    def opened() -> nn.Module:
        return build_model(folder, read_config(folder), unchecked=unchecked)[0]

    return Streamable(opened(), lambda: dict(tree_flatten(opened().parameters())))


def streamable_source(source: Source) -> Streamable:
    """Return a conversion's source, unpacked, as its folder has it: whatever was popped from ``source.weights``."""
    return Streamable(source.module, lambda: fresh(source))


class Streamed:
    """A model that is run layer by layer, any number of times.

    device: decides which types are computed in; None asks MLX. progress: is called after every layer, on this thread.
    """

    def __init__(
        self, model: Streamable, *, device: DeviceKind | None = None, progress: LayersDone | None = None
    ) -> None:
        self._model = model
        self._on_cpu = (device or device_kind()) == "cpu"
        self._progress = progress

    @property
    def layers(self) -> int:
        """How many layers (transformer blocks) the model has."""
        return len(_layers(self._model.module))

    def run(self, ids: Sequence[int], *, observer: Observer | None = None, watch: Watch | None = None) -> mx.array:
        """Return (n, vocabulary) float32, evaluated: row i holds the log-probabilities of what follows ids[i]."""
        model = self._open(observer, watch, lazy_ends=False)
        logits = model(mx.array([list(ids)]))[0].astype(mx.float32)
        found: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(found)
        return found

    def observe(self, batch: Sequence[Sequence[int]], observer: Observer) -> None:
        """Run sequences of equal length side by side, for what ``observer`` is told. No logits are computed.

        Memory beside a layer's weights: some four times tokens × widest layer × 4 bytes, 1 GB for 4,096 tokens of an 8B model.
        """
        model = self._open(observer, None, lazy_ends=True)
        model(mx.array([list(ids) for ids in batch]))

    def _open(self, observer: Observer | None, watch: Watch | None, *, lazy_ends: bool) -> Any:
        model = clone(self._model.module).eval()
        model.update(tree_unflatten(list(self._model.read().items())))
        if self._on_cpu:
            model.set_dtype(mx.float32)
        numbers = {id(layer): number for number, layer in enumerate(_layers(model))}
        reader = Reader(self._model.read, self._on_cpu, observer)
        finished = partial(_finished, len(numbers), watch, self._progress)
        for path, module in _apart(model, numbers):
            # The copy comes first: what stands in must not stand in for itself.
            if id(module) in numbers:
                Block(path, clone(module), reader, partial(finished, numbers[id(module)])).stand_in_for(module)
            elif isinstance(module, ENDS):
                End(path, clone(module), reader, lazy_ends).stand_in_for(module)
        return model


def _finished(total: int, watch: Watch | None, progress: LayersDone | None, number: int, output: mx.array) -> None:
    mx.clear_cache()  # the pool would keep what the layer's weights took
    if watch is not None:
        watch(number, output)
    if progress is not None:
        progress(number + 1, total)


def _layers(model: Any) -> list[nn.Module]:
    return list(model.layers)


def _apart(model: nn.Module, layers: dict[int, int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers, and every module that is part of none, each once, with its path."""
    modules = list(model.named_modules())
    inside = {
        id(part) for _, module in modules if id(module) in layers for part in module.modules() if part is not module
    }
    seen: set[int] = set()
    for path, module in modules:
        if id(module) not in inside | seen:
            seen.add(id(module))
            yield path, module
