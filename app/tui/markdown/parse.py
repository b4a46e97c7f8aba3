"""Markdown to blocks: CommonMark with tables, strikethrough, task lists and Unicode formulas."""

import re

from markdown_it.tree import SyntaxTreeNode

from ...text.latex import to_rows, to_unicode
from ...text.markdown import BLOCK, INLINE, task_box, tokens
from ...text.sanitise import safe_link
from .rows import Align, Block, Code, Flow, HorizontalRule, Inline, InlineStyle, Line, Section, StyledSpan, Table

BULLETS = "•◦▪"
QUOTE = "▎ "
FORMULA = "  "  # stands before a formula on lines of its own
LISTS = ("bullet_list", "ordered_list")
_STYLES: dict[str, InlineStyle] = {"strong": "strong", "em": "em", "s": "strike"}


def parse(source: str) -> tuple[Section, ...]:
    tree = SyntaxTreeNode(tokens(source))
    lines, whole_lines = source.splitlines(), source.count("\n")
    return tuple(
        Section(
            *(node.map or (0, len(lines))),
            _Writer(lines).section(node),
            _items(node),
            node.type in LISTS and _loose(node),
            node.type == BLOCK and not (node.meta["closed"] and node.map is not None and node.map[1] <= whole_lines),
        )
        for node in tree.children
    )


def _items(node: SyntaxTreeNode) -> tuple[int, ...]:
    if node.type == "table":
        return tuple(row.map[0] for body in node.children[1:] for row in body.children if row.map)
    if node.type not in LISTS:
        return ()
    if node.type == "ordered_list":
        last = int(node.attrs.get("start", 1)) + len(node.children) - 1
        if node.children[-1].info != str(last):
            return ()
    return tuple(item.map[0] for item in node.children if item.map)


def _loose(node: SyntaxTreeNode) -> bool:
    return any(not child.hidden for item in node.children for child in item.children if child.type == "paragraph")


class _Writer:
    def __init__(self, source: list[str]) -> None:
        self._source = source
        self._blocks: list[Block] = []
        self._lines: list[Line] = []
        self._bullet: str | None = None  # what replaces the end of the next line's indent

    def section(self, node: SyntaxTreeNode) -> tuple[Block, ...]:
        self._block(node, "", 0)
        self._cut()
        return tuple(self._blocks)

    def _cut(self) -> None:
        while self._lines and not self._lines[-1].inline.text.strip() and not self._lines[-1].first.strip(" ▎"):
            self._lines.pop()
        if self._lines:
            self._blocks.append(Flow(tuple(self._lines)))
            self._lines = []

    def _line(self, inline: Inline, indent: str) -> None:
        bullet, self._bullet = self._bullet, None
        first = indent if bullet is None else indent[: len(indent) - len(bullet)] + bullet
        self._lines.append(Line(inline, first, indent))

    def _space(self, indent: str) -> None:
        if self._lines and (self._lines[-1].inline.text or self._lines[-1].first.strip(" ▎")):
            self._lines.append(Line(Inline(""), indent.rstrip(), indent.rstrip()))

    def _block(self, node: SyntaxTreeNode, indent: str, depth: int) -> None:
        match node.type:
            case "paragraph":
                self._line(inline(node), indent)
            case "heading":
                text = inline(node)
                self._line(Inline(text.text, (StyledSpan(0, len(text.text), "heading"), *text.spans)), indent)
            case "bullet_list" | "ordered_list":
                self._list(node, indent, depth)
            case "blockquote":
                self._children(node, indent + QUOTE, depth, loose=True)
            case "fence" | "code_block":
                self._code(node, indent)
            case token if token == BLOCK:
                self._formula(node, indent)
            case "table":
                self._cut()
                self._blocks.append(_table(node))
            case "hr":
                self._cut()
                self._blocks.append(HorizontalRule())
            case _:
                self._line(Inline(node.content), indent)

    def _children(self, node: SyntaxTreeNode, indent: str, depth: int, *, loose: bool) -> None:
        for index, child in enumerate(node.children):
            if index and loose:
                self._space(indent)
            self._block(child, indent, depth)

    def _list(self, node: SyntaxTreeNode, indent: str, depth: int) -> None:
        first = int(node.attrs.get("start", 1)) if node.type == "ordered_list" else 0
        width = len(str(first + len(node.children) - 1)) + 2
        loose = _loose(node)
        for number, item in enumerate(node.children, first):
            box = task_box(item.meta)
            if node.type == "ordered_list":
                bullet = f"{number}. ".rjust(width) + (f"{box} " if box else "")
            else:
                bullet = f"{box or BULLETS[depth % 3]} "
            if number > first and loose:
                self._space(indent)
            self._bullet = bullet
            self._children(item, indent + " " * len(bullet), depth + 1, loose=loose)
            if self._bullet is not None:  # an item without text still shows its bullet
                self._line(Inline(""), indent + " " * len(bullet))

    def _code(self, node: SyntaxTreeNode, indent: str) -> None:
        if self._bullet is not None:
            self._line(Inline(""), indent)
        self._cut()
        closed = node.type == "code_block" or self._fence_closed(node)
        language = node.info.split(maxsplit=1)[0] if node.info.strip() else ""
        self._blocks.append(Code(node.content.removesuffix("\n"), language, closed, indent))

    def _formula(self, node: SyntaxTreeNode, indent: str) -> None:
        source = str(node.meta["source"])
        converted = to_rows(node.content) if node.meta["closed"] else None
        for index, row in enumerate(source.split("\n") if converted is None else converted):
            copied = None if converted is None else "" if index else source
            text = row.expandtabs(4)
            deeper = "" if self._bullet is not None else FORMULA
            self._line(Inline(text, (StyledSpan(0, len(text), "math", source=copied),)), indent + deeper)

    def _fence_closed(self, node: SyntaxTreeNode) -> bool:
        assert node.map is not None
        start, end = node.map
        if any(line.strip(" \t>") for line in self._source[end:]):
            return True
        return end - start > 1 and self._source[end - 1].strip(" \t>").startswith(node.markup)


def _table(node: SyntaxTreeNode) -> Table:
    rows = [row for part in node.children for row in part.children]
    return Table(
        tuple(tuple(inline(cell) for cell in row.children) for row in rows), tuple(map(_align, rows[0].children))
    )


def _align(cell: SyntaxTreeNode) -> Align:
    style = str(cell.attrs.get("style", ""))
    return "right" if "right" in style else "center" if "center" in style else "left"


def inline(node: SyntaxTreeNode) -> Inline:
    text: list[str] = []
    spans: list[StyledSpan] = []
    for child in node.children:
        for part in child.children:
            _inline(part, text, spans)
    return Inline("".join(text), tuple(spans))


def _inline(node: SyntaxTreeNode, text: list[str], spans: list[StyledSpan]) -> None:
    start = sum(map(len, text))
    match node.type:
        case "softbreak":
            text.append(" ")
        case "hardbreak":
            text.append("\n")
        case "code_inline":
            text.append(node.content)
            spans.append(StyledSpan(start, start + len(node.content), "code"))
        case "image":
            _linked(node.content or "image", str(node.attrs.get("src", "")), text, spans)
        case "link":
            for child in node.children:
                _inline(child, text, spans)
            _leads(start, str(node.attrs.get("href", "")), text, spans)
        case token if token == INLINE:
            converted = to_unicode(node.content)
            source = str(node.meta["source"])
            text.append(source if converted is None else converted)
            spans.append(StyledSpan(start, start + len(text[-1]), "math", source=None if converted is None else source))
        case "strong" | "em" | "s":
            for child in node.children:
                _inline(child, text, spans)
            spans.append(StyledSpan(start, sum(map(len, text)), _STYLES[node.type]))
        case _:
            text.append(node.content)


def _linked(label: str, target: str, text: list[str], spans: list[StyledSpan]) -> None:
    start = sum(map(len, text))
    text.append(label)
    _leads(start, target, text, spans)


_SITE = re.compile(r"\w\.\w|://")  # in what looks like an address itself


def _leads(start: int, target: str, text: list[str], spans: list[StyledSpan]) -> None:
    shown = "".join(text)[start:]
    address = safe_link(target)
    end = start + len(shown)
    spans.append(StyledSpan(start, end, "link", link=address))
    if target and (not address or _SITE.search(shown)) and target.removeprefix("mailto:") != shown:
        text.append(f" ({target})")
        spans.append(StyledSpan(end, end + len(target) + 3, "faint"))
