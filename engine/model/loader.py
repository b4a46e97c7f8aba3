"""Loads a model folder: checked, safe, in the device's types."""

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from ..device import DeviceKind
from ..errors import ModelDamagedError, ModelError, ModelUnsupportedError, OptionError
from ..files import not_opened
from ..gguf.places import TABLE, told_as
from ..mlx_lm_package import import_mlx_lm
from ..perf.cost import Cost, cost_of_model, leaf_modules
from .config import embeds, model_classes, read_config
from .config_rules import doubts_of
from .safetensors import Part, StoredTensor, find_shards, locate_tensors, read_part
from .weights import without_fp8

if TYPE_CHECKING:
    from ..gguf.checkpoint import Arrays

# GPT-2-like models look positions up in a table, and MLX's lookup has no bounds check: it reads foreign
# memory. So too long prompts are refused (``Runtime.room``), and the table answers NaN beyond its rows.


DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}

# Names of modules that hold a row for each position.
POSITION_TABLES = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings?|pos_emb\w*)$")

# What mlx-lm's classes raise for weights that don't fit them, and for configs that lack a key or hold nonsense.
BUILD_ERRORS = (
    *(ValueError, KeyError, IndexError, RuntimeError, TypeError, AttributeError, ArithmeticError),
    AssertionError,
)

MODES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}  # by bits and group size, where scales are bytes

BytesProgress = Callable[[int, int], None]
Classes = tuple[Callable[..., Any], type[Any]]  # what builds a model, and mlx-lm's ModelArgs for it (`model_classes`)
# Leaves a process its part of a module with lazy weights; returns the part's config, and what it has of which
# parameters, where that is known (distributed/team.py).
Divide = Callable[[Any, dict[str, Any]], tuple[dict[str, Any], Mapping[str, Part]]]


@dataclass(frozen=True, slots=True)
class _OwnPart:
    """The part of a stored parameter this process reads."""

    tensor: StoredTensor
    part: Part
    dtype: mx.Dtype

    def read(self) -> mx.array:
        return mx.array(read_part(self.tensor, self.part)).view(self.dtype)


@dataclass(frozen=True, slots=True)
class _GgufPart:
    """A parameter that a GGUF file stands for, and the part this process reads (None: all)."""

    arrays: "Arrays"
    name: str
    part: Part | None = None

    def read(self) -> mx.array:
        array = self.arrays.read(self.name)
        if self.part is None:
            return array
        indices = [index for begin, end in self.part.runs for index in range(begin, end)]
        return mx.take(array, mx.array(indices), axis=self.part.axis)


_Own = _OwnPart | _GgufPart


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded mlx-lm module and its normalised config.

    stored: cost on disk. eager: decode waits between layers. by_kernels: CPU kernels multiply, in float32.
    """

    module: nn.Module
    config: dict[str, Any]
    folder: Path
    stored: Cost
    eager: bool
    by_kernels: bool
    doubts: tuple[str, ...] = ()


def load_model(
    folder: Path,
    *,
    dtype: str | None,
    device: DeviceKind,
    progress: BytesProgress,
    compiling: Callable[[], None] = lambda: None,
    unchecked: bool = False,
    rounded: bool = False,
    divide: Divide | None = None,
) -> LoadedModel:
    """Load a model. Raises ModelError and OptionError.

    Args:
        dtype: Of unpacked weights; None: the checkpoint's on a GPU, float32 on a CPU.
        progress: Receives bytes read and in all.
        compiling: Called while CPU kernels compile.
        unchecked: Accept doubtful configs.
        rounded: Also compile row rounding (cpu/layers.py).
        divide: Keeps this process's part of the module; only that is read, unless ``sanitize`` changes the tensor.
    """
    # MLX's CPU backend computes half precision in slow scalar code. On a CPU a part's layers stay MLX's, whose
    # passes can be built without being computed.
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"dtype {dtype} is not supported", f"Use one of {', '.join(DTYPES)}.")
    config = read_config(folder)
    shards = find_shards(folder)
    doubts = doubts_about(config) if unchecked else ()
    arrays = gguf_arrays(folder)
    empty = None if arrays is None else arrays.zeros()
    module, config, sources = _build(folder, config, unchecked=unchecked, weights=empty)
    if empty is not None and len(sources) < len(tree_flatten(module.parameters())):  # its class makes others of some
        module, config, sources = _build(folder, read_config(folder), unchecked=unchecked)
    del empty
    if device == "cpu":
        _refuse_gpu_words(module)
    stored = cost_of_model(module, config)
    own: dict[str, _Own] = {}
    if arrays is not None:
        own.update((name, _GgufPart(arrays, source)) for name, source in sources.items())
    # A GGUF file's scales are float16 and its norms float32; converted, these may be bfloat16. MLX would compute in float32.
    kinds = {array.dtype for _, array in tree_flatten(module.parameters())}
    if dtype is None and device != "cpu" and (arrays is not None or {mx.float16, mx.bfloat16} <= kinds):
        dtype = str(config["torch_dtype"])
    if divide is not None:
        dtypes = {name: array.dtype for name, array in tree_flatten(module.parameters())}
        config, parts = divide(module, config)
        tensors = locate_tensors(shards) if parts and arrays is None else {}
        for name in parts.keys() & sources.keys():
            if arrays is not None:
                own[name] = _GgufPart(arrays, sources[name], parts[name])
            elif (tensor := tensors.get(sources[name])) is not None:
                own[name] = _OwnPart(tensor, parts[name], dtypes[name])
    eager, by_kernels = fill(
        module,
        folder,
        dtype=dtype,
        device=device,
        progress=progress,
        compiling=compiling,
        kernels=divide is None,
        rounded=rounded,
        own=own,
    )
    bound_positions(module)
    mx.clear_cache()
    return LoadedModel(module, config, folder, stored, eager, by_kernels, doubts)


def gguf_arrays(folder: Path) -> "Arrays | None":
    """Return the arrays of a folder that stands for a GGUF file, else None. Raises ModelDamagedError."""
    if not (folder / TABLE).is_file():
        return None
    from ..gguf.checkpoint import Arrays

    return Arrays(folder)


def fill(
    module: nn.Module,
    folder: Path,
    *,
    dtype: str | None,
    device: DeviceKind,
    progress: BytesProgress,
    compiling: Callable[[], None] = lambda: None,
    rounded: bool = False,
    kernels: bool = True,
    own: Mapping[str, _Own] = MappingProxyType({}),
) -> tuple[bool, bool]:
    """Read a module's lazy weights. Raises ModelDamagedError and OptionError.

    Returns whether decode waits between layers, and whether CPU kernels multiply. own: partly read parameters.
    """
    wanted = DTYPES[dtype] if dtype else (mx.float32 if device == "cpu" else None)
    if device == "cpu" and wanted == mx.float32 and kernels:
        from ..cpu.layers import Compiling

        compiled = Compiling(module, rounded=rounded)
        return _read_for_kernels(module, folder, dtype, progress, own, lambda: compiled.wait(compiling)), True
    if wanted is not None:
        module.set_dtype(wanted)
    _read(module, folder, dtype, progress, own)
    return False, False


def _read_for_kernels(  # noqa: PLR0917
    module: nn.Module,
    folder: Path,
    dtype: str | None,
    progress: BytesProgress,
    own: Mapping[str, _Own],
    compiled: Callable[[], None],
) -> bool:
    """Read weights for CPU kernels once ``compiled`` returns; return whether decode waits between layers."""
    from ..cpu.layers import keep_packed, logits_width, use_kernels

    restore = keep_packed(module)
    module.set_dtype(mx.float32)
    restore()
    _read(module, folder, dtype, progress, own)
    compiled()
    try:
        logits = logits_width(module)
    except BUILD_ERRORS:  # planning its caches then says why its forward pass fails
        logits = None
    return use_kernels(module, logits=logits)


def doubts_about(config: dict[str, Any]) -> tuple[str, ...]:
    """Return a sentence per setting computed differently. Raises ModelError."""
    return tuple(doubt.message for doubt in doubts_of(config, model_classes(config)[1]))


def build_model(folder: Path, config: dict[str, Any], *, unchecked: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """Return mlx-lm's module with lazy, packed weights, and its config. Raises ModelError."""
    return _build(folder, config, unchecked=unchecked)[:2]


def _build(
    folder: Path, config: dict[str, Any], *, unchecked: bool, weights: Mapping[str, mx.array] | None = None
) -> tuple[nn.Module, dict[str, Any], dict[str, str]]:
    classes = model_classes(config)
    known = {**config, "use_bidirectional_attention": False} if embeds(folder) else config  # embedding.py computes it
    for doubt in doubts_of(known, classes[1]):
        if not unchecked:
            raise doubt
    try:
        return load_lazily(folder, without_fp8(config), classes, weights)
    except ModelError:
        raise
    except BUILD_ERRORS as error:
        if (failure := not_opened(error, folder)) is not None:
            raise failure from error
        reason = " ".join(str(error).split())[:240]
        raise ModelDamagedError(
            f"{told_as(folder)} does not hold a complete {config.get('model_type')} model: {reason}",
            "Download it again, or convert it from its source with `tokamac convert`.",
        ) from error
    except ImportError as error:
        raise ModelUnsupportedError(
            f"{told_as(folder)} needs a package that is not installed: {error}", "Use another model."
        ) from error


def _refuse_gpu_words(module: nn.Module) -> None:
    """Raise for experts packed as MLX multiplies on GPUs only: nvfp4 with a scale per expert."""
    if any(leaf.get("global_scale") is not None for _, leaf in leaf_modules(module)):
        raise ModelUnsupportedError(
            "its experts are nvfp4 with scales of their own, which MLX multiplies on a GPU alone",
            "Convert it to MLX's own packing with `tokamac convert`, which reads it anywhere.",
        )


def load_lazily(
    folder: Path, config: dict[str, Any], classes: Classes, weights: Mapping[str, mx.array] | None = None
) -> tuple[nn.Module, dict[str, Any], dict[str, str]]:
    """Return mlx-lm's lazy module, its config, and the file names of parameters ``sanitize`` left unchanged.

    weights: instead of the folder's own.
    Raises ValueError for unexpected types, and mlx-lm's errors.
    """
    # No class changes an array in place in ``sanitize``; all make new ones.
    make, arguments = classes
    expected: dict[str, tuple[type | None, bool]] = {}
    stored: dict[int, tuple[str, mx.array]] = {}  # with the arrays, so that no other has the id of one

    def made(args: Any) -> Any:
        module = make(args)
        adapted: Callable[[dict[str, mx.array]], dict[str, mx.array]] = module.sanitize

        @wraps(adapted)
        def sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
            stored.update((id(array), (name, array)) for name, array in weights.items())
            return adapted(weights)

        module.sanitize = sanitize
        expected.update({name: (owner, floating) for name, owner, floating in _typed(module)})
        return module

    if _packed_elsewhere(folder, config):
        import_mlx_lm()
        from mlx_lm.utils import load_model as build

        module, loaded = build(folder, lazy=True, model_config=config, get_model_classes=lambda **_: (made, arguments))
    else:
        module, loaded = _with_weights(folder, made(arguments.from_dict(config)), config, weights), config
    _check_types(module, expected)
    for _, leaf in leaf_modules(module):
        scales, biases = leaf.get("scales"), leaf.get("biases")
        if (
            scales is not None and biases is not None and scales.dtype != biases.dtype
        ):  # MLX takes both; kernels read them alike
            leaf.scales, leaf.biases = scales.astype(mx.float32), biases.astype(mx.float32)
    parameters = tree_flatten(module.parameters())
    sources = {name: stored[id(array)][0] for name, array in parameters if id(array) in stored}
    stored.clear()  # or what is read would be held here, too
    module.sanitize = module.sanitize.__wrapped__
    return module, loaded, sources


def _packed_elsewhere(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a folder has other packages' packed weights, which mlx-lm's own loader puts in MLX's form."""
    if config.get("quantize_activations"):
        return True
    if config.get("quantization") is not None:
        return False
    text = config.get("text_config")
    named = "quantization_config" in config or (isinstance(text, dict) and "quantization_config" in text)
    return named or (folder / "hf_quant_config.json").exists()


def _with_weights(
    folder: Path, module: Any, config: Mapping[str, Any], given: Mapping[str, mx.array] | None
) -> nn.Module:
    """Give a new module its folder's lazy weights. Raises ValueError for others than it has."""
    weights = dict[str, mx.array]() if given is None else dict(given)
    if given is None and (arrays := gguf_arrays(folder)) is not None:
        weights = arrays.lazy()
    for shard in () if weights else find_shards(folder):
        stored: Any = mx.load(str(shard))
        weights.update(stored)
    weights = module.sanitize(weights)
    if (packing := config.get("quantization")) is not None:

        def packed(path: str, leaf: Any) -> bool | dict[str, Any]:
            if path in packing and (given is None or f"{path}.scales" in weights):
                named: bool | dict[str, Any] = packing[path]
                return named
            if "to_quantized" not in dir(leaf) or f"{path}.scales" not in weights:
                return False
            takes = f"{path}.global_scale" in weights and "global_scale" in signature(leaf.to_quantized).parameters
            return packing_of(path, leaf, weights) | ({"global_scale": True} if takes else {})

        mode = packing.get("mode", "affine")
        nn.quantize(module, packing["group_size"], packing["bits"], mode=mode, class_predicate=packed)
    module.eval()
    module.load_weights(list(weights.items()), strict=True)
    return module


def packing_of(path: str, leaf: Any, weights: Mapping[str, mx.array]) -> dict[str, Any]:
    """Return how the weights of an unpacked layer are packed: group_size, bits and mode. Raises ValueError."""
    scales, width = weights[f"{path}.scales"], leaf.weight.shape[-1]
    found = {"group_size": width // scales.shape[-1], "bits": weights[f"{path}.weight"].shape[-1] * 32 // width}
    if scales.dtype != mx.uint8:
        return {**found, "mode": "affine"}
    mode = MODES.get((found["bits"], found["group_size"]))
    if mode is None:
        raise ValueError(
            f"{path} is packed by {found['bits']} bits in groups of {found['group_size']}, which no mode is"
        )
    return {**found, "mode": mode}


def _typed(module: nn.Module) -> Iterator[tuple[str, type | None, bool]]:
    leaves = dict(leaf_modules(module))
    for name, array in tree_flatten(module.parameters()):
        leaf = leaves.get(name.rpartition(".")[0])
        yield name, None if leaf is None else type(leaf), mx.issubdtype(array.dtype, mx.floating)


def _check_types(module: nn.Module, expected: Mapping[str, tuple[type | None, bool]]) -> None:
    arrays = dict(tree_flatten(module.parameters()))
    for name, owner, floating in _typed(module):
        stem, _, leaf = name.rpartition(".")
        coded = leaf == "scales" and arrays[name].dtype == mx.uint8
        if leaf in ("scales", "biases") and f"{stem}.weight" in arrays and not floating and not coded:
            raise ValueError(f"{name} holds {_plain(arrays[name])} where packed weights have floating numbers")
        if leaf == "weight" and f"{stem}.scales" in arrays and owner not in (None, expected.get(name, (None,))[0]):
            if arrays[name].dtype != mx.uint32:
                raise ValueError(f"{name} holds {_plain(arrays[name])} where the model has packed weights")
        elif not floating and expected.get(name) == (owner, True):
            raise ValueError(f"{name} holds {_plain(arrays[name])} where the model has floating numbers")


def _plain(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def _read(module: nn.Module, folder: Path, dtype: str | None, progress: BytesProgress, own: Mapping[str, _Own]) -> None:
    parameters = tree_flatten(module.parameters())
    total, done = sum(array.nbytes for _, array in parameters), 0
    progress(0, total)
    read: list[tuple[str, mx.array]] = []
    for name, lazy in parameters:
        array = lazy
        if (part := own.get(name)) is not None:
            array = part.read().astype(lazy.dtype)
            read.append((name, array))
        # Evaluated one by one, so that a bar can move and a nonsense value can be named.
        floating = mx.issubdtype(array.dtype, mx.floating)
        if floating and not bool(mx.all(mx.isfinite(array)).item()):
            if dtype == "float16":
                raise OptionError(f"{name} holds values that float16 can't", "Load with bfloat16 or float32.")
            raise ModelDamagedError(
                f"the weights in {told_as(folder)} are damaged: {name} holds values that are not numbers",
                "Download the model again.",
            )
        mx.eval(array)
        done += array.nbytes
        progress(done, total)
    module.update(tree_unflatten(read))


def position_rows(model: Any) -> int | None:
    return min((len(module.weight) for path, module in model.named_modules() if _is_table(path, module)), default=None)


def bound_positions(model: Any) -> None:
    """Let position tables answer NaN beyond their last row; parameters are unchanged."""
    for path, module in model.named_modules():
        if _is_table(path, module):
            module.__class__ = _bounded(type(module))


def _is_table(path: str, module: Any) -> bool:
    return POSITION_TABLES.search(path) is not None and "weight" in module


def _bounded(kind: type[Any]) -> type[Any]:
    class Bounded(kind):
        def __call__(self, positions: mx.array) -> mx.array:
            last = len(self.weight) - 1
            found = super().__call__(mx.minimum(positions, last))
            return mx.where((positions > last)[..., None], mx.array(float("nan"), found.dtype), found)

    return Bounded


def skeleton_model(config: Mapping[str, Any], value_bytes: int, *, unchecked: bool = False) -> Any:
    """Build a skeleton. Raises ModelUnsupportedError, ModelDamagedError.

    value_bytes: 4 is float32, 2 bfloat16. unchecked: accept doubtful configs.
    """
    import mlx.core as mx
    from mlx.utils import tree_map

    from .config import model_classes
    from .config_rules import check_config

    own = deepcopy(dict(config))  # mlx-lm's classes write into what they are given
    make, arguments = model_classes(own)
    if not unchecked:
        check_config(own, arguments)
    dtype = mx.float32 if value_bytes == 4 else mx.bfloat16

    def zeros(array: mx.array) -> mx.array:
        kept = dtype if mx.issubdtype(array.dtype, mx.floating) else array.dtype
        return mx.broadcast_to(mx.zeros((), kept), array.shape)

    try:
        model: Any = make(arguments.from_dict(own))
        model.update(tree_map(zeros, model.parameters()))
    except ImportError as error:
        raise ModelUnsupportedError(f"it needs a package that is not installed: {error}", "Install it.") from error
    except BUILD_ERRORS as error:
        reason = " ".join(str(error).split())[:240]
        raise ModelDamagedError(f"its config does not make a model: {reason}", "Download it again.") from error
    return model
