"""Low-rank adapters: read, checked, attached or fused."""

# W' = W + scale · U D             LoRA (Hu et al., 2021, arXiv:2106.09685): D (r, in), U (out, r)
# W' = m · (W + scale · U D) / ‖W + scale · U D‖      DoRA (Liu et al., 2024, arXiv:2402.09353): m (out,)

# mlx-lm's ``adapters.safetensors`` has Dᵀ and Uᵀ under its module names, scale in the config. PEFT's
# ``adapter_model.safetensors`` has D and U under transformers' names, scale alpha ÷ r (rsLoRA: alpha ÷ √r).
# Tensor names select the matrices. All must match: a partly applied adapter silently gives wrong text.

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ..errors import (
    ModelDamagedError,
    ModelError,
    ModelNotFoundError,
    ModelUnsupportedError,
)
from ..files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG_BYTES, PEFT_WEIGHTS, open_regular, read_bytes
from ..perf.cost import FLOATS
from .safetensors import read_header

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx import nn

PICKLED = ("adapter_model.bin", "adapters.npz")
READ_BYTES = 8 << 20

_PEFT_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<path>.+?)\."
    r"(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
)
_MLX_NAME = re.compile(r"(?P<path>.+)\.(?P<kind>lora_a|lora_b|m)")
_EXPERT = re.compile(r"(?P<stem>.+)\.experts\.(?P<number>\d{1,5})\.(?P<name>\w+)")
# Mixtral's names of an expert's matrices, and those of mlx-lm's stacks.
_STACKS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

# Ways in which PEFT begins training that change the model's own weights too: such an adapter belongs to those.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Keys of PEFT's config that change what is computed in a way that is not done here.
_REFUSED_KEYS = ("layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config")

_PATTERN = re.compile(r"(?:[\w-]|\\\.|\\d\+?|\.[*+]?|\[[\d-]{1,20}\]\+?|[|^$()])+")
_MOST_REPEATS = 3  # repeats in a pattern: others' expressions are only tried where trying can't take long

# Classes that take an array out of a module of this kind instead of calling it.
_READS_WEIGHTS = {
    "embedding": ("llama4_text", "minicpm", "gemma4_text", "longcat_flash_ngram"),
    "linear": ("iquestloopcoder", "kimi_k3"),
}
# Classes that multiply weights while they are loaded, so that a change for transformers' weights is none for theirs.
_SCALES_WEIGHTS = ("falcon_h1",)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's files, checked but not loaded.

    kind: its format's program. digest: of config and weights. state: detects writes to the weights file.
    """

    name: str
    folder: Path
    kind: str
    base: str | None
    digest: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, Any]]
    state: tuple[int, ...]

    def check_unchanged(self) -> None:
        if _state(self.weights) != self.state:
            raise ModelDamagedError(f"{self.weights} changed while it was read", "Load it again.")

    @property
    def nbytes(self) -> int:
        return sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in self.tensors.values())

    @property
    def parameters(self) -> int:
        return sum(math.prod(entry["shape"]) for entry in self.tensors.values())

    @property
    def weights(self) -> Path:
        return self.folder / (PEFT_WEIGHTS if self.kind == "PEFT" else ADAPTER_WEIGHTS)

    def note(self, changes: "Mapping[str, Change]") -> str:
        ranks = sorted({change.rank for change in changes.values()})
        shown = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        trained = f", trained on {self.base}" if self.base else ""
        return f"adapter {self.name}: {len(changes):,} matrices of rank {shown}{trained}"


@dataclass(frozen=True, slots=True)
class Change:
    """An adapter's lazy arrays for a matrix or stack, named as in the module docstring."""

    down: "mx.array"
    up: "mx.array"
    scale: float
    magnitude: "mx.array | None" = None

    @property
    def rank(self) -> int:
        return int(self.down.shape[-2])


def read_adapter(folder: Path, name: str) -> Adapter:
    """Read an adapter's config and header, without MLX.

    Raises ModelNotFoundError, ModelDamagedError or ModelUnsupportedError.
    """
    peft, own = folder / PEFT_WEIGHTS, folder / ADAPTER_WEIGHTS
    weights = own if own.is_file() else peft
    if not weights.is_file():
        if any((folder / file).exists() for file in PICKLED):
            raise ModelUnsupportedError(
                f"the adapter {name} is stored in a format that can run code when read", "Save it as safetensors."
            )
        raise ModelNotFoundError(
            f"{folder} holds no adapter ({PEFT_WEIGHTS} or {ADAPTER_WEIGHTS})",
            "Name the folder that an adapter was saved to.",
        )
    digest, state = xxhash.xxh3_128(), _state(weights)
    raw = _config_bytes(folder / ADAPTER_CONFIG)
    config = _object(raw, folder / ADAPTER_CONFIG)
    digest.update(raw)
    tensors = read_header(weights)
    with open_regular(weights) as file:
        while part := file.read(READ_BYTES):
            digest.update(part)
    for tensor, entry in tensors.items():
        if entry["dtype"] not in FLOATS:
            raise ModelUnsupportedError(
                f"{tensor} of the adapter {name} holds {entry['dtype']}, which is not a floating type",
                "Save it in a floating type.",
            )
    if not tensors:
        raise ModelDamagedError(f"the adapter {name} holds no tensors", "Save it again.")
    kind = "mlx-lm" if weights == own else "PEFT"
    base = config.get("base_model_name_or_path", config.get("model"))
    found = Adapter(
        name, folder, kind, base if isinstance(base, str) and base else None, digest.hexdigest(), config, tensors, state
    )
    _check_config(found)
    return found


def changes_of(adapter: Adapter, module: "nn.Module", config: Mapping[str, Any]) -> dict[str, Change]:
    """Return the changes by module path, lazy. Raises ModelUnsupportedError for tensors that don't fit."""
    import mlx.core as mx

    model_type = str((config.get("text_config") or config).get("model_type"))
    if adapter.kind == "PEFT" and model_type in _SCALES_WEIGHTS:
        raise _misfit(adapter, f"weights of {model_type} are scaled when they are loaded, which PEFT's are not")
    arrays = mx.load(str(adapter.weights))
    assert isinstance(arrays, dict)
    modules = dict(module.named_modules())
    found: dict[str, Change] = {}
    experts: dict[str, dict[int, Change]] = {}
    for path, parts in _by_matrix(adapter).items():
        change = _change(adapter, path, {kind: arrays[tensor] for kind, tensor in parts.items()}, parts)
        place = _place(path, modules)
        expert = _EXPERT.fullmatch(path) if place is None and adapter.kind == "PEFT" else None
        if expert is not None:
            stack = f"{expert['stem']}.switch_mlp.{_STACKS.get(expert['name'], expert['name'])}"
            if (place := _place(stack, modules)) is not None:
                experts.setdefault(place, {})[int(expert["number"])] = change
                continue
        if place is None:
            raise _misfit(adapter, f"the model has no {path} for {next(iter(parts.values()))}")
        if place in found:
            raise _misfit(adapter, f"two of its matrices are for {place}")
        found[place] = change
    for place, several in experts.items():
        found[place] = _stacked(adapter, place, modules[place], several)
    for place, change in found.items():
        _check_shapes(adapter, place, modules[place], change, model_type)
    return found


def attach(
    module: "nn.Module", changes: Mapping[str, Change], dtype: "mx.Dtype | None" = None, *, lazy: bool = False
) -> None:
    """Replace layers with adapted ones. Raises ModelDamagedError for non-finite numbers.

    dtype: of the added matrices; None keeps theirs. lazy: skip computing and the value check.
    """
    import mlx.core as mx
    from mlx.utils import tree_unflatten

    from .adapted_layers import adapted

    modules = dict(module.named_modules())
    for path, change in changes.items():
        layer = adapted(modules[path], change, dtype)
        for array in () if lazy else layer.added():
            if not bool(mx.all(mx.isfinite(array)).item()):
                raise ModelDamagedError(
                    f"the adapter's matrices for {path} hold values that are not numbers", "Save the adapter again."
                )
        if not lazy:
            mx.eval(layer.added())
        module.update_modules(tree_unflatten([(path, layer.module)]))


def fused(weight: "mx.array", change: Change) -> "mx.array":
    """Return W' (…, out, in) in W's type, computed in float32; lazy."""
    import mlx.core as mx

    wide = weight.astype(mx.float32)
    whole = wide + change.scale * (change.up.astype(mx.float32) @ change.down.astype(mx.float32))
    if change.magnitude is not None:
        norms = mx.linalg.norm(whole, axis=-1)
        whole = whole * (change.magnitude.astype(mx.float32) / norms)[..., None]
    return whole.astype(weight.dtype)


def _state(path: Path) -> tuple[int, ...]:
    at = path.stat()
    return at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns


def _config_bytes(path: Path) -> bytes:
    try:
        return read_bytes(path, CONFIG_BYTES)
    except OSError as error:
        why = (
            f"has no {ADAPTER_CONFIG}"
            if isinstance(error, FileNotFoundError)
            else f"{ADAPTER_CONFIG} can't be read: {error.strerror}"
        )
        raise ModelDamagedError(f"{path.parent} {why}", "Save the adapter again, with its config.") from error


def _object(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelDamagedError(f"{path} is not JSON", "Save the adapter again.") from error
    if not isinstance(config, dict):
        raise ModelDamagedError(f"{path} holds no JSON object", "Save the adapter again.")
    return config


def _check_config(adapter: Adapter) -> None:
    config = adapter.config
    if adapter.kind == "mlx-lm":
        trained = config.get("fine_tune_type", "lora")
        if trained not in ("lora", "dora"):
            raise ModelUnsupportedError(
                f"{adapter.name} is a fine-tune of kind {trained!r:.40}, not a low-rank adapter",
                "Fuse it into the model with mlx_lm.fuse, and load that.",
            )
        return
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        raise ModelUnsupportedError(
            f"{adapter.name} is an adapter of kind {config.get('peft_type')!r:.40}", "Only LoRA and DoRA are computed."
        )
    began = config.get("init_lora_weights")
    if isinstance(began, str) and began.lower().startswith(_CHANGES_BASE):
        raise ModelUnsupportedError(
            f"{adapter.name} began with {began:.40}, which changed the model's own weights as well",
            "Save it with path_initial_model_for_weight_conversion.",
        )
    for key in _REFUSED_KEYS:
        if config.get(key):
            raise ModelUnsupportedError(f"{adapter.name} sets {key}, which is not computed here", "Merge it with PEFT.")


def _by_matrix(adapter: Adapter) -> dict[str, dict[str, str]]:
    """Group tensor names by matrix and kind. Raises for unknown names."""
    form = _PEFT_NAME if adapter.kind == "PEFT" else _MLX_NAME
    found: dict[str, dict[str, str]] = {}
    for name in adapter.tensors:
        match = form.fullmatch(name)
        if match is None:
            raise _misfit(adapter, f"{name} is not a low-rank matrix and would be left out")
        parts = found.setdefault(match["path"], {})
        if match["kind"] in parts:
            raise _misfit(adapter, f"{name} is there twice")
        parts[match["kind"]] = name
    return found


def _change(adapter: Adapter, path: str, arrays: "dict[str, mx.array]", names: Mapping[str, str]) -> Change:
    pairs = {
        "PEFT": (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")),
        "mlx-lm": (("lora_a", "lora_b"),),
    }
    pair = next((each for each in pairs[adapter.kind] if each[0] in arrays or each[1] in arrays), None)
    lacking = [kind for kind in pair if kind not in arrays] if pair else list(pairs[adapter.kind][0])
    if pair is None or lacking:
        raise _misfit(adapter, f"{lacking[0]} of {path} is missing, for {next(iter(names.values()))}")
    first, second = (arrays[kind] for kind in pair)
    if first.ndim != second.ndim or first.ndim not in (2, 3) or (first.ndim == 3 and adapter.kind == "PEFT"):
        raise _misfit(adapter, f"{names[pair[0]]} and {names[pair[1]]} have shapes {first.shape} and {second.shape}")
    stack = first.ndim == 3
    if pair[0] == "lora_a" and not stack:  # Dᵀ and Uᵀ
        down, up = first.T, second.T
    else:  # of an embedding, PEFT's change of (vocabulary, dims) is its transpose; mlx-lm's stacks are as they are called
        down, up = first, second
    if pair[0] == "lora_embedding_A":
        down, up = second.T, first.T
    rank, scale = _rank_and_scale(adapter, path)
    if not down.shape[-2] == up.shape[-1] == rank:
        raise _misfit(
            adapter, f"{names[pair[0]]} has shape {first.shape} and {names[pair[1]]} {second.shape}; the rank is {rank}"
        )
    magnitude = arrays.get("lora_magnitude_vector", arrays.get("m"))
    dora = bool(adapter.config.get("use_dora")) or adapter.config.get("fine_tune_type") == "dora"
    if dora != (magnitude is not None):
        raise _misfit(
            adapter, f"its config {'says' if dora else 'does not say'} DoRA, and the tensors of {path} differ"
        )
    return Change(down, up, scale, None if magnitude is None else magnitude.reshape(-1))


def _rank_and_scale(adapter: Adapter, path: str) -> tuple[int, float]:
    config = adapter.config
    if adapter.kind == "mlx-lm":
        given = config.get("lora_parameters")
        known: Mapping[str, Any] = given if isinstance(given, dict) else {}
        return int(_number(adapter, known, "rank")), _number(adapter, known, "scale", least=-math.inf)
    rank = _patterned(adapter, "rank_pattern", path) or _number(adapter, config, "r")
    alpha = _patterned(adapter, "alpha_pattern", path)
    alpha = _number(adapter, config, "lora_alpha", least=-math.inf) if alpha is None else alpha
    return int(rank), alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _number(adapter: Adapter, config: Mapping[str, Any], key: str, *, least: float = 1) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise ModelDamagedError(
            f"{ADAPTER_CONFIG} of {adapter.name} sets {key} to {value!r:.40}", "Save the adapter again."
        )
    return float(value)


def _patterned(adapter: Adapter, key: str, path: str) -> float | None:
    patterns = adapter.config.get(key)
    if not isinstance(patterns, dict):
        return None
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern) or len(re.findall(r"[*+]", pattern)) > _MOST_REPEATS:
            raise _misfit(adapter, f"{key} has the expression {pattern!r:.60}, which is not tried")
        try:
            fits = re.match(rf"(.*\.)?({pattern})$", path)
        except re.error as error:
            raise _misfit(adapter, f"{key} has {pattern!r:.60}, which is no expression") from error
        if fits:
            return _number(adapter, patterns, pattern, least=1 if key == "rank_pattern" else -math.inf)
    return None


def _place(path: str, modules: "Mapping[str, nn.Module]") -> str | None:
    return next((each for each in _spellings(path) if each in modules), None)


def _spellings(path: str) -> Iterator[str]:
    bare = path.removeprefix("transformer.").removeprefix("model.")
    yield from (path, f"model.{bare}", bare)
    language = bare.removeprefix("language_model.").removeprefix("model.")
    yield from (f"language_model.model.{language}", f"language_model.{language}", f"model.{language}", language)


def _stacked(adapter: Adapter, place: str, module: Any, several: Mapping[int, Change]) -> Change:
    import mlx.core as mx

    count = int(module.weight.shape[0]) if "weight" in module else 0
    if max(several) >= count or any(change.magnitude is not None for change in several.values()):
        raise _misfit(adapter, f"{place} has {count} experts, and the adapter changes expert {max(several)} of it")
    rank = max(change.rank for change in several.values())
    one = next(iter(several.values()))
    nothing = Change(mx.zeros((rank, one.down.shape[-1])), mx.zeros((one.up.shape[0], rank)), 1.0)
    downs, ups = [], []
    for number in range(count):
        change = several.get(number, nothing)
        more = rank - change.rank
        downs.append(mx.pad(change.down, [(0, more), (0, 0)]))
        ups.append(mx.pad(change.up * change.scale, [(0, 0), (0, more)]))
    try:
        return Change(mx.stack(downs), mx.stack(ups), 1.0)
    except ValueError as error:
        raise _misfit(adapter, f"the matrices of the experts of {place} have different shapes") from error


def _check_shapes(adapter: Adapter, place: str, module: "nn.Module", change: Change, model_type: str) -> None:
    from .adapted_layers import base_of

    base = base_of(module)
    if base is None:
        raise _misfit(adapter, f"{place} is a {type(module).__name__}, which takes no adapter")
    if model_type in _READS_WEIGHTS.get(base.kind, ()):
        raise _misfit(adapter, f"{model_type} takes the weights of {place} itself, past an adapter")
    if change.magnitude is not None and base.kind != "linear":
        raise _misfit(adapter, f"DoRA of {place} is not computed here, only that of linear layers")
    stack = () if base.stack is None else (base.stack,)
    wanted = ((*stack, change.rank, base.inputs), (*stack, base.outputs, change.rank))
    given = (tuple(change.down.shape), tuple(change.up.shape))
    if given != wanted:
        raise _misfit(
            adapter,
            f"it changes a matrix of {given[1][-2]:,} by {given[0][-1]:,} where {place} has {base.outputs:,} by {base.inputs:,}"
            if given[0][:-2] == given[1][:-2] == stack
            else f"its matrices for {place} have shapes {given[0]} and {given[1]} instead of {wanted[0]} and {wanted[1]}",
        )
    if change.magnitude is not None and change.magnitude.shape != (base.outputs,):
        raise _misfit(adapter, f"its magnitudes for {place} are {change.magnitude.size:,}, not {base.outputs:,}")


def _misfit(adapter: Adapter, what: str) -> ModelError:
    hint = f"It was trained on {adapter.base}." if adapter.base else "Use the model that it was trained on."
    return ModelUnsupportedError(f"the adapter {adapter.name} does not fit: {what}", hint)
