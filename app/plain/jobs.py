"""Downloads and a conversion that go on while one chats in lines, and /jobs, which lists and stops them.

They run on a thread with a loop of its own, by the same ``Downloads`` and ``Conversions`` as the full screen's. Their news waits
until it splits no reply: it is written before the next prompt, or at once while the user types nothing.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.engine import metrics as rates

from ..backend.chat_server import ChatServer
from ..backend.converter import converter_command
from ..backend.puller import models_command
from ..chat.commands import RefusedError
from ..models.conversions import ConversionJob, ConversionPhase, Conversions
from ..models.downloads import Download, Downloads, DownloadStage
from ..settings_form import whole_number
from ..units import minutes, size

if TYPE_CHECKING:
    from .repl import Repl

PROGRESS_S = 30.0
"""How often progress is told unasked."""
END_S = 5.0
"""How long processes get to end when the chat does."""
RESUMES = "The same command resumes it."


@dataclass(frozen=True, slots=True)
class WrittenConversion:
    """A conversion as it was written on the command line. flags: all but the model."""

    source: str
    flags: tuple[str, ...]

    def arguments(self, *, dry_run: bool) -> list[str]:
        """Return the command's arguments."""
        return ["--json", *(["--dry-run"] if dry_run else []), *self.flags, "--", self.source]


class BackgroundJobs:
    """What runs beside the chat. converted: called, on the jobs' thread, once a conversion is complete."""

    def __init__(self, converted: Callable[[], None]) -> None:
        self._converted = converted
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._said: deque[str] = deque()
        self._told_s = time.monotonic()
        self._asked = False
        self.downloads = Downloads(
            models_command(),
            time.monotonic,
            spawn=self._spawn,
            changed=self._changed,
            ended=self._downloaded,
            again="The same /pull resumes it.",
        )
        self.server = ChatServer(spawn=self._spawn, changed=self._changed, told=self._said.append)
        self.conversions: Conversions[WrittenConversion] = Conversions(
            converter_command(), time.monotonic, spawn=self._spawn, changed=self._changed, ended=self._ended
        )

    # For the chat's thread ------------------------------------------------------------------------------------------------

    def download(self, model: str) -> None:
        """Download ``model``, after those that wait already."""
        self._asked = False
        self._call(lambda: self.downloads.start(model))

    def convert(self, conversion: WrittenConversion) -> None:
        """Run ``conversion``; not while another one runs."""
        self._asked = False
        self._call(lambda: self.conversions.begin(conversion, dry_run=False))

    def serve(self, port: int) -> None:
        """Start the server on this port."""
        self._call(lambda: self.server.begin(port))

    def stop_server(self) -> None:
        """Stop the server."""
        self._call(self.server.stop)

    def lines(self) -> list[str]:
        """Return what is under way, a line each, in the order that ``stop`` counts by."""
        return [_line(download) for download in self.downloads.all] + self._conversion()

    def stop(self, number: int) -> str:
        """Stop the job with this number, from 1; return what that means."""
        self._asked = False
        if number <= len(self.downloads.all):
            model = self.downloads.all[number - 1].model
            self._call(lambda: self.downloads.pause(model))
            return f"Stopping the download of {model}. /pull {model} resumes it."
        self._call(self.conversions.stop)
        return "Stopping the conversion after the current tensor. /convert resumes it."

    @property
    def busy(self) -> bool:
        """Whether a process is at work."""
        return self.downloads.running is not None or self.conversions.running is not None

    def before_quitting(self) -> str:
        """Return what would be interrupted, the first time that somebody asks; else ""."""
        if self._asked or not self.busy:
            return ""
        self._asked = True
        return f"Still {'; '.join(self.lines())}. /quit again quits and stops that; it can be resumed."

    def news(self) -> list[str]:
        """Return what is to be told by now: what ended, and now and then how far the rest is."""
        said = [self._said.popleft() for _ in range(len(self._said))]
        if self.busy and time.monotonic() - self._told_s >= PROGRESS_S:
            self._told_s = time.monotonic()
            said += self.lines()
        return said

    def close(self) -> None:
        """End what runs; all of it can be resumed."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._spawn, self._end())
            self._thread.join(END_S)

    # On the jobs' thread --------------------------------------------------------------------------------------------------

    def _call(self, work: Callable[[], object]) -> None:
        """Have ``work`` done on the jobs' thread, which is started for the first."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name="jobs", daemon=True)
            self._thread.start()
        done = threading.Event()

        def call() -> None:
            work()
            done.set()

        self._loop.call_soon_threadsafe(call)
        done.wait(END_S)  # so that what is listed next has it

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
        finally:
            loop.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self) -> None:
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()  # which ends its process
        await asyncio.gather(*others, return_exceptions=True)
        asyncio.get_running_loop().stop()

    def _changed(self) -> None:
        """Nothing is drawn: who wants to know how far it is asks."""

    def _downloaded(self, download: Download) -> None:
        if download.stage is DownloadStage.FAILED:
            self._said.append(f"{download.model} was not downloaded: {download.problem}")
        else:
            arrived = "" if download.total is None else f", {size(download.total)}"
            self._said.append(f"{download.model} is downloaded{arrived}. /model {download.model} loads it.")

    def _ended(self, job: ConversionJob) -> None:
        if job.phase is not ConversionPhase.DONE or job.converted is None:
            self._said.append(job.problem or "The conversion ended.")
            return
        self._said += [line for line in job.text().splitlines() if line]
        self._said.append(f"/model {Path(job.converted.path).absolute()} loads it.")
        self._converted()

    def _conversion(self) -> list[str]:
        running = self.conversions.running
        return [] if running is None else [f"converting {running.source}: {self.conversions.job.brief()}"]


def _line(download: Download) -> str:
    share = rates.share(download.done, download.total)
    at = "" if share is None else f": {100 * share:.0f} % of {size(download.total)}"
    left = "" if download.left_s is None else f", {minutes(download.left_s)} left"
    match download.stage:
        case DownloadStage.WAITING:
            return f"waiting to download {download.model}"
        case DownloadStage.PAUSED | DownloadStage.PAUSING:
            return f"stopped downloading {download.model}{at}"
        case DownloadStage.FAILED:
            return f"could not download {download.model}: {download.problem}"
        case _:
            return f"downloading {download.model}{at}{left}"


def jobs(repl: "Repl", written: str) -> None:
    """List what runs in the background, or stop the job with a number of that list, or the only one."""
    listed = repl.jobs.lines()
    if not listed:
        raise RefusedError("Nothing is being downloaded or converted. /pull and /convert begin that.")
    word, _, rest = written.partition(" ")
    if not word:
        repl.say("\n".join(f"{number}. {line}" for number, line in enumerate(listed, 1)))
        repl.console.aside("/jobs stop and a number stops one.")
        return
    number = whole_number(rest.strip()) if rest.strip() else 1 if len(listed) == 1 else None
    if word != "stop" or number is None or not 1 <= number <= len(listed):
        raise RefusedError(f"Write /jobs stop and a number from 1 to {len(listed)}.")
    repl.tell(repl.jobs.stop(number))
