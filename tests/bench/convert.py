"""Sections search and convert: converting, beside mlx_lm.convert: memory, time, and how close the result is to its
source."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.plan import Plan, Remote, resident_peak
from tests.bench.report import Row, Section, Series, alternate, at_least, at_most, holds, plain, ratios, series
from tests.engine.helpers import CONFIG, write_tokenizer
from tokamac.engine.metrics import rate
from tokamac.engine.perf.config_cost import Packing

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np


# Section: what the search of groups saves of rounding's error, and how fast it is.

KINDS = ("gaussian", "student", "laplace")
# By bits and group size: squared error over that of mx.quantize.
TARGETS = {(4, 64): 0.82, (3, 64): 0.76, (2, 64): 0.70, (4, 32): 0.76}

# The embedded model ships with 4 bits at groups of 64, where there is nothing left to find.
EMBEDDED_TARGETS = {(3, 64): 0.76, (2, 64): 0.70, (4, 128): None}

PACKINGS = [(bits, size) for size in (64, 32, 128) for bits in (4, 3, 2, 5, 6, 8)]
COLUMNS = 4096
SCALES = (Packing(4, 32, "mxfp4"), Packing(4, 16, "nvfp4"))
MINIMUM_MWPS = 25.0


@dataclass(frozen=True, slots=True)
class Errors:
    """Sums of squared errors."""

    searched: float
    rounded: float

    @property
    def ratio(self) -> float:
        """What is left of rounding's error."""
        return self.searched / self.rounded


class SearchLab:
    """Seeded weights in bfloat16, (rows, COLUMNS) of each kind, searched and rounded."""

    def __init__(self, rows: int) -> None:
        from tests.quant.test_search import seeded

        self._seeded = {kind: _stored(seeded(kind, rows, COLUMNS)) for kind in KINDS}

    def described(self) -> str:
        """Return what computes the search."""
        from tokamac.quant.search import implementation

        return implementation().name

    def errors(self, kind: str, packing: Packing) -> Errors:
        """Pack seeded weights both ways."""
        return _compared([self._seeded[kind]], packing)

    def embedded(self, packing: Packing) -> Errors:
        """Pack every packed weight of the embedded model both ways, from what it unpacks to."""
        from tokamac.assets import asset_path
        from tokamac.quant.source import open_source

        source = open_source(asset_path("guide", "model"))
        return _compared([source.weights[f"{path}.weight"] for path in source.packed], packing)

    def seconds(self, side: str, number: int) -> float:
        """Search or round the Gaussian weights at 4 bits, or measure how far the rounded ones are."""
        import mlx.core as mx

        from tokamac.quant.search import search, squared_error

        del number  # the same weights each time
        weight, packing = self._seeded["gaussian"], Packing(4)
        arrays = _rounded(weight, packing)
        mx.eval(arrays)
        began = time.perf_counter()
        if side == "error":
            squared_error(weight, arrays, packing)
        else:
            mx.eval(search(weight, packing) if side == "search" else _rounded(weight, packing))
        return time.perf_counter() - began


def _stored(values: "np.ndarray") -> "mx.array":
    import mlx.core as mx

    stored = mx.array(values).astype(mx.bfloat16)
    mx.eval(stored)
    return stored


def _rounded(weight: "mx.array", packing: Packing) -> "tuple[mx.array, ...]":
    import mlx.core as mx

    return tuple(mx.quantize(weight, **asdict(packing)))


def _compared(weights: "Sequence[mx.array]", packing: Packing) -> Errors:
    from tokamac.quant.search import search, squared_error
    from tokamac.quant.search.on_mlx import search_scales

    find = search if packing.mode == "affine" else search_scales
    searched = sum(squared_error(weight, find(weight, packing), packing)[0] for weight in weights)
    rounded = sum(squared_error(weight, _rounded(weight, packing), packing)[0] for weight in weights)
    return Errors(searched, rounded)


def measure_search(plan: Plan) -> Section:
    """Compare errors on seeded weights and on the embedded model's, then rates in turn."""
    rows = plan.count(2048, 256)
    with Remote(SearchLab, rows) as lab:
        by = lab.call("described")
        figures = [_seeded_row(lab, Packing(bits, size), TARGETS.get((bits, size))) for bits, size in PACKINGS]
        figures += [_seeded_row(lab, packing, None) for packing in SCALES]
        figures += [_embedded_row(lab, Packing(*each), bound) for each, bound in EMBEDDED_TARGETS.items()]
        figures += _rates(lab, plan, rows * COLUMNS / 1e6)
    how = (
        "Squared error of what `search` packs, divided by that of `mx.quantize`: Gaussian / Student-t (5 degrees of "
        f"freedom) / Laplace weights, {rows:,} × {COLUMNS:,} seeded values of each in bfloat16; a target is for the worst "
        "of the three. The embedded model ships packed at 4 bits in groups of 64, and the weights it was made from are not "
        "kept: what it unpacks to has 16 values a group, which any method packs again at 4 bits and 64 without loss. So "
        "its rows say what packing it to fewer bits, or in larger groups, loses. Rates: 4 bits, groups of 64, the Gaussian "
        f"weights, in turn; the search by {by} on all cores, and one call of `mx.quantize`, which on a CPU uses one."
    )
    return Section("Search: packing with less error", figures, how)


def _seeded_row(lab: Remote, packing: Packing, bound: float | None) -> Row:
    found = [lab.call("errors", kind, packing).ratio for kind in KINDS]
    what = f"{packing.bits} bits" if packing.mode == "affine" else packing.mode
    return _row(f"error ÷ rounding's, {what}, groups of {packing.group_size}", found, bound)


def _embedded_row(lab: Remote, packing: Packing, bound: float | None) -> Row:
    found = [lab.call("embedded", packing).ratio]
    return _row(f"embedded model to {packing.bits} bits, groups of {packing.group_size}", found, bound)


def _row(what: str, found: list[float], bound: float | None) -> Row:
    value = " / ".join(f"{each:.3f}" for each in found)
    return Row(what, value) if bound is None else holds(what, value, f"≤ {bound:.2f}", met=max(found) <= bound)


def _rates(lab: Remote, plan: Plan, megaweights: float) -> list[Row]:
    sides = ("search", "round", "error")
    for side in sides:
        lab.call("seconds", side, 0)
    taken = alternate(plan.many_rounds, *(partial(lab.call, "seconds", side) for side in sides))
    searched, rounded, compared = (series([rate(megaweights, each) for each in found]) for found in taken)
    return [
        at_least("search", searched, MINIMUM_MWPS, "M weights/s"),
        plain("mx.quantize", rounded, "M weights/s"),
        plain("time of search ÷ mx.quantize", ratios(rounded, searched)),
        plain("measuring the error", compared, "M weights/s"),
    ]


# Conversions in a process of their own, ours and mlx-lm's: how long each takes, and the most memory its process
# ever had.

SHARD_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Run:
    """One conversion. peak_bytes: of the whole process, libraries included; device_bytes: what MLX held at most."""

    seconds: float
    peak_bytes: int
    device_bytes: int


class ConvertLab:
    """Converts once. Libraries are imported before the clock starts."""

    def __init__(self) -> None:
        import mlx_lm.convert  # noqa: F401  # both sides begin with the same libraries in memory

        import tokamac.quant.conversion  # noqa: F401

    def ours(self, source: Path, out: Path, asked: dict[str, Any]) -> Run:
        """Convert with Tokamac."""
        from tokamac.quant import convert

        return _timed(lambda: convert(source, out, **asked))

    def theirs(self, source: Path, out: Path, group_size: int) -> Run:
        """Convert with mlx_lm, to 4 bits."""
        from mlx_lm.convert import convert

        return _timed(lambda: convert(str(source), str(out), quantize=True, q_bits=4, q_group_size=group_size))


def _timed(convert: Any) -> Run:
    import mlx.core as mx

    mx.reset_peak_memory()
    began = time.perf_counter()
    convert()
    seconds = time.perf_counter() - began
    return Run(seconds, resident_peak(), mx.get_peak_memory())


def write_source(folder: Path, **changes: Any) -> int:
    """Write a seeded llama in bfloat16, in shards of about 100 MB; return the bytes of its weights."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from tokamac.engine.model.loader import skeleton_model

    folder.mkdir(parents=True)
    config = {**CONFIG, **changes, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    mx.random.seed(11)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = total = 0
    for name, hollow in tree_flatten(skeleton_model(config, 2).parameters()):
        if filled and filled + hollow.nbytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append((name, tuple(hollow.shape)))
        filled, total = filled + hollow.nbytes, total + hollow.nbytes
    where = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        arrays = {name: (mx.random.normal(shape) * 0.02).astype(mx.bfloat16) for name, shape in names}
        mx.save_safetensors(str(folder / file), arrays, {"format": "pt"})
        where.update(dict.fromkeys(arrays, file))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


class QualityLab:
    """How far converted folders are from their source, on conversations that the embedded model was made for."""

    def __init__(self, source: Path, tokens: int, texts: int) -> None:
        self._source = source
        self._ids = list(_conversations(source, tokens, texts))

    def kl(self, folder: Path) -> float:
        """Return the mean KL divergence in nats a token."""
        from tokamac.quant.evaluation import verify
        from tokamac.quant.streaming import Streamed, streamable_folder

        found = []
        for ids in self._ids:
            compared = verify(Streamed(streamable_folder(self._source)), Streamed(streamable_folder(folder)), ids)
            if compared.quality.kl is None:
                raise ValueError(f"{folder} gives values that are not numbers")
            found.append(compared.quality.kl)
        return sum(found) / len(found)


def _conversations(source: Path, tokens: int, texts: int) -> Any:
    """Yield held-out questions with their answers, as the model's template writes them, each text of ``tokens`` tokens."""
    from tests.guide.dataset import read_corpus
    from tests.guide.evaluate import held_out_cases
    from tokamac.engine.events import Message
    from tokamac.engine.model.config import read_config
    from tokamac.engine.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source, read_config(source), source.name)
    cases = list(held_out_cases(read_corpus()))
    for number in range(texts):
        ids: list[int] = []
        messages: list[Message] = []
        for case in cases[number * len(cases) // texts :]:
            messages += [Message("user", case.question), Message("assistant", case.turn.answer)]
            ids = tokenizer.encode(tokenizer.render(messages, reply=False))
            if len(ids) >= tokens:
                break
        yield ids[:tokens]


# Section: converting, beside mlx_lm.convert: memory, time, and how close the result is to its source.

LARGE = {
    "hidden_size": 2048, "num_hidden_layers": 20, "intermediate_size": 5632, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000,
}  # fmt: skip
SMALL = {**LARGE, "num_hidden_layers": 3}
# Conversions of the seeded source, in turn with mlx_lm's.
OURS: Mapping[str, dict[str, Any]] = {"round": {"method": "round", "verify": False}, "search": {"verify": False}}

# Names a folder that the guide's train.py or mean.py wrote: a guide's float weights, which the repository does not
# hold.
FLOATS = "TOKAMAC_BENCH_FLOATS"


def measure_convert(plan: Plan) -> Section:
    """Convert a large seeded model in turn with mlx_lm, then the embedded one in several ways."""
    with tempfile.TemporaryDirectory(prefix="tokamac-convert-") as scratch:
        rows, described = _large(plan, Path(scratch))
        rows += _embedded(plan, Path(scratch))
    how = (
        f"A seeded llama of {described} in shards of 100 MB of bfloat16, to 4 bits in groups of 64, each conversion in a "
        "process of its own, in turn with `mlx_lm.convert`; seconds without importing libraries, memory of the whole "
        "process with them. Without comparing at the end, as mlx_lm does not compare, but for the row that says so. "
        f"KL divergence on held-out conversations of the guide, 16 × 256 tokens, between {_named()} and what it became; "
        "the budget is as many bits per weight, for the whole model, as mlx_lm's packing takes for what it packs."
    )
    return Section("Conversion", rows, how)


def _large(plan: Plan, scratch: Path) -> tuple[list[Row], str]:
    source = scratch / "source"
    source_bytes = write_source(source, **(SMALL if plan.quick else LARGE))
    sides: dict[str, Callable[[int], Run]] = {"mlx_lm": partial(_run, "theirs", source, scratch / "out", 64)}
    for name, asked in OURS.items():
        sides[name] = partial(_run, "ours", source, scratch / "out", asked)
    taken = dict(zip(sides, alternate(plan.count(3, 1), *sides.values()), strict=True))
    taken["search, then compared"] = [_run("ours", source, scratch / "out", {}, 1)]
    seconds = {name: series([run.seconds for run in runs]) for name, runs in taken.items()}
    memory = {name: series([run.peak_bytes for run in runs]) for name, runs in taken.items()}
    shutil.rmtree(source)
    rows = [plain(f"time, {name}", each, "s") for name, each in seconds.items()]
    rows += [
        at_most("time of round ÷ mlx_lm's", ratios(seconds["round"], seconds["mlx_lm"]), 1.3),
        at_most("time of search ÷ mlx_lm's", ratios(seconds["search"], seconds["mlx_lm"]), 4.0),
    ]
    rows += [plain(f"peak memory, {name}", _scaled(each, 1e-6), "MB") for name, each in memory.items()]
    rows += [
        at_most(f"peak memory of {name} ÷ the source", _scaled(memory[name], 1 / source_bytes), 0.25)
        for name in ("round", "search")
    ]
    rows += [
        at_most(f"peak memory of {name} ÷ mlx_lm's", ratios(memory[name], memory["mlx_lm"]), 0.5)
        for name in ("round", "search")
    ]
    return rows, f"{source_bytes / 1e9:.2f} GB"


def _scaled(values: Series, by: float) -> Series:
    return Series(tuple(value * by for value in values.values))


def _run(side: str, source: Path, out: Path, asked: object, number: int) -> Run:
    del number
    with Remote(ConvertLab) as lab:
        run: Run = lab.call(side, source, out, asked)
    shutil.rmtree(out)
    return run


def _named() -> str:
    return "a guide's float weights as they were trained" if FLOATS in os.environ else "the unpacked guide"


def _embedded(plan: Plan, scratch: Path) -> list[Row]:
    """Pack a guide's float weights; without them, unpack the one that ships, which leaves nothing to lose at 4 bits and 64."""
    source, group = _floats(scratch)
    asked: dict[str, dict[str, Any]] = {
        "mlx_lm": {},
        "search": {"group_size": group},
        "search, calibrated": {"group_size": group, "calibration": "shipped"},
        "gptq": {"group_size": group, "method": "gptq"},
        "budget": {"target_bpw": 4 + 32 / group},
    }
    with Remote(QualityLab, source, 256, plan.count(16, 1)) as lab:
        kl = {}
        for name, options in asked.items():
            out = scratch / "small"
            with Remote(ConvertLab) as converter:
                if name == "mlx_lm":
                    converter.call("theirs", source, out, group)
                else:
                    converter.call("ours", source, out, {**options, "verify": False})
            kl[name] = (lab.call("kl", out), _weight_bytes(out))
            shutil.rmtree(out)
    theirs, their_bytes = kl["mlx_lm"]
    rows = [
        Row(f"KL, {name}", f"{value:.4f} nats a token, {nbytes / 1e6:.3f} MB") for name, (value, nbytes) in kl.items()
    ]
    rows.append(at_most("KL of search ÷ mlx_lm's", Series((kl["search"][0] / theirs,)), 0.85))
    planned, planned_bytes = kl["budget"]
    rows.append(at_most("KL of the budget ÷ mlx_lm's", Series((planned / theirs,)), 1.0))
    rows.append(at_most("bytes of the budget ÷ mlx_lm's", Series((planned_bytes / their_bytes,)), 1.0))
    return rows


def _floats(scratch: Path) -> tuple[Path, int]:
    """Return a float model, and the group size that loses something of it."""
    if named := os.environ.get(FLOATS):
        return Path(named), 64
    from tokamac.assets import asset_path
    from tokamac.quant import convert

    out = scratch / "unpacked"
    convert(asset_path("guide", "model"), out, dequantize=True, verify=False)
    return out, 128


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
