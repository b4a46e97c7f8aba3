"""Sections limits and peak: what was expected beside what was measured."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench.plan import EngineServer, Plan, Remote
from tests.bench.report import Row, Section, Series, holds, plain, ratios, series, within
from tests.engine.perf.test_peak_memory import CALLS, Unfused
from tokamac.engine.events import Finished
from tokamac.engine.options import KVSpec, Sampling

# Section: how true the predictions are, of published speeds and of this machine's own.

CONTEXTS = (64, 1024, 4096)
NEW = 256  # tokens of a reply, or as many as its context: caches grow by so many, so each step has its part of that
# Replies at each context in a round, the quickest of which counts, as of the times of each part: others on the machine
# slow either by half for seconds at a time, and never quicken one.
PASSES = 3

# A llama of 88 M weights: each of its matrices goes through NumPy on a CPU, where the embedded model's mostly don't.
LARGER = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
}

UNSEEN = {"held out": "chips", "model held out": "models"}

# Largest median and 90th percentile of the errors of rows whose chip, or model, the constants have not seen.
TARGETS = {
    ("mlx", "decode, dense", "held out"): (0.06, 0.14),
    ("mlx", "decode, mixture and hybrid", "held out"): (0.15, None),
    ("mlx", "prefill, dense", "held out"): (0.12, None),
    ("llama.cpp", "decode, both builds", "held out"): (0.08, None),
    ("mlx", "decode, all", "model held out"): (0.06, 0.15),
    ("mlx", "decode, under 2k tokens", "model held out"): (None, None),
    ("mlx", "decode, 2k to 16k tokens", "model held out"): (None, None),
    ("mlx", "decode, 16k to 64k tokens", "model held out"): (0.06, 0.15),
    ("mlx", "decode, beyond 64k tokens", "model held out"): (None, None),
}


@dataclass(frozen=True, slots=True)
class Paced:
    """One reply, in tokens a second: decode measured and expected, and the ceiling, None where more was reached than timed."""

    measured: float
    expected: float
    ceiling: float | None


class LimitsLab:
    """A loaded engine whose latency on this machine is measured afresh."""

    def __init__(self, model: str) -> None:
        self._kept = TemporaryDirectory(prefix="tokamac-latency-")
        os.environ["XDG_CACHE_HOME"] = self._kept.name  # what another run kept is not found
        self._server = EngineServer(model)
        self._server.engine.measure()

    def reply(self, context: int, number: int) -> Paced:
        """Decode around ``context`` tokens."""
        new = min(NEW, context)
        prompt = self._server.prompt(context - new // 2, number)
        events = self._server.engine.generate(prompt, Sampling(temperature=0.0, max_tokens=new))
        metrics = list(events)[-1].metrics
        return Paced(metrics.decode_tps, metrics.expected_tps, metrics.ceiling_tps)

    def close(self) -> None:
        """Free the model."""
        self._server.close()
        self._kept.cleanup()


def measure_limits(plan: Plan) -> Section:
    """Compare predictions with published speeds (as fitted), and with replies made now."""
    from tests.engine.helpers import write_model

    rows = _published()
    with TemporaryDirectory(prefix="tokamac-seeded-") as folder:
        larger = write_model(Path(folder) / "larger", bits=4, **LARGER)
        for name, model in (("embedded model", plan.model), ("seeded model, 88 M weights", str(larger))):
            rows += _here(name, model, plan)
    return Section("Predictions", rows, _HOW)


def _here(name: str, model: str, plan: Plan) -> list[Row]:
    rows = []
    replies: dict[int, list[Paced]] = {context: [] for context in CONTEXTS}
    for number in range(1, plan.rounds + 1):
        with Remote(LimitsLab, model) as lab:  # its latency is measured anew each time: the machine drifts
            lab.call("reply", CONTEXTS[0], 0)
            passes = [[lab.call("reply", context, number) for context in CONTEXTS] for _ in range(PASSES)]
        for found, tried in zip(replies.values(), zip(*passes, strict=True), strict=True):
            found.append(max(tried, key=attrgetter("measured")))
    for context, found in replies.items():
        measured, expected = (series([getattr(each, name) for each in found]) for name in ("measured", "expected"))
        errors = Series(tuple(ratio - 1 for ratio in ratios(expected, measured).values))
        rows += [
            plain(f"{name}, decode at {context:,} tokens", measured, "tok/s"),
            within(f"expected {expected.median:.3g} tok/s, error", errors, 0.15),
        ]
    above = [
        each for found in replies.values() for each in found if each.ceiling is None or each.measured > each.ceiling
    ]
    rows.append(holds(f"{name}, replies above the ceiling", str(len(above)), "0", met=not above))
    return rows


def _published() -> list[Row]:
    from tokamac.engine.perf.roofline import published

    document = published()
    rows = []
    for (engine, phase, how), (median, p90) in TARGETS.items():
        summary = document["errors"][engine][phase][how]
        label = f"published {engine} speeds, {phase}, {summary['rows']} rows, {UNSEEN[how]} not seen"
        rows.append(_error(f"{label}: median error", summary["median"], median))
        rows.append(_error(f"{label}: 90th percentile", summary["p90"], p90))
    rows += _far(document["errors"])
    return rows


def _error(what: str, value: float, bound: float | None) -> Row:
    if bound is None:
        return Row(what, f"{value:.1%}")
    return holds(what, f"{value:.1%}", f"≤ {bound:.0%}", met=value <= bound)


def _far(errors: Mapping[str, Any]) -> list[Row]:
    """Return a row for every published speed that is missed by more than a quarter, with the likely reason."""
    found: dict[str, str] = {}
    for phases in errors.values():
        for phase, kinds in phases.items():
            for label, far in kinds.get("held out", {}).get("far", {}).items():
                found[f"{phase}: {label.replace('|', '/')}"] = f"{far['error']:+.0%}; {far['likely']}"
    return [Row(label, value) for label, value in found.items()]


_HOW = (
    "Published speeds: tests/roofline/measured.csv, fitted by tests/roofline/fit_roofline.py; each chip's rows are predicted with "
    "constants that were fitted without any row of that chip, or each model's without any of that model. Rows that miss by more "
    "than a quarter are listed. Here: the parts "
    "of a step are timed first (products, attention, small kernels, a layer's parts in turn), each three times, of which the "
    "quickest counts; then three replies are made at each context in turn, and again the quickest is compared with the parts' sum: "
    "both are of the machine as others disturb it least. Anew in every run; the range is that of the runs."
)


# Section: the memory that a prefill is expected to take at its highest, beside what it takes.

LENGTHS = (512, 2048, 8192)
SPECS = (("16-bit", KVSpec()), ("8-bit", KVSpec(key_bits=8, value_bits=8)), ("4-bit", KVSpec(key_bits=4, value_bits=4)))
WITHIN = 0.1
UNFUSED = (0.9, 1.15)
PEAK_NEW = 2
CONTEXT = 16_384


class PeakLab(EngineServer):
    """A loaded model under one KV setting; nothing is reused."""

    def peak(self, length: int) -> tuple[int, int, int]:
        """Reply to a prompt of so many tokens; return the predicted peak, MLX's, and the bytes of the weights."""
        *_, last = self.engine.generate(self.prompt(length, 1), Sampling(temperature=0, max_tokens=PEAK_NEW))
        assert isinstance(last, Finished)
        if last.predicted_peak_bytes is None or last.metrics.peak_memory_bytes is None:
            raise ValueError("a peak is unknown")
        return last.predicted_peak_bytes, last.metrics.peak_memory_bytes, self._runtime.shape.weights


class UnfusedLab:
    """Attention whose scores are written down, as on a GPU without a fused kernel for a head size; float32."""

    def peak(self, call: Unfused) -> tuple[int, int]:
        """Return the predicted peak and MLX's."""
        with TemporaryDirectory(prefix="tokamac-unfused-") as folder:
            return call.measure(Path(folder))


def measure_peak(plan: Plan) -> Section:
    """Reply to prompts of several lengths, with the embedded model and a larger one, keys and values packed and not."""
    from tests.engine.helpers import write_model

    rows: list[Row] = []
    with TemporaryDirectory(prefix="tokamac-peak-") as kept:
        longer = with_context(Path(plan.folder), Path(kept) / "longer")
        larger = write_model(Path(kept) / "larger", bits=4, **{**LARGER, "max_position_embeddings": CONTEXT})
        for name, folder in (("embedded model", longer), ("seeded model, 88 M weights", larger)):
            rows += _rows(name, folder, LENGTHS[: plan.count(len(LENGTHS), 1)])
    if plan.device == "cpu":
        rows += _unfused()
    how = (
        "Predicted: from shapes and lengths alone, before the prefill (`engine/perf/peak_memory.py`). Actual: MLX's peak over the "
        f"whole reply of {PEAK_NEW} tokens, in a process of its own for each KV setting, weights included; what NumPy holds beside "
        "MLX's arrays is in neither. Counts of bytes, so one run; MLX launches work a little ahead, which moves a peak a little. "
        f"The embedded model's config says {CONTEXT:,} tokens here, so that it takes the longest prompt. "
        "Attention not fused: calls of several "
        "head sizes, key heads, packings and a ring, computed by MLX's own products; the prediction furthest from 1."
    )
    return Section("Peak memory, predicted", rows, how)


def with_context(folder: Path, copy: Path) -> Path:
    """Copy a model folder, its config changed to a context of CONTEXT tokens; return the copy."""
    shutil.copytree(folder, copy)
    path = copy / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}), encoding="utf-8")
    return copy


def _rows(name: str, folder: Path, lengths: tuple[int, ...]) -> Iterator[Row]:
    for spec, kv in SPECS:
        with Remote(PeakLab, str(folder), kv) as lab:
            for length in lengths:
                yield _row(f"{name}, {spec}, {length:,} tokens: predicted ÷ actual", *lab.call("peak", length))


def _unfused() -> Iterator[Row]:
    with Remote(UnfusedLab) as lab:
        for size in (128, 256):
            calls = [call for call in CALLS if call.head_dim == size]
            ratios = [predicted / actual for predicted, actual in (lab.call("peak", call) for call in calls)]
            worst = max(ratios, key=lambda ratio: abs(ratio - 1))
            what = f"attention not fused, head size {size}, worst of {len(calls)} calls: predicted ÷ actual"
            low, high = UNFUSED
            yield holds(what, f"{worst:.3f}", f"{low} to {high}", met=low <= worst <= high)


def _row(what: str, predicted: int, actual: int, weights: int) -> Row:
    ratio, beside = predicted / actual, (predicted - weights) / (actual - weights)
    value = f"{ratio:.3f} ({_mb(predicted)} predicted, {_mb(actual)} actual; without the weights {beside:.3f})"
    return holds(what, value, f"within {WITHIN:.0%}", met=abs(ratio - 1) <= WITHIN)


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
