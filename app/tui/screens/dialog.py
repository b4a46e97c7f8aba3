"""What all dialogs share, a titled box with Esc and its keys in the border; and the small ones: text, prompts, links, context."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from rich.cells import cell_len
from textual import on
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.geometry import Size
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Checkbox, Input, OptionList, Static, TextArea
from textual.widgets.option_list import Option

from tokamac.engine.events import ToolCall

from ...backend.client import BackendEvent
from ...chat.background import ContextRow, ContextUse
from ...chat.controller import Severity, UserChoice
from ...chat.setup import CONSENTS
from ...text import units
from ...text.sanitise import sanitise_line
from ...text.terminal import DIFF
from ...tools.calls import ASKED, Decision, Line, Preview, question_of
from ...tools.toolbox import ListedTool
from ..theme import FAINT
from ..widgets.prompt_input import TextInput

if TYPE_CHECKING:
    from ...text.markdown import OpenableLink


Result = TypeVar("Result")
# Rows below which a form is not seen as a whole, or not even its first fields with gaps between them.
LOW, FLAT = 30, 16
SNUG, TIGHT = 90, 60  # columns below which the box takes the whole width, or a field's note has no room beside it
BORDER = 6  # cells of a border that are not text
SEPARATOR = " · "


class Dialog(ModalScreen[Result | None]):
    """A screen over the chat; its result is None when cancelled. Fills a small window.

    Classes for sizes: ``-low`` and ``-flat`` by rows, ``-snug`` and ``-tight`` by columns.
    """

    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("escape", "leave", "Close", id="dialog.leave"),
        Binding("ctrl+c", "leave_or_copy", "Copy or close", id="dialog.interrupt", show=False, priority=True),
    ]
    _keys: tuple[str, ...] = ()
    _dismissed = False

    def dismiss(self, result: Result | None = None) -> AwaitComplete:
        """Close with a result; a second simultaneous key closes nothing else."""
        if self._dismissed:
            return AwaitComplete()
        self._dismissed = True
        return super().dismiss(result)

    def say_keys(self, *keys: str) -> None:
        """Show keys in the border, like ``Enter saves``; the first and last are dropped last."""
        self._keys = keys
        self.query_one(".box").border_subtitle = SEPARATOR.join(keys)
        self.call_after_refresh(self._fit_keys)

    def on_mount(self) -> None:
        self._dismissed = False
        self._fit(self.app.size)

    def on_resize(self, event: Resize) -> None:
        self._fit(event.size)
        self.call_after_refresh(self._fit_keys)

    def _fit(self, size: Size) -> None:
        self.set_class(size.height < LOW, "-low")
        self.set_class(size.height < FLAT, "-flat")
        self.set_class(size.width < SNUG, "-snug")
        self.set_class(size.width < TIGHT, "-tight")

    def _fit_keys(self) -> None:
        for box in self.query(".box") if self._keys else ():  # there is none any more where it was closed meanwhile
            box.border_subtitle = fitting(self._keys, box.outer_size.width - BORDER)

    def action_leave(self) -> None:
        self.dismiss(None)

    def action_leave_or_copy(self) -> None:
        focused = self.focused
        text = self.get_selected_text() or (focused.selected_text if isinstance(focused, Input | TextArea) else "")
        if text:
            self.app.copy_to_clipboard(text)
        else:
            self.action_leave()


class ListDialog(Dialog[Result]):
    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("up", "move(-1)", "Up", id="list.up", show=False, priority=True),
        Binding("down", "move(1)", "Down", id="list.down", show=False, priority=True),
        Binding("pageup,f8", "page(-1)", "Page up", id="list.page_up", show=False, priority=True),
        Binding("pagedown,f9", "page(1)", "Page down", id="list.page_down", show=False, priority=True),
    ]

    def action_move(self, step: int) -> None:
        listed = self.query_one(OptionList)
        listed.action_cursor_up() if step < 0 else listed.action_cursor_down()

    def action_page(self, step: int) -> None:
        listed = self.query_one(OptionList)
        listed.action_page_up() if step < 0 else listed.action_page_down()  # type: ignore[no-untyped-call]


class EngineSaid(Message):
    """``event`` came from the engine's process ``process_number``."""

    def __init__(self, event: BackendEvent, process_number: int) -> None:
        super().__init__()
        self.event = event
        self.process_number = process_number


class TextScreen(Dialog[None]):
    BINDINGS = [Binding("enter", "leave", "Close", id="text.leave", show=False)]  # noqa: RUF012 (Textual's way)

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box"):
            yield Static(self._text, markup=False)

    def on_mount(self) -> None:
        self.say_keys("Esc closes")


def has_words(words: Sequence[str], *texts: str) -> bool:
    everything = " ".join(texts).casefold()
    return all(word in everything for word in words)


def fitting(keys: Sequence[str], room: int) -> str:
    said = SEPARATOR.join(keys)
    if cell_len(said) <= room or len(keys) == 1:
        return said
    return fitting([*keys[:-2], keys[-1]] if len(keys) > 2 else keys[:1], room)


class Tick(Checkbox):
    def __init__(self, label: str, *, value: bool, id: str) -> None:
        super().__init__(label, value, compact=True, id=id)

    def render(self) -> Content:
        mark = "☑" if self.value else "☐"
        label = self.label.pad(1, 1).stylize_before(self.get_visual_style("toggle--label"))
        return Content.assemble((mark, self.get_visual_style("toggle--button")), label)


class PromptsScreen(ListDialog[int]):
    BINDINGS = [Binding("ctrl+r", "move(1)", "Older", id="prompts.older", priority=True)]  # noqa: RUF012 (Textual's way)

    def __init__(self, title: str, prompts: Sequence[str], *hints: str) -> None:
        super().__init__()
        self._title = title
        self._prompts = prompts
        self._hints = hints

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = self._title
            yield TextInput(placeholder="Type to search", compact=True)
            yield OptionList(markup=False, compact=True)
            yield Static("", id="whole", classes="note", markup=False)

    def on_mount(self) -> None:
        self.say_keys("Enter takes it", *self._hints, "Esc closes")
        self._list()

    @on(Input.Changed)
    def _list(self) -> None:
        words = self.query_one(Input).value.casefold().split()
        listed = self.query_one(OptionList)
        listed.clear_options()
        for index, text in enumerate(self._prompts):
            if all(word in text.casefold() for word in words):
                listed.add_option(Option(Content(" ".join(text.split())), str(index)))
        listed.highlighted = 0 if listed.option_count else None
        self._show()

    @on(OptionList.OptionHighlighted)
    def _show(self) -> None:
        index = self._index
        self.query_one("#whole", Static).update("No matches." if index is None else self._prompts[index])

    @property
    def _index(self) -> int | None:
        option = self.query_one(OptionList).highlighted_option
        return None if option is None else int(option.id or 0)

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def choose(self) -> None:
        if (index := self._index) is not None:
            self.dismiss(index)


class LinksScreen(Dialog[tuple[str, bool]]):
    BINDINGS = [Binding("c,y", "copy", "Copy", id="links.copy")]  # noqa: RUF012 (Textual's way)

    def __init__(self, links: "Sequence[OpenableLink]") -> None:
        super().__init__()
        self._links = links

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = "Links"
            yield OptionList(*(Option(_line(link)) for link in self._links), markup=False)

    def on_mount(self) -> None:
        super().on_mount()
        self.say_keys("Enter opens", "C copies", "Esc closes")
        self.query_one(OptionList).focus()

    @on(OptionList.OptionSelected)
    def open(self, message: OptionList.OptionSelected) -> None:
        self.dismiss((self._links[message.option_index].address, True))

    def action_copy(self) -> None:
        index = self.query_one(OptionList).highlighted
        if index is not None:
            self.dismiss((self._links[index].address, False))


def _line(link: "OpenableLink") -> Content:
    text = sanitise_line(link.text)
    address = Content.styled(link.address, FAINT)
    return address if text == link.address else Content(text) + Content("\n") + address


LOOK_S = 0.2  # how often the counts that came are looked at
# Of the parts of the bar: told apart without colour too.
STYLES = {
    "system": ("█", "$text-accent"),
    "project": ("▙", "$text-accent"),
    "memory": ("▛", "$text-accent"),
    "tools": ("▐", "$text-muted"),
    "files": ("▓", "$text-warning"),
    "prompts": ("▒", "$text-primary"),
    "replies": ("░", "$text-secondary"),
    "results": ("▞", "$foreground"),
    "draft": ("▚", "$text-success"),
}
NAMES = {
    "system": "system",
    "project": "project",
    "memory": "memory",
    "tools": "tools",
    "file": "file",
    "prompt": "you",
    "reply": "reply",
    "result": "tool",
    "draft": "draft",
}


def bar(use: ContextUse, width: int) -> Content:
    whole = max(use.capacity or use.used, use.used, 1)
    shown, cells = Content(""), 0
    for name, tokens in use.by_kind().items():
        mark, style = STYLES[name]
        part = min(max(1, round(width * tokens / whole)), width - cells) if tokens else 0
        shown += Content.styled(mark * part, style)
        cells += part
    return shown + Content.styled("·" * (width - cells), FAINT)


def legend(use: ContextUse) -> Content:
    parts = [
        Content.styled(f"{STYLES[name][0]} ", STYLES[name][1]) + Content(f"{name} {units.short(tokens)}")
        for name, tokens in use.by_kind().items()
        if tokens
    ]
    parts.append(Content.styled(f"· free {units.short(use.free)} of {units.short(use.capacity)} tokens", FAINT))
    return Content("  ").join(parts)


def part_row(row: ContextRow, width: int) -> Content:
    tokens = "…" if row.tokens is None else units.count(row.tokens)
    lead = f"{tokens:>9}  {NAMES[row.kind]:<7} "
    note = "  left out" if row.left_out else "  pinned" if row.pinned else ""
    name = Content(row.name).truncate(max(1, width - len(lead) - len(note)), ellipsis=True)
    shown = name.stylize(f"strike {FAINT}") if row.left_out else name
    return Content.styled(lead, FAINT) + shown + Content.styled(note, "$text-warning")


class ContextScreen(Dialog[None]):
    def __init__(
        self, use: Callable[[], ContextUse], prune: Callable[[int, str], None], key: int | None = None
    ) -> None:
        super().__init__()
        self._key = key
        self._use = use
        self._prune = prune
        self._shown: ContextUse | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = "Context, in tokens"
            yield Static("", id="bar", markup=False)
            yield Static("", id="legend", markup=False)
            yield OptionList(markup=False, compact=True)
            yield Static("", id="state", classes="note", markup=False)

    def on_mount(self) -> None:
        self.say_keys("Enter leaves out, or sends again", "Esc closes")
        self.query_one(OptionList).focus()
        self.call_after_refresh(self._look)
        self.set_interval(LOOK_S, self._look)

    @on(Resize)
    def resized(self) -> None:
        self._shown = None
        self.call_after_refresh(self._look)

    def _look(self) -> None:
        use = self._use()
        if use == self._shown or not self.query(OptionList):
            return
        self._shown = use
        listed = self.query_one(OptionList)
        width = max(20, listed.content_region.width - listed.styles.scrollbar_size_vertical)
        at = listed.highlighted
        listed.clear_options()
        listed.add_options([Option(part_row(row, width)) for row in use.rows])
        if at is None:
            at = next((at for at, row in enumerate(use.rows) if row.key == self._key and not row.file), 0)
        listed.highlighted = min(at, len(use.rows) - 1) if use.rows else None
        self.query_one("#bar", Static).update(bar(use, width))
        self.query_one("#legend", Static).update(legend(use))
        self._say()

    @on(OptionList.OptionHighlighted)
    def pointed(self) -> None:
        self._say()

    def _say(self) -> None:
        index = self.query_one(OptionList).highlighted
        empty = "The context is empty."
        told = empty if self._shown is None or index is None else self._shown.consequence(index)
        self.query_one("#state", Static).update(told)

    @on(OptionList.OptionSelected)
    def chosen(self, event: OptionList.OptionSelected) -> None:
        row = None if self._shown is None else self._shown.rows[event.option_index]
        if row is not None and row.key:
            self._prune(row.key, row.file)
            self._look()


CHOICES: dict[Decision, str] = {
    "once": "Allow this call",
    "chat": "Allow {name} in {which} chat",
    "always": "Always allow {name}",
    "edit": "Edit it first",
    "deny": "Don't allow",
}


MARK_STYLES: Mapping[str, str] = {
    "!": "bold",
    "note": FAINT,
    "warning": "$text-warning",
    "+": "$text-success",
    "-": "$text-error",
    " ": FAINT,
    "@": FAINT,
}


def question(lines: Sequence[Line]) -> Content:
    """Draw the lines of a question: rows of a diff after their marks, in its colours."""
    rows = [
        Content.styled(f"{mark}{text}" if mark in DIFF else text, MARK_STYLES.get(mark, "")) for mark, text in lines
    ]
    return Content("\n").join(rows)


class ConsentScreen(Dialog[Decision]):
    """A call with all arguments; the result is None where Esc stops all calls."""

    # Nothing is preselected: keys typed for the prompt, Enter too, can't allow anything.

    def __init__(self, call: ToolCall, chat: str = "", preview: Preview | None = None) -> None:
        super().__init__()
        self.call = call
        self._preview = preview
        self._chat = chat

    def compose(self) -> ComposeResult:
        name = sanitise_line(self.call.name)
        with Vertical(classes="box", id="consent") as box:
            box.border_title = "The model wants to call a tool"
            with VerticalScroll(id="consent-call", can_focus=False):
                where: Line = ("note", f"In the chat “{sanitise_line(self._chat)}”, in the background:")
                lines = question_of(self.call, self._preview)
                yield Static(question([where, *lines] if self._chat else lines), markup=False)
            which = "that" if self._chat else "this"
            yield OptionList(
                *(Option(Content(CHOICES[each].format(name=name, which=which)), id=each) for each in self._decisions),
                id="consent-choices",
            )

    @property
    def _decisions(self) -> tuple[Decision, ...]:
        return ASKED if self._preview is None else self._preview.decisions

    def on_mount(self) -> None:
        super().on_mount()
        choices = self.query_one(OptionList)
        choices.highlighted = None
        choices.focus()
        self.say_keys("↑↓ choose", "Enter confirms", "Esc stops")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(self._decisions[event.option_index])


class ChoiceScreen(Dialog[int]):
    def __init__(self, choice: UserChoice) -> None:
        super().__init__()
        self._choice = choice

    def compose(self) -> ComposeResult:
        with Vertical(classes="box", id="consent") as box:
            box.border_title = self._choice.title
            with VerticalScroll(id="consent-call", can_focus=False):
                yield Static(question(self._choice.lines), markup=False)
            yield OptionList(*(Content(answer) for answer in self._choice.answers), id="consent-choices")

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one(OptionList).focus()
        self.say_keys("Enter confirms", "↑↓ choose", "Esc closes")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(event.option_index)


AFTERWARDS = (
    "Its output is attached to your next message. To send the text to the model instead, put a space before the !."
)


SERVERS_LOOK_S = 0.3  # how often the servers are looked at
WIDE = 56  # columns from which there is room for what a tool does beside its name
NO_SERVERS = "MCP servers add tools: [mcp.NAME] in settings.toml (tokamac help tools)."
HEADINGS = {False: "Built in", True: "MCP servers"}


def tool_row(tool: ListedTool, width: int, names: int) -> Content:
    mark = Content("    ") if tool.of_server else Content.styled("[x] ", "bold") if tool.on else Content("[ ] ")
    name = Content(sanitise_line(tool.name))
    consent = "" if tool.server else f"  {CONSENTS[tool.consent]}"
    left = width - mark.cell_length - len(consent)
    if width < WIDE and not tool.server:
        return mark + name.truncate(max(1, left), pad=True, ellipsis=True) + _consent(consent, tool)
    shown = name.truncate(names, pad=True, ellipsis=True) + "  "
    about = Content.styled(sanitise_line(tool.about), FAINT)
    return mark + shown + about.truncate(max(1, left - names - 2), pad=True, ellipsis=True) + _consent(consent, tool)


def _consent(text: str, tool: ListedTool) -> Content:
    return Content.styled(text, FAINT if tool.consent == "asks" else "$text-warning")


class ToolsScreen(Dialog[None]):
    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("space", "switch", "On or off", id="tools.switch"),
        Binding("a", "ask_again", "Asks again", id="tools.ask_again"),
    ]

    def __init__(
        self,
        tools: Callable[[], Sequence[ListedTool]],
        switch: Callable[[str], tuple[str, Severity]],
        ask_again: Callable[[str], str],
    ) -> None:
        super().__init__()
        self._tools, self._switch, self._ask_again = tools, switch, ask_again
        self._shown: Sequence[ListedTool] = ()
        self._rows: list[ListedTool | None] = []
        self._said: tuple[tuple[str, str] | None, str] = None, ""  # of which row, and what

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = "Tools of this chat"
            yield OptionList(markup=False, compact=True)
            yield Static("", id="state", classes="note", markup=False)

    def on_mount(self) -> None:
        super().on_mount()
        self.say_keys("Space, Enter turn on or off", "A asks again", "Esc closes")
        self.query_one(OptionList).focus()
        self.call_after_refresh(self._look)
        self.set_interval(SERVERS_LOOK_S, self._look)

    @on(Resize)
    def resized(self) -> None:
        self._shown = ()
        self.call_after_refresh(self._look)

    def _look(self) -> None:
        tools = self._tools()
        if tools == self._shown or not self.query(OptionList):
            return
        pointed = self._pointed()
        self._shown, self._rows = tools, []
        listed = self.query_one(OptionList)
        width = max(20, listed.content_region.width - listed.styles.scrollbar_size_vertical)
        names = min(24, max(len(sanitise_line(tool.name)) for tool in tools))
        options: list[Option] = []
        last: bool | None = None
        for tool in tools:
            if (source := tool.server or tool.of_server) != last:
                last = source
                self._rows.append(None)
                options.append(Option(Content.styled(HEADINGS[source], "bold"), disabled=True))
            self._rows.append(tool)
            options.append(Option(tool_row(tool, width, names)))
        if not last:
            options.append(Option(Content.styled(NO_SERVERS, FAINT), disabled=True))
        listed.clear_options()
        listed.add_options(options)
        places = {(row.name, row.switch): at for at, row in enumerate(self._rows) if row is not None}
        listed.highlighted = places.get(pointed, 1) if pointed is not None else 1
        self._show_state()

    def _tool(self) -> ListedTool | None:
        index = self.query_one(OptionList).highlighted
        return None if index is None or index >= len(self._rows) else self._rows[index]

    def _pointed(self) -> tuple[str, str] | None:
        tool = self._tool()
        return None if tool is None else (tool.name, tool.switch)

    @on(OptionList.OptionHighlighted)
    def _show_state(self) -> None:
        tool, (of, said) = self._tool(), self._said
        about = "" if tool is None else f"{sanitise_line(tool.name)}: {sanitise_line(tool.about)}"
        self.query_one("#state", Static).update(said if of == self._pointed() else about)

    def _say(self, text: str) -> None:
        self._said = self._pointed(), text
        self._look()
        self._show_state()

    @on(OptionList.OptionSelected)
    def chosen(self) -> None:
        self.action_switch()

    def action_switch(self) -> None:
        if (tool := self._tool()) is not None:
            said, _ = self._switch(tool.switch)
            self._say(said)

    def action_ask_again(self) -> None:
        tool = self._tool()
        if tool is not None and not tool.server:
            self._say(self._ask_again(tool.name))
