"""The chat's Markdown: CommonMark with tables, strikethrough, task lists and LaTeX formulas."""

# Emphasis is CommonMark's, but an asterisk between letters or digits is a product: ``3*4 = 12``. Formulas are
# recognised before Markdown touches their backslashes and underscores: ``\(…\)``, ``$…$`` inline; ``\[…\]``,
# ``$$…$$``, ``\begin{align}`` on lines of their own. Prices and escaped brackets are not formulas. An open
# formula stays one block until decided, so that rows drawn earlier never change while streaming.
# (mdit-py-plugins' rules make paragraphs and lists of an open one.)

import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline, emphasis
from markdown_it.token import Token

from .sanitise import safe_link

# The types of tokens for formulas. content: without delimiters; meta: the whole `source`, and whether it was `closed`.
INLINE, BLOCK = "math_inline", "math_block"
LONGEST_INLINE = 1_000  # characters of a formula in a line
MOST_LINES = 60  # of a formula; an opening that is not closed by then is none


def parser(renderer: type[RendererHTML] = RendererHTML) -> MarkdownIt:
    made = MarkdownIt("commonmark", {"html": False, "linkify": True}, renderer_cls=renderer)
    made.enable(["table", "strikethrough"])
    made.inline.ruler.enable(
        "linkify"
    )  # an address with its scheme; the rule that finds all others takes ten times as long
    made.block.ruler.before("fence", BLOCK, _block_formula, {"alt": ["paragraph", "reference", "blockquote", "list"]})
    made.inline.ruler.before("escape", INLINE, _inline_formula)
    made.inline.ruler.at("emphasis", _emphasis)
    made.core.ruler.after("inline", "tasks", _tasks)
    return made


def _emphasis(state: StateInline, silent: bool) -> bool:
    """Read emphasis; inside a word a single marker is text, and a longer run only closes."""
    before, known = state.src[state.pos - 1 : state.pos], len(state.delimiters)
    if not emphasis.tokenize(state, silent):
        return False
    if _in_word(before) and _in_word(state.src[state.pos : state.pos + 1]):
        for each in state.delimiters[known:]:
            each.open, each.close = False, each.close and each.length > 1
    return True


def _in_word(char: str) -> bool:
    """Whether a digit, or a letter of a script with spaces: Chinese and Thai emphasise without any."""
    return char.isalnum() and unicodedata.category(char) != "Lo"


_parser = cache(parser)


def tokens(source: str) -> list[Token]:
    return _parser().parse(source)


def code_blocks(source: str) -> list[str]:
    return [token.content for token in tokens(source) if token.type in ("fence", "code_block")]


class OpenableLink(NamedTuple):
    text: str
    address: str


def links(source: str) -> list[OpenableLink]:
    found: dict[str, OpenableLink] = {}
    for token in tokens(source):
        for link in _links(token.children or ()):
            found.setdefault(link.address, link)
    return list(found.values())


def _links(inline: Sequence[Token]) -> list[OpenableLink]:
    made: list[OpenableLink] = []
    address, text = "", ""
    for token in inline:
        match token.type:
            case "link_open":
                address, text = safe_link(str(token.attrs.get("href", ""))), ""
            case "link_close":
                made += [OpenableLink(text or address, address)] if address else []
                address = ""
            case "image":
                source = safe_link(str(token.attrs.get("src", "")))
                made += [OpenableLink(token.content or "image", source)] if source else []
            case _:
                text += token.content
    return made


_OPENING = re.compile(
    r"\\\[|\$\$|\\begin\{((?:align|equation|gather|multline|eqnarray|alignat|cases|[pbBvV]?matrix|split)\*?)\}"
)
_CLOSING = {"\\[": "\\]", "$$": "$$"}
_ENDS_LINE = re.compile(r"[\s.,;:]*")


def _block_formula(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    if state.is_code_block(start):
        return False
    opening = _OPENING.match(state.src, state.bMarks[start] + state.tShift[start], state.eMarks[start])
    if opening is None:
        return False
    closing = _CLOSING.get(opening[0]) or f"\\end{{{opening[1]}}}"
    alone = state.src[opening.end() : state.eMarks[start]].isspace() or opening.end() == state.eMarks[start]
    line, behind = start, opening.end()
    while True:
        at = state.src.find(closing, behind, state.eMarks[line])
        if at >= 0 and not _ENDS_LINE.fullmatch(state.src, at + len(closing), state.eMarks[line]):
            return False  # text follows: a formula in a line
        line += 1
        if at >= 0 or line >= end or (not state.isEmpty(line) and state.sCount[line] < state.blkIndent):
            break
        if line - start >= MOST_LINES or (state.isEmpty(line) and not alone):
            return False
        behind = state.bMarks[line] + state.tShift[line]
    if silent:
        return True
    state.line = line
    token = state.push(BLOCK, "", 0)
    source = state.getLines(start, line, state.sCount[start], False).strip("\n")
    formula, _, rest = source.removeprefix(opening[0]).strip().rpartition(closing) if at >= 0 else ("", "", "")
    token.content = source.strip() if opening[1] else formula.strip() + rest.strip()
    token.markup = opening[0]
    token.map = [start, line]
    token.meta = {"source": source.rstrip(), "closed": at >= 0}
    return True


def _inline_formula(state: StateInline, silent: bool) -> bool:
    at, source = state.pos, state.src
    opening = source[at : at + 2] if source.startswith(("\\(", "\\[", "$$"), at) else source[at]
    if opening not in ("\\(", "\\[", "$$", "$"):
        return False
    start = at + len(opening)
    closing = {"\\(": "\\)", "\\[": "\\]"}.get(opening, opening)
    end = source.find(closing, start, min(state.posMax, start + LONGEST_INLINE))
    if opening == "$" and not _is_between_dollars(source, at, end):
        return False
    if end < 0:
        return opening.startswith("\\") and _keep_open(state, start, silent)
    formula = source[start:end]
    if not looks_like_formula(formula):
        return False
    state.pos = end + len(closing)
    if not silent:
        token = state.push(INLINE, "", 0)
        token.content, token.markup = formula.strip(), opening
        token.meta = {"source": source[at : state.pos], "closed": True}
    return True


def _is_between_dollars(source: str, at: int, end: int) -> bool:
    inside = source[at + 1 : end] if end > 0 else ""
    if not inside or inside[0].isspace() or inside[-1].isspace() or inside[-1] == "\\" or "\n" in inside:
        return False
    return not (source[at - 1 : at].isalnum() or source[end + 1 : end + 2].isalnum())


def _keep_open(state: StateInline, start: int, silent: bool) -> bool:
    newline = state.src.find("\n", start, state.posMax)
    end = newline if newline >= 0 else state.posMax
    rest = state.src[start:end]
    if rest.strip() and not looks_like_formula(rest):
        return False
    if not silent:
        state.pending += state.src[state.pos : end]
    state.pos = end
    return True


_SIGNS = re.compile(r"[\\^_={}<>]")
_WORD = re.compile(r"[^\W\d_]{2,}")


def looks_like_formula(text: str) -> bool:
    if _SIGNS.search(text):
        return True
    words = _WORD.findall(text)
    if any(char.isspace() for char in text.strip()):
        return not words
    return bool(text) and all(len(word) <= 3 for word in words)


_TASK = re.compile(r"\[([ xX])\](?: +|$)")


def _tasks(state: StateCore) -> None:
    for index, token in enumerate(state.tokens[:-2]):
        inline = state.tokens[index + 2]
        if token.type != "list_item_open" or inline.type != "inline" or not inline.children:
            continue
        first, box = inline.children[0], _TASK.match(inline.content)
        if box is not None and first.type == "text" and first.content.startswith(box[0].rstrip()):
            first.content = first.content[len(box[0]) :]
            token.meta = {**token.meta, "done": box[1] != " "}


def task_box(meta: dict[str, Any]) -> str:
    return {None: "", True: "☑", False: "☐"}[meta.get("done")]
