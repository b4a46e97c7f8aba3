"""Numbers as a user writes them after a command."""

MOST_DIGITS = 9
"""Nothing that is numbered here has more, and Python reads no text of thousands of digits as a number."""


def whole_number(text: str) -> int | None:
    """Return the number that ``text`` is in digits alone; None where it is none, or has more digits than ``MOST_DIGITS``."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None
