"""What a model costs, from its config alone: no weight, no header, no download.

mlx-lm's class is built hollow (hollow.py) and packed by MLX's own code. MLX computes nothing before a value is asked for, so
packing a model of any size takes no memory and well under a millisecond a layer; the arrays that come out have the shapes and types
of the real ones, and are counted as a loaded model's are.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from tokamac.engine.errors import ModelError, ModelUnsupportedError
from tokamac.engine.limits.cost import (
    HEAD_IF_STORED,
    Cost,
    Form,
    cost_of_tensors,
    groups_of,
    part_of,
    tensors_of,
    text_config,
)
from tokamac.engine.limits.hollow import hollow_model
from tokamac.engine.limits.kv_cost import value_bytes_of
from tokamac.engine.weights import is_fp8

Choice = bool | dict[str, Any]
"""What MLX does with a module: leaves it, packs it like the rest, or packs it with these parameters."""

Rule = Callable[[str, Any], Choice]

KEPT_PACKED = {"mxfp4": (4, 32), "mxfp8": (8, 32)}
"""Other packers' methods whose weights mlx-lm takes over as they are: (bits, group size)."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How weights are packed: bits per weight (None: not at all, 16-bit floats), weights per scale, and MLX's mode."""

    bits: int | None
    group_size: int = 64
    mode: str = "affine"


def cost_of_config(config: Mapping[str, Any], *, packing: Packing | None = None, form: Form = "stored") -> Cost | str:
    """Return the cost of the model that a normalised config (engine/config.py) describes, or the reason why it can't be said.

    packing: instead of the config's own, what mlx-lm's conversion of a 16-bit checkpoint would make: every layer whose rows
    the group size divides is packed, with more bits where the model's class asks for them. form: how weights lie in memory.
    """
    try:
        model = hollow_model(config, 2 if packing else value_bytes_of(config))
        pack(model, config, packing)
    except ModelError as error:
        return error.message
    return cost_of_hollow(model, config, form=form)


def cost_of_hollow(model: Any, config: Mapping[str, Any], *, form: Form = "stored") -> Cost:
    """Return the cost of a hollow model, packed or not; the head that its class made counts only if checkpoints store it."""
    tensors = tensors_of(model)
    if not _stores_head(config):
        tensors = [tensor for tensor in tensors if part_of(tensor, config) != "head"]
    return cost_of_tensors(tensors, config, groups=groups_of(model), form=form)


def _stores_head(config: Mapping[str, Any]) -> bool:
    """Whether the head that the class made is there: some classes wait for the checkpoint to tell."""
    text = text_config(config)
    return text.get("model_type") not in HEAD_IF_STORED or text.get("tie_word_embeddings") is False


def pack(model: Any, config: Mapping[str, Any], packing: Packing | None) -> None:
    """Pack a hollow model in place. Raises ModelUnsupportedError for what MLX can't pack, or only the files can tell."""
    from mlx import nn

    from tokamac.engine.model import BUILD_ERRORS

    try:
        packing, rule = (packing, _conversion(model, packing)) if packing else _own(model, config)
        if packing.bits is None:
            return
        nn.quantize(model, **asdict(packing), class_predicate=_among_packable(rule))
    except ModelError:
        raise
    except BUILD_ERRORS as error:
        reason = " ".join(str(error).split())[:240]
        raise ModelUnsupportedError(f"it can't be packed so: {reason}", "Choose other bits or groups.") from error


def _among_packable(rule: Rule) -> Rule:
    """Return the rule for modules that can be packed at all; the others stay as they are."""
    return lambda path, module: rule(path, module) if "to_quantized" in dir(module) else False


def _conversion(model: Any, packing: Packing) -> Rule:
    """Return what mlx-lm's conversion does: the class's own wishes (``quant_predicate``) go before the packing asked for."""
    wish: Rule = getattr(model, "quant_predicate", None) or _everything

    def rule(path: str, module: Any) -> Choice:
        return module.weight.shape[-1] % packing.group_size == 0 and wish(path, module)

    return rule


def _everything(path: str, module: Any) -> Choice:  # noqa: ARG001
    return True


def _own(model: Any, config: Mapping[str, Any]) -> tuple[Packing, Rule]:
    """Return the config's own packing: MLX's, with an entry for each module that differs, or another packer's."""
    given = config.get("quantization") or config.get("quantization_config")
    given = given or text_config(config).get("quantization_config") or {}
    if not given or is_fp8(dict(config)):
        return Packing(None), _everything
    if "quant_method" in given and not config.get("quantization"):
        return _foreign(model, given)
    packing = Packing(int(given["bits"]), int(given["group_size"]), str(given.get("mode", "affine")))
    wishes = _conversion(model, packing)

    def rule(path: str, module: Any) -> Choice:
        entry = given.get(path)
        # A wish for other bits would have been written down, so that without an entry the module is packed like the rest.
        return entry if isinstance(entry, bool | dict) else bool(wishes(path, module))

    return packing, rule


def _foreign(model: Any, given: Mapping[str, Any]) -> tuple[Packing, Rule]:
    """Return what mlx-lm does with another packer's method. Raises ModelUnsupportedError."""
    method = str(given["quant_method"])
    if method == "bitnet":
        from mlx_lm.models.bitlinear_layers import bitnet_quantize

        bitnet_quantize(model, dict(given))  # in place: four ternary weights to a byte
        return Packing(None), _everything
    if method not in KEPT_PACKED:
        raise ModelUnsupportedError(
            f"its weights were packed by {method}: what mlx-lm makes of them only the files can tell",
            "Ask for another packing.",
        )
    bits, group_size = KEPT_PACKED[method]
    spared = tuple(f"{pattern}*" for pattern in given.get("modules_to_not_convert") or ())
    return Packing(bits, group_size, method), lambda path, _: not any(fnmatchcase(path, each) for each in spared)
