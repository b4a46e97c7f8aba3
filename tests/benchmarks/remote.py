"""An object in a process of its own, called from here. So memory is measured apart, and no library meets another."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

END_S = 20.0


class RemoteError(Exception):
    """The other process failed; the message is its traceback."""


class Remote:
    """``Remote(Lab, "guide").call("decode", 8)`` makes ``Lab("guide")`` over there and returns ``lab.decode(8)``.

    Arguments and results must be picklable. A ``close`` method of the object is called at the end.
    """

    def __init__(self, make: Callable[..., object], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")  # nothing of this process is inherited
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method over there and wait for its result."""
        self._pipe.send((method, arguments))
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(END_S)
            self._process.kill()
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self) -> Any:
        try:
            failed, value = self._pipe.recv()
        except EOFError:
            self._process.join(END_S)
            raise RemoteError(f"the process ended with status {self._process.exitcode}") from None
        if failed:
            raise RemoteError(value)
        return value


def _serve(pipe: Connection, make: Callable[..., object], arguments: tuple[object, ...]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    served = _try(pipe, make, arguments, answer=False)
    while served is not None and (request := pipe.recv()) is not None:
        method, given = request
        _try(pipe, getattr(served, method), given, answer=True)
    if served is not None and hasattr(served, "close"):
        served.close()


def _try(pipe: Connection, work: Callable[..., object], arguments: tuple[object, ...], *, answer: bool) -> object:
    try:
        result = work(*arguments)
    except Exception:
        pipe.send((True, traceback.format_exc()))
        return None
    pipe.send((False, result if answer else None))
    return result
