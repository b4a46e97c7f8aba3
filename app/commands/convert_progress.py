"""How far a conversion has come: a bar for people, JSON lines for programs."""

import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.app.commands import loading
from tokamac.app.output import Progress, json_line
from tokamac.app.tui.units import count, size
from tokamac.engine.events import LoadProgress

if TYPE_CHECKING:
    from tokamac.quant import TensorDone
    from tokamac.quant.report import StageDone

CONVERTING = "converting"

REST_S = 0.25
"""Between two JSON lines of one stage: the last of them always comes."""


class Shown:
    """Shows stage after stage. ``json``: as lines on stdout; the bar is then only drawn where a terminal sees it."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._stage = ""
        self._bar = Progress("", plain=False)
        self._said_s = 0.0

    def fetch(self, source: str) -> Path:
        """Return the folder of the source, downloaded first if need be."""
        from tokamac.engine import hub

        if not self._json:
            return loading.fetch(source, hub.resolve)
        return hub.resolve(source, progress=self._downloaded)

    def tell(self, step: "TensorDone | StageDone") -> None:
        """Take a step of ``tokamac.quant.convert``."""
        from tokamac.quant.report import StageDone

        if isinstance(step, StageDone):
            self._enter(step.stage, "steps")
            self._bar.update(step.done, step.total, _memory())
            self._say(step.stage, step.done, step.total, "steps")
        else:
            self._enter(CONVERTING, "bytes")
            tensors = f"{count(step.done)} of {count(step.total)} tensors"
            self._bar.update(step.done_bytes, step.total_bytes, f"{tensors}, {_memory()}, {step.name}")
            if self._json:
                json_line({"event": "tensor", "name": step.name, "done": step.done, "total": step.total})
            self._say(CONVERTING, step.done_bytes, step.total_bytes, "bytes")

    def clear(self) -> None:
        """Take the bar off the terminal."""
        self._bar.clear()

    def _enter(self, stage: str, unit: str) -> None:
        if stage != self._stage:
            self._bar.clear()
            self._stage, self._said_s = stage, 0.0
            self._bar = Progress(stage, unit=unit, plain=not self._json)

    def _say(self, stage: str, done: int, total: int, unit: str) -> None:
        now_s = time.monotonic()
        if not self._json or (done < total and now_s - self._said_s < REST_S):
            return
        self._said_s = now_s
        at = {"stage": stage, "done": done, "total": total, "unit": unit, "peak_memory_bytes": _mlx_peak_bytes()}
        json_line({"event": "stage", **at})

    def _downloaded(self, at: LoadProgress) -> None:
        now_s = time.monotonic()
        if at.done == at.total or now_s - self._said_s >= REST_S:
            self._said_s = now_s
            where = {"done": at.done, "total": at.total, "unit": "bytes", "peak_memory_bytes": None}
            json_line({"event": "stage", "stage": "downloading", **where})


def _memory() -> str:
    return f"peak {size(_mlx_peak_bytes())} of arrays, {size(_process_peak_bytes())} in all"


def _mlx_peak_bytes() -> int:
    import mlx.core as mx

    return int(mx.get_peak_memory())


def _process_peak_bytes() -> int:
    """Return the most memory that this process had. The system counts kilobytes on Linux and bytes on macOS."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
