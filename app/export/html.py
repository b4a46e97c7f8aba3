"""One conversation as one page: no scripts, nothing fetched, every text escaped.

What is shown are the messages of the branch it stands on, every text made safe. A message's Markdown becomes HTML in which nothing
runs: HTML in the text is text, an image is named, and where a link leads is shown; only the web can be clicked. A content policy
says so to the browser too: it allows this style sheet, by its hash, and nothing else.
"""

import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from tokamac.engine.events import Role
from tokamac.engine.metrics import Metrics

from .. import markdown
from ..chat.conversation import EDITED
from ..chat.listing import ending_text
from ..chat.preferences import budget_spent
from ..chat.recording import ReplyRecord, measured_of
from ..latex import to_rows, to_unicode
from ..sanitise import sanitise, sanitise_line
from ..store.export import branch
from ..store.values import Archive, StoredMessage
from ..units import count, rate, seconds
from ..verdict import sentence

WHO: dict[Role, str] = {"system": "System prompt", "user": "You", "assistant": "Assistant", "tool": "Tool"}


@dataclass(frozen=True, slots=True)
class File:
    """An attachment: its name and its text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class ExportEntry:
    """A message as it is shown. who: "You", or a model's name. ending: why a reply is not whole, "" where it is.

    thought: what to call the thinking. figures: what was measured of a reply, then what it means; empty where nothing was.
    """

    role: Role
    who: str
    text: str
    thinking: str = ""
    thought: str = ""
    files: tuple[File, ...] = ()
    ending: str = ""
    figures: tuple[str, ...] = ()


def title_of(archive: Archive) -> str:
    """Return the conversation's title, on one line."""
    return sanitise_line(archive.chat.title) or "Chat"


def entries(archive: Archive) -> Iterator[ExportEntry]:
    """Yield what is shown, in the order of reading; a system prompt that the chat has of its own comes first."""
    system = archive.chat.settings.get("system")
    if isinstance(system, str) and system.strip():
        yield ExportEntry("system", WHO["system"], sanitise(system))
    for message in branch(archive):
        yield _entry(message)


def _entry(message: StoredMessage) -> ExportEntry:
    if message.role == "tool":
        call = message.calls[0] if message.calls else None
        name = "" if call is None else sanitise_line(f"{call.name} {call.arguments}")
        who = WHO["tool"] if call is None else f"{WHO['tool']}: {sanitise_line(call.name)}"
        return ExportEntry("tool", who, "", files=(File(name, sanitise(message.text)),))
    kept = measured_of(message) if message.role == "assistant" else ReplyRecord()
    took = "" if kept.thinking_s is None else f" for {seconds(kept.thinking_s)}"
    spent = "" if kept.thinking_ended_at is None else f", {budget_spent(kept.thinking_ended_at)}"
    return ExportEntry(
        role=message.role,
        who=sanitise_line(message.model) if message.role == "assistant" and message.model else WHO[message.role],
        text=sanitise(message.text),
        thinking=sanitise(message.thinking),
        thought=f"Thought{took}{spent}",
        files=tuple(File(sanitise_line(each.name), sanitise(each.text)) for each in message.attachments),
        ending=", ".join(filter(None, (EDITED if kept.edited else "", ending_text(kept.ending, kept.reason)))),
        figures=() if kept.metrics is None else (_figures(kept.metrics), sentence(kept.metrics, kept.diagnosis)),
    )


def _figures(metrics: Metrics) -> str:
    return " · ".join(
        (
            f"{count(metrics.prompt_tokens)} prompt tokens, {count(metrics.cached_tokens)} of them cached",
            f"TTFT {seconds(metrics.ttft_s)}",
            f"prefill {rate(metrics.prefill_tps)}",
            f"{count(metrics.generated_tokens)} tokens written",
            f"decode {rate(metrics.decode_tps)}",
        )
    )


_WEB = re.compile(r"https?://", re.IGNORECASE)


def prose_html(text: str) -> str:
    """Return ``text``, which is safe for a terminal already, as HTML."""
    rendered: str = _parser().render(text)
    return rendered


@cache
def _parser() -> MarkdownIt:
    return markdown.parser(_Renderer)


class _Renderer(RendererHTML):
    """markdown-it's own, but for links, images, formulas, boxes to tick, and cells, which a strict page may not style inline."""

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

    def list_item_open(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        """Begin an item, with its box if it has one."""
        box = markdown.task_box(tokens[index].meta)
        return f'<li class="task">{box} ' if box else "<li>"

    def math_inline(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        """Write a formula in Unicode, its source on demand; or its source."""
        source, shown = tokens[index].meta["source"], to_unicode(tokens[index].content)
        return _formula("span", source, source if shown is None else shown)

    def math_block(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        """Write a formula on lines of its own."""
        token = tokens[index]
        source, rows = token.meta["source"], to_rows(token.content) if token.meta["closed"] else None
        return _formula("pre", source, source if rows is None else "\n".join(rows)) + "\n"

    def th_open(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        """Begin a cell of a table's head."""
        return _cell(tokens[index])

    def td_open(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        """Begin a cell."""
        return _cell(tokens[index])


def _formula(tag: str, source: str, shown: str) -> str:
    return f'<{tag} class="math" title="{escape(source)}">{escape(shown)}</{tag}>'


def _cell(token: Token) -> str:
    style = _attribute(token, "style")
    side = next((side for side in ("right", "center") if side in style), "")
    return f'<{token.tag} class="{side}">' if side else f"<{token.tag}>"


def _leads(target: str, shown: str) -> str:
    same = not target or target.removeprefix("mailto:") == shown
    return "" if same else f' <span class="target">({escape(target)})</span>'


def _attribute(token: Token, name: str) -> str:
    return str(token.attrs.get(name, ""))


CSS = """
:root {
  color-scheme: light dark;
  --text: #1f2430; --faint: #5b6270; --page: #fbfaf8; --box: #f1eee9; --line: #dcd7cf; --accent: #a83a0b; --link: #0f5f58;
}
@media (prefers-color-scheme: dark) {
  :root {
    --text: #dfe3ec; --faint: #9aa1b2; --page: #12141b; --box: #1b1f2a; --line: #313747; --accent: #ff9d7d; --link: #8bd5ca;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 46rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--text);
  font: 1rem/1.6 system-ui, sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; }
header p, .figures, .target, footer { color: var(--faint); font-size: .875rem; }
article { margin-top: 2rem; }
article > h2 { font-size: .9375rem; color: var(--accent); margin: 0 0 .25rem; }
article.user > .text, article.system > .text {
  background: var(--box); border-left: 3px solid var(--accent); padding: .5rem 1rem; white-space: pre-wrap;
}
.text h1, .text h2, .text h3 { font-size: 1.1rem; }
.link, a { color: var(--link); }
.ending { color: var(--accent); }
pre { background: var(--box); padding: .75rem 1rem; overflow-x: auto; }
code, pre { font: .875rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
pre.plain { white-space: pre-wrap; }
.math { color: var(--link); }
pre.math { background: none; }
.task { list-style: none; margin-left: -1.25rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { border: 1px solid var(--line); padding: .25rem .625rem; text-align: left; }
.right { text-align: right; }
.center { text-align: center; }
blockquote { margin: 1rem 0; padding-left: 1rem; border-left: 3px solid var(--line); color: var(--faint); }
details { margin: .5rem 0; }
summary { color: var(--faint); cursor: pointer; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: .5rem; }
@media print { body { max-width: none; } article { break-inside: avoid-page; } }
"""


def to_html(archive: Archive) -> str:
    """Return the branch on which the conversation stands as a page."""
    title = escape(title_of(archive))
    began = datetime.fromtimestamp(archive.chat.created_at, UTC)
    articles = "\n".join(_article(entry) for entry in entries(archive))
    policy = f"default-src 'none'; style-src 'sha256-{b64encode(sha256(CSS.encode()).digest()).decode()}'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{CSS}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p><time datetime="{began.isoformat(timespec="seconds")}">{began:%Y-%m-%d %H:%M} UTC</time></p>
</header>
<main>
{articles}
</main>
<footer>Exported by tokamac</footer>
</body>
</html>
"""


def _article(entry: ExportEntry) -> str:
    text = prose_html(entry.text) if entry.role == "assistant" else escape(entry.text)
    parts = [
        f'<article class="{entry.role}">',
        f"<h2>{escape(entry.who)}</h2>",
        _folded(entry.thought, entry.thinking) if entry.thinking else "",
        f'<div class="text">{text}</div>' if entry.text else "",
        *(_folded(each.name, each.text) for each in entry.files),
        f'<p class="ending">{escape(entry.ending)}</p>' if entry.ending else "",
        *(f'<p class="figures">{escape(line)}</p>' for line in entry.figures),
        "</article>",
    ]
    return "\n".join(part for part in parts if part)


def _folded(summary: str, text: str) -> str:
    # A newline right after <pre> is not shown, so one is given.
    return f'<details><summary>{escape(summary)}</summary><pre class="plain">\n{escape(text)}</pre></details>'
