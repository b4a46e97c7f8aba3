"""Ctrl+T: all settings in one sheet. Ctrl+S: the system prompt, for this chat or every chat, and a library of them."""

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.events import DescendantBlur, DescendantFocus
from textual.widgets import Button, Checkbox, Input, Label, OptionList, Static, TextArea
from textual.widgets.option_list import Option

from ...backend.protocol import ModelInfo
from ...chat.listing import excerpt
from ...chat.preferences import Written
from ...sanitise import sanitise, sanitise_line
from ...settings import default_models_folder
from ...settings_form import APP_FIELDS, THIS_CHAT, Field, Form, Sheet
from ..theme import AUTOMATIC, FAINT
from . import Dialog, Tick

ONLY_HERE = "For this chat only"
NOT_USED = "Your draft; it is not applied yet. Ctrl+S applies it."
Prompts = Mapping[str, str]
"""System prompts by name."""


class SystemScreen(Dialog[Written]):
    """Edits the system prompt; the result is the new one. A change of the library is saved at once, by ``keep``.

    draft: text that was written earlier and not applied. leave: is given such text when the dialog is closed without a result, or
    None where there is none.
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
        self._replacing = ""  # the name that another Enter overwrites

    def compose(self) -> ComposeResult:
        """Yield the box."""
        with VerticalScroll(classes="box", can_focus=False) as box:
            box.border_title = "System prompt"
            yield Static(
                "Instructions for the model, before the conversation. Empty means none.", classes="note", markup=False
            )
            if self._draft is not None:
                yield Static(NOT_USED, id="draft", markup=False)
            shown = self._draft or self._current
            yield TextArea(sanitise(shown.text), compact=True, tab_behavior="focus", id="system")
            yield Tick(ONLY_HERE, value=shown.own, id="own")
            yield Label("Library", classes="group later")
            yield Static("", id="state", classes="note", markup=False)
            yield OptionList(markup=False, compact=True, id="library")
            with Horizontal(classes="field"):
                yield Label("Save it as")
                yield Input(placeholder="a name; Enter saves", id="name", compact=True)
            with Horizontal(classes="buttons"):
                yield Button("Apply", variant="primary", id="save", compact=True)
                if self._draft is not None:
                    yield Button("Discard", id="discard", compact=True)
                yield Button("Close", id="cancel", compact=True)

    def on_mount(self) -> None:
        """List the library."""
        self.say_keys("Ctrl+S applies", "Esc closes")
        self.query_one("#system").focus()
        self._list("Enter inserts · Ctrl+D deletes · Ctrl+Z restores" if self._prompts else "Empty so far.")

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
        """Insert the chosen prompt."""
        name = sorted(self._prompts)[event.option_index]
        self.query_one("#system", TextArea).text = sanitise(self._prompts[name])
        self.query_one("#name", Input).value = sanitise_line(name)
        self.query_one("#system").focus()

    @on(Input.Submitted, "#name")
    def named(self, event: Input.Submitted) -> None:
        """Save the text under a name; a name in use needs Enter twice."""
        name, text = event.value.strip(), self._text
        if not name or not text:
            self._say("Enter a name." if text else "Write the system prompt first.")
        elif self._prompts.get(name, text) != text and self._replacing != name:
            self._replacing = name
            self._say(f"{sanitise_line(name)} already exists. Press Enter again to overwrite it.")
        else:
            self._change({**self._prompts, name: text}, f"Saved as {sanitise_line(name)}.")

    def action_delete(self) -> None:
        """Delete the selected prompt; it can be restored while the dialog is open."""
        index = self.query_one("#library", OptionList).highlighted
        if index is not None and self.query_one("#library").has_focus:
            name = sorted(self._prompts)[index]
            self._deleted.append((name, self._prompts[name]))
            self._change(
                {key: text for key, text in self._prompts.items() if key != name}, "Deleted. Ctrl+Z restores it."
            )

    def action_undo(self) -> None:
        """Restore the prompt that was deleted last."""
        if self._deleted:
            name, text = self._deleted.pop()
            self._change({name: text, **self._prompts}, f"{sanitise_line(name)} is restored.")

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
        """Close with the text."""
        self.dismiss(self._written)

    @on(Button.Pressed, "#discard")
    def discard(self) -> None:
        """Replace the draft with the current prompt."""
        self.query_one("#system", TextArea).text = sanitise(self._current.text)
        self.query_one("#own", Tick).value = self._current.own
        self.query_one("#draft").display = self.query_one("#discard").display = False
        self.query_one("#system").focus()

    @on(Button.Pressed, "#cancel")
    def action_leave(self) -> None:
        """Close without a result; text that is not applied is handed over as a draft."""
        holds = sanitise(self._current.text).strip()
        self._hand_over(None if self._text == holds else self._written)
        self.dismiss(None)


EVERY_CHAT = "These apply to every chat that has no settings of its own."
OWN = "These apply to this chat only."
WIDE = ("keywords", "models_folder", "stop")
"""Fields whose texts are long: they have the room of their notes too."""
NOT_LOADED = "No model is loaded: what it can take is not known yet."
CHANGES = "Left and Right change it"


class WordInput(Input):
    """An input for one of a few words: Left and Right go from one to the next."""

    def __init__(self, text: str, hint: str, choices: tuple[str, ...], **options: Any) -> None:
        super().__init__(text, hint, **options)
        self._choices = choices

    def action_cursor_left(self, select: bool = False) -> None:  # Textual's signature
        """Take the choice before."""
        super().action_cursor_left(select) if select else self._walk(-1)

    def action_cursor_right(self, select: bool = False) -> None:
        """Take the next choice."""
        super().action_cursor_right(select) if select else self._walk(1)

    def _walk(self, by: int) -> None:
        text = self.value.strip().lower()
        at = self._choices.index(text) + by if text in self._choices else 0
        self.value = self._choices[at % len(self._choices)]
        self.cursor_position = len(self.value)


class SettingRow(Horizontal):
    """A setting: a mark where it differs from its default, its name, its text, and a note or what is wrong with it."""

    def __init__(self, field: Field, usual: str, text: str, hint: str) -> None:
        super().__init__(classes="field wide" if field.name in WIDE else "field")
        self.field = field
        self.usual = usual
        self._problem = self._caution = ""
        # The chat has a #panel of its own, which the style sheets mean.
        id_ = f"app-{field.name}" if field in APP_FIELDS else field.name
        given: dict[str, Any] = {
            "id": id_.replace(":", "-"),
            "name": field.name,
            "compact": True,
            "select_on_focus": True,
        }
        self.input = WordInput(text, hint, field.choices, **given) if field.choices else Input(text, hint, **given)
        self._mark, self._note = Static("", classes="mark"), Label("", classes="note", markup=False)

    def compose(self) -> ComposeResult:
        """Yield the parts."""
        yield self._mark
        yield Label(self.field.label, classes="name", markup=False)
        yield self.input
        yield self._note

    @property
    def differs(self) -> bool:
        """Whether it says anything else than its default."""
        return self.input.value.strip() != self.usual

    def tell(self, problem: str, caution: str) -> None:
        """Show what is wrong, or what the model can't take, in place of the note; and whether it differs."""
        self._problem, self._caution = problem, caution
        self._mark.update("●" if self.differs else "")
        brief = problem.removeprefix(f"{self.field.label}: ").partition(" (")[0]
        self._note.update(brief or caution or self.field.note)
        self.set_class(bool(problem), "-wrong")
        self.set_class(bool(caution), "-cannot")

    @property
    def about(self) -> Content:
        """What is to be said of it in full."""
        style = "$text-error" if self._problem else "$text-warning" if self._caution else FAINT
        said = Content.styled(self._problem or self._caution or self.field.note, style)
        usual = f"Default: {self.usual or 'not set'}" + (f" · {CHANGES}" if self.field.choices else "")
        return said + "\n" + Content.styled(usual, FAINT)


class SettingsScreen(Dialog[Sheet]):
    """Edits the settings; the result is the new ones, valid."""

    AUTO_FOCUS = "Input"  # Enter saves there; on the box above, it ticks
    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("ctrl+t,ctrl+s", "save", "Save", id="settings.save", priority=True),
        Binding("ctrl+r", "reset", "Default", id="settings.reset", priority=True),
        Binding("up", "app.focus_previous", "Up", id="settings.up", show=False, priority=True),
        Binding("down", "app.focus_next", "Down", id="settings.down", show=False, priority=True),
        Binding("pageup,f8", "group(-1)", "Group before", id="settings.page_up", show=False, priority=True),
        Binding("pagedown,f9", "group(1)", "Next group", id="settings.page_down", show=False, priority=True),
    ]

    def __init__(
        self,
        current: Sheet,
        everywhere: Sheet,
        info: ModelInfo | None = None,
        *,
        do: Callable[[str, str], None] = lambda _, __: None,
        profile: str = "",
        chosen_apart: Callable[[], Mapping[str, bool]] = lambda: {"theme": False, "keys": False},
    ) -> None:
        """everywhere: what every chat has that has none of its own. info: of the loaded model. do: does an action of the chat.

        chosen_apart: whether a theme was chosen, and keys.
        """
        super().__init__()
        self._do = do
        self._chosen_apart = chosen_apart
        self._everywhere = everywhere
        self._info = info
        self._current = current
        self._profile = profile
        self._form = Form(info)
        self._before = self._form.texts(current)
        self._left: set[str] = set()  # fields that the user has left: what is wrong with them is told

    def compose(self) -> ComposeResult:
        """Yield the form."""
        with Vertical(classes="box") as box:
            box.border_title = f"Settings · profile {sanitise_line(self._profile)}" if self._profile else "Settings"
            with VerticalScroll(can_focus=False, id="sheet"):
                yield Static("", id="differing", classes="note", markup=False)
                yield from self._fields()
                with Horizontal(classes="buttons"):
                    yield Button("Save", variant="primary", id="save", compact=True)
                    yield Button("Defaults", id="defaults", compact=True)
                    yield Button("Cancel", id="cancel", compact=True)
            yield Static("", id="about", classes="note", markup=False)

    def _fields(self) -> ComposeResult:
        recommended = Sheet() if self._info is None else Sheet(sampling=self._info.recommended)
        hints = {**self._form.texts(recommended), "models_folder": str(default_models_folder())}
        for scope, groups in groupby(self._form.groups, key=lambda group: group.scope):
            yield Label(scope, classes="group later")
            if scope == THIS_CHAT:
                yield Tick(ONLY_HERE, value=self._current.own, id="own")
                yield Static(OWN if self._current.own else EVERY_CHAT, id="holds", classes="note", markup=False)
                if self._info is None:
                    yield Static(NOT_LOADED, classes="cannot", markup=False)
            for group in groups:
                if group.title:
                    yield Label(group.title, classes="part")
                if group.part == "kv" and self._info is not None:
                    for note in self._info.model_notes:
                        yield Static(f"Here: {sanitise_line(note.text)}", classes="cannot", markup=False)
                for field in group.fields:
                    hint = hints[field.name] if group.part in ("sampling", "settings") else ""
                    yield SettingRow(field, self._form.defaults[field.name], self._before[field.name], hint)
        for name, label in (("theme", "Theme"), ("keys", "Keys")):
            with Horizontal(classes="field"):
                yield Static("", id=f"{name}-differs", classes="mark")
                yield Label(label, classes="name")
                yield Button("Change", id=f"choose-{name}", compact=True)

    def on_mount(self) -> None:
        """Name the keys."""
        self.say_keys("Enter saves", "Ctrl+R: default", "PageDown: next part", "Esc closes")
        self._judge()

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        """Say more of a field at the lower edge: the whole of its note, and its default."""
        del event
        self._tell_about()

    def on_descendant_blur(self, event: DescendantBlur) -> None:
        """Tell what is wrong with a field once it is left."""
        if isinstance(event.widget, Input) and event.widget.name:
            self._left.add(event.widget.name)
            self._judge()

    @on(Input.Changed)
    def changed(self) -> None:
        """Mark what differs from its default."""
        self._judge()

    @property
    def _rows(self) -> list[SettingRow]:
        return list(self.query(SettingRow))

    def _judge(self) -> dict[str, str]:
        """Show at each field what it is; return what is wrong, by the names of fields."""
        texts = self._texts
        problems, cautions = self._form.problems(texts), self._form.cautions(texts)
        for row in self._rows:
            name = row.field.name
            row.tell(problems.get(name, "") if name in self._left else "", cautions.get(name, ""))
        many = sum(row.differs for row in self._rows)
        differ = "1 differs from its default" if many == 1 else f"{many} differ from their defaults"
        text = f"● {differ}." if many else "All settings are at their defaults."
        self.query_one("#differing", Static).update(text)
        self._tell_about()
        return problems

    def _tell_about(self) -> None:
        row = self._row
        self.query_one("#about", Static).update("" if row is None else row.about)

    @property
    def _row(self) -> SettingRow | None:
        """The setting that has the focus."""
        focused = self.focused
        return focused.parent if focused is not None and isinstance(focused.parent, SettingRow) else None

    @on(Input.Submitted)
    @on(Button.Pressed, "#save")
    def action_save(self) -> None:
        """Close with the settings, or go to the first that is wrong."""
        self._left.update(row.field.name for row in self._rows)
        problems = self._judge()
        wrong = next((row for row in self._rows if row.field.name in problems), None)
        if wrong is None:
            self.dismiss(self._form.read(self._texts, own=self._own))
        else:
            wrong.input.focus()
            self._tell_about()

    @property
    def _texts(self) -> dict[str, str]:
        return {row.field.name: row.input.value for row in self._rows}

    @property
    def _own(self) -> bool:
        return self.query_one("#own", Tick).value

    @on(Checkbox.Changed, "#own")
    def scoped(self) -> None:
        """Show where they apply. A chat that gives up its own gets those of every chat, not the other way round."""
        self.query_one("#holds", Static).update(OWN if self._own else EVERY_CHAT)
        if self._current.own:
            self._write(self._form.texts(self._current if self._own else self._everywhere), THIS_CHAT)

    def _write(self, texts: Mapping[str, str], scope: str = "") -> None:
        """Write texts into the fields of a scope, or all."""
        names = {field.name for group in self._form.groups for field in group.fields if scope in ("", group.scope)}
        for row in self._rows:
            if row.field.name in names:
                row.input.value = texts[row.field.name]

    def action_reset(self) -> None:
        """Go back to the default of the setting that has the focus."""
        row = self._row
        if row is not None:
            row.input.value = row.usual
        elif self.focused is not None and self.focused.id == "choose-theme":
            self._do("theme", AUTOMATIC)
            self.on_screen_resume()

    def action_group(self, by: int) -> None:
        """Go to the first field of the next part, or of the one before."""
        firsts = [group.fields[0].name for group in self._form.groups]
        rows = [row.field.name for row in self._rows]
        row = self._row
        at = rows.index(row.field.name) if row is not None else len(rows)
        places = [rows.index(name) for name in firsts]
        others = [place for place in places if (place > at if by > 0 else place < at)]
        if others:
            self._rows[others[0] if by > 0 else others[-1]].input.focus()
        elif by > 0:
            self.query_one("#choose-theme").focus()

    def on_screen_resume(self) -> None:
        """Name the theme, which may have been chosen meanwhile; and mark what was chosen."""
        chosen = self._chosen_apart()
        theme = self.app.theme if chosen["theme"] else f"{AUTOMATIC} ({self.app.theme})"
        self.query_one("#choose-theme", Button).label = theme
        for name, is_chosen in chosen.items():
            self.query_one(f"#{name}-differs", Static).update("●" if is_chosen else "")

    @on(Button.Pressed, "#choose-theme")
    def choose_theme(self) -> None:
        """Open the list of themes; what is written here stays."""
        self._do("theme", "")

    @on(Button.Pressed, "#choose-keys")
    def choose_keys(self) -> None:
        """Open the list of keys; what is written here stays."""
        self._do("keys", "")

    @on(Button.Pressed, "#defaults")
    def defaults(self) -> None:
        """Write the defaults into the form."""
        self._write(self._form.defaults)

    @on(Button.Pressed, "#cancel")
    def action_leave(self) -> None:
        """Close without a result; tell that changes were not saved."""
        if self._texts != self._before:
            self.notify("Your changes were not saved. Enter saves them.", markup=False, timeout=5)
        self.dismiss(None)
