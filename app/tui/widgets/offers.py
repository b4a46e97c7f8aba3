"""Below the prompt: what fits the word that is being written, the best first: files after @, commands after a slash."""

from collections.abc import Callable, Sequence
from pathlib import Path

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option
from textual.worker import get_current_worker

from tokamac.app.tui.actions import Action
from tokamac.app.tui.command_names import Calling, fitting
from tokamac.app.tui.completion import Finder, Naming
from tokamac.app.tui.theme import FAINT

Pick = Callable[[str], None]


class Offers(OptionList, can_focus=False):
    """A list that is there while there is something to choose from. The prompt keeps the keyboard, and moves it."""

    def __init__(self, file: Pick, command: Pick) -> None:
        """``file`` is called with the path that is chosen, a folder's with a slash at its end; ``command`` with a name."""
        super().__init__(compact=True)
        self.display = False
        self._file = file
        self._command = command
        self._named: Naming | Calling | None = None
        self._finder = Finder(Path())

    @property
    def chosen(self) -> str:
        """What is pointed at: a path, or a command's name; "" while nothing is offered."""
        option = self.highlighted_option if self.display else None
        return "" if option is None else str(option.id)

    def offer(self, named: Naming | Calling | None) -> None:
        """Offer what fits what is being named: commands now, files once they are found; nothing where nothing is."""
        if named == self._named:
            return
        self._named = named
        match named:
            case Naming():
                self.run_worker(lambda: self._find(named), thread=True, exclusive=True)
            case Calling():
                self._show(named, _rows(fitting(named.part)))
            case None:
                self.display = False

    def withdraw(self) -> None:
        """Offer nothing."""
        self.offer(None)

    def _find(self, named: Naming) -> None:
        paths, worker = self._finder.find(named.part), get_current_worker()
        if not worker.is_cancelled:
            self.app.call_from_thread(self._show, named, [Option(Content(path), path) for path in paths])

    def _show(self, named: Naming | Calling, options: Sequence[Option]) -> None:
        if named != self._named:
            return
        self.clear_options()
        self.add_options(options)
        self.highlighted = 0 if options else None
        self.display = bool(options)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Pass on what was chosen, by a key or the mouse."""
        event.stop()
        pick = self._command if isinstance(self._named, Calling) else self._file
        pick(str(event.option_id))


def _rows(actions: Sequence[Action]) -> list[Option]:
    """Return a row for each command: its name, what may follow it, what it does."""
    usages = [action.usage for action in actions]
    width = max(map(len, usages), default=0)
    return [
        Option(Content(usage.ljust(width + 2)) + Content.styled(action.help, FAINT), action.slash)
        for usage, action in zip(usages, actions, strict=True)
    ]
