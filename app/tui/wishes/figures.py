"""The gauges' figures, by the keyboard."""

from typing import TYPE_CHECKING

from tokamac.app.tui.widgets.gauges import Gauges
from tokamac.app.tui.wishes.reading import toggle_panel

if TYPE_CHECKING:
    from tokamac.app.tui.screens.chat import ChatScreen


def gauges(chat: "ChatScreen", _: str) -> None:
    """Point at a figure of the side panel, which is shown for that."""
    panel = chat.query_one("#panel")
    if not panel.display and not chat.memory.settings.panel:
        toggle_panel(chat, "")
    if panel.display:
        chat.query_one(Gauges).focus()
    else:
        text = f"The window is too narrow for the gauges: {chat.session.keymap.key('explain')} explains the last reply."
        chat.notify(text, markup=False, timeout=5)
