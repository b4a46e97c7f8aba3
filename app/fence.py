"""The marks around a block of foreign text in Markdown."""

import re


def fence_for(text: str) -> str:
    """Return more backticks than ``text`` holds in a row, at least three, so that it can't end its own block."""
    return "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
