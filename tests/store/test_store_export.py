"""Conversations out into files and back: exactly, and nothing foreign is more than data."""

import math
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tokamac.app.store.export import parse, read, to_json, to_markdown, write
from tokamac.app.store.store import Store
from tokamac.app.store.values import Archive, Attachment, StoredChat, StoredMessage, StoreError, storable

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
                number,
                "",
                parent,
                draw(st.sampled_from(["system", "user", "assistant"])),
                draw(TEXTS),
                draw(TEXTS),
                draw(st.sampled_from(["complete", "stopped", "failed"])),
                draw(MOMENTS),
                draw(TEXTS),
                draw(OBJECTS),
                draw(st.none() | OBJECTS),
                tuple(draw(st.lists(ATTACHMENTS, max_size=2))),
            )
        )
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
def test_markdown_gives_back_the_branch_exactly(archive: Archive) -> None:
    assert parse(to_markdown(archive), now=0) == archive


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
