"""Ctrl+X P: the profiles, what each holds, and this chat's setup kept as another one."""

from typing import TYPE_CHECKING

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.widgets import Input, Label, OptionList, Static
from textual.widgets.option_list import Option

from tokamac.engine.errors import ModelNotFoundError

from ...chat import commands
from ...chat.commands import RefusedError
from ...models.local import require
from ...profiles import Profile
from ...sanitise import sanitise_line
from ...settings_form import described, summary
from ..theme import FAINT
from . import Dialog

if TYPE_CHECKING:
    from .chat import ChatScreen

NO_PROFILE = "The settings of every chat, and the model that is loaded."
EMPTY = (
    "No profiles yet. A profile is a model, its settings and a system prompt under a name, to be chosen again at once."
)
LABELS = 20
"""Cells for the name of a setting in the preview."""


class ProfilesScreen(Dialog[str]):
    """Lists the profiles; the result is the name of the one to apply, "" for none. Saving and deleting are done at once."""

    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("ctrl+d", "delete", "Delete", id="profiles.delete", priority=True),
        Binding("ctrl+z", "undo", "Undo", id="profiles.undo", priority=True),
    ]

    def __init__(self, chat: "ChatScreen") -> None:
        super().__init__()
        self._chat = chat
        self._names: list[str] = []
        self._deleted: list[tuple[str, Profile]] = []
        self._replacing = ""  # the name that another Enter overwrites

    def compose(self) -> ComposeResult:
        """Yield the list, the preview, and where a name is written."""
        with VerticalScroll(classes="box", can_focus=False) as box:
            box.border_title = "Profiles"
            yield OptionList(markup=False, compact=True, id="profiles")
            yield Static("", id="preview", markup=False)
            with Horizontal(classes="field"):
                yield Label("Save this chat's as")
                yield Input(placeholder="a name; Enter saves", id="name", compact=True)
            yield Static("", id="state", classes="note", markup=False)

    def on_mount(self) -> None:
        """List them, the open chat's chosen."""
        self.say_keys("Enter applies", "Ctrl+D deletes", "Tab: save", "Esc closes")
        self._list(self._chat.preferences.profile)
        self.query_one("#profiles" if self._names[1:] else "#name").focus()

    def _list(self, at: str) -> None:
        preferences = self._chat.preferences
        known, now = preferences.profiles(), preferences.profile
        self._names = ["", *sorted(known, key=str.casefold)]
        listed = self.query_one("#profiles", OptionList)
        listed.clear_options()
        for name in self._names:
            mark = Content.styled("● " if name == now else "  ", "$text-primary")
            note = summary(known[name]) if name else "no profile"
            listed.add_option(Option(mark + (sanitise_line(name) or "none") + Content.styled(f"  {note}", FAINT)))
        listed.highlighted = self._names.index(at) if at in self._names else 0
        self._preview()

    @property
    def _pointed_at(self) -> str:
        at = self.query_one("#profiles", OptionList).highlighted
        return "" if at is None else self._names[at]

    @on(OptionList.OptionHighlighted)
    def highlighted(self) -> None:
        """Show what the profile holds."""
        self._preview()

    def _preview(self) -> None:
        profile = self._chat.preferences.settings.profiles.get(self._pointed_at)
        lines = [Content.styled(EMPTY if len(self._names) == 1 else NO_PROFILE, FAINT)]
        if profile is not None:
            said = described(profile)
            lines = [Content.styled(label.ljust(LABELS), FAINT) + text for label, text in said]
            try:
                require(profile.model or "", self._pointed_at)
            except ModelNotFoundError as error:
                lines.append(Content.styled(error.one_line(), "$text-warning"))
        self.query_one("#preview", Static).update(Content("\n").join(lines))

    @on(OptionList.OptionSelected)
    def picked(self, event: OptionList.OptionSelected) -> None:
        """Close with the profile."""
        self.dismiss(self._names[event.option_index])

    @on(Input.Submitted, "#name")
    def named(self, event: Input.Submitted) -> None:
        """Keep this chat's setup under a name; a name in use needs Enter twice."""
        name = event.value.strip()
        taken = name in self._chat.preferences.profiles() and name != self._chat.preferences.profile
        if taken and self._replacing != name:
            self._replacing = name
            self._say(f"{sanitise_line(name)} already exists. Press Enter again to overwrite it.")
            return
        self._replacing = ""
        try:
            said = commands.save_profile(self._chat, name, again=taken)
        except RefusedError as error:
            self._say(error.one_line())
            return
        event.input.value = ""
        self._list(name)
        self._say(said)
        self.query_one("#profiles").focus()

    def action_delete(self) -> None:
        """Delete the profile that is pointed at; it can be restored while the dialog is open."""
        name = self._pointed_at
        if name and self.query_one("#profiles").has_focus:
            self._deleted.append((name, self._chat.preferences.settings.profiles[name]))
            commands.delete_profile(self._chat, name)
            self._list("")
            self._say(f"{sanitise_line(name)} is deleted. Ctrl+Z restores it.")

    def action_undo(self) -> None:
        """Restore the profile that was deleted last."""
        if self._deleted:
            name, profile = self._deleted.pop()
            problem = self._chat.preferences.keep_profile(name, profile)
            self._list(name)
            self._say(problem or f"{sanitise_line(name)} is restored.")

    def _say(self, text: str) -> None:
        self.query_one("#state", Static).update(text)
