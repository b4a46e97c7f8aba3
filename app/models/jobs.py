"""Background downloads and conversions in child processes, as state machines: process output in, text and phase out."""

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Generic, Protocol, TypeVar

from tokamac.engine import metrics as rates
from tokamac.engine.hub.download import ADVICE

from .. import INTERRUPTED
from ..backend.processes import (
    ConversionLine,
    ConvertedLine,
    Converter,
    Ended,
    Expected,
    PartLine,
    Planned,
    Puller,
    PullLine,
    PullProgress,
    QualityLine,
    Refused,
    Removed,
    StageLine,
    TensorWritten,
    pull_arguments,
    remove_arguments,
)
from ..reports.verdict import changed_text, closeness
from ..text.sanitise import sanitise_line
from ..text.terminal import table
from ..text.units import UNKNOWN, count, rate, seconds, short, size

# Downloads: partial files stay, so a paused download resumes even after a restart.
#
#     WAITING ──▶ RUNNING ──▶ (complete: removed)
#        ▲           ├── PAUSING ────▶ PAUSED ──┐
#        │           ├── CANCELLING ──▶ (gone)  │
#        │           └──▶ FAILED ───────────────┤
#        └──────────── resumed ─────────────────┘


AGAIN = "Press Enter on it in the list to retry."

ARRIVED = "The part that has arrived is kept."

RATE_OVER_S = 10.0  # seconds over which the rate is measured

SAMPLED = 200  # one part in so many of what is left must have come before a time is named, or the first seconds be over


class DownloadStage(Enum):
    WAITING = auto()
    RUNNING = auto()
    PAUSING = auto()
    PAUSED = auto()
    CANCELLING = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class Download:
    """One download, in bytes, bytes/s and seconds; None is unknown.

    Attributes:
        problem: reason and hint, phrased to follow "name:".
        loads: load it when complete.
        freed: partial bytes removed by a cancel.
    """

    model: str
    stage: DownloadStage = DownloadStage.WAITING
    done: int | None = None
    total: int | None = None
    rate_bps: float | None = None
    left_s: float | None = None
    problem: str = ""
    loads: bool = False
    freed: int = 0


class Downloads:
    """Runs downloads. ``spawn`` runs a coroutine; ``changed`` is called after every change.

    ended: called once a download is complete, failed or removed. again: tells users how to retry.
    """

    def __init__(
        self,
        command: Sequence[str],
        clock: Callable[[], float],
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        changed: Callable[[], None],
        ended: Callable[[Download], None],
        again: str = AGAIN,
    ) -> None:
        self._command = command
        self._retry = again
        self._puller = Puller(command)
        self._clock = clock
        self._spawn = spawn
        self._changed = changed
        self._ended = ended
        self._all: dict[str, Download] = {}
        self._samples: deque[tuple[float, int]] = deque()
        self._at_work = False
        self._wanted_again: set[str] = set()  # resumed before their processes had ended

    @property
    def all(self) -> tuple[Download, ...]:
        return tuple(self._all.values())

    def find(self, model: str) -> Download | None:
        return self._all.get(model)

    @property
    def running(self) -> Download | None:
        at_work = (DownloadStage.RUNNING, DownloadStage.PAUSING, DownloadStage.CANCELLING)
        return next((each for each in self.all if each.stage in at_work), None)

    # What the user wants --------------------------------------------------------------------------------------------------

    def start(self, model: str, *, loads: bool = False) -> None:
        """Download or resume ``model``. loads: load it then."""
        known = self._all.get(model, Download(model))
        resumed = known.stage in (DownloadStage.PAUSED, DownloadStage.FAILED)
        if known.stage is DownloadStage.PAUSING:
            self._wanted_again.add(model)
        self._all[model] = replace(
            known, stage=DownloadStage.WAITING if resumed else known.stage, problem="", loads=loads or known.loads
        )
        self._changed()
        if not self._at_work:
            self._at_work = True
            self._spawn(self._work())

    def keep_unloaded(self) -> None:
        """Load none on completion: another model was chosen."""
        for model in self._all:
            self._all[model] = replace(self._all[model], loads=False)
        self._changed()

    def pause(self, model: str) -> None:
        self._wanted_again.discard(model)
        match self._stage(model):
            case DownloadStage.WAITING:
                self._set(model, stage=DownloadStage.PAUSED)
            case DownloadStage.RUNNING:
                self._set(model, stage=DownloadStage.PAUSING)
                self._spawn(self._puller.interrupt())
            case _:
                pass

    def cancel(self, model: str) -> None:
        """Stop a download and delete its partial files, also an earlier run's."""
        # One that has not started in this run is only dropped: an earlier run's partial files are listed again.
        match self._stage(model):
            case DownloadStage.RUNNING | DownloadStage.PAUSING:
                self._set(model, stage=DownloadStage.CANCELLING)
                self._spawn(self._puller.interrupt())
            case DownloadStage.CANCELLING:
                pass
            case DownloadStage.WAITING if self._all[model].done is None:
                del self._all[model]
                self._changed()
            case _:
                self._all[model] = Download(model, DownloadStage.CANCELLING)
                self._changed()
                self._spawn(self._discard(model))

    # The process ----------------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        try:
            while (model := self._next()) is not None:
                await self._run(model)
        finally:
            self._at_work = False

    def _next(self) -> str | None:
        return next((each.model for each in self.all if each.stage is DownloadStage.WAITING), None)

    async def _run(self, model: str) -> None:
        self._samples.clear()
        self._set(model, stage=DownloadStage.RUNNING, rate_bps=None, left_s=None)
        try:
            end = await self._puller.run(pull_arguments(model), lambda line: self._read_line(model, line))
        except OSError as error:
            self._fail(model, f"it could not be started: {error}. {self._retry}")
            return
        stage = self._stage(model)
        if end.status == 0:  # also where it was to stop, but finished first
            self._ended(replace(self._all.pop(model), stage=DownloadStage.RUNNING))
            self._changed()
        elif stage is DownloadStage.CANCELLING:
            await self._discard(model)
        elif stage is DownloadStage.PAUSING or end.status == INTERRUPTED:
            again = model in self._wanted_again
            self._wanted_again.discard(model)
            stage = DownloadStage.WAITING if again else DownloadStage.PAUSED
            self._set(model, stage=stage, rate_bps=None, left_s=None)
        else:
            why = self._all[model].problem or _sentence(end.last_line or f"it ended with exit status {end.status}")
            self._fail(model, f"{why} {self._retry}")

    def _read_line(self, model: str, line: PullLine) -> None:
        match line:
            case PullProgress(done, total):
                self._measure(model, done, total)
            case Refused(error, hint):
                self._set(model, problem=_why(error, hint))
            case _:
                pass

    def _measure(self, model: str, done: int, total: int | None) -> None:
        now = self._clock()
        self._samples.append((now, done))
        while now - self._samples[0][0] > RATE_OVER_S:
            self._samples.popleft()
        began_s, first = self._samples[0]
        rate_bps = rates.rate(done - first, now - began_s) if done > first else None
        left_s = None if not rate_bps or total is None else (total - done) / rate_bps
        if total is not None and now - began_s < RATE_OVER_S and SAMPLED * (done - first) < total - done:
            rate_bps = left_s = None  # small files come first, and say little of how fast the weights will come
        self._set(model, done=done, total=total, rate_bps=rate_bps, left_s=left_s)

    async def _discard(self, model: str) -> None:
        refused: list[str] = []
        freed = 0

        def receive(line: PullLine) -> None:
            nonlocal freed
            match line:
                case Refused(error, hint):
                    refused.append(_why(error, hint))
                case Removed(_, freed_bytes):
                    freed = freed_bytes
                case _:
                    pass

        try:
            end = await Puller(self._command).run(remove_arguments(model, unfinished=True), receive)
            if end.status and not refused:
                refused.append(end.last_line or f"exit status {end.status}")
        except OSError as error:
            refused.append(str(error))
        if refused:
            self._fail(model, refused[0])
        elif (gone := self._all.pop(model, None)) is not None:
            self._ended(replace(gone, freed=freed))
            self._changed()

    def _fail(self, model: str, why: str) -> None:
        self._set(model, stage=DownloadStage.FAILED, problem=why, rate_bps=None, left_s=None)
        self._ended(self._all[model])

    def _stage(self, model: str) -> DownloadStage | None:
        return self._all[model].stage if model in self._all else None

    def _set(self, model: str, **fields: Any) -> None:
        self._all[model] = replace(self._all[model], **fields)
        self._changed()


def _why(error: str, hint: str) -> str:
    return f"{_sentence(error)} {hint.replace(ADVICE, ARRIVED)}".rstrip()


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


# Conversions:
#
# FORM ──▶ PLANNING ──▶ PLANNED ──▶ RUNNING ──▶ DONE
#   ▲          └───────────┴───────────┴── STOPPING
#   └── refused, interrupted, or form changed


BITS = ("2", "3", "4", "5", "6", "8")

BAR_CELLS = 24


@dataclass(frozen=True, slots=True)
class ConversionForm:
    """Form texts; empty means the command's default. into: parent of an unnamed new folder."""

    source: str
    output: str = ""
    bits: str = ""
    recipe: str = ""
    target_bpw: str = ""
    into: str = ""

    def arguments(self, *, dry_run: bool) -> list[str]:
        """Return arguments as ``--flag=value``, so that no value can be taken for a flag."""
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
    """A conversion request; ``ConversionForm`` is one."""

    @property
    def source(self) -> str:
        """The model."""

    def arguments(self, *, dry_run: bool) -> list[str]:
        """Return the command's arguments."""


Asked = TypeVar("Asked", bound=WantedConversion)


class ConversionPhase(Enum):
    FORM = auto()
    PLANNING = auto()
    PLANNED = auto()
    RUNNING = auto()
    STOPPING = auto()
    DONE = auto()


BUSY = (ConversionPhase.PLANNING, ConversionPhase.RUNNING, ConversionPhase.STOPPING)


class ConversionJob:
    """One conversion. problem: why it stopped. resumes: more than a plan."""

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
        return self.phase in BUSY

    def change(self) -> None:
        """Discard the plan: the form changed."""
        self.phase, self.problem, self.planned, self.converted = ConversionPhase.FORM, "", None, None

    def begin(self, *, dry_run: bool) -> None:
        self.phase, self.problem = (ConversionPhase.PLANNING if dry_run else ConversionPhase.RUNNING), ""
        self.resumes = not dry_run
        self.stage = self.tensors = self.expected = self.converted = None

    def stop(self) -> None:
        """Note that a stop was requested; idempotent."""
        self.phase = ConversionPhase.STOPPING

    def receive(self, line: ConversionLine) -> None:
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
        """Return the progress: ``converting 34 %``."""
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
        elapsed_s = self._clock() - self._began_s
        if elapsed_s < 2 or not done or done >= total:
            return ""
        return f"  {seconds(elapsed_s * (total - done) / done)} left"


def plan_text(planned: Planned) -> str:
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
    if planned.seconds is None:
        return UNKNOWN
    about = "" if planned.quality_seconds is None else f"about {seconds(planned.quality_seconds)} for "
    return f"about {seconds(planned.seconds)}, plus {about}a quality check"


def result_text(found: ConvertedLine, expected: Expected | None) -> str:
    sizes = f"{size(found.source_bytes)} → {size(found.weight_bytes)}, {found.bits_per_weight:.2f} bits per weight"
    figures = [
        ["done", sanitise_line(found.path)],
        ["size", sizes],
        ["speed", _speed(expected)],
        ["took", f"{seconds(found.seconds)}, {size(found.peak_memory_bytes)} of memory at most"],
    ]
    return "\n".join([table(figures), "", *_quality(found.quality)])


def _speed(expected: Expected | None) -> str:
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
    said = [f"Quality: {closeness(found, found.relative_error, found.grade)}."]
    if found.unable is not None:
        said.append(f"No text was compared: {sanitise_line(found.unable)}")
    return [
        *said,
        *(f"Warning: {sanitise_line(each)}" for each in found.concerns),
        *filter(None, [sanitise_line(found.advice)]),
        *changed_text(found.changed),
    ]


class Conversions(Generic[Asked]):
    """Runs at most one conversion or plan in the background; keeps its result until seen.

    ``spawn`` runs a coroutine; ``changed`` is called after every change, as is ``watcher`` while a dialog shows it;
    ``ended`` once a conversion without a dialog is over.
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
        """The running conversion; None while idle or planning."""
        at_work = self.job.phase in (ConversionPhase.RUNNING, ConversionPhase.STOPPING)
        return self.form if at_work and self.job.resumes else None

    def shown(self, source: str) -> None:
        """Open a dialog for ``source``: shows the running job or its result, else an empty form."""
        if not self.job.busy and (self.form is None or self.form.source != source):
            self.seen()

    def seen(self) -> None:
        """Forget plan and result; a running job goes on."""
        if not self.job.busy:
            self.job.change()
            self.form = None

    def begin(self, form: Asked, *, dry_run: bool) -> None:
        """Plan or convert; ignored while either runs."""
        if not self.job.busy:
            self.form = form
            self.job.begin(dry_run=dry_run)
            self._tell()
            self._spawn(self._run(form, dry_run=dry_run))

    def stop(self) -> None:
        """Stop the process; a conversion can be resumed."""
        if self.job.busy:
            self.job.stop()
            self._tell()
            self._spawn(self._converter.interrupt())

    async def _run(self, form: Asked, *, dry_run: bool) -> None:
        try:
            end = await self._converter.run(form.arguments(dry_run=dry_run), self._read_line)
        except OSError as error:
            end = Ended(1, f"The conversion could not be started: {error}")
        self.job.ended(end)
        if not dry_run and self.watcher is None:
            self._ended(self.job)
        self._tell()

    def _read_line(self, line: ConversionLine) -> None:
        self.job.receive(line)
        if not isinstance(line, TensorWritten):  # there may be many, and a stage's line follows often enough
            self._tell()

    def _tell(self) -> None:
        self._changed()
        if self.watcher is not None:
            self.watcher()
