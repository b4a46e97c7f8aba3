"""Published speeds as numbers, and how far predictions are from them.

measured.csv has a row for each published speed, attention.csv the times of single kernels. A row's engine, bits and context are
prose in its source; the rules below say how each form is read. Nothing is guessed: a chip whose bin is not given, a model whose
shape is not in the catalogue, or speculative decoding leaves the row out, and the reason is kept.

``python -m tests.roofline.measurements TABLE`` prints the errors of other rows than the constants were fitted to: of a table like
measured.csv, which may have one more column, ``config``, with the path of the model's config.json.
"""

import csv
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from tests.engine.kv.models import work_of_config
from tokamac.engine.metrics import rate
from tokamac.engine.model.config import ignored_windows, normalise
from tokamac.engine.model.weights import text_config
from tokamac.engine.perf.catalogue import CatalogueEntry, find
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.hardware import Chip, lookup, units_of
from tokamac.engine.perf.roofline import CHUNK, Constants, Fitted, Heads, KVUse, Workload, constants_of, kind_of

SOURCE = Path(__file__).resolve().parent / "measured.csv"
ATTENTION = SOURCE.with_name("attention.csv")

# Tokens of context while a short chat prompt is answered with the usual 256 tokens: half of these, and the prompt.
SHORT = 160

MLX = ("mlx", "rapid-mlx", "vllm-mlx", "lm studio mlx", "mlx-swift-lm", "ax-engine", "mlx server")
# Runs mlx-lm's decode, but reads prompts with kernels of its own: up to twice as fast on the same chip in the same
# table.
OWN_PREFILL = "ax-engine"
# Stored bits a weight of llama.cpp's formats; the last is an average over a model's tensors.
GGUF_BITS = {"F16": 16.0, "Q8_0": 8.5, "Q4_0": 4.5, "Q4_K_M": 4.85}


# Forms of a row's context: tokens of the prompt and, in the middle of decoding, of the context, less those before the
# prompt.
FORMS: tuple[tuple[str, Callable[..., tuple[float | None, float]]], ...] = (
    (r"pp(\d+)", lambda prompt: (prompt, 64)),  # llama-bench decodes from an empty context
    (r"tg\d+", lambda: (None, 64)),
    (r"p(\d+) \(decode", lambda prompt: (prompt, prompt)),
    (r"p(\d+) g(\d+)", lambda prompt, reply: (prompt, prompt + reply // 2)),
    (r"p(?:rompt )?(\d+)", lambda prompt: (prompt, prompt + 64)),
    (r".*/ (\d+)K", lambda prompt: (1024 * prompt, SHORT)),
    (r"([\d.]+)K prompt", lambda context: (None, 1000 * context)),
    (r"~(\d+)", lambda prompt: (prompt, prompt)),
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row. Rates in tokens a second; None: not given, or not of plain decoding.

    model: the catalogue's name. prompt: tokens read, after ``cached``; depth: tokens of context in the middle of decoding.
    """

    engine: str
    chip: Chip
    label: str
    model: str
    work: Workload
    prompt: int | None
    cached: int
    depth: int
    prefill_tps: float | None
    decode_tps: float | None


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row that is not compared, and why."""

    label: str
    reason: str


@dataclass(frozen=True, slots=True)
class AttentionTiming:
    """How long one query of a decode step took to attend to 16-bit keys and values of ``context`` tokens."""

    chip: Chip
    label: str
    layer: KVUse
    context: int
    seconds: float


def read_attention(source: Path = ATTENTION) -> list[AttentionTiming]:
    """Return the published times of MLX's attention kernels, given there as bytes read a second, each key and value once."""
    with source.open(encoding="utf-8", newline="") as file:
        return [_read_timing(row) for row in csv.DictReader(file)]


def _read_timing(row: dict[str, str]) -> AttentionTiming:
    queries, keys, size, context = (int(row[name]) for name in ("query_heads", "key_heads", "head_size", "context"))
    layer = KVUse(2 * 2 * keys * size, None, 0, Heads(queries, keys, size, size))
    label = " · ".join(row[name] for name in ("chip", "query_heads", "key_heads", "head_size", "context", "mlx"))
    cores = int(row["gpu_cores"]) if row["gpu_cores"] else None
    seconds = layer.bytes_at(context) / (float(row["gb_per_s"]) * 1e9)
    return AttentionTiming(lookup(row["chip"], cores), label, layer, context, seconds)


def read(source: Path = SOURCE) -> tuple[list[Measurement], list[SkippedRow]]:
    """Return the rows that can be compared with a prediction, and the others."""
    kept: list[Measurement] = []
    left: list[SkippedRow] = []
    with source.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found = _read_row(row)
            (kept if isinstance(found, Measurement) else left).append(found)  # type: ignore[arg-type]
    return kept, left


def _read_row(row: dict[str, str]) -> Measurement | SkippedRow:
    label = " · ".join(row[key] for key in ("chip", "gpu_cores", "model", "weights_bits_desc", "context", "engine"))
    engine = _engine(row["engine"])
    if engine is None:
        return SkippedRow(label, "another engine's kernels")
    if "wall" in row["context"]:
        return SkippedRow(label, "wall time, the prompt's included")
    cores = re.match(r"\d+", row["gpu_cores"])
    chip = lookup(row["chip"], int(cores.group()) if cores else None)
    if chip.bandwidth_gbs is None:
        return SkippedRow(label, "the chip's bin is not given")
    name, work = _work(row, engine)
    if isinstance(work, str):
        return SkippedRow(label, work)
    prompt, cached, depth = _lengths(row["context"])
    rates = [float(row[key]) if row[key] else None for key in ("prefill_tps", "decode_tps")]
    if row["engine"].startswith(OWN_PREFILL):
        rates[0] = None
    if "speculative" in row["weights_bits_desc"]:
        rates[1] = None
    if rates == [None, None]:
        return SkippedRow(label, "speculative decoding, or kernels of its own")
    return Measurement(engine, chip, label, name, work, prompt, cached, depth, *rates)


def _engine(text: str) -> str | None:
    name = text.lower()
    if name.startswith("llama.cpp"):
        return "llama.cpp 2023" if "8e672ef" in name else "llama.cpp"
    return "mlx" if name.startswith(MLX) else None


def _work(row: dict[str, str], engine: str) -> tuple[str, Workload | str]:
    """Return the model's name and its work, or why that is not known. A table of more rows may name the config.json itself."""
    entry, bits = find(row["model"]), _bits(row, engine)
    name = row["model"] if entry is None else entry.name
    config = _config(row.get("config") or "") if entry is None else entry.config
    if config is None:
        return name, "the model's shape is not known"
    if bits is None:
        return name, "its bits per weight are not given"
    if bits == "own":
        return name, "its own packing is not known" if entry is None else _own(entry)
    if engine == "mlx":
        width, group = bits
        return name, _of(json.dumps(_as_run(config)), Packing(None if width == 16 else int(width), group))
    return name, _scaled(_of(json.dumps(dict(config)), Packing(None)), bits[0] / 16)


def _config(path: str) -> dict[str, Any] | None:
    return normalise(json.loads(Path(path).read_text(encoding="utf-8"))) if path else None


def _as_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without the windows that mlx-lm's class ignores: it attended to the whole context, unlike our caches."""
    layers = text_config(config).get("num_hidden_layers", 0)
    ignored = any(window is not None for window in ignored_windows(config, layers))
    return {**config, "sliding_window": None} if ignored else dict(config)


def _own(entry: CatalogueEntry) -> Workload | str:
    """Return the work of the model as its first repository packs it."""
    repository = entry.repositories[0]
    config = entry.config_of(repository)
    assert config is not None
    return work_of_config(config, packing=repository.packing)


@functools.cache
def _of(config: str, packing: Packing | None) -> Workload | str:
    return work_of_config(json.loads(config), packing=packing)


def _bits(row: dict[str, str], engine: str) -> tuple[float, int] | Literal["own"] | None:
    """Return (bits, group size); for llama.cpp stored bits a weight; "own" where the repository's config says it."""
    text = f"{row['weights_bits_desc']} {row['model']}"
    if engine != "mlx":
        return next(((bits, 0) for name, bits in GGUF_BITS.items() if name in text), None)
    if "MXFP4" in text.upper() or "gpt-oss" in text:
        return "own"
    if "bf16" in text:
        return 16, 64
    if "snapshot" in text or "requant" in text:
        return None  # feed-forward layers alone were packed otherwise
    if found := re.search(r"\bq(\d)(?: g(\d+))?\b|MLX Q(\d)|(?<!\d)(\d)-?bit", text):
        width = next(value for value in (found.group(1), found.group(3), found.group(4)) if value)
        return int(width), int(found.group(2) or 64)
    return None


def _lengths(text: str) -> tuple[int | None, int, int]:
    """Return (prompt tokens, tokens before them, tokens of context in the middle of decoding)."""
    before = re.search(r"\bdepth (\d+)", text)
    cached = int(before.group(1)) if before else 0
    for form, read_as in FORMS:
        if found := re.match(form, text):
            prompt, depth = read_as(*map(float, found.groups()))
            return None if prompt is None else round(prompt), cached, cached + round(depth)
    return None, cached, cached + SHORT


def _scaled(work: Workload | str, share: float) -> Workload | str:
    """Return the work with 16-bit weights scaled to another format's bits."""
    if isinstance(work, str):
        return work
    return replace(work, shared_bytes=round(work.shared_bytes * share), expert_bytes=round(work.expert_bytes * share))


REASONS = Path(__file__).resolve().parent / "likely_reasons.csv"
FAR = 0.25  # relative error from which a row is listed by itself
# llama.cpp's rows of one build of 2023 can't be compared with later ones, as their source says.
ENGINES = ("mlx", "llama.cpp 2023", "llama.cpp")
KINDS = ("dense", "mixture", "hybrid")

# Contexts in the middle of decoding, from the first up to below the second: attention's share of a step grows with
# them.
DEPTHS = {
    "under 2k tokens": (0, 2048),
    "2k to 16k tokens": (2048, 16_384),
    "16k to 64k tokens": (16_384, 65_537),
    "beyond 64k tokens": (65_537, None),
}

Phase = Literal["decode", "prefill"]

Rate = Callable[[Measurement, "All"], float | None]

All = Mapping[str, Constants]  # the constants of every engine


@dataclass(frozen=True, slots=True)
class Error:
    """Predicted ÷ published − 1 of one phase of a row."""

    phase: Phase
    row: Measurement
    value: float


def decode_rate(row: Measurement, constants: All) -> float | None:
    """Return the tokens a second that decoding is predicted at. Constants are shares of what a chip allows, so no ceiling has to be
    looked at."""
    return rate(1, Fitted(row.chip, constants[row.engine]).decode_s(row.work, row.depth))


def prefill_rate(row: Measurement, constants: All) -> float | None:
    """Return the tokens a second that the prompt is predicted to be read at; None where its length or the peak is unknown."""
    if row.prompt is None:
        return None
    return rate(row.prompt, Fitted(row.chip, constants[row.engine]).prefill_s(row.work, row.prompt, row.cached, CHUNK))


def _published(row: Measurement, predicted: Rate) -> float:
    published = row.decode_tps if predicted is decode_rate else row.prefill_tps
    assert published is not None
    return published


def log_ratio(row: Measurement, predicted: Rate, constants: All) -> float:
    """Return the logarithm of predicted ÷ published."""
    found = predicted(row, constants)
    assert found is not None
    return math.log(found / _published(row, predicted))


def attention_ratio(timing: AttentionTiming, constants: All) -> float:
    """Return predicted ÷ published seconds of an attention kernel of MLX."""
    bandwidth = timing.chip.bandwidth_gbs
    assert bandwidth is not None
    predicted = Fitted(timing.chip, constants["mlx"]).attending_s(timing.layer, timing.context, bandwidth)
    return predicted / timing.seconds


def attention_errors(timings: Iterable[AttentionTiming], constants: All) -> dict[str, Any]:
    """Return how large the errors of the attention kernels' times are, as fitted."""
    return _sizes(attention_ratio(timing, constants) - 1 for timing in timings)


def fitted_errors(rows: Sequence[Measurement], constants: All) -> list[Error]:
    """Return the errors of all rows that these constants predict."""
    return [error for phase, row in given(rows) for error in error_of(phase, row, constants)]


def given(rows: Iterable[Measurement]) -> Iterator[tuple[Phase, Measurement]]:
    """Yield what the rows give speeds of, each row once for each phase."""
    for row in rows:
        if row.decode_tps is not None:
            yield "decode", row
        if row.prefill_tps is not None and row.prompt is not None:
            yield "prefill", row


def error_of(phase: Phase, row: Measurement, constants: All) -> Iterator[Error]:
    """Yield the error of a phase, if these constants predict it."""
    predicted = decode_rate if phase == "decode" else prefill_rate
    if predicted(row, constants) is not None:
        yield Error(phase, row, math.expm1(log_ratio(row, predicted, constants)))


def tells(other: Measurement, row: Measurement, phase: Phase) -> bool:
    """Whether another row tells anything of this row's constants: kinds of models share decoding, but prefill differs by kind and
    by what multiplies."""
    if other.engine != row.engine:
        return False
    same_units, same_kind = units_of(other.chip) == units_of(row.chip), kind_of(other.work) == kind_of(row.work)
    return phase == "decode" or (same_units and same_kind)


def chip_of(row: Measurement) -> str:
    """Return the name of the chip, whose bins count as one."""
    return row.chip.name


def model_of(row: Measurement) -> str:
    """Return the name of the model, whatever its bits."""
    return row.model


def summaries(by_how: Mapping[str, Sequence[Error]]) -> dict[str, dict[str, Any]]:
    """Return how large errors are, by engine, then by phase and kind of model, then by how they came about.

    Beside the kinds, each alone: all of them together, both builds of llama.cpp, and MLX's decoding by the context's length.
    """
    found: dict[str, dict[str, Any]] = {}
    for engine, phase in product(ENGINES, ("decode", "prefill")):
        groups: list[tuple[str, Sequence[str], Sequence[str]]] = [
            ("dense", (engine,), ("dense",)),
            ("mixture and hybrid", (engine,), ("mixture", "hybrid")),
            ("all", (engine,), KINDS),
        ]
        if engine == "llama.cpp":
            groups.append(("both builds", ("llama.cpp 2023", "llama.cpp"), KINDS))
        for label, engines, kinds in groups:
            for how, errors in by_how.items():
                chosen = [
                    each
                    for each in errors
                    if each.phase == phase and each.row.engine in engines and kind_of(each.row.work) in kinds
                ]
                if chosen:
                    sizes = found.setdefault(engine, {}).setdefault(f"{phase}, {label}", {})
                    sizes[how] = _sizes(chosen) | ({} if label in ("all", "both builds") else {"far": _far(chosen)})
    for (label, (least, below)), (how, errors) in product(DEPTHS.items(), by_how.items()):
        decoding = [each for each in errors if each.phase == "decode" and each.row.engine == "mlx"]
        chosen = [each for each in decoding if least <= each.row.depth < (below or math.inf)]
        if chosen:
            found["mlx"].setdefault(f"decode, {label}", {})[how] = _sizes(chosen)
    return found


def _sizes(errors: Iterable[Error | float]) -> dict[str, Any]:
    sizes = sorted(abs(each.value if isinstance(each, Error) else each) for each in errors)
    return {"rows": len(sizes), "median": round(median(sizes), 4), "p90": round(float(np.quantile(sizes, 0.9)), 4)}


def _far(errors: Iterable[Error]) -> dict[str, dict[str, Any]]:
    """Return the rows that are far off, each with its likely reason."""
    return {
        each.row.label: {"error": round(each.value, 3), "likely": _reason(each.row)}
        for each in errors
        if abs(each.value) > FAR
    }


def _reason(row: Measurement) -> str:
    """Return the likely reason why a row is far off. Raises KeyError for a row that nobody has looked at."""
    with REASONS.open(encoding="utf-8", newline="") as file:
        for marks, reason in list(csv.reader(file))[1:]:
            if all(mark in row.label for mark in marks.split(" + ")):
                return reason
    raise KeyError(f"{row.label} is far off: find out why, and add the likely reason to {REASONS.name}")


def main(table: Path) -> None:
    """Print the errors of a table's rows with the shipped constants, by model and by the context's length."""
    rows, left = read(table)
    errors = fitted_errors(rows, {engine: constants_of(engine) for engine in ENGINES})
    for phase in ("decode", "prefill"):
        of_phase = [each for each in errors if each.phase == phase]
        _print(f"{phase}, all", of_phase)
        for label, (least, below) in DEPTHS.items():
            _print(f"{phase}, {label}", [each for each in of_phase if least <= each.row.depth < (below or math.inf)])
        for model in sorted({each.row.model for each in of_phase}):
            _print(f"{phase}, {model}", [each for each in of_phase if each.row.model == model])
    for each in sorted(errors, key=lambda error: -abs(error.value))[:10]:
        print(f"    {each.value:+.1%}  {each.phase}, {each.row.label}")
    print(f"left out: {len(left)} rows")


def _print(label: str, errors: Sequence[Error]) -> None:
    if errors:
        sizes = _sizes(errors)
        print(f"{label}: {sizes['rows']} rows, median {sizes['median']:.1%}, p90 {sizes['p90']:.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
