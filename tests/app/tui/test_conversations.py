"""Conversations that are kept: stored, opened again, searched, edited, titled, and left with something unsent."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.widgets import Input, OptionList, Static, TextArea

from tests.app.conftest import Chat, Start
from tests.app.terminals import ALL_CONTROLS, BIDI, CONTROL, foreign, recorder
from tokamac.app.chat import commands
from tokamac.app.chat.attachments import Draft
from tokamac.app.chat.controller import GIVEN_UP
from tokamac.app.chat.conversation import MessageNode, Reply, Tree
from tokamac.app.chat.listing import ChatSearch
from tokamac.app.chat.preferences import SystemDrafts, Written
from tokamac.app.chat.recording import SAVED
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.store.store import Store
from tokamac.app.tui.app import RESTORE, SAVE, terminal_title
from tokamac.app.tui.markdown.turns import ReplyMessage, SystemMessage, UserMessage
from tokamac.app.tui.screens.chat import ChatScreen
from tokamac.app.tui.screens.chats import ChatsScreen
from tokamac.app.tui.screens.dialog import Tick
from tokamac.app.tui.screens.settings import NOT_USED, SystemScreen
from tokamac.app.tui.widgets.prompt_input import Prompt


@pytest.fixture
def kept(tmp_path: Path) -> Callable[[], Any]:
    """What the store holds: the texts on the path of the newest chat."""

    def read() -> Any:
        with Store.open(tmp_path / "chats" / "chats.db") as store:
            chat = store.latest()
            return None if chat is None else (chat, store.path(chat.id))

    return read


async def test_a_prompt_is_stored_before_its_reply_is_and_the_reply_with_its_figures(chat: Start, kept: Any) -> None:
    async with chat("slow") as c:
        await c.send("What is decode?")
        await c.until(lambda: c.session.progress.live and c.session.progress.live.metrics.generated_tokens > 1)
        _, messages = kept()
        assert [(m.role, m.state) for m in messages] == [("user", "complete"), ("assistant", "partial")]
        await c.pilot.press("escape")
        await c.phase(EnginePhase.IDLE)
        stored, messages = kept()
        assert stored.title == "What is decode?"
        assert [(m.role, m.state) for m in messages] == [("user", "complete"), ("assistant", "stopped")]
        assert messages[1].text == c.session.turns[-1].reply.text
        assert messages[1].metrics["metrics"]["generated_tokens"] == c.session.progress.metrics.generated_tokens


async def test_a_chat_is_opened_again_with_its_figures_and_goes_on(chat: Start, kept: Any) -> None:
    async with chat("fast") as c:
        await c.ask("first question")
        before = c.session.turns
    async with chat("fast", resume=True) as c:
        await c.until(lambda: len(c.session.turns) == 1)
        (turn,) = c.session.turns
        assert (turn.prompt, turn.reply) == (before[0].prompt, before[0].reply)
        assert "first question" in c.screen_text()
        await c.ask("second question")
    _, messages = kept()
    assert [m.text for m in messages if m.role == "user"] == ["first question", "second question"]
    with sqlite3.connect(c.app.chat.recording.store.file) as database:
        assert database.execute("SELECT count(*) FROM chats").fetchone() == (1,)


async def test_an_edit_stands_beside_and_the_versions_are_walked_by_keys(chat: Start, kept: Any) -> None:
    async with chat("fast", size=(100, 70)) as c:
        await c.ask("one")
        await c.ask("two")
        await c.pilot.press("tab", "up", "e", "enter")
        await c.until(lambda: c.prompt.text == "two")
        c.prompt.text = "two, but better"
        await c.pilot.press("enter")
        await c.until(lambda: [t.prompt for t in c.session.turns] == ["one", "two, but better"])
        await c.phase(EnginePhase.IDLE)
        await c.until(lambda: "‹ 2 of 2 ›" in c.screen_text())
        await c.pilot.press("tab", "[")
        await c.until(lambda: [t.prompt for t in c.session.turns] == ["one", "two"])
        assert "‹ 1 of 2 ›" in c.screen_text()
        _, messages = kept()
        assert [m.text for m in messages if m.role == "user"] == ["one", "two"]
        await c.pilot.press("]")
        await c.until(lambda: [t.prompt for t in c.session.turns] == ["one", "two, but better"])


async def test_escape_gives_an_edit_up(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("one")
        await c.pilot.press("tab", "up", "e", "enter")
        await c.until(lambda: c.prompt.text == "one")
        await c.pilot.press("escape")
        assert c.prompt.text == ""
        await c.ask("two")
        assert [t.prompt for t in c.session.turns] == ["one", "two"]


async def test_a_reply_is_edited_kept_beside_the_old_one_and_stored(chat: Start) -> None:
    async with chat("fast") as c:
        old = await c.ask("one")
        await c.type("a draft")
        await c.pilot.press("tab", "e", "enter")
        await c.until(lambda: c.prompt.text.startswith("Decode reads"))
        c.prompt.text = "My own words."
        await c.pilot.press("enter")
        await c.until(lambda: c.session.turns[-1].reply_place == (2, 2))
        shown = c.shown(c.replies[-1])
        assert "My own words." in shown
        assert "edited by you" in shown
        assert "/explain" not in shown
        assert c.prompt.text == "a draft"
        c.prompt.text = ""
        await c.ask("two")
        assert c.session.turns[0].reply.text == "My own words."
        await c.send("/revise")
        await c.until(lambda: c.app.chat.composer.editing)
        await c.pilot.press("escape")
        assert "Decode reads" in old
    async with chat("fast", resume=True, ready=False) as c:
        await c.until(lambda: c.session.turns)
        first = c.session.turns[0]
        assert (first.reply.text, first.reply.edited, first.reply.metrics) == ("My own words.", True, None)
        assert first.reply_place == (2, 2)


def listed(c: Chat) -> list[str]:
    """The lines of the list of conversations; none while another screen is up."""
    if not isinstance(c.app.screen, ChatsScreen):
        return []
    options = c.app.screen.query_one(OptionList).options
    return [str(option.prompt) for option in options if not option.disabled]  # headings are


async def narrowed(c: Chat, word: str, lines: int) -> None:
    """Type ``word``, and wait until the list has ``lines`` that hold it, and no others."""
    await c.pilot.press(*word)
    await c.until(lambda: len(listed(c)) == lines and all(word in line for line in listed(c)))


async def test_the_list_searches_opens_renames_deletes_and_brings_back(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("about apples")
        await c.pilot.press("ctrl+n")
        await c.ask("about pears")
        await c.pilot.press("ctrl+l")
        await c.until(lambda: len(listed(c)) == 2)
        await narrowed(c, "apples", 2)  # its title, and what was said
        await c.pilot.press("enter")
        await c.until(lambda: [t.prompt for t in c.session.turns] == ["about apples"])
        await c.pilot.press("ctrl+l")
        await narrowed(c, "pears", 2)
        await c.pilot.press("ctrl+e", "end")
        await c.pilot.press(*" and plums", "enter")
        await c.until(lambda: any("about pears and plums" in line for line in listed(c)))
        await narrowed(c, "plums", 1)
        await c.pilot.press("ctrl+d")
        await c.until(lambda: not listed(c))
        await c.pilot.press("ctrl+z")
        await c.until(lambda: len(listed(c)) == 1)


async def test_a_hit_stands_for_its_chat_which_is_renamed_deleted_and_brought_back(chat: Start) -> None:
    async with chat("fast", size=(140, 40)) as c:
        await c.ask("about apples")
        await c.ask("and about medlars")  # in no title
        await c.pilot.press("ctrl+n")
        await c.ask("about pears")
        await c.pilot.press("ctrl+l")
        await narrowed(c, "medlars", 1)
        await c.pilot.press("ctrl+e")
        await c.until(lambda: "New title of the chat of this message; Enter saves it." in c.screen_text())
        assert c.app.screen.query_one(Input).value == "about apples"
        await c.pilot.press("ctrl+d")  # of a title that is being written no chat is deleted
        await c.pilot.press("end", *" and more", "enter")
        await c.until(lambda: any("about apples and more" in line for line in listed(c)))
        assert len(listed(c)) == 2
        await narrowed(c, "medlars", 1)
        await c.pilot.press("ctrl+d")
        await c.until(lambda: not listed(c))
        assert "Deleted the chat of this message: about apples and more. Ctrl+Z restores it" in c.notices
        await c.pilot.press("ctrl+z")
        await c.until(lambda: len(listed(c)) == 1)


async def test_a_hit_opens_the_chat_at_the_message_on_its_own_path(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("about bananas")
        await c.pilot.press("tab", "up", "e", "enter")
        await c.until(lambda: c.prompt.text)
        c.prompt.text = "about cherries"
        await c.pilot.press("enter")
        await c.until(lambda: [t.prompt for t in c.session.turns] == ["about cherries"])
        await c.phase(EnginePhase.IDLE)
        await c.pilot.press("ctrl+n", "ctrl+l")
        await c.until(lambda: listed(c))
        await c.pilot.press(*"bananas")
        await c.until(lambda: len(listed(c)) == 2)
        await c.pilot.press("down", "down", "enter")
        await c.until(lambda: [t.prompt for t in c.session.turns] == ["about bananas"])
        assert c.transcript.selected == c.session.turns[0].key


async def test_a_fork_goes_on_alone(chat: Start, kept: Any) -> None:
    async with chat("fast") as c:
        await c.ask("one")
        first = c.app.chat.recording.chat
        await c.ask("two")
        await c.pilot.press("tab", "up", "up", "f", "enter")
        await c.until(lambda: c.app.chat.recording.chat != first)
        assert [t.prompt for t in c.session.turns] == ["one"]
        await c.ask("otherwise")
        with Store.open(c.app.chat.recording.store.file) as store:
            assert [m.text for m in store.path(first) if m.role == "user"] == ["one", "two"]


# Which chat is open: its title in the first row, and as the terminal's own while the app runs.


def first_row(c: Chat) -> str:
    return c.screen_text().splitlines()[0].strip(" ▏")


async def test_the_first_row_has_the_title_and_keeps_up_with_it(chat: Start) -> None:
    async with chat("fast", size=(80, 24)) as c:
        assert first_row(c) == ""
        await c.ask("Why is decode slow?")
        await c.until(lambda: first_row(c) == "Why is decode slow?", "its first words")
        await c.send("/title Keys and [b]values[/b]")
        await c.until(lambda: first_row(c) == "Keys and [b]values[/b]", "the title that was given")
        await c.send("/fork")
        await c.until(lambda: first_row(c) == "Keys and [b]values[/b] (fork)", "the copy's")
        await c.send("/new")
        await c.until(lambda: first_row(c) == "", "none")


async def test_a_title_that_was_given_in_the_list_is_shown_once_that_closes(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("one")
        await c.opened("ctrl+l", ChatsScreen)
        ChatSearch(c.recording.store.file).rename(c.held, "another")
        await c.pilot.press("escape")
        await c.until(lambda: first_row(c) == "another", "the other title")


async def test_a_long_title_is_cut_to_the_window(chat: Start) -> None:
    async with chat("fast", size=(40, 12)) as c:
        await c.ask("one")
        await c.send("/title " + "word " * 30)
        await c.until(lambda: first_row(c).startswith("word word"), "the title")
        assert first_row(c).endswith("…")
        assert len(c.screen_text().splitlines()[0]) == 40


# The terminal's own title -------------------------------------------------------------------------------------------------


async def test_the_terminal_has_the_chats_title_and_its_own_back(chat: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    written = recorder(monkeypatch)
    async with chat("fast") as c:
        assert SAVE + terminal_title("") in written()
        await c.ask("Why is decode slow?")
        await c.until(lambda: "\x1b]2;Why is decode slow? · tokamac\a" in written(), "the chat's name")
        c.app.view.do("new_chat")
        await c.until(lambda: written().rindex(terminal_title("")) > written().rindex("slow? ·"), "the app's alone")
    stream = written()
    assert stream.count(SAVE) == stream.count(RESTORE) == 1
    assert stream.rindex(RESTORE) > stream.rindex(terminal_title(""))
    assert foreign(stream) == []


@given(
    st.lists(
        st.text(st.one_of(st.sampled_from([*ALL_CONTROLS, *BIDI, "\n", "\t"]), st.characters()), max_size=8), max_size=6
    )
)
def test_nothing_in_a_title_ends_the_sequence(texts: list[str]) -> None:
    sequence = terminal_title("".join(texts))
    inside = sequence.removeprefix("\x1b]2;").removesuffix("\a")
    assert len(inside) == len(sequence) - len("\x1b]2;\a")
    assert not CONTROL.search(inside)
    assert inside.endswith("tokamac")


def test_a_title_that_a_model_made_hostile_is_text_and_short() -> None:
    sequence = terminal_title("a\x07b\x1b]52;c;c2VjcmV0\x07\x9c" + "c" * 200)
    assert sequence.count("\x1b") == 1
    assert sequence.count("\a") == 1
    assert len(sequence) < 80


# What was written and not sent, when another chat is begun or opened: it stays with the chat in which it was
# written.


async def edit(c: Chat, text: str) -> None:
    """Begin to edit the last prompt, which is ``text``."""
    await c.pilot.press("tab", "up", "e", "enter")
    await c.until(lambda: c.prompt.text == text)


async def open_chat(c: Chat, name: str) -> None:
    c.app.view.do("open", name)
    await c.until(lambda: c.held == name)


def drafts(c: Chat) -> list[str]:
    """The drafts of all chats, as another program reads them."""
    with Store.open(c.recording.store.file) as store:
        return sorted(chat.draft for chat in store.chats())


async def test_an_edit_does_not_reach_the_chat_that_is_opened(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("one")
        first = c.held
        await c.pilot.press("ctrl+n")
        await c.ask("two")
        second = c.held
        await edit(c, "two")
        c.prompt.text = "two, but better"
        await open_chat(c, first)
        assert c.prompt.text == ""
        await c.ask("three")
        assert c.prompts == ["one", "three"]
        await open_chat(c, second)
        assert (c.prompts, c.prompt.text) == (["two"], "two, but better")


async def test_a_draft_stays_with_its_chat_however_often_one_goes_to_and_fro(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("one")
        first = c.held
        await c.type("a thought about one")
        await c.pilot.press("ctrl+n")
        assert c.prompt.text == ""
        assert "stays in the previous chat" in c.notices
        await c.ask("two")
        second = c.held
        await c.type("a thought about two")
        for _ in range(2):
            await open_chat(c, first)
            assert c.prompt.text == "a thought about one"
            await open_chat(c, second)
            assert c.prompt.text == "a thought about two"
        assert drafts(c) == ["a thought about one", "a thought about two"]


async def test_prompts_that_wait_stay_with_their_chat_too(chat: Start) -> None:
    async with chat("slow") as c:
        await c.send("one")
        await c.phase(EnginePhase.DECODING)
        first = c.held
        await c.send("and this")
        await c.until(lambda: c.session.queued)
        await c.type("and that")
        await c.pilot.press("ctrl+n")
        assert (c.prompt.text, c.session.queued) == ("", [])
        assert c.recording.store.chat(first).draft == "and this\n\nand that"  # should the app be killed now
        await open_chat(c, first)
        assert (c.prompt.text, c.session.queued) == ("and that", [Draft("and this")])


async def running(c: Chat, prompt: str) -> int:
    """Ask, wait for the reply's first words, and return the reply's id in the store."""
    await c.send(prompt)
    await c.until(lambda: c.session.conversation.partial.text and c.session.engine.phase is EnginePhase.DECODING)
    return c.recording.stored(c.session.turns[-1].reply_key)


@pytest.mark.parametrize("how", ["new", "open", "import"])
async def test_a_reply_goes_on_in_the_background_and_its_end_is_told(chat: Start, how: str, tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Other\n\n## You\n\nsaid elsewhere\n")
    ways = {"new": "/new", "open": "/open {}", "import": f"/import {tmp_path / 'other.md'}"}
    async with chat("slow") as c:
        await c.send("one")
        await c.phase(EnginePhase.DECODING)
        await c.pilot.press("escape")
        await c.phase(EnginePhase.IDLE)
        first = c.held
        await c.pilot.press("ctrl+n")
        await c.pilot.pause()
        assert "in the background" not in c.notices  # none ran
        reply = await running(c, "two")
        second = c.held
        await c.send(ways[how].format(first))
        await c.until(lambda: "The reply goes on in the background" in c.notices)
        assert "two" not in c.prompts
        await c.until(lambda: "writing in “two”" in c.screen_text(), "the line of what is done")
        assert c.recording.store.message(reply).state == "partial"
        await open_chat(c, second)
        assert c.prompts == ["two"]
        said = c.session.conversation.partial.text
        assert said
        assert c.transcript.growing
        await c.until(lambda: len(c.session.conversation.partial.text) > len(said), "more of it")
        await c.send("/new")
        await c.pilot.pause()
        await c.pilot.press("escape")
        await c.until(lambda: "“two”: the reply was stopped" in c.notices)
        kept = c.recording.store.message(reply)
        assert kept.state == "stopped"
        assert kept.text.startswith(said)


async def test_prompts_wait_in_a_chat_that_was_left_and_are_its_draft_until_they_are_sent(chat: Start) -> None:
    async with chat("slow") as c:
        reply = await running(c, "one")
        first = c.held
        await c.send("two")
        await c.until(lambda: c.session.queued)
        await c.pilot.press("ctrl+n")
        await c.until(lambda: c.recording.store.chat(first).draft == "two")
        await c.pilot.press("escape")
        await c.until(lambda: len(c.recording.store.path(first)) == 4, "the second prompt")
        assert c.recording.store.chat(first).draft == ""
        assert [each.text for each in c.recording.store.path(first) if each.role == "user"] == ["one", "two"]
        assert c.recording.store.message(reply).state == "stopped"
        assert c.session.turns == []


async def test_a_reply_that_could_not_be_kept_is_stopped(chat: Start, tmp_path: Path) -> None:
    async with chat("slow") as c:
        await running(c, "one")
        c.refuse_writes()
        await c.pilot.press("ctrl+n")
        if "goes on" in c.notices:  # it was saved up to here: what comes is tried again
            assert c.session.elsewhere is not None
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    async with chat("slow", store_path=blocked / "chats.db", ready=False) as c:
        await c.phase(EnginePhase.IDLE)
        await c.send("one")
        await c.phase(EnginePhase.DECODING)
        await c.pilot.press("ctrl+n")
        await c.until(lambda: GIVEN_UP in c.notices)
        assert not c.session.engine.replying


async def test_a_chat_that_is_saved_late_goes_on(chat: Start) -> None:
    async with chat("slow") as c:
        c.refuse_writes()
        await c.send("one")
        await c.until(lambda: c.session.conversation.partial.text and c.session.engine.phase is EnginePhase.DECODING)
        assert c.held is None
        c.refuse_writes(refused=False)
        await c.pilot.press("ctrl+n")
        await c.until(lambda: "goes on in the background" in c.notices)
        assert SAVED in c.notices
        (kept,) = c.recording.store.chats()
        asked, reply = c.recording.store.path(kept.id)
        assert (asked.text, reply.state) == ("one", "partial")
    with Store.open(c.recording.store.file) as store:
        asked, reply = store.path(kept.id)
        assert (asked.text, reply.state) == ("one", "stopped")
        assert reply.text


async def test_where_chats_are_not_kept_the_box_keeps_what_is_written(chat: Start, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    async with chat("fast", store_path=blocked / "chats.db", ready=False) as c:
        await c.until(lambda: "Chats are not saved" in c.notices)
        await c.ask("one")
        await edit(c, "one")
        c.prompt.text = "one, but better"
        await c.pilot.press("ctrl+n")
        assert c.prompt.text == "one, but better"
        await c.pilot.press("enter")
        await c.until(lambda: c.prompts == ["one, but better"])


async def test_what_is_typed_before_the_chat_is_there_goes_in(chat: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def typed_before(screen: ChatScreen) -> None:
        screen.query_one(Prompt).insert("typed at once")
        begin_recording(screen)

    begin_recording = ChatScreen.begin_recording
    async with chat("fast") as c:
        await c.ask("one")
        await c.type("half a thought")
    monkeypatch.setattr(ChatScreen, "begin_recording", typed_before)
    async with chat("fast", resume=True) as c:
        await c.until(lambda: c.prompts == ["one"])
        assert c.prompt.text == "half a thought\n\ntyped at once"
        assert len(drafts(c)) == 1


# A system prompt that is written and not used: it stays with its chat, and it is told once where it is.

SYSTEM_DRAFT_KEPT = "Not applied. Your text stays in this chat as a draft until you quit tokamac. Ctrl+S shows it."


def text(screen: SystemScreen) -> str:
    return screen.query_one("#system", TextArea).text


async def seen(c: Chat) -> str:
    """What the dialog shows when it is opened; it is closed again."""
    shown = text(await c.opened("ctrl+s", SystemScreen))
    await c.closed()
    return shown


async def test_what_was_written_is_there_again_after_esc_and_it_is_told_once(chat: Start) -> None:
    async with chat("fast") as c:
        screen = await c.opened("ctrl+s", SystemScreen)
        assert not screen.query("#draft")
        await c.pilot.press(*"Be brief.")
        screen.query_one("#own", Tick).value = True
        await c.closed()
        assert SYSTEM_DRAFT_KEPT in c.notices
        assert c.session.system == ""
        c.app.clear_notifications()
        screen = await c.opened("ctrl+s", SystemScreen)
        assert (text(screen), screen.query_one("#own", Tick).value) == ("Be brief.", True)
        assert str(screen.query_one("#draft", Static).render()) == NOT_USED
        await c.closed()
        assert c.notices == ""
        await c.opened("ctrl+s", SystemScreen)
        await c.pilot.press("ctrl+s")
        await c.until(lambda: c.session.system == "Be brief.")
        screen = await c.opened("ctrl+s", SystemScreen)
        assert (text(screen), len(screen.query("#draft"))) == ("Be brief.", 0)
        await c.closed()
        assert SYSTEM_DRAFT_KEPT not in c.notices


async def test_a_draft_belongs_to_its_chat_and_another_model_leaves_it(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("about apples")
        first = c.held
        await c.opened("ctrl+s", SystemScreen)
        await c.pilot.press(*"apples")
        await c.closed()
        await c.pilot.press("ctrl+n")
        assert await seen(c) == ""
        await c.opened("ctrl+s", SystemScreen)
        await c.pilot.press(*"pears")
        await c.closed()
        await c.ask("about pears")  # from here on it is a chat of its own
        assert await seen(c) == "pears"
        c.app.view.library.load("slow")
        await c.until(lambda: c.session.engine.load.model == "slow" and c.session.engine.phase is EnginePhase.IDLE)
        assert await seen(c) == "pears"
        await c.pilot.press("ctrl+n")
        assert await seen(c) == ""
        await c.send(f"/open {first}")
        await c.until(lambda: c.prompts == ["about apples"])
        assert await seen(c) == "apples"


async def test_a_draft_can_be_discarded_for_what_holds(chat: Start) -> None:
    async with chat("fast", system="Shout.") as c:
        screen = await c.opened("ctrl+s", SystemScreen)
        screen.query_one("#system", TextArea).text = "Whisper."
        await c.closed()
        screen = await c.opened("ctrl+s", SystemScreen)
        assert text(screen) == "Whisper."
        screen.query_one("#discard").press()
        await c.until(lambda: text(screen) == "Shout.")
        assert not screen.query_one("#draft").display
        await c.closed()
        screen = await c.opened("ctrl+s", SystemScreen)
        assert (text(screen), len(screen.query("#draft"))) == ("Shout.", 0)


def test_what_was_written_in_a_new_chat_goes_with_it_once_it_is_kept() -> None:
    drafts, one, other = SystemDrafts(), Written("one", own=True), Written("other", own=False)
    drafts.keep("a", one)
    drafts.keep(None, other)
    drafts.begun("b")
    assert (drafts.get("a"), drafts.get("b"), drafts.get(None)) == (one, other, None)
    drafts.begun("c")
    drafts.keep("a", None)
    assert (drafts.get("a"), drafts.get("b"), drafts.get("c")) == (None, other, None)


# System messages of a chat on the screen: they stay there, and can be gone to.

ALONE = "## System\n\nBe brief.\n\n## System\n\nshout\n"  # the first becomes the chat's own system prompt
FIRST = ALONE + "\n## User\n\nhi\n\n## Assistant\n\nHELLO\n"
LONG = "words " * 600


async def imported(c: Chat, tmp_path: Path, text: str) -> None:
    await c.ready()
    (tmp_path / "chat.md").write_text(text)
    await c.send(f"/import {tmp_path / 'chat.md'}")
    await c.until(lambda: c.session.turns, "the import")


def shown(c: Chat) -> list[type]:
    return [type(message) for message in c.transcript.messages]


@pytest.mark.parametrize("wish", ["edit", "regenerate"])
async def test_one_at_the_beginning_stays_when_a_turn_is_redone(chat: Start, tmp_path: Path, wish: str) -> None:
    async with chat("fast", size=(100, 40), ready=False) as c:
        await imported(c, tmp_path, FIRST + "\n## User\n\nand?\n\n## Assistant\n\nSO\n")
        c.app.chat.perform(c.session.edit(2, "ho") if wish == "edit" else c.session.regenerate(3))
        await c.phase(EnginePhase.IDLE)
        await c.pilot.pause()
        assert shown(c) == [SystemMessage, UserMessage, ReplyMessage]
        assert "shout" in c.screen_text()


@pytest.mark.parametrize("later", [True, False], ids=["an earlier turn", "the last turn"])
async def test_one_before_a_reply_stays_when_that_is_made_again(chat: Start, later: bool) -> None:
    async with chat("fast", size=(100, 40)) as c:
        tree = Tree()
        tree.ask("hi", None)
        tree.add(MessageNode(2, 1, system="shout"))
        tree.end(tree.answer(2).key, Reply("HELLO"))
        if later:
            tree.end(tree.answer(tree.ask("why?", 3).key).key, Reply("SO"))
        c.app.chat.perform(c.session.open(tree))
        c.app.chat.perform(c.session.regenerate(3))
        await c.phase(EnginePhase.IDLE)
        await c.pilot.pause()
        assert shown(c) == [UserMessage, SystemMessage, ReplyMessage]


async def opened(c: Chat) -> None:
    """Hold a chat with two versions of a system message, 3 and 5, far from its end."""
    await c.ready()
    tree = Tree()
    tree.end(tree.answer(tree.ask("hi", None).key).key, Reply("hello"))
    for key, word in ((3, "whisper"), (5, "shout")):
        tree.add(MessageNode(key, 2, system=word))
        tree.add(MessageNode(key + 1, key, prompt=LONG))
    c.app.chat.perform(c.session.open(tree))
    await c.pilot.pause()
    assert "shout" not in c.screen_text()


async def test_one_can_be_gone_to_and_the_message_before_it_is_pointed_at(chat: Start) -> None:
    async with chat("fast", size=(80, 20), ready=False) as c:
        await opened(c)
        for key, word in ((5, "shout"), (3, "whisper")):
            commands.jump(c.app.chat, key)
            await c.until(lambda word=word: word in c.screen_text(), word)
            assert c.transcript.selected == 2
            assert c.transcript.has_focus
        await c.pilot.press("down", "]")  # from the prompt after it: the other one is newer
        await c.until(lambda: c.session.conversation.tree.head == 6, "the newer version")
        assert "shout" in c.screen_text()
        assert c.transcript.selected == 2


async def test_one_at_the_beginning_has_none_before_it(chat: Start, tmp_path: Path) -> None:
    async with chat("fast", size=(80, 20), ready=False) as c:
        await imported(c, tmp_path, FIRST)
        commands.jump(c.app.chat, 1)
        await c.pilot.pause()
        assert c.transcript.selected == 2
        assert "shout" in c.screen_text()
