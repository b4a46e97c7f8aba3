"""Ctrl+T: sampling, KV cache and memory settings. Ctrl+S: the system prompt, for this chat or every chat, and a library of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.events import DescendantFocus
from textual.widgets import Button, Checkbox, Input, Label, OptionList, Static, TextArea
from textual.widgets.option_list import Option

from tokamac.engine.errors import OptionError
from tokamac.engine.options import KVSpec, Sampling, TemplateOptions

from ...chat.listing import excerpt
from ...chat.preferences import (
    KV_FIELDS,
    MEMORY_FIELDS,
    RARE_FIELDS,
    SAMPLING_FIELDS,
    TEMPLATE_FIELDS,
    USUAL_FIELDS,
    Field,
    FieldError,
    Written,
    read_kv,
    read_memory,
    read_sampling,
    read_template,
    write,
)
from ...sanitise import sanitise, sanitise_line
from ...settings import CHAT_KV, Settings
from ..theme import FAINT
from . import Dialog, Tick

THIS_CHAT = "For this chat only"
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
            yield Tick(THIS_CHAT, value=shown.own, id="own")
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


NOTES = {field.name: field.note for field in (*SAMPLING_FIELDS, *TEMPLATE_FIELDS, *KV_FIELDS, *MEMORY_FIELDS)}

EVERY_CHAT = "These apply to every chat that has no settings of its own."
OWN = "These apply to this chat only."


@dataclass(frozen=True, slots=True)
class Chosen:
    """The form's values, valid. own: the sampling is this chat's alone. The rest: see ``Settings``."""

    sampling: Sampling
    kv: KVSpec
    unload_after_min: int | None
    own: bool = False
    memory_gb: float | None = None
    template: TemplateOptions = dataclass_field(default_factory=TemplateOptions)


class SettingsScreen(Dialog[Chosen]):
    """Edits the settings; the result is the new ones, valid."""

    AUTO_FOCUS = "Input"  # Enter saves there; on the box above, it ticks
    BINDINGS = [Binding("ctrl+t,ctrl+s", "save", "Save", id="settings.save", priority=True)]  # noqa: RUF012 (Textual's way)

    def __init__(
        self,
        current: Chosen,
        recommended: Sampling,
        everywhere: Sampling,
        do: Callable[[str], None] = lambda _: None,
    ) -> None:
        """everywhere: the sampling of every chat that has none of its own. do: does the chat's action of an id."""
        super().__init__()
        self._do = do
        self._everywhere = everywhere
        self._recommended = recommended
        self._current = current
        self._before: dict[str, str] = {}

    def compose(self) -> ComposeResult:
        """Yield the form."""
        with VerticalScroll(classes="box", can_focus=False) as box:
            box.border_title = "Settings"
            yield Static("", id="about", classes="note", markup=False)
            yield Static("", id="problem", markup=False)
            yield Label("Sampling", classes="group")
            yield Static(OWN if self._current.own else EVERY_CHAT, id="holds", classes="note", markup=False)
            yield Tick(THIS_CHAT, value=self._current.own, id="own")
            for field in USUAL_FIELDS:
                yield from _line(field, self._current.sampling, write(field, self._recommended))
            yield Label("Thinking and chat template (/thinking changes this chat only)", classes="group later")
            for field in TEMPLATE_FIELDS:
                yield from _line(field, self._current.template)
            yield Label("KV cache (a change reloads the model)", classes="group later")
            for field in KV_FIELDS:
                yield from _line(field, self._current.kv)
            yield Label("Memory", classes="group later")
            for field in MEMORY_FIELDS:
                yield from _line(field, self._current)
            yield Label("More about sampling", classes="group later")
            for field in RARE_FIELDS:
                yield from _line(field, self._current.sampling)
            yield Label("Colours and keys", classes="group later")
            for name, label in (("theme", "Theme"), ("keys", "Keys")):
                with Horizontal(classes="field"):
                    yield Label(label)
                    yield Button("Change", id=f"choose-{name}", compact=True)
            with Horizontal(classes="buttons"):
                yield Button("Save", variant="primary", id="save", compact=True)
                yield Button("Defaults", id="defaults", compact=True)
                yield Button("Cancel", id="cancel", compact=True)

    def on_mount(self) -> None:
        """Name the keys."""
        self.say_keys("Enter saves", "Esc closes")
        self._before = self._texts

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        """Show a field's note at the lower edge, for windows that have no room beside the field."""
        self.query_one("#about", Static).update(NOTES.get(event.widget.id or "", ""))

    @on(Input.Submitted)
    @on(Button.Pressed, "#save")
    def action_save(self) -> None:
        """Close with the settings, or show what is wrong with them."""
        texts = self._texts
        try:
            template = read_template(texts)
            chosen = Chosen(
                read_sampling(texts), read_kv(texts), own=self._own, template=template, **read_memory(texts)
            )
        except FieldError as error:
            self.query_one(f"#{error.name}", Input).focus()
            self._say(str(error))
        except OptionError as error:
            self._say(error.one_line())
        else:
            self.dismiss(chosen)

    @property
    def _texts(self) -> dict[str, str]:
        return {box.name or "": box.value for box in self.query(Input)}

    @property
    def _own(self) -> bool:
        return self.query_one("#own", Tick).value

    @on(Checkbox.Changed, "#own")
    def scoped(self) -> None:
        """Show where the sampling applies. A chat that gives up its own gets that of every chat, not the other way round."""
        self.query_one("#holds", Static).update(OWN if self._own else EVERY_CHAT)
        if self._current.own:
            self._write(self._current.sampling if self._own else self._everywhere)

    def _write(self, sampling: Sampling) -> None:
        for field in SAMPLING_FIELDS:
            self.query_one(f"#{field.name}", Input).value = write(field, sampling)

    def _say(self, problem: str) -> None:
        self.query_one("#problem", Static).update(problem)
        self.query_one("#problem").display = True
        self.query_one(".box").scroll_home(animate=False)

    def on_screen_resume(self) -> None:
        """Name the theme, which may have been chosen meanwhile."""
        self.query_one("#choose-theme", Button).label = self.app.theme

    @on(Button.Pressed, "#choose-theme")
    def choose_theme(self) -> None:
        """Open the list of themes; what is written here stays."""
        self._do("theme")

    @on(Button.Pressed, "#choose-keys")
    def choose_keys(self) -> None:
        """Open the list of keys; what is written here stays."""
        self._do("keys")

    @on(Button.Pressed, "#defaults")
    def defaults(self) -> None:
        """Write the defaults into the form."""
        self._write(Sampling())
        for field in TEMPLATE_FIELDS:
            self.query_one(f"#{field.name}", Input).value = write(field, TemplateOptions())
        for field in KV_FIELDS:
            self.query_one(f"#{field.name}", Input).value = write(field, CHAT_KV)
        for field in MEMORY_FIELDS:
            self.query_one(f"#{field.name}", Input).value = write(field, Settings())

    @on(Button.Pressed, "#cancel")
    def action_leave(self) -> None:
        """Close without a result; tell that changes were not saved."""
        if self._texts != self._before:
            self.notify("Your changes were not saved. Enter saves them.", markup=False, timeout=5)
        self.dismiss(None)


def _line(field: Field, options: Sampling | TemplateOptions | KVSpec | Chosen, placeholder: str = "") -> ComposeResult:
    with Horizontal(classes="field"):
        yield Label(field.label)
        yield Input(
            write(field, options), placeholder, id=field.name, name=field.name, compact=True, select_on_focus=True
        )
        yield Label(field.note, classes="note", markup=False)
