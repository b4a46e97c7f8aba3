"""Asks whether a call of the model's may be run."""

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from tokamac.engine.events import ToolCall

from ...sanitise import sanitise_line
from ...tools.tool import Decision, call_lines
from . import Dialog

CHOICES: dict[Decision, str] = {
    "once": "Allow this call",
    "chat": "Allow {name} in this chat",
    "always": "Always allow {name}",
    "deny": "Don't allow",
}


class ConsentScreen(Dialog[Decision]):
    """One call, its arguments in full, and what may be said to it; the result is None where Esc stops all of them.

    Nothing is chosen at first: what was being typed for the prompt, its Enter too, can't allow anything.
    """

    def __init__(self, call: ToolCall) -> None:
        super().__init__()
        self.call = call

    def compose(self) -> ComposeResult:
        """Yield the box."""
        name = sanitise_line(self.call.name)
        with Vertical(classes="box", id="consent") as box:
            box.border_title = "The model wants to call a tool"
            with VerticalScroll(id="consent-call", can_focus=False):
                first, *rest = call_lines(self.call)
                text = Content("\n").join([Content.styled(first, "bold"), *map(Content, rest)])
                yield Static(text, markup=False)
            yield OptionList(
                *(Option(Content(text.format(name=name)), id=choice) for choice, text in CHOICES.items()),
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
