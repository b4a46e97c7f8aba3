"""Gives a rank its part of a model that mlx-lm can divide, before any weight is read; refuses the others with the reason.

How a class's ``shard`` divides a parameter is seen by letting it divide numbers that name their indices, so no class has to be
known here, nor how it is packed or fused.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ModelUnsupportedError
from ..model.stored_parts import Part
from ..options import Split

if TYPE_CHECKING:
    import mlx.core as mx

HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
WIDTHS = (*HEADS, "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Numbers of a config that a rank has a part of, where layers are split."""


@dataclass(frozen=True, slots=True)
class NodeShare:
    """What part a process has. group: MLX's."""

    group: Any
    rank: int
    size: int
    split: Split

    def divide(self, module: Any, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Part]]:
        """Leave a module with lazy weights this rank's part.

        Returns:
            The config of that part, and of each parameter that is divided along one axis what the rank has.

        Raises:
            ModelUnsupportedError: Its class or its shape does not allow it.
        """
        kind = str(config.get("model_type"))
        if self.split == "pipeline":
            return self._by_layers(module, config, kind), {}
        whole = _parameters(module)
        twin = deepcopy(module, {id(array): _hollow(array) for array in whole.values()})
        own = self._by_heads(module, config, kind)
        return own, self._parts(twin, _parameters(module))

    def connect(self, module: Any) -> None:
        """From now on a pass of a divided module goes over all ranks; before, one is of this rank's layers alone, to plan by."""
        if self.split == "pipeline" and (inner := _pipelined(module)) is not None:
            inner.pipeline_rank, inner.pipeline_size = self.rank, self.size

    @property
    def note(self) -> str:
        """What is to be said of it at load."""
        what = "a part of every layer" if self.split == "tensor" else "some of the layers"
        return f"{self.size} nodes hold the model, each {what}"

    def _by_heads(self, module: Any, config: Mapping[str, Any], kind: str) -> dict[str, Any]:
        if not callable(getattr(module, "shard", None)):
            raise ModelUnsupportedError(
                f"mlx-lm's class for {kind} can't split its layers over several nodes",
                "Take another model" + (", or --split pipeline." if _pipelined(module) is not None else "."),
            )
        text = config.get("text_config", config)
        for name in HEADS:
            if (count := text.get(name)) is not None and count % self.size:
                raise ModelUnsupportedError(
                    f"{self.size} nodes can't divide its {count} {name.removeprefix('num_').replace('_', ' ')}",
                    "Use a number of nodes that divides it.",
                )
        try:
            module.shard(self.group)
        except (ValueError, AssertionError) as error:
            raise ModelUnsupportedError(
                f"its layers can't be split over {self.size} nodes: {' '.join(str(error).split())[:200]}",
                "Use another number of nodes.",
            ) from error
        return _changed(config, {name: text[name] // self.size for name in WIDTHS if text.get(name)})

    def _parts(self, twin: Any, own: "Mapping[str, mx.array]") -> dict[str, Part]:
        """Return what this rank has of each parameter that is smaller along one axis alone, as an undivided ``twin`` shows."""
        import mlx.core as mx
        import numpy as np
        from mlx.utils import tree_unflatten

        whole, axes = _parameters(twin), dict[str, int]()
        for name, array in whole.items():
            if name in own and own[name].ndim == array.ndim:
                differ = [axis for axis, size in enumerate(array.shape) if size != own[name].shape[axis]]
                if len(differ) == 1:
                    axes[name] = differ[0]
        most = max((whole[name].shape[axis] for name, axis in axes.items()), default=0)
        # Random, or what a class computes from one could be another.
        names = np.random.default_rng(0).choice(np.iinfo(np.int32).max, most, replace=False).astype(np.int32)
        index_of = {int(name): index for index, name in enumerate(names)}

        def named(array: mx.array, axis: int) -> mx.array:
            line = mx.array(names[: array.shape[axis]]).reshape([-1 if at == axis else 1 for at in range(array.ndim)])
            return mx.broadcast_to(line, array.shape)

        twin.update(tree_unflatten([(name, named(whole[name], axis)) for name, axis in axes.items()]))
        twin.shard(self.group)
        divided, parts = _parameters(twin), dict[str, Part]()
        del twin
        for name, axis in axes.items():
            array = divided.pop(name)  # one at a time, since each is computed
            line = array[tuple(slice(None) if at == axis else slice(1) for at in range(array.ndim))]
            if array.size and array.dtype == mx.int32 and mx.all(array == line).item():
                indices = [index_of.get(int(each), -1) for each in np.array(line).flat]
                if -1 not in indices:
                    parts[name] = Part.of_indices(axis, indices)
        return parts

    def _by_layers(self, module: Any, config: Mapping[str, Any], kind: str) -> dict[str, Any]:
        inner = _pipelined(module)
        if inner is None:
            raise ModelUnsupportedError(
                f"mlx-lm's class for {kind} can't give layers to several nodes",
                "Take another model" + (", or --split tensor." if callable(getattr(module, "shard", None)) else "."),
            )
        whole = len(module.layers)
        if whole < self.size:
            raise ModelUnsupportedError(f"{self.size} nodes can't divide its {whole} layers", "Use fewer nodes.")
        inner.pipeline(self.group)
        inner.pipeline_rank, inner.pipeline_size = 0, 1  # until ``connect``
        begin, end = inner.start_idx, inner.end_idx
        text = config.get("text_config", config)
        own = {
            name: value[begin:end] for name, value in text.items() if isinstance(value, list) and len(value) == whole
        }
        return _changed(config, {**own, "num_hidden_layers": len(module.layers)})


def _hollow(array: "mx.array") -> "mx.array":
    """Return zeros that take no memory; one of its own for each, since some classes divide in place."""
    import mlx.core as mx

    return mx.broadcast_to(mx.zeros((), array.dtype), array.shape)


def _parameters(module: Any) -> "dict[str, mx.array]":
    from mlx.utils import tree_flatten

    return dict(tree_flatten(module.parameters()))


def _pipelined(module: Any) -> Any:
    """Return the part of mlx-lm's module that holds its layers and can give some of them away; None where there is none."""
    from mlx_lm.models.pipeline import PipelineMixin

    found = [each for _, each in module.named_modules() if isinstance(each, PipelineMixin)]
    return found[0] if len(found) == 1 else None


def _changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config whose numbers are a rank's; a head stays as wide as it was."""
    own = deepcopy(dict(config))
    text = own.get("text_config", own)
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    if heads and hidden and not text.get("head_dim"):
        text["head_dim"] = hidden // heads
    text.update(changes)
    return own
