"""What the user writes and has not sent: the box, what it held before a message was edited, and the prompts that wait."""

from tokamac.app.tui.attachments import Draft, joined
from tokamac.app.tui.session import Session
from tokamac.app.tui.widgets.prompt import Prompt


class Composer:
    """The box and what stands behind it. editing: the prompt that the box holds to be written anew; None: it holds the draft."""

    def __init__(self, prompt: Prompt, session: Session) -> None:
        self.editing: int | None = None
        self._prompt = prompt
        self._session = session
        self._aside = Draft()  # the draft, while a message is edited
        self._edited = Draft()  # that message as it was

    @property
    def unsent(self) -> Draft:
        """All that is written and not sent. An edit that has changed nothing is not."""
        held = [self._prompt.draft]
        if self.editing is not None:
            held = [self._aside, *(draft for draft in held if draft != self._edited)]
        return joined([*self._session.queued, *held])

    def begin_edit(self, key: int, draft: Draft) -> None:
        """Write the prompt ``key`` anew in the box, which holds ``draft`` for that; what it held comes back after."""
        if self.editing is None:
            self._aside = self._prompt.draft
        self.editing = key
        self._prompt.put(draft)
        self._edited = self._prompt.draft

    def end_edit(self) -> None:
        """Give the box back to what it held before a message was edited."""
        self.hold(self._aside)

    def hold(self, draft: Draft) -> None:
        """Hold ``draft`` in place of all that was held, an edit too."""
        self.editing = None
        self._prompt.put(draft)

    def give_back(self, draft: Draft) -> None:
        """Take a prompt that will not be sent: before what is written, or before the draft while a message is edited."""
        if self.editing is None:
            self._prompt.give_back(draft.text, draft.attachments)
        else:
            self._aside = joined([draft, self._aside])
