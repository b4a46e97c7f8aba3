"""Render a chat template: foreign code in a sandbox, so it may fail, or never end."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

from tokamac.engine.errors import TemplateError

T = TypeVar("T")

RENDER_SECONDS = 5.0
"""A real template takes milliseconds; one that takes this long loops."""


class _DeadlineExceeded(BaseException):
    """Raised inside the rendering thread; a BaseException so that a template's own handlers don't swallow it."""


def with_deadline(work: Callable[[], T], seconds: float = RENDER_SECONDS) -> T:
    """Run pure-Python ``work`` in a thread of its own and return its result.

    Raises TemplateError when it takes longer than ``seconds``; the thread is then stopped by an exception raised inside it.
    Whatever ``work`` raises is raised here.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except _DeadlineExceeded:
            pass
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="template", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        _stop(thread)
        raise TemplateError(
            f"the model's chat template did not end within {seconds:g} s", "It probably loops: use another model."
        )
    if failure:
        raise failure[0]
    return outcome[0]


def _stop(thread: threading.Thread) -> None:
    # The interpreter delivers this at the next bytecode, and compiled templates are bytecode.
    identifier = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(identifier, ctypes.py_object(_DeadlineExceeded))
    thread.join(1.0)
