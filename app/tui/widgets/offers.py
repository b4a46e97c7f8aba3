"""Below the prompt: the files that fit what is written after @, the best one first."""

from collections.abc import Callable
from pathlib import Path

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option
from textual.worker import get_current_worker

from tokamac.app.tui.completion import Finder


class Offers(OptionList, can_focus=False):
    """A list that is there while there is something to choose from. The prompt keeps the keyboard, and moves it."""

    def __init__(self, pick: Callable[[str], None]) -> None:
        """``pick`` is called with the path that is chosen; that of a folder ends with a slash."""
        super().__init__(compact=True)
        self.display = False
        self._pick = pick
        self._part: str | None = None
        self._finder = Finder(Path())

    def offer(self, part: str) -> None:
        """Offer the files that fit ``part`` of a path, once they are found."""
        if part != self._part:
            self._part = part
            self.run_worker(lambda: self._find(part), thread=True, exclusive=True)

    def withdraw(self) -> None:
        """Offer nothing."""
        self._part = None
        self.display = False

    def _find(self, part: str) -> None:
        paths, worker = self._finder.find(part), get_current_worker()
        if not worker.is_cancelled:
            self.app.call_from_thread(self._show, part, paths)

    def _show(self, part: str, paths: list[str]) -> None:
        if part != self._part:
            return
        self.clear_options()
        self.add_options([Option(Content(path), path) for path in paths])
        self.highlighted = 0 if paths else None
        self.display = bool(paths)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Pass on what was chosen, by a key or the mouse."""
        event.stop()
        self._pick(str(event.option_id))
