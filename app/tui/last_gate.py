"""The last thing that every row passes on its way to the terminal, whatever widget drew it."""

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from tokamac.app.sanitise import bare


class LastGate(LineFilter):
    """Lets no control character and no link through. What is foreign was made safe long before; this is for what was forgotten.

    Textual writes its own escape sequences after it, from the rows' styles.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments of a row, the same objects where there is nothing to take away."""
        del background  # Textual's signature
        return [_safe(segment) for segment in segments]


def _safe(segment: Segment) -> Segment:
    text, style = bare(segment.text), segment.style
    if style is not None and style.link is not None:
        style = style.update_link(None)
    return segment if text == segment.text and style is segment.style else Segment(text, style)
