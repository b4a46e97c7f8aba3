"""Slash commands while they are written: offered below the prompt, completed, done at once where nothing lacks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.events import Key

from tests.app.conftest import Chat
from tokamac.app import settings
from tokamac.app.chat.actions import ACTIONS, ALIASES, PartialCommand, by_slash, command_at, matching, parse, unknown
from tokamac.app.chat.attachments import Draft
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.settings import Settings
from tokamac.app.tui.screens.help import HelpScreen

Start = Callable[..., Any]
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
        ("/", 0, 1, PartialCommand("", 1)),
        ("/ti", 0, 3, PartialCommand("ti", 3)),
        ("/title", 0, 3, PartialCommand("ti", 6)),
        ("/ti Keys and values", 0, 3, PartialCommand("ti", 3)),
        ("/ti\n", 0, 3, PartialCommand("ti", 3)),
        ("/ti Keys", 0, 5, None),
        ("/ti", 0, 0, None),
        ("/etc/hosts", 0, 4, None),
        ("//", 0, 2, None),
        ("/7", 0, 2, None),
        (" /ti", 0, 4, None),
        ("what is /ti", 0, 11, None),
        ("/ti\nmore", 0, 3, None),
        ("more\n/ti", 1, 3, None),
        ("", 0, 0, None),
    ],
)
def test_a_command_is_named_in_the_first_word_of_a_text_that_can_be_one(
    text: str, row: int, column: int, named: PartialCommand | None
) -> None:
    assert command_at(text, row, column) == named


def test_what_is_called_so_goes_before_what_begins_so_and_that_before_other_names() -> None:
    named = lambda part: [action.slash for action in matching(part)]  # noqa: E731
    assert named("") == SLASHES
    assert named("new") == ["new", "newer"]
    assert named("Ex") == ["export", "explain", "quit"]
    assert named("regen") == ["again"]
    assert named("itl") == ["title"]
    assert named("home") == []


def test_other_programs_words_lead_to_commands_and_hide_none() -> None:
    assert all(by_slash(slash) is not None for slash in ALIASES.values())
    assert not set(ALIASES) & set(SLASHES)
    assert all(matching(other)[0].slash == slash for other, slash in ALIASES.items())


def test_an_unknown_command_is_told_the_nearest_and_only_a_near_one() -> None:
    assert unknown("/titel") == "There is no command /titel; did you mean /title?"
    assert unknown("/Frok") == "There is no command /Frok; did you mean /fork?"
    assert unknown("/exit") == "There is no command /exit; did you mean /quit?"
    assert unknown("/regenrate") == "There is no command /regenrate; did you mean /again?"
    for far in ("/nosuch", "/etc", "/home", "/usr"):
        assert unknown(far) == f"There is no command {far}."


@pytest.mark.parametrize(
    ("text", "whole"),
    [("/new", True), ("/model", True), ("/title", False), ("/title Keys", True), ("/pull", False), ("/nosuch", False)],
)
def test_a_command_is_whole_with_what_has_to_follow_it(text: str, whole: bool) -> None:
    written = parse(text)
    assert written is not None
    assert written.is_whole is whole


# In the box ---------------------------------------------------------------------------------------------------------------


async def test_a_slash_offers_every_command_with_what_follows_it_and_what_it_does(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
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
        await c.ready()
        await begin(c, "/hel")
        await c.pilot.press("enter")
        await c.until(lambda: c.prompt.text == "/help")
        assert offered(c) == []
        assert not isinstance(c.app.screen, HelpScreen)
        await c.pilot.press("backspace")
        await begin(c, "p")
        assert c.prompt.text == "/help"
        await c.pilot.press("enter")
        await c.until(lambda: isinstance(c.app.screen, HelpScreen), "the help")
        assert c.prompt.text == ""


async def test_enter_asks_for_what_has_to_follow_before_it_does_a_command(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
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
        await c.ready()
        await begin(c, "/new")
        assert c.prompt.completions.chosen == "new"
        await c.pilot.press("down", "enter")
        await c.until(lambda: c.prompt.text == "/newer")


async def test_who_types_faster_than_it_is_drawn_gets_what_was_written(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await begin(c, "/ne")
        assert c.prompt.completions.chosen == "new"
        c.prompt.insert("wer")
        await c.prompt.on_key(Key("enter", None))
        assert c.prompt.text == ""  # it was sent, not completed to /new
        await c.until(lambda: c.notices)


async def test_escape_closes_and_the_arrows_go_back_in_what_was_sent_again(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
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
        await c.ready()
        await c.pilot.press(*"/ti Keys", "home", "right", "right", "right")
        assert offered(c) == []
        await c.pilot.press("t")
        await c.until(lambda: offered(c) == ["title"])
        await c.pilot.press("tab")
        await c.until(lambda: c.prompt.text == "/title Keys")
        assert c.prompt.cursor_location == (0, len("/title "))


async def test_a_path_at_the_beginning_of_a_prompt_is_sent_as_it_is(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await c.pilot.press("/")
        await c.until(lambda: offered(c))
        await c.pilot.press(*"etc/hosts what is it")
        await c.until(lambda: not offered(c))
        await c.pilot.press("enter")
        await c.until(lambda: c.prompts == ["/etc/hosts what is it"])


async def test_a_pasted_command_is_not_completed(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await c.paste("/he")
        assert offered(c) == []
        await c.pilot.press("enter")
        await c.until(lambda: "There is no command /he" in c.notices)
        assert not c.prompts


async def test_in_a_message_that_is_edited_a_slash_is_text(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await c.ask("hi")
        c.app.chat.do("edit")
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
        await c.ready()
        await begin(c, "/he")
        await c.pilot.press("escape")
        assert offered(c) == []
        await c.pilot.press("l")
        await c.until(lambda: offered(c) == ["help"])
        await c.pilot.press("ctrl+k")
        assert offered(c) == []
        assert c.prompt.text == "/hel"


async def test_in_the_smallest_window_each_has_a_row_and_the_mouse_takes_one(chat: Start) -> None:
    async with chat("fast", size=(40, 12)) as c:
        await c.ready()
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


async def test_a_misspelt_command_stays_in_the_box_and_is_told_the_nearest(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await c.send("/titel Keys")
        said = "There is no command /titel; did you mean /title? F1 lists them. To send this as a prompt, put a space before it."
        await c.until(lambda: said in c.notices)
        assert c.prompt.text == "/titel Keys"
