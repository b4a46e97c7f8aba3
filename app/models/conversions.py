"""A conversion beside the chat, as a state machine: what its process says goes in; text and a phase come out.

FORM ──▶ PLANNING ──▶ PLANNED ──▶ RUNNING ──▶ DONE
  ▲          └───────────┴───────────┴── STOPPING
  └── refused, interrupted, or the form was changed
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, Protocol, TypeVar

from .. import INTERRUPTED
from ..backend.command_process import Ended, Refused
from ..backend.converter import (
    ConversionLine,
    ConvertedLine,
    Converter,
    Expected,
    PartLine,
    Planned,
    QualityLine,
    StageLine,
    TensorWritten,
)
from ..output import table
from ..sanitise import sanitise_line
from ..units import UNKNOWN, count, rate, seconds, short, size
from ..verdict import closeness

BITS = ("2", "3", "4", "5", "6", "8")

BAR_CELLS = 24


@dataclass(frozen=True, slots=True)
class ConversionForm:
    """The texts of the form; an empty one is left to the command's default. into: the folder for a new folder without a name."""

    source: str
    output: str = ""
    bits: str = ""
    recipe: str = ""
    target_bpw: str = ""
    into: str = ""

    def arguments(self, *, dry_run: bool) -> list[str]:
        """Return the command's arguments. Values are joined to their flags, so that none can be taken for another flag."""
        given = {
            "--output": self.output,
            "--into": "" if self.output else self.into,
            "--bits": self.bits,
            "--recipe": self.recipe,
            "--target-bpw": self.target_bpw,
        }
        flags = [f"{flag}={value}" for flag, value in given.items() if value]
        return ["--json", *(["--dry-run"] if dry_run else []), *flags, "--", self.source]


class WantedConversion(Protocol):
    """What is to be converted, and how. ``ConversionForm`` is one."""

    @property
    def source(self) -> str:
        """The model."""

    def arguments(self, *, dry_run: bool) -> list[str]:
        """Return the command's arguments."""


Asked = TypeVar("Asked", bound=WantedConversion)


class ConversionPhase(Enum):
    """What a conversion is doing."""

    FORM = auto()
    PLANNING = auto()
    PLANNED = auto()
    RUNNING = auto()
    STOPPING = auto()
    DONE = auto()


BUSY = (ConversionPhase.PLANNING, ConversionPhase.RUNNING, ConversionPhase.STOPPING)


class ConversionJob:
    """One conversion. Attributes are for reading. problem: why it stopped, to be shown. resumes: it is more than a plan."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = 0.0
        self.resumes = False
        self.phase = ConversionPhase.FORM
        self.problem = ""
        self.planned: Planned | None = None
        self.stage: StageLine | None = None
        self.tensors: TensorWritten | None = None
        self.expected: Expected | None = None
        self.converted: ConvertedLine | None = None

    @property
    def busy(self) -> bool:
        """Whether a process is at work."""
        return self.phase in BUSY

    def change(self) -> None:
        """The form was changed: the plan no longer applies."""
        self.phase, self.problem, self.planned, self.converted = ConversionPhase.FORM, "", None, None

    def begin(self, *, dry_run: bool) -> None:
        """A process was started."""
        self.phase, self.problem = (ConversionPhase.PLANNING if dry_run else ConversionPhase.RUNNING), ""
        self.resumes = not dry_run
        self.stage = self.tensors = self.expected = self.converted = None

    def stop(self) -> None:
        """The process was asked to stop. Asked again, nothing changes."""
        self.phase = ConversionPhase.STOPPING

    def take(self, line: ConversionLine) -> None:
        """Take a line of the process."""
        match line:
            case Planned():
                self.planned = line
            case StageLine():
                if self.stage is None or self.stage.stage != line.stage:
                    self._began_s = self._clock()
                self.stage = line
            case TensorWritten():
                self.tensors = line
            case Expected():
                self.expected = line
            case ConvertedLine():
                self.converted = line
            case Refused(error, hint):
                self.problem = sanitise_line(f"{error}. {hint}" if hint else error)

    def ended(self, end: Ended) -> None:
        """The process is over."""
        stopped = self.phase is ConversionPhase.STOPPING or end.status == INTERRUPTED
        if end.status == 0 and self.converted is not None:
            self.phase = ConversionPhase.DONE
        elif end.status == 0 and self.planned is not None:
            self.phase = ConversionPhase.PLANNED
        else:
            self.phase = ConversionPhase.FORM
            if stopped:
                self.problem = "Stopped. The same conversion resumes from here." if self.resumes else "Stopped."
            elif not self.problem:
                self.problem = end.last_line or f"The conversion ended with exit status {end.status}."

    def text(self) -> str:
        """Return the plan, progress or result, as lines."""
        match self.phase:
            case ConversionPhase.PLANNING:
                return "Planning …"
            case ConversionPhase.RUNNING:
                return self._progress()
            case ConversionPhase.STOPPING:
                return "Stopping after the current tensor …"
            case ConversionPhase.DONE if self.converted is not None:
                return result_text(self.converted, self.expected)
            case ConversionPhase.PLANNED if self.planned is not None:
                return plan_text(self.planned)
            case _:
                return ""

    def brief(self) -> str:
        """Return the progress in a few words: ``converting 34 %``."""
        if self.phase is ConversionPhase.STOPPING:
            return "stopping …"
        if self.stage is None:
            return "starting …"
        share = f" {100 * self.stage.done // self.stage.total} %" if self.stage.total else ""
        return f"{sanitise_line(self.stage.stage)}{share}"

    def _progress(self) -> str:
        at = self.stage
        if at is None:
            return "Starting …"
        written = "" if self.tensors is None else f"{count(self.tensors.done)} of {count(self.tensors.total)} tensors"
        memory = "" if at.peak_memory_bytes is None else f"peak memory {size(at.peak_memory_bytes)}"
        below = " · ".join(part for part in (written, memory) if part)
        return f"{sanitise_line(at.stage)}  {self._share(at)}\n{below}"

    def _share(self, at: StageLine) -> str:
        if not at.total:
            return size(at.done) if at.unit == "bytes" else count(at.done)
        filled = BAR_CELLS * at.done // at.total
        done, total = (size(at.done), size(at.total)) if at.unit == "bytes" else (count(at.done), count(at.total))
        bar = "█" * filled + "░" * (BAR_CELLS - filled)
        return f"{bar} {100 * at.done // at.total} %  {done} of {total}{self._left(at.done, at.total)}"

    def _left(self, done: int, total: int) -> str:
        """Return the time left at the rate so far, once it is meaningful."""
        elapsed_s = self._clock() - self._began_s
        if elapsed_s < 2 or not done or done >= total:
            return ""
        return f"  {seconds(elapsed_s * (total - done) / done)} left"


def plan_text(planned: Planned) -> str:
    """Return a plan as text."""
    rows = [_part(line) for line in planned.parts]
    sizes = (
        f"{size(planned.source_bytes)} → {size(planned.weight_bytes)}, {planned.bits_per_weight:.2f} bits per weight"
    )
    disk = planned.disk
    room = f"{size(disk.needed)} needed, {size(disk.free)} free{'' if disk.fits else ': does not fit'}"
    figures = [
        ["to", sanitise_line(planned.path)],
        ["weights", sizes],
        ["memory", f"{size(planned.peak_memory_bytes)} at most"],
        ["disk", room],
        ["time", _time(planned)],
    ]
    notes = [f"Note: {sanitise_line(note)}." for note in planned.notes]
    if not disk.fits:
        missing = size(disk.needed - disk.free)
        notes.insert(0, f"Warning: this disk is too small by {missing}. Free some space, or choose another folder.")
    return "\n".join([table(rows, right=(2, 3)), "", table(figures), *notes])


def _time(planned: Planned) -> str:
    """Return about how long it takes, the quality check told apart."""
    if planned.seconds is None:
        return UNKNOWN
    about = "" if planned.quality_seconds is None else f"about {seconds(planned.quality_seconds)} for "
    return f"about {seconds(planned.seconds)}, plus {about}a quality check"


def result_text(found: ConvertedLine, expected: Expected | None) -> str:
    """Return the result as text, warnings last."""
    sizes = f"{size(found.source_bytes)} → {size(found.weight_bytes)}, {found.bits_per_weight:.2f} bits per weight"
    figures = [
        ["done", sanitise_line(found.path)],
        ["size", sizes],
        ["speed", _speed(expected)],
        ["took", f"{seconds(found.seconds)}, {size(found.peak_memory_bytes)} of memory at most"],
    ]
    return "\n".join([table(figures), "", *_quality(found.quality)])


def _speed(expected: Expected | None) -> str:
    """Return the speeds before and after; what is unknown has its reason."""
    if expected is None or (expected.before_tps is None and expected.after_tps is None):
        said = UNKNOWN
    else:
        said = f"{rate(expected.before_tps)} → {rate(expected.after_tps)} expected here"
    return f"{said} ({sanitise_line(expected.reason)})" if expected is not None and expected.reason else said


def _part(line: PartLine) -> list[str]:
    packing = line.packing
    bits = "not quantized" if packing is None else f"{packing.bits} bits"
    if packing is not None and packing.mode != "affine":
        bits = sanitise_line(packing.mode)
    return [sanitise_line(line.part), bits, short(line.parameters), size(line.nbytes)]


def _quality(found: QualityLine | None) -> list[str]:
    if found is None:
        return ["Not compared with the source."]
    said = [f"Quality: {closeness(found, found.relative_error)}."]
    if found.unable is not None:
        said.append(f"No text was compared: {sanitise_line(found.unable)}")
    return [*said, *(f"Warning: {sanitise_line(each)}" for each in found.concerns)]


class Conversions(Generic[Asked]):
    """Runs at most one conversion in the background, or its plan; what it came to stays until somebody has seen it.

    ``spawn`` runs a coroutine in the background; ``changed`` is called after every change, and so is ``watcher`` while a dialog
    shows it. ``ended`` is called once a conversion is over that no dialog shows.
    """

    def __init__(
        self,
        command: Sequence[str],
        clock: Callable[[], float],
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        changed: Callable[[], None],
        ended: Callable[[ConversionJob], None],
    ) -> None:
        self._converter = Converter(command)
        self._spawn = spawn
        self._changed = changed
        self._ended = ended
        self.job = ConversionJob(clock)
        self.form: Asked | None = None
        self.watcher: Callable[[], None] | None = None

    @property
    def running(self) -> Asked | None:
        """What is being converted; None while nothing is, or only planned."""
        at_work = self.job.phase in (ConversionPhase.RUNNING, ConversionPhase.STOPPING)
        return self.form if at_work and self.job.resumes else None

    def shown(self, source: str) -> None:
        """A dialog for ``source`` opens: it shows what runs, or what a conversion of it came to; else an empty form."""
        if not self.job.busy and (self.form is None or self.form.source != source):
            self.seen()

    def seen(self) -> None:
        """Forget the plan or the result; what runs goes on."""
        if not self.job.busy:
            self.job.change()
            self.form = None

    def begin(self, form: Asked, *, dry_run: bool) -> None:
        """Plan, or convert; not while either is under way."""
        if not self.job.busy:
            self.form = form
            self.job.begin(dry_run=dry_run)
            self._tell()
            self._spawn(self._run(form, dry_run=dry_run))

    def stop(self) -> None:
        """Ask the process to stop. A conversion can be resumed."""
        if self.job.busy:
            self.job.stop()
            self._tell()
            self._spawn(self._converter.interrupt())

    async def _run(self, form: Asked, *, dry_run: bool) -> None:
        try:
            end = await self._converter.run(form.arguments(dry_run=dry_run), self._take)
        except OSError as error:
            end = Ended(1, f"The conversion could not be started: {error}")
        self.job.ended(end)
        if not dry_run and self.watcher is None:
            self._ended(self.job)
        self._tell()

    def _take(self, line: ConversionLine) -> None:
        self.job.take(line)
        if not isinstance(line, TensorWritten):  # there may be many, and a stage's line follows often enough
            self._tell()

    def _tell(self) -> None:
        self._changed()
        if self.watcher is not None:
            self.watcher()
