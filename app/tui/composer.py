"""What the user writes and has not sent: the box, what it held before a message was edited, and the prompts that wait."""

from tokamac.app.tui.attachments import Draft, joined
from tokamac.app.tui.session import Session
from tokamac.app.tui.widgets.prompt import Prompt

EDITING = "editing · Esc gives it up"
"""On the box's border as long as it holds a message to be written anew."""


class Composer:
    """The box and what stands behind it. editing: the prompt that the box holds to be written anew; None: it holds the draft.

    An edit that is left for another one is its message's: it is in the box again when that message is edited again.
    """

    def __init__(self, prompt: Prompt, session: Session) -> None:
        self.editing: int | None = None
        self._prompt = prompt
        self._session = session
        self._aside = Draft()  # the draft, while a message is edited
        self._edited = Draft()  # that message as it was
        self._left: dict[int, Draft] = {}  # edits that were left for another one

    @property
    def unsent(self) -> Draft:
        """All that is written and not sent. An edit that has changed nothing is not."""
        held = [] if self._is_unchanged else [self._prompt.draft]
        aside = [] if self.editing is None else [self._aside]
        return joined([*self._session.queued, *aside, *self._left.values(), *held])

    @property
    def _is_unchanged(self) -> bool:
        return self.editing is not None and self._prompt.draft == self._edited

    def begin_edit(self, key: int, draft: Draft) -> bool:
        """Write the prompt ``key`` anew in the box, which holds ``draft`` for that, or what was written of it already.

        What the box held comes back after. Returns whether another edit was left for this one.
        """
        if key == self.editing:
            return False
        leaves = self.editing is not None and not self._is_unchanged and bool(self._prompt.draft.whole)
        if self.editing is None:
            self._aside = self._prompt.draft
        elif leaves:
            self._left[self.editing] = self._prompt.draft
        self._edit(key)
        self._prompt.put(draft)
        self._edited = self._prompt.draft
        if (begun := self._left.pop(key, None)) is not None:
            self._prompt.put(begun)
        return leaves

    def end_edit(self) -> None:
        """Give the box back to what it held before a message was edited. Edits that were left stay with their messages."""
        self._edit(None)
        self._prompt.put(self._aside)

    def hold(self, draft: Draft) -> None:
        """Hold ``draft`` in place of all that was held, edits too."""
        self._edit(None)
        self._left.clear()
        self._prompt.put(draft)

    def give_back(self, draft: Draft) -> None:
        """Take a prompt that will not be sent: before what is written, or before the draft while a message is edited."""
        if self.editing is None:
            self._prompt.give_back(draft.text, draft.attachments)
        else:
            self._aside = joined([draft, self._aside])

    def _edit(self, key: int | None) -> None:
        self.editing = key
        self._prompt.border_title = "" if key is None else EDITING
        self._prompt.obeys = key is None
