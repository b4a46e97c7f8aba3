"""A conversion as the dialog sees it: what is asked, as flags; what is said, as text; where it stands. Pure: no screen, no process.

FORM ──▶ PLANNING ──▶ PLANNED ──▶ RUNNING ──▶ DONE
  ▲          └───────────┴───────────┴── STOPPING
  └── a refusal, an interruption, another wish
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from tokamac.app.backend.conversion import (
    Converted,
    Expected,
    Line,
    PartLine,
    Planned,
    Quality,
    Refused,
    Stage,
    TensorWritten,
)
from tokamac.app.backend.converter import Ended
from tokamac.app.exit_status import INTERRUPTED
from tokamac.app.fidelity import sentence
from tokamac.app.output import table
from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui.units import UNKNOWN, count, rate, seconds, short, size

BITS = ("2", "3", "4", "5", "6", "8")

BAR_CELLS = 24


@dataclass(frozen=True, slots=True)
class Wish:
    """What the form says, each as it was written; empty is left to the command."""

    source: str
    output: str = ""
    bits: str = ""
    recipe: str = ""
    target_bpw: str = ""

    def arguments(self, *, dry_run: bool) -> list[str]:
        """Return the flags that ask for it. The values go with their flags, so that none can be taken for another."""
        given = {
            "--output": self.output,
            "--bits": self.bits,
            "--recipe": self.recipe,
            "--target-bpw": self.target_bpw,
        }
        flags = [f"{flag}={value}" for flag, value in given.items() if value]
        return ["--json", *(["--dry-run"] if dry_run else []), *flags, "--", self.source]


class Phase(Enum):
    """Where a conversion stands."""

    FORM = auto()
    PLANNING = auto()
    PLANNED = auto()
    RUNNING = auto()
    STOPPING = auto()
    DONE = auto()


BUSY = (Phase.PLANNING, Phase.RUNNING, Phase.STOPPING)


class Standing:
    """Where one conversion stands. Attributes are for reading. problem: why it did not go on, to be shown."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = 0.0
        self._resumes = False
        self.phase = Phase.FORM
        self.problem = ""
        self.planned: Planned | None = None
        self.stage: Stage | None = None
        self.tensors: TensorWritten | None = None
        self.expected: Expected | None = None
        self.converted: Converted | None = None

    @property
    def busy(self) -> bool:
        """Whether a process is at work."""
        return self.phase in BUSY

    def change(self) -> None:
        """Another wish: what was planned is no more."""
        self.phase, self.problem, self.planned, self.converted = Phase.FORM, "", None, None

    def begin(self, *, dry_run: bool) -> None:
        """A process was started."""
        self.phase, self.problem = (Phase.PLANNING if dry_run else Phase.RUNNING), ""
        self._resumes = not dry_run
        self.stage = self.tensors = self.expected = self.converted = None

    def stop(self) -> None:
        """The process was asked to stop. Asked again, nothing changes."""
        self.phase = Phase.STOPPING

    def take(self, line: Line) -> None:
        """Take what the process said."""
        match line:
            case Planned():
                self.planned = line
            case Stage():
                if self.stage is None or self.stage.stage != line.stage:
                    self._began_s = self._clock()
                self.stage = line
            case TensorWritten():
                self.tensors = line
            case Expected():
                self.expected = line
            case Converted():
                self.converted = line
            case Refused(error, hint):
                self.problem = sanitise_line(f"{error}. {hint}" if hint else error)

    def ended(self, end: Ended) -> None:
        """The process is over."""
        stopped = self.phase is Phase.STOPPING or end.status == INTERRUPTED
        if end.status == 0 and self.converted is not None:
            self.phase = Phase.DONE
        elif end.status == 0 and self.planned is not None:
            self.phase = Phase.PLANNED
        else:
            self.phase = Phase.FORM
            if stopped:
                self.problem = "Stopped: the same conversion goes on from there." if self._resumes else "Stopped."
            elif not self.problem:
                self.problem = end.last_line or f"The conversion ended with exit status {end.status}."

    def text(self) -> str:
        """Return what there is to say, as lines."""
        match self.phase:
            case Phase.PLANNING:
                return "Planning …"
            case Phase.RUNNING:
                return self._progress()
            case Phase.STOPPING:
                return "Stopping after the tensor at hand …"
            case Phase.DONE if self.converted is not None:
                return result_text(self.converted, self.expected)
            case Phase.PLANNED if self.planned is not None:
                return plan_text(self.planned)
            case _:
                return ""

    def _progress(self) -> str:
        at = self.stage
        if at is None:
            return "Starting …"
        written = "" if self.tensors is None else f"{count(self.tensors.done)} of {count(self.tensors.total)} tensors"
        memory = "" if at.peak_memory_bytes is None else f"peak memory {size(at.peak_memory_bytes)}"
        below = " · ".join(part for part in (written, memory) if part)
        return f"{sanitise_line(at.stage)}  {self._share(at)}\n{below}"

    def _share(self, at: Stage) -> str:
        if not at.total:
            return size(at.done) if at.unit == "bytes" else count(at.done)
        filled = BAR_CELLS * at.done // at.total
        done, total = (size(at.done), size(at.total)) if at.unit == "bytes" else (count(at.done), count(at.total))
        bar = "█" * filled + "░" * (BAR_CELLS - filled)
        return f"{bar} {100 * at.done // at.total} %  {done} of {total}{self._left(at.done, at.total)}"

    def _left(self, done: int, total: int) -> str:
        """Return the time left at the rate so far, once there is one to speak of."""
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
    time = UNKNOWN if planned.seconds is None else f"about {seconds(planned.seconds)}, comparing apart"
    figures = [
        ["to", sanitise_line(planned.path)],
        ["weights", sizes],
        ["memory", f"{size(planned.peak_memory_bytes)} at most"],
        ["disk", room],
        ["time", time],
    ]
    notes = [f"Note: {sanitise_line(note)}." for note in planned.notes]
    return "\n".join([table(rows, right=(2, 3)), "", table(figures), *notes])


def result_text(found: Converted, expected: Expected | None) -> str:
    """Return the result as text; what is of concern comes last."""
    sizes = f"{size(found.source_bytes)} → {size(found.weight_bytes)}, {found.bits_per_weight:.2f} bits per weight"
    speeds: Sequence[float | None] = (None, None) if expected is None else (expected.before_tps, expected.after_tps)
    figures = [
        ["done", sanitise_line(found.path)],
        ["size", sizes],
        ["speed", f"{rate(speeds[0])} → {rate(speeds[1])} expected here"],
        ["took", f"{seconds(found.seconds)}, {size(found.peak_memory_bytes)} of memory at most"],
    ]
    return "\n".join([table(figures), "", *_quality(found.quality)])


def _part(line: PartLine) -> list[str]:
    packing = line.packing
    bits = "not packed" if packing is None else f"{packing.bits} bits"
    if packing is not None and packing.mode != "affine":
        bits = sanitise_line(packing.mode)
    return [sanitise_line(line.part), bits, short(line.parameters), size(line.nbytes)]


def _quality(found: Quality | None) -> list[str]:
    if found is None:
        return ["Not compared with the source."]
    said = [f"Quality: {sentence(found, found.relative_error)}."]
    if found.unable is not None:
        said.append(f"No text was compared: {sanitise_line(found.unable)}")
    return [*said, *(f"Warning: {sanitise_line(each)}" for each in found.concerns)]
