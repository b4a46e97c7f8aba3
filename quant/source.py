"""The source model as mlx-lm reads it, with lazy weights under mlx-lm's names."""

# mlx-lm's loader fills a module; it is taken apart into float weights, packed ones dequantized lazily, and an empty
# module. So whatever mlx-lm reads can be converted, and evaluating an array reads that tensor alone.

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from tokamac.engine import files
from tokamac.engine.errors import ConversionError, ModelDamagedError, ModelError, ModelUnsupportedError
from tokamac.engine.files import not_opened
from tokamac.engine.gguf.checkpoint import packed_modules
from tokamac.engine.gguf.places import TABLE
from tokamac.engine.model.adapters import Adapter, Change, changes_of, fused, read_adapter
from tokamac.engine.model.config import LANGUAGE_PARTS, MODELOPT, model_classes, read_config
from tokamac.engine.model.config_rules import check_config
from tokamac.engine.model.extra_heads import ModelEnds, build_heads, place_of
from tokamac.engine.model.loader import BUILD_ERRORS, DTYPES, doubts_about, gguf_arrays, load_lazily, skeleton_model
from tokamac.engine.model.safetensors import StoredTensor, check_places, find_shards, locate_tensors
from tokamac.engine.model.weights import (
    MEDUSA_FILE,
    MTP_FILE,
    OTHER_PARTS,
    VISION_FILE,
    HeadKind,
    find_heads,
    name_in_file,
    text_config,
    without_fp8,
)
from tokamac.engine.perf.config_cost import Packing, leaves_out_senses

from .report import WeightError, adapter_name

# What is done to trees of MLX modules: walked, copied with every array shared, and one instance made to answer a method
# otherwise.

Method = Callable[..., Any]

# Parts of names: what loading leaves out, and what the classes of mlx-lm leave out themselves.
SENSES = frozenset({*OTHER_PARTS.split("|"), "vision_encoder", "connector", "patch_merger"})

# What to do where the source itself is not finite: no option of a conversion helps.
AGAIN = "Download the model again, or ask its author."


def leaves(module: nn.Module) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = tree_flatten(module.leaf_modules(), is_leaf=nn.Module.is_module)
    return found


def layer_paths(module: Any) -> list[str]:
    paths = {id(part): path for path, part in module.named_modules()}
    return [paths[id(layer)] for layer in module.layers]


def clone(module: nn.Module) -> Any:
    """Copy a module tree, sharing arrays; a module used in two places stays one."""
    return _copied(module, {})


def _copied(value: Any, done: dict[int, Any]) -> Any:
    if isinstance(value, nn.Module):
        if id(value) not in done:
            done[id(value)] = made = copy.copy(value)
            for name, entry in value.items():
                made[name] = _copied(entry, done)
        return done[id(value)]
    if isinstance(value, dict):
        return {name: _copied(entry, done) for name, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(entry, done) for entry in value)
    return value


def override(module: nn.Module, **methods: Method) -> None:
    # No reference back: a cycle would keep its weights alive until garbage collection.
    kind: Any = type(module)
    object.__setattr__(module, "_overrides", methods)  # past nn.Module's own, which would take a dict for submodules
    module.__class__ = _overridden(kind, tuple(sorted(methods)))


@cache
def _overridden(kind: Any, names: tuple[str, ...]) -> type[nn.Module]:
    def method(name: str) -> Method:
        return lambda self, *args, **kwargs: self._overrides[name](self, *args, **kwargs)

    return cast(type[nn.Module], type(kind.__name__, (kind,), {name: method(name) for name in names}))


def not_finite(name: str, hint: str = AGAIN) -> ConversionError:
    return ConversionError(f"{name} holds values that are not finite numbers", hint)


def check_finite(name: str, *arrays: mx.array, hint: str = AGAIN) -> None:
    if not all(bool(mx.all(mx.isfinite(array)).item()) for array in arrays):
        raise not_finite(name, hint)


# What mlx-lm's loader raises for a folder that it can't read; NameError where a config says AWQ and no weight is packed
# so.
READ_ERRORS = (*BUILD_ERRORS, NameError)

# What a config says about packed weights. An unpacked model's config has none of it, nested or not.
PACKING_KEYS = ("quantization", "quantization_config", "compression_config", "quantize_activations")

# What a packed module holds beside its words: gone when the weight is seen unpacked.
PACKED_LEAVES = ("scales", "biases", "global_scale", "weight_scale")


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed weight: lazy words, scales and, if affine, biases. error: set by calibrated methods."""

    packing: Packing
    arrays: tuple[mx.array, ...]
    error: WeightError | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    module: nn.Module
    weights: dict[str, mx.array]
    packed: dict[str, Packed]


@dataclass(frozen=True, slots=True)
class Beside:
    """What is no part of the text model, in a file of its own: extra prediction heads, or towers.

    named: at the beginning of a sentence. modules: that may be packed, by path in the file: their path and module.
    """

    file: str
    named: str
    source: "Source"
    modules: Mapping[str, tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Source:
    """A model before conversion.

    config: as if nothing were packed. module: unpacked and empty, for shapes and rules. weights: lazy, in module
    order, popped when converted. packed: by module path. carried: a GGUF file's types by module, and MLX's forms of
    them; what is not in ``packed`` was unpacked. narrow: for its float32 norms.
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
    beside: tuple[Beside, ...] = ()
    carried: Mapping[str, tuple[str, Packing]] = field(default_factory=dict)
    narrow: str | None = None


def locate(source: str | Path) -> Path:
    """Return a model's folder; a Hugging Face id is downloaded if needed."""
    from tokamac.engine.hub.download import resolve

    return resolve(source)


def open_adapter(adapter: str | Path) -> Adapter:
    """Return an adapter by folder or Hugging Face id. Raises ModelError, DownloadError."""
    from tokamac.engine.hub.download import resolve_adapter

    return read_adapter(resolve_adapter(adapter), str(adapter))


def open_source(
    folder: Path, *, adapter: Adapter | None = None, unchecked: bool = False, towers: bool = True
) -> Source:
    """Return the model in ``folder``, checked without reading a weight.

    Args:
        adapter: Merged lazily; weights that it changes no longer count as packed.
        unchecked: Open despite config doubts.
        towers: Keep what sees or hears, beside the model.

    Raises:
        ModelError: Missing, truncated, pickled or of an unknown kind.
        ConversionError: Packed in a way that mlx-lm does not read.
    """
    config = read_config(folder)
    shards = find_shards(folder)
    check_places(folder, shards)
    read = read_checkpoint(folder, config, unchecked=unchecked)
    # Read anew where something is packed: if both shared arrays, unpacking one weight after the other would keep all their words.
    weights = read_checkpoint(folder, config, unchecked=unchecked).weights if read.packed else read.weights
    changes = {} if adapter is None else changes_of(adapter, read.module, config)
    notes = list(_notes(folder, config, read))
    apart = "vision_tower" not in read.module.get("model", {})
    senses = _senses(folder, shards) if apart and leaves_out_senses(config) else {}
    beside = tuple(_open_heads(folder, config, read.module, notes))
    if senses and towers:
        beside += (_open_towers(folder, config, senses),)
    elif senses:
        count, nbytes = len(senses), sum(map(_nbytes, senses.values()))
        notes.append(
            f"what sees or hears is left out, {count} tensors, {files.size(nbytes)}: the result reads text alone"
        )
    unused = ("vision_config",) if apart and not (senses and towers) else ()
    if adapter is not None:
        notes.append(replace(adapter, name=adapter_name(adapter)).note(changes))
    if unchecked:
        notes += [f"unchecked: {doubt}; the converted model is as doubtful" for doubt in doubts_about(config)]
    # What only a vision part needs goes too, unless mlx-lm's module sees.
    return Source(
        folder=folder,
        config={key: value for key, value in float_config(config).items() if key not in unused},
        module=read.module,
        weights=_changed(weights, changes),
        packed={path: packed for path, packed in read.packed.items() if path not in changes},
        source_bytes=sum(shard.stat().st_size for shard in shards)
        - sum(_nbytes(each) for each in senses.values() if each.file in shards),
        notes=tuple(notes),
        adapter=adapter,
        changes=changes,
        unchecked=unchecked,
        beside=beside,
        narrow=_narrow(config, weights) if (folder / TABLE).is_file() else None,
        carried={
            path: (kind, Packing(form.bits, form.group_size, form.mode))
            for path, (kind, form) in packed_modules(folder).items()
            if path not in changes
        },
    )


def _senses(folder: Path, shards: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of the parts that see or hear."""
    own = [file for file in (folder / VISION_FILE,) if file.is_file()]
    stored = locate_tensors([*shards, *own])
    return {name: each for name, each in stored.items() if SENSES & set(name.split("."))}


def _nbytes(stored: StoredTensor) -> int:
    return math.prod(stored.shape) * stored.item_bytes


def _open_towers(folder: Path, config: Mapping[str, Any], senses: Mapping[str, StoredTensor]) -> Beside:
    """Return the towers under the names that mlx-vlm writes, lazily; what they are packed by stands in the config."""
    arrays = dict[str, mx.array]()
    for shard in sorted({each.file for each in senses.values()}):
        stored: Any = mx.load(str(shard))
        arrays |= {_tower_name(name): array for name, array in stored.items() if name in senses}
    packed, weights = dict[str, Packed](), dict[str, mx.array]()
    for name, array in arrays.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and f"{path}.scales" in arrays:
            words = tuple(arrays[key] for each in ("weight", "scales", "biases") if (key := f"{path}.{each}") in arrays)
            packing = _tower_packing(config, path, words)
            packed[path], weights[name] = Packed(packing, words), dequantized(words, packing)
        elif f"{path}.scales" not in arrays or leaf not in PACKED_LEAVES:
            weights[name] = array
        if leaf == "weight" and path not in packed and not mx.issubdtype(array.dtype, mx.floating):
            raise ConversionError(f"{name} is packed in a way that is not read here", "Leave it out with --no-vision.")
    weights = dict(sorted(weights.items()))  # as read, they come in any order
    source = Source(folder, dict(config), nn.Module(), weights, packed, sum(map(_nbytes, senses.values())))
    return Beside(VISION_FILE, f"the {len(senses)} tensors of what sees or hears", source, {})


def _tower_packing(config: Mapping[str, Any], path: str, words: Sequence[mx.array]) -> Packing:
    settings = config.get("quantization")
    try:
        form = {**settings, **(settings.get(path) or settings.get(f"model.{path}") or {})}  # type: ignore[union-attr, dict-item]
        packing = Packing(form["bits"], form["group_size"], form.get("mode", "affine"))
        dequantized(words, packing)  # from shapes: nothing is read
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelDamagedError(
            f"how {path} is packed does not stand in the config", "Download the model again."
        ) from error
    return packing


def dequantized(arrays: Sequence[mx.array], packing: Packing) -> mx.array:
    """Return dequantized ``arrays`` (words, scales and, if affine, biases); lazy."""
    words, scales, *biases = arrays
    made: mx.array = mx.dequantize(words, scales, biases[0] if biases else None, **asdict(packing))
    return made


def _tower_name(name: str) -> str:
    name = re.sub(r"^visual\.", "vision_tower.", name.removeprefix("model."))
    return re.sub(r"^vision_tower\.(?=embeddings\.|encoder\.|post_layernorm\.)", "vision_tower.vision_model.", name)


def _narrow(config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> str | None:
    return None if {array.dtype for array in weights.values()} == {mx.float32} else str(config["torch_dtype"])


def _open_heads(folder: Path, config: Mapping[str, Any], model: nn.Module, notes: list[str]) -> Iterator[Beside]:
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
        said = f"its own heads for further tokens ({stored.named})"
        yield Beside(MTP_FILE if stored.kind == "mtp" else MEDUSA_FILE, said, own, modules)


def fresh(source: Source) -> dict[str, mx.array]:
    read = read_checkpoint(source.folder, read_config(source.folder), unchecked=source.unchecked)
    return _changed(read.weights, source.changes)


def _changed(weights: dict[str, mx.array], changes: Mapping[str, Change]) -> dict[str, mx.array]:
    changed = {f"{path}.weight": fused(weights[f"{path}.weight"], change) for path, change in changes.items()}
    return {name: changed.get(name, weight) for name, weight in weights.items()}


def _notes(folder: Path, config: dict[str, Any], read: Checkpoint) -> Iterator[str]:
    if (method := packer(folder, config)) not in (None, "bitnet") and not read.packed:
        yield f"the config says that the source was packed by {method}: converting the original loses less"
    if config.get("quantize_activations"):
        yield "the source also quantizes activations; the converted model does not"


def read_checkpoint(folder: Path, config: Mapping[str, Any], *, unchecked: bool = False) -> Checkpoint:
    """Read ``folder`` lazily. Raises ModelError if damaged or unknown, ConversionError for foreign packing."""
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
    copy = {key: deepcopy(value) for key, value in config.items() if key not in PACKING_KEYS}
    return {key: float_config(value) if key in LANGUAGE_PARTS and value else value for key, value in copy.items()}


def packer(folder: Path, config: Mapping[str, Any]) -> str | None:
    settings, unnamed = config.get("quantization"), None
    if not settings:
        settings = config.get("quantization_config") or text_config(config).get("quantization_config")
        unnamed = "an unnamed method"
    if not settings:
        return "modelopt" if (folder / MODELOPT).is_file() else None
    named = isinstance(settings, dict) and "quant_method" in settings
    return str(settings["quant_method"]) if named else unnamed


def _loaded(folder: Path, config: Mapping[str, Any], *, unchecked: bool) -> nn.Module:
    own = deepcopy(dict(config))  # mlx-lm's classes write into what they are given
    classes = model_classes(own)
    if not unchecked:
        check_config(own, classes[1])
    try:
        arrays = gguf_arrays(folder)
        weights = None if arrays is None else arrays.lazy(unpacked=True)
        return load_lazily(folder, without_fp8(own), classes, weights)[0]
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
    from mlx_lm.models.bitlinear_layers import BitLinear

    return "scales" in module or isinstance(module, BitLinear)


def _packed(module: Any) -> Packed | None:
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
    text = text_config(config)
    return DTYPES.get(str(text.get("dtype") or text.get("torch_dtype")), mx.bfloat16)


def unpacked(module: Any, dtype: mx.Dtype) -> mx.array:
    """Return a packed module's weight (…, out, in), lazy; dtype: for microscaling."""
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
    # Two bits of byte (r, c), from bit 2i on, are 1 more than the weight of row r + i × rows, column c; all share one scale.
    words, scale = module["weight"], module["weight_scale"]
    codes = mx.concatenate([(words >> (2 * i)) & 3 for i in range(4)])[: module.out_features]
    whole = scale.astype(mx.float32)
    found: mx.array = (codes.astype(mx.float32) - 1) * (1 / whole if module.invert_weight_scales else whole)
    return found.astype(scale.dtype)
