"""The title of the terminal's window or tab: which chat is open in it, while it is."""

from tokamac.app.sanitise import bare
from tokamac.app.tui.listing import excerpt

NAME = "tokamac"
SAVE = "\x1b[22;2t"
"""Has the terminal remember the title that it has."""
RESTORE = "\x1b]2;\a\x1b[23;2t"
"""Takes ours away and has it take up again what it remembers, if it does."""


def entitled(chat: str) -> str:
    """Return the sequence (OSC 2) that names the chat of the title ``chat`` and the app; "" names the app alone.

    A title may be a model's: it is made safe, cut to one short line, and passes what every row passes last, so that nothing in it
    can end the sequence.
    """
    title = f"{excerpt(chat)} · {NAME}" if chat else NAME
    return f"\x1b]2;{bare(title)}\a"
