"""Commands of this program as processes of their own, waited for. Ctrl-C asks one to stop, as it would in a shell."""

import asyncio
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from tokamac.app.backend.line_process import Ended, LineProcess
from tokamac.app.exit_status import INTERRUPTED, WRONG_USAGE
from tokamac.app.plain.interrupts import heard
from tokamac.engine.errors import OptionError

HEAR_S = 1.0
"""How often the engine is heard while a process is waited for."""
BEGUN_S = 0.05
"""How soon a process that was to stop before it had begun is asked again."""
MODEL_FIRST = "The model comes first: /{} MODEL FLAGS. Without one it is the chat's."
Line = TypeVar("Line")


def run_aside(
    process: LineProcess[Line],
    arguments: Sequence[str],
    take: Callable[[Line], None],
    *,
    meanwhile: Callable[[], None],
    stopping: Callable[[], None] = lambda: None,
) -> Ended:
    """Run ``process`` to its end, and hand every line to ``take`` as it comes; return how it ended. Raises OSError.

    Ctrl-C asks it to stop, once, be it as soon as it has begun. Where that was asked and the process did not end with status 0, the
    status that is returned is INTERRUPTED, whatever its own was: one that had hardly begun, or had to be killed, has another.

    meanwhile: called now and then, so that the engine is heard. stopping: called once, when the process is to stop.
    """
    return asyncio.run(_run(process, arguments, take, meanwhile, stopping))


async def _run(
    process: LineProcess[Line],
    arguments: Sequence[str],
    take: Callable[[Line], None],
    meanwhile: Callable[[], None],
    stopping: Callable[[], None],
) -> Ended:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    with heard(lambda: loop.call_soon_threadsafe(stop.set)):
        run = asyncio.ensure_future(process.run(arguments, take))
        stopper = asyncio.ensure_future(_stop(process, run, stop, stopping))
        while not (await asyncio.wait({run}, timeout=HEAR_S))[0]:
            meanwhile()
        stopper.cancel()
        end = run.result()
        return replace(end, status=INTERRUPTED) if stop.is_set() and end.status else end


async def _stop(
    process: LineProcess[Line], run: asyncio.Future[Ended], stop: asyncio.Event, stopping: Callable[[], None]
) -> None:
    """Once it is to stop, ask the process to, which may not have begun yet."""
    await stop.wait()
    stopping()
    while not run.done():
        await process.interrupt()
        await asyncio.wait({run}, timeout=BEGUN_S)


def words_of(written: str, model: str) -> tuple[str, list[str]]:
    """Return the model that ``written`` begins with, or else ``model``, and the flags after it, cut as a shell does.

    Raises OptionError.
    """
    try:
        words = shlex.split(written)
    except ValueError as error:
        raise OptionError(f"{written} can't be read: {error}", "Close the quotation marks.") from None
    return (words[0], words[1:]) if words and not words[0].startswith("-") else (model, words)


def misplaced(command: str, written: str, end: Ended) -> str:
    """Return what to add where arguments were refused and a model may stand behind flags, which is not understood; else nothing."""
    return MODEL_FIRST.format(command) if end.status == WRONG_USAGE and written.startswith("-") else ""
