"""The code blocks of a text in Markdown, exactly as they were written."""

from markdown_it.token import Token

from tokamac.app.tui.prose.parse import tokens


def code_blocks(source: str) -> list[str]:
    """Return the content of every fenced or indented block, in order, those in lists and quotes too."""
    return [token.content for token in tokens(source) if _is_code(token)]


def _is_code(token: Token) -> bool:
    return token.type in ("fence", "code_block")


class Back:
    """Counts how often the same was asked for in a row: 1 the first time, then further back, and round again."""

    def __init__(self) -> None:
        self._of: tuple[int, int] | None = None
        self._back = 0

    def again(self, key: int, count: int) -> int:
        """Return how far back to go among ``count`` things of ``key``: 1 is the last."""
        self._back = self._back % count + 1 if self._of == (key, count) else 1
        self._of = (key, count)
        return self._back
