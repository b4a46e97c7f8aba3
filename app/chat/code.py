"""Markdown as the chat parses it, and the code blocks of a text, exactly as they were written."""

from functools import cache

from markdown_it import MarkdownIt
from markdown_it.token import Token


@cache
def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


def tokens(source: str) -> list[Token]:
    """Return the parser's own view of ``source``."""
    return _parser().parse(source)


def code_blocks(source: str) -> list[str]:
    """Return the content of every fenced or indented block, in order, those in lists and quotes too."""
    return [token.content for token in tokens(source) if token.type in ("fence", "code_block")]
