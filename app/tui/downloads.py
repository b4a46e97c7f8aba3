"""Downloads that go on while the user does something else: one at a time, each a process of its own.

WAITING ──▶ RUNNING ──▶ (here: it is no download any more)
   ▲           ├── PAUSING ────▶ PAUSED ──┐
   │           ├── CANCELLING ──▶ (gone)  │
   │           └──▶ FAILED ───────────────┤
   └──────────── resumed ─────────────────┘

What has arrived stays on the disk, so that a paused one goes on after a restart: the disk itself says what is unfinished.
"""

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from tokamac.app.backend.puller import Line, Progress, Puller, Refused, Removed, pull_arguments, remove_arguments
from tokamac.app.exit_status import INTERRUPTED
from tokamac.engine.hub_errors import ADVICE
from tokamac.engine.limits import metrics as rates

AGAIN = "Enter on it in the list tries again."
ARRIVED = "What has arrived is kept."
RATE_OVER_S = 10.0
"""The rate is that of so many seconds."""


class Stage(Enum):
    """Where a download stands."""

    WAITING = auto()
    RUNNING = auto()
    PAUSING = auto()
    PAUSED = auto()
    CANCELLING = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class Download:
    """One download. Bytes, bytes a second, seconds; None is unknown. loads: it is wanted for the chat.

    problem: why it failed, and what to do here, in sentences of which the first goes on after a name and a colon.

    freed: of one that was cancelled, how much had arrived and is removed.
    """

    model: str
    stage: Stage = Stage.WAITING
    done: int | None = None
    total: int | None = None
    rate_bps: float | None = None
    left_s: float | None = None
    problem: str = ""
    loads: bool = False
    freed: int = 0


class Downloads:
    """Keeps downloads and runs them. ``spawn`` runs a coroutine aside; ``changed`` is called after every change.

    ``ended`` is told each download once it is here, has failed, or is cancelled and what had arrived removed.
    """

    def __init__(
        self,
        command: Sequence[str],
        clock: Callable[[], float],
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        changed: Callable[[], None],
        ended: Callable[[Download], None],
    ) -> None:
        self._command = command
        self._puller = Puller(command)
        self._clock = clock
        self._spawn = spawn
        self._changed = changed
        self._ended = ended
        self._all: dict[str, Download] = {}
        self._samples: deque[tuple[float, int]] = deque()
        self._at_work = False

    @property
    def all(self) -> tuple[Download, ...]:
        """The downloads, in the order they were asked for."""
        return tuple(self._all.values())

    def of(self, model: str) -> Download | None:
        """Return the download of ``model``, if there is one."""
        return self._all.get(model)

    @property
    def running(self) -> Download | None:
        """The download that a process is at."""
        at_work = (Stage.RUNNING, Stage.PAUSING, Stage.CANCELLING)
        return next((each for each in self.all if each.stage in at_work), None)

    # Wishes ---------------------------------------------------------------------------------------------------------------

    def start(self, model: str, *, loads: bool = False) -> None:
        """Have ``model`` downloaded, or a paused or failed download go on. loads: it is to be loaded then."""
        known = self._all.get(model, Download(model))
        resumed = known.stage in (Stage.PAUSED, Stage.FAILED)
        self._all[model] = replace(
            known, stage=Stage.WAITING if resumed else known.stage, problem="", loads=loads or known.loads
        )
        self._changed()
        if not self._at_work:
            self._at_work = True
            self._spawn(self._work())

    def only_bring(self) -> None:
        """Load none of them once it is here: another model is wanted now."""
        for model in self._all:
            self._all[model] = replace(self._all[model], loads=False)
        self._changed()

    def pause(self, model: str) -> None:
        """Stop a download; it can go on from there."""
        match self._stage(model):
            case Stage.WAITING:
                self._set(model, stage=Stage.PAUSED)
            case Stage.RUNNING:
                self._set(model, stage=Stage.PAUSING)
                self._spawn(self._puller.interrupt())
            case _:
                pass

    def cancel(self, model: str) -> None:
        """Stop a download and delete what has arrived, also of one that an earlier run of the app left.

        One that has not begun in this run is only called off: what an earlier one left of it is on the list again.
        """
        match self._stage(model):
            case Stage.RUNNING | Stage.PAUSING:
                self._set(model, stage=Stage.CANCELLING)
                self._spawn(self._puller.interrupt())
            case Stage.CANCELLING:
                pass
            case Stage.WAITING if self._all[model].done is None:
                del self._all[model]
                self._changed()
            case _:
                self._all[model] = Download(model, Stage.CANCELLING)
                self._changed()
                self._spawn(self._discard(model))

    # The process ----------------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Run what waits, one after the other."""
        try:
            while (model := self._next()) is not None:
                await self._run(model)
        finally:
            self._at_work = False

    def _next(self) -> str | None:
        return next((each.model for each in self.all if each.stage is Stage.WAITING), None)

    async def _run(self, model: str) -> None:
        self._samples.clear()
        self._set(model, stage=Stage.RUNNING, rate_bps=None, left_s=None)
        try:
            end = await self._puller.run(pull_arguments(model), lambda line: self._take(model, line))
        except OSError as error:
            self._fail(model, f"it could not be started: {error}. {AGAIN}")
            return
        stage = self._stage(model)
        if end.status == 0:  # also where it was to stop, and was quicker
            self._ended(replace(self._all.pop(model), stage=Stage.RUNNING))
            self._changed()
        elif stage is Stage.CANCELLING:
            await self._discard(model)
        elif stage is Stage.PAUSING or end.status == INTERRUPTED:
            self._set(model, stage=Stage.PAUSED, rate_bps=None, left_s=None)
        else:
            why = self._all[model].problem or _sentence(end.last_line or f"it ended with exit status {end.status}")
            self._fail(model, f"{why} {AGAIN}")

    def _take(self, model: str, line: Line) -> None:
        match line:
            case Progress(done, total):
                self._measure(model, done, total)
                if (
                    self._stage(model) is not Stage.RUNNING
                ):  # it was asked to stop before there was a process to hear it
                    self._spawn(self._puller.interrupt())
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
        self._set(model, done=done, total=total, rate_bps=rate_bps, left_s=left_s)

    async def _discard(self, model: str) -> None:
        refused: list[str] = []
        freed = 0

        def take(line: Line) -> None:
            nonlocal freed
            match line:
                case Refused(error, hint):
                    refused.append(_why(error, hint))
                case Removed(_, freed_bytes):
                    freed = freed_bytes
                case _:
                    pass

        try:
            end = await Puller(self._command).run(remove_arguments(model, unfinished=True), take)
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
        self._set(model, stage=Stage.FAILED, problem=why, rate_bps=None, left_s=None)
        self._ended(self._all[model])

    def _stage(self, model: str) -> Stage | None:
        return self._all[model].stage if model in self._all else None

    def _set(self, model: str, **fields: Any) -> None:
        self._all[model] = replace(self._all[model], **fields)
        self._changed()


def _why(error: str, hint: str) -> str:
    """Return what the process said of its failure. Its advice to give a command again is for who wrote the command."""
    return f"{_sentence(error)} {hint.replace(ADVICE, ARRIVED)}".rstrip()


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
