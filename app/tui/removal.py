"""Removing a model asks once: which row is asked about, and why some are not to be removed. Pure."""

from tokamac.app.tui.shelf import Row


class Removal:
    """Remembers the row that was asked about, until another one is pointed at."""

    def __init__(self) -> None:
        self.asked = ""

    def ask(self, row: Row) -> None:
        """The user was asked about ``row``."""
        self.asked = row.id

    def forget(self) -> None:
        """Nothing is asked any more."""
        self.asked = ""

    def is_for(self, row: Row | None) -> bool:
        """Whether it is ``row`` that was asked about."""
        return row is not None and row.id == self.asked

    @staticmethod
    def refusal(row: Row, held: str) -> str:
        """Return why ``row`` can't be removed; nothing where it can. held: the model that is loaded."""
        if row.model == held:
            return "It is loaded: F7 unloads it first."
        if row.download is not None:
            return "It is being downloaded: F6 cancels that, and removes what has arrived."
        if row.home == "embedded":
            return "It is a part of the program."
        return "" if row.on_disk else "It is not on this disk."
