"""The model to convert, as mlx-lm reads it: whole, of a known kind, its weights under mlx-lm's names. No weight is read yet.

mlx-lm's own loader fills a module with lazy arrays, whatever packed them. Here that is taken apart again: float weights by name,
packed ones seen through a lazy unpacking, and the module an empty one that packs nothing. So whatever mlx-lm reads can be
converted, exactly as mlx-lm reads it, and evaluating one array reads that tensor alone.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from tokamac.engine.errors import ConversionError, ModelDamagedError, ModelError, ModelUnsupportedError
from tokamac.engine.files import not_opened
from tokamac.engine.model.adapters import Adapter, Change, changes_of, fused, read_adapter
from tokamac.engine.model.config import LANGUAGE_PARTS, MODELOPT, model_classes, read_config
from tokamac.engine.model.config_rules import check_config
from tokamac.engine.model.extra_heads import ModelEnds, build_heads, place_of
from tokamac.engine.model.loader import BUILD_ERRORS, DTYPES, doubts_about, load_lazily
from tokamac.engine.model.safetensors import check_places, find_shards
from tokamac.engine.model.skeleton import skeleton_model
from tokamac.engine.model.stored_heads import MEDUSA_FILE, MTP_FILE, HeadKind, find_heads, name_in_file
from tokamac.engine.model.weights import without_fp8
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.cost import text_config

from .modules import leaves
from .provenance import adapter_name
from .report import WeightError

READ_ERRORS = (*BUILD_ERRORS, NameError)
"""What mlx-lm's loader raises for a folder that it can't read; NameError where a config says AWQ and no weight is packed so."""

PACKING_KEYS = ("quantization", "quantization_config", "compression_config", "quantize_activations")
"""What a config says about packed weights. An unpacked model's config has none of it, nested or not."""

PACKED_LEAVES = ("scales", "biases", "global_scale", "weight_scale")
"""What a packed module holds beside its words: gone when the weight is seen unpacked."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight that is packed already: how, and its arrays, lazy: words, scales and, of affine groups, biases.

    error: of what a calibrated method has packed, where it can be compared with the source; None of what the source itself holds.
    """

    packing: Packing
    arrays: tuple[mx.array, ...]
    error: WeightError | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder as mlx-lm reads it: an empty float module, float weights in its order, and by module path what was packed."""

    module: nn.Module
    weights: dict[str, mx.array]
    packed: dict[str, Packed]


@dataclass(frozen=True, slots=True)
class HeadSource:
    """Heads for further tokens that a model has: they are packed like it, into a file of their own.

    file: its name. named: which they are, in words. source: their module, and weights by their names in the file. modules: by path
    in the file, the path in the module, and the module itself, of what could be packed.
    """

    file: str
    named: str
    source: "Source"
    modules: Mapping[str, tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Source:
    """A model before conversion.

    config: as if nothing were packed. module: mlx-lm's, unpacked; it never gets the weights, and only tells shapes and rules.
    weights: lazy arrays in the module's own order, what was packed seen unpacked; an entry is popped when it is converted.
    packed: by module path, what the source packed. notes: what a user should know about it.
    adapter: what is added to the weights; changes: by module path. unchecked: doubts about its config were passed over.
    heads: for further tokens.
    """

    folder: Path
    config: dict[str, Any]
    module: nn.Module
    weights: dict[str, mx.array]
    packed: dict[str, Packed]
    source_bytes: int
    notes: tuple[str, ...] = ()
    adapter: Adapter | None = None
    changes: Mapping[str, Change] = field(default_factory=dict)
    unchecked: bool = False
    heads: tuple[HeadSource, ...] = ()


def locate(source: str | Path) -> Path:
    """Return the folder of a model; a Hugging Face id is downloaded first, unless it is here already.

    To show the download, call ``tokamac.engine.hub.download.resolve`` with a progress of its own first, and convert the folder.
    """
    from tokamac.engine.hub.download import resolve

    return resolve(source)


def open_adapter(adapter: str | Path) -> Adapter:
    """Return an adapter by its folder or its Hugging Face id, downloaded first if need be. Raises ModelError, DownloadError."""
    from tokamac.engine.hub.download import resolve_adapter

    return read_adapter(resolve_adapter(adapter), str(adapter))


def open_source(folder: Path, *, adapter: Adapter | None = None, unchecked: bool = False) -> Source:
    """Return the model in ``folder``, checked without reading a weight.

    Args:
        folder: In floats, packed by MLX, or packed by anything that mlx-lm reads.
        adapter: Added to its weights; none that it changes counts as packed any more.
        unchecked: Open a model although something of its config is doubted.

    Raises:
        ModelError: For what is missing, cut off, pickled or of an unknown kind.
        ConversionError: For weights packed in a way that mlx-lm does not read.
    """
    config = read_config(folder)
    shards = find_shards(folder)
    check_places(folder, shards)
    read = read_checkpoint(folder, config, unchecked=unchecked)
    # Read anew where something is packed: if both shared arrays, unpacking one weight after the other would keep all their words.
    weights = read_checkpoint(folder, config, unchecked=unchecked).weights if read.packed else read.weights
    changes = {} if adapter is None else changes_of(adapter, read.module, config)
    notes = list(_notes(folder, config, read))
    heads = tuple(_open_heads(folder, config, read.module, notes))
    if adapter is not None:
        notes.append(replace(adapter, name=adapter_name(adapter)).note(changes))
    if unchecked:
        notes += [f"unchecked: {doubt}; the converted model is as doubtful" for doubt in doubts_about(config)]
    # What only a vision part needs goes too, unless mlx-lm's module sees.
    unused = () if "vision_tower" in read.module.get("model", {}) else ("vision_config",)
    return Source(
        folder=folder,
        config={key: value for key, value in float_config(config).items() if key not in unused},
        module=read.module,
        weights=_changed(weights, changes),
        packed={path: packed for path, packed in read.packed.items() if path not in changes},
        source_bytes=sum(shard.stat().st_size for shard in shards),
        notes=tuple(notes),
        adapter=adapter,
        changes=changes,
        unchecked=unchecked,
        heads=heads,
    )


def _open_heads(folder: Path, config: Mapping[str, Any], model: nn.Module, notes: list[str]) -> Iterator[HeadSource]:
    """Yield the heads of a model that can be kept, lazy; note why others can't."""
    for stored in find_heads(folder, config):
        try:
            if stored.trouble:
                raise ModelUnsupportedError(stored.trouble, "Convert it without them.")
            module = build_heads(stored, config, ModelEnds(model, config))
        except ModelError as error:
            notes.append(f"its own heads for further tokens ({stored.named}) are left out: {error.message}")
            continue
        layers = {path: leaf for path, leaf in leaves(module) if _is_packed(leaf)}

        def named(name: str, module: nn.Module = module, kind: HeadKind = stored.kind) -> str:
            return name_in_file(place_of(name, module), kind, config)

        def path_of(path: str, named: Callable[[str], str] = named) -> str:
            return named(f"{path}.weight").removesuffix(".weight")

        packed = {path_of(path): found for path, leaf in layers.items() if (found := _packed(leaf)) is not None}
        weights = {named(name): array for name, array in _float_weights(module, layers, _float_type(config))}
        modules = {
            path_of(path): (path, leaf)
            for path, leaf in leaves(module)
            if path in layers or "to_quantized" in dir(leaf)
        }
        # Or it would hold what is read.
        module.update(tree_map(lambda array: mx.zeros((), array.dtype), module.parameters()))
        own = Source(folder, dict(config), module, weights, packed, stored.nbytes)
        yield HeadSource(MTP_FILE if stored.kind == "mtp" else MEDUSA_FILE, stored.named, own, modules)


def fresh(source: Source) -> dict[str, mx.array]:
    """Return the weights of ``source`` anew, lazy floats by name: all of them, whatever was popped. Reads headers only."""
    read = read_checkpoint(source.folder, read_config(source.folder), unchecked=source.unchecked)
    return _changed(read.weights, source.changes)


def _changed(weights: dict[str, mx.array], changes: Mapping[str, Change]) -> dict[str, mx.array]:
    """Return weights with an adapter's changes in them; lazy, so one matrix at a time is computed."""
    changed = {f"{path}.weight": fused(weights[f"{path}.weight"], change) for path, change in changes.items()}
    return {name: changed.get(name, weight) for name, weight in weights.items()}


def _notes(folder: Path, config: dict[str, Any], read: Checkpoint) -> Iterator[str]:
    if (method := packer(folder, config)) not in (None, "bitnet") and not read.packed:
        yield f"the config says that the source was packed by {method}: converting the original loses less"
    if config.get("quantize_activations"):
        yield "the source also quantizes activations; the converted model does not"


def read_checkpoint(folder: Path, config: Mapping[str, Any], *, unchecked: bool = False) -> Checkpoint:
    """Return what ``folder`` holds, its config given normalised. Lazy: no weight is read. unchecked: as in ``open_source``.

    Raises ModelError for what is damaged or of an unknown kind, ConversionError for weights packed in a way mlx-lm does not read.
    """
    module = _loaded(folder, config, unchecked=unchecked)
    floats = dict(leaves(skeleton_model(float_config(config), value_bytes=2, unchecked=unchecked)))
    # A class may be packed by nature (BitNet's): such layers stay what they are.
    layers = {path: leaf for path, leaf in leaves(module) if _is_packed(leaf) and not _is_packed(floats[path])}
    packed = {path: found for path, leaf in layers.items() if (found := _packed(leaf)) is not None}
    weights = dict(_float_weights(module, layers, _float_type(config)))
    # Empty: float layers in place of packed ones, and zeros that take no memory in place of all weights.
    module.update_modules(tree_unflatten([(path, floats[path]) for path in layers]))
    module.update(tree_map(lambda array: mx.broadcast_to(mx.zeros((), array.dtype), array.shape), module.parameters()))
    return Checkpoint(module, {name: weights[name] for name, _ in tree_flatten(module.parameters())}, packed)


def float_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config that says nothing about packing, in its language part neither."""
    copy = {key: deepcopy(value) for key, value in config.items() if key not in PACKING_KEYS}
    return {key: float_config(value) if key in LANGUAGE_PARTS and value else value for key, value in copy.items()}


def packer(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the name of what packed the weights, where it is not MLX. Looked for where mlx-lm looks."""
    settings, unnamed = config.get("quantization"), None
    if not settings:
        settings = config.get("quantization_config") or text_config(config).get("quantization_config")
        unnamed = "an unnamed method"
    if not settings:
        return "modelopt" if (folder / MODELOPT).is_file() else None
    named = isinstance(settings, dict) and "quant_method" in settings
    return str(settings["quant_method"]) if named else unnamed


def _loaded(folder: Path, config: Mapping[str, Any], *, unchecked: bool) -> nn.Module:
    """Return mlx-lm's module with the folder's weights, packed as they are."""
    own = deepcopy(dict(config))  # mlx-lm's classes write into what they are given
    classes = model_classes(own)
    if not unchecked:
        check_config(own, classes[1])
    try:
        return load_lazily(folder, without_fp8(own), classes)[0]
    except ModelError:
        raise
    except ImportError as error:
        needs = f"{folder} needs a package that is not installed: {error}"
        raise ModelUnsupportedError(needs, "Use another model.") from error
    except READ_ERRORS as error:
        if (failure := not_opened(error, folder)) is not None:
            raise failure from error
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        reason = " ".join(reason.split())[:240]
        if method := packer(folder, config):
            raise ConversionError(
                f"{folder} is packed by {method} in a way that mlx-lm does not read: {reason}",
                "Convert the original, unpacked model.",
            ) from error
        kind = config.get("model_type")
        raise ModelDamagedError(
            f"{folder} does not hold a complete {kind} model: {reason}", "Download the model again."
        ) from error


def _is_packed(module: nn.Module) -> bool:
    """Whether a leaf module holds packed words: MLX's, with scales, or BitNet's, four ternary weights to a byte."""
    from mlx_lm.models.bitlinear_layers import BitLinear

    return "scales" in module or isinstance(module, BitLinear)


def _packed(module: Any) -> Packed | None:
    """Return what a packed module holds, or None where ``mx.quantize`` has no packing like it."""
    # BitNet's bytes are another format. An nvfp4 stack whose experts have a scale of their own (``global_scale``) holds an array
    # more than converted folders do.
    if "scales" not in module or module.get("global_scale") is not None:
        return None
    arrays = (module["weight"], module["scales"], module.get("biases"))
    packing = Packing(module.bits, module.group_size, module.mode)
    return Packed(packing, tuple(array for array in arrays if array is not None))


def _float_weights(module: nn.Module, packed: dict[str, Any], dtype: mx.Dtype) -> Iterator[tuple[str, mx.array]]:
    for name, array in tree_flatten(module.parameters()):
        path, _, leaf = name.rpartition(".")
        if path not in packed:
            yield name, array
        elif leaf == "weight":
            yield name, unpacked(packed[path], dtype)
        elif leaf not in PACKED_LEAVES:
            yield name, array


def _float_type(config: Mapping[str, Any]) -> mx.Dtype:
    """Return the type that a config says its unpacked weights have; bfloat16 where it says nothing."""
    text = text_config(config)
    return DTYPES.get(str(text.get("dtype") or text.get("torch_dtype")), mx.bfloat16)


def unpacked(module: Any, dtype: mx.Dtype) -> mx.array:
    """Return a packed module's weight, lazy: (…, out, in). ``dtype``: its type where the scales don't tell (microscaling)."""
    if "scales" not in module:
        return _ternary(module)
    scales = module["scales"]
    kind = scales.dtype if mx.issubdtype(scales.dtype, mx.floating) else dtype
    how = {**asdict(Packing(module.bits, module.group_size, module.mode)), "dtype": kind}
    shared = module.get("global_scale")
    if shared is None:
        return mx.dequantize(module["weight"], scales, module.get("biases"), **how)
    each = zip(module["weight"], scales, shared, strict=True)
    return mx.stack([mx.dequantize(words, groups, global_scale=whole, **how) for words, groups, whole in each])


def _ternary(module: Any) -> mx.array:
    """Return the weight of mlx-lm's BitLinear, as its kernel reads it."""
    # Two bits of byte (r, c), from bit 2i on, are 1 more than the weight of row r + i × rows, column c; all share one scale.
    words, scale = module["weight"], module["weight_scale"]
    codes = mx.concatenate([(words >> (2 * i)) & 3 for i in range(4)])[: module.out_features]
    whole = scale.astype(mx.float32)
    found: mx.array = (codes.astype(mx.float32) - 1) * (1 / whole if module.invert_weight_scales else whole)
    return found.astype(scale.dtype)
