"""Published speeds as numbers: measured.csv, read row by row, and attention.csv, times of single kernels. What can't be compared is
left out, and why is kept.

A row's engine, bits and context are prose in its source; the rules below say how each form is read. Nothing is guessed: a chip
whose bin is not told, a model whose shape is not in the catalogue, or speculative decoding leaves the row out.
"""

import csv
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokamac.engine.config import normalise
from tokamac.engine.kv.windows import ignored_windows
from tokamac.engine.limits.attention_work import Heads
from tokamac.engine.limits.catalogue import Entry, find
from tokamac.engine.limits.config_cost import Packing
from tokamac.engine.limits.cost import text_config
from tokamac.engine.limits.hardware import Chip, lookup
from tokamac.engine.limits.work import KVLayer, Work, work_of_config

SOURCE = Path(__file__).resolve().parent / "measured.csv"
ATTENTION = SOURCE.with_name("attention.csv")

SHORT = 160
"""Tokens of context while a short chat prompt is answered with the usual 256 tokens: half of these, and the prompt."""

MLX = ("mlx", "rapid-mlx", "vllm-mlx", "lm studio mlx", "mlx-swift-lm", "ax-engine", "mlx server")
OWN_PREFILL = "ax-engine"
"""Runs mlx-lm's decode, but reads prompts with kernels of its own: up to twice as fast on the same chip in the same table."""
GGUF_BITS = {"F16": 16.0, "Q8_0": 8.5, "Q4_0": 4.5, "Q4_K_M": 4.85}
"""Stored bits a weight of llama.cpp's formats; the last is an average over a model's tensors."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row. Rates in tokens a second; None: not given, or not of plain decoding.

    model: the catalogue's name. prompt: tokens read, after ``cached``; depth: tokens of context in the middle of decoding.
    """

    engine: str
    chip: Chip
    label: str
    model: str
    work: Work
    prompt: int | None
    cached: int
    depth: int
    prefill_tps: float | None
    decode_tps: float | None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that is not compared, and why."""

    label: str
    reason: str


@dataclass(frozen=True, slots=True)
class AttentionTiming:
    """How long one query of a decode step took to attend to 16-bit keys and values of ``context`` tokens."""

    chip: Chip
    label: str
    layer: KVLayer
    context: int
    seconds: float


def read_attention(source: Path = ATTENTION) -> list[AttentionTiming]:
    """Return the published times of MLX's attention kernels, given there as bytes read a second, each key and value once."""
    with source.open(encoding="utf-8", newline="") as file:
        return [_read_timing(row) for row in csv.DictReader(file)]


def _read_timing(row: dict[str, str]) -> AttentionTiming:
    queries, keys, size, context = (int(row[name]) for name in ("query_heads", "key_heads", "head_size", "context"))
    layer = KVLayer(2 * 2 * keys * size, None, 0, Heads(queries, keys, size, size))
    label = " · ".join(row[name] for name in ("chip", "query_heads", "key_heads", "head_size", "context", "mlx"))
    cores = int(row["gpu_cores"]) if row["gpu_cores"] else None
    seconds = layer.bytes_at(context) / (float(row["gb_per_s"]) * 1e9)
    return AttentionTiming(lookup(row["chip"], cores), label, layer, context, seconds)


def read(source: Path = SOURCE) -> tuple[list[Measurement], list[LeftOut]]:
    """Return the rows that can be compared with a prediction, and the others."""
    kept: list[Measurement] = []
    left: list[LeftOut] = []
    with source.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found = _read_row(row)
            (kept if isinstance(found, Measurement) else left).append(found)  # type: ignore[arg-type]
    return kept, left


def _read_row(row: dict[str, str]) -> Measurement | LeftOut:
    label = " · ".join(row[key] for key in ("chip", "gpu_cores", "model", "weights_bits_desc", "context", "engine"))
    engine = _engine(row["engine"])
    if engine is None:
        return LeftOut(label, "another engine's kernels")
    if "wall" in row["context"]:
        return LeftOut(label, "wall time, the prompt's included")
    cores = re.match(r"\d+", row["gpu_cores"])
    chip = lookup(row["chip"], int(cores.group()) if cores else None)
    if chip.bandwidth_gbs is None:
        return LeftOut(label, "the chip's bin is not given")
    name, work = _work(row, engine)
    if isinstance(work, str):
        return LeftOut(label, work)
    prompt, cached, depth = _lengths(row["context"])
    rates = [float(row[key]) if row[key] else None for key in ("prefill_tps", "decode_tps")]
    if row["engine"].startswith(OWN_PREFILL):
        rates[0] = None
    if "speculative" in row["weights_bits_desc"]:
        rates[1] = None
    if rates == [None, None]:
        return LeftOut(label, "speculative decoding, or kernels of its own")
    return Measurement(engine, chip, label, name, work, prompt, cached, depth, *rates)


def _engine(text: str) -> str | None:
    name = text.lower()
    if name.startswith("llama.cpp"):
        return "llama.cpp 2023" if "8e672ef" in name else "llama.cpp"
    return "mlx" if name.startswith(MLX) else None


def _work(row: dict[str, str], engine: str) -> tuple[str, Work | str]:
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


def _own(entry: Entry) -> Work | str:
    """Return the work of the model as its first repository packs it."""
    repository = entry.repositories[0]
    config = entry.config_of(repository)
    assert config is not None
    return work_of_config(config, packing=repository.packing)


@functools.cache
def _of(config: str, packing: Packing | None) -> Work | str:
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
    prompt, depth = _after(text)
    return prompt, cached, cached + depth


def _after(text: str) -> tuple[int | None, int]:
    """Return (prompt tokens, tokens of context in the middle of decoding), less those before."""
    if found := re.match(r"pp(\d+)", text):
        return int(found.group(1)), 64  # llama-bench decodes from an empty context
    if found := re.match(r"tg(\d+)", text):
        return None, 64
    if found := re.match(r"p(\d+) \(decode", text):
        return int(found.group(1)), int(found.group(1))
    if found := re.match(r"p(\d+) g(\d+)", text):
        return int(found.group(1)), int(found.group(1)) + int(found.group(2)) // 2
    if found := re.match(r"p(?:rompt )?(\d+)", text):
        return int(found.group(1)), int(found.group(1)) + 64
    if found := re.search(r"/ (\d+)K", text):
        return int(found.group(1)) * 1024, SHORT
    if found := re.match(r"([\d.]+)K prompt", text):
        return None, round(float(found.group(1)) * 1000)
    if found := re.match(r"~(\d+)", text):
        return int(found.group(1)), int(found.group(1))
    return None, SHORT


def _scaled(work: Work | str, share: float) -> Work | str:
    """Return the work with 16-bit weights scaled to another format's bits."""
    from dataclasses import replace

    if isinstance(work, str):
        return work
    return replace(work, shared_bytes=round(work.shared_bytes * share), expert_bytes=round(work.expert_bytes * share))
