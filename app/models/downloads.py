"""Downloads beside the chat, one at a time, each in a process of its own, as a state machine.

What has arrived stays on the disk, so that a paused one can be resumed after a restart.

    WAITING ──▶ RUNNING ──▶ (complete: no download any more)
       ▲           ├── PAUSING ────▶ PAUSED ──┐
       │           ├── CANCELLING ──▶ (gone)  │
       │           └──▶ FAILED ───────────────┤
       └──────────── resumed ─────────────────┘
"""

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from tokamac.engine import metrics as rates
from tokamac.engine.hub.download import ADVICE

from .. import INTERRUPTED
from ..backend.command_process import Refused
from ..backend.puller import Puller, PullLine, PullProgress, Removed, pull_arguments, remove_arguments

AGAIN = "Press Enter on it in the list to retry."

ARRIVED = "The part that has arrived is kept."

RATE_OVER_S = 10.0
"""Seconds over which the rate is measured."""

SAMPLED = 200
"""One part in so many of what is left must have come before a time is named, or the first seconds be over."""


class DownloadStage(Enum):
    """What a download is doing."""

    WAITING = auto()
    RUNNING = auto()
    PAUSING = auto()
    PAUSED = auto()
    CANCELLING = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class Download:
    """One download. Bytes, bytes a second, seconds; None is unknown.

    Attributes:
        problem: why it failed and what to do, in sentences that follow a name and a colon.
        loads: it is to be loaded once it is complete.
        freed: bytes that had arrived of a cancelled one, and are removed.
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
    """Runs downloads. ``spawn`` runs a coroutine in the background; ``changed`` is called after every change.

    ``ended`` is called with each download once it is complete, failed, or cancelled and removed. again: how a user retries one.
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
        """The downloads, in the order of their start."""
        return tuple(self._all.values())

    def of(self, model: str) -> Download | None:
        """Return the download of ``model``, if there is one."""
        return self._all.get(model)

    @property
    def running(self) -> Download | None:
        """The download that has a process."""
        at_work = (DownloadStage.RUNNING, DownloadStage.PAUSING, DownloadStage.CANCELLING)
        return next((each for each in self.all if each.stage in at_work), None)

    # What the user wants --------------------------------------------------------------------------------------------------

    def start(self, model: str, *, loads: bool = False) -> None:
        """Download ``model``, or resume a paused or failed download. loads: load it then."""
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
        """Load none of them when it is complete: another model is wanted now."""
        for model in self._all:
            self._all[model] = replace(self._all[model], loads=False)
        self._changed()

    def pause(self, model: str) -> None:
        """Stop a download, which can be resumed."""
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
        """Stop a download and delete what has arrived, also in an earlier run of the app.

        One that has not started in this run is only dropped: what an earlier run left of it is on the list again.
        """
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
        """Run what is waiting, one after the other."""
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
            end = await self._puller.run(pull_arguments(model), lambda line: self._take(model, line))
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

    def _take(self, model: str, line: PullLine) -> None:
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

        def take(line: PullLine) -> None:
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
        self._set(model, stage=DownloadStage.FAILED, problem=why, rate_bps=None, left_s=None)
        self._ended(self._all[model])

    def _stage(self, model: str) -> DownloadStage | None:
        return self._all[model].stage if model in self._all else None

    def _set(self, model: str, **fields: Any) -> None:
        self._all[model] = replace(self._all[model], **fields)
        self._changed()


def _why(error: str, hint: str) -> str:
    """Return why the process failed. Its advice to repeat a command is not for users of the chat."""
    return f"{_sentence(error)} {hint.replace(ADVICE, ARRIVED)}".rstrip()


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
