"""Ctrl+O: choose a model, by name or from the list."""

from collections.abc import Callable

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui.models import choices, hub_cache
from tokamac.app.tui.screens.dialog import Dialog


class ModelScreen(Dialog[str]):
    """Asks for a model; the result is its folder or id."""

    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("down", "to_list", "List", id="model.list", show=False),
        Binding("f3", "what_if", "What if", id="model.what_if"),
    ]

    def __init__(self, current: str, what_if: Callable[[str], None]) -> None:
        super().__init__()
        self._current = current
        self._what_if = what_if
        self._choices = choices(hub_cache())

    def compose(self) -> ComposeResult:
        """Yield the input and the list."""
        with Vertical(classes="box") as box:
            box.border_title = "Model"
            box.border_subtitle = "Enter loads · Tab to the list · F3 what if · Esc closes"
            yield Static("A folder, or a Hugging Face id. The chat goes on with it.", classes="note", markup=False)
            yield Input(self._current, placeholder="mlx-community/…", select_on_focus=True, compact=True)
            yield OptionList(
                *(Option(_line(choice.model, choice.note)) for choice in self._choices), markup=False, compact=True
            )

    @on(Input.Submitted)
    def typed(self, event: Input.Submitted) -> None:
        """Take what is written."""
        if name := event.value.strip():
            self.dismiss(name)

    @on(OptionList.OptionSelected)
    def picked(self, event: OptionList.OptionSelected) -> None:
        """Take what is pointed at."""
        self.dismiss(self._choices[event.option_index].model)

    def action_what_if(self) -> None:
        """Ask how the model that is pointed at, or else typed, would run."""
        offered = self.query_one(OptionList)
        if offered.has_focus and offered.highlighted is not None:
            self._what_if(self._choices[offered.highlighted].model)
        else:
            self._what_if(self.query_one(Input).value.strip() or self._current)

    def action_to_list(self) -> None:
        """Go to the list."""
        self.query_one(OptionList).focus()


def _line(model: str, note: str) -> Content:
    return Content(sanitise_line(model)) + "  " + Content.styled(note, "$foreground 55%")
