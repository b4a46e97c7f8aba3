"""F4: convert a model. The plan first, then the run in a process of its own, and the result, which can be used at once."""

import time
from collections.abc import Sequence
from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.widgets import Button, Input, Label, Select, Static

from tokamac.app.backend.conversion import Line, TensorWritten
from tokamac.app.backend.converter import Converter, converter_command
from tokamac.app.tui.converting import BITS, Phase, Standing, Wish
from tokamac.app.tui.screens.dialog import Dialog

FIELDS = (
    ("source", "Model", "a folder or a Hugging Face id"),
    ("recipe", "Recipe", "instead: a rule that mixes bits, such as mixed_4_6"),
    ("target_bpw", "Bits per weight", "instead: a budget for the whole, such as 4.5"),
    ("output", "New folder", "empty: here, named after the model and the bits"),
)
"""Text fields: the name in a Wish, the label, what to write."""

SHOWN = {
    "plan": (Phase.FORM, Phase.PLANNED),
    "convert": (Phase.FORM, Phase.PLANNED),
    "stop": (Phase.PLANNING, Phase.RUNNING),
    "use": (Phase.DONE,),
}
"""Buttons, and the phases in which they are there."""
CLOSES, STOPS = "Esc closes", "Esc stops"
KEYS = {
    Phase.FORM: ("Enter plans", CLOSES),
    Phase.PLANNING: (STOPS,),
    Phase.PLANNED: ("Enter converts", CLOSES),
    Phase.RUNNING: (STOPS,),
    Phase.STOPPING: (),
    Phase.DONE: ("Enter uses it now", CLOSES),
}
"""What the keys do in each phase, where the focus is then."""


class ConvertScreen(Dialog[str]):
    """Converts a model; the result is the new model's folder, if it is to be used now. ``command``: the process that converts."""

    BINDINGS = [Binding("f4", "leave", "Close", id="convert.leave", show=False)]  # noqa: RUF012 (Textual's way)

    def __init__(self, source: str, command: Sequence[str] | None = None) -> None:
        super().__init__()
        self._source = source
        self._converter = Converter(converter_command() if command is None else command)
        self.standing = Standing(time.monotonic)

    def compose(self) -> ComposeResult:
        """Yield the form, what is to be said, and the buttons."""
        with VerticalScroll(classes="box", can_focus=False) as box:
            box.border_title = "Convert a model"
            for name, label, hint in FIELDS:
                yield _field(label, Input(self._source if name == "source" else "", hint, id=name, compact=True))
                if name == "source":
                    yield _field("Bits", _bits())
            yield Static("", id="problem", markup=False)
            yield Static("", id="said", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Plan", id="plan", compact=True)
                yield Button("Convert", variant="primary", id="convert", compact=True)
                yield Button("Stop", id="stop", compact=True)
                yield Button("Use it now", variant="primary", id="use", compact=True)

    def on_mount(self) -> None:
        """Show what there is."""
        self._show()

    # Wishes ---------------------------------------------------------------------------------------------------------------

    @on(Input.Changed)
    @on(Select.Changed)
    def changed(self) -> None:
        """What was planned is not what is wished now."""
        if not self.standing.busy:
            self.standing.change()
            self._show()

    @on(Input.Submitted)
    @on(Button.Pressed, "#plan")
    def plan(self) -> None:
        """Say what would be done."""
        self._begin(dry_run=True)

    @on(Button.Pressed, "#convert")
    def convert(self) -> None:
        """Do it."""
        self._begin(dry_run=False)

    @on(Button.Pressed, "#stop")
    def stop(self) -> None:
        """End the process; what it has written stays for the next time."""
        self.standing.stop()
        self._show()
        self.run_worker(self._converter.interrupt(), group="stop")

    @on(Button.Pressed, "#use")
    def use(self) -> None:
        """Close, and have the new model loaded."""
        if self.standing.converted is not None:
            self.dismiss(str(Path(self.standing.converted.path).absolute()))

    def action_leave(self) -> None:
        """Stop what runs; else close."""
        if self.standing.phase in SHOWN["stop"]:
            self.stop()
        elif not self.standing.busy:
            self.dismiss(None)

    # The process ----------------------------------------------------------------------------------------------------------

    def _begin(self, *, dry_run: bool) -> None:
        wish = self._wish()
        if not wish.source:
            self.query_one("#source", Input).focus()
        elif not self.standing.busy:
            self.standing.begin(dry_run=dry_run)
            self._show()
            self.run_worker(self._run(wish, dry_run=dry_run), group="conversion")

    async def _run(self, wish: Wish, *, dry_run: bool) -> None:
        end = await self._converter.run(wish.arguments(dry_run=dry_run), self._take)
        self.standing.ended(end)
        self._show()
        following = {Phase.PLANNED: "#convert", Phase.DONE: "#use"}.get(self.standing.phase, "#source")
        self.call_after_refresh(self.query_one(following).focus)  # which also brings it into view

    def _take(self, line: Line) -> None:
        self.standing.take(line)
        if not isinstance(line, TensorWritten):  # they may be many, and a stage's line follows often enough
            self._show()

    def _wish(self) -> Wish:
        texts = {box.id or "": box.value.strip() for box in self.query(Input)}
        return Wish(**texts, bits=str(self.query_one("#bits", Select).value))

    # What is shown --------------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        standing = self.standing
        self.query_one("#problem", Static).update(standing.problem)
        self.query_one("#problem").display = bool(standing.problem)
        self.query_one("#said", Static).update(Content(standing.text()))
        self.query_one("#said").display = bool(standing.text())
        if (keys := KEYS[standing.phase]) != self._keys:
            self.say_keys(*keys)
        for name, phases in SHOWN.items():
            self.query_one(f"#{name}", Button).display = standing.phase in phases
        for box in (*self.query(Input), self.query_one("#bits")):
            box.disabled = standing.busy


def _field(label: str, widget: Input | Select[str]) -> Horizontal:
    return Horizontal(Label(label), widget, classes="field")


def _bits() -> Select[str]:
    choices = [("4, or as the recipe or the budget says", ""), *((bits, bits) for bits in BITS)]
    return Select(choices, value="", allow_blank=False, id="bits", compact=True)
