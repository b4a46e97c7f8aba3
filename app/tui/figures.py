"""Every figure of the side panel, explained: how it is computed, from what, where that comes from, and what it means.

Pure: a session in, words out. No rate is computed here; those that a reply measured are named with their inputs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

from tokamac.app.tui import limit_figures, memory_figures, speed_figures, units
from tokamac.app.tui.explained import NO_REPLY, NOT_YET, Explained, Input
from tokamac.app.tui.session import Session

__all__ = ["FIGURES", "Explained", "Figure", "Input", "explain"]

Figure = Literal[
    "model",
    "ttft",
    "prefill",
    "cached",
    "now",
    "mean",
    "gaps",
    "slowest",
    "ceiling",
    "expected",
    "achieved",
    "context",
    "out of sight",
    "kv",
    "peak",
    "predicted",
    "diagnosis",
]
FIGURES: tuple[Figure, ...] = get_args(Figure)
"""In the order in which the panel shows them."""


def explain(figure: Figure, session: Session) -> Explained:
    """Return ``figure`` of a session, explained."""
    found = _EXPLAIN[figure](session)
    if found.value != units.UNKNOWN or found.why:
        return found
    why = NO_REPLY if session.metrics is None and not session.replying else NOT_YET
    return replace(found, why=why)


_EXPLAIN: dict[Figure, Callable[[Session], Explained]] = {
    "model": memory_figures.model,
    "ttft": speed_figures.ttft,
    "prefill": speed_figures.prefill,
    "cached": speed_figures.cached,
    "now": speed_figures.now,
    "mean": speed_figures.mean,
    "gaps": speed_figures.gaps,
    "slowest": speed_figures.slowest,
    "ceiling": limit_figures.ceiling,
    "expected": limit_figures.expected,
    "achieved": limit_figures.achieved,
    "context": memory_figures.context,
    "out of sight": memory_figures.out_of_sight,
    "kv": memory_figures.kv,
    "peak": memory_figures.peak,
    "predicted": memory_figures.predicted,
    "diagnosis": limit_figures.diagnosis,
}
