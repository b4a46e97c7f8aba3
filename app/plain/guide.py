"""The guide to the app itself, asked in a process of its own: the chat and its model stay as they are."""

import queue
import time
from collections.abc import Callable, Iterator

from tokamac.app.backend import wire
from tokamac.app.backend.client import BackendEvent, EngineProcess
from tokamac.app.plain.aside import HEAR_S
from tokamac.app.plain.interrupts import heard
from tokamac.app.plain.repl import Repl
from tokamac.app.tui.guidance import Guidance
from tokamac.engine.hub_names import GUIDE

Events = queue.SimpleQueue[BackendEvent | None]
"""What the guide's process says; None is Ctrl-C."""


def ask(repl: Repl, question: str) -> None:
    """Ask the guide, which remembers no question before; it gives its memory back after the answer."""
    if not question:
        repl.console.note("Write the question after the command: /guide What does --kv-bits 8,4 do?")
        return
    events: Events = queue.SimpleQueue()
    with heard(lambda: events.put(None)):
        try:
            process = repl.driver.another(events.put)
        except OSError as error:
            repl.console.note(f"The guide could not be started: {error}")
            return
        try:
            said = _answer(repl, process, question, events)
        finally:
            process.kill()
    if said:
        repl.console.note(said)


def _answer(repl: Repl, process: EngineProcess, question: str, events: Events) -> str:
    """Write the answer as it comes; return what is to be said of its end, or nothing."""
    guidance = Guidance()
    for request in (*guidance.start(), *guidance.ask(question)):
        process.send(request)
    process.set_busy(True)
    repl.console.begin(GUIDE)
    for event in as_they_come(events, meanwhile=repl.driver.rest):
        if event is None:
            break
        if isinstance(event, wire.Text):
            repl.console.grow(event.text, event.kind)
        for request in guidance.on_event(event):
            process.send(request)
        if not guidance.busy:
            break
    repl.console.end()
    return "The guide was stopped." if guidance.busy else guidance.problem


def as_they_come(events: Events, *, meanwhile: Callable[[], None]) -> Iterator[BackendEvent | None]:
    """Yield what the guide's process says, for ever. meanwhile: called now and then, so that the chat's own engine is heard.

    By the clock: while the guide answers there is always something to be heard of it.
    """
    heard_s = time.monotonic()
    while True:
        if time.monotonic() - heard_s >= HEAR_S:
            heard_s = time.monotonic()
            meanwhile()
        try:
            yield events.get(timeout=HEAR_S)
        except queue.Empty:
            continue
