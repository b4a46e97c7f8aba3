"""Ctrl+S: the system prompt, for this chat or for every one, and a library of them by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.widgets import Button, Input, Label, OptionList, Static, TextArea
from textual.widgets.option_list import Option

from tokamac.app.sanitise import sanitise, sanitise_line
from tokamac.app.tui.listing import excerpt
from tokamac.app.tui.screens.dialog import Dialog
from tokamac.app.tui.widgets.tick import Tick

THIS_CHAT = "For this chat only"
Prompts = Mapping[str, str]
"""System prompts by name."""


@dataclass(frozen=True, slots=True)
class Written:
    """The system prompt, and whether it is this chat's alone."""

    text: str
    own: bool


class SystemScreen(Dialog[Written]):
    """Edits the system prompt; the result is the new one. A change of the library is kept at once, by ``keep``."""

    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("ctrl+s", "save", "Use", id="system.save", priority=True),
        Binding("ctrl+d", "delete", "Delete", id="system.delete"),
        Binding("ctrl+z", "undo", "Undo", id="system.undo"),
    ]

    def __init__(self, current: Written, prompts: Prompts, keep: Callable[[Prompts], None]) -> None:
        super().__init__()
        self._current = current
        self._prompts = dict(prompts)
        self._keep = keep
        self._deleted: list[tuple[str, str]] = []
        self._replacing = ""  # the name that is to be written again

    def compose(self) -> ComposeResult:
        """Yield the box."""
        with VerticalScroll(classes="box", can_focus=False) as box:
            box.border_title = "System prompt"
            yield Static("Said to the model before the conversation. Empty means none.", classes="note", markup=False)
            yield TextArea(sanitise(self._current.text), compact=True, tab_behavior="focus", id="system")
            yield Tick(THIS_CHAT, value=self._current.own, id="own")
            yield Label("Library", classes="group later")
            yield Static("", id="state", classes="note", markup=False)
            yield OptionList(markup=False, compact=True, id="library")
            with Horizontal(classes="field"):
                yield Label("Save it as")
                yield Input(placeholder="a name; Enter saves", id="name", compact=True)
            with Horizontal(classes="buttons"):
                yield Button("Use", variant="primary", id="save", compact=True)
                yield Button("Cancel", id="cancel", compact=True)

    def on_mount(self) -> None:
        """List the library."""
        self.say_keys("Ctrl+S uses it", "Esc closes")
        self.query_one("#system").focus()
        self._list("Enter takes one · Ctrl+D deletes it · Ctrl+Z brings it back" if self._prompts else "Empty so far.")

    def _list(self, state: str) -> None:
        listed = self.query_one("#library", OptionList)
        listed.clear_options()
        for name in sorted(self._prompts):
            note = Content.styled(f"  {excerpt(self._prompts[name])}", "$foreground 60%")
            listed.add_option(Option(Content(sanitise_line(name)) + note))
        listed.display = bool(self._prompts)
        self.query_one("#state", Static).update(state)

    @on(OptionList.OptionSelected)
    def picked(self, event: OptionList.OptionSelected) -> None:
        """Write the prompt that was picked into the box."""
        name = sorted(self._prompts)[event.option_index]
        self.query_one("#system", TextArea).text = sanitise(self._prompts[name])
        self.query_one("#name", Input).value = sanitise_line(name)
        self.query_one("#system").focus()

    @on(Input.Submitted, "#name")
    def named(self, event: Input.Submitted) -> None:
        """Save what is written under a name; asked again, in place of what has it."""
        name, text = event.value.strip(), self._text
        if not name or not text:
            self._say("Write a name." if text else "Write the system prompt first.")
        elif self._prompts.get(name, text) != text and self._replacing != name:
            self._replacing = name
            self._say(f"{sanitise_line(name)} is there already: Enter again replaces it.")
        else:
            self._change({**self._prompts, name: text}, f"Saved as {sanitise_line(name)}.")

    def action_delete(self) -> None:
        """Delete the prompt that is pointed at; it can be brought back while this is open."""
        index = self.query_one("#library", OptionList).highlighted
        if index is not None and self.query_one("#library").has_focus:
            name = sorted(self._prompts)[index]
            self._deleted.append((name, self._prompts[name]))
            self._change({key: text for key, text in self._prompts.items() if key != name}, "Deleted. Ctrl+Z: back.")

    def action_undo(self) -> None:
        """Bring back the prompt that was deleted last."""
        if self._deleted:
            name, text = self._deleted.pop()
            self._change({name: text, **self._prompts}, f"{sanitise_line(name)} is back.")

    def _change(self, prompts: dict[str, str], state: str) -> None:
        self._prompts = prompts
        self._replacing = ""
        self._keep(prompts)
        self._list(state)

    def _say(self, text: str) -> None:
        self.query_one("#state", Static).update(text)

    @property
    def _text(self) -> str:
        return self.query_one("#system", TextArea).text.strip()

    @on(Button.Pressed, "#save")
    def action_save(self) -> None:
        """Close with what is written."""
        self.dismiss(Written(self._text, self.query_one("#own", Tick).value))

    @on(Button.Pressed, "#cancel")
    def cancel(self) -> None:
        """Close without a result."""
        self.dismiss(None)
