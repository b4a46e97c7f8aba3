"""The engine's process of the chat, with replies of a known length and text: ``python -m bench.long_child``.

The model computes every token as ever. But the mark that ends a reply is not obeyed, and what is shown for the tokens is a fixed
prose, four characters a token: so the screen has the same work whatever the model would say.
"""

import sys
from collections.abc import Callable, Sequence

from tests.bench.texts import SHOWN_PROSE
from tokamac.app.backend.child import load_engine, serve
from tokamac.app.backend.protocol import Load
from tokamac.engine import Engine
from tokamac.engine.events import LoadProgress, ModelSpec
from tokamac.engine.text.tokenizer import Detokenizer, Tokenizer

COMMAND = [sys.executable, "-m", "tests.bench.long_child"]
CHARACTERS = 4


class Reciting(Detokenizer):
    """Does a detokenizer's work, and returns the next characters of a fixed text instead."""

    def __init__(self, decode: Callable[[Sequence[int]], str], after: Sequence[int]) -> None:
        super().__init__(decode, after)
        self._at = 0

    def add(self, token: int) -> str:
        super().add(token)
        begin, self._at = self._at, self._at + CHARACTERS
        return SHOWN_PROSE[begin : self._at]

    def flush(self) -> str:
        return ""


def load(request: Load, progress: Callable[[LoadProgress], None]) -> tuple[Engine, ModelSpec]:
    """Load the real engine, and have it recite."""
    engine, info = load_engine(request, progress)
    tokenizer: Tokenizer = engine.tokenizer
    tokenizer.eos_ids = tokenizer.hidden_ids = frozenset()
    decode = tokenizer._decode
    tokenizer.detokenizer = lambda after=(): Reciting(decode, after)  # type: ignore[method-assign]
    return engine, info


if __name__ == "__main__":
    serve(load)
