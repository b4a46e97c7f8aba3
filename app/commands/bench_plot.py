"""The picture of ``tokamac bench --plot``: decode rate over context, measured, beside the ceiling and the expected rate.

What is drawn, and the writing of the file; how it is drawn is bench_svg.py's.
"""

import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.app.commands import peer
from tokamac.app.commands.bench_runs import Measured
from tokamac.app.commands.bench_stats import Spread, spread
from tokamac.app.commands.bench_svg import render
from tokamac.engine.durable import to_disk
from tokamac.engine.errors import TokamacError, access_hint

if TYPE_CHECKING:
    from tokamac.engine import Engine

SAMPLES = 64
BEYOND = 1.1
"""How far the limits' curves reach, in times of the deepest point; one point alone is drawn in the middle."""

Curve = Sequence[tuple[float, float]]
"""(context in tokens, tokens a second)."""


@dataclass(frozen=True, slots=True)
class Dot:
    """Decode rates (tokens a second) around a context of so many tokens."""

    context: int
    tps: Spread


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn. An empty curve is unknown. ``peer`` is its name and version, None without one."""

    title: str
    subtitle: str
    measured: Sequence[Dot]
    ceiling: Curve
    expected: Curve
    peer: str | None = None
    peer_measured: Sequence[Dot] = ()


def check_writable(path: Path) -> None:
    """Raise TokamacError where ``path`` could not be written now. Leaves nothing behind."""
    try:
        if path.is_dir():
            raise TokamacError(f"--plot: {path} is a folder", "Name a file in it.")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


def write(path: Path, chart: Chart) -> None:
    """Write the picture, whole or not at all. Raises TokamacError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(render(chart))
                file.flush()
                to_disk(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _unwritable(path, error) from error


def chart(engine: "Engine", measured: Sequence[Measured], peer_version: str | None) -> Chart:
    """Return the picture of what was measured."""
    dots = [_dot(each, [run.decode_tps for run in each.runs]) for each in measured]
    peers = [_dot(each, [run.decode_tps for run in each.peer_runs]) for each in measured]
    limits = [engine.limits(context) for context in _contexts(engine, measured)]
    first = measured[0].runs
    told = f"{first[0].generated_tokens} new tokens, {len(first)} runs: the median, and a bar from the smallest to the largest"
    return Chart(
        title=f"Decode rate over context: {_name(engine.spec.name)}",
        subtitle=f"{told}; {engine.spec.device}",
        measured=[dot for dot in dots if dot is not None],
        ceiling=[(each.context, each.ceiling_tps) for each in limits if each.ceiling_tps is not None],
        expected=[(each.context, each.expected_tps) for each in limits if each.expected_tps is not None],
        peer=None if peer_version is None else f"{peer.NAME} {peer_version}",
        peer_measured=[dot for dot in peers if dot is not None],
    )


def _name(model: str) -> str:
    """Return what a picture that is shown around calls the model: of a folder, its name alone."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def _dot(each: Measured, rates: Sequence[float | None]) -> Dot | None:
    tps = spread(rates)
    return None if tps is None else Dot(each.limits.context, tps)


def _contexts(engine: "Engine", measured: Sequence[Measured]) -> list[int]:
    """Return the contexts to ask the limits for: up to a little beyond the deepest point, and what the model's context holds."""
    end = max(each.limits.context for each in measured) * (2 if len(measured) == 1 else BEYOND)
    if engine.spec.capacity is not None and not engine.spec.rolls:
        end = min(end, engine.spec.capacity)
    return sorted({max(1, round(end * i / SAMPLES)) for i in range(SAMPLES + 1)})


def _unwritable(path: Path, error: OSError) -> TokamacError:
    return TokamacError(
        f"--plot: {path} can't be written: {error.strerror}", access_hint(error, "Choose another path.")
    )
