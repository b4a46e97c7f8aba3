"""F4: the dialog that converts, on a scripted child process; what a conversion's lines say; and the real command, once."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.app import App
from textual.widgets import Button, Input, Select, Static

from tests.tiny import make_tiny
from tokamac.app.backend.subprocess import (
    ConvertedLine,
    Converter,
    Ended,
    LineError,
    Planned,
    QualityLine,
    Refused,
    StageLine,
    converter_command,
    decode,
)
from tokamac.app.chat.jobs import BITS, ConversionForm, ConversionJob, ConversionPhase, plan_text, result_text
from tokamac.app.chat.steps import EnginePhase as ChatPhase
from tokamac.app.tui.screens.model import ConvertScreen, ModelScreen

SCREENS = Path(sys.modules[ConvertScreen.__module__].__file__ or "").parent

AFFINE = {"bits": 4, "group_size": 64, "mode": "affine"}

PLAN: dict[str, Any] = {
    "event": "plan", "path": "small", "weight_bytes": 2_000_000, "bits_per_weight": 4.5, "source_bytes": 8_000_000,
    "output_bytes": 2_100_000, "seconds": 61.0, "peak_memory_bytes": 300_000, "quality": None, "parameters": 4_000_000,
    "parts": [
        {"part": "mlp", "packing": AFFINE, "tensors": 6, "parameters": 3_900_000, "nbytes": 1},
        {"part": "norms and other", "packing": None, "tensors": 5, "parameters": 100_000, "nbytes": 2},
    ],
    "disk": {"needed": 2_100_000, "free": 9_000_000_000, "fits": True}, "notes": ["the source has no tokenizer files"],
}  # fmt: skip

QUALITY: dict[str, Any] = {
    "relative_error": 0.08, "kl": 0.031, "perplexity_ratio": 1.021, "kl_se": 0.002, "top1": 0.947, "reference_perplexity": 9.0,
    "reference_perplexity_se": 0.5, "perplexity": 9.2, "perplexity_se": 0.5, "perplexity_ratio_se": 0.004, "positions": 255,
    "layers": [0.01, None], "unable": None, "concerns": ["Its perplexity is 9 times the source's."],
}  # fmt: skip

DONE: dict[str, Any] = {
    "event": "converted", "path": "small", "weight_bytes": 2_000_000, "bits_per_weight": 4.5, "source_bytes": 8_000_000,
    "seconds": 62.0, "peak_memory_bytes": 310_000, "quality": QUALITY,
}  # fmt: skip

# What the child does is in the name of its source; --dry-run always plans.
CHILD = f"""
import json, os, signal, sys, time
say = lambda **line: print(json.dumps(line), flush=True)
signal.signal(signal.SIGINT, signal.default_int_handler)
source, asked = sys.argv[-1], sys.argv[1:]
if "--dry-run" in asked:
    if source == "nowhere":
        say(event="error", error="nowhere is not whole on this disk", hint="Download it.")
        sys.exit(1)
    if source == "contradiction":
        sys.exit("tokamac convert: --bits and --target-bpw contradict each other.")
    print(json.dumps({{**{PLAN!r}, "notes": asked}}), flush=True)
    sys.exit(0)
say(event="tensor", name="model.embed_tokens.weight", done=3, total=12)
say(event="stage", stage="converting", done=2_000_000, total=8_000_000, unit="bytes", peak_memory_bytes=300_000)
if source == "slow":
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
if source == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    say(event="stage", stage="deaf", done=1, total=2, unit="steps", peak_memory_bytes=None)
    time.sleep(600)
if source == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if source == "garbled":
    print("this is no JSON", flush=True)
say(event="expected", before_tps=12.0, after_tps=None, context=4096)
print(json.dumps({DONE!r}), flush=True)
"""

Open = Callable[..., Any]


class Host(App[str | None]):
    CSS_PATH = [SCREENS / "dialog.tcss", SCREENS / "convert.tcss"]  # noqa: RUF012 (Textual's way)


class Dialog:
    """The dialog as a user sees it."""

    def __init__(self, app: Host, screen: ConvertScreen, results: list[str | None]) -> None:
        self.app, self.screen, self.results = app, screen, results

    def text(self, name: str) -> str:
        return str(self.screen.query_one(name, Static).render())

    def press(self, name: str) -> None:
        button = self.screen.query_one(name, Button)
        assert button.display
        button.press()

    async def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 180  # the real command takes seconds, on a machine with nothing else to do
        while not condition():
            assert time.monotonic() < deadline, f"never: {what}; {self.screen.job.phase} {self.text('#problem')}"
            await asyncio.sleep(0.01)

    async def phase(self, phase: ConversionPhase) -> None:
        await self.until(lambda: self.screen.job.phase is phase, phase.name)


@pytest.fixture
def dialog(tmp_path: Path) -> Open:
    script = tmp_path / "child.py"
    script.write_text(CHILD)

    @asynccontextmanager
    async def start(source: str) -> AsyncIterator[tuple[Dialog, Any]]:
        app, results = Host(), []
        screen = ConvertScreen(source, [sys.executable, str(script)])
        async with app.run_test(size=(100, 40)) as pilot:
            app.push_screen(screen, results.append)
            await pilot.pause()
            yield Dialog(app, screen, results), pilot

    return start


# Wishes and lines ---------------------------------------------------------------------------------------------------------


def test_a_wish_is_flags_that_nothing_written_can_escape() -> None:
    wish = ConversionForm("--overwrite", output="-o x", bits="3", recipe="mixed_4_6", target_bpw="4.5")
    assert wish.arguments(dry_run=True) == [
        "--json", "--dry-run", "--output=-o x", "--bits=3", "--recipe=mixed_4_6", "--target-bpw=4.5", "--", "--overwrite",
    ]  # fmt: skip
    assert ConversionForm("org/model").arguments(dry_run=False) == ["--json", "--", "org/model"]


def test_the_command_line_understands_every_wish() -> None:
    from tokamac.app.commands import convert

    wish = ConversionForm("-strange name", output="out", bits="3", recipe="mixed_4_6", target_bpw="4.5")
    options = convert.parser().parse_args(wish.arguments(dry_run=True))
    assert (options.source, options.output, options.bits, options.recipe) == ("-strange name", "out", 3, "mixed_4_6")
    assert (options.target_bpw, options.dry_run, options.json) == (4.5, True, True)


def test_the_bits_offered_are_those_that_convert_takes() -> None:
    from tokamac.quant.options import BITS as TAKEN

    assert tuple(map(int, BITS)) == TAKEN


def test_lines_are_read_strictly() -> None:
    assert isinstance(decode(json.dumps(PLAN).encode()), Planned)
    assert isinstance(decode(json.dumps(DONE).encode()), ConvertedLine)
    for wrong in (
        b"", b"[]", b"null", b"{}", b'{"event":"unknown"}', b'{"event":["plan"]}', b'{"event":"error","error":1,"hint":""}',
        json.dumps({**DONE, "seconds": "long"}).encode(), json.dumps({**PLAN, "more": 1}).encode(), b"\xff", b"[" * 100_000,
    ):  # fmt: skip
        with pytest.raises(LineError):
            decode(wrong)


def test_what_the_quality_of_a_conversion_says_is_what_is_read() -> None:
    from tokamac.quant.report import Outcome
    from tokamac.quant.report import Quality as Measured

    measured = Measured(0.5, 0.01, 0.9, 9.0, 0.1, 9.9, 0.1, 1.1, 0.01, 255)
    for outcome in (Outcome(4.5), Outcome(4.5, 0.08, measured, (0.1, None)), Outcome(4.5, unable="no tokenizer")):
        found = decode(json.dumps({**DONE, "quality": outcome.to_json()}).encode())
        assert isinstance(found, ConvertedLine)
        assert isinstance(found.quality, QualityLine)
        assert found.quality.concerns == outcome.concerns


def a_job(now: list[float]) -> ConversionJob:
    return ConversionJob(lambda: now[0])


def test_the_time_left_is_that_of_the_stage_at_hand() -> None:
    now = [100.0]
    at = a_job(now)
    at.begin(dry_run=False)
    at.take(StageLine("calibrating", 1, 4, "steps", None))
    now[0] = 130.0
    at.take(StageLine("converting", 0, 1000, "bytes", 5_000_000))
    now[0] = 140.0
    at.take(StageLine("converting", 250, 1000, "bytes", 5_000_000))
    assert "25 %" in at.text()
    assert "30 s left" in at.text()
    assert "5.00 MB" in at.text()


def test_nothing_is_promised_before_there_is_a_rate() -> None:
    now = [0.0]
    at = a_job(now)
    at.begin(dry_run=False)
    at.take(StageLine("converting", 0, 1000, "bytes", None))
    now[0] = 50.0
    assert "left" not in at.text()
    at.take(StageLine("downloading", 5_000, None, "bytes", None))
    assert "5.00 kB" in at.text()


def test_text_of_others_is_made_safe() -> None:
    at = a_job([0.0])
    at.begin(dry_run=False)
    at.take(Refused("\x1b]0;evil\x07 failed", "Do\nsomething."))
    at.ended(Ended(1, ""))
    assert "\x1b" not in at.problem
    assert "\n" not in at.problem
    assert "\x1b" not in at.text()


@given(st.sampled_from([0, 1, 2, 130, -9]), st.booleans(), st.booleans(), st.booleans())
def test_however_it_ends_there_is_a_result_or_a_reason(status: int, plans: bool, results: bool, stops: bool) -> None:
    at = a_job([0.0])
    at.begin(dry_run=not results)
    if plans:
        at.take(decode(json.dumps(PLAN).encode()))
    if results:
        at.take(decode(json.dumps(DONE).encode()))
    if stops:
        at.stop()
    at.ended(Ended(status, ""))
    assert not at.busy
    assert at.problem or at.text()


def test_unknown_prints_as_unknown() -> None:
    plan = decode(json.dumps({**PLAN, "seconds": None}).encode())
    done = decode(json.dumps({**DONE, "quality": None}).encode())
    assert isinstance(plan, Planned)
    assert isinstance(done, ConvertedLine)
    assert "unknown" in plan_text(plan)
    assert "unknown → unknown" in result_text(done, None)
    assert "Not compared" in result_text(done, None)


# The dialog ---------------------------------------------------------------------------------------------------------------


async def test_the_plan_comes_first_and_says_what_was_asked(dialog: Open) -> None:
    async with dialog("org/model") as (d, pilot):
        d.screen.query_one("#bits", Select).value = "3"
        d.screen.query_one("#output", Input).value = "small"
        d.screen.query_one("#source", Input).focus()
        await pilot.press("enter")
        await d.phase(ConversionPhase.PLANNED)
        said = d.text("#said")
        assert "--dry-run" in said
        assert "--bits=3" in said
        assert "--output=small" in said
        assert "Note: --dry-run." in said
        assert "8.00 MB → 2.00 MB, 4.50 bits per weight" in said  # of the weights: the folder holds more
        assert "norms and other" in said
        assert "about 61 s" in said
        await d.until(lambda: d.screen.focused is d.screen.query_one("#convert"), "the next step at hand")


async def test_another_wish_takes_the_plan_away(dialog: Open) -> None:
    async with dialog("org/model") as (d, _):
        d.press("#plan")
        await d.phase(ConversionPhase.PLANNED)
        d.screen.query_one("#target_bpw", Input).value = "4.5"
        await d.phase(ConversionPhase.FORM)
        assert d.text("#said") == ""


async def test_it_converts_and_the_result_is_used_at_once(dialog: Open) -> None:
    async with dialog("good") as (d, _):
        d.press("#convert")
        await d.phase(ConversionPhase.DONE)
        said = d.text("#said")
        assert "8.00 MB → 2.00 MB" in said
        assert "12.0 tok/s → unknown" in said
        assert "94.7 % of 255 places" in said
        assert "Warning: Its perplexity is 9 times the source's." in said
        d.press("#use")
        await d.until(lambda: d.results, "a result")
        assert d.results == [str(Path("small").absolute())]


async def test_stop_interrupts_and_says_that_it_goes_on_from_there(dialog: Open) -> None:
    async with dialog("slow") as (d, pilot):
        d.press("#convert")
        await d.until(lambda: d.screen.job.stage, "progress")
        assert "3 of 12 tensors" in d.text("#said")
        assert "25 %" in d.text("#said")
        assert all(box.disabled for box in d.screen.query(Input))
        await pilot.press("escape")  # stops first, closes then
        await d.phase(ConversionPhase.FORM)
        assert "resumes from here" in d.text("#problem")
        await pilot.press("escape")
        await d.until(lambda: d.results, "the end")
        assert d.results == [None]


@pytest.mark.parametrize(
    ("source", "said"),
    [("nowhere", "not whole on this disk. Download it."), ("contradiction", "contradict each other")],
)
async def test_a_refusal_is_told(dialog: Open, source: str, said: str) -> None:
    async with dialog(source) as (d, _):
        d.press("#plan")
        await d.until(lambda: said in d.text("#problem"), "the reason")
        await d.phase(ConversionPhase.FORM)


async def test_a_process_that_dies_is_told(dialog: Open) -> None:
    async with dialog("killed") as (d, _):
        d.press("#convert")
        await d.until(lambda: "-9" in d.text("#problem"), "the reason")


async def test_a_line_that_is_not_understood_does_not_end_it(dialog: Open) -> None:
    async with dialog("garbled") as (d, _):
        d.press("#convert")
        await d.phase(ConversionPhase.DONE)
        assert "not understood" in d.text("#problem")


async def test_without_a_model_nothing_is_begun(dialog: Open) -> None:
    async with dialog(" ") as (d, pilot):
        d.press("#plan")
        await pilot.pause()
        assert d.screen.job.phase is ConversionPhase.FORM


async def test_leaving_the_app_leaves_no_process(dialog: Open) -> None:
    async with dialog("slow") as (d, _):
        d.press("#convert")
        await d.until(lambda: d.screen.job.stage, "progress")
        process = d.screen._converter._process
    await asyncio.wait_for(process.wait(), 60)  # the loop has seen its end too, else it would complain when it closes
    assert not _runs(process.pid)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_process_that_ignores_the_interruption_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    converter, seen = Converter([sys.executable, str(script)]), []
    running = asyncio.create_task(converter.run(ConversionForm("deaf").arguments(dry_run=False), seen.append))
    while not any(isinstance(line, StageLine) and line.stage == "deaf" for line in seen):
        await asyncio.sleep(0.01)
    await converter.interrupt(grace_s=0.1)
    assert (await running).status == -9


# In the chat --------------------------------------------------------------------------------------------------------------


async def test_the_chat_and_the_model_picker_lead_to_it(chat: Open) -> None:
    async with chat("fast") as c:
        await c.phase(ChatPhase.IDLE)
        await c.pilot.press("f4")
        await c.until(lambda: isinstance(c.app.screen, ConvertScreen), "the dialog")
        assert c.app.screen.query_one("#source", Input).value == "fast"
        await c.pilot.press("escape")
        await c.pilot.press("ctrl+o")
        await c.until(lambda: isinstance(c.app.screen, ModelScreen), "the picker")
        c.app.screen.query_one(Input).value = "org/other"
        await c.pilot.press("f4")
        await c.until(lambda: isinstance(c.app.screen, ConvertScreen), "the dialog")
        assert c.app.screen.query_one("#source", Input).value == "org/other"
        c.app.screen.dismiss("/models/new")
        await c.until(lambda: "/models/new" in c.notices, "the new model, which this engine does not know")


@pytest.mark.e2e
async def test_the_real_command_plans_converts_and_says_the_result(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny")
    app, results = Host(), []
    screen = ConvertScreen(str(source), converter_command())
    async with app.run_test(size=(110, 50)) as pilot:
        app.push_screen(screen, results.append)
        await pilot.pause()
        d = Dialog(app, screen, results)
        screen.query_one("#output", Input).value = str(tmp_path / "small")
        await pilot.pause()
        d.press("#plan")
        await d.phase(ConversionPhase.PLANNED)
        assert "embedding" in d.text("#said")
        assert not (tmp_path / "small").exists()
        d.press("#convert")
        await d.phase(ConversionPhase.DONE)
        assert "bits per weight" in d.text("#said")
        assert (tmp_path / "small" / "config.json").exists()
        d.press("#use")
        await d.until(lambda: results, "the result")
        assert results == [str(tmp_path / "small")]
