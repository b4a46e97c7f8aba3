"""Ctrl+S: the system prompt, for this chat or for every one, and a library of them by name."""

from collections.abc import Callable, Mapping

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
from tokamac.app.tui.system_drafts import Written
from tokamac.app.tui.theme import FAINT
from tokamac.app.tui.widgets.tick import Tick

THIS_CHAT = "For this chat only"
NOT_USED = "You wrote this and have not used it yet: Ctrl+S uses it."
Prompts = Mapping[str, str]
"""System prompts by name."""


class SystemScreen(Dialog[Written]):
    """Edits the system prompt; the result is the new one. A change of the library is kept at once, by ``keep``.

    draft: what was written earlier and not used. leave: is given what is written and not used when the dialog is left without
    a result; None where it is what holds already.
    """

    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("ctrl+s", "save", "Use", id="system.save", priority=True),
        Binding("ctrl+d", "delete", "Delete", id="system.delete"),
        Binding("ctrl+z", "undo", "Undo", id="system.undo"),
    ]

    def __init__(
        self,
        current: Written,
        prompts: Prompts,
        keep: Callable[[Prompts], None],
        *,
        draft: Written | None,
        leave: Callable[[Written | None], None],
    ) -> None:
        super().__init__()
        self._current = current
        self._draft = draft
        self._hand_over = leave
        self._prompts = dict(prompts)
        self._keep = keep
        self._deleted: list[tuple[str, str]] = []
        self._replacing = ""  # the name that is to be written again

    def compose(self) -> ComposeResult:
        """Yield the box."""
        with VerticalScroll(classes="box", can_focus=False) as box:
            box.border_title = "System prompt"
            yield Static("Said to the model before the conversation. Empty means none.", classes="note", markup=False)
            if self._draft is not None:
                yield Static(NOT_USED, id="draft", markup=False)
            shown = self._draft or self._current
            yield TextArea(sanitise(shown.text), compact=True, tab_behavior="focus", id="system")
            yield Tick(THIS_CHAT, value=shown.own, id="own")
            yield Label("Library", classes="group later")
            yield Static("", id="state", classes="note", markup=False)
            yield OptionList(markup=False, compact=True, id="library")
            with Horizontal(classes="field"):
                yield Label("Save it as")
                yield Input(placeholder="a name; Enter saves", id="name", compact=True)
            with Horizontal(classes="buttons"):
                yield Button("Use", variant="primary", id="save", compact=True)
                if self._draft is not None:
                    yield Button("Discard", id="discard", compact=True)
                yield Button("Close", id="cancel", compact=True)

    def on_mount(self) -> None:
        """List the library."""
        self.say_keys("Ctrl+S uses it", "Esc closes")
        self.query_one("#system").focus()
        self._list("Enter takes one · Ctrl+D deletes it · Ctrl+Z brings it back" if self._prompts else "Empty so far.")

    def _list(self, state: str) -> None:
        listed = self.query_one("#library", OptionList)
        listed.clear_options()
        for name in sorted(self._prompts):
            note = Content.styled(f"  {excerpt(self._prompts[name])}", FAINT)
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

    @property
    def _written(self) -> Written:
        return Written(self._text, self.query_one("#own", Tick).value)

    @on(Button.Pressed, "#save")
    def action_save(self) -> None:
        """Close with what is written."""
        self.dismiss(self._written)

    @on(Button.Pressed, "#discard")
    def discard(self) -> None:
        """Write what holds into the box again, in place of the draft."""
        self.query_one("#system", TextArea).text = sanitise(self._current.text)
        self.query_one("#own", Tick).value = self._current.own
        self.query_one("#draft").display = self.query_one("#discard").display = False
        self.query_one("#system").focus()

    @on(Button.Pressed, "#cancel")
    def action_leave(self) -> None:
        """Close without a result; a text that is written and not used is handed over to be kept."""
        holds = sanitise(self._current.text).strip()
        self._hand_over(None if self._text == holds else self._written)
        self.dismiss(None)
