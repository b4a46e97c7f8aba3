"""Section: the memory that a prefill is expected to take at its highest, beside what it takes."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.limits import LARGER
from tests.benchmarks.plan import Plan
from tests.benchmarks.remote import Remote
from tests.benchmarks.report import Row, Section, holds
from tests.benchmarks.servers import EngineServer
from tests.limits.unfused import CALLS, Unfused
from tokamac.engine.events import Finished
from tokamac.engine.options import KVSpec, Sampling

LENGTHS = (512, 2048, 8192)
SPECS = (("16-bit", KVSpec()), ("8-bit", KVSpec(key_bits=8, value_bits=8)), ("4-bit", KVSpec(key_bits=4, value_bits=4)))
WITHIN = 0.1
UNFUSED = (0.9, 1.15)
NEW = 2
CONTEXT = 16_384


class PeakLab(EngineServer):
    """A loaded model under one KV setting; nothing is reused."""

    def peak(self, length: int) -> tuple[int, int, int]:
        """Reply to a prompt of so many tokens; return the predicted peak, MLX's, and the bytes of the weights."""
        *_, last = self.engine.generate(self.prompt(length, 1), Sampling(temperature=0, max_tokens=NEW))
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


def measure(plan: Plan) -> Section:
    """Reply to prompts of several lengths, with the embedded model and a larger one, keys and values packed and not."""
    from tests.engine.seeded import write_model

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
        f"whole reply of {NEW} tokens, in a process of its own for each KV setting, weights included; what NumPy holds beside "
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
