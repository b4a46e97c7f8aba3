"""A model that makes vectors of texts, in an engine process of its own: the chat's model stays where it is."""

import base64
import queue
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from tokamac.engine.errors import EngineClosedError, TokamacError

from .client import CHILD_COMMAND, BackendEvent, Died, EngineProcess
from .protocol import AskEmbeddings, Embedded, Load, Loaded, RequestFailed

Answer = TypeVar("Answer", Loaded, Embedded)


class EmbeddingProcess:
    """Blocks until each answer. For one thread; ``close`` from any. Raises TokamacError."""

    def __init__(self, model: str, log: Path, command: Sequence[str] = CHILD_COMMAND) -> None:
        self._answers: queue.SimpleQueue[BackendEvent] = queue.SimpleQueue()
        self._plain: set[str] = set()  # prompts that the model does not have
        self._process = EngineProcess(command, log, self._answers.put)
        try:
            self._process.send(Load(model, prompt_cache=False, speculation=False, private=True))
            self._answer(Loaded)
        except BaseException:
            self.close()
            raise

    def vectors(self, texts: Sequence[str], prompt: str) -> list[bytes]:
        """Return float16 vectors of length 1. prompt: its name, where the model has it."""
        name = None if prompt in self._plain else prompt
        self._process.send(AskEmbeddings(0, tuple(texts), name, None, truncate=True))
        made = self._answer(Embedded)
        if made.kind == "OptionError" and name is not None:
            self._plain.add(prompt)
            return self.vectors(texts, prompt)
        if made.error:
            raise TokamacError(made.error, made.hint)
        import numpy as np

        return [np.frombuffer(base64.b64decode(each), "<f4").astype(np.float16).tobytes() for each in made.vectors]

    def close(self) -> None:
        self._process.close()
        self._answers.put(Died("it was closed", ""))

    def _answer(self, kind: type[Answer]) -> Answer:
        while True:
            match self._answers.get():
                case Died(why, last_line):
                    raise EngineClosedError(f"the embedding model's process ended: {why}", last_line)
                case RequestFailed(error=error, hint=hint):
                    raise TokamacError(error, hint)
                case answer if isinstance(answer, kind):
                    return answer
