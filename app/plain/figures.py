"""Plain commands about the last reply's figures: each with its name and unit, or one of them explained; and why it took so long."""

from collections.abc import Mapping

from tokamac.app.plain.repl import Repl
from tokamac.app.tui.explained import Explained
from tokamac.app.tui.figures import FIGURES, Figure, explain

TOLD = tuple(figure for figure in FIGURES if figure != "now")
"""A line is read when no reply is written: nothing has a rate of this moment then."""
BESIDE: Mapping[Figure, tuple[str, ...]] = {
    "cached": ("prompt",),
    "gaps": ("p95", "p99"),
    "ceiling": ("ceiling",),
    "expected": ("expected rate",),
    "context": ("context length",),
    "peak": ("budget",),
}
"""Figures that are read beside some of their inputs."""


def gauges(repl: Repl, name: str) -> None:
    """Say the figures of the last reply, or explain the one that is named."""
    known = {figure: explain(figure, repl.driver.session) for figure in TOLD}
    if not name:
        repl.console.say("\n".join(_line(figure, each) for figure, each in known.items()))
        repl.console.aside("/gauges and a name explains a figure: its formula, its inputs, its source.")
        return
    wanted = name.casefold()
    named = [each for figure, each in known.items() if wanted in (figure, each.name.casefold())]
    if named:
        repl.console.say("\n".join(_lines(named[0])))
    else:
        repl.console.note(f"There is no figure {name}. /gauges lists them.")


def why(repl: Repl, _: str) -> None:
    """Say why the last reply that was measured took as long as it did."""
    from tokamac.app import verdict, verdict_full

    replies = [turn.reply for turn in repl.driver.session.turns if turn.reply is not None]
    last = next((reply for reply in reversed(replies) if reply.metrics is not None), None)
    if last is None or last.metrics is None:
        repl.console.note("There is no reply to explain yet.")
        return
    lines = [verdict.sentence(last.metrics, last.diagnosis)]
    if last.diagnosis is not None:
        lines += verdict_full.lines(last.diagnosis)
    repl.console.say("\n".join(lines))


def _line(figure: Figure, known: Explained) -> str:
    beside = [f"{each.name} {each.value}" for each in known.inputs if each.name in BESIDE.get(figure, ())]
    told = ", ".join([*([known.why] if known.why else []), *beside])
    return f"{known.name}: {known.value}" + (f" ({told})" if told else "")


def _lines(known: Explained) -> list[str]:
    return [
        f"{known.name}: {known.value}" + (f" ({known.why})" if known.why else ""),
        known.meaning,
        f"How: {known.name} = {known.formula}",
        *(f"From: {each.name}: {each.value} ({each.source})" for each in known.inputs),
        f"Source: {known.source}",
    ]
