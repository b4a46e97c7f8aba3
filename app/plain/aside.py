"""Commands of this program as processes of their own, waited for. Ctrl-C asks one to stop, as it would in a shell."""

import asyncio
import shlex
from collections.abc import Callable, Sequence
from typing import TypeVar

from tokamac.app.backend.line_process import Ended, LineProcess
from tokamac.app.plain.interrupts import heard
from tokamac.engine.errors import OptionError

INTERRUPTED = 130
LOOK_S = 1.0
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

    meanwhile: called now and then, so that the engine is heard. stopping: called when the process was asked to stop.
    """
    return asyncio.run(_run(process, arguments, take, meanwhile, stopping))


async def _run(
    process: LineProcess[Line],
    arguments: Sequence[str],
    take: Callable[[Line], None],
    meanwhile: Callable[[], None],
    stopping: Callable[[], None],
) -> Ended:
    loop, stops = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def stop() -> None:
        stopping()
        stops.add(loop.create_task(process.interrupt()))

    with heard(lambda: loop.call_soon_threadsafe(stop)):
        run = asyncio.ensure_future(process.run(arguments, take))
        while not (await asyncio.wait({run}, timeout=LOOK_S))[0]:
            meanwhile()
        return run.result()


def words_of(written: str, model: str) -> tuple[str, list[str]]:
    """Return the model that ``written`` begins with, or else ``model``, and the flags after it, cut as a shell does.

    Raises OptionError.
    """
    try:
        words = shlex.split(written)
    except ValueError as error:
        raise OptionError(f"{written} can't be read: {error}", "Close the quotation marks.") from None
    return (words[0], words[1:]) if words and not words[0].startswith("-") else (model, words)
