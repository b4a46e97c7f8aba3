"""The prompt box: files by @, long pastes, queued prompts, slash commands, editing, and what is read ahead."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.events import Key, Paste

from tests.app.conftest import Chat, Start
from tokamac.app import settings
from tokamac.app.backend.protocol import AskPrice, Request, Warm
from tokamac.app.chat.actions import ACTIONS, ALIASES, PartialCommand, by_slash, command_at, matching, parse, unknown
from tokamac.app.chat.attachments import Draft
from tokamac.app.chat.background import is_ready
from tokamac.app.chat.controller import History
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.settings import Settings
from tokamac.app.store.store import Store
from tokamac.app.tui.screens.chats import ChatsScreen
from tokamac.app.tui.screens.dialog import ChoiceScreen, PromptsScreen, TextScreen
from tokamac.app.tui.screens.help import HelpScreen
from tokamac.app.tui.screens.settings import SettingsScreen
from tokamac.app.tui.widgets import prompt_input
from tokamac.app.tui.widgets.prompt_input import Chips, TextInput
from tokamac.engine.events import Message
from tokamac.engine.options import Sampling

LONG = "\n".join(f"line {number} of a long text" for number in range(40))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder the user is in."""
    here = tmp_path / "here"
    (here / "notes").mkdir(parents=True)
    (here / "notes" / "decode.md").write_text("# Decode\nreads every weight")
    (here / "data.csv").write_text("n,tps\n1,40")
    (here / "photo.png").write_bytes(b"\x89PNG\0")
    monkeypatch.chdir(here)
    return here


def names(c: Chat) -> list[str]:
    return [attachment.name for attachment in c.prompt.attachments]


async def pick(c: Chat, typed: str) -> None:
    """Type a part of a path, wait for the offer, and take its first."""
    await c.pilot.press(*typed)
    await c.until(lambda: c.prompt.completions.display, "an offer")
    await c.pilot.press("enter")


async def paste_long(c: Chat) -> None:
    before = len(c.prompt.attachments)
    c.app.post_message(Paste(LONG))
    await c.until(lambda: len(c.prompt.attachments) > before)


async def test_a_file_named_by_a_part_of_its_path_goes_with_the_prompt(chat: Start, folder: Path) -> None:
    async with chat("fast", size=(100, 60)) as c:
        await pick(c, "see @deco")
        await c.until(lambda: names(c) == ["notes/decode.md"])
        assert c.prompt.text == "see notes/decode.md "
        block = c.prompt.draft.whole.removesuffix(f"\n\n{c.prompt.text}")
        tokens = -(-len(block) // 4)  # as the scripted engine counts
        await c.until(lambda: f"+ notes/decode.md {tokens} tokens" in c.screen_text(), "the tokens")
        assert not c.session.turns
        await c.pilot.press("enter")
        await c.until(lambda: c.session.turns and c.session.turns[0].reply)
        assert (c.prompt.text, names(c)) == ("", [])
        (turn,) = c.session.turns
        assert turn.prompt == "see notes/decode.md"
        assert turn.asked.startswith("File notes/decode.md:\n```\n# Decode\nreads every weight\n```\n\nsee ")
        assert "+ notes/decode.md" in c.screen_text()


CLUSTERS = ["👩‍💻", "🇩🇪", "👍🏽", "❤️", "e\u0301", "1️⃣", "👨‍👩‍👧‍👦"]


async def test_an_emoji_of_several_code_points_goes_and_is_passed_as_one(chat: Start) -> None:
    async with chat("fast", ready=False) as c:
        for cluster in CLUSTERS:
            await c.type(f"a{cluster}b{cluster}")
            await c.pilot.press("backspace")
            assert c.prompt.text == f"a{cluster}b"
            await c.pilot.press("left", "left")
            assert c.prompt.cursor_location == (0, 1)
            await c.pilot.press("right")
            assert c.prompt.cursor_location == (0, 1 + len(cluster))
            await c.pilot.press("left", "delete")
            assert c.prompt.text == "ab"
            screen = await c.opened("f1", HelpScreen)
            field = screen.query_one(TextInput)
            field.value = f"{cluster}{cluster}c"
            await c.pilot.press("end", "left", "backspace")
            assert (field.value, field.cursor_position) == (f"{cluster}c", len(cluster))
            await c.pilot.press("left")
            assert field.cursor_position == 0
            await c.pilot.press("right", "left", "delete")
            assert field.value == "c"
            await c.pilot.press("delete", "delete", "backspace")
            assert field.value == ""
            await c.closed()
            c.prompt.clear()


async def test_what_was_sent_is_searched_and_costs_no_reply(chat: Start) -> None:
    async with chat("fast") as c:
        await c.pilot.press("ctrl+r")
        await c.until(lambda: "You have sent no prompts yet." in c.notices)
        for text in ("red apples", "green\npears", "red cherries"):
            await c.ask(text)
        await c.pilot.press("ctrl+n", *"half")
        await c.opened("ctrl+r", PromptsScreen)
        await c.pilot.press(*"red", "ctrl+r", "enter")
        await c.until(lambda: c.app.screen is c.app.view)
        assert (c.prompt.text, c.prompts) == ("red apples", [])
        await c.pilot.press("ctrl+underscore")
        assert c.prompt.text == "half", "what was written is not lost"
        await c.opened("ctrl+r", PromptsScreen)
        await c.pilot.press("down", "enter")
        await c.until(lambda: c.prompt.text == "green\npears")
        await c.opened("ctrl+r", PromptsScreen)
        await c.pilot.press(*"nothing so", "enter")
        await c.until(lambda: "No matches." in c.screen_text())
        await c.closed()
        assert c.prompt.text == "green\npears"


async def test_escape_twice_in_an_empty_box_edits_an_earlier_prompt(chat: Start) -> None:
    async with chat("fast") as c:
        await c.pilot.press("escape", "escape")
        assert c.app.screen is c.app.view, "there is nothing to edit"
        await c.ask("one")
        await c.ask("two")
        await c.pilot.press("a", "escape", "escape", "backspace", "escape", "b", "backspace", "escape")
        assert c.app.screen is c.app.view, "something was written between"
        assert c.prompt.text == ""
        await c.pilot.press("escape")
        await c.on(PromptsScreen)
        await c.pilot.press("down", "enter")
        await c.until(lambda: c.prompt.text == "one")
        await c.pilot.press("s", "enter")
        await c.until(lambda: c.prompts == ["ones"] and c.session.turns[-1].reply)
        assert len(c.session.conversation.tree.nodes) == 6, "the old turns stay beside it"


async def test_a_turn_is_taken_back_and_its_prompt_returns_to_an_empty_box(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("one")
        await c.ask("two")
        await c.send("/undo")
        await c.until(lambda: c.prompts == ["one"] and c.prompt.text == "two")
        assert "Took the last turn back." in c.notices
        c.app.view.do("undo_turn")
        assert (c.prompts, c.prompt.text) == ([], "two"), "what is written stays as it is"
        await c.send(" and three")
        await c.until(lambda: c.prompts == ["two and three"] and c.session.turns[-1].reply)
        held = c.held
        await c.send("/undo")
        await c.until(lambda: c.prompt.text == "two and three")
    async with chat("fast", chat=held) as c:
        assert len(c.session.conversation.tree.nodes) == 6


async def test_a_setting_is_changed_by_a_command_and_lines_that_were_asked_for_are_read(chat: Start) -> None:
    async with chat("fast") as c:
        await c.send("/settings temperature 0.5")
        await c.until(lambda: "temperature is 0.5 in this chat; it was not set." in c.notices)
        await c.send("/set")
        await c.on(SettingsScreen)
        await c.pilot.press("escape")
        await c.ask("hello")
        for command, said in (("/show", "Settings that differ: temperature 0.5."), ("/stats", "time to first token: ")):
            await c.send(command)
            await c.on(TextScreen)
            assert said in c.screen_text()
            await c.closed()


async def test_what_follows_a_command_is_done_at_once(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("one apple")
        await c.send("/edit two pears")
        await c.until(lambda: c.prompts == ["two pears"] and c.session.turns[-1].reply)
        await c.send("/revise In my words.")
        await c.until(lambda: c.session.turns[-1].reply and c.session.turns[-1].reply.text == "In my words.")
        await c.send("/system Be brief.")
        await c.until(lambda: c.session.system == "Be brief.")
        await c.send("/chats apple")
        screen = await c.on(ChatsScreen)
        await c.until(lambda: "one apple" in c.screen_text())
        assert screen.query_one(TextInput).value == "apple"


async def test_ctrl_d_quits_where_nothing_is_written_and_deletes_where_something_is(chat: Start) -> None:
    async with chat("fast", ready=False) as c:
        await c.type("ab")
        await c.pilot.press("home", "ctrl+d")
        assert c.prompt.text == "b"
        await c.pilot.press("ctrl+d", "ctrl+d")
        await c.until(lambda: c.app.return_code == 0 and not c.app.is_running, "the end")


async def test_arrows_choose_among_the_files_offered_tab_takes_and_escape_none(chat: Start, folder: Path) -> None:
    async with chat("fast") as c:
        await c.pilot.press("@", "d")
        await c.until(lambda: c.prompt.completions.option_count == 2)
        assert "data.csv" in c.screen_text()
        await c.pilot.press("escape")
        assert not c.prompt.completions.display
        assert c.prompt.text == "@d"
        await c.pilot.press("a", "backspace")
        await c.until(lambda: c.prompt.completions.display and c.prompt.completions.option_count == 2)
        await c.pilot.press("down", "tab")
        await c.until(lambda: names(c) == ["notes/decode.md"])
        assert c.prompt.has_focus


async def test_a_folder_that_is_chosen_is_looked_into(chat: Start, folder: Path) -> None:
    async with chat("fast") as c:
        await pick(c, "@./no")
        await c.until(lambda: c.prompt.text == "@./notes/" and c.prompt.completions.display)
        await c.pilot.press("enter")
        await c.until(lambda: names(c) == ["./notes/decode.md"])


async def test_a_file_whose_name_was_typed_is_attached_as_one_goes_on(chat: Start, folder: Path) -> None:
    async with chat("fast") as c:
        for typed, text, attached in (
            ("@notes/decode.md What", "What", 1),
            (" in @data.csv or @no.md ?", "What in data.csv or @no.md ?", 2),
        ):
            await c.pilot.press(*("space" if each == " " else each for each in typed))
            await c.until(lambda attached=attached: len(names(c)) == attached)
            assert c.prompt.text == text
        assert names(c) == ["notes/decode.md", "data.csv"]


async def test_a_path_that_was_only_pasted_is_not_followed(chat: Start, folder: Path) -> None:
    async with chat("fast") as c:
        await c.paste("as it says in @data.csv")
        await asyncio.sleep(0.3)
        assert not c.prompt.completions.display
        await c.pilot.press("enter")
        await c.until(lambda: c.session.turns)
        assert c.session.turns[0].asked == "as it says in @data.csv"


async def test_backspace_in_an_empty_box_lets_the_last_attachment_go(chat: Start, folder: Path) -> None:
    async with chat("fast") as c:
        await paste_long(c)
        await paste_long(c)
        assert names(c) == ["pasted text 1", "pasted text 2"]
        await c.pilot.press("x", "backspace")
        assert len(names(c)) == 2
        await c.pilot.press("backspace")
        await c.until(lambda: names(c) == ["pasted text 1"])
        assert "pasted text 2" not in c.screen_text()


async def test_a_long_paste_is_an_attachment_priced_sent_and_titled_by_its_name(chat: Start, tmp_path: Path) -> None:
    async with chat("fast", size=(110, 30)) as c:
        await paste_long(c)
        assert c.prompt.text == ""
        await c.until(lambda: c.session.warmup.price is not None or "next:" in c.screen_text(), "its tokens")
        await c.pilot.press("enter")
        await c.until(lambda: c.session.turns and c.session.turns[0].reply)
        assert c.session.turns[0].asked == f"Pasted text 1:\n```\n{LONG}\n```"
    with Store.open(tmp_path / "chats" / "chats.db") as store:
        stored = store.latest()
        assert stored.title == "pasted text 1"
        (attachment,) = store.path(stored.id)[0].attachments
        assert (attachment.name, attachment.text) == ("pasted text 1", LONG)


async def test_a_draft_comes_back_with_what_goes_with_it(chat: Start, folder: Path) -> None:
    async with chat("fast") as c:
        await c.ask("hi")
        await pick(c, "about @dat")
        await c.until(lambda: names(c) == ["data.csv"])
    async with chat("fast", resume=True) as c:
        await c.until(lambda: names(c) == ["data.csv"])
        assert c.prompt.text == "about data.csv "


async def test_editing_shows_words_and_files_again_and_gives_the_draft_back(chat: Start, folder: Path) -> None:
    async with chat("fast") as c:
        await pick(c, "@dat")
        await c.until(lambda: names(c) == ["data.csv"])
        await c.pilot.press(*"why")
        await c.pilot.press("enter")
        await c.until(lambda: c.session.turns and c.session.turns[0].reply)
        await c.type("my next thought")
        await c.pilot.press("tab", "up", "e", "enter")
        await c.until(lambda: c.prompt.text == "why")
        assert names(c) == ["data.csv"]
        await c.pilot.press("escape")
        assert (c.prompt.text, names(c)) == ("my next thought", [])


async def test_up_goes_back_in_what_was_sent_in_any_chat_and_down_returns_to_the_draft(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("first")
        await c.ask("second\nof two lines")
    async with chat("fast") as c:
        await c.type("a draft")
        await c.pilot.press("up")
        await c.until(lambda: c.prompt.text == "second\nof two lines")
        await c.pilot.press("up")
        assert c.prompt.text == "second\nof two lines"  # the cursor moved to its first line
        await c.pilot.press("up")
        await c.until(lambda: c.prompt.text == "first")
        await c.pilot.press("up")
        assert c.prompt.text == "first"
        await c.pilot.press("down", "down")
        await c.until(lambda: c.prompt.text == "a draft")


async def test_prompts_wait_in_their_order_and_up_takes_the_last_back(chat: Start) -> None:
    async with chat("slow", size=(100, 40), ready=False) as c:
        await c.send("one")
        await c.phase(EnginePhase.DECODING)
        for text in ("two", "three"):
            await c.send(text)
        await c.until(lambda: "2 prompts queued" in c.screen_text())
        assert "queued two" in c.screen_text()
        await c.pilot.press("up")
        await c.until(lambda: c.prompt.text == "three")
        assert "queued three" not in c.screen_text()
        await c.pilot.press(*" and a half", "enter")
        await c.until(lambda: [draft.text for draft in c.session.queued] == ["two", "three and a half"])
        await c.pilot.press("escape")
        await c.phase(EnginePhase.IDLE)
        assert c.prompt.text == "two\n\nthree and a half"


def test_what_was_changed_in_the_history_is_a_draft_of_its_own() -> None:
    history = History()
    sent = lambda: ["b", "a"]  # noqa: E731
    assert history.older(Draft("x"), sent) == Draft("b")
    assert history.older(Draft("b, changed"), sent) == Draft("b")
    assert history.newer(Draft("b")) == Draft("b, changed")
    assert history.newer(Draft("b, changed")) is None
    assert History().older(Draft(), list) is None


async def test_prompts_that_wait_when_the_app_is_left_are_the_draft_of_the_next_time(chat: Start) -> None:
    async with chat("slow") as c:
        await c.send("one")
        await c.phase(EnginePhase.DECODING)
        await c.send("two")
        await c.send("three")
        await c.until(lambda: len(c.session.queued) == 2)
        await c.type("and four")
    async with chat("fast", resume=True) as c:
        await c.until(lambda: c.prompt.text == "two\n\nthree\n\nand four")


# A shell command after !: asked for, run aside, and its output attached.


@pytest.fixture
def sh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/sh")


@pytest.mark.usefixtures("sh")
async def test_a_command_is_asked_for_run_and_its_output_sent_and_kept(chat: Start, folder: Path) -> None:
    async with chat("fast", size=(100, 40)) as c:
        await c.pilot.press("!", *"echo hi; exit 3")
        assert prompt_input.SHELL in c.screen_text()
        await c.pilot.press("enter")
        await c.on(ChoiceScreen)
        shown = c.screen_text()
        assert "echo hi; exit 3" in shown
        assert str(folder)[:40] in shown
        await c.pilot.press("enter")
        await c.until(lambda: names(c) == ["!echo hi; exit 3"], "the output")
        assert c.prompt.attachments[0].text == "$ echo hi; exit 3\nhi\n[exit status 3]"
        await c.until(lambda: "+ !echo hi; exit 3 " in c.screen_text() and "tokens" in c.screen_text(), "the chip")
        assert "exit status 3" in c.notices
        await c.ask("Why?")
        assert c.session.turns[0].attachments[0].name == "!echo hi; exit 3"
        assert c.held is not None
        (stored,) = c.recording.store.path(c.held)[0].attachments
        assert (stored.name, stored.kind) == ("!echo hi; exit 3", "command")


@pytest.mark.usefixtures("sh")
async def test_without_a_yes_nothing_runs_and_the_command_is_in_the_box_again(chat: Start, folder: Path) -> None:
    async with chat("fast") as c:
        for keys in (("escape",), ("down", "enter")):
            c.prompt.put(Draft("!touch made"))
            c.prompt.submit()
            await c.on(ChoiceScreen)
            await c.pilot.press(*keys)
            await c.until(lambda: c.prompt.text == "!touch made", "the text")
        assert not (folder / "made").exists()
        assert c.app.chat.shell is None


async def test_a_space_or_a_backslash_makes_it_a_prompt(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask(" !ls")
        await c.ask("\\!ls")
        assert c.prompts == ["!ls", "!ls"]


@pytest.mark.usefixtures("sh")
@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
async def test_a_command_is_ended_by_a_key_and_its_output_attached(chat: Start, folder: Path, key: str) -> None:
    async with chat("fast") as c:
        c.prompt.put(Draft("!sleep 60 & echo $! | tee pid; wait"))
        c.prompt.submit()
        await c.on(ChoiceScreen)
        await c.pilot.press("enter")
        pid = folder / "pid"
        await c.until(lambda: pid.exists() and pid.read_text().strip(), "it runs")
        assert "running sleep 60" in c.screen_text()
        await c.send("And?")
        await c.until(lambda: "still running" in c.notices, "the refusal")
        assert (c.prompts, c.prompt.text) == ([], "And?")
        here = c.app.chat.session.conversation
        c.app.clear_notifications()
        await c.pilot.press("ctrl+n")  # what it writes is for this chat
        await c.until(lambda: "still running" in c.notices, "another refusal")
        assert c.app.chat.session.conversation is here
        await c.pilot.press(key)
        await c.until(lambda: c.app.chat.shell is None, "its end")
        assert c.prompt.attachments[0].text.endswith(f"\n{pid.read_text().strip()}\n[stopped by you]")
        assert c.prompt.text == "And?"


async def test_no_text_of_a_model_and_no_edit_runs_a_command(chat: Start, folder: Path) -> None:
    async with chat("fast") as c:
        await c.ask("one")
        c.app.view.do("edit")
        c.prompt.put(Draft("!touch made"))
        c.prompt.submit()
        await c.until(lambda: c.prompts == ["!touch made"], "a prompt")
        c.app.view.do("shell")
        await c.until(lambda: c.prompt.text == "!", "the beginning of one")
        assert not (folder / "made").exists()
        assert not isinstance(c.app.screen, ChoiceScreen)


# Slash commands while they are written: offered below the prompt, completed, done at once where nothing lacks.

SLASHES = [action.slash for action in ACTIONS if action.slash]


def offered(c: Chat) -> list[str]:
    """The commands that are offered, as they are shown."""
    offers = c.prompt.completions
    return [str(option.id) for option in offers.options] if offers.display else []


async def begin(c: Chat, typed: str) -> None:
    """Type a command's beginning, and wait until what fits is offered."""
    await c.pilot.press(*typed)
    await c.until(lambda: typed[1:] in c.prompt.completions.chosen, f"an offer for {typed}")


# Which commands fit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "row", "column", "named"),
    [
        ("/", 0, 1, PartialCommand("", 1)), ("/ti", 0, 3, PartialCommand("ti", 3)),
        ("/title", 0, 3, PartialCommand("ti", 6)), ("/ti Keys and values", 0, 3, PartialCommand("ti", 3)),
        ("/ti\n", 0, 3, PartialCommand("ti", 3)), ("/ti Keys", 0, 5, None), ("/ti", 0, 0, None),
        ("/etc/hosts", 0, 4, None), ("//", 0, 2, None), ("/7", 0, 2, None), (" /ti", 0, 4, None),
        ("what is /ti", 0, 11, None), ("/ti\nmore", 0, 3, None), ("more\n/ti", 1, 3, None), ("", 0, 0, None),
    ],
)  # fmt: skip
def test_a_command_is_named_in_the_first_word(text: str, row: int, column: int, named: PartialCommand | None) -> None:
    assert command_at(text, row, column) == named


def test_what_is_called_so_goes_before_what_begins_so_and_that_before_other_names() -> None:
    named = lambda part: [action.slash for action in matching(part)]  # noqa: E731
    assert named("") == SLASHES
    assert named("new") == ["new", "newer"]
    assert named("Ex") == ["export", "explain", "quit", "context"]
    assert named("regen") == ["again"]
    assert named("itl") == ["title"]
    assert named("home") == []


def test_other_programs_words_lead_to_commands_and_hide_none() -> None:
    assert all(by_slash(slash) is not None for slash in ALIASES.values())
    assert not set(ALIASES) & set(SLASHES)
    assert all(matching(other)[0].slash == slash for other, slash in ALIASES.items())
    for word, slash in (*ALIASES.items(), ("Regenerate", "again")):
        written = parse(f"/{word}")
        assert written.action is by_slash(slash)


def test_an_unknown_command_is_told_the_nearest_and_only_a_near_one() -> None:
    assert unknown("/titel") == "There is no command /titel; did you mean /title?"
    assert unknown("/Frok") == "There is no command /Frok; did you mean /fork?"
    assert unknown("/quits") == "There is no command /quits; did you mean /quit?"
    assert unknown("/regenrate") == "There is no command /regenrate; did you mean /again?"
    for far in ("/nosuch", "/etc", "/home", "/usr"):
        assert unknown(far) == f"There is no command {far}."


@pytest.mark.parametrize(
    ("text", "whole"),
    [("/new", True), ("/model", True), ("/title", False), ("/title Keys", True), ("/pull", False), ("/nosuch", False)],
)
def test_a_command_is_whole_with_what_has_to_follow_it(text: str, whole: bool) -> None:
    written = parse(text)
    assert written.is_whole is whole


# In the box ---------------------------------------------------------------------------------------------------------------


async def test_a_slash_offers_every_command_with_what_follows_it_and_what_it_does(chat: Start) -> None:
    async with chat("fast") as c:
        await c.pilot.press("/")
        await c.until(lambda: offered(c) == SLASHES, "all commands")
        await c.pilot.press("e", "x", "p")
        await c.until(lambda: offered(c) == ["export", "explain"])
        rows = c.screen_text().splitlines()
        (export,) = (row for row in rows if "/export" in row)
        assert "/export [PATH]  Export this chat to a new file" in export
        await c.pilot.press("tab")
        await c.until(lambda: c.prompt.text == "/export ")
        assert c.prompt.cursor_location == (0, len("/export "))
        assert c.prompt.has_focus
        assert offered(c) == []


async def test_enter_does_a_command_that_is_written_and_completes_one_that_is_not(chat: Start) -> None:
    async with chat("fast") as c:
        await begin(c, "/hel")
        await c.pilot.press("enter")
        await c.until(lambda: c.prompt.text == "/help")
        assert offered(c) == []
        assert not isinstance(c.app.screen, HelpScreen)
        await c.pilot.press("backspace")
        await begin(c, "p")
        assert c.prompt.text == "/help"
        await c.opened("enter", HelpScreen)
        assert c.prompt.text == ""


async def test_enter_asks_for_what_has_to_follow_before_it_does_a_command(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("hi")
        await begin(c, "/title")
        await c.pilot.press("enter")
        await c.until(lambda: c.prompt.text == "/title ")
        assert not c.notices
        await c.pilot.press(*"Keys", "enter")
        await c.until(lambda: c.held is not None and c.recording.store.chat(c.held).title == "Keys")
        assert c.prompt.text == ""


async def test_the_arrows_choose_and_what_is_chosen_goes_before_what_is_written(chat: Start) -> None:
    async with chat("fast") as c:
        await begin(c, "/new")
        assert c.prompt.completions.chosen == "new"
        await c.pilot.press("down", "enter")
        await c.until(lambda: c.prompt.text == "/newer")


async def test_who_types_faster_than_it_is_drawn_gets_what_was_written(chat: Start) -> None:
    async with chat("fast") as c:
        await begin(c, "/ne")
        assert c.prompt.completions.chosen == "new"
        c.prompt.insert("wer")
        await c.prompt.on_key(Key("enter", None))
        assert c.prompt.text == ""  # it was sent, not completed to /new
        await c.until(lambda: c.notices)


async def test_escape_closes_and_the_arrows_go_back_in_what_was_sent_again(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("hi")
        await begin(c, "/ne")
        await c.pilot.press("escape", "up")
        await c.until(lambda: c.prompt.text == "hi")
        assert offered(c) == []
        await c.pilot.press("down")
        await c.until(lambda: c.prompt.text == "/ne")
        assert offered(c) == []


async def test_a_name_is_completed_before_what_follows_it(chat: Start) -> None:
    async with chat("fast") as c:
        await c.pilot.press(*"/ti Keys", "home", "right", "right", "right")
        assert offered(c) == []
        await c.pilot.press("t")
        await c.until(lambda: offered(c) == ["title"])
        await c.pilot.press("tab")
        await c.until(lambda: c.prompt.text == "/title Keys")
        assert c.prompt.cursor_location == (0, len("/title "))


async def test_a_path_at_the_beginning_of_a_prompt_is_sent_as_it_is(chat: Start) -> None:
    async with chat("fast") as c:
        await c.pilot.press("/")
        await c.until(lambda: offered(c))
        await c.pilot.press(*"etc/hosts what is it")
        await c.until(lambda: not offered(c))
        await c.pilot.press("enter")
        await c.until(lambda: c.prompts == ["/etc/hosts what is it"])


async def test_a_pasted_command_is_not_completed(chat: Start) -> None:
    async with chat("fast") as c:
        await c.paste("/he")
        assert offered(c) == []
        await c.pilot.press("enter")
        await c.until(lambda: "There is no command /he" in c.notices)
        assert (c.prompt.text, c.prompts) == ("/he", [])


async def test_in_a_message_that_is_edited_a_slash_is_text(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("hi")
        c.app.view.do("edit")
        await c.until(lambda: c.app.chat.composer.editing is not None)
        c.prompt.put(Draft())
        await c.pilot.press("/", "h")
        assert c.prompt.text == "/h"
        assert offered(c) == []
        await c.pilot.press("escape")
        await c.until(lambda: c.app.chat.composer.editing is None)
        await begin(c, "/he")
        assert offered(c)[0] == "help"


async def test_while_a_reply_runs_up_chooses_a_command_and_takes_no_prompt_back(chat: Start) -> None:
    async with chat("deaf", size=(100, 40)) as c:  # whose reply is long
        await c.send("one")
        await c.phase(EnginePhase.DECODING)
        await c.send("two")
        await c.until(lambda: c.session.queued)
        await begin(c, "/new")
        await c.pilot.press("up")
        assert c.prompt.completions.chosen == "newer"
        assert [draft.text for draft in c.session.queued] == ["two"]
        await c.pilot.press("escape")
        assert offered(c) == []
        assert c.session.engine.replying


async def test_keys_of_the_users_own_close_it_and_escape_does_so_too(chat: Start, tmp_path: Path) -> None:
    settings.save(tmp_path / "settings.toml", Settings(keys={"stop": ("ctrl+k",)}, toured=True))
    async with chat("fast") as c:
        await begin(c, "/he")
        await c.pilot.press("escape")
        assert offered(c) == []
        await c.pilot.press("l")
        await c.until(lambda: offered(c) == ["help", "shell"])
        await c.pilot.press("ctrl+k")
        assert offered(c) == []
        assert c.prompt.text == "/hel"


async def test_in_the_smallest_window_each_has_a_row_and_the_mouse_takes_one(chat: Start) -> None:
    async with chat("fast", size=(40, 12)) as c:
        await c.pilot.press("/")
        await c.until(lambda: offered(c) == SLASHES)
        rows = [row for row in c.screen_text().splitlines() if row.strip().startswith("/")]
        assert [row.split()[0] for row in rows] == [f"/{slash}" for slash in SLASHES[:4]]
        assert all("…" in row for row in rows)  # cut, not wrapped
        await c.pilot.click(c.prompt.completions, offset=(3, 1))
        await c.until(lambda: c.prompt.text == "/new")
        assert c.prompt.has_focus
        await c.pilot.press("enter")
        await c.until(lambda: c.prompt.text == "")


# While a message is edited the box is not the draft's: what comes back meanwhile waits, and nothing of either is
# lost.


async def waiting_and_editing(c: Chat) -> None:
    """A reply runs, a prompt waits, a draft is written, and the prompt that is answered is edited."""
    await c.until(lambda: c.app.chat.recording is not None)
    await c.send("one")
    await c.phase(EnginePhase.DECODING)
    await c.send("queued")
    await c.until(lambda: c.session.queued)
    await c.type("a draft")
    c.app.view.do("edit")
    await c.until(lambda: c.prompt.text == "one")
    c.prompt.text = "one, but better"


async def test_a_prompt_that_comes_back_waits_for_the_end_of_the_edit(chat: Start) -> None:
    async with chat("slow", ready=False) as c:
        await waiting_and_editing(c)
        await c.pilot.press("escape")
        await c.phase(EnginePhase.IDLE)
        assert (c.prompt.text, c.session.queued) == ("one, but better", [])
        assert "after the edit" in c.notices
        await c.pilot.press("escape")
        assert c.prompt.text == "queued\n\na draft"


async def test_up_takes_no_prompt_back_into_an_edit(chat: Start) -> None:
    async with chat("slow", ready=False) as c:
        await waiting_and_editing(c)
        c.prompt.focus()
        await c.pilot.press("up")
        await c.until(lambda: "stays queued" in c.notices)
        assert c.prompt.text == "one, but better"
        assert [draft.text for draft in c.session.queued] == ["queued"]


async def test_an_edit_that_changed_nothing_is_none(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("one")
        await c.type("a draft")
        await c.pilot.press("tab", "up", "e", "enter")
        await c.until(lambda: c.prompt.text == "one")
    async with chat("fast", resume=True, ready=False) as c:
        await c.until(lambda: c.prompt.text)
        assert c.prompt.text == "a draft"


async def two_edits(c: Chat) -> None:
    """A draft is written, the first message edited, and then, before that was sent, the second one."""
    await c.phase(EnginePhase.IDLE)
    await c.until(lambda: c.app.chat.recording is not None)
    await c.ask("one")
    await c.ask("two")
    await c.type("a draft")
    edit(c, 1)
    assert c.prompt.text == "one"
    c.prompt.text = "one, but better"
    edit(c, 3)
    assert c.prompt.text == "two"
    await c.until(lambda: "Your other edit is saved" in c.notices)


def edit(c: Chat, key: int) -> None:
    c.transcript.select_message(key)
    c.app.view.do("edit")


async def test_an_edit_that_is_left_for_another_one_stays_with_its_message(chat: Start) -> None:
    async with chat("fast", ready=False) as c:
        await two_edits(c)
        edit(c, 1)
        assert c.prompt.text == "one, but better"
        edit(c, 1)  # which is being edited
        assert c.prompt.text == "one, but better"
        await c.pilot.press("escape")
        assert c.prompt.text == "a draft"
        edit(c, 1)  # it was given up
        assert c.prompt.text == "one"


async def test_all_edits_that_were_not_sent_are_kept_with_the_chat(chat: Start) -> None:
    async with chat("fast", ready=False) as c:
        await two_edits(c)
        c.prompt.text = "two, too"
    async with chat("fast", resume=True, ready=False) as c:
        await c.until(lambda: c.prompt.text == "a draft\n\none, but better\n\ntwo, too")


# Reading ahead as a user meets it: when it begins, what the screen says of it, and what the next reply saves.

WARM_LONG = "a question with many words " * 40
NEVER_S = 3600.0


def watch(chat: Chat) -> list[Request]:
    """What the screen asks of the engine from here on."""
    asked: list[Request] = []
    send = chat.app.chat.bridge.ask

    def ask(request: Request) -> None:
        asked.append(request)
        send(request)

    chat.app.chat.bridge.ask = ask  # type: ignore[method-assign]
    return asked


async def test_a_pause_has_the_draft_read_once_and_the_screen_says_so(chat: Start, tmp_path: Path) -> None:
    async with chat("fast") as c:
        asked = watch(c)
        await c.type(WARM_LONG)
        await c.until(lambda: "prompt already processed" in c.screen_text(), "ready")
        draft = (Message("user", WARM_LONG.strip()),)
        assert asked == [AskPrice("draft", 1, draft), Warm(2, draft)]
        assert f"warm [('user', {len(WARM_LONG) - 1})]" in (tmp_path / "engine.log").read_text()
        c.prompt.submit()
        await c.until(lambda: c.session.turns and c.session.turns[-1].reply)
        metrics = c.session.turns[-1].reply.metrics
        assert metrics.cached_tokens > metrics.prompt_tokens / 2
        assert "next:" not in c.screen_text()


class Clock:
    """Timers that end when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.seconds: set[float] = set()

    def set_timer(self, seconds: float, then: Callable[[], None]) -> "Clock":
        self.seconds.add(seconds)
        self.waiting.append(then)
        return self

    def stop(self) -> None:
        self.waiting.pop()


async def test_every_key_begins_the_pause_anew(chat: Start) -> None:
    async with chat("fast") as c:
        await c.until(lambda: c.prompt._rest is not None, "the pause after loading")
        c.prompt._rest.stop()
        asked, clock = watch(c), Clock()
        c.prompt._rest, c.prompt.set_timer = None, clock.set_timer
        for _ in range(3):
            await c.type(WARM_LONG)
        assert len(clock.waiting) == 1
        assert clock.seconds == {prompt_input.PAUSE_S}
        assert asked == []
        clock.waiting[0]()
        await c.until(
            lambda: AskPrice("draft", 1, (Message("user", (WARM_LONG * 3).strip()),)) in asked, "the price of the whole"
        )


async def test_a_long_paste_is_read_without_waiting_for_a_pause(chat: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_input, "PAUSE_S", NEVER_S)
    async with chat("fast") as c:
        asked = watch(c)
        await c.type(WARM_LONG)
        await c.paste("x" * (prompt_input.LONG_PASTE - 1))
        assert asked == []
        await c.paste(WARM_LONG)
        await c.until(lambda: any(isinstance(request, Warm) for request in asked), "reading")


async def test_a_draft_written_while_a_reply_runs_is_read_after_it(chat: Start) -> None:
    async with chat("slow", ready=False) as c:
        await c.send("hi")
        await c.phase(EnginePhase.DECODING)
        asked = watch(c)
        await c.paste(WARM_LONG)
        assert c.session.engine.replying
        assert asked == []
        c.app.view.do("stop")
        await c.until(lambda: any(isinstance(request, Warm) for request in asked), "reading")
        (warm,) = (request for request in asked if isinstance(request, Warm))
        assert [message.role for message in warm.messages] == ["user", "assistant", "user"]
        assert warm.messages[-1].content == WARM_LONG.strip()
        assert c.prompt.text == WARM_LONG


async def test_trouble_with_the_prompt_cache_is_said_once(chat: Start) -> None:
    async with chat("full-disk", ready=False) as c:
        for prompt_text in ("one", "two"):
            await c.ask(prompt_text)
        await c.until(lambda: "disk full" in c.notices, "the notice")
        (notice,) = (n for n in c.app.view.query_one(Chips).notices if "disk full" in n.text)
        assert notice.severity == "warning"
        assert "\x1b" not in notice.text
        assert "every weight" in await c.ask("three")
        assert c.notices.count("disk full") == 1


@pytest.mark.e2e
async def test_the_real_engine_has_read_a_pasted_text_before_it_is_sent(chat: Start) -> None:
    text = " ".join(f"The tokamak {i} holds a plasma of hydrogen in a strong magnetic field." for i in range(116))
    assert len(text.split()) > 1_500
    async with chat("guide", scripted=False, sampling=Sampling(temperature=0.0, max_tokens=4)) as c:
        c.app.post_message(Paste(text))  # so long that it is attached
        await c.until(lambda: c.session.warmup.price and is_ready(c.session.warmup.price), "ready", patience_s=180)
        c.prompt.submit()
        await c.until(lambda: c.session.turns and c.session.turns[-1].reply)
        metrics = c.session.turns[-1].reply.metrics
        assert metrics.cached_tokens > metrics.prompt_tokens / 2
        assert metrics.prompt_tokens > 1_500
