"""Conversations as pages and pictures, everything escaped, no scripts and no remote content; and files brought in."""

import io
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from rich.console import Console, Group, RenderableType
from rich.markdown import Markdown
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from tokamac.engine.errors import PictureError
from tokamac.engine.events import Role, StepToken
from tokamac.engine.files import exists
from tokamac.engine.vision.picture import Picture, kind_of

from .chat.conversation import EDITED
from .chat.listing import ending_text
from .chat.preferences import budget_spent
from .chat.recording import ReplyRecord, measured_of
from .chat.reply_steps import alternatives, doubt
from .reports.verdict import figures_text, prompt_text, sentence
from .store import export, foreign
from .store.export import branch, to_json, to_markdown, write
from .store.store import Store
from .store.values import PICTURE, Archive, Attachment, StoredChat, StoredMessage, StoreError
from .text import markdown
from .text.latex import to_rows, to_unicode
from .text.markdown import task_box, tokens
from .text.sanitise import sanitise, sanitise_line
from .text.units import seconds

# Existing files are never replaced. On import a leading system message becomes the chat's system prompt.
#
# entries   what is shown: the current branch as sanitized text
# to_html   one self-contained page
# to_svg    one picture
#
# Markdown and JSON, which can be imported, are in ``app/store/export``.


MOST_CHARACTERS = 60
_NOT_IN_NAMES = re.compile(r"[\W_]+")


Looked = Mapping[int, tuple[StepToken, ...]]  # tokens of replies, by their messages' ids


def export_chat(archive: Archive, path: Path, looked: Looked = MappingProxyType({})) -> None:
    """Write a new file in the format of its suffix; HTML keeps how likely tokens were. Raises StoreError."""
    made = _format(path)
    write(path, to_html(archive, looked) if made is to_html else made(archive))


def check_suffix(path: Path) -> None:
    _format(path)


def free_name(title: str, folder: Path, suffix: str = ".md") -> Path:
    stem = _NOT_IN_NAMES.sub("-", title[:MOST_CHARACTERS].lower()).strip("-") or "chat"
    number = 1
    while exists(path := folder / (f"{stem}{suffix}" if number == 1 else f"{stem}-{number}{suffix}")):
        number += 1
    return path


def _format(path: Path) -> Callable[[Archive], str]:
    made = _FORMATS.get(path.suffix.lower())
    if made is None:
        raise StoreError(f"{path.name} names no format", f"End the name in one of {', '.join(_FORMATS)}.")
    return made


def bring(path: Path, *, now: float) -> Archive:
    """Import a file; ``now`` (Unix seconds) dates undated items. Raises StoreError."""
    return with_system_apart(export.read(path, now=now))


def bring_all(store: Store, path: Path, *, now: float, dry_run: bool = False) -> tuple[list[StoredChat], str]:
    """Import a file of ours or another program's, which a second time adds nothing; return the chats and a sentence."""
    if (found := foreign.read(path)) is None:
        archive = bring(path, now=now)
        if dry_run:
            return [], f"1 chat, {len(archive.messages):,} messages; nothing was imported"
        chat = store.adopt(archive)
        return [chat], f"imported as {chat.id}: {sanitise_line(chat.title) or 'untitled'}"
    if dry_run:
        return [], f"{found.summary}; nothing was imported"
    merged = [store.merge(archive) for archive in found.archives]
    new, added = sum(each.is_new for each in merged), sum(each.added for each in merged)
    chats = [store.chat(each.chat) for each in merged if each.is_new or each.added]
    return chats, f"{found.summary}. Imported: {new:,} new chats, {added:,} messages."


def with_system_apart(archive: Archive) -> Archive:
    """Move a leading system message to the settings, unless there are several roots or a system prompt."""
    first = archive.messages[0] if archive.messages else None
    roots = sum(message.parent is None for message in archive.messages)
    if first is None or first.role != "system" or roots > 1 or "system" in archive.chat.settings:
        return archive
    messages = tuple(
        replace(message, parent=None) if message.parent == first.id else message for message in archive.messages[1:]
    )
    head = None if archive.chat.head == first.id else archive.chat.head
    chat = replace(archive.chat, head=head, settings={**archive.chat.settings, "system": first.text})
    return Archive(chat, messages)


# Shows the current branch. Markdown is rendered, but HTML in it is text, images are named, and link targets are shown;
# only web links are clickable. A content security policy allows only this style sheet, by its hash.


WHO: dict[Role, str] = {"system": "System prompt", "user": "You", "assistant": "Assistant", "tool": "Tool"}


@dataclass(frozen=True, slots=True)
class File:
    name: str
    text: str
    picture: str = ""  # a data: URL


def _file(attachment: Attachment) -> File:
    name = sanitise_line(attachment.name)
    if attachment.kind == PICTURE:
        with suppress(PictureError):
            found = Picture.of_base64(attachment.text, name)
            return File(name, "", f"data:image/{kind_of(found.data, name).lower()};base64,{found.encoded}")
    return File(name, sanitise(attachment.text))


@dataclass(frozen=True, slots=True)
class ExportEntry:
    """A displayed message. who: "You" or a model. ending: why a reply is incomplete, or "".

    thought: heading of the thinking. figures: measurements, then their meaning; empty without any.
    """

    role: Role
    who: str
    text: str
    thinking: str = ""
    thought: str = ""
    files: tuple[File, ...] = ()
    ending: str = ""
    figures: tuple[str, ...] = ()
    tokens: tuple[StepToken, ...] = ()


def title_of(archive: Archive) -> str:
    return sanitise_line(archive.chat.title) or "Chat"


def entries(archive: Archive, looked: Looked = MappingProxyType({})) -> Iterator[ExportEntry]:
    system = archive.chat.settings.get("system")
    if isinstance(system, str) and system.strip():
        yield ExportEntry("system", WHO["system"], sanitise(system))
    for message in branch(archive):
        yield replace(_entry(message), tokens=looked.get(message.id, ()))


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
        files=tuple(_file(each) for each in message.attachments),
        ending=", ".join(filter(None, (EDITED if kept.edited else "", ending_text(kept.ending, kept.reason)))),
        figures=()
        if kept.metrics is None
        else (
            f"prompt: {prompt_text(kept.metrics)}",
            f"reply: {figures_text(kept.metrics)}",
            sentence(kept.metrics, kept.diagnosis),
        ),
    )


_WEB = re.compile(r"https?://", re.IGNORECASE)


def prose_html(text: str) -> str:
    """Render sanitized ``text`` to HTML."""
    rendered: str = _parser().render(text)
    return rendered


@cache
def _parser() -> MarkdownIt:
    return markdown.parser(_Renderer)


class _Renderer(RendererHTML):
    """markdown-it's renderer with safe links, images, formulas, checkboxes and cells (inline styles are forbidden)."""

    def link_open(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        target = _attribute(tokens[index], "href")
        if not _WEB.match(target):
            return '<span class="link">'
        return f'<a href="{escape(target)}" rel="noopener noreferrer nofollow">'

    def link_close(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        start = next(at for at in range(index, -1, -1) if tokens[at].type == "link_open")
        target = _attribute(tokens[start], "href")
        shown = "".join(token.content for token in tokens[start + 1 : index])
        return ("</a>" if _WEB.match(target) else "</span>") + _leads(target, shown)

    def image(self, tokens: Sequence[Token], idx: int, *_: Any, **__: Any) -> str:
        """Name an image: the page must not fetch anything."""
        token = tokens[idx]
        label = token.content or "image"
        return f'<span class="link">{escape(label)}</span>{_leads(_attribute(token, "src"), label)}'

    def list_item_open(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        box = markdown.task_box(tokens[index].meta)
        return f'<li class="task">{box} ' if box else "<li>"

    def math_inline(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        """Write a formula in Unicode with its source on demand, or just its source."""
        source, shown = tokens[index].meta["source"], to_unicode(tokens[index].content)
        return _formula("span", source, source if shown is None else shown)

    def math_block(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        token = tokens[index]
        source, rows = token.meta["source"], to_rows(token.content) if token.meta["closed"] else None
        return _formula("pre", source, source if rows is None else "\n".join(rows)) + "\n"

    def th_open(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        return _cell(tokens[index])

    def td_open(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
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
.d1 { color: var(--link); }
.d2 { color: var(--accent); }
.d3 { color: var(--accent); text-decoration: underline; }
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


def to_html(archive: Archive, looked: Looked = MappingProxyType({})) -> str:
    title = escape(title_of(archive))
    began = datetime.fromtimestamp(archive.chat.created_at, UTC)
    articles = "\n".join(_article(entry) for entry in entries(archive, looked))
    policy = (
        f"default-src 'none'; style-src 'sha256-{b64encode(sha256(CSS.encode()).digest()).decode()}'; img-src data:"
    )
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
        tinted_html(entry.tokens) if entry.tokens else "",
        *(_shown(each) if each.picture else _folded(each.name, each.text) for each in entry.files),
        f'<p class="ending">{escape(entry.ending)}</p>' if entry.ending else "",
        *(f'<p class="figures">{escape(line)}</p>' for line in entry.figures),
        "</article>",
    ]
    return "\n".join(part for part in parts if part)


def _shown(file: File) -> str:
    return f'<figure><img src="{escape(file.picture)}"><figcaption>{escape(file.name)}</figcaption></figure>'


def tinted_html(tokens: Sequence[StepToken]) -> str:
    """Return the text once more, each token tinted by how likely it was; pointing at one tells what else was."""
    spans = (
        f'<span class="d{doubt(each)}" title="{escape(alternatives(each))}">{escape(sanitise(each.text))}</span>'
        for each in tokens
    )
    return f'<details><summary>How likely each word was</summary><pre class="plain">\n{"".join(spans)}</pre></details>'


def _folded(summary: str, text: str) -> str:
    # A newline right after <pre> is not shown, so one is given.
    return f'<details><summary>{escape(summary)}</summary><pre class="plain">\n{escape(text)}</pre></details>'


# One conversation as one picture, drawn from text by Rich as a terminal of a fixed width would show it. It asks for no
# font.

COLUMNS = 88
# Rich fills it in. Its own frame asks a server for a font.
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
_NOT_XML = re.compile("[\ufffe\uffff]")


def to_svg(archive: Archive) -> str:
    """Return the current branch as SVG; thinking is mentioned, not drawn."""
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
    """Render the chat's parse with Rich: HTML as text, links with targets."""
    drawn = Markdown("", hyperlinks=False)
    drawn.parsed = [_drawable(each) for each in tokens(text)]
    for item, _, inline in zip(drawn.parsed, drawn.parsed[1:], drawn.parsed[2:], strict=False):
        if (box := task_box(item.meta)) and inline.children:
            inline.children.insert(0, Token("text", "", 0, content=f"{box} "))
    return drawn


def _drawable(token: Token) -> Token:
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


_FORMATS: dict[str, Callable[[Archive], str]] = {".md": to_markdown, ".json": to_json, ".html": to_html, ".svg": to_svg}
