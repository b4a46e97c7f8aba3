"""The list of tools; and the questions whether something may be run: a call of the model's, a shell command of the user's."""

from collections.abc import Callable, Sequence
from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from tokamac.engine.events import ToolCall

from ...chat.commands import CONSENTS, Severity
from ...sanitise import sanitise, sanitise_line
from ...tools.tool import Decision, call_lines
from ...tools.toolbox import ListedTool
from ..theme import FAINT
from . import Dialog

CHOICES: dict[Decision, str] = {
    "once": "Allow this call",
    "chat": "Allow {name} in {which} chat",
    "always": "Always allow {name}",
    "deny": "Don't allow",
}


class ConsentScreen(Dialog[Decision]):
    """One call, its arguments in full, and what may be said to it; the result is None where Esc stops all of them.

    Nothing is chosen at first: what was being typed for the prompt, its Enter too, can't allow anything.
    """

    def __init__(self, call: ToolCall, chat: str = "") -> None:
        """``chat``: the title of the chat that the call is of; "" is the one on screen."""
        super().__init__()
        self.call = call
        self._chat = chat

    def compose(self) -> ComposeResult:
        """Yield the box."""
        name = sanitise_line(self.call.name)
        with Vertical(classes="box", id="consent") as box:
            box.border_title = "The model wants to call a tool"
            with VerticalScroll(id="consent-call", can_focus=False):
                first, *rest = call_lines(self.call)
                where = [Content.styled(f"In the chat “{sanitise_line(self._chat)}”, in the background:", FAINT)]
                text = Content("\n").join(
                    [*(where if self._chat else []), Content.styled(first, "bold"), *map(Content, rest)]
                )
                yield Static(text, markup=False)
            which = "that" if self._chat else "this"
            yield OptionList(
                *(Option(Content(text.format(name=name, which=which)), id=each) for each, text in CHOICES.items()),
                id="consent-choices",
            )

    def on_mount(self) -> None:
        """Choose nothing, and say what the keys do."""
        super().on_mount()
        choices = self.query_one(OptionList)
        choices.highlighted = None
        choices.focus()
        self.say_keys("↑↓ choose", "Enter confirms", "Esc stops")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Close with what was chosen."""
        event.stop()
        chosen = next(choice for choice in CHOICES if choice == event.option_id)
        self.dismiss(chosen)


class ShellScreen(Dialog[bool]):
    """A shell command that the user wrote, and the folder it will run in; the result is True where it may be run."""

    def __init__(self, command: str, folder: Path, shell: str) -> None:
        super().__init__()
        self._command, self._folder, self._shell = command, folder, shell

    def compose(self) -> ComposeResult:
        """Yield the box."""
        shell = sanitise_line(Path(self._shell).name)
        with Vertical(classes="box", id="consent") as box:
            box.border_title = "Run this command?"
            with VerticalScroll(id="consent-call", can_focus=False):
                yield Static(Content.styled(sanitise(self._command), "bold"), markup=False)
            yield Static(f"It runs in {sanitise_line(str(self._folder))} with {shell}.", markup=False)
            yield Static(AFTERWARDS, classes="note", markup=False)
            yield OptionList("Run it", "Don't run it", id="consent-choices")

    def on_mount(self) -> None:
        """Choose to run it, since the user wrote it, and say what the keys do."""
        super().on_mount()
        self.query_one(OptionList).focus()
        self.say_keys("Enter confirms", "↑↓ choose", "Esc closes")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Close with what was chosen."""
        event.stop()
        self.dismiss(event.option_index == 0)


AFTERWARDS = (
    "Its output is attached to your next message. To send the text to the model instead, put a space before the !."
)


LOOK_S = 0.3
"""How often the servers are looked at."""
WIDE = 56
"""Columns from which there is room for what a tool does beside its name."""
NO_SERVERS = "MCP servers add tools: [mcp.NAME] in settings.toml (tokamac help tools)."
HEADINGS = {False: "Built in", True: "MCP servers"}


def tool_row(tool: ListedTool, width: int, names: int) -> Content:
    """Return a tool's row of ``width`` cells: whether it is on, its name in ``names`` cells, what it does, whether it asks."""
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
    """Lists the tools with their sources, and what the user allowed them; turns them on and off.

    tools: returns them as they are now. switch: turns one, or a server, on or off, and returns what to say of that. ask_again:
    takes back what the user allowed a tool, and returns what to say of that.
    """

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
        """Yield the list, and a line on the row that is selected."""
        with Vertical(classes="box") as box:
            box.border_title = "Tools of this chat"
            yield OptionList(markup=False, compact=True)
            yield Static("", id="state", classes="note", markup=False)

    def on_mount(self) -> None:
        """List them, and again as servers start."""
        super().on_mount()
        self.say_keys("Space, Enter turn on or off", "A asks again", "Esc closes")
        self.query_one(OptionList).focus()
        self.call_after_refresh(self._look)
        self.set_interval(LOOK_S, self._look)

    @on(Resize)
    def resized(self) -> None:
        """Write the rows anew for the room there is now."""
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
        """Return what tells the selected row from the others, whatever becomes of it."""
        tool = self._tool()
        return None if tool is None else (tool.name, tool.switch)

    @on(OptionList.OptionHighlighted)
    def _show_state(self) -> None:
        """Say what was done to the selected row, else what it is."""
        tool, (of, said) = self._tool(), self._said
        about = "" if tool is None else f"{sanitise_line(tool.name)}: {sanitise_line(tool.about)}"
        self.query_one("#state", Static).update(said if of == self._pointed() else about)

    def _say(self, text: str) -> None:
        self._said = self._pointed(), text
        self._look()
        self._show_state()

    @on(OptionList.OptionSelected)
    def chosen(self) -> None:
        """Turn the row on or off."""
        self.action_switch()

    def action_switch(self) -> None:
        """Turn the row on or off; a server's tool with its server."""
        if (tool := self._tool()) is not None:
            said, _ = self._switch(tool.switch)
            self._say(said)

    def action_ask_again(self) -> None:
        """Have the tool's calls ask again."""
        tool = self._tool()
        if tool is not None and not tool.server:
            self._say(self._ask_again(tool.name))
