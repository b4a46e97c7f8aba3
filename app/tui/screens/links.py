"""The links of a message: where they lead, and opening or copying one.

A terminal that knows OSC 8 opens a link that is clicked with Ctrl or Cmd; this works in the others, and without a mouse.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from ...chat.external_programs import NotTakenError, open_address
from ...sanitise import sanitise_line
from ..theme import FAINT
from . import Dialog

if TYPE_CHECKING:
    from ...markdown import OpenableLink
    from .chat import ChatScreen


class LinksScreen(Dialog[tuple[str, bool]]):
    """Choose one of ``links``; the result is its address, and whether to open it rather than copy it."""

    BINDINGS = [Binding("c,y", "copy", "Copy", id="links.copy")]  # noqa: RUF012 (Textual's way)

    def __init__(self, links: "Sequence[OpenableLink]") -> None:
        super().__init__()
        self._links = links

    def compose(self) -> ComposeResult:
        """Yield the list."""
        with Vertical(classes="box") as box:
            box.border_title = "Links"
            yield OptionList(*(Option(_line(link)) for link in self._links), markup=False)

    def on_mount(self) -> None:
        """Say the keys."""
        super().on_mount()
        self.say_keys("Enter opens", "C copies", "Esc closes")
        self.query_one(OptionList).focus()

    @on(OptionList.OptionSelected)
    def open(self, message: OptionList.OptionSelected) -> None:
        """Open the link."""
        self.dismiss((self._links[message.option_index].address, True))

    def action_copy(self) -> None:
        """Copy the link's address."""
        index = self.query_one(OptionList).highlighted
        if index is not None:
            self.dismiss((self._links[index].address, False))


def _line(link: "OpenableLink") -> Content:
    text = sanitise_line(link.text)
    address = Content.styled(link.address, FAINT)
    return address if text == link.address else Content(text) + Content("\n") + address


def show_links(chat: "ChatScreen", links: "Sequence[OpenableLink]") -> None:
    """Show the links of a message."""

    def chosen(choice: tuple[str, bool] | None) -> None:
        if choice is not None:
            (open_link if choice[1] else _copy)(chat, choice[0])

    chat.app.push_screen(LinksScreen(links), chosen)


def open_link(chat: "ChatScreen", address: str) -> None:
    """Open ``address`` in the system's browser; where there is none, copy it."""

    def run() -> None:
        try:
            open_address(address)
        except NotTakenError:
            chat.app.call_from_thread(_copy, chat, address)

    chat.run_worker(run, thread=True, group="links")


def _copy(chat: "ChatScreen", address: str) -> None:
    chat.tell(f"{address}\n{chat.copy(address)}")
