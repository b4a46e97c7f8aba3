"""Plain ``/whatif``: what ``tokamac inspect --table`` says, of the chat's case where the flags ask for no other."""

import sys
from collections.abc import Iterator, Sequence

from tokamac.app.backend.line_process import Ended, LineProcess
from tokamac.app.exit_status import INTERRUPTED
from tokamac.app.plain.aside import misplaced, run_aside, words_of
from tokamac.app.plain.ending import why
from tokamac.app.plain.repl import Repl
from tokamac.engine.options import KVSpec


def what_if(repl: Repl, written: str) -> None:
    """Say what a model, this one or another, would do in other precisions, with other caches and contexts, here or elsewhere."""
    from tokamac.app.tui.whatif_form import first_question

    model, flags = words_of(written, repl.driver.session.load.model)
    asked = first_question(repl.driver.session, model)
    own_size = any(flag.startswith(("--context", "--prompt")) for flag in flags)
    size = () if own_size else (f"--context={asked.context}", f"--prompt={asked.prompt}")
    lines: list[str] = []
    inspect = LineProcess([sys.executable, "-m", "tokamac.app.cli", "inspect", "--table"], _text)
    try:
        asks = [*size, *_kv_flags(asked.kv, flags), *flags, "--", model]
        end = run_aside(inspect, asks, lines.append, meanwhile=repl.driver.rest)
    except OSError as error:
        repl.console.note(f"It can't be said: {error}")
        return
    if lines:
        repl.console.say("\n".join(lines))
    for remark in (_remark(end), misplaced("whatif", written, end)):
        if remark:
            repl.console.note(remark)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\n")


def _remark(end: Ended) -> str:
    """Return what there is to say beside what was found, or why nothing was; nothing where there is nothing to say."""
    if end.status == INTERRUPTED:
        return "Stopped."
    if end.status < 0 or (end.status and not end.last_line):
        return f"It can't be said: {why(end)}"
    return end.last_line


def _kv_flags(kv: KVSpec, own: Sequence[str]) -> Iterator[str]:
    """Yield the flags that ask for ``kv``, as far as the command has them, and the user's ``own`` don't ask for another.

    What goes with other bits, or another window, is not the chat's either: the two together may be refused.
    """
    given = {flag.partition("=")[0] for flag in own}
    if kv.quantized and "--kv-bits" not in given:
        yield f"--kv-bits={kv.key_bits},{kv.value_bits}"
        yield f"--kv-group-size={kv.group_size}"
    if kv.window is not None and "--kv-window" not in given:
        yield f"--kv-window={kv.window}"
        yield f"--kv-keep={kv.keep}"
