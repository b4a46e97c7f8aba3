"""The guide to the app itself, one key away."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokamac.app.tui.screens.chat import ChatScreen


def ask_guide(chat: "ChatScreen", question: str) -> None:
    """Ask the embedded guide, in a process of its own: the chat and its model go on as they are."""
    from tokamac.app.tui.screens.guide import GuideScreen

    chat.app.push_screen(GuideScreen(chat.bridge.another(), question))
