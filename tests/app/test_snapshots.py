"""Every screen as it is drawn, row by row and style by style, against what was drawn before (see album.py).

What is shown is fixed: a stored conversation with figures, on the scripted engine.
"""

import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from textual.command import CommandList, CommandPalette
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Input, OptionList, Select, TabbedContent

from tests.app.album import SIZES, THEMES, Album, colours, figures, nothing_of_this_machine, resized, written
from tests.app.conftest import Chat
from tests.scripted_engine import CHIP, PACE, SITUATION, WORK
from tokamac.app.chat.attachments import Draft
from tokamac.app.chat.conversation import Reply
from tokamac.app.chat.figures import FIGURES, explain
from tokamac.app.chat.recording import measured
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.store.store import Store
from tokamac.app.tui.screens.figure import FigureScreen
from tokamac.app.tui.widgets.gauges import Gauges
from tokamac.engine.perf.diagnosis import diagnose

Start = Callable[..., Any]
DAY_S = 86400.0
ANSWER = """Decode reads **every weight once per token**.

1. Prefill: *bound by arithmetic*.
2. Decode: *bound by bandwidth*.

```python
ceiling_tps = bandwidth_gbs * 1e9 / bytes_per_step
```

| phase | bound by |
| --- | --- |
| prefill | arithmetic |
| decode | `bandwidth` |

> The first question is which phase was slow.
"""


@pytest.fixture
def fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chats, one of them with two versions of a prompt, and nothing of this machine."""
    nothing_of_this_machine(tmp_path, monkeypatch)
    files = tmp_path / "files"
    (files / "notes").mkdir(parents=True)
    for name in ("answers.md", "notes/april.txt", "notes/may.txt", "roofline.py"):
        (files / name).write_text("Decode is bound by bandwidth.\n" * 40)
    monkeypatch.chdir(files)
    metrics = figures()
    reply = measured(Reply("", metrics=metrics, diagnosis=diagnose(metrics, WORK, CHIP, PACE, SITUATION)))
    with Store.open(tmp_path / "chats" / "chats.db", clock=lambda: time.time() - 3.5 * DAY_S) as store:
        for prompts in (("What is a cache?",), ("What is decode?", "Why is decode slow?")):
            chat = store.new_chat(model="org/fast")
            for prompt in prompts:
                asked = store.add_message(chat.id, None, "user", prompt)
                begun = store.begin_reply(chat.id, asked.id, model="org/fast")
                store.finish_reply(begun.id, ANSWER, "Which phase?", metrics=reply)


# What is done before a picture is taken -----------------------------------------------------------------------------------


async def nothing(_: Chat) -> None:
    """What is open is what is wanted."""


async def pointed(c: Chat) -> None:
    """Point at the last message, and wait for what making it again would take."""
    await c.pilot.press("tab")
    await c.until(lambda: c.session.prices.known, "a price")


async def editing(c: Chat) -> None:
    """Write the prompt anew."""
    c.app.chat.do("edit")
    await c.until(lambda: c.app.chat.composer.editing is not None, "the edit")


async def offered(c: Chat) -> None:
    """Begin to name a file."""
    c.app.chat.do("stop")  # which gives the edit up
    await c.type("Compare ")
    await c.pilot.press("@", "a")
    await c.until(lambda: c.prompt.completions.display, "files")


async def attached(c: Chat) -> None:
    """Attach the first that is offered."""
    await c.pilot.press("enter")
    await c.until(lambda: c.prompt.attachments, "a file")


async def gauged(c: Chat) -> None:
    """Point at a figure of the side panel."""
    c.app.chat.do("gauges")
    await c.until(lambda: c.app.chat.query_one(Gauges).selected is not None, "a figure")
    await c.pilot.press("down", "down")


async def explained(c: Chat) -> None:
    """Explain the figure that has most behind it."""
    explained = [explain(each, c.session) for each in FIGURES]
    await c.app.push_screen(FigureScreen(explained, FIGURES.index("ceiling")))


async def at_its_end(c: Chat) -> None:
    """Scroll what is open down."""
    c.app.screen.query_one(VerticalScroll).scroll_end(animate=False)


async def refused(c: Chat) -> None:
    """Write what no setting can be."""
    c.app.screen.query_one("#top_p", Input).value = "7"
    await c.pilot.press("enter")
    await c.until(lambda: c.app.screen.query_one("#problem").display, "the reason")


async def taken(c: Chat) -> None:
    """Take a system prompt of the library."""
    library = c.app.screen.query_one("#library", OptionList)
    library.focus()
    library.highlighted = 1
    await c.pilot.press("enter")


async def found(c: Chat) -> None:
    """Look for what was said."""
    c.app.screen.query_one(Input).value = "bandwidth"
    await c.until(lambda: c.app.screen.query_one(OptionList).option_count, "what was said")


async def renamed(c: Chat) -> None:
    """Ask for another title."""
    c.app.screen.query_one(Input).value = ""
    await c.until(lambda: c.app.screen.query_one(OptionList).option_count == 2, "all chats")
    await c.pilot.press("ctrl+e")


async def priced(c: Chat) -> None:
    """Wait until the versions have their prices."""
    await c.until(lambda: len(re.findall("· ready|to read again", c.screen_text())) == 2, "two prices")


async def asked_elsewhere(c: Chat) -> None:
    """Ask about a model of the catalogue on a chip of the table: arithmetic that is the same on every machine."""
    screen = c.app.screen
    screen.query_one("#chip", Select).value = "Apple M4 Max|40"
    screen.query_one("#memory", Input).value = "64"
    screen.query_one("#model", Input).value = "Qwen3-8B-4bit"
    await c.until(lambda: screen.query_one("#case-table", DataTable).row_count > 3, "cases")


def turned(tab: str) -> Callable[[Chat], Awaitable[None]]:
    """Another side of the same answer."""

    async def turn(c: Chat) -> None:
        c.app.screen.query_one(TabbedContent).active = tab

    return turn


async def on_every_chip(c: Chat) -> None:
    """Ask of all chips of the table."""
    await turned("chips")(c)
    await c.until(lambda: c.app.screen.query_one("#chip-table", DataTable).row_count > 3, "chips")


async def commands(c: Chat) -> None:
    """Wait for what the palette offers."""
    await c.until(lambda: isinstance(c.app.screen, CommandPalette), "the palette")
    await c.until(lambda: c.app.screen.query_one(CommandList).option_count > 10, "commands")


async def typed(c: Chat) -> None:
    """Name a model that is not here: what else the picker lists is of this machine; filtered, none of that is left."""
    await c.pilot.press(*"org/x")


@dataclass(frozen=True)
class Scene:
    """A picture: the action that opens its screen over the conversation, and no other; what is done there then.

    on: it goes on from the scene before. least: the columns that it needs. points: whether there is something to point at, by more
    than a sign beside it.
    """

    name: str
    action: str = ""
    do: Callable[[Chat], Awaitable[None]] = nothing
    on: bool = False
    least: int = 0
    points: bool = True


SCENES = (
    Scene("chat"),
    Scene("chat-message", do=pointed, points=False),
    Scene("chat-edit", do=editing, on=True),
    Scene("chat-files", do=offered, on=True),
    Scene("chat-attached", do=attached, on=True),
    Scene("chat-gauges", do=gauged, least=100),
    Scene("figure", do=explained, points=False),
    Scene("help", "help", points=False),
    Scene("help-end", do=at_its_end, on=True, points=False),
    Scene("explain", "explain", points=False),
    Scene("explain-end", do=at_its_end, on=True, points=False),
    Scene("settings", "settings"),
    Scene("settings-end", do=at_its_end, on=True),
    Scene("settings-refused", do=refused, on=True),
    Scene("system", "system_prompt"),
    Scene("system-taken", do=taken, on=True),
    Scene("chats", "chats"),
    Scene("chats-found", do=found, on=True),
    Scene("chats-rename", do=renamed, on=True),
    Scene("branches", "branches", priced),
    Scene("what-if", "what_if", asked_elsewhere),
    Scene("what-if-curve", do=turned("curve"), on=True, points=False),
    Scene("what-if-roof", do=turned("roof"), on=True, points=False),
    Scene("what-if-chips", do=on_every_chip, on=True),
    Scene("palette", "palette", commands),
)
MODEL = Scene("model", "choose_model", typed)
"""The last one: it has the engine's process weigh the whole catalogue."""


async def tidied(c: Chat) -> None:
    """Nothing is open, nothing is written, and the end of the conversation is read."""
    if c.app.screen is not c.app.chat:
        await c.app.pop_screen()
    c.prompt.put(Draft())
    c.prompt.focus()
    c.app.chat.do("scroll_end")


async def opened(c: Chat, scene: Scene) -> None:
    """Open what is wanted, and do what is to be done there."""
    if not scene.on:
        await tidied(c)
    if scene.action:
        c.app.chat.do(scene.action)
        await c.until(lambda: c.app.screen is not c.app.chat, scene.name)
    await scene.do(c)


async def pictures(c: Chat, album: Album, *sizes: tuple[int, int]) -> None:
    """Every screen at these sizes."""
    await c.phase(EnginePhase.IDLE)
    await c.until(lambda: len(c.session.turns) == 1, "the conversation")
    c.session.metrics = figures()
    for size, scenes in [*((size, SCENES) for size in sizes), *((size, (MODEL,)) for size in sizes)]:
        await resized(c, size)
        for scene in scenes:
            if scene.least <= size[0]:
                await opened(c, scene)
                await album.take(c, scene.name)
        await c.app.pop_screen()


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.usefixtures("fixed")
async def test_every_screen_is_drawn_as_before_and_the_terminals_theme_by_its_sixteen_colours(
    chat: Start, tmp_path: Path, theme: str
) -> None:
    written(theme, tmp_path / "settings.toml")
    album = Album(theme)
    async with chat("fast", size=SIZES[0], resume=True) as c:
        await pictures(c, album, *SIZES)
    album.check()


@pytest.mark.usefixtures("fixed")
async def test_no_color_is_no_colour_at_all_and_what_is_pointed_at_is_still_seen(
    chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    written("tokamac-dark", tmp_path / "settings.toml")
    album = Album("no-color")
    async with chat("fast", size=SIZES[1], resume=True) as c:
        await pictures(c, album, SIZES[1])
    for scene, (name, picture) in zip((*SCENES, MODEL), album.found.items(), strict=True):
        assert not colours(picture), name
        if scene.points:
            assert re.search("reverse|bold underline", picture.rpartition("\n\n")[2]), name


async def test_the_terminals_own_theme_is_the_first(chat: Start) -> None:
    async with chat("fast") as c:
        assert c.app.theme == "terminal"
        assert c.app.native_ansi_color
