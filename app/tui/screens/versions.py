"""Versions of a reply while they stream, side by side or, in narrow windows, as tabs."""

# Over the chat, which keeps running session steps and continues from the chosen one; all versions are kept.

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

from ...chat.controller import ChatController
from ...chat.conversation import Reply
from ...chat.steps import EnginePhase
from ...chat.versions import Version, Versions
from ...text.sanitise import sanitise, sanitise_line
from ..markdown.page import PageRow, PageView, Painter
from ..markdown.turns import ReplyMessage
from ..theme import FAINT
from ..widgets.transcript import NARROWEST, WIDEST, FramePacer, bindings, share_on

LEAST = 40  # cells of a column: about 36 of text
LOW = 24  # rows below which there are no blank ones above and below the versions
FRAME_S = 1 / 15  # the shortest time between two drawings: what several versions say comes one after the other
LOOK_S = 0.4  # how often what changes without an event is shown
STATE = 14  # cells for how a version is doing, beside its name on a tab
GAP, PROMPT = 3, 16  # cells before the prompt on the first line, at least, and for it
MARKS = {
    "stop": "✓",
    "length": "✓",
    "full": "✓",
    "loop": "✗",
    "tool_calls": "✓",
    "cancelled": "■",
    "lost": "✗",
    "failed": "✗",
}
RUNNING = "…"
PASSED_ON = ("help", "chats", "new_chat")  # actions of the chat whose keys work here too


class VersionText:
    def __init__(self, reply: ReplyMessage) -> None:
        self._reply = reply

    def rows(self, width: int) -> Sequence[PageRow]:
        return self._reply.rows(width)[1:]


class VersionColumn(PageView, can_focus=False):
    class TextClicked(Message):
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
        return self._reply.reply is None

    def add(self, text: str, kind: TextKind) -> None:
        self._reply.add(text, kind)
        self._grown = True

    def end(self, version: Version) -> None:
        if version.reply is not None:
            self._reply.end(_unnamed(version.reply))
            self._grown = True

    def look(self) -> None:
        if self._grown and self.display and self.size:
            self._grown = False
            self._page.update(self._body)
            self._show()

    def toggle(self) -> None:
        if not self._reply.thinking:
            return
        self._reply.thinking.toggle()
        self._following = False
        self._page.update(self._body)
        self._show()
        self._following = self.scroll_offset.y >= self.max_scroll_y

    def on_resize(self) -> None:
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
        self.look()

    def on_click(self, event: events.Click) -> None:
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
    return replace(reply, compared="")


class VersionHeads(Static):
    class HeadClicked(Message):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._shown = Content("")
        self._edges: Sequence[int] = ()

    def show(self, rows: Sequence[Content], edges: Sequence[int]) -> None:
        content, self._edges = Content("\n").join(rows), edges
        if not content.is_same(self._shown):
            self._shown = content
            self.styles.height = len(rows)
            self.update(content, layout=False)

    def on_click(self, event: events.Click) -> None:
        found = [index for index, edge in enumerate(self._edges) if edge <= event.x]
        if found:
            self.post_message(self.HeadClicked(found[-1]))


def edges_of(count: int, width: int) -> list[int]:
    return [index * width // count for index in range(count + 1)]


def heads(versions: Versions, chosen: int, width: int, *, tabs: bool, stopping: bool = False) -> list[Content]:
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
    pointer = Content.styled("▸", "bold $text-accent") if chosen else Content(" ")
    return (
        pointer + Content.styled(name, "bold $text-primary" if chosen else "bold") + Content.styled(f"  {said}", FAINT)
    )


def mark(version: Version) -> str:
    return RUNNING if version.reply is None else MARKS[version.reply.ending]


def state(version: Version, *, stopping: bool = False) -> str:
    if version.reply is not None:
        return f"{mark(version)} {version.state}"
    return "stopping …" if stopping else version.state


class VersionsScreen(Screen[None]):
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

    def __init__(self, versions: Versions, chat: ChatController, do: Callable[[str], None]) -> None:
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
        yield self._together
        yield self._heads
        with Horizontal(id="columns"):
            yield from self._columns
        yield self._keys

    def on_mount(self) -> None:
        self._ticker = self.set_interval(LOOK_S, self.look)
        self._arrange()

    def on_resize(self) -> None:
        self._arrange()

    def on_screen_resume(self) -> None:
        if self._is_over:
            self.dismiss()
        else:
            self.look(now=True)

    # What the session tells -----------------------------------------------------------------------------------------------

    def grow(self, version: Version, text: str, kind: TextKind) -> None:
        self._columns[self.versions.all.index(version)].add(text, kind)
        self.look()

    def ended(self, version: Version) -> None:
        self._columns[self.versions.all.index(version)].end(version)
        self.look(now=True)
        if self._taken and not self.versions.running:
            self.close()

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._is_on_top:
                self.dismiss()

    def look(self, *, now: bool = False) -> None:
        clock_s = time.monotonic()
        soon = not now and clock_s - self._drawn_s < FRAME_S
        if not soon and self._is_on_top and self._is_whole and self._pace.is_due(now=now):
            self._drawn_s = clock_s
            for column in self._columns:
                column.look()
            self._say()

    # Keys -----------------------------------------------------------------------------------------------------------------

    def action_choose(self, by: int) -> None:
        self._choose((self.chosen + by) % len(self._columns))

    def action_show(self, index: int) -> None:
        if index < len(self._columns):
            self._choose(index)

    def action_scroll(self, by: int) -> None:
        self._columns[self.chosen].scroll_relative(y=by, animate=False)

    def action_page(self, by: int) -> None:
        self._columns[self.chosen].page(by)

    def action_top(self) -> None:
        self._columns[self.chosen].scroll_home(animate=False)

    def action_end(self) -> None:
        self._columns[self.chosen].follow()

    def action_thinking(self) -> None:
        self._columns[self.chosen].toggle()

    def action_copy(self) -> None:
        text = self.versions.all[self.chosen].so_far.text
        self._chat.view.tell(self._chat.copy(sanitise(text)) if text else "There is no text to copy yet.")

    def action_take(self) -> None:
        version = self.versions.all[self.chosen]
        if version.reply is None:
            self._chat.view.tell(f"{version.variant.name} is still being written. Take it when it is done.", "warning")
            return
        self._taken = True
        self._chat.perform(self._chat.session.keep_version(self.chosen))
        if self.versions.running:
            self.look(now=True)
        else:
            self.close()

    def action_stop(self) -> None:
        if self.versions.running:
            self._chat.perform(self._chat.session.stop())
            self.look(now=True)
        else:
            self.close()

    def action_stop_or_copy(self) -> None:
        if text := self.get_selected_text():
            self._chat.view.tell(self._chat.copy(text))
        else:
            self.action_stop()

    def action_do(self, action: str) -> None:
        self._do(action)

    @on(VersionHeads.HeadClicked)
    def choose_head(self, message: VersionHeads.HeadClicked) -> None:
        self._choose(message.index)

    @on(VersionColumn.TextClicked)
    def choose_clicked(self, message: VersionColumn.TextClicked) -> None:
        self._choose(message.index)
        if message.code:
            self._chat.view.tell(self._chat.copy(message.code))

    # Drawing --------------------------------------------------------------------------------------------------------------

    @property
    def _is_whole(self) -> bool:
        return self._keys.is_attached

    @property
    def _is_on_top(self) -> bool:
        return self.app.screen is self

    @property
    def tabs(self) -> bool:
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
    room = width - summary.cell_length - GAP
    if not prompt or room < PROMPT:
        return summary
    text = Content.styled(prompt, FAINT).truncate(room, ellipsis=True)
    return summary + " " * (width - summary.cell_length - text.cell_length) + text


def keys_line(width: int, *, running: bool) -> Content:
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
