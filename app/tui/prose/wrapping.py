"""Text as rows of a given width. Each row knows what joins it to the one above in copied text: a wrapped row is no new line."""

from collections.abc import Iterator
from dataclasses import dataclass

from textual.content import Content
from textual.content import Span as ContentSpan

from tokamac.app.tui.prose.blocks import Inline

TAB = 8  # cells
STYLES = {
    "strong": "bold",
    "em": "italic",
    "code": "$prose-code",
    "strike": "strike",
    "link": "underline",
    "faint": "$text-muted",
    "marker": "$prose-marker",
    "heading": "bold $prose-heading",
    "quote": "$text-muted",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One row on the screen.

    joint: what stands between it and the row above in copied text; where a row was wrapped, the white space of the text itself.
    indent: so many characters at its begin are not the text's own.
    """

    content: Content
    joint: str = "\n"
    indent: int = 0


def content(inline: Inline) -> Content:
    """Return ``inline`` as styled text."""
    return Content(inline.text, spans=[ContentSpan(span.start, span.end, STYLES[span.style]) for span in inline.spans])


def wrapped(text: Content, width: int) -> Iterator[Row]:
    """Yield ``text``, which may hold newlines, as rows of at most ``width`` cells."""
    text = text.expand_tabs(TAB) if "\t" in text.plain else text
    end = 0
    for index, part in enumerate(text.wrap(width)):
        start = text.plain.find(part.plain, end)
        yield Row(part, text.plain[end:start] if index else "\n")
        end = start + len(part.plain)
