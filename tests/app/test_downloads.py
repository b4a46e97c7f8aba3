"""Downloads on a scripted child process: one at a time, paused, resumed, cancelled, failed."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamac.app.backend.subprocess import Pulled, PullProgress, PullRefused, Removed, understood
from tokamac.app.chat.jobs import Download, Downloads, DownloadStage

# What the child does is in the name of its model; it waits for a file of its own, and what it was asked is noted.
CHILD = """
import json, pathlib, signal, sys, time
say = lambda **line: print(json.dumps(line), flush=True)
signal.signal(signal.SIGINT, signal.default_int_handler)
*_, action, model = sys.argv
here = pathlib.Path(sys.argv[0]).parent
with (here / "asked").open("a") as asked:
    asked.write(" ".join(sys.argv[1:]) + "\\n")
if action == "remove":
    if "kept" in model:
        say(event="error", error="it can't be deleted", hint="Check its permissions.")
        sys.exit(1)
    if "crash" in model:
        sys.exit("it broke")
    say(event="removed", id=model, freed_bytes=5)
    sys.exit(0)
if "full" in model:
    say(event="error", error="org/full needs 9.00 GB and the disk has 1.00 GB free", hint="Free some space.")
    sys.exit(1)
if "mute" in model:
    sys.exit("the hub is gone")
say(event="progress", done=100, total=1000)
try:
    while "slow" in model and not (here / "go").exists():
        time.sleep(0.01)
except KeyboardInterrupt:
    sys.exit(130)
say(event="progress", done=1000, total=1000)
say(event="pulled", id=model, path="/there", bytes=1000)
"""


class Bench:
    """Downloads with a clock of their own, and what came of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "child.py").write_text(CHILD)
        self.now = 0.0
        self.seen: list[Download | None] = []
        self.ended: list[Download] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.downloads = Downloads(
            [sys.executable, str(folder / "child.py")],
            lambda: self.now,
            spawn=lambda work: self.tasks.add(asyncio.create_task(work)),
            changed=lambda: self.seen.append(self.downloads.running),
            ended=self.ended.append,
        )

    @property
    def asked(self) -> list[str]:
        return (self.folder / "asked").read_text().splitlines()

    async def until(self, condition: Callable[[], object]) -> None:
        for _ in range(6000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(self.downloads.all)

    async def stage(self, model: str, stage: DownloadStage) -> Download:
        await self.until(lambda: (known := self.downloads.of(model)) is not None and known.stage is stage)
        found = self.downloads.of(model)
        assert found is not None
        return found

    async def begun(self, model: str) -> None:
        await self.until(lambda: (known := self.downloads.of(model)) is not None and known.done == 100)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)


# Downloads ----------------------------------------------------------------------------------------------------------------


async def test_a_download_runs_to_its_end_and_is_told_once(bench: Bench) -> None:
    bench.downloads.start("org/quick", loads=True)
    await bench.until(lambda: bench.ended)
    (end,) = bench.ended
    assert (end.model, end.done, end.total, end.loads, end.problem) == ("org/quick", 1000, 1000, True, "")
    assert bench.downloads.all == ()
    assert bench.asked == ["--json -- pull org/quick"]


async def test_a_paused_one_goes_on_when_it_is_asked_to(bench: Bench) -> None:
    bench.downloads.start("org/slow")
    await bench.begun("org/slow")
    bench.downloads.pause("org/slow")
    paused = await bench.stage("org/slow", DownloadStage.PAUSED)
    assert (paused.done, paused.total, paused.rate_bps) == (100, 1000, None)
    (bench.folder / "go").touch()
    bench.downloads.start("org/slow")
    await bench.until(lambda: bench.ended)
    assert bench.asked == ["--json -- pull org/slow"] * 2


async def test_one_after_the_other_and_a_waiting_one_can_be_paused(bench: Bench) -> None:
    for name in ("org/slow", "org/second", "org/third"):
        bench.downloads.start(name)
    await bench.begun("org/slow")
    assert [each.stage for each in bench.downloads.all] == [
        DownloadStage.RUNNING,
        DownloadStage.WAITING,
        DownloadStage.WAITING,
    ]
    bench.downloads.pause("org/second")
    (bench.folder / "go").touch()
    await bench.until(lambda: len(bench.ended) == 2)
    assert [each.model for each in bench.downloads.all] == ["org/second"]


async def test_what_is_cancelled_is_removed_from_the_disk(bench: Bench) -> None:
    bench.downloads.start("org/slow")
    await bench.begun("org/slow")
    bench.downloads.cancel("org/slow")
    await bench.until(lambda: not bench.downloads.all)
    assert bench.asked == ["--json -- pull org/slow", "--unfinished --json -- remove org/slow"]
    assert [(each.stage, each.freed) for each in bench.ended] == [(DownloadStage.CANCELLING, 5)]


async def test_where_nothing_had_arrived_nothing_is_said_to_be_removed(
    chat: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    async with chat("fast") as c:
        c.app.chat.library.downloads.cancel("org/empty")
        await c.until(lambda: "Download of empty cancelled: nothing had arrived." in c.notices, "the notice")


async def test_one_that_waits_is_called_off_and_nothing_is_deleted(bench: Bench) -> None:
    bench.downloads.start("org/slow")
    await bench.begun("org/slow")
    bench.downloads.start("org/kept")  # which could not be deleted
    bench.downloads.cancel("org/kept")
    assert [each.model for each in bench.downloads.all] == ["org/slow"]
    (bench.folder / "go").touch()
    await bench.until(lambda: not bench.downloads.all)
    assert [each.model for each in bench.ended] == ["org/slow"]
    assert bench.asked == ["--json -- pull org/slow"]


async def test_one_that_waits_again_has_what_arrived_removed(bench: Bench) -> None:
    bench.downloads.start("org/slow")
    await bench.begun("org/slow")
    bench.downloads.pause("org/slow")
    await bench.stage("org/slow", DownloadStage.PAUSED)
    bench.downloads.start("org/slow-too")
    await bench.begun("org/slow-too")
    bench.downloads.start("org/slow")
    bench.downloads.cancel("org/slow")
    await bench.until(lambda: bench.downloads.of("org/slow") is None)
    assert bench.asked[-1] == "--unfinished --json -- remove org/slow"


async def test_a_removal_that_ends_without_a_word_is_no_success(bench: Bench) -> None:
    bench.downloads.cancel("org/crash")
    failed = await bench.stage("org/crash", DownloadStage.FAILED)
    assert failed.problem == "it broke"


async def test_what_an_earlier_run_left_can_be_cancelled_and_a_refusal_is_told(bench: Bench) -> None:
    bench.downloads.cancel("org/kept")
    failed = await bench.stage("org/kept", DownloadStage.FAILED)
    assert failed.problem == "it can't be deleted. Check its permissions."


@pytest.mark.parametrize(("model", "why"), [("org/full", "9.00 GB"), ("org/mute", "the hub is gone")])
async def test_what_fails_says_why_and_can_be_tried_again(bench: Bench, model: str, why: str) -> None:
    bench.downloads.start(model)
    failed = await bench.stage(model, DownloadStage.FAILED)
    assert why in failed.problem
    assert bench.ended == [failed]
    bench.downloads.start(model)
    await bench.until(lambda: len(bench.ended) == 2)


async def test_the_rate_is_that_of_the_last_seconds_and_the_rest_follows(bench: Bench) -> None:
    bench.downloads.start("org/slow")
    await bench.begun("org/slow")
    take = bench.downloads._take
    for second, done in ((10, 1100), (20, 3100)):  # ten seconds at 100 bytes a second, then ten at 200
        bench.now = float(second)
        take("org/slow", PullProgress(done, 7100))
    running = bench.downloads.of("org/slow")
    assert running is not None
    assert (running.rate_bps, running.left_s) == (200.0, 20.0)


@given(st.binary(max_size=60) | st.dictionaries(st.text(max_size=8), st.none() | st.integers()).map(json.dumps))
def test_no_line_of_the_child_breaks_the_reader(line: Any) -> None:
    assert isinstance(understood(line), PullProgress | Pulled | Removed | PullRefused)
