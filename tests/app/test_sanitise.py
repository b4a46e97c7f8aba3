"""Nothing a terminal would obey passes, however text is cut, whichever way it comes in and whatever widget shows it."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import hypothesis
import pytest
import tomlkit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.color import Color

from tests.app.conftest import Chat, Start, reply_of, strips_of
from tests.app.terminals import ALL_CONTROLS, BIDI, CONTROL, foreign, recorder
from tokamac.app.backend import protocol
from tokamac.app.backend.protocol import ReplyEvent
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.settings import Settings, dumps
from tokamac.app.store.store import Store
from tokamac.app.store.values import Archive, Attachment, StoredMessage
from tokamac.app.store.values import StoredChat as Stored
from tokamac.app.text.sanitise import (
    LONGEST_SEQUENCE,
    REPLACEMENT,
    Sanitiser,
    bare,
    reveal,
    safe_link,
    sanitise,
    sanitise_line,
)
from tokamac.app.tui.app import OutputFilter
from tokamac.app.tui.screens.dialog import EngineSaid
from tokamac.engine.errors import TokamacError
from tokamac.engine.events import TextChunk

FORBIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]"
)
HOSTILE = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "\x1b",
                "\x1b[31m",
                "\x1b]52;c;ZWNobw==\x07",
                "\x1b]0;t\x1b\\",
                "\x1bP1$q\x1b\\",
                "\x9b1m",
                "\x9d",
                "\x9c",
                "\r",
                "\n",
                "\u202e",
            ]
        ),
        st.characters(max_codepoint=0xA0),
        st.characters(),
    ),
    max_size=60,
).map("".join)


@settings(max_examples=3 * settings.default.max_examples)
@given(HOSTILE, st.lists(st.integers(0, 400), max_size=8))
def test_any_cutting_gives_the_same_text_and_nothing_forbidden(text: str, cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    stream = Sanitiser()
    chunked = "".join(stream.feed(text[a:b]) for a, b in pairwise(edges))
    assert chunked == sanitise(text)
    assert not FORBIDDEN.search(chunked)


@pytest.mark.parametrize(
    "code",
    [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x61C, 0xD800],
)
def test_every_control_is_replaced_alone(code: int) -> None:
    assert not FORBIDDEN.search(sanitise(f"a{chr(code)}b"))


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain é 🦊 text\n\tindented", "plain é 🦊 text\n\tindented"),
        ("a\x1b[31;1mred\x1b[0m b", f"a{REPLACEMENT}red{REPLACEMENT} b"),
        ("x\x1b]52;c;c2VjcmV0\x07y", f"x{REPLACEMENT}y"), ("x\x1b]8;;http://e\x1b\\y", f"x{REPLACEMENT}y"),
        ("a\r\nb\rc\u2028d", "a\nb\nc\nd"), ("open \x1b]0;title\nnext line", f"open {REPLACEMENT}\nnext line"),
        ("\x1b(Bok", f"{REPLACEMENT}ok"), ("a\x9b2Jb", f"a{REPLACEMENT}b"),
        ("a family 👨‍👩‍👧 and a flag 🏳️‍🌈", "a family 👨‍👩‍👧 and a flag 🏳️‍🌈"),
    ],
)  # fmt: skip
def test_known_cases(raw: str, shown: str) -> None:
    assert sanitise(raw) == shown


def test_a_sequence_without_end_does_not_swallow_the_reply() -> None:
    assert sanitise("\x1b]0;" + "x" * (LONGEST_SEQUENCE + 100)).endswith("x" * 50)


@settings(max_examples=3 * settings.default.max_examples)
@given(HOSTILE)
def test_what_is_to_be_allowed_hides_nothing_in_a_sequence(text: str) -> None:
    shown = reveal(text)
    assert not FORBIDDEN.search(shown)
    assert len(shown) == len(text.replace("\r\n", "\n"))
    assert [char for char in shown if char not in f"{REPLACEMENT}\n"] == [
        char for char in text if not FORBIDDEN.match(char) and char not in f"{REPLACEMENT}\n"
    ]


def test_a_line_stays_a_line() -> None:
    assert sanitise_line("a\n\x1b[2Jb\tc") == f"a {REPLACEMENT}b c"


@settings(max_examples=3 * settings.default.max_examples)
@given(HOSTILE)
def test_the_last_gate_takes_away_and_keeps_the_cells(text: str) -> None:
    row = bare(text)
    assert not FORBIDDEN.search(row)
    assert not set(row) & {"\n", "\t"}
    assert cell_len(row) == cell_len(text)


# Nothing foreign reaches the terminal as anything but text, whichever way it comes in and whatever widget shows it.

SEQUENCES = [
    "\x1b[2J", "\x1b[31;1m", "\x1b]0;a title\x07", "\x1b]52;c;c2VjcmV0\x1b\\",
    "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\", "\x1bP$q\x1b\\", "\x1b(0", "\x9b5n", "\x9d0;t\x9c",
]  # fmt: skip
MARKUP = "[red]red[/red] [@click=app.quit]quit[/] [link=http://evil.example]go[/link]"
LINK = "[words](http://evil.example/x)"
# All of it each time, in another order: what comes in chunks is cut at every place.
CHUNKS = st.permutations([*ALL_CONTROLS, *BIDI, *SEQUENCES, "words ", "é🦊 ", "\r", "a\tb "])
FEW = settings(
    max_examples=2,
    deadline=None,
    phases=(
        hypothesis.Phase.generate,
    ),  # each example is a whole app: a failure is told as it is found, not made smaller
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# Those last that have the engine's process reckon, which goes on after they are closed.
SCREENS = (
    "chats", "branches", "system_prompt", "settings", "explain", "convert", "help", "palette", "what_if",
    "choose_model",
)  # fmt: skip


def segments(c: Chat) -> Iterator[Segment]:
    screen = c.app.screen
    return (segment for strip in strips_of(screen) for segment in strip)


def check(c: Chat) -> None:
    """No control, no action and no link of foreign making is on the screen, but the one that a reply has as Markdown."""
    for segment in segments(c):
        assert not CONTROL.search(segment.text), ascii(segment.text)
        assert "\n" not in segment.text
        link = None if segment.style is None else segment.style.link
        assert link in (None, LINK[8:-1]) or segment.text in link  # an address that stands there leads where it says
        assert "quit" not in str(segment.style.meta.get("@click", "") if segment.style is not None else "")


def hold(c: Chat) -> None:
    """Have the engine's process say nothing by itself, however long the test takes to speak for it."""
    c.engine._silence_s = 3600.0
    os.kill(c.engine.pid, signal.SIGSTOP)


async def look_everywhere(c: Chat) -> None:
    check(c)
    for action in SCREENS:
        c.app.view.do(action)
        await c.pilot.pause(0.05)
        check(c)
        while c.app.screen is not c.app.view:
            await c.app.pop_screen()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(st.one_of(st.sampled_from([*ALL_CONTROLS, *BIDI, "\n"]), st.characters()), max_size=8), max_size=6)
)
def test_the_last_gate_lets_no_control_and_no_link_but_of_the_web_through(texts: list[str]) -> None:
    style = Style(bold=True, link="javascript:evil()")
    row = [Segment(text, style) for text in texts]
    passed = OutputFilter().apply(row, Color(0, 0, 0))
    assert not any(CONTROL.search(segment.text) or "\n" in segment.text for segment in passed)
    assert all(segment.style is not None and segment.style.link is None and segment.style.bold for segment in passed)
    assert sum(segment.cell_length for segment in passed) == sum(segment.cell_length for segment in row)


@pytest.mark.parametrize("address", ["https://a.b/c?d=e#f", "HTTP://a.b", "mailto:me@a.b"])
def test_an_address_of_the_web_may_be_opened(address: str) -> None:
    (passed,) = OutputFilter().apply([Segment("text", Style(link=address))], Color(0, 0, 0))
    assert safe_link(address) == address == (passed.style and passed.style.link)


@pytest.mark.parametrize(
    "address",
    [
        "javascript:a()", "file:///bin/sh", "a.b", "", "https://a b", "https://a\x1b\\b", "https://é",
        f"https://{'a' * 3000}",
    ],
)  # fmt: skip
def test_no_other_address_may_be_opened(address: str) -> None:
    assert safe_link(address) == ""


def test_the_check_sees_what_it_must() -> None:
    own = "\x1b[2;5H\x1b[1;38;2;1;2;3mtext\x1b[0m\x1b[?2026l\n"
    assert foreign(own) == []
    colours = "\x1b[31;1m"  # in the stream these could be Textual's own: ``check`` finds them on the screen
    assert all(foreign(own + each) for each in (*SEQUENCES, *ALL_CONTROLS, *BIDI) if each != colours)


@FEW
@given(text=CHUNKS, thinking=CHUNKS)
async def test_what_a_model_says(
    chat: Start, monkeypatch: pytest.MonkeyPatch, text: list[str], thinking: list[str]
) -> None:
    written = recorder(monkeypatch)
    async with chat("prefill", size=(100, 40)) as c:
        await c.send("go")
        await c.phase(EnginePhase.PREFILL)
        hold(c)

        def say(event: protocol.EngineMessage) -> None:
            c.app.view.post_message(EngineSaid(event, c.app.chat.bridge.process_number))

        reply = reply_of(c.session)
        for kind, chunks in (("thinking", thinking), ("answer", [*text, f"\n\nSo {MARKUP} and {LINK}."])):
            for chunk in (char for piece in chunks for char in piece):
                say(ReplyEvent(reply, TextChunk(chunk, kind)))
            await c.pilot.pause()  # all of it has arrived
            c.transcript.look(now=True)
            await c.pilot.pause()
            check(c)
        shown = c.shown(c.replies[-1])
        assert "[red]red[/red]" in shown
        assert "[@click=app.quit]quit[/]" in shown
        assert "So " in shown
        say(protocol.RequestFailed(reply, "".join(text), "".join(thinking)))
        await c.phase(EnginePhase.IDLE)
        await c.until(lambda: "failed ·" in c.screen_text(), "what failed")
        await look_everywhere(c)
        os.kill(c.engine.pid, signal.SIGCONT)
    assert foreign(written()) == []


def stored(texts: list[str]) -> Archive:
    hostile = "".join(texts)
    messages = tuple(
        StoredMessage(
            n,
            "",
            n - 1 or None,
            "user" if n % 2 else "assistant",
            f"needle {MARKUP} {hostile}",
            hostile,
            "complete",
            1.0,
            model=hostile,
            attachments=(Attachment(hostile, hostile),) if n % 2 else (),
        )
        for n in range(1, 5)
    )
    return Archive(Stored("", f"{MARKUP}{hostile}", "user", 1.0, 1.0, hostile, draft=hostile, head=4), messages)


@FEW
@given(texts=CHUNKS)
async def test_what_is_stored(chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> None:
    written = recorder(monkeypatch)
    file = tmp_path / "chats" / "chats.db"
    with Store.open(file) as store:
        store.adopt(stored(texts))
    async with chat("fast", size=(110, 40), resume=True) as c:
        await c.until(lambda: c.session.turns)
        await look_everywhere(c)
        assert "[red]red[/red] [@click=app.quit]quit[/]" in c.screen_text()
        await c.pilot.press("ctrl+l", *"needle")
        await c.until(lambda: "needle" in c.screen_text() and "[red]" in c.screen_text())
        await c.pilot.pause(0.1)
        check(c)
        await c.pilot.press("ctrl+e")  # the title, to be written anew
        await c.pilot.pause()
        check(c)
        await c.pilot.press("escape", "escape", "tab", "up", "e", "enter")
        await c.pilot.pause()
        check(c)
    assert foreign(written()) == []


@FEW
@given(texts=CHUNKS)
async def test_names_of_files_and_models_settings_and_errors(
    chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    hostile = "".join(texts).replace("/", "").replace("\0", "")
    name = re.sub(r"[\x00/]", "", f"{MARKUP}{hostile}")[:40]
    hub = tmp_path / "hub"
    weights = hub / f"models--org--{name}" / "snapshots" / "1" / "model.safetensors"
    weights.parent.mkdir(parents=True, exist_ok=True)
    weights.touch()
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    settings_file = tmp_path / "settings.toml"
    kept = Settings(model=hostile, system=hostile, theme=hostile)
    settings_file.write_text(dumps(kept, tomlkit.dumps({hostile: hostile})), encoding="utf-8")
    written = recorder(monkeypatch)
    async with chat(None, size=(110, 40), ready=False) as c:
        await c.phase(EnginePhase.FAILED)  # there is no such model
        await c.until(lambda: c.notices)
        await look_everywhere(c)
        c.app.clear_notifications()
        c.app.notify(f"{MARKUP} {TokamacError(hostile, hostile)}")
        await c.until(lambda: "[red]red[/red]" in c.screen_text(), "the notice, as it was written")
        check(c)
        for command in ("attach", "import", "pull"):
            c.app.view.do(command, str(tmp_path / name))
            await asyncio.sleep(0.2)
            check(c)
    assert foreign(written()) == []
