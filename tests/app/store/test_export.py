"""Conversations out into files and back, exactly; and pages and pictures in which nothing runs."""

import json
import math
import re
import stat
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tokamac.app.chat.recording import tree_of
from tokamac.app.export import export_chat, free_name, to_html, to_svg, with_system_apart
from tokamac.app.store import export
from tokamac.app.store.export import figures_line, parse, read, to_json, to_markdown, write
from tokamac.app.store.store import Store
from tokamac.app.store.values import Archive, Attachment, StoredChat, StoredMessage, StoreError, storable
from tokamac.engine.events import ToolCall

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
NASTY = st.sampled_from(
    [
        "<!-- tokamac-end -->",
        "\\<!-- tokamac-text -->",
        "<!-- tokamac-",
        "```",
        "\n",
        "\r\n",
        "</details>",
        "## You",
        "-->",
        "\\",
    ]
)
TEXTS = st.lists(NASTY | st.text(max_size=8), max_size=8).map(lambda parts: storable("".join(parts)))
LINES = TEXTS.map(lambda text: " ".join(text.split()))
OBJECTS = st.dictionaries(
    TEXTS,
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)
MOMENTS = st.floats(0, 4e9).map(lambda seconds: round(seconds, 6))
ATTACHMENTS = st.builds(Attachment, TEXTS, TEXTS, TEXTS)


@st.composite
def archives(draw: Any, *, branches: bool = True) -> Archive:
    messages: list[StoredMessage] = []
    for number in range(1, draw(st.integers(0, 5)) + 1):
        earlier = st.none() | st.integers(1, number - 1) if number > 1 else st.none()
        parent = draw(earlier) if branches else (number - 1 or None)
        messages.append(
            StoredMessage(
                number, "", parent, draw(st.sampled_from(["system", "user", "assistant"])), draw(TEXTS), draw(TEXTS),
                draw(st.sampled_from(["complete", "stopped", "failed"])), draw(MOMENTS), draw(TEXTS), draw(OBJECTS),
                draw(st.none() | OBJECTS), tuple(draw(st.lists(ATTACHMENTS, max_size=2))),
            )
        )  # fmt: skip
    head = (draw(st.integers(1, len(messages))) if branches else len(messages)) if messages else None
    origin = draw(st.sampled_from(["words", "model", "user"]))
    chat = StoredChat("", draw(LINES), origin, draw(MOMENTS), draw(MOMENTS), draw(TEXTS), draw(OBJECTS), "", head)
    return Archive(chat, tuple(messages))


@settings(UNHURRIED)
@given(archives())
def test_json_gives_back_every_branch_exactly(archive: Archive) -> None:
    assert parse(to_json(archive), now=0) == archive


@settings(UNHURRIED)
@given(archives(branches=False))
def test_markdown_gives_back_every_text_of_the_branch_exactly(archive: Archive) -> None:
    assert parse(to_markdown(archive), now=0) == Archive(archive.chat, unmeasured(archive.messages))


METRICS = {
    "ending": "length",
    "thinking_s": 2.0,
    "metrics": {
        "prompt_tokens": 30, "cached_tokens": 10, "prefill_tokens": 20, "generated_tokens": 40, "ttft_s": 0.5,
        "prefill_s": 0.4, "total_s": 4.5, "prefill_tps": 50.0, "decode_tps": 9.75,
        "itl_ms": {"p50": 100.0, "p95": 110.0, "p99": 120.0, "max": 130.0}, "kv_bytes": 1, "weight_bytes_per_token": 1,
        "kv_bytes_per_step": 1, "achieved_gbs": None, "ceiling_tps": None, "expected_tps": None, "peak_memory_bytes": None,
    },
    "outliers": [],
    "diagnosis": None,
}  # fmt: skip
HOSTILE = """<script>alert(1)</script> <img src=http://track.er/x.png onerror=alert(1)>
[click](javascript:alert(1)) [data](data:text/html,x) [web](https://example.org/?a=1&b="2") [local](notes.md) <tel:+1234>
![pixel](http://track.er/pixel.png) [![in](http://track.er/in.png)](https://example.org/in)

```py" onload="alert(1)
</code></pre><script>alert(2)</script>
```

| left | right |
| --- | ---: |
| <b>1</b> | 2 |

\x1b]52;c;ZWNobw==\x07 \x9b2J \u202eevil\u202c"""


def conversation(reply: str, prompt: str = "Why?", **of_reply: Any) -> Archive:
    chat = StoredChat("abcdefgh", "Bandwidth", "words", 1e9, 1e9, "org/model", head=2)
    asked = StoredMessage(1, chat.id, None, "user", prompt, "", "complete", 1e9)
    answered = StoredMessage(2, chat.id, 1, "assistant", reply, "", "complete", 1e9, model="org/model")
    return Archive(chat, (asked, replace(answered, **of_reply)))


class Page(HTMLParser):
    """Every tag of a page with its attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def every(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


FETCHING = {"script", "img", "iframe", "object", "embed", "link", "base", "form", "svg", "audio", "video", "source"}


def harmless(page: Page) -> bool:
    """Whether nothing in the page runs, nothing is fetched, and only the web can be clicked."""
    names = {name for _, attributes in page.tags for name in attributes}
    clickable = [attributes["href"] or "" for attributes in page.every("a")]
    return (
        not FETCHING & {tag for tag, _ in page.tags}
        and not [name for name in names if name.startswith("on") or name in ("src", "srcset", "style", "background")]
        and all(target.startswith(("http://", "https://")) for target in clickable)
    )


def test_a_page_shows_hostile_text_and_obeys_none_of_it() -> None:
    made = to_html(conversation(HOSTILE, "<script>mine()</script>", thinking="</pre></details><script>t()</script>"))
    page = Page(made)
    assert harmless(page)
    assert all(text in page.text for text in ("alert(1)", "alert(2)", "mine()", "t()", "<b>1</b>", "evil"))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", made)
    assert [link["href"] for link in page.every("a")] == [
        "http://track.er/x.png",  # as text that can be clicked, like any address; nothing is fetched
        "https://example.org/?a=1&b=%222%22",
        "https://example.org/in",
    ]
    for shown in ("javascript:alert(1)", "data:text/html,x", "(notes.md)", "(http://track.er/pixel.png)", "tel:+1234"):
        assert shown in page.text
    assert {"class": "right"} in page.every("td")


def test_a_page_stands_alone_and_its_policy_allows_its_own_style_only() -> None:
    made = to_html(conversation("hi"))
    (policy,) = [tag["content"] or "" for tag in Page(made).every("meta") if "http-equiv" in tag]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "url(" not in made
    assert "@import" not in made
    assert "prefers-color-scheme: dark" in made


MEASURED = {**METRICS, "ending": "stop", "diagnosis": {"formula": "x = y"}}


def test_markdown_is_the_conversation_with_a_line_of_figures_below_each_reply() -> None:
    asked = StoredMessage(1, "", None, "user", "Why?", "", "complete", 0.0)
    said = StoredMessage(2, "", 1, "assistant", "Because.", "", "complete", 0.0, "org/model", {"top_p": 1}, MEASURED)
    archive = Archive(StoredChat("", "Why", "user", 0.0, 0.0, "", head=2), (asked, said))
    text = to_markdown(archive)
    shown = [line for line in text.splitlines() if line and not line.startswith("<!--")]
    figures = "*9.75 tok/s · 40 tokens · first token 0.50 s · org/model*"
    assert shown == ["# Why", "## You", "Why?", "## org/model", "Because.", figures]
    assert "formula" not in text
    assert max(len(line) for line in text.splitlines()) < 220
    assert parse(text, now=0) == Archive(archive.chat, unmeasured(archive.messages))
    assert "formula" in to_json(archive)


@pytest.mark.parametrize("value", [None, True, "72", -1.0, 0, 1e300, [1]])
def test_figures_that_are_none_are_left_out(value: object) -> None:
    metrics = {"metrics": {"decode_tps": value, "generated_tokens": value, "ttft_s": value}}
    said = StoredMessage(1, "", None, "assistant", "Because.", "", "complete", 0.0, "m", {}, metrics)
    assert figures_line(said) == ""


def unmeasured(messages: tuple[StoredMessage, ...]) -> tuple[StoredMessage, ...]:
    """The messages without what JSON alone holds."""
    return tuple(replace(message, settings={}, metrics=None) for message in messages)


@settings(UNHURRIED)
@given(archives())
def test_markdown_holds_the_branch_at_the_head_alone(archive: Archive) -> None:
    back = parse(to_markdown(archive), now=0)
    by_id = {message.id: message for message in archive.messages}
    expected, at = [], archive.chat.head
    while at is not None:
        expected.append(by_id[at].text)
        at = by_id[at].parent
    assert [message.text for message in back.messages] == expected[::-1]


@settings(UNHURRIED, max_examples=20)
@given(archives())
def test_what_was_exported_is_stored_again_as_it_was(archive: Archive) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "s" / "chats.db") as store:
        chat = store.adopt(parse(to_json(archive), now=0))
        stored = store.archive(chat.id)
        assert to_json(parse(to_json(stored), now=0)) == to_json(stored)
        assert to_markdown(stored) == to_markdown(archive)
        assert [replace(m, id=0, parent=None, chat="", position=0, siblings=1) for m in stored.messages] == [
            replace(m, id=0, parent=None) for m in archive.messages
        ]


@settings(UNHURRIED, max_examples=300)
@given(
    st.text()
    | st.lists(NASTY | st.sampled_from(["{", "}", '"', "## User\n", "<!-- tokamac-chat {} -->\n"])).map("".join)
)
@example("{" * 100_000)
@example('{"format":' + "[" * 100_000)
@example('{"format": "tokamac-chat", "version": ' + "9" * 5000 + "}")
def test_foreign_text_is_read_or_refused_with_a_reason(text: str) -> None:
    try:
        archive = parse(text, now=0)
    except StoreError:
        return  # any other error fails the test
    assert archive.messages or "tokamac-chat" in text


def test_markdown_reads_as_a_conversation() -> None:
    chat = StoredChat("", "Tokens <b>", "user", 0.0, 0.0, "", head=2)
    messages = (
        StoredMessage(
            1,
            "",
            None,
            "user",
            "What?\n```py\n1\n```",
            "",
            "complete",
            0.0,
            attachments=(Attachment("a`.md", "```\n"),),
        ),
        StoredMessage(2, "", 1, "assistant", "This.", "Hm.", "complete", 0.0, "guide"),
    )
    shown = [
        line for line in to_markdown(Archive(chat, messages)).splitlines() if line and not line.startswith("<!-- ")
    ]
    assert shown == [
        "# Tokens ‹b>",
        *("## You", "What?", "```py", "1", "```", "**a`.md**", "````", "```", "````"),
        *("## guide", "<details><summary>Thinking</summary>", "Hm.", "</details>", "This."),
    ]


def test_files_are_written_new_and_for_the_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "chat.md"
    text = to_markdown(Archive(StoredChat("", "t", "user", 0.0, 0.0, ""), ()))
    write(file, text)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read(file, now=0) == parse(text, now=0)
    with pytest.raises(StoreError, match="exists"):
        write(file, "other")
    with pytest.raises(StoreError, match="can't be written"):
        write(tmp_path / "no" / "folder.md", "x")
    with pytest.raises(StoreError, match="can't be read"):
        read(tmp_path / "missing.md", now=0)


def test_a_number_that_json_has_not_is_never_written() -> None:
    chat = StoredChat("", "t", "user", 0.0, 0.0, "", {"x": math.inf})
    with pytest.raises(ValueError, match="JSON"):
        to_json(Archive(chat, ()))


# Files that people, editors and other programs wrote: read, or refused with the reason and the place.

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
        (
            changed("chat", "updated", value="9999-12-31T23:59:59-14:00"),
            "chat.updated: '9999-12-31T23:59:59-14:00' is not",
        ),
        (changed("chat", "created", value="0001-01-01T00:00:00+00:00"), "is not from 1970 to 9998"),
        (changed("messages", 1, "created", value="1969-12-31T23:59:59+00:00"), "messages[1].created"),
        (changed("chat", "settings", value=[]), "chat.settings: not an object"),
        (changed("chat", value=[]), "chat: not an object"),
        (changed("messages", value={}), "messages: not a list"),
        (changed("messages", 0, value="x"), "messages[0]: not an object"),
        (changed("messages", 1, "id", value=1), "messages[1].id: 1 stands twice"),
        (changed("messages", 1, "parent", value=2), "messages[1].parent: no message 2 comes before it"),
        (changed("messages", 1, "role", value="nobody"), "messages[1].role"),
        (changed("messages", 1, "tokens", value=3), "messages[1]: unknown field 'tokens'"),
        (changed("messages", 1, "text", value=None), "messages[1].text"),
        (changed("messages", 1, "metrics", value=3), "messages[1].metrics: not an object"),
        (changed("messages", 1, "attachments", value=3), "messages[1].attachments: not a list"),
        (changed("messages", 1, "attachments", value=[3]), "messages[1].attachments[0]: not an object"),
        (changed("messages", 1, "attachments", value=[{"name": "a"}]), "attachments[0]: no field 'text'"),
        ('{"format": "tokamac-chat", "format": "x"}', "'format' stands twice"),
        ('{"format": NaN}', "NaN is not a number"),
        ("{", "not JSON"),
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
        ('"version": 2', '"version": 3', "version 1 or 2"),
        ('"version": 2, ', "", "line 1: version"),
        ('"role": "user"', '"role": "cook"', "line 4.role"),
        ('"updated": "2025', '"updated": "9999', "line 1.updated"),
        ('"role": "user"', '"role": "user", "age": 3', "line 4: unknown field 'age'"),
        ('"role": "user"', '"role": user', "line 4: Expecting value"),
        ("<!-- tokamac-end -->", "<!-- tokamac-song -->\n<!-- tokamac-end -->", "tokamac-song is not known"),
        (
            "<!-- tokamac-end -->",
            "<!-- tokamac-thinking -->\n<!-- tokamac-end -->",
            "the block of tokamac-thinking is not complete",
        ),
        (
            "<!-- tokamac-end -->",
            "<!-- tokamac-text -->\nmore\n<!-- tokamac-end -->",
            "there is text before tokamac-text already",
        ),
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
    with pytest.raises(StoreError, match="not UTF-8"):
        read(file, now=0)
    monkeypatch.setattr(export, "MAX_BYTES", 4)
    with pytest.raises(StoreError, match="larger"):
        read(file, now=0)


# Conversations as files: a page and a picture in which nothing runs and nothing is fetched, and the chat's own
# commands.

Start = Callable[..., Any]


def test_a_page_names_models_figures_thinking_and_endings() -> None:
    made = conversation("Because.", thinking="Hm.", metrics=METRICS)
    page = Page(to_html(made))
    for text in ("Bandwidth", "org/model", "You", "Thought for 2.0 s", "Hm.", "stopped: the token limit", "9.75 tok/s"):
        assert text in page.text
    assert "prompt: 30 tokens, 10 of them cached; read in 0.4 s" in page.text
    assert len(page.every("details")) == 1
    unmeasured = Page(to_html(conversation("Because."))).text
    assert "tok/s" not in unmeasured, "what was not measured is not named"


def test_a_page_holds_the_system_prompt_and_files_with_leading_newlines_kept() -> None:
    made = conversation("ok", attachments=(Attachment("a<b>.txt", "\n\ntwo above"),))
    made = Archive(replace(made.chat, settings={"system": "Be <brief>."}), made.messages)
    page = Page(to_html(made))
    assert "Be <brief>." in page.text
    assert "a<b>.txt" in page.text
    assert "\n\n\ntwo above" in page.text  # HTML drops the first newline of a <pre>


@given(st.text(max_size=80), st.text(max_size=80))
@settings(max_examples=150, deadline=None)
def test_whatever_is_said_a_page_is_harmless(prompt: str, reply: str) -> None:
    assert harmless(Page(to_html(conversation(reply, prompt, thinking=prompt))))


def test_a_picture_is_well_formed_shows_the_text_and_fetches_nothing() -> None:
    made = to_svg(conversation(HOSTILE + "\ufffe", "What <is> it?", thinking="Hm.", metrics=METRICS))
    root = ET.fromstring(made)
    text = " ".join("".join(root.itertext()).split())  # its lines are broken where the picture's are
    for shown in (
        "Bandwidth",
        "org/model",
        "What <is> it?",
        "alert(1)",
        "9.75 tok/s",
        "pixel (http://track.er/pixel.png)",
    ):
        assert shown in text, shown
    assert "Hm." not in text
    assert not [
        node for node in root.iter() if node.tag.rpartition("}")[2] in ("script", "image", "a", "use", "foreignObject")
    ]
    attributes = [value for node in root.iter() for value in node.attrib.values()]
    assert not [value for value in attributes if "http" in value]
    assert "@font-face" not in made


@given(st.text(max_size=60))
@settings(max_examples=40, deadline=None)
def test_whatever_is_said_a_picture_is_well_formed(reply: str) -> None:
    assert ET.fromstring(to_svg(conversation(reply, reply))).tag.endswith("}svg")


def test_a_picture_is_the_same_whatever_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    made = to_svg(conversation("**bold**"))
    for name, value in (("NO_COLOR", "1"), ("COLUMNS", "20"), ("TERM", "dumb"), ("FORCE_COLOR", "0")):
        monkeypatch.setenv(name, value)
    assert to_svg(conversation("**bold**")) == made


def test_the_suffix_is_the_format_and_nothing_is_replaced(tmp_path: Path) -> None:
    made = conversation("ok")
    for suffix, begins in ((".md", "<!-- tokamac-chat"), (".json", "{"), (".html", "<!DOCTYPE"), (".SVG", "<svg")):
        export_chat(made, tmp_path / f"c{suffix}")
        assert (tmp_path / f"c{suffix}").read_text().startswith(begins)
        with pytest.raises(StoreError, match="exists"):
            export_chat(made, tmp_path / f"c{suffix}")
    with pytest.raises(StoreError, match="names no format") as refused:
        export_chat(made, tmp_path / "c.docx")
    assert ".md, .json, .html, .svg" in refused.value.hint


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("Keys & values", "keys-values.md"),
        ("../../etc/passwd", "etc-passwd.md"),
        ("…", "chat.md"),
        ("Größe 2", "größe-2.md"),
    ],
)
def test_a_file_is_named_after_the_title_inside_its_folder(tmp_path: Path, title: str, name: str) -> None:
    path = free_name(title, tmp_path)
    assert path == tmp_path / name
    path.write_text("taken")
    assert free_name(title, tmp_path).name == name.replace(".md", "-2.md")


def test_a_system_message_becomes_the_chats_own_system_prompt() -> None:
    archive = with_system_apart(parse("## System\n\nBe brief.\n\n## User\n\nhi\n\n## Assistant\n\nhello\n", now=1.0))
    assert archive.chat.settings["system"] == "Be brief."
    tree = tree_of(archive.messages, archive.chat.head)
    assert [(turn.prompt, turn.reply and turn.reply.text) for turn in tree.turns()] == [("hi", "hello")]


# In the chat ----------------------------------------------------------------------------------------------------------------


async def test_export_asks_for_a_name_and_import_opens_it(
    chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    async with chat("fast") as c:
        await c.send("/export")
        await c.until(lambda: "nothing to export" in c.notices)
        await c.ask("about apples")
        await c.send("/export")
        file = tmp_path / "here" / "about-apples.md"
        await c.until(file.exists)
        await c.until(lambda: "Exported to" in c.notices)
        await c.send(f"/export {file}")
        await c.until(lambda: c.prompt.text == f"/export {tmp_path / 'here' / 'about-apples-2.md'}")
        await c.pilot.press("enter")
        await c.until((tmp_path / "here" / "about-apples-2.md").exists)
        await c.send("/export talk.json")
        await c.until((tmp_path / "here" / "talk.json").exists)
        first = c.app.chat.recording.chat
        turns = [(turn.prompt, turn.reply.text) for turn in c.session.turns]
        await c.pilot.press("ctrl+n")
        await c.send("/import talk.json")
        await c.until(lambda: c.app.chat.recording.chat not in (None, first))
        assert [(turn.prompt, turn.reply.text) for turn in c.session.turns] == turns
        assert c.session.turns[0].reply.metrics is not None
        assert await c.ask("and on")


NOWHERE = ("~nobody-of-that-name/x", "a" * 300)


async def test_what_can_not_be_exported_or_imported_is_said(chat: Start, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    async with chat("fast") as c:
        await c.ask("hi")
        for command, said in (
            (f"/export {tmp_path}/x.docx", "names no format"),
            (f"/export {tmp_path}/no/x.md", "can't be written"),
            (f"/import {tmp_path}/none.md", "can't be read"),
            (f"/import {tmp_path}/bad.json", "not a conversation"),
            *((f"/import {name}.md", f"{name[-6:]}.md can't be read") for name in NOWHERE),
            *((f"/export {name}.md", f"{name[-6:]}.md can't be written") for name in NOWHERE),
            ("/import", "/import chat.md"),
        ):
            await c.send(command)
            await c.until(lambda said=said: said in c.notices, said)
        assert [turn.prompt for turn in c.session.turns] == ["hi"]


def test_calls_and_their_results_come_back_from_every_file() -> None:
    call = ToolCall("read_file", '{"path": "a <b>.md"}', "abc123def")
    asked = StoredMessage(1, "", None, "user", "Read it.", "", "complete", 1.0)
    called = StoredMessage(2, "", 1, "assistant", "", "", "complete", 2.0, "m", calls=(call,))
    result = StoredMessage(3, "", 2, "tool", "<!-- tokamac-end -->\nlines", "", "failed", 3.0, calls=(call,))
    said = StoredMessage(4, "", 3, "assistant", "It says lines.", "", "complete", 4.0, "m")
    archive = Archive(StoredChat("", "T", "words", 1.0, 4.0, "m", head=4), (asked, called, result, said))
    for text in (to_json(archive), to_markdown(archive)):
        assert parse(text, now=0.0) == archive
    assert "## Tool: read_file" in to_markdown(archive)
    page = to_html(archive)
    assert "read_file" in page
    assert "a &lt;b&gt;.md" in page
    wrong = to_json(archive).replace('"{\\"path\\": \\"a <b>.md\\"}"', '"[]"')
    with pytest.raises(StoreError, match="JSON object"):
        parse(wrong, now=0.0)


def test_the_log_of_the_steps_is_in_json_and_not_in_markdown() -> None:
    log = {"pieces": [], "tokens": 2, "packed": "AAAA" * 100}
    reply = StoredMessage(2, "", 1, "assistant", "Yes.", "", "complete", 1.0, metrics={"ending": "stop", "passes": log})
    asked = StoredMessage(1, "", None, "user", "Is it?", "", "complete", 1.0)
    archive = Archive(StoredChat("", "t", "user", 0.0, 0.0, "", head=2), (asked, reply))
    assert "AAAA" not in to_markdown(archive)
    assert "passes" not in (parse(to_markdown(archive), now=0.0).messages[1].metrics or {})
    assert parse(to_json(archive), now=0.0).messages[1].metrics == reply.metrics
