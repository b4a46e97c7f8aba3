"""What each attachment takes of the model that is loaded, in tokens: asked of the engine's process, and kept. Pure.

Counted is the block that the attachment is in a prompt, its name and fences included.
"""

from collections.abc import Iterable

from tokamac.app.backend.wire import AskCount, Counted, ModelInfo
from tokamac.app.store.values import Attachment
from tokamac.app.tui.attachments import whole
from tokamac.app.tui.steps import Ask, Step
from tokamac.engine.options import KVSpec


class Counts:
    """Tokens by attachment, of one model; another model's tokens are others."""

    def __init__(self) -> None:
        self._model: ModelInfo | None = None
        self._known: dict[Attachment, int | None] = {}
        self._asked: dict[int, Attachment] = {}
        self._id = 0

    def of(self, model: ModelInfo | None, attachment: Attachment) -> int | None:
        """Return the tokens that ``attachment`` takes of ``model``; None while that is unknown."""
        return self._known.get(attachment) if model is not None and model == self._model else None

    def exceed(self, model: ModelInfo | None, kv: KVSpec, attachments: Iterable[Attachment]) -> bool:
        """Whether ``attachments`` alone, as far as they are counted, leave no token of the context to a reply.

        Never where the engine makes room by itself: the oldest tokens roll out, or the middle is left out.
        """
        if model is None or model.capacity is None or kv.when_full in ("roll", "truncate-middle"):
            return False
        return sum(self.of(model, each) or 0 for each in attachments) >= model.capacity

    def ask(self, model: ModelInfo | None, attachments: Iterable[Attachment]) -> list[Step]:
        """Return what to ask of ``model`` for attachments that were not counted yet."""
        if model != self._model:
            self._model = model
            self._known.clear()
            self._asked.clear()
        pending = set(self._asked.values())
        new = [each for each in attachments if each not in self._known and each not in pending]
        return [self._ask(each) for each in new] if model is not None else []

    def take(self, event: Counted) -> None:
        """Take an answer."""
        if (attachment := self._asked.pop(event.id, None)) is not None:
            self._known[attachment] = event.tokens

    def forget(self) -> None:
        """Expect no answer any more: what was not counted is asked again, what could not be counted too."""
        self._asked.clear()
        self._known = {each: tokens for each, tokens in self._known.items() if tokens is not None}

    def _ask(self, attachment: Attachment) -> Ask:
        self._id += 1
        self._asked[self._id] = attachment
        return Ask(AskCount(self._id, whole("", (attachment,))))
