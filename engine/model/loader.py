"""From a folder to a model ready to run: whole, safe, and in the right types for the device.

GPT-2 and its like look positions up in a learned table. MLX's lookup has no bounds: a position beyond the table is read from
foreign memory. So a prompt that does not fit is refused (``Runtime.room``), and the table itself answers NaN for a row that it has
not, which the engine tells from a reply.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from ..device import DeviceKind
from ..errors import ModelDamagedError, ModelError, ModelUnsupportedError, OptionError
from ..files import not_opened
from ..perf.cost import Cost, cost_of_model, leaf_modules
from .config import model_classes, read_config
from .config_rules import doubts_of
from .safetensors import StoredTensor, find_shards, locate_tensors
from .stored_parts import Part, read_part
from .weights import without_fp8

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}

POSITION_TABLES = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings?|pos_emb\w*)$")
"""Names of modules that hold a row for each position."""

BUILD_ERRORS = (
    *(ValueError, KeyError, IndexError, RuntimeError, TypeError, AttributeError, ArithmeticError),
    AssertionError,
)
"""What mlx-lm's classes raise for weights that don't fit them, and for configs that lack a key or hold nonsense."""

BytesProgress = Callable[[int, int], None]
Classes = tuple[Callable[..., Any], type[Any]]
"""What builds a model, and mlx-lm's ModelArgs for it (``model_classes``)."""
Divide = Callable[[Any, dict[str, Any]], tuple[dict[str, Any], Mapping[str, Part]]]
"""Leaves a process its part of a module with lazy weights; returns the part's config, and what it has of which parameters, where
that is known (distributed/split.py)."""


@dataclass(frozen=True, slots=True)
class _OwnPart:
    """What this process reads of a parameter that lies in a file as it is in the module. dtype: there, MLX's."""

    tensor: StoredTensor
    part: Part
    dtype: mx.Dtype

    def read(self) -> mx.array:
        return mx.array(read_part(self.tensor, self.part)).view(self.dtype)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on the device: mlx-lm's module and the normalised config.

    stored: what its weights cost as they are on disk, before anything was unpacked.
    eager: decoding waits for the device between layers. by_kernels: a CPU's own multiply (engine/model/cpu), in float32.
    doubts: what of its config its class computes otherwise.
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
    """Load the model in ``folder``. ``progress`` is told the bytes read so far, and all; ``compiling`` is called where a CPU's
    kernels are compiled, as at their first use, and are waited for.

    dtype: of everything that is not packed; None keeps the checkpoint's own on a GPU. On a CPU it is float32, because MLX's
    CPU backend runs half precision by slow scalar code; packed matrices stay as they are stored, scales and all. unchecked: load
    what the rule for configs doubts, too. rounded: compile what rounds rows, too (cpu/rounding.py); none is rounded yet. divide:
    leaves this process a part of the module before anything is read. Of a tensor that it divides only that part is read, unless the
    class's ``sanitize`` does more to it than rename: then it is read whole, and cut. On a CPU the layers of a part stay MLX's own,
    whose passes can be built without being computed.
    Raises ModelError (missing, damaged, unsupported) and OptionError.
    """
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"dtype {dtype} is not supported", f"Use one of {', '.join(DTYPES)}.")
    config = read_config(folder)
    shards = find_shards(folder)
    doubts = doubts_about(config) if unchecked else ()
    module, config, sources = _build(folder, config, unchecked=unchecked)
    if device == "cpu":
        _refuse_gpu_words(module)
    stored = cost_of_model(module, config)
    own: dict[str, _OwnPart] = {}
    if divide is not None:
        dtypes = {name: array.dtype for name, array in tree_flatten(module.parameters())}
        config, parts = divide(module, config)
        tensors = locate_tensors(shards) if parts else {}
        for name in parts.keys() & sources.keys():
            if (tensor := tensors.get(sources[name])) is not None:
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
    own: Mapping[str, _OwnPart] = MappingProxyType({}),
) -> tuple[bool, bool]:
    """Read the lazy weights of a module in the types for the device, as ``load_model`` says. kernels: a CPU's own may be used. own:
    parameters that are read in part, which its kernels know nothing of.

    Returns whether decoding waits for the device between layers, and whether a CPU's own kernels multiply. Raises ModelDamagedError
    and OptionError.
    """
    wanted = DTYPES[dtype] if dtype else (mx.float32 if device == "cpu" else None)
    if device == "cpu" and wanted == mx.float32 and kernels:
        from .cpu.packed import Compiling

        compiled = Compiling(module, rounded=rounded)
        return _read_for_kernels(module, folder, dtype, progress, lambda: compiled.wait(compiling)), True
    if wanted is not None:
        module.set_dtype(wanted)
    _read(module, folder, dtype, progress, own)
    return False, False


def _read_for_kernels(
    module: nn.Module, folder: Path, dtype: str | None, progress: BytesProgress, compiled: Callable[[], None]
) -> bool:
    """Read weights that a CPU's own kernels will multiply, once these are ``compiled``, which waits for it.

    Returns whether decoding waits for the device between layers.
    """
    from .cpu.dense import logits_width
    from .cpu.packed import keep_packed, use_kernels

    restore = keep_packed(module)
    module.set_dtype(mx.float32)
    restore()
    _read(module, folder, dtype, progress, {})
    compiled()
    try:
        logits = logits_width(module)
    except BUILD_ERRORS:  # planning its caches then says why its forward pass fails
        logits = None
    return use_kernels(module, logits=logits)


def doubts_about(config: dict[str, Any]) -> tuple[str, ...]:
    """Return what of a normalised config its class computes otherwise, a sentence each. Raises ModelError like ``build_model``."""
    return tuple(doubt.message for doubt in doubts_of(config, model_classes(config)[1]))


def build_model(folder: Path, config: dict[str, Any], *, unchecked: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """Return mlx-lm's module with lazy weights, packed as they are stored, and the config it was built from. Raises ModelError."""
    return _build(folder, config, unchecked=unchecked)[:2]


def _build(
    folder: Path, config: dict[str, Any], *, unchecked: bool
) -> tuple[nn.Module, dict[str, Any], dict[str, str]]:
    """Return what ``build_model`` and ``load_lazily`` do."""
    classes = model_classes(config)
    for doubt in doubts_of(config, classes[1]):
        if not unchecked:
            raise doubt
    try:
        return load_lazily(folder, without_fp8(config), classes)
    except ModelError:
        raise
    except BUILD_ERRORS as error:
        if (failure := not_opened(error, folder)) is not None:
            raise failure from error
        reason = " ".join(str(error).split())[:240]
        raise ModelDamagedError(
            f"{folder} does not hold a complete {config.get('model_type')} model: {reason}",
            "Download it again, or convert it from its source with `tokamac convert`.",
        ) from error
    except ImportError as error:
        raise ModelUnsupportedError(
            f"{folder} needs a package that is not installed: {error}", "Use another model."
        ) from error


def _refuse_gpu_words(module: nn.Module) -> None:
    """Raise where experts are packed as MLX multiplies them on GPUs alone: nvfp4, each expert with a scale of its own."""
    if any(leaf.get("global_scale") is not None for _, leaf in leaf_modules(module)):
        raise ModelUnsupportedError(
            "its experts are nvfp4 with scales of their own, which MLX multiplies on a GPU alone",
            "Convert it to MLX's own packing with `tokamac convert`, which reads it anywhere.",
        )


def load_lazily(
    folder: Path, config: dict[str, Any], classes: Classes
) -> tuple[nn.Module, dict[str, Any], dict[str, str]]:
    """Return what mlx-lm's loader makes of a folder: the module with lazy weights, its config, and sources.

    Sources are the names in the files of the parameters that are there as they are in the module: ``sanitize`` handed the same
    array on. (No class changes one in place there; all make new ones.)
    Raises ValueError where an array is of another type than its place in the model, and whatever mlx-lm raises.
    """
    from mlx_lm.utils import load_model as build

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

    module, loaded = build(folder, lazy=True, model_config=config, get_model_classes=lambda **_: (made, arguments))
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


def _typed(module: nn.Module) -> Iterator[tuple[str, type | None, bool]]:
    """Yield the name of each parameter, the type of the layer that owns it, and whether it holds floating numbers."""
    leaves = dict(leaf_modules(module))
    for name, array in tree_flatten(module.parameters()):
        leaf = leaves.get(name.rpartition(".")[0])
        yield name, None if leaf is None else type(leaf), mx.issubdtype(array.dtype, mx.floating)


def _check_types(module: nn.Module, expected: Mapping[str, tuple[type | None, bool]]) -> None:
    """Raise ValueError for integers where the class made floating numbers, and packed weights of no fitting type."""
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


def _read(
    module: nn.Module, folder: Path, dtype: str | None, progress: BytesProgress, own: Mapping[str, _OwnPart]
) -> None:
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
                f"the weights in {folder} are damaged: {name} holds values that are not numbers",
                "Download the model again.",
            )
        mx.eval(array)
        done += array.nbytes
        progress(done, total)
    module.update(tree_unflatten(read))


def position_rows(model: Any) -> int | None:
    """Return how many positions the learned tables of mlx-lm's module hold; None where it has none."""
    return min((len(module.weight) for path, module in model.named_modules() if _is_table(path, module)), default=None)


def bound_positions(model: Any) -> None:
    """Let the tables of learned positions answer NaN beyond their last row. Names and types of parameters stay."""
    for path, module in model.named_modules():
        if _is_table(path, module):
            module.__class__ = _bounded(type(module))


def _is_table(path: str, module: Any) -> bool:
    return POSITION_TABLES.search(path) is not None and "weight" in module


def _bounded(kind: type[Any]) -> type[Any]:
    class Bounded(kind):
        """A table of positions that is never read beyond its end."""

        def __call__(self, positions: mx.array) -> mx.array:
            last = len(self.weight) - 1
            found = super().__call__(mx.minimum(positions, last))
            return mx.where((positions > last)[..., None], mx.array(float("nan"), found.dtype), found)

    return Bounded
