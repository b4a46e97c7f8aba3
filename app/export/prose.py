"""A message's Markdown as HTML in which nothing runs and nothing is fetched.

HTML in the text is text. An image is named, not shown. Where a link leads is shown, and only the web can be clicked.
"""

import re
from collections.abc import Sequence
from functools import cache
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

_WEB = re.compile(r"https?://", re.IGNORECASE)


def to_html(text: str) -> str:
    """Return ``text``, which is safe for a terminal already, as HTML."""
    rendered: str = _parser().render(text)
    return rendered


@cache
def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer).enable(["table", "strikethrough"])


class _Renderer(RendererHTML):
    """markdown-it's own, but for links and images, and for the alignment of cells, which a strict page may not style inline."""

    def link_open(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        """Begin a link that can be clicked, or the name of one that can't."""
        target = _attribute(tokens[index], "href")
        if not _WEB.match(target):
            return '<span class="link">'
        return f'<a href="{escape(target)}" rel="noopener noreferrer nofollow">'

    def link_close(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        """End a link, and show where it leads unless its text says so."""
        start = next(at for at in range(index, -1, -1) if tokens[at].type == "link_open")
        target = _attribute(tokens[start], "href")
        shown = "".join(token.content for token in tokens[start + 1 : index])
        return ("</a>" if _WEB.match(target) else "</span>") + _leads(target, shown)

    def image(self, tokens: Sequence[Token], idx: int, *_: Any, **__: Any) -> str:
        """Name an image: opening the page must ask nobody for it."""
        token = tokens[idx]
        label = token.content or "image"
        return f'<span class="link">{escape(label)}</span>{_leads(_attribute(token, "src"), label)}'

    def th_open(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        """Begin a cell of a table's head."""
        return _cell(tokens[index])

    def td_open(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        """Begin a cell."""
        return _cell(tokens[index])


def _cell(token: Token) -> str:
    style = _attribute(token, "style")
    side = next((side for side in ("right", "center") if side in style), "")
    return f'<{token.tag} class="{side}">' if side else f"<{token.tag}>"


def _leads(target: str, shown: str) -> str:
    same = not target or target.removeprefix("mailto:") == shown
    return "" if same else f' <span class="target">({escape(target)})</span>'


def _attribute(token: Token, name: str) -> str:
    return str(token.attrs.get(name, ""))
