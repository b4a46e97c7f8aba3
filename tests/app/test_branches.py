"""The tree of a conversation: versions below each other, the path that is read marked, and Enter goes to another."""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from textual.app import App
from textual.widgets import Tree as TreeView
from textual.widgets.tree import TreeNode

from tests.app.conftest import PATIENCE_S, Chat
from tokamac.app.backend.protocol import AskPrice, Request
from tokamac.app.chat.conversation import Reply, Tree
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.tui.screens.chats import BranchesScreen, fill
from tokamac.engine.events import Price

Start = Callable[..., Any]


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


def test_one_path_is_one_column() -> None:
    view: TreeView[int] = TreeView("")
    fill(view.root, talk("a", "b", "c", "d"))
    assert outline(view.root) == ["● you  a", "● m  b", "● you  c", "● m  d"]


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
        await c.phase(EnginePhase.IDLE)
        await c.pilot.press("f6")
        await c.until(lambda: "There are no messages yet" in c.notices)
        await c.ask("one")
        await edited(c, "one", "one, but better")
        await c.pilot.press("f6")
        await c.until(lambda: isinstance(c.app.screen, BranchesScreen))
        await c.until(lambda: "○ you ‹1 of 2› · ready  one" in c.screen_text())
        assert "● you ‹2 of 2› · ready  one, but better" in c.screen_text()
        await c.until(lambda: pointed(c) == c.session.conversation.tree.head)
        await c.pilot.press("escape")
        assert [turn.prompt for turn in c.session.turns] == ["one, but better"]
        await c.send("/branches")
        await c.until(
            lambda: isinstance(c.app.screen, BranchesScreen) and pointed(c) == c.session.conversation.tree.head
        )
        await c.pilot.press("up", "up", "enter")
        await c.until(lambda: [turn.prompt for turn in c.session.turns] == ["one"])
        assert c.transcript.selected == c.session.turns[0].reply_key


async def test_each_version_says_what_going_on_there_would_take_and_so_does_the_line_of_a_message(chat: Start) -> None:
    long = "word " * 799 + "word"  # a thousand of the scripted tokens
    async with chat("fast", size=(120, 40)) as c:
        await c.phase(EnginePhase.IDLE)
        await c.ask(long)
        await edited(c, long, "short")
        await c.pilot.press("f6")
        await c.until(lambda: "● you ‹2 of 2› · ready  short" in c.screen_text(), "the price of the path that is read")
        await c.until(lambda: "tokens to read again, about" in c.screen_text(), "the price of the other")
        (other,) = (row for row in c.screen_text().splitlines() if "‹1 of 2›" in row)
        assert re.search(r"○ you ‹1 of 2› · (9\d\d|1,0\d\d) tokens to read again, about 1\.\d s  word", other)
        await c.pilot.press("escape")
        await c.until(lambda: c.app.screen is c.app.chat)
        await c.pilot.press("tab")
        await c.until(lambda: "fork: ready · other version: " in c.screen_text(), "the hints of a message")
        assert re.search(r"edit: ≤\d+ · fork: ready · other version: (9\d\d|1\.0\dk)", c.screen_text())


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
        assert "● m · ready" not in screen_text(pilot.app)
        assert "○ you ‹1 of 60› · ready  version 0" in screen_text(pilot.app)


async def test_while_a_reply_is_written_no_price_is_asked_for(chat: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []
    async with chat("slow", size=(120, 40)) as c:
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


@pytest.mark.parametrize("size", [(20, 5), (40, 12), (250, 80)])
async def test_any_size_works(chat: Start, size: tuple[int, int]) -> None:
    async with chat("fast", size=size) as c:
        await c.phase(EnginePhase.IDLE)
        c.app.chat.perform(c.session.submit("hi"))
        await c.until(lambda: c.session.turns and c.session.turns[-1].reply)
        await c.pilot.press("f6")
        await c.until(lambda: isinstance(c.app.screen, BranchesScreen))
        await c.pilot.press("escape")
        await c.until(lambda: c.app.screen is c.app.chat)


def screen_text(app: App[None]) -> str:
    return "\n".join("".join(s.text for s in row) for row in app.screen._compositor.render_strips(app.screen.size))


async def until(condition: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < PATIENCE_S
        await asyncio.sleep(0.02)


def pointed(c: Chat) -> int | None:
    views = c.app.screen.query(TreeView)  # none until the screen, which is on top at once, has its parts
    node = views.first().cursor_node if views else None
    return None if node is None else node.data


async def edited(c: Chat, old: str, new: str) -> None:
    """Write the last prompt anew, and wait for its reply."""
    await written_anew(c, old, new)
    await c.phase(EnginePhase.IDLE)


async def written_anew(c: Chat, old: str, new: str) -> None:
    """Write the last prompt anew."""
    await c.pilot.press("tab", "up", "e")
    await c.until(lambda: c.prompt.text == old)
    c.prompt.text = new
    await c.pilot.press("enter")
    await c.until(lambda: c.session.turns[-1].prompt == new)


async def stopped(c: Chat) -> None:
    """Stop the reply once it is being written, and wait for its end."""
    await c.phase(EnginePhase.DECODING)
    c.app.chat.perform(c.session.stop())
    await c.phase(EnginePhase.IDLE)
