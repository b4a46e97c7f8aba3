"""The branch on which a conversation stands, as Markdown that reads well anywhere and comes back exactly.

What the text alone can't say stands in comments, each on a line of its own. What a comment opens reaches to the next one:

    <!-- tokamac-chat {"version": 1, "title": "Bandwidth", …} -->
    # Bandwidth

    <!-- tokamac-message {"role": "user", …} -->
    ## You

    <!-- tokamac-text -->
    Why is decode memory-bound?

    <!-- tokamac-end -->

``tokamac-thinking`` holds folded text and ``tokamac-attachment`` a fenced one. A line of a message that begins like such a comment
gets a backslash before it, which Markdown does not show.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tokamac.app.backend.shapes import ShapeError, build
from tokamac.app.store.portable import (
    VERSION,
    attachment_from,
    blank,
    chat_from,
    chat_record,
    dumps,
    loads,
    message_from,
    message_record,
)
from tokamac.app.store.text import one_line
from tokamac.app.store.values import Archive, Attachment, Message

_MARK = re.compile(r"^<!-- tokamac-([a-z]+)(?: (\{.*\}))? -->$\n?", re.MULTILINE)
_ESCAPABLE = re.compile(r"^(?=\\*<!-- tokamac-)", re.MULTILINE)
_ESCAPED = re.compile(r"^\\(?=\\*<!-- tokamac-)", re.MULTILINE)
_FOLDED = re.compile(r"\A<details><summary>Thinking</summary>\n\n(.*)\n\n</details>\n*\Z", re.DOTALL)
_FENCED = re.compile(r"\A[^\n]*\n\n(`{3,})\n(.*)\n\1\n*\Z", re.DOTALL)
_WHO = {"system": "System", "user": "You", "assistant": "Assistant"}


def is_ours(text: str) -> bool:
    """Return whether the text was written by ``to_markdown``, whatever was edited since."""
    return bool(re.match(r"\ufeff?\s*<!-- tokamac-chat ", text))


def to_markdown(archive: Archive) -> str:
    """Return the messages from the chat's beginning to its head as Markdown."""
    chat = {"version": VERSION, **chat_record(archive.chat)}
    parts = [f"{_mark('chat', chat)}# {_plain(archive.chat.title or 'Chat')}\n\n"]
    parts += [_message(message) for message in _branch(archive)]
    return "".join([*parts, _mark("end")])


def from_markdown(text: str) -> Archive:
    """Return the conversation in what ``to_markdown`` wrote. Raises ValueError (ShapeError) that says what is wrong, and where."""
    text = text.removeprefix("\ufeff").lstrip()
    if text.partition("\n")[0].endswith("\r"):  # an editor has changed all line ends
        text = text.replace("\r\n", "\n")
    sections = list(_sections(text))
    if not sections or sections[0].kind != "chat":
        raise ShapeError("line 1: the comment tokamac-chat is damaged")
    if sections[-1].kind != "end":
        raise ShapeError("its end is missing")
    _require_heading(sections[0], 1)
    _require_heading(sections[-1], 0)
    messages: list[Message] = []
    for section in sections[1:-1]:
        _take(section, messages)
    record = dict(sections[0].record)
    if build(int, record.pop("version", None), "line 1: version") != VERSION:
        raise ShapeError(f"it is not of version {VERSION}, which this tokamac reads")
    return Archive(replace(chat_from(record, "line 1"), head=messages[-1].id if messages else None), tuple(messages))


@dataclass(frozen=True, slots=True)
class _Section:
    """A comment, what it says, what follows it, and the number of its line."""

    kind: str
    record: dict[str, object]
    body: str
    line: int


def _sections(text: str) -> Iterator[_Section]:
    marks = list(_MARK.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    line, at = 1, 0
    for mark, end in zip(marks, ends, strict=True):
        line, at = line + text.count("\n", at, mark.start()), mark.start()
        try:
            record = loads(mark[2]) if mark[2] else {}
        except ValueError as error:
            raise ShapeError(f"line {line}: {error}") from None
        yield _Section(mark[1], record, text[mark.end() : end], line)


def _take(section: _Section, messages: list[Message]) -> None:
    """Add what the section says to the messages, or to the last of them."""
    where = f"line {section.line}"
    if section.kind == "message":
        _require_heading(section, 1)
        number = len(messages) + 1
        messages.append(message_from(section.record, where, blank(number, number - 1 or None)))
        return
    if not messages:
        raise ShapeError(f"{where}: tokamac-{section.kind} belongs to no message")
    message = messages[-1]
    if section.kind == "text":
        message = replace(message, text=_unescaped(_body(section.body)))
    elif section.kind == "thinking":
        message = replace(message, thinking=_unescaped(_inside(_FOLDED, section, 1)))
    elif section.kind == "attachment":
        attachment = attachment_from(section.record, where, _unescaped(_inside(_FENCED, section, 2)))
        message = replace(message, attachments=(*message.attachments, attachment))
    else:
        raise ShapeError(f"{where}: tokamac-{section.kind} is not known")
    messages[-1] = message


def _message(message: Message) -> str:
    who = _plain(message.model) if message.role == "assistant" and message.model else _WHO[message.role]
    out = f"{_mark('message', message_record(message))}## {who}\n\n"
    if message.thinking:
        folded = f"<details><summary>Thinking</summary>\n\n{_escaped(message.thinking)}\n\n</details>"
        out += f"{_mark('thinking')}{folded}\n\n"
    out += f"{_mark('text')}{_escaped(message.text)}\n\n"
    return out + "".join(_attachment(each) for each in message.attachments)


def _attachment(attachment: Attachment) -> str:
    longest = max((len(run) for run in re.findall("`+", attachment.text)), default=0)
    fence = "`" * max(3, longest + 1)
    record: dict[str, object] = {"name": attachment.name, "kind": attachment.kind}
    shown = f"**{_plain(attachment.name)}**\n\n{fence}\n{_escaped(attachment.text)}\n{fence}"
    return f"{_mark('attachment', record)}{shown}\n\n"


def _mark(kind: str, record: dict[str, object] | None = None) -> str:
    """Return a comment. No text in it can end it: angle brackets stand in strings only, where JSON may escape them."""
    said = "" if record is None else " " + dumps(record).replace("<", "\\u003c").replace(">", "\\u003e")
    return f"<!-- tokamac-{kind}{said} -->\n"


def _branch(archive: Archive) -> list[Message]:
    by_id = {message.id: message for message in archive.messages}
    out, at = [], archive.chat.head
    while at is not None:
        out.append(by_id[at])
        at = by_id[at].parent
    return out[::-1]


def _plain(name: str) -> str:
    """Return a name that begins no comment: it is only shown, and read back from the comment before it."""
    return one_line(name).replace("<", "‹")


def _body(body: str) -> str:
    return body[:-2] if body.endswith("\n\n") else body.removesuffix("\n")


def _require_heading(section: _Section, lines: int) -> None:
    """Raise ShapeError where more stands under a comment than its heading: it would be lost."""
    if sum(bool(line.strip()) for line in section.body.split("\n")) > lines:
        raise ShapeError(f"line {section.line}: there is text after tokamac-{section.kind} that belongs to no message")


def _inside(shape: re.Pattern[str], section: _Section, group: int) -> str:
    match = shape.match(section.body)
    if match is None:
        raise ShapeError(f"line {section.line}: the block of tokamac-{section.kind} is not whole")
    return match[group]


def _escaped(text: str) -> str:
    return _ESCAPABLE.sub(r"\\", text)


def _unescaped(text: str) -> str:
    return _ESCAPED.sub("", text)
