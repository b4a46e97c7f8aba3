"""F10: the steps of a reply, one at a time: a strip of bars to jump in, and below it the chosen step in plain words.

The strip draws the bars that are in sight alone, so a reply of any length opens at once. The likely tokens come from the engine
while one looks.
"""

import time
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate, groupby

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Static

from tokamac.engine.metrics import Cause

from ...backend.protocol import LookedAt
from ...chat.conversation import Reply
from ...reply_steps import NoBranchError, ReplySteps, StepLine, Tone
from ..markdown.rows import wrapped
from ..theme import FAINT, TICKS
from . import Dialog

LABEL = 10
"""Cells of a line's label."""
TALLEST = 4.0
"""Usual steps that a full bar stands for; a longer one is cut off, and its number is below."""
FRAME_S = 1 / 20
"""How often a step is shown at most while steps are played."""
SPEEDS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
TONES: dict[Tone, str] = {
    "": "$foreground", "title": "bold $foreground", "good": "$text-success", "warn": "bold $text-warning", "faint": FAINT,
}  # fmt: skip
STYLES: dict[Cause, str] = {
    "kv growth": "$text-warning",
    "pool cleared": "$text-warning",
    "slow reader": "$text-accent",
    "swap": "$text-error",
    "processor taken": "$text-error",
    "thermal": "$text-error",
    "low power": "$text-error",
    "another prompt": "$text-accent",
}
"""Yellow is the engine's own doing, red the machine's."""


class StepStrip(Widget):
    """A bar for each step in sight, its cause's letter below it, and below these the whole reply."""

    class Clicked(Message):
        """The step ``index`` was clicked."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def __init__(self, steps: ReplySteps) -> None:
        super().__init__()
        self._steps = steps
        self._index = 0
        self._first = 0
        self._whole: tuple[int, str] = (0, "")

    def show(self, index: int) -> None:
        """Show the step ``index``, and bring it into sight."""
        self._index = index
        self.refresh()

    @property
    def page(self) -> int:
        """Steps in sight at once."""
        return max(self.size.width, 1)

    def render(self) -> Content:
        """Draw what is in sight."""
        width, rows = self.page, max(self.size.height - 2, 1)
        self._first = self._scrolled(width)
        shown = range(self._first, min(self._first + width, len(self._steps)))
        heights, styles = [self._height(index, rows) for index in shown], [self._style(index) for index in shown]
        lines = [_row([_tick(height, row) for height in heights], styles) for row in reversed(range(rows))]
        marked = [
            f"reverse {style}" if index == self._index else style for index, style in zip(shown, styles, strict=True)
        ]
        lines.append(_row([self._letter(index) for index in shown], marked))
        lines.append(self._overview(width))
        return Content("\n").join(lines)

    def _scrolled(self, width: int) -> int:
        """Return the first step in sight: it moves only where the chosen one would be out of sight."""
        first, most = self._first, max(len(self._steps) - width, 0)
        if not first <= self._index < first + width:
            first = self._index - width // 2
        return min(max(first, 0), most)

    def _height(self, index: int, rows: int) -> int:
        """Return a bar's height in eighths of a row."""
        ms, usual = self._steps.walk.ms[index], self._usual
        if ms is None or not usual:
            return 1
        return max(1, round(min(ms / (usual * TALLEST), 1.0) * rows * len(TICKS)))

    @property
    def _usual(self) -> float | None:
        return self._steps.walk.timed.median_ms or max(
            (ms for ms in self._steps.walk.ms if ms is not None), default=None
        )

    def _style(self, index: int) -> str:
        at = self._steps.walk[index]
        if at.token is None:
            return "$text-secondary"
        if at.held_up:
            return STYLES[at.causes[0]] if at.causes else "$text-warning"
        return "$text-primary" if index == self._index else FAINT

    def _letter(self, index: int) -> str:
        letter = self._steps.mark(index)
        return "▲" if letter == " " and index == self._index else letter

    def _overview(self, width: int) -> Content:
        """Return the whole reply on one row, what is in sight of it marked; nothing where all is in sight."""
        count = len(self._steps)
        if count <= width:
            return Content("")
        if self._whole[0] != width:
            self._whole = (width, self._drawn(width))
        begin, end = self._first * width // count, max((self._first + width) * width // count, 1)
        text = self._whole[1]
        return (
            Content.styled(text[:begin], FAINT)
            + Content.styled(text[begin:end], "underline $text-primary")
            + Content.styled(text[end:], FAINT)
        )

    def _drawn(self, width: int) -> str:
        known = [ms or 0.0 for ms in self._steps.walk.ms]
        usual, count = (self._usual or 1.0) * TALLEST, len(known)
        longest = (
            max(known[column * count // width : max((column + 1) * count // width, 1)], default=0.0)
            for column in range(width)
        )
        return "".join(TICKS[min(int(ms / usual * len(TICKS)), len(TICKS) - 1)] for ms in longest)

    def on_click(self, event: events.Click) -> None:
        """Choose the step under the pointer, or on the last row, the one at that share of the reply."""
        count, width = len(self._steps), self.page
        over = event.y == self.size.height - 1 and count > width
        index = event.x * count // width if over else self._first + event.x
        self.post_message(self.Clicked(min(index, count - 1)))


def _tick(height: int, row: int) -> str:
    filled = height - row * len(TICKS)
    return " " if filled <= 0 else TICKS[min(filled, len(TICKS)) - 1]


def _row(cells: list[str], styles: list[str]) -> Content:
    runs = groupby(zip(cells, styles, strict=True), key=lambda cell: cell[1])
    return Content("").join(Content.styled("".join(cell for cell, _ in run), style) for style, run in runs)


class StepsScreen(Dialog[Reply]):
    """The steps of one reply. The result is what another reply begins with, where the user goes on from a step.

    ask: has the likely tokens computed; stop: ends that. number: of the question whose answers ``take`` is given.
    """

    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("f10", "leave", "Close", id="steps.leave", show=False),
        Binding("left", "move(-1)", "Step before", id="steps.before", priority=True),
        Binding("right", "move(1)", "Next step", id="steps.next", priority=True),
        Binding("pageup", "page(-1)", "Page back", id="steps.page_back", priority=True),
        Binding("pagedown", "page(1)", "Page on", id="steps.page_on", priority=True),
        Binding("home", "go(0)", "First step", id="steps.first", priority=True),
        Binding("end", "go(-1)", "Last step", id="steps.last", priority=True),
        Binding("n", "held_up(1)", "Next slow step", id="steps.next_slow"),
        Binding("p", "held_up(-1)", "Slow step before", id="steps.slow_before"),
        Binding("space", "play", "Play or pause", id="steps.play", priority=True),
        Binding("plus,equals_sign", "faster(1)", "Faster", id="steps.faster"),
        Binding("minus", "faster(-1)", "Slower", id="steps.slower"),
        Binding("c", "compute", "Compute or cancel the likely tokens", id="steps.compute"),
        *(Binding(str(n), f"branch({n})", f"Go on with {n}", id=f"steps.branch_{n}", show=False) for n in range(1, 6)),
    ]

    def __init__(self, steps: ReplySteps, ask: Callable[[], None], stop: Callable[[], None], *, number: int) -> None:
        super().__init__()
        self._steps, self._ask, self._stop, self._number = steps, ask, stop, number
        self._index = steps.walk.pieces if len(steps) else 0
        self._speed = SPEEDS.index(1.0)
        self._player: Timer | None = None
        self._played_from = (0.0, 0.0)  # the clock, and milliseconds of the reply
        self._ends_ms: tuple[float, ...] = tuple(accumulate(ms or 0.0 for ms in steps.walk.ms))

    def compose(self) -> ComposeResult:
        """Yield the strip, the text around the step, its numbers, and a line about what is computed."""
        with Vertical(classes="box", id="steps"):
            yield StepStrip(self._steps)
            yield Static(self._steps.legend() if self._steps.recorded else "", id="legend", markup=False)
            yield Static(id="around", markup=False)
            with VerticalScroll(id="step"):
                yield Static(id="step-text", markup=False)
            yield Static(id="looking", markup=False)

    def on_mount(self) -> None:
        """Take the keys, and have the likely tokens computed."""
        super().on_mount()
        self.query_one("#step").focus()
        self._ask()
        self.call_after_refresh(self._show)

    def on_resize(self, event: events.Resize) -> None:
        """Lay out again."""
        super().on_resize(event)
        self.call_after_refresh(self._show)

    # What the engine tells ------------------------------------------------------------------------------------------------

    def take(self, told: LookedAt) -> None:
        """Show what the engine told."""
        if told.id != self._number:
            return
        before, count = self._steps.known, len(self._steps)
        self._steps.take(told)
        if len(self._steps) != count:  # only now is it known how many tokens the text has
            self._ends_ms = tuple(0.0 for _ in range(len(self._steps)))
        at = self._steps.walk[self._index].token if len(self._steps) else None
        near = at is not None and before <= at + 32 and self._steps.known > before
        self._show() if near or told.prompt is not None or told.ended else self._say()

    def lost(self) -> None:
        """End what is being computed: the engine's process is gone."""
        if not self._steps.ended:
            self.take(LookedAt(self._number, ended=True, error="The engine stopped."))

    def action_compute(self) -> None:
        """Cancel the computing, or begin it again."""
        if self._steps.ended:
            self._ask()
        else:
            self._stop()
        self._say()

    # Moving ---------------------------------------------------------------------------------------------------------------

    def action_move(self, by: int) -> None:
        """Show the step before, or the next one."""
        self._pause()
        self._go(self._index + by)

    def action_page(self, by: int) -> None:
        """Move by what is in sight."""
        self._pause()
        self._go(self._index + by * max(self.query_one(StepStrip).page - 1, 1))

    def action_go(self, index: int) -> None:
        """Show the first step, or (-1) the last one."""
        self._pause()
        self._go(index if index >= 0 else len(self._steps) - 1)

    def action_held_up(self, by: int) -> None:
        """Show the nearest step that took much longer than others."""
        self._pause()
        found = self._steps.walk.next_held_up(self._index, by)
        if found is None:
            self._say(
                "No step after this one was unusually slow."
                if by > 0
                else "No step before this one was unusually slow."
            )
        else:
            self._go(found)

    def on_step_strip_clicked(self, message: StepStrip.Clicked) -> None:
        """Show the step that was clicked."""
        self._pause()
        self._go(message.index)

    def _go(self, index: int) -> None:
        index = max(0, min(index, len(self._steps) - 1))
        if index != self._index:
            self._index = index
            self.query_one("#step").scroll_home(animate=False)
            self._show()

    # Playing --------------------------------------------------------------------------------------------------------------

    def action_play(self) -> None:
        """Play the steps at the pace at which they came, or pause."""
        if self._player is not None:
            self._pause()
        elif not self._steps.recorded:
            self._say(f"There are no times to play: {self._steps.missing}.")
        else:
            if self._index >= len(self._steps) - 1:
                self._go(0)
            self._player = self.set_interval(FRAME_S, self._tick)
            self._mark_time()
        self._say_keys()

    def action_faster(self, by: int) -> None:
        """Play faster, or slower."""
        self._speed = max(0, min(self._speed + by, len(SPEEDS) - 1))
        self._mark_time()
        self._say_keys()

    def _mark_time(self) -> None:
        before_ms = self._ends_ms[self._index - 1] if self._index else 0.0
        self._played_from = (time.monotonic(), before_ms)

    def _tick(self) -> None:
        began_s, from_ms = self._played_from
        now_ms = from_ms + (time.monotonic() - began_s) * 1e3 * SPEEDS[self._speed]
        self._go(bisect_right(self._ends_ms, now_ms))
        if self._index >= len(self._steps) - 1:
            self._pause()

    def _pause(self) -> None:
        if self._player is not None:
            self._player.stop()
            self._player = None
            self._say_keys()

    # Going on -------------------------------------------------------------------------------------------------------------

    def action_branch(self, choice: int) -> None:
        """Go on from here with another of the likely tokens, as another version of the reply."""
        try:
            self.dismiss(self._steps.branch(self._index, choice))
        except NoBranchError as error:
            self._say(error.message)

    # Drawing --------------------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        box = self.query_one("#steps")
        if not len(self._steps):
            box.border_title = "Steps"
            self._say()
            return
        box.border_title = self._steps.title(self._index)
        self.query_one(StepStrip).show(self._index)
        around = self._steps.around(self._index)
        text = Content("")
        if around is not None:
            text = Content.styled(f"…{around.before}", FAINT) + Content.styled(around.token, "bold reverse")
            text += Content.styled(f"{around.after}…", FAINT)
        self.query_one("#around", Static).update(text)
        width = max(self.query_one("#step").content_size.width - 1, 1)
        rows = [row for line in self._steps.lines(self._index) for row in _line(line, width)]
        self.query_one("#step-text", Static).update(Content("\n").join(rows))
        self._say()
        self._say_keys()

    def _say(self, text: str = "") -> None:
        steps = self._steps
        does = "C cancels." if not steps.ended else "C tries again." if steps.problem else ""
        self.query_one("#looking", Static).update(text or f"{steps.status()} {does}".strip())

    def _say_keys(self) -> None:
        speed = SPEEDS[self._speed]
        plays = "Space pauses" if self._player is not None else "Space plays"
        at = "" if speed == 1.0 else f" ×{speed:g}"
        self.say_keys(
            "← → steps", f"{plays}{at}", "1–5 continue with that token", "n p slow ones", "+ - speed", "Esc closes"
        )


def _line(line: StepLine, width: int) -> list[Content]:
    """Return a line at ``width`` cells, its label beside its first row."""
    room = max(width - LABEL, 12)
    rows = [row.content for row in wrapped(Content.styled(line.text, TONES[line.tone]), room)]
    labels = [line.label.ljust(LABEL), *(" " * LABEL for _ in rows[1:])]
    return [Content.styled(label, FAINT) + row for label, row in zip(labels, rows, strict=True)]
