"""F4: convert a model. The dialog plans a conversion and starts it; it goes on in the background when the dialog is left.

It shows the one conversion that the model library runs (``Conversions``), so that it can be left and opened again.
"""

from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.widgets import Button, Input, Label, Select, Static

from ...models.conversions import BITS, ConversionForm, ConversionJob, ConversionPhase, Conversions
from . import Dialog

FIELDS = (
    ("source", "Model", "a folder or a Hugging Face ID"),
    ("recipe", "Recipe", "or a rule that mixes bits (mixed_4_6)"),
    ("target_bpw", "Bits per weight", "or an average (4.5)"),
    ("output", "New folder", "chosen for you, in {}"),
)
"""Text fields: the name in a ConversionForm, the label, a hint."""

SHOWN = {
    "plan": (ConversionPhase.FORM, ConversionPhase.PLANNED),
    "convert": (ConversionPhase.FORM, ConversionPhase.PLANNED),
    "stop": (ConversionPhase.PLANNING, ConversionPhase.RUNNING),
    "use": (ConversionPhase.DONE,),
}
"""Buttons, and the phases in which they are shown."""
CLOSES, STOPS = "Esc closes", "Esc stops"
KEYS = {
    ConversionPhase.FORM: ("Enter plans", CLOSES),
    ConversionPhase.PLANNING: (STOPS,),
    ConversionPhase.PLANNED: ("Enter converts", CLOSES),
    ConversionPhase.RUNNING: ("Esc: back to the chat, this goes on", "Ctrl+K stops"),
    ConversionPhase.STOPPING: (CLOSES,),
    ConversionPhase.DONE: ("Enter loads it", CLOSES),
}
"""What the keys do in each phase."""


class ConvertScreen(Dialog[str]):
    """Converts a model; the result is the new model's folder, if it is to be loaded.

    conversions: runs what is asked for here, and goes on with it when this is closed. One that runs already is shown instead of
    an empty form. models_folder: where the new folder goes unless another one is named.
    """

    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("f4", "leave", "Close", id="convert.leave", show=False),
        Binding("ctrl+k,f6", "stop", "Stop the conversion", id="convert.stop", show=False),
    ]

    def __init__(self, source: str, conversions: Conversions[ConversionForm], models_folder: Path) -> None:
        super().__init__()
        self._source = source
        self._conversions = conversions
        self._models_folder = models_folder

    @property
    def job(self) -> ConversionJob:
        """The conversion that is shown."""
        return self._conversions.job

    def compose(self) -> ComposeResult:
        """Yield the form, the text and the buttons."""
        with VerticalScroll(classes="box", can_focus=False) as box:
            box.border_title = "Convert a model"
            self._conversions.shown(self._source)
            form = self._conversions.form or ConversionForm(self._source)
            for name, label, hint in FIELDS:
                said = hint.format(_in_home(self._models_folder))
                yield _field(label, Input(getattr(form, name), said, id=name, compact=True))
                if name == "source":
                    yield _field("Bits", _bits_text(form.bits))
            yield Static("", id="problem", markup=False)
            yield Static("", id="said", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Plan", id="plan", compact=True)
                yield Button("Convert", variant="primary", id="convert", compact=True)
                yield Button("Stop", id="stop", compact=True)
                yield Button("Load it", variant="primary", id="use", compact=True)

    def on_mount(self) -> None:
        """Show what there is."""
        self._conversions.watcher = self._hear
        self._shown_phase = self.job.phase
        self._show()

    def on_unmount(self) -> None:
        """Leave what runs to the background."""
        self._conversions.watcher = None

    # What the user wants --------------------------------------------------------------------------------------------------

    @on(Input.Changed)
    @on(Select.Changed)
    def changed(self) -> None:
        """Drop the plan: the form was changed."""
        if not self.job.busy and self._form() != self._conversions.form:
            self.job.change()
            self._show()

    @on(Input.Submitted)
    @on(Button.Pressed, "#plan")
    def plan(self) -> None:
        """Plan the conversion."""
        self._begin(dry_run=True)

    @on(Button.Pressed, "#convert")
    def convert(self) -> None:
        """Run the conversion."""
        self._begin(dry_run=False)

    @on(Button.Pressed, "#stop")
    def action_stop(self) -> None:
        """Stop the process; a conversion can be resumed."""
        self._conversions.stop()

    @on(Button.Pressed, "#use")
    def use(self) -> None:
        """Close, and have the new model loaded."""
        if self.job.converted is not None:
            folder = str(Path(self.job.converted.path).absolute())
            self._conversions.seen()
            self.dismiss(folder)

    def action_leave(self) -> None:
        """Stop planning; else close, and let a conversion go on."""
        if self.job.phase is ConversionPhase.PLANNING:
            self._conversions.stop()
        else:
            self._conversions.seen()
            self.dismiss(None)

    # The process ----------------------------------------------------------------------------------------------------------

    def _begin(self, *, dry_run: bool) -> None:
        form = self._form()
        if not form.source:
            self.query_one("#source", Input).focus()
        elif not self.job.busy:
            self._conversions.begin(form, dry_run=dry_run)

    def _hear(self) -> None:
        """Show what has changed, and lead to what comes next."""
        before, phase = self._shown_phase, self.job.phase
        self._shown_phase = phase
        self._show()
        if phase is not before and not self.job.busy:
            following = {ConversionPhase.PLANNED: "#convert", ConversionPhase.DONE: "#use"}.get(phase, "#source")
            self.call_after_refresh(self.query_one(following).focus)  # which also brings it into view

    def _form(self) -> ConversionForm:
        texts = {box.id or "": box.value.strip() for box in self.query(Input)}
        bits = str(self.query_one("#bits", Select).value)
        output = texts.pop("output")
        if output and output not in (".", "..") and "/" not in output and not output.startswith("~"):
            output = str(self._models_folder / output)
        return ConversionForm(**texts, output=output, bits=bits, into=str(self._models_folder))

    # What is shown --------------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        job = self.job
        self.query_one("#problem", Static).update(job.problem)
        self.query_one("#problem").display = bool(job.problem)
        self.query_one("#said", Static).update(Content(job.text()))
        self.query_one("#said").display = bool(job.text())
        if (keys := KEYS[job.phase]) != self._keys:
            self.say_keys(*keys)
        for name, phases in SHOWN.items():
            self.query_one(f"#{name}", Button).display = job.phase in phases
        for box in (*self.query(Input), self.query_one("#bits")):
            box.disabled = job.busy


def _field(label: str, widget: Input | Select[str]) -> Horizontal:
    return Horizontal(Label(label), widget, classes="field")


def _in_home(folder: Path) -> str:
    """Return a folder's path as a person would write it."""
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


def _bits_text(bits: str) -> Select[str]:
    choices = [("4, or by the recipe or the average", ""), *((bits, bits) for bits in BITS)]
    return Select(choices, value=bits, allow_blank=False, id="bits", compact=True)
