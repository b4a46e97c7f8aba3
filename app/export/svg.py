"""One conversation as one picture, drawn from text by Rich as a terminal of a fixed width would show it. It asks for no font."""

import io
import re
from collections.abc import Iterator

from markdown_it.token import Token
from rich.console import Console, Group, RenderableType
from rich.markdown import Markdown
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from ..latex import to_rows, to_unicode
from ..markdown import task_box, tokens
from ..store.values import Archive
from .html import ExportEntry, entries, title_of

COLUMNS = 88
_FRAME = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px; line-height: {line_height}px;
  font-variant-east-asian: full-width;
}}
.{unique_id}-title {{ font: bold 18px system-ui, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""Rich fills it in. Its own frame asks a server for a font."""
_NOT_XML = re.compile("[\ufffe\uffff]")


def to_svg(archive: Archive) -> str:
    """Return the branch on which the conversation stands as an SVG image. Thinking is named, not drawn."""
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        legacy_windows=False,
        _environ={},
    )
    for entry in entries(archive):
        console.print(Group(*_drawn(entry)))
    picture: str = console.export_svg(title=title_of(archive), code_format=_FRAME)
    return _NOT_XML.sub("\ufffd", picture)


def _prose(text: str) -> Markdown:
    """Return Rich's drawing of what the chat's own parser finds: HTML is text like any other, links show where they lead."""
    drawn = Markdown("", hyperlinks=False)
    drawn.parsed = [_drawable(each) for each in tokens(text)]
    for item, _, inline in zip(drawn.parsed, drawn.parsed[1:], drawn.parsed[2:], strict=False):
        if (box := task_box(item.meta)) and inline.children:
            inline.children.insert(0, Token("text", "", 0, content=f"{box} "))
    return drawn


def _drawable(token: Token) -> Token:
    """Return what Rich draws for a token that it does not know: a formula, or an image, by its name and address."""
    match token.type:
        case "image":
            return Token("text", "", 0, content=f"{token.content or 'image'} ({token.attrs.get('src', '')})")
        case "math_inline":
            return Token("text", "", 0, content=to_unicode(token.content) or token.meta["source"])
        case "math_block":
            rows = to_rows(token.content) if token.meta["closed"] else None
            return Token("code_block", "code", 0, content="\n".join(rows) if rows else token.meta["source"])
    token.children = token.children and [_drawable(each) for each in token.children]
    return token


def _drawn(entry: ExportEntry) -> Iterator[RenderableType]:
    yield Text(entry.who, style="bold cyan" if entry.role == "assistant" else "bold yellow")
    if entry.thinking:
        yield Text(entry.thought.lower(), style="italic bright_black")
    text: RenderableType = _prose(entry.text) if entry.role == "assistant" else Text(entry.text)
    yield Padding(text, (0, 0, 0, 2))
    for each in entry.files:
        yield Text(f"  with {each.name}", style="bright_black")
    if entry.ending:
        yield Text(entry.ending, style="yellow")
    for line in entry.figures:
        yield Text(line, style="bright_black")
    yield Rule(style="bright_black")
