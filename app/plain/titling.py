"""A title by the model, asked for while a line is waited for.

The store is the main thread's: it is asked before the wait, and the title is written after it.
"""

from tokamac.app.tui.recording import Recording


class Titling:
    """allowed: whether the chat may have a title, as it was when the wait began."""

    def __init__(self) -> None:
        self.allowed = False
        self._title = ""

    def look(self, recording: Recording | None) -> None:
        """Look whether the chat may have a title by the model."""
        self.allowed = recording is not None and recording.may_be_entitled()

    def heard(self, title: str) -> None:
        """The model gave this title."""
        self._title = title

    def keep(self, recording: Recording | None) -> None:
        """Write the title that was heard, if there is one."""
        title, self._title = self._title, ""
        if title and recording is not None:
            recording.entitled(title)
