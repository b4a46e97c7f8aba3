"""Several versions of a reply while they are written: side by side where the window is wide enough, else one at a time.

It stands over the chat, which goes on performing the session's steps. The user takes one of the versions, and the chat goes on
from it; all of them stay beside each other in the conversation.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.cells import cell_len
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.content import Content
from textual.message import Message
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Static

from tokamac.engine.events import TextKind

from ...chat.commands import ChatView
from ...chat.conversation import Reply
from ...chat.steps import EnginePhase
from ...chat.versions import Version, Versions
from ...sanitise import sanitise, sanitise_line
from ..actions import bindings
from ..markdown.page import PageRow
from ..markdown.turns import ReplyMessage
from ..theme import FAINT
from ..widgets.page_view import PageView, Painter
from ..widgets.transcript import NARROWEST, WIDEST, FramePacer, share_on

LEAST = 40
"""Cells of a column: about 36 of text."""
LOW = 24
"""Rows below which there are no blank ones above and below the versions."""
FRAME_S = 1 / 15
"""The shortest time between two drawings: what several versions say comes one after the other."""
LOOK_S = 0.4
"""How often what changes without an event is shown."""
STATE = 14  # cells for how a version is doing, beside its name on a tab
GAP, PROMPT = 3, 16
"""Cells before the prompt on the first line, at least, and for it."""
MARKS = {"stop": "✓", "length": "✓", "tool_calls": "✓", "cancelled": "■", "lost": "✗", "failed": "✗"}
RUNNING = "…"
PASSED_ON = ("help", "chats", "new_chat")
"""Actions of the chat whose keys work here too."""


class VersionText:
    """What a version says, without a name above it."""

    def __init__(self, reply: ReplyMessage) -> None:
        self._reply = reply

    def rows(self, width: int) -> Sequence[PageRow]:
        """Return the rows at ``width`` cells."""
        return self._reply.rows(width)[1:]


class VersionColumn(PageView, can_focus=False):
    """The text of one version. It grows by ``add``, which is cheap, and is drawn by ``look``."""

    class TextClicked(Message):
        """It was clicked. code: the block whose first line was, or ""."""

        def __init__(self, index: int, code: str) -> None:
            super().__init__()
            self.index, self.code = index, code

    def __init__(self, index: int, version: Version) -> None:
        super().__init__()
        self._index = index
        self._reply = ReplyMessage("", version.key)
        self._grown = False
        if version.reply is not None:
            self._reply.end(_unnamed(version.reply))
        else:
            self._reply.begin(version.so_far)
        self._body = VersionText(self._reply)
        self._page.append_later(self._body, 1)

    @property
    def growing(self) -> bool:
        """Whether it is being written."""
        return self._reply.reply is None

    def add(self, text: str, kind: TextKind) -> None:
        """Append to it."""
        self._reply.add(text, kind)
        self._grown = True

    def end(self, version: Version) -> None:
        """Become the whole reply."""
        if version.reply is not None:
            self._reply.end(_unnamed(version.reply))
            self._grown = True

    def look(self) -> None:
        """Draw what was added, if it is in view."""
        if self._grown and self.display and self.size:
            self._grown = False
            self._page.update(self._body)
            self._show()

    def toggle(self) -> None:
        """Unfold its thinking, or fold it; the reader's place stays."""
        if not self._reply.thinking:
            return
        self._reply.thinking.toggle()
        self._following = False
        self._page.update(self._body)
        self._show()
        self._following = self.scroll_offset.y >= self.max_scroll_y

    def on_resize(self) -> None:
        """Lay out again; the reader keeps their place."""
        width = max(NARROWEST, min(WIDEST, self.size.width))
        if width != self._page.width:
            before = max(1, self._page.height)
            at = self.scroll_offset.y / before
            self._page.fit(width)
            self._page.update(self._body)
            self._grown = False
            if not self._following:
                self._set_height()
                self._scroll(round(at * self._page.height))
        self._show()
        self._move_bar(exact=True)

    def on_show(self) -> None:
        """Draw what was added while another one was in view."""
        self.look()

    def on_click(self, event: events.Click) -> None:
        """Choose it; unfold the thinking that was clicked, or copy the block of code."""
        if self.text_selection is not None:
            return
        y = self.scroll_offset.y + event.y
        row = self._page.row(y)
        self.post_message(
            self.TextClicked(self._index, row.code.code if row is not None and row.code is not None else "")
        )
        if self._reply.is_thinking(y + 1):  # its name, which is not shown, would be the first row
            self.toggle()

    def _painter(self) -> Painter:
        return replace(super()._painter(), left=0)  # below its head


def _unnamed(reply: Reply) -> Reply:
    """Return ``reply`` without what was compared: its head says that."""
    return replace(reply, compared="")


class VersionHeads(Static):
    """The names of the versions and how they are doing, above their columns or as tabs, with a rule below."""

    class HeadClicked(Message):
        """The head of a version was clicked."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._shown = Content("")
        self._edges: Sequence[int] = ()

    def show(self, rows: Sequence[Content], edges: Sequence[int]) -> None:
        """Show ``rows``; ``edges``: where the heads begin."""
        content, self._edges = Content("\n").join(rows), edges
        if not content.is_same(self._shown):
            self._shown = content
            self.styles.height = len(rows)
            self.update(content, layout=False)

    def on_click(self, event: events.Click) -> None:
        """Tell which one was clicked."""
        found = [index for index, edge in enumerate(self._edges) if edge <= event.x]
        if found:
            self.post_message(self.HeadClicked(found[-1]))


def edges_of(count: int, width: int) -> list[int]:
    """Return where each of ``count`` heads begins on ``width`` cells, and where the last one ends."""
    return [index * width // count for index in range(count + 1)]


def heads(versions: Versions, chosen: int, width: int, *, tabs: bool, stopping: bool = False) -> list[Content]:
    """Return the rows above the versions. tabs: the others than the ``chosen`` one are not in view."""
    edges = edges_of(len(versions.all), width)
    longest = max(cell_len(each.variant.name) for each in versions.all)
    least = width // len(versions.all)
    whole = not tabs or longest + STATE + 4 <= least
    named = longest + 4 <= least
    first, rule = Content(""), Content("")
    for index, version in enumerate(versions.all):
        room = edges[index + 1] - edges[index]
        said = state(version, stopping=stopping) if whole else mark(version)
        name = version.variant.name if whole or named else version.variant.value or str(index + 1)
        head = _head(name, said, chosen=index == chosen).truncate(max(room - 1, 1), ellipsis=True)
        first += head + " " * (room - head.cell_length)
        line, style = ("━", "$primary") if index == chosen else ("─", "$foreground 25%")
        rule += Content.styled(line * max(room - 1, 1), style) + " " * min(1, room - 1)
    if whole:
        return [first, rule]
    version = versions.all[chosen]
    said = state(version, stopping=stopping)
    own = Content.styled(f" {said}", FAINT) if named else _head(version.variant.name, said, chosen=False)
    return [first, rule, own]


def _head(name: str, said: str, *, chosen: bool) -> Content:
    """Return a name and how that version is doing; the chosen one has a pointer."""
    pointer = Content.styled("▸", "bold $text-accent") if chosen else Content(" ")
    return (
        pointer + Content.styled(name, "bold $text-primary" if chosen else "bold") + Content.styled(f"  {said}", FAINT)
    )


def mark(version: Version) -> str:
    """Return in a sign how a version ended, or that it has not."""
    return RUNNING if version.reply is None else MARKS[version.reply.ending]


def state(version: Version, *, stopping: bool = False) -> str:
    """Return how a version is doing; stopping: all were asked to stop."""
    if version.reply is not None:
        return f"{mark(version)} {version.state}"
    return "stopping …" if stopping else version.state


class VersionsScreen(Screen[None]):
    """The ``versions`` of a reply. do: does the chat's action of an id."""

    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("left,shift+tab", "choose(-1)", "Version before", id="versions.before", priority=True),
        Binding("right,tab", "choose(1)", "Next version", id="versions.next", priority=True),
        *(Binding(str(n), f"show({n - 1})", f"Version {n}", id=f"versions.{n}", priority=True) for n in range(1, 9)),
        Binding("up", "scroll(-1)", "Up", id="versions.up", priority=True),
        Binding("down", "scroll(1)", "Down", id="versions.down", priority=True),
        Binding("pageup", "page(-1)", "Page up", id="versions.page_up", priority=True),
        Binding("pagedown", "page(1)", "Page down", id="versions.page_down", priority=True),
        Binding("home", "top", "Top", id="versions.top", priority=True),
        Binding("end", "end", "End", id="versions.end", priority=True),
        Binding("enter", "take", "Take it", id="versions.take", priority=True),
        Binding("space", "thinking", "Thinking", id="versions.thinking", priority=True),
        Binding("c", "copy", "Copy", id="versions.copy", priority=True),
        Binding("escape", "stop", "Stop or close", id="versions.stop", priority=True),
        Binding("ctrl+c", "stop_or_copy", "Copy, stop or close", id="versions.interrupt", show=False, priority=True),
        *(each for each in bindings() if isinstance(each, Binding) and each.id in PASSED_ON),
    ]

    def __init__(self, versions: Versions, chat: ChatView, do: Callable[[str], None]) -> None:
        super().__init__()
        self.versions = versions
        self.chosen = 0
        self._chat = chat
        self._do = do
        self._columns = [VersionColumn(index, version) for index, version in enumerate(versions.all)]
        prompt = versions.conversation.prompt_of(versions.all[0].key)
        self._prompt = "" if prompt is None else sanitise_line(prompt.prompt or "")
        self._heads = VersionHeads()
        self._together = Static(id="together", markup=False)
        self._keys = Static(id="version-keys", markup=False)
        self._ticker: Timer | None = None
        self._is_over = False
        self._taken = False  # one was: it closes when the others have ended
        info = chat.session.engine.info
        self._drawn_s = 0.0
        self._pace = FramePacer(share_on(info.device if info else ""))

    def compose(self) -> ComposeResult:
        """Yield the parts."""
        yield self._together
        yield self._heads
        with Horizontal(id="columns"):
            yield from self._columns
        yield self._keys

    def on_mount(self) -> None:
        """Show how they are doing now and then, while no text comes."""
        self._ticker = self.set_interval(LOOK_S, self.look)
        self._arrange()

    def on_resize(self) -> None:
        """Fit the window: columns, or tabs."""
        self._arrange()

    def on_screen_resume(self) -> None:
        """Draw what came meanwhile; where another chat was opened, close."""
        if self._is_over:
            self.dismiss()
        else:
            self.look(now=True)

    # What the session tells -----------------------------------------------------------------------------------------------

    def grow(self, version: Version, text: str, kind: TextKind) -> None:
        """Add to a version."""
        self._columns[self.versions.all.index(version)].add(text, kind)
        self.look()

    def ended(self, version: Version) -> None:
        """Show a version as it ended; close where one was taken and all have ended."""
        self._columns[self.versions.all.index(version)].end(version)
        self.look(now=True)
        if self._taken and not self.versions.running:
            self.close()

    def close(self) -> None:
        """Close, at once or when what stands above it is closed."""
        if not self._is_over:
            self._is_over = True
            if self._is_on_top:
                self.dismiss()

    def look(self, *, now: bool = False) -> None:
        """Draw what came, if it is time. now: it is."""
        clock_s = time.monotonic()
        soon = not now and clock_s - self._drawn_s < FRAME_S
        if not soon and self._is_on_top and self._is_whole and self._pace.is_due(now=now):
            self._drawn_s = clock_s
            for column in self._columns:
                column.look()
            self._say()

    # Keys -----------------------------------------------------------------------------------------------------------------

    def action_choose(self, by: int) -> None:
        """Choose the version before, or the next one, and round again."""
        self._choose((self.chosen + by) % len(self._columns))

    def action_show(self, index: int) -> None:
        """Choose a version by its number."""
        if index < len(self._columns):
            self._choose(index)

    def action_scroll(self, by: int) -> None:
        """Scroll the chosen version by a row."""
        self._columns[self.chosen].scroll_relative(y=by, animate=False)

    def action_page(self, by: int) -> None:
        """Scroll it by a page."""
        self._columns[self.chosen].page(by)

    def action_top(self) -> None:
        """Scroll to its beginning."""
        self._columns[self.chosen].scroll_home(animate=False)

    def action_end(self) -> None:
        """Scroll to its end, and follow it."""
        self._columns[self.chosen].follow()

    def action_thinking(self) -> None:
        """Unfold its thinking, or fold it."""
        self._columns[self.chosen].toggle()

    def action_copy(self) -> None:
        """Copy it."""
        text = self.versions.all[self.chosen].so_far.text
        self._chat.tell(self._chat.copy(sanitise(text)) if text else "There is no text to copy yet.")

    def action_take(self) -> None:
        """Have the chat go on from the chosen version; the others are stopped."""
        version = self.versions.all[self.chosen]
        if version.reply is None:
            self._chat.tell(f"{version.variant.name} is still being written. Take it when it is done.", "warning")
            return
        self._taken = True
        self._chat.perform(self._chat.session.keep_version(self.chosen))
        if self.versions.running:
            self.look(now=True)
        else:
            self.close()

    def action_stop(self) -> None:
        """Stop all; close when all have ended."""
        if self.versions.running:
            self._chat.perform(self._chat.session.stop())
            self.look(now=True)
        else:
            self.close()

    def action_stop_or_copy(self) -> None:
        """Copy what is selected; else stop, or close."""
        if text := self.get_selected_text():
            self._chat.tell(self._chat.copy(text))
        else:
            self.action_stop()

    def action_do(self, action: str) -> None:
        """Do an action of the chat."""
        self._do(action)

    @on(VersionHeads.HeadClicked)
    def choose_head(self, message: VersionHeads.HeadClicked) -> None:
        """Choose the version whose head was clicked."""
        self._choose(message.index)

    @on(VersionColumn.TextClicked)
    def choose_clicked(self, message: VersionColumn.TextClicked) -> None:
        """Choose the version that was clicked, and copy its block of code if that was."""
        self._choose(message.index)
        if message.code:
            self._chat.tell(self._chat.copy(message.code))

    # Drawing --------------------------------------------------------------------------------------------------------------

    @property
    def _is_whole(self) -> bool:
        """Whether its parts are mounted: the first size may come before."""
        return self._keys.is_attached

    @property
    def _is_on_top(self) -> bool:
        return self.app.screen is self

    @property
    def tabs(self) -> bool:
        """Whether one version is in view at a time."""
        return self.app.size.width // LEAST < len(self._columns)

    def _choose(self, index: int) -> None:
        self.chosen = index
        self._arrange()

    def _arrange(self) -> None:
        width, height = self.app.size
        edges = edges_of(len(self._columns), width)
        self.set_class(height >= LOW, "-airy")
        for index, column in enumerate(self._columns):
            column.display = not self.tabs or index == self.chosen
            column.styles.width = width if self.tabs else edges[index + 1] - edges[index]
        if self._is_whole:
            self._say()

    def _say(self) -> None:
        """Show how they are doing, and what keys do."""
        versions, width = self.versions, self.app.size.width
        stopping = self._chat.session.engine.phase is EnginePhase.STOPPING
        rows = heads(versions, self.chosen, width, tabs=self.tabs, stopping=stopping)
        self._heads.show(rows, edges_of(len(versions.all), width)[:-1])
        running = bool(versions.running)
        if self._ticker is not None:
            (self._ticker.resume if running else self._ticker.pause)()
        summary = Content.styled(versions.summary, "bold")
        if not running:
            notes = (f"the chat goes on from {versions.kept.variant.name}", versions.caution)
            summary += Content.styled("".join(f" · {each}" for each in notes if each), FAINT)
        _draw(self._together, _beside(summary, self._prompt, width - 2))
        _draw(self._keys, keys_line(width - 2, running=running))


def _draw(line: Static, content: Content) -> None:
    if not isinstance(line.content, Content) or not content.is_same(line.content):
        line.update(content, layout=False)


def _beside(summary: Content, prompt: str, width: int) -> Content:
    """Return ``summary``, and at the right as much of ``prompt`` as has room."""
    room = width - summary.cell_length - GAP
    if not prompt or room < PROMPT:
        return summary
    text = Content.styled(prompt, FAINT).truncate(room, ellipsis=True)
    return summary + " " * (width - summary.cell_length - text.cell_length) + text


def keys_line(width: int, *, running: bool) -> Content:
    """Return what keys do, in at most ``width`` cells; Enter and Esc stay longest."""
    keys = [
        ("Enter", "takes it"),
        ("← →", "choose"),
        ("↑ ↓", "scroll"),
        ("C", "copies"),
        ("Space", "thinking"),
        ("Esc", "stops all" if running else "closes"),
    ]
    while len(keys) > 2 and sum(cell_len(key) + len(does) + 3 for key, does in keys) - 2 > width:
        del keys[-2]
    parts = (Content.styled(key, "$text-primary") + Content.styled(f" {does}", FAINT) for key, does in keys)
    return Content("  ").join(parts)
