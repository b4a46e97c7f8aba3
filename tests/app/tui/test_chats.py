"""Lists of chats and of versions: where they point while they change, rows that fit, and deleting."""

import asyncio
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from textual import events
from textual.app import App
from textual.widgets import Input, OptionList
from textual.widgets import Tree as TreeView
from textual.widgets.tree import TreeNode

from tests.app.conftest import PATIENCE_S, Chat, Start, text_on
from tokamac.app.backend.protocol import AskPrice, Request
from tokamac.app.chat.actions import Keymap
from tokamac.app.chat.conversation import Reply, Tree
from tokamac.app.chat.listing import ChatMatches, ChatSearch, date_of, group_of, plain_hit, without_marks
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.store.store import Store
from tokamac.app.store.values import Hit, StoredChat
from tokamac.app.text.sanitise import sanitise_line
from tokamac.app.tui.screens.chats import BranchesScreen, ChatsScreen, chat_row, fill, hit_row
from tokamac.engine.events import Price, Role

# The rows of the list of conversations fit the room there is, and what gives way does so in order.

ID = "0123456789ab"


def shown_by(screen: Any) -> Any:
    """Return what the list of chats shows."""
    return screen._shown


def chat(title: str, model: str = "org/model") -> StoredChat:
    """A chat of this title."""
    return StoredChat(ID, title, "words", 0.0, 0.0, model)


@pytest.mark.parametrize(
    ("room", "row"),
    [
        (80, f"  {'t' * 40}  5 minutes ago · model · {ID}"), (64, f"  {'t' * 23}…  5 minutes ago · model · {ID}"),
        (60, f"  {'t' * 35}…  model · {ID}"), (50, f"  {'t' * 25}…  model · {ID}"), (40, f"  {'t' * 23}…  {ID}"),
        (20, f"  {'t' * 17}…"),
    ],
)  # fmt: skip
def test_what_gives_way_to_a_long_title(room: int, row: str) -> None:
    assert chat_row(chat("t" * 40), is_open=False, seconds=300, room=room).plain == row


def test_a_chat_without_a_model_has_no_gap_where_its_name_would_be() -> None:
    row = chat_row(chat("Speed", model=""), is_open=False, seconds=300, room=60).plain
    assert row.strip() == f"Speed  5 minutes ago · {ID}"


def test_a_model_in_a_folder_is_named_by_the_folder() -> None:
    row = chat_row(chat("Speed", model="/models/mine/"), is_open=False, seconds=300, room=60).plain
    assert f" · mine · {ID}" in row


def test_a_row_tells_what_goes_on_in_its_chat_its_date_its_pin_and_its_folder() -> None:
    pinned = replace(chat("Speed"), pinned_at=1.0, folder="work")
    row = chat_row(pinned, is_open=True, seconds=300, room=90, date="14:05").plain
    assert row.startswith("● ★ work / Speed")
    assert row.endswith(f"5 minutes ago · 14:05 · model · {ID}")
    assert chat_row(pinned, is_open=False, seconds=300, room=90, folders=False).plain.startswith("  ★ Speed")
    for room in (90, 46, 40):
        assert "writing …" in chat_row(pinned, is_open=False, seconds=300, room=room, doing="writing …").plain


@pytest.mark.parametrize(
    ("at", "group", "date"),
    [
        ("2026-11-23 14:05", "Today", "14:05"), ("2026-11-22 23:59", "Yesterday", "Sun 23:59"),
        ("2026-11-17 08:00", "Last 7 days", "Tue 08:00"), ("2026-11-03 08:00", "Last 30 days", "3 Nov"),
        ("2026-05-03 08:00", "May 2026", "3 May"), ("2025-12-31 08:00", "December 2025", "2025-12-31"),
    ],
)  # fmt: skip
def test_chats_stand_under_their_day_with_a_date(at: str, group: str, date: str) -> None:
    now, then = (datetime.fromisoformat(each).timestamp() for each in ("2026-11-23 15:00", at))
    assert group_of(replace(chat("t"), updated_at=then), now) == group
    assert group_of(replace(chat("t"), updated_at=then, pinned_at=1.0), now) == "Pinned"
    assert date_of(then, now) == date


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("a **bold** word", "a bold word"),
        ("**Where** it, **really**.", "Where it, really."),
        ("# Title\n## Next", "Title\nNext"),
        ("2**3, a ** b and __init__", "2**3, a ** b and __init__"),
    ],
)
def test_lists_show_no_marks_of_bold_text_and_headings(text: str, plain: str) -> None:
    assert without_marks(text) == plain
    assert plain_hit(hit(text)).snippet == plain


def test_a_match_stays_marked_where_marks_of_bold_text_go() -> None:
    found = hit("the **weights** are", (6, 13))
    plain = plain_hit(found)
    assert [plain.snippet[begin:end] for begin, end in plain.marks] == ["weights"]
    assert "**" not in hit_row(found).plain


@given(st.text(min_size=1, max_size=90), st.integers(1, 200), st.booleans())
def test_a_row_never_needs_more_than_its_room(title: str, room: int, held: bool) -> None:
    row = chat_row(chat(title), is_open=held, seconds=9e4, room=room).plain
    assert "\n" not in row
    assert cell_len(row) <= max(room, 3)


def hit(snippet: str, *marks: tuple[int, int], role: Role = "user") -> Hit:
    """A message that was found."""
    return Hit(ID, "Speed", 1, role, 0.0, snippet, marks, 0, len(snippet))


@pytest.mark.parametrize(("role", "who"), [("user", "you: "), ("assistant", ""), ("system", "system: ")])
def test_a_hit_says_who_said_it(role: Role, who: str) -> None:
    said, _ = hit_row(hit("bandwidth", (0, 9), role=role)).plain.split("\n")
    assert said == f"  {who}bandwidth"


def test_the_match_is_seen_in_a_narrow_list() -> None:
    before = "many words before what was looked for: "
    said, where = hit_row(hit(before + "bandwidth\n\nand  after", (len(before), len(before) + 9))).plain.split("\n")
    assert said == f"  you: …{before[-24:]}bandwidth and after"
    assert where.strip() == "in Speed"


# The list of conversations while it changes: where it points, what it answers too late, and a title that is written
# in it.

FRUITS = ("apples", "pears", "plums", "quinces")  # as they are listed: the newest first


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A store that holds a chat about each fruit."""
    path, moments = tmp_path / "chats" / "chats.db", iter(range(100))
    with Store.open(path, clock=lambda: float(next(moments))) as store:
        for fruit in reversed(FRUITS):
            chat = store.new_chat().id
            store.add_message(chat, None, "user", fruit)
    return path


@dataclass(frozen=True)
class Slow(ChatSearch):
    """Answers each question when it is let to."""

    asked: list[str] = field(default_factory=list)
    answers: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def find(self, text: str, folder: str | None = None) -> ChatMatches:
        found = super().find(text, folder)
        self.asked.append(text)
        assert self.answers.acquire(timeout=PATIENCE_S)
        return found


def titles(file: Path, *, deleted: bool = False) -> list[str]:
    with Store.open(file) as store:
        return [chat.title for chat in store.chats(deleted=deleted)]


def rename(file: Path, was: str, title: str) -> None:
    with Store.open(file) as store:
        (chat,) = store.chats(was)
        store.rename(chat.id, title)


def rows(screen: ChatsScreen) -> list[str]:
    options = screen.query_one(OptionList).options
    return [str(option.prompt).split()[0] for option in options if not option.disabled]


def pointed(screen: ChatsScreen) -> str:
    option = screen.query_one(OptionList).highlighted_option
    return str(option.prompt).split()[0]


def point(screen: ChatsScreen, at: int) -> None:
    """Select the chat that is listed at this place, headings not counted."""
    listed = screen.query_one(OptionList)
    listed.highlighted = [index for index, option in enumerate(listed.options) if not option.disabled][at]


async def opened(c: Chat) -> ChatsScreen:
    """The list, all of it, by its key."""
    await c.ready()
    await c.pilot.press("ctrl+l")
    screen = c.app.screen
    assert isinstance(screen, ChatsScreen)
    await c.until(lambda: len(rows(screen)) == len(FRUITS))
    return screen


async def test_after_a_deletion_the_next_row_is_pointed_at(chat: Start, file: Path) -> None:
    async with chat("fast", size=(140, 40)) as c:
        screen = await opened(c)
        await c.pilot.press("down", "down", "ctrl+d")
        await c.until(lambda: rows(screen) == ["apples", "plums", "quinces"] and not screen.workers)
        assert pointed(screen) == "plums"
        await c.pilot.press("ctrl+d")
        await c.until(lambda: rows(screen) == ["apples", "quinces"] and not screen.workers)
        assert pointed(screen) == "quinces"
        assert sorted(titles(file, deleted=True)) == ["pears", "plums"]
        await c.pilot.press("ctrl+z")
        await c.until(lambda: rows(screen) == ["apples", "plums", "quinces"] and not screen.workers)
        assert pointed(screen) == "plums"


async def test_what_another_window_adds_is_listed_and_what_is_selected_stays_so(chat: Start, file: Path) -> None:
    async with chat("fast", size=(140, 40)) as c:
        screen = await opened(c)
        await c.pilot.press("down", "down")
        selected = pointed(screen)
        with Store.open(file) as other:
            other.add_message(other.new_chat().id, None, "user", "zucchini")
        await c.until(lambda: rows(screen)[0] == "zucchini")
        assert (len(rows(screen)), pointed(screen)) == (len(FRUITS) + 1, selected)


async def test_two_deletions_before_the_store_answers_are_of_two_chats(chat: Start, file: Path) -> None:
    async with chat("fast", size=(140, 40)) as c:
        screen = await opened(c)
        point(screen, 1)
        screen.action_delete()
        screen.action_delete()
        assert sorted(titles(file, deleted=True)) == ["pears", "plums"]
        await c.pilot.press("ctrl+z", "ctrl+z")
        await c.until(lambda: rows(screen) == list(FRUITS))
        assert titles(file, deleted=True) == []


async def test_what_is_typed_points_at_what_fits_first(chat: Start, file: Path) -> None:
    async with chat("fast", size=(140, 40)) as c:
        screen = await opened(c)
        point(screen, 3)
        await c.pilot.press("p")
        await c.until(lambda: rows(screen) == ["apples", "pears", "plums"])
        assert pointed(screen) == "apples"


async def test_an_answer_from_before_a_deletion_does_not_list_the_chat_again(chat: Start, file: Path) -> None:
    async with chat("fast", size=(140, 40)) as c:
        slow = Slow(file)
        screen = ChatsScreen(slow, None, Keymap())
        await c.app.push_screen(screen)
        await c.until(lambda: slow.asked == [""])
        slow.answers.release()
        await c.until(lambda: rows(screen) == list(FRUITS))
        screen.find("")
        await c.until(lambda: len(slow.asked) == 2)
        screen.action_delete()
        await c.until(lambda: len(slow.asked) == 3)
        seen = list[list[str]]()
        slow.answers.release(2)
        await c.until(lambda: seen.append(rows(screen)) or not screen.workers)
        assert seen
        assert all(each == list(FRUITS[1:]) for each in seen)


async def test_a_list_that_is_being_closed_is_neither_drawn_again_nor_answered(chat: Start, file: Path) -> None:
    async with chat("fast") as c:
        screen = await opened(c)
        await screen.query(OptionList).remove()  # the parts of a screen that is left go first
        screen.post_message(events.Resize(screen.size, screen.size))
        screen.find("")
        await c.until(lambda: not screen.workers)
        await c.closed()
        assert await c.ask("and on it goes")


NAMING = "Enter saves · Esc cancels"


async def test_the_border_and_the_keys_are_those_of_the_title_that_is_written(chat: Start, file: Path) -> None:
    async with chat("fast", size=(140, 40)) as c:
        screen = await opened(c)
        await c.pilot.press("ctrl+d")
        await c.until(lambda: rows(screen) == list(FRUITS[1:]))
        await c.pilot.press("ctrl+e")
        box = screen.query_one(Input)
        assert (box.value, screen.query_one(".box").border_subtitle) == ("pears", NAMING)
        await c.pilot.press("ctrl+z", "home", "ctrl+d", "ctrl+e", *"es")
        assert (box.value, titles(file, deleted=True)) == ("earses", ["apples"])
        await c.pilot.press("escape")
        assert str(screen.query_one(".box").border_subtitle).startswith("Enter opens · ")
        await c.pilot.press("ctrl+z")
        await c.until(lambda: rows(screen) == list(FRUITS))


async def test_a_title_that_is_refused_stays_to_be_written_and_it_is_told_why(chat: Start, file: Path) -> None:
    async with chat("fast", size=(140, 40)) as c:
        screen = await opened(c)
        with sqlite3.connect(file) as database:
            refusal = "BEFORE UPDATE OF title ON chats BEGIN SELECT RAISE(ABORT, 'no title today'); END"
            database.execute(f"CREATE TRIGGER refused {refusal}")
        await c.pilot.press("ctrl+e", *" red", "enter")
        await c.until(lambda: not screen.workers)
        assert "no title today" in c.screen_text()
        assert (screen.query_one(Input).value, titles(file)) == ("apples red", list(FRUITS))
        with sqlite3.connect(file) as database:
            database.execute("DROP TRIGGER refused")
        await c.pilot.press("enter")
        await c.until(lambda: not screen.workers)
        assert titles(file) == ["apples red", *FRUITS[1:]]
        assert screen.query_one(Input).value == ""
        assert "no title today" not in c.screen_text()


async def test_a_foreign_title_is_made_safe_to_be_written_on(chat: Start, file: Path) -> None:
    rename(file, "apples", "apples\x1b[31m red\u202e")
    async with chat("fast", size=(140, 40)) as c:
        await opened(c)
        await c.pilot.press("ctrl+e")
        value = c.app.screen.query_one(Input).value
        assert value == sanitise_line("apples\x1b[31m red\u202e")
        assert "\x1b" not in value


async def test_a_system_message_is_found_and_the_chat_opens_where_it_stands(chat: Start, file: Path) -> None:
    with Store.open(file) as store:
        (about,) = store.chats("pears")
        store.add_message(about.id, about.head, "assistant", "They grow. " * 400)
        system = store.add_message(about.id, store.chat(about.id).head, "system", "Be a walrus.")
        store.add_message(about.id, system.id, "user", "more")
        store.add_message(about.id, store.chat(about.id).head, "assistant", "They grow still. " * 400)
    async with chat("fast", size=(100, 30)) as c:
        screen = await opened(c)
        await c.pilot.press(*"walrus")
        await c.until(lambda: rows(screen) == ["system:"])
        await c.pilot.press("enter")
        await c.until(lambda: c.prompts == ["pears", "more"] and "Be a walrus." in c.screen_text())


# The tree of a conversation: versions below each other, the path that is read marked, and Enter goes to another.


def outline(node: TreeNode[int], depth: int = 0) -> list[str]:
    """Every line below ``node``, indented."""
    lines = []
    for child in node.children:
        lines += [" " * depth + str(child.label), *outline(child, depth + 1)]
    return lines


def talk(*said: str) -> Tree:
    """A conversation of one path: a prompt, a reply, and so on."""
    tree = Tree()
    for number, text in enumerate(said):
        if number % 2 == 0:
            tree.ask(text, tree.head)
        else:
            tree.end(tree.answer(tree.head or 0).key, Reply(text, model="org/m"))
    return tree


def test_versions_stand_below_each_other_with_what_follows_inside() -> None:
    tree = talk("a", "b", "c", "d")
    edited = tree.ask("c, but better", 2)
    tree.end(tree.answer(edited.key).key, Reply("e", model="m"))
    tree.end(tree.answer(edited.key).key, Reply("", ending="cancelled"))
    view: TreeView[int] = TreeView("")
    fill(view.root, tree)
    assert outline(view.root) == [
        "● you  a",
        "● m  b",
        "○ you ‹1 of 2›  c",
        " ○ m  d",
        "● you ‹2 of 2›  c, but better",
        " ○ m ‹1 of 2›  e",
        " ● reply ‹2 of 2›  stopped",
    ]


def test_foreign_text_is_one_safe_line_and_no_markup() -> None:
    view: TreeView[int] = TreeView("")
    fill(view.root, talk("[red]x[/]\n\x1b[2Jy \u202e" + "long " * 100, "z"))
    first = outline(view.root)[0]
    assert first.startswith("● you  [red]x[/] \ufffdy \ufffdlong long")
    assert first.endswith("…")
    assert len(first) < 80


def test_a_thousand_versions_deep_is_no_matter() -> None:
    tree = Tree()
    for _ in range(1500):
        parent = tree.head
        tree.ask("other", parent)
        tree.ask("read", parent)
    view: TreeView[int] = TreeView("")
    assert len(fill(view.root, tree)) == 3000


async def test_enter_goes_to_the_path_and_escape_to_none(chat: Start) -> None:
    async with chat("fast", size=(100, 40)) as c:
        await c.pilot.press("f6")
        await c.until(lambda: "There are no messages yet" in c.notices)
        await c.ask("one")
        await edited(c, "one", "one, but better")
        await c.opened("f6", BranchesScreen)
        for row in ("○ you ‹1 of 2› · nothing to re-read  one", "● you ‹2 of 2› · nothing to re-read  one, but better"):
            await c.until(lambda row=row: row in c.screen_text(), row)
        await c.until(lambda: pointed_branches(c) == c.session.conversation.tree.head)
        await c.pilot.press("escape")
        assert [turn.prompt for turn in c.session.turns] == ["one, but better"]
        await c.send("/branches")
        await c.until(
            lambda: isinstance(c.app.screen, BranchesScreen) and pointed_branches(c) == c.session.conversation.tree.head
        )
        await c.pilot.press("up", "up", "enter")
        await c.until(lambda: [turn.prompt for turn in c.session.turns] == ["one"])
        assert c.transcript.selected == c.session.turns[0].reply_key


async def test_each_version_says_what_going_on_there_would_take_and_so_does_the_line_of_a_message(chat: Start) -> None:
    long = "word " * 799 + "word"  # a thousand of the scripted tokens
    async with chat("fast", size=(120, 40)) as c:
        await c.ask(long)
        await edited(c, long, "short")
        await c.pilot.press("f6")
        await c.until(
            lambda: "● you ‹2 of 2› · nothing to re-read  short" in c.screen_text(),
            "the price of the path that is read",
        )
        await c.until(lambda: "tokens to read again, about" in c.screen_text(), "the price of the other")
        (other,) = (row for row in c.screen_text().splitlines() if "‹1 of 2›" in row)
        assert re.search(r"○ you ‹1 of 2› · (9\d\d|1,0\d\d) tokens to read again, about 1\.\d s  word", other)
        await c.closed()
        await c.pilot.press("tab")
        hints = r"edit: ≤\d+ · fork: 0 · other version: (9\d\d|1\.0\dk)"  # in tokens: in words they have no room
        await c.until(lambda: re.search(hints, c.screen_text()), "the hints of a message")


async def test_a_path_that_is_no_version_has_no_price_and_versions_out_of_view_are_not_asked_about() -> None:
    asked: list[list[int]] = []

    def pricing(keys: Sequence[int]) -> dict[int, Price]:
        asked.append(list(keys))
        return {key: Price(20, 2, 0, None) for key in keys}

    tree = talk("a", "b")
    for number in range(60):
        tree.ask(f"version {number}", 2)
    async with App[None]().run_test(size=(100, 24)) as pilot:
        await pilot.app.push_screen(BranchesScreen(tree, pricing))
        await until(lambda: bool(asked) and tree.head in asked[-1])  # the cursor stands there, at the end
        assert len(asked[-1]) <= 24
        assert not {1, 2, 3} & set(asked[-1])
        await pilot.press("home")
        await until(lambda: 3 in asked[-1])
        assert tree.head not in asked[-1]
        assert "● m · nothing to re-read" not in screen_text(pilot.app)
        assert "○ you ‹1 of 60› · nothing to re-read  version 0" in screen_text(pilot.app)


async def test_while_a_reply_is_written_no_price_is_asked_for(chat: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []
    async with chat("slow", size=(120, 40), ready=False) as c:
        bridge = c.app.chat.bridge
        ask = bridge.ask
        monkeypatch.setattr(bridge, "ask", lambda request: (asked.append(request), ask(request)))
        await c.phase(EnginePhase.IDLE)
        await c.send("one")
        await stopped(c)
        await written_anew(c, "one", "two")
        await stopped(c)
        await c.send("three")
        await c.phase(EnginePhase.DECODING)
        asked.clear()
        await c.pilot.press("f6")
        await c.until(lambda: "○ you ‹1 of 2›  one" in c.screen_text())
        screen = c.app.screen
        assert isinstance(screen, BranchesScreen)
        screen._look()  # as it does now and then
        assert c.session.engine.phase is EnginePhase.DECODING
        assert not any(isinstance(request, AskPrice) for request in asked)
        await stopped(c)
        await c.until(lambda: "○ you ‹1 of 2› · " in c.screen_text(), "it is asked for once the reply has ended")
        assert any(isinstance(request, AskPrice) for request in asked)


def screen_text(app: App[None]) -> str:
    return text_on(app.screen)


async def until(condition: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < PATIENCE_S
        await asyncio.sleep(0.02)


def pointed_branches(c: Chat) -> int | None:
    views = c.app.screen.query(TreeView)  # none until the screen, which is on top at once, has its parts
    node = views.first().cursor_node if views else None
    return None if node is None else node.data


async def edited(c: Chat, old: str, new: str) -> None:
    """Write the last prompt anew, and wait for its reply."""
    await written_anew(c, old, new)
    await c.phase(EnginePhase.IDLE)


async def written_anew(c: Chat, old: str, new: str) -> None:
    """Write the last prompt anew."""
    await c.pilot.press("tab", "up", "e", "enter")
    await c.until(lambda: c.prompt.text == old)
    c.prompt.text = new
    await c.pilot.press("enter")
    await c.until(lambda: c.session.turns[-1].prompt == new)


async def stopped(c: Chat) -> None:
    """Stop the reply once it is being written, and wait for its end."""
    await c.phase(EnginePhase.DECODING)
    c.app.chat.perform(c.session.stop())
    await c.phase(EnginePhase.IDLE)


# Chats deleted and brought back by commands: the open one, too, and after the list was closed.


def deleted(c: Chat) -> list[str]:
    """The titles of the chats that are deleted, as another program reads them."""
    with Store.open(c.recording.store.file) as store:
        return sorted(chat.title for chat in store.chats(deleted=True))


def kept(c: Chat) -> list[str]:
    with Store.open(c.recording.store.file) as store:
        return sorted(chat.title for chat in store.chats())


async def test_while_a_reply_runs_its_chat_is_not_deleted_and_another_is(chat: Start) -> None:
    async with chat("slow") as c:
        await c.ask("about apples")
        first = c.held
        await c.pilot.press("ctrl+n")
        await c.send("about pears")
        await c.phase(EnginePhase.DECODING)
        await c.send("/delete")
        await c.until(lambda: "A reply is running: wait, or stop it with Esc, then delete." in c.notices)
        await c.send(f"/delete {first}")
        await c.until(lambda: deleted(c) == ["about apples"])
        assert c.prompts == ["about pears"]  # what runs goes on
        await c.pilot.press("escape")


async def test_while_a_prompt_is_queued_its_chat_is_not_deleted(chat: Start) -> None:
    why = "A prompt is queued in this chat: wait, or take it back with Up, then delete."
    async with chat("fast", size=(140, 40)) as c:
        await c.ask("about apples")
        c.session.engine.enter(EnginePhase.LOADING)
        await c.send("and pears")
        await c.until(lambda: [draft.text for draft in c.session.queued] == ["and pears"], "the queued prompt")
        await c.send("/delete")
        await c.until(lambda: why in c.notices)
        screen = await c.opened("ctrl+l", ChatsScreen)
        await c.until(lambda: len(rows(screen)) == 1)
        screen.action_delete()
        await c.until(lambda: c.notices.count(why) == 2)
        await c.pilot.press("escape", "up")
        assert (c.prompt.text, c.session.queued) == ("and pears", [])
        c.app.view.do("delete_chat")
        assert (deleted(c), kept(c), c.prompts) == (["about apples"], [], [])


async def test_without_a_store_there_is_nothing_to_delete_or_to_bring_back(chat: Start, tmp_path: Any) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    async with chat("fast", store_path=blocked / "chats.db", ready=False) as c:
        await c.until(lambda: "Chats are not saved" in c.notices)
        for action in ("delete_chat", "restore_chat"):
            c.app.clear_notifications()
            c.app.view.do(action)
            await c.until(lambda: "Chats are not saved in this session" in c.notices)


# The open chat deleted in the list of chats: what Ctrl+D does there, and how it comes back.


def rows_delete_listed(c: Chat) -> list[str]:
    lists = c.app.screen.query(OptionList)
    return [str(option.prompt) for option in lists.first().options if not option.disabled] if lists else []


def pointed_delete_listed(c: Chat) -> str:
    option = c.app.screen.query_one(OptionList).highlighted_option
    return str(option.prompt)


async def listed(c: Chat, *prompts: str) -> None:
    """Hold a chat about each prompt, the last one open, and list them: the newest first."""
    await c.ready()
    for prompt in prompts:
        if c.prompts:
            await c.pilot.press("ctrl+n")
        await c.ask(prompt)
    await c.pilot.press("ctrl+l")
    await c.until(lambda: isinstance(c.app.screen, ChatsScreen) and len(rows_delete_listed(c)) == len(prompts))


async def test_the_open_chat_is_deleted_in_the_list_for_a_new_one_and_comes_back(chat: Start) -> None:
    async with chat("fast", size=(100, 30), ready=False) as c:
        await listed(c, "apples", "pears")
        assert "● pears" in rows_delete_listed(c)[0]
        await c.pilot.press("ctrl+d")
        await c.until(lambda: len(rows_delete_listed(c)) == 1)
        assert "apples" in pointed_delete_listed(c)
        assert (deleted(c), kept(c), c.held, c.prompts) == (["pears"], ["apples"], None, [])
        said = "Deleted: pears. This is a new chat. Ctrl+Z, or /restore once the list is closed, restores the old one."
        assert said in c.notices
        await c.pilot.press("ctrl+z")
        await c.until(lambda: len(rows_delete_listed(c)) == 2 and not c.app.screen.workers)
        assert "pears" in pointed_delete_listed(c)
        assert "●" not in "".join(rows_delete_listed(c))  # the new one is open
        await c.pilot.press("enter")
        await c.until(lambda: c.prompts == ["pears"])
        assert deleted(c) == []


async def test_what_was_not_sent_stays_with_it_and_restore_brings_both_back(chat: Start) -> None:
    async with chat("fast", size=(100, 30)) as c:
        await c.ask("apples")
        await c.type("a thought about")
        await c.pilot.press("ctrl+l")
        await c.until(lambda: len(rows_delete_listed(c)) == 1)
        await c.pilot.press("ctrl+d")
        await c.until(lambda: rows_delete_listed(c) == [] and deleted(c) == ["apples"])
        await c.closed()
        assert c.prompt.text == ""
        await c.send("/restore")
        await c.until(lambda: c.prompts == ["apples"])
        assert c.prompt.text == "a thought about"


async def test_where_not_all_of_it_could_be_saved_it_stays(chat: Start) -> None:
    async with chat("fast", size=(100, 30), ready=False) as c:
        await listed(c, "apples")
        await c.pilot.press("escape")
        c.refuse_writes()
        await c.ask("and pears")
        await c.pilot.press("ctrl+l")
        await c.until(lambda: len(rows_delete_listed(c)) == 1)
        await c.pilot.press("ctrl+d")
        await c.until(lambda: "that part is lost" in c.notices)
        assert (deleted(c), c.prompts, len(rows_delete_listed(c))) == ([], ["apples", "and pears"], 1)
        c.refuse_writes(refused=False)


async def test_chats_are_pinned_and_put_into_folders_in_the_list(chat: Start, file: Path) -> None:
    async with chat("fast", size=(140, 40)) as c:
        screen = await opened(c)
        assert str(screen.query_one(OptionList).options[0].prompt) == "January 1970"
        point(screen, 2)
        third = pointed(screen)
        await c.pilot.press("ctrl+k")
        await c.until(lambda: str(screen.query_one(OptionList).options[0].prompt) == "Pinned" and not screen.workers)
        assert third in str(screen.query_one(OptionList).options[1].prompt)
        point(screen, 0)
        await c.pilot.press("ctrl+f", *"work", "enter")
        await c.until(lambda: "work / " in str(screen.query_one(OptionList).options[1].prompt))
        await c.pilot.press("ctrl+y")
        await c.until(lambda: len(rows(screen)) == 1)
        assert "Folder: work" in c.screen_text()
        await c.pilot.press("ctrl+y")
        await c.until(lambda: len(rows(screen)) == len(FRUITS))
        with Store.open(file) as store:
            (pinned,) = [each for each in store.chats() if each.pinned_at is not None]
            assert (pinned.title.split()[0], pinned.folder, store.folders()) == (third, "work", [("work", 1)])


async def test_the_title_is_not_shown_above_the_prompt_that_it_repeats(chat: Start) -> None:
    async with chat("fast", size=(60, 16)) as c:
        await c.send("Why is decode slow?")
        await c.until(lambda: c.transcript.max_scroll_y, "a reply that is longer than the screen")
        await c.until(lambda: c.screen_text().count("Why is decode slow?") == 1, "the title, of a prompt out of sight")
        c.app.view.do("scroll_top")
        await c.until(lambda: not c.transcript.scroll_y, "the first prompt")
        await c.until(lambda: c.screen_text().count("Why is decode slow?") == 1, "the prompt alone")
        await c.send("/title Speed of decode")
        await c.until(lambda: "Speed of decode" in c.screen_text())


async def test_a_reply_in_the_background_is_marked_and_its_chat_not_deleted(chat: Start) -> None:
    async with chat("slow", size=(120, 30)) as c:
        await c.send("about apples")
        await c.until(lambda: c.held)
        first = c.held
        await c.pilot.press("ctrl+n", "ctrl+l")
        await c.until(lambda: "writing …" in c.screen_text(), "the mark")
        await c.pilot.press("ctrl+d")
        await c.until(lambda: "A reply is running or queued in this chat" in c.notices)
        assert c.recording.store.chat(first).deleted_at is None


async def test_a_folder_is_folded_and_unfolded_and_stays_so_until_the_app_quits(chat: Start, file: Path) -> None:
    with Store.open(file) as store:
        inside = [store.move(each.id, "work").title.split()[0] for each in store.chats()[1:3]]
    async with chat("fast", size=(100, 40)) as c:
        screen = await c.opened("ctrl+l", ChatsScreen)
        await c.until(lambda: len(rows(screen)) == len(FRUITS) + 1)

        def listed() -> list[str]:
            return [str(option.prompt).rstrip() for option in screen.query_one(OptionList).options]

        assert listed()[0] == "▾ work"
        assert [row.split()[0] for row in listed()[1:3]] == inside
        assert "Left and Right fold one" in c.screen_text()
        newest = shown_by(screen).chats[0]
        assert screen._entry() == newest  # the first chat, not the first row
        await c.pilot.press("left")  # it is in no folder
        assert listed()[0] == "▾ work"
        point(screen, 1)
        await c.pilot.press("left")
        assert listed()[0] == "▸ work (2)"
        assert len(rows(screen)) == len(FRUITS) - 2 + 1
        await c.pilot.press("escape")
        screen = await c.opened("ctrl+l", ChatsScreen)
        await c.until(lambda: listed()[:1] == ["▸ work (2)"], "the list again")
        point(screen, 0)
        await c.pilot.press("enter")
        assert listed()[0] == "▾ work"
        await c.pilot.press("left", "right")
        assert listed()[0] == "▾ work"
        await c.pilot.press(*"work")
        await c.until(lambda: shown_by(screen).text == "work", "the search")
        await c.pilot.press("left", "x")  # in the line to type in
        assert screen.query_one(Input).value == "worxk"
