"""How modules are packed: what is chosen for each unmeasured, and quantizers that take one weight at a time."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
from mlx import nn

from tokamac.engine.device import device_kind
from tokamac.engine.errors import OptionError
from tokamac.engine.model.weights import VISION_FILE
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.cost import PartName, Tensor, part_of
from tokamac.engine.vision.eyes import family_of

from .options import DEFAULT_GROUP_SIZE, GROUP_SIZES, SEARCHED, UNQUANTIZED, Options
from .report import WeightError
from .source import Beside, Packed, Source, check_finite, dequantized, fresh, leaves
from .streaming import LENGTH

if TYPE_CHECKING:
    import numpy as np

# The mixed recipes are mlx-lm's (``mlx_lm.convert``, by Alex Barron after llama.cpp's Q4_K_M): more bits for value and
# down projections in sensitive layers, and for the output head. They replace the model's own rules.


Choices = dict[str, Packing | None]  # by path, of every module that could be packed: how it is, or None where it is not

# Is given the path of a module and the module, and says how it should be packed.
Rule = Callable[[str, Any], Packing | None]

# By name, the bits of most modules and of those that matter more; None leaves all to the options and the model's own
# rules.
RECIPES: Mapping[str, tuple[int, int] | None] = {
    "uniform": None, "mixed_2_6": (2, 6), "mixed_3_4": (3, 4), "mixed_3_6": (3, 6), "mixed_4_6": (4, 6),
}  # fmt: skip

# Modules that matter more in the layers of `in_spread`. Parts of names, as in mlx-lm: "v_a_proj" is also in the latent
# attention's "kv_a_proj_with_mqa".
SPREAD = ("v_proj", "v_a_proj", "v_b_proj", "down_proj")

# Of embedding and output head where nothing was asked: an error there is in every token, and 8 bits are as good as none.
EMBED_BITS = (8, 6, 5)
EMBED_SHARE = 0.2  # of the packed model's bytes, that they may add
SCALE_BITS = 32  # of a group's scale and bias, in half precision

# A module whose path tells where in a path the layer's number stands. A model without it can't use a mixed recipe.
LANDMARK = "down_proj"


def choose(source: Source, options: Options) -> Choices:
    """Return each module's packing. Raises OptionError for a bad recipe, or if nothing can be packed."""
    # The model's own rules (mlx-lm's ``quant_predicate``: routers at 8 bits, say) hold unless a recipe overrides.
    if options.dequantize:
        return {path: None for path, _ in packable(source)}
    if source.carried and options.as_stored:
        return {path: source.carried[path][1] if path in source.carried else None for path, _ in packable(source)}
    recipe = options.recipe or "uniform"
    if recipe not in RECIPES:
        raise OptionError(f"there is no recipe {recipe}", f"Use one of {', '.join(RECIPES)}.")
    bits = RECIPES[recipe]
    rule = _model_rule(source, options) if bits is None else _mixed_rule(source, options, *bits)
    chosen = {path: _fitted(source, options, path, rule(path, module)) for path, module in packable(source)}
    if not any(chosen.values()) and (reasons := out_of_groups(source, chosen, (options.group,))):
        raise OptionError(f"nothing can be packed: {'; '.join(reasons)}", "Use another --group-size, or --dequantize.")
    return chosen


def worthwhile_embed_bits(source: Source, options: Options) -> int | None:
    """Return the most bits that add at most EMBED_SHARE to the model; None: as many as the rest."""
    chosen = choose(source, options)
    bits = {path: (each.bits or 0) + SCALE_BITS / each.group_size for path, each in chosen.items() if each is not None}
    size = {path: source.weights[f"{path}.weight"].size for path in bits}
    ends = [path for path in bits if part(source, path) in ("embedding", "head")]
    if not ends or any(path in source.packed for path in ends):
        return None
    total, of_ends = sum(bits[path] * size[path] for path in bits), sum(size[path] for path in ends)
    own = max(chosen[path].bits or 0 for path in ends)  # type: ignore[union-attr]
    return next((each for each in EMBED_BITS if each > own and (each - own) * of_ends <= EMBED_SHARE * total), None)


def choose_beside(beside: Beside, options: Options) -> Choices:
    if beside.file == VISION_FILE:
        return _of_tower(beside.source, options)
    usual, chosen = Packing(options.packed_bits, options.group, options.mode), Choices()
    for path, (own_path, module) in beside.modules.items():
        weight, rule = beside.source.weights[f"{path}.weight"], model_rule(beside.source, own_path, module)
        wanted: Packing | None = usual if rule else None
        if isinstance(rule, dict):
            wanted = Packing(
                rule.get("bits", usual.bits), rule.get("group_size", usual.group_size), rule.get("mode", "affine")
            )
        if wanted is not None and weight.shape[-1] % wanted.group_size:
            wanted = usual
        fits = wanted is not None and not options.dequantize and weight.shape[-1] % wanted.group_size == 0
        chosen[path] = wanted if fits else None
    return chosen


def _of_tower(tower: Source, options: Options) -> Choices:
    """Return its packings as the source has them, and of linear layers with the bits that were asked for."""
    as_stored: Choices = {path: None if options.dequantize else each.packing for path, each in tower.packed.items()}
    if options.vision_bits is None:
        return as_stored
    family = family_of(tower.folder, tower.config)
    if isinstance(family, str):
        raise OptionError(f"the bits of what sees can't be chosen: {family}", "Leave out --vision-bits.")
    linear = {f"{path}.weight" for path, leaf in leaves(family.tower()) if isinstance(leaf, nn.Linear)}
    widths = {name: array.shape[-1] for name, array in tower.weights.items() if family.own_name(name) in linear}
    groups = (options.group, *reversed(GROUP_SIZES))
    asked: Choices = {
        name.removesuffix(".weight"): next((Packing(options.vision_bits, g) for g in groups if width % g == 0), None)
        for name, width in widths.items()
    }
    return as_stored | asked


def packable(source: Source) -> Iterator[tuple[str, Any]]:
    for path, module in leaves(source.module):
        weight = source.weights.get(f"{path}.weight")
        if "to_quantized" in dir(module) and weight is not None and mx.issubdtype(weight.dtype, mx.floating):
            yield path, module


def part(source: Source, path: str) -> PartName:
    name = f"{path}.weight"
    return part_of(Tensor(name, "", tuple(source.weights[name].shape), 0), source.config)


def left_out(source: Source, chosen: Choices) -> tuple[str, ...]:
    return out_of_groups(source, chosen, {packing.group_size for packing in chosen.values() if packing})


def out_of_groups(source: Source, chosen: Choices, groups: Iterable[int]) -> tuple[str, ...]:
    sizes = sorted(groups)
    unpacked = (_width(source, path) for path, packing in chosen.items() if packing is None)
    widths = Counter(width for width in unpacked if sizes and all(width % size for size in sizes))
    named = f"a group of {sizes[0]}" if len(sizes) == 1 else f"groups of {' or '.join(str(size) for size in sizes)}"
    reason = f"weights can't be divided into {named}"
    return tuple(
        f"{'1 layer stays' if count == 1 else f'{count} layers stay'} unpacked: rows of {width} {reason}"
        for width, count in sorted(widths.items())
    )


def _width(source: Source, path: str) -> int:
    return int(source.weights[f"{path}.weight"].shape[-1])


def _fitted(source: Source, options: Options, path: str, wanted: Packing | None) -> Packing | None:
    if wanted is None:
        return None
    if options.embed_bits is not None and part(source, path) in ("embedding", "head"):
        # These bits are of affine groups: a microscaling format has bits of its own.
        group = wanted.group_size if wanted.mode == "affine" else DEFAULT_GROUP_SIZE
        wanted = Packing(options.embed_bits, group, "affine")
    width = _width(source, path)
    if width % wanted.group_size and wanted.mode == options.mode:
        wanted = replace(wanted, group_size=options.group)
    fits = source.weights[f"{path}.weight"].ndim >= 2 and width % wanted.group_size == 0
    return wanted if fits and wanted.bits != UNQUANTIZED else None


def _model_rule(source: Source, options: Options) -> Rule:
    usual = Packing(options.packed_bits, options.group, options.mode)

    def rule(path: str, module: Any) -> Packing | None:
        own = model_rule(source, path, module)
        if isinstance(own, bool):
            return usual if own else None
        return Packing(own.get("bits", usual.bits), own.get("group_size", usual.group_size), own.get("mode", "affine"))

    return rule


def model_rule(source: Source, path: str, module: Any) -> bool | dict[str, Any]:
    predicate = getattr(source.module, "quant_predicate", None)
    answer = True if predicate is None else predicate(path, module)
    return answer if isinstance(answer, dict) and answer else bool(answer)


def _mixed_rule(source: Source, options: Options, low: int, high: int) -> Rule:
    if options.bits is not None:
        raise OptionError(f"--bits and the recipe {options.recipe} contradict each other", "Give one of them.")
    layers = len(source.module.layers)
    landmark = next((path for path, _ in source.module.named_modules() if LANDMARK in path), None)
    if landmark is None:
        raise OptionError(
            f"the recipe {options.recipe} needs layers called {LANDMARK}, and this model has none",
            "Use --target-bpw, or the recipe uniform.",
        )
    position = next((at for at, word in enumerate(landmark.split(".")) if word.isdigit()), None)

    def rule(path: str, _: Any) -> Packing:
        words = path.split(".")
        number = words[position] if position is not None and position < len(words) else ""
        layer = int(number) if number.isdigit() else 0  # 0 also where it is in none
        more = "lm_head" in path or (in_spread(layer, layers) and any(name in path for name in SPREAD))
        return Packing(high if more else low, options.group)

    return rule


def in_spread(layer: int, layers: int) -> bool:
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


# mlx-lm's calibration holds the whole model; here its code gets one layer or block at a time.


# Weights that are rounded at once, by all cores: MLX takes up to 77 bytes a weight on a CPU, so this bounds that to 0.3
# GB.
BLOCK_WEIGHTS = 1 << 22

# Of a value while a calibrated method works: float32. GPTQ sums squares over all tokens, which half precision can't
# hold, and MLX's CPU backend runs half precision slowly.
FLOAT_BYTES = 4

OTHERWISE = "Use --method search."  # the way out where a calibrated method fails on what another one can pack


class Quantizer(Protocol):
    def pack(self, path: str, weight: mx.array, packing: Packing) -> tuple[mx.array, ...]:
        """Return words, scales and, if affine, biases, in ``mx.quantize``'s layout and types. weight: (…, in)."""
        ...


class Round:
    """MLX's own rounding to the nearest step."""

    def pack(self, path: str, weight: mx.array, packing: Packing) -> tuple[mx.array, ...]:  # noqa: ARG002
        rows, lanes = weight.reshape(-1, weight.shape[-1]), _lanes()
        step = max(1, BLOCK_WEIGHTS // len(lanes) // rows.shape[1])
        # MLX on a CPU packs 32 values at a time: in groups of 16, an odd number of narrow rows would end within such a pack.
        # Where all rows together are odd, the last block is too, as the whole would be.
        step += step % 2
        if rows.shape[0] <= step:
            return tuple(mx.quantize(weight, **asdict(packing)))
        whole: list[mx.array] = []
        for begin in range(0, rows.shape[0], step * len(lanes)):
            for at, lane in zip(range(begin, rows.shape[0], step), lanes, strict=False):
                block = mx.quantize(rows[at : at + step], **asdict(packing), stream=lane)
                whole = whole or [mx.zeros((rows.shape[0], part.shape[1]), part.dtype) for part in block]
                for into, part in zip(whole, block, strict=True):
                    # In place, as nothing else holds it: joining blocks would hold all twice.
                    into[at : at + step] = part
            mx.eval(*whole)
        return tuple(part.reshape(*weight.shape[:-1], part.shape[-1]) for part in whole)


@cache
def _lanes() -> "tuple[mx.ThreadLocalStream | mx.Stream, ...]":
    """Return the streams to share work among: on a CPU one per core."""
    # MLX quantizes with one core per stream.
    device = mx.default_device()
    if device_kind() != "cpu":
        return (mx.default_stream(device),)
    return tuple(mx.new_thread_local_stream(device) for _ in range(os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class Search:
    """Least-squares scales and biases per group; plain rounding where that gains nothing.

    importance: by module path, the mean squared input per channel, which weights the errors.
    """

    importance: "Mapping[str, np.ndarray]" = field(default_factory=dict)

    def pack(self, path: str, weight: mx.array, packing: Packing) -> tuple[mx.array, ...]:
        from .search import search
        from .search.on_mlx import search_scales

        if packing.mode not in SEARCHED:
            return Round().pack(path, weight, packing)
        find = search if packing.mode == "affine" else search_scales
        return find(weight, packing, self.importance.get(path))


def check_plain(method: str, options: Options) -> None:
    if options.mode != "affine":
        raise OptionError(f"{method} packs affine groups, not {options.mode}", "Use --method round, or --mode affine.")
    if options.recipe is not None or options.measures:
        planned = "a recipe" if options.recipe is not None else "a target"
        raise OptionError(f"{method} packs everything alike, and {planned} does not", OTHERWISE)


def uniform(options: Options) -> Packing:
    return Packing(options.packed_bits, options.group, "affine")


def attention_bytes() -> int:
    """Return what attention holds beside its results: on a CPU one head's scores and mask; fused on a GPU."""
    return FLOAT_BYTES * 2 * LENGTH**2 if device_kind() == "cpu" else 0


def working(name: str, weight: mx.array) -> mx.array:
    """Return a weight in float32, evaluated. Raises ConversionError if it is not finite."""
    cast = weight.astype(mx.float32)
    check_finite(name, cast)
    return cast


def packed_arrays(arrays: tuple[mx.array, ...], path: str, packing: Packing) -> Packed:
    """Return a packed layer. Raises ConversionError if not finite."""
    check_finite(f"{path}.weight", *arrays[1:], hint=OTHERWISE)
    mx.eval(*arrays)
    return Packed(packing, arrays)


def with_packed(source: Source, packed: dict[str, Packed], changed: dict[str, mx.array]) -> Source:
    seen = {f"{path}.weight": dequantized(each.arrays, each.packing) for path, each in packed.items()}
    return replace(source, weights={**source.weights, **seen, **changed}, packed={**source.packed, **packed})


class Ends:
    """Packs by search, weighed by their inputs, what a method leaves: a tied embedding is the head as well."""

    def __init__(self, source: Source, chosen: Choices, beside: Iterable[str]) -> None:
        left = {path for path, packing in chosen.items() if packing} - {*beside, *source.packed}
        self._paths = {path for path in left if source.weights[f"{path}.weight"].ndim == 2}
        self._source, self._chosen = source, chosen
        self._squares: dict[str, mx.array] = {}

    def add(self, path: str, rows: mx.array) -> None:
        """rows: (n, in)."""
        if path in self._paths:
            squares = mx.sum(mx.square(rows.astype(mx.float32)), axis=0)
            self._squares[path] = squares + self._squares.get(path, 0)
            mx.eval(self._squares[path])

    def packed(self) -> dict[str, Packed]:
        """Return what was seen, packed. Raises ConversionError if not finite."""
        import numpy as np

        from .search import squared_error

        weights, found = fresh(self._source), dict[str, Packed]()
        quantizer = Search({path: np.array(squares) for path, squares in self._squares.items()})
        for path in self._squares:
            packing, weight = self._chosen[path], weights.pop(f"{path}.weight")
            assert packing is not None
            packed = packed_arrays(quantizer.pack(path, weight, packing), path, packing)
            found[path] = replace(packed, error=WeightError(*squared_error(weight, packed.arrays, packing)))
        return found
