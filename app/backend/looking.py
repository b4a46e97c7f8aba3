"""Answers ``LookAgain``: how likely the tokens of a reply were. On a thread: the process hears the next request meanwhile."""

import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import Message, PrefillProgress
from tokamac.engine.passes.tokens import PromptText, StepTokens

from .outbox import Outbox
from .protocol import LookAgain, LookedAt

if TYPE_CHECKING:
    from tokamac.engine import Engine

STOPPED = "Stopped before all likely tokens were computed."


class Looker:
    """Answers one question at a time, the last one asked.

    accept: leaves out of a prompt what the chat template does not take. wait: returns once nothing more urgent runs.
    """

    def __init__(
        self, outbox: Outbox, accept: Callable[[Sequence[Message]], list[Message]], wait: Callable[[], None]
    ) -> None:
        self._outbox, self._accept, self._wait = outbox, accept, wait
        self._latest: LookAgain | None = None
        self._asked: queue.SimpleQueue[tuple[Engine, LookAgain] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="looker", daemon=True).start()

    def ask(self, engine: "Engine | None", question: LookAgain) -> None:
        """Have ``question`` answered by ``engine``, in place of any other. Returns at once."""
        self._latest = question
        if engine is None:
            self._outbox.put(LookedAt(question.id, ended=True, error="No model is loaded."))
        else:
            self._asked.put((engine, question))

    def stop(self) -> None:
        """End what is being answered, within a piece."""
        self._latest = None

    def close(self) -> None:
        """End the thread."""
        self.stop()
        self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            engine, question = asked
            why = ""
            try:
                self._wait()
                why = self._answer(engine, question)
            except TokamacError as error:
                why = error.one_line()
            except Exception as error:  # whatever a model's code raises must not end this thread
                traceback.print_exc()
                why = f"The likely tokens could not be computed: {type(error).__name__}. The log has the details."
            self._outbox.put(LookedAt(question.id, ended=True, error=why))

    def _answer(self, engine: "Engine", question: LookAgain) -> str:
        """Tell what is found, piece by piece; return why it ended early, or ""."""
        number = question.id
        found = engine.look_again(
            self._accept(question.prompt),
            question.reply,
            passes=question.passes,
            prompt_tokens=question.prompt_tokens,
            cached_tokens=question.cached_tokens,
            template=question.template,
        )
        with closing(found):
            for event in found:
                if self._latest is not question:
                    return STOPPED
                match event:
                    case PromptText():
                        self._outbox.put(LookedAt(number, prompt=event))
                    case StepTokens():
                        self._outbox.put(LookedAt(number, tokens=event))
                    case PrefillProgress(done, total):
                        self._outbox.put(LookedAt(number, done=done, total=total))
        return ""
