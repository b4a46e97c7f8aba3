"""The guide to the app itself, asked in a process of its own: the chat and its model stay as they are."""

import queue

from tokamac.app.backend import wire
from tokamac.app.backend.client import BackendEvent, EngineProcess
from tokamac.app.plain.aside import LOOK_S
from tokamac.app.plain.interrupts import heard
from tokamac.app.plain.repl import Repl
from tokamac.app.tui.guidance import MODEL, Guidance


def ask(repl: Repl, question: str) -> None:
    """Ask the guide, which remembers no question before; it gives its memory back after the answer."""
    if not question:
        repl.console.note("Write the question after the command: /guide What does --kv-bits 8,4 do?")
        return
    events: queue.SimpleQueue[BackendEvent | None] = queue.SimpleQueue()
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


def _answer(repl: Repl, process: EngineProcess, question: str, events: "queue.SimpleQueue[BackendEvent | None]") -> str:
    """Write the answer as it comes; return what is to be said of its end, or nothing. None among the events is Ctrl-C."""
    guidance = Guidance()
    for request in (*guidance.start(), *guidance.ask(question)):
        process.send(request)
    process.set_busy(True)
    repl.console.begin(MODEL)
    while guidance.busy:
        try:
            event = events.get(timeout=LOOK_S)
        except queue.Empty:
            repl.driver.rest()  # so that the chat's own engine is heard
            continue
        if event is None:
            break
        if isinstance(event, wire.Text):
            repl.console.grow(event.text, event.kind)
        for request in guidance.on_event(event):
            process.send(request)
    repl.console.end()
    return "The guide was stopped." if guidance.busy else guidance.problem
