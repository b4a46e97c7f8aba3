"""Ctrl+T: sampling, KV cache and memory settings, checked by the dataclasses that hold them."""

from dataclasses import dataclass

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.events import DescendantFocus
from textual.widgets import Button, Checkbox, Input, Label, Static

from tokamac.app.settings import Settings
from tokamac.app.tui.options import (
    KV_FIELDS,
    MEMORY_FIELDS,
    RARE_FIELDS,
    SAMPLING_FIELDS,
    USUAL_FIELDS,
    Field,
    FieldError,
    read_kv,
    read_memory,
    read_sampling,
    write,
)
from tokamac.app.tui.screens.dialog import Dialog
from tokamac.app.tui.screens.system import THIS_CHAT
from tokamac.app.tui.widgets.tick import Tick
from tokamac.engine.errors import OptionError
from tokamac.engine.options import KVSpec, Sampling

NOTES = {field.name: field.note for field in (*SAMPLING_FIELDS, *KV_FIELDS, *MEMORY_FIELDS)}

EVERY_CHAT = "These hold in every chat that has none of its own."
OWN = "This chat has its own; in others, those of every chat hold."


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the form says, valid. own: the sampling is this chat's alone. The rest: see ``Settings``."""

    sampling: Sampling
    kv: KVSpec
    unload_after_min: int | None
    own: bool = False
    memory_gb: float | None = None


class SettingsScreen(Dialog[Chosen]):
    """Edits the settings; the result is the new ones, valid."""

    AUTO_FOCUS = "Input"  # Enter saves there; on the box above, it ticks
    BINDINGS = [Binding("ctrl+t,ctrl+s", "save", "Save", id="settings.save", priority=True)]  # noqa: RUF012 (Textual's way)

    def __init__(self, current: Chosen, recommended: Sampling, everywhere: Sampling) -> None:
        """everywhere: the sampling that holds in every chat that has none of its own."""
        super().__init__()
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
            yield Label("KV cache (a change loads the model again)", classes="group later")
            for field in KV_FIELDS:
                yield from _line(field, self._current.kv)
            yield Label("Memory", classes="group later")
            for field in MEMORY_FIELDS:
                yield from _line(field, self._current)
            yield Label("More about sampling", classes="group later")
            for field in RARE_FIELDS:
                yield from _line(field, self._current.sampling)
            with Horizontal(classes="buttons"):
                yield Button("Save", variant="primary", id="save", compact=True)
                yield Button("Defaults", id="defaults", compact=True)
                yield Button("Cancel", id="cancel", compact=True)

    def on_mount(self) -> None:
        """Name the keys."""
        self.say_keys("Enter saves", "Esc closes")
        self._before = self._texts

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        """Say at the lower edge what is said of a field beside it, for windows that have no room there."""
        self.query_one("#about", Static).update(NOTES.get(event.widget.id or "", ""))

    @on(Input.Submitted)
    @on(Button.Pressed, "#save")
    def action_save(self) -> None:
        """Close with the settings, or say what is wrong with them."""
        texts = self._texts
        try:
            chosen = Chosen(read_sampling(texts), read_kv(texts), own=self._own, **read_memory(texts))
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
        """Say where the sampling holds. A chat that gives its own up gets that of every chat, not the other way round."""
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

    @on(Button.Pressed, "#defaults")
    def defaults(self) -> None:
        """Write the defaults into the form."""
        self._write(Sampling())
        for field in KV_FIELDS:
            self.query_one(f"#{field.name}", Input).value = write(field, KVSpec())
        for field in MEMORY_FIELDS:
            self.query_one(f"#{field.name}", Input).value = write(field, Settings())

    @on(Button.Pressed, "#cancel")
    def action_leave(self) -> None:
        """Close without a result, and say so where one would have been another."""
        if self._texts != self._before:
            self.notify("The settings are as they were: Enter saves what is changed.", markup=False, timeout=4)
        self.dismiss(None)


def _line(field: Field, options: Sampling | KVSpec | Chosen, placeholder: str = "") -> ComposeResult:
    with Horizontal(classes="field"):
        yield Label(field.label)
        yield Input(
            write(field, options), placeholder, id=field.name, name=field.name, compact=True, select_on_focus=True
        )
        yield Label(field.note, classes="note", markup=False)
