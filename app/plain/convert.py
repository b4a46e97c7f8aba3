"""Plain ``/convert``: with a model, and flags as ``tokamac convert`` takes them, the plan; alone, after that, the conversion."""

import time
from pathlib import Path

from tokamac.app.backend.conversion import Line, Stage
from tokamac.app.backend.converter import Converter, converter_command
from tokamac.app.plain.aside import misplaced, run_aside, words_of
from tokamac.app.plain.progress import Rarely
from tokamac.app.plain.repl import Repl
from tokamac.app.tui.converting import Phase, Standing
from tokamac.app.tui.units import count, size

OURS = ("--dry-run", "--json")
"""Flags that are given where they belong; kept with a plan, they would have it planned again for ever."""


def convert(repl: Repl, written: str) -> None:
    """Say what packing a model into fewer bits would do, or do what was planned last."""
    if repl.planned and not written:
        if _run(repl, repl.planned, dry_run=False) is Phase.DONE:
            repl.planned = ()
        return
    repl.planned = ()
    model, flags = words_of(written, repl.driver.session.load.model)
    arguments = (*(flag for flag in flags if flag not in OURS), "--", model)
    if _run(repl, arguments, dry_run=True, written=written) is Phase.PLANNED:
        repl.planned = arguments
        repl.console.note("/convert alone does it. Ctrl-C stops it; /convert goes on from there.")


def _run(repl: Repl, arguments: tuple[str, ...], *, dry_run: bool, written: str = "") -> Phase:
    """Plan or convert, and say what came of it; return where it stands. written: what the user gave the command."""
    standing, rarely = Standing(time.monotonic), Rarely()
    standing.begin(dry_run=dry_run)

    def take(line: Line) -> None:
        standing.take(line)
        if isinstance(line, Stage) and rarely.due():
            repl.console.note(f"{line.stage}: {_share(line)}")

    how = ["--json", *(["--dry-run"] if dry_run else []), *arguments]
    try:
        converter = Converter(converter_command())
        end = run_aside(converter, how, take, meanwhile=repl.driver.rest, stopping=standing.stop)
    except OSError as error:
        repl.console.note(f"It could not be begun: {error}")
        return Phase.FORM
    standing.ended(end)
    if text := standing.text():
        repl.console.say(text)
    if standing.problem:
        repl.console.note(standing.problem)
    if remark := misplaced("convert", written, end):
        repl.console.note(remark)
    if standing.converted is not None:
        repl.console.note(f"/model {Path(standing.converted.path).absolute()} loads it.")
    return standing.phase


def _share(at: Stage) -> str:
    written = size if at.unit == "bytes" else count
    of = "" if at.total is None else f" of {written(at.total)}"
    return f"{written(at.done)}{of}{'' if at.unit == 'bytes' else ' steps'}"
