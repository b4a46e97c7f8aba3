"""One file for screens that belong together: the chat, and what opens over it. Here is what all dialogs share.

That is a box in the middle, a title, Esc to close, and the keys in the border.
"""

from collections.abc import Sequence
from typing import TypeVar

from rich.cells import cell_len
from textual.await_complete import AwaitComplete
from textual.binding import Binding
from textual.content import Content
from textual.events import Resize
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.widgets import Checkbox, Input, TextArea

Result = TypeVar("Result")
LOW, FLAT = 30, 16
"""Rows below which a form is not seen as a whole, or not even its first fields with gaps between them."""
SNUG, TIGHT = 90, 60
"""Columns below which the box takes the whole width, or a field's note has no room beside it."""
BORDER = 6  # cells of a border that are not text
SEPARATOR = " · "


class Dialog(ModalScreen[Result | None]):
    """A screen over the chat; its result is None when it is closed. In a small window, its box fills it.

    Classes tell its styles how small: ``-low`` and ``-flat`` by rows, ``-snug`` and ``-tight`` by columns.
    """

    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("escape", "leave", "Close", id="dialog.leave"),
        Binding("ctrl+c", "leave_or_copy", "Copy or close", id="dialog.interrupt", show=False, priority=True),
    ]
    _keys: tuple[str, ...] = ()
    _dismissed = False

    def dismiss(self, result: Result | None = None) -> AwaitComplete:
        """Close with a result. Of two keys that come at once the second finds it closed: it closes nothing else."""
        if self._dismissed:
            return AwaitComplete()
        self._dismissed = True
        return super().dismiss(result)

    def say_keys(self, *keys: str) -> None:
        """Show in the border what keys do, such as ``Enter saves``; the first and the last stay longest."""
        self._keys = keys
        self.query_one(".box").border_subtitle = SEPARATOR.join(keys)
        self.call_after_refresh(self._fit_keys)

    def on_mount(self) -> None:
        """Fit the window from the first frame on."""
        self._dismissed = False
        self._fit(self.app.size)

    def on_resize(self, event: Resize) -> None:
        """Fit the box and its border to the window."""
        self._fit(event.size)
        self.call_after_refresh(self._fit_keys)

    def _fit(self, size: Size) -> None:
        self.set_class(size.height < LOW, "-low")
        self.set_class(size.height < FLAT, "-flat")
        self.set_class(size.width < SNUG, "-snug")
        self.set_class(size.width < TIGHT, "-tight")

    def _fit_keys(self) -> None:
        for box in self.query(".box") if self._keys else ():  # there is none any more where it was closed meanwhile
            box.border_subtitle = fitting(self._keys, box.outer_size.width - BORDER)

    def action_leave(self) -> None:
        """Close without a result."""
        self.dismiss(None)

    def action_leave_or_copy(self) -> None:
        """Copy what is selected; else close, as Esc does."""
        focused = self.focused
        text = self.get_selected_text() or (focused.selected_text if isinstance(focused, Input | TextArea) else "")
        if text:
            self.app.copy_to_clipboard(text)
        else:
            self.action_leave()


def fitting(keys: Sequence[str], room: int) -> str:
    """Return as many ``keys`` as fit on a line of ``room`` cells: the first and the last stay longest, then the first."""
    said = SEPARATOR.join(keys)
    if cell_len(said) <= room or len(keys) == 1:
        return said
    return fitting([*keys[:-2], keys[-1]] if len(keys) > 2 else keys[:1], room)


class Tick(Checkbox):
    """A compact Checkbox that shows its state without colour too."""

    def __init__(self, label: str, *, value: bool, id: str) -> None:
        super().__init__(label, value, compact=True, id=id)

    def render(self) -> Content:
        """Return the box as task lists have it, and the label."""
        mark = "☑" if self.value else "☐"
        label = self.label.pad(1, 1).stylize_before(self.get_visual_style("toggle--label"))
        return Content.assemble((mark, self.get_visual_style("toggle--button")), label)
