"""What is written and not sent: what the next line begins with and what goes with it, and while a prompt is edited, that one."""

from tokamac.app.tui.attachments import Draft, joined


class Composer:
    """draft: what the next line begins with, and what goes with it. editing: the prompt it is asked in place of; None: of none."""

    def __init__(self) -> None:
        self.draft = Draft()
        self.editing: int | None = None
        self._aside = Draft()  # what is for the next prompt, while one is edited
        self._edited = Draft()  # that one as it was

    @property
    def unsent(self) -> Draft:
        """All that is written and not sent. An edit that has changed nothing is not."""
        if self.editing is None:
            return self.draft
        return joined([self._aside, *([] if self.draft == self._edited else [self.draft])])

    def begin_edit(self, key: int, draft: Draft) -> None:
        """Have the next line asked in place of the prompt ``key``, which was ``draft``; what was there waits for the one after."""
        if self.editing is None:
            self._aside = self.draft
        self.editing, self.draft, self._edited = key, draft, draft

    def end_edit(self) -> None:
        """Give back what waited while a prompt was edited, if one was."""
        if self.editing is not None:
            self.hold(self._aside)

    def hold(self, draft: Draft) -> None:
        """Hold ``draft`` in place of all that was held, an edit too."""
        self.draft, self.editing, self._aside = draft, None, Draft()

    def give_back(self, draft: Draft) -> None:
        """Take a prompt that was not sent, before what is there for the next one."""
        if self.editing is None:
            self.draft = joined([draft, self.draft])
        else:
            self._aside = joined([draft, self._aside])
