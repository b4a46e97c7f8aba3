"""Files that people, editors and other programs wrote: read, or refused with the reason and the place."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokamac.app.store import export
from tokamac.app.store.export import parse, read, to_markdown
from tokamac.app.store.values import StoreError

GOOD: dict[str, Any] = {
    "format": "tokamac-chat",
    "version": 1,
    "chat": {
        "title": "t",
        "title_origin": "user",
        "created": "2026-01-01T00:00:00Z",
        "updated": "2026-01-01T00:00:00+01:00",
        "head": 2,
    },
    "messages": [
        {"id": 1, "parent": None, "role": "user", "created": "2026-01-01T00:00:00+00:00", "text": "a"},
        {"id": 2, "parent": 1, "role": "assistant", "created": "2026-01-01T00:00:00+00:00", "text": "b"},
    ],
}


def changed(*path: Any, value: Any) -> str:
    whole = json.loads(json.dumps(GOOD))
    *way, last = path
    at = whole
    for key in way:
        at = at[key]
    at[last] = value
    return json.dumps(whole)


def test_a_file_that_a_person_wrote_by_hand_is_read() -> None:
    archive = parse("\ufeff " + json.dumps(GOOD), now=0)
    assert archive.chat.created_at - archive.chat.updated_at == 3600
    assert [message.text for message in archive.messages] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (changed("version", value=2), "version 2"),
        (changed("version", value=True), "file.version"),
        (changed("format", value="other"), '"format": "tokamac-chat"'),
        (changed("extra", value=1), "unknown field 'extra'"),
        (changed("chat", "colour", value="red"), "unknown field 'colour'"),
        (changed("chat", "head", value=3), "chat.head: there is no message 3"),
        (changed("chat", "head", value=None), "chat.head"),
        (changed("chat", "title_origin", value="god"), "chat.title_origin"),
        (changed("chat", "created", value="yesterday"), "no date and time"),
        (changed("chat", "created", value="2026-01-01T00:00:00"), "no time zone"),
        (changed("chat", "settings", value=[]), "chat.settings: not an object"),
        (changed("chat", value=[]), "chat: not an object"),
        (changed("messages", value={}), "messages: not a list"),
        (changed("messages", 0, value="x"), "messages[0]: not an object"),
        (changed("messages", 1, "id", value=1), "messages[1].id: 1 stands twice"),
        (changed("messages", 1, "parent", value=2), "messages[1].parent: no message 2 comes before it"),
        (changed("messages", 1, "role", value="tool"), "messages[1].role"),
        (changed("messages", 1, "tokens", value=3), "messages[1]: unknown field 'tokens'"),
        (changed("messages", 1, "text", value=None), "messages[1].text"),
        (changed("messages", 1, "metrics", value=3), "messages[1].metrics: not an object"),
        (changed("messages", 1, "attachments", value=3), "messages[1].attachments: not a list"),
        (changed("messages", 1, "attachments", value=[3]), "messages[1].attachments[0]: not an object"),
        (changed("messages", 1, "attachments", value=[{"name": "a"}]), "attachments[0]: no field 'text'"),
        ('{"format": "tokamac-chat", "format": "x"}', "'format' stands twice"),
        ('{"format": NaN}', "NaN is no number"),
        ("{", "no JSON"),
        ("{}", "format"),
        ("", "no message begins"),
        ("just text", "no message begins"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, says: str) -> None:
    with pytest.raises(StoreError) as caught:
        parse(text, now=0)
    assert says in caught.value.message


MARKDOWN = to_markdown(parse(json.dumps(GOOD), now=0))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("<!-- tokamac-end -->\n", "", "its end is missing"),
        ("<!-- tokamac-end -->\n", "<!-- tokamac-end -->\nmore", "belongs to no message"),
        ("## You\n", "## You\nand more\n", "line 4: there is text after tokamac-message"),
        ('"version": 1', '"version": 2', "version 1"),
        ('"version": 1, ', "", "line 1: version"),
        ('"role": "user"', '"role": "cook"', "line 4.role"),
        ('"role": "user"', '"role": "user", "age": 3', "line 4: unknown field 'age'"),
        ('"role": "user"', '"role": user', "line 4: Expecting value"),
        ("<!-- tokamac-text -->", "<!-- tokamac-song -->", "tokamac-song is not known"),
        ("<!-- tokamac-text -->", "<!-- tokamac-thinking -->", "the block of tokamac-thinking is not whole"),
        ('"title": "t"', '"title": t', "line 1: Expecting value"),
    ],
)
def test_a_markdown_file_that_was_broken_is_refused_with_the_line(old: str, new: str, says: str) -> None:
    assert old in MARKDOWN
    with pytest.raises(StoreError) as caught:
        parse(MARKDOWN.replace(old, new, 1), now=0)
    assert says in caught.value.message


def test_an_editor_that_changes_line_ends_breaks_nothing() -> None:
    assert parse("\ufeff" + MARKDOWN.replace("\n", "\r\n"), now=0) == parse(MARKDOWN, now=0)


FOREIGN = """# A talk about bread

## User

How long?

```md
## Assistant
is not a heading here
```

**Assistant:**
An hour.

# Not a speaker

### Human:
Thanks
"""


def test_another_programs_markdown_is_read_by_its_headings() -> None:
    archive = parse(FOREIGN, now=5.0)
    assert archive.chat.title == "A talk about bread"
    assert [(message.role, message.text) for message in archive.messages] == [
        ("user", "How long?\n\n```md\n## Assistant\nis not a heading here\n```"),
        ("assistant", "An hour.\n\n# Not a speaker"),
        ("user", "Thanks"),
    ]
    assert [message.parent for message in archive.messages] == [None, 1, 2]
    assert archive.chat.head == 3
    assert parse("**You**\nhi there", now=5.0).chat.title == "hi there"


def test_what_is_too_large_or_no_text_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "chat.md"
    file.write_bytes(b"## User\n\xff")
    with pytest.raises(StoreError, match="no UTF-8"):
        read(file, now=0)
    monkeypatch.setattr(export, "MAX_BYTES", 4)
    with pytest.raises(StoreError, match="larger"):
        read(file, now=0)
