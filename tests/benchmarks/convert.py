"""Section: converting, beside mlx_lm.convert: memory, time, and how close the result is to its source."""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.convert_lab import ConvertLab, QualityLab, Run, write_source
from tests.benchmarks.plan import Plan
from tests.benchmarks.remote import Remote
from tests.benchmarks.report import Row, Section, at_most, plain
from tests.benchmarks.stats import Series, alternate, ratios, series

LARGE = {
    "hidden_size": 2048, "num_hidden_layers": 20, "intermediate_size": 5632, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000,
}  # fmt: skip
SMALL = {**LARGE, "num_hidden_layers": 3}
OURS: Mapping[str, dict[str, Any]] = {"round": {"method": "round", "verify": False}, "search": {"verify": False}}
"""Conversions of the seeded source, in turn with mlx_lm's."""

FLOATS = "TOKAMAC_BENCH_FLOATS"
"""Names a folder that the guide's train.py or mean.py wrote: a guide's float weights, which the repository does not hold."""


def measure(plan: Plan) -> Section:
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
