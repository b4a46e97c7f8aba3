"""Explanations of a side panel figure and (F2) of a reply's speed."""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Literal

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.message import Message
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Static

from tokamac.engine import metrics as rates
from tokamac.engine.metrics import Cause, Slowing
from tokamac.engine.perf.diagnosis import RELIEF, Concern, Diagnosis, PartName, Remedy, Term

from ...backend.protocol import LookedAt
from ...chat import figures
from ...chat.conversation import Reply
from ...chat.figures import Explained, Input
from ...chat.reply_steps import NoBranchError, ReplySteps, StepLine, Tone
from ...reports.cache_use import why
from ...reports.verdict import (
    REMEDIES,
    THROTTLED,
    help_text,
    is_held_up,
    known_terms,
    numbers,
    part_text,
    remedy_text,
    sentence,
    value_text,
    words,
)
from ...text import units
from ...text.sanitise import sanitise_line
from ..markdown.rows import wrapped
from ..theme import FAINT, TICKS, bar
from .dialog import Dialog

# A figure has formula, inputs, source and meaning; a reply a diagnosis: time, distance to limits, remedies.


NAME, VALUE = 18, 14  # cells


class FigureScreen(Dialog[int]):
    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("escape,enter,space", "close", "Close", id="figure.close", priority=True),
        Binding("left,up", "move(-1)", "Figure before", id="figure.before", priority=True),
        Binding("right,down", "move(1)", "Figure after", id="figure.after", priority=True),
    ]

    def __init__(self, explained: Sequence[Explained], index: int) -> None:
        super().__init__()
        self._explained = explained
        self._index = index

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box", id="figure"):
            yield Static(id="figure-text", markup=False)

    def on_mount(self) -> None:
        self.query_one("#figure").focus()

    def on_resize(self, event: Resize) -> None:
        del event
        self.call_after_refresh(self._show)

    def action_move(self, by: int) -> None:
        self._index = max(0, min(len(self._explained) - 1, self._index + by))
        self._show()
        self.query_one("#figure").scroll_home(animate=False)

    def action_close(self) -> None:
        self.dismiss(self._index)

    def _show(self) -> None:
        box = self.query_one("#figure")
        box.border_title = self._explained[self._index].name
        self.say_keys(f"{self._index + 1} of {len(self._explained)}", "↑ ↓ others", "Esc closes")
        width = max(box.content_size.width - 1, 1)
        self.query_one("#figure-text", Static).update(figure_text(self._explained[self._index], width))


def figure_text(figure: Explained, width: int) -> Content:
    value = f"{figure.value}: {figure.why}" if figure.why else figure.value
    rows = [*_wrapped(Content.styled(value, "bold $text-primary" if not figure.why else FAINT), width), Content("")]
    rows += [*_wrapped(Content(figure.meaning), width), Content("")]
    rows += [Content.styled("HOW", f"bold {FAINT}"), *_wrapped(Content(f"{figure.name} = {figure.formula}"), width)]
    if figure.inputs:
        rows += [Content(""), Content.styled("FROM", f"bold {FAINT}")]
        rows += [row for each in figure.inputs for row in _input(each, width)]
    rows += [Content(""), Content.styled("SOURCE", f"bold {FAINT}"), *_wrapped(Content(figure.source), width)]
    return Content("\n").join(rows)


def _wrapped(text: Content, width: int) -> Iterator[Content]:
    return (row.content for row in wrapped(text, width))


def _input(given: Input, width: int) -> Iterator[Content]:
    value = Content.styled(given.value.rjust(VALUE), "$foreground")
    first = Content(given.name.ljust(NAME)) + value
    beside = width - first.cell_length - 2
    if beside >= NAME:
        source, *more = _wrapped(Content.styled(given.source, FAINT), beside)
        yield first + "  " + source
        yield from (Content(" " * (first.cell_length + 2)) + row for row in more)
    else:
        yield first
        yield from (Content("  ") + row for row in _wrapped(Content.styled(given.source, FAINT), max(width - 2, 1)))


COLOURS: dict[PartName, str] = {
    "start": "$foreground 25%",
    "load": "$warning",
    "wait": "$foreground 40%",
    "image": "$accent",
    "prefill": "$secondary",
    "decode": "$primary",
}
# Terms of decode that are shown as bars: the limit, the expectation, the measurement.
SPEEDS = ("ceiling", "expected", "rate")
TIMES = ("least", "wanted", "reading")  # terms of prefill that are shown as bars, in seconds
LABEL = 10  # cells
TITLES: dict[Concern, str] = {"machine": "this machine", "decode": "decode", "prefill": "prefill", "image": "pictures"}


def explanation(reply: Reply, width: int) -> Content:
    assert reply.metrics is not None
    rows = [*_indented(Content(sentence(reply.metrics, reply.diagnosis)), width)]
    if reply.diagnosis is not None:
        for section in _sections(reply, reply.diagnosis, width):
            rows.extend((Content(""), *section))
    return Content("\n").join(rows)


def _sections(reply: Reply, diagnosis: Diagnosis, width: int) -> Iterator[list[Content]]:
    assert reply.metrics is not None
    yield [_title("where the time went"), *_time(diagnosis, width)]
    if diagnosis.throttles:
        yield [_title("what slowed the machine down"), *_throttled(diagnosis.throttles, width)]
    if helps := [*_help(diagnosis.remedies, help_text(reply.metrics, reply.ending), width)]:
        yield [_title("what would help"), *helps]
    if reply.cache is not None and (again := why(reply.cache)):
        yield [_title("what was read again"), *_indented(Content(again), width, indent=2)]
    known = known_terms(diagnosis)
    speeds = () if reply.metrics.drafted_tokens else _bars(known, SPEEDS, width)  # of steps without guesses
    yield [_title("decode"), *_part(diagnosis, "decode", width), *speeds]
    yield [_title("prefill"), *_part(diagnosis, "prefill", width), *_bars(known, TIMES, width)]
    if reply.outliers:
        lines = (Content(figures.gap_and_cause(outlier)) for outlier in reply.outliers)
        yield [_title("outliers among the gaps"), *(row for line in lines for row in _indented(line, width, indent=2))]
    for concern, name in TITLES.items():
        terms = [term for term in known if term.concern == concern]
        if terms:
            rows = (row for term in terms for row in _term(term, diagnosis.terms, width))
            yield [_title(f"the numbers: {name}"), *rows]


def _title(text: str) -> Content:
    return Content.styled(text.upper(), f"bold {FAINT}")


def _indented(text: Content, width: int, *, indent: int = 0) -> Iterator[Content]:
    for row in wrapped(text, max(width - indent, 1)):
        yield Content(" " * indent) + row.content


def _time(diagnosis: Diagnosis, width: int) -> Iterator[Content]:
    whole = diagnosis.total_s
    cells = shares([part.seconds for part in diagnosis.parts], width)
    drawn = zip(diagnosis.parts, cells, strict=True)
    yield Content("").join(Content.styled("█" * count, COLOURS[part.name]) for part, count in drawn)
    legend = []
    for part in diagnosis.parts:
        share = rates.share(part.seconds, whole)
        told = "" if share is None else f" ({units.percent(share)})"
        legend.append(Content.styled("■ ", COLOURS[part.name]) + f"{part.name} {units.seconds(part.seconds)}{told}")
    yield from _spread(legend, width)


def _spread(parts: Sequence[Content], width: int) -> Iterator[Content]:
    row = Content("")
    for part in parts:
        longer = row + "   " + part if row.plain else part
        if row.plain and longer.cell_length > width:
            yield row
            longer = part
        row = longer
    yield row


def shares(values: Sequence[float], cells: int) -> list[int]:
    """Divide ``cells`` in proportion to ``values``; each above zero gets at least one, where possible."""
    total = sum(values)
    if total <= 0:
        return [0] * len(values)
    counts = [max(round(cells * value / total), 1 if value > 0 else 0) for value in values]
    counts[counts.index(max(counts))] += cells - sum(counts)
    return counts


def _throttled(throttles: Sequence[Slowing], width: int) -> Iterator[Content]:
    for each in throttles:
        yield from _indented(Content.styled(f"{THROTTLED[each]}.", "$text-warning"), width)
        yield from _indented(Content.styled(REMEDIES[RELIEF[each]].how, FAINT), width, indent=2)


def _help(found: Sequence[Remedy], without: str, width: int) -> Iterator[Content]:
    if not found and without:
        yield from _indented(Content.styled(without, FAINT), width)
    for index, remedy in enumerate(found, 1):
        number = Content.styled(f"{index} ", "bold $text-success")
        first, *rest = wrapped(Content(remedy_text(remedy)), width - 2)
        yield number + first.content
        yield from (Content("  ") + row.content for row in rest)
        yield from _indented(Content.styled(REMEDIES[remedy.name].how, FAINT), width, indent=2)


def _part(diagnosis: Diagnosis, name: PartName, width: int) -> Iterator[Content]:
    part = diagnosis.part(name)
    style = "$text-warning" if is_held_up(part, diagnosis.total_s) else ""
    yield from _indented(Content.styled(f"{units.seconds(part.seconds)}: {part_text(part)}", style), width)


def _bars(terms: Sequence[Term], keys: Sequence[str], width: int) -> Iterator[Content]:
    shown = [term for key in keys for term in terms if term.key == key and term.value is not None]
    longest = max((term.value or 0.0 for term in shown), default=0.0)
    room = width - LABEL - VALUE - 1
    if len(shown) < 2 or room < 8:
        return
    for term in shown:
        style = "$text-primary" if term.name == "measured" else FAINT
        drawn = bar(rates.share(term.value, longest), room, style)
        yield Content(term.name.ljust(LABEL)) + drawn + Content(value_text(term.value, term.unit).rjust(VALUE + 1))


def _term(term: Term, terms: Sequence[Term], width: int) -> Iterator[Content]:
    value = value_text(term.value, term.unit)
    gap = max(width - len(term.name) - len(value), 2)
    style = "$foreground" if term.value is not None else FAINT
    yield (
        Content(term.name)
        + Content.styled(" " + "·" * (gap - 2) + " ", "$foreground 25%")
        + Content.styled(value, style)
    )
    for line in (words(term, terms), numbers(term, terms)):
        if line:
            yield from _indented(Content.styled(sanitise_line(line), FAINT), width, indent=2)


class ExplainScreen(Dialog[tuple[Literal["what_if", "steps"], int]]):
    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("f2", "leave", "Close", id="explain.leave", show=False),
        Binding("left", "move(-1)", "Earlier reply", id="explain.earlier", priority=True),
        Binding("right", "move(1)", "Later reply", id="explain.later", priority=True),
        Binding("f3", "what_if", "What if", id="explain.what_if"),
        Binding("f10,s", "steps", "Steps", id="explain.steps"),
    ]

    def __init__(self, replies: Sequence[Reply], index: int = -1) -> None:
        super().__init__()
        self._replies = replies
        self._index = index % len(replies)

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box", id="explain"):
            yield Static(id="explanation", markup=False)

    def on_mount(self) -> None:
        self.query_one("#explain").focus()

    def on_resize(self, event: Resize) -> None:
        del event
        self.call_after_refresh(self._show)

    def _show(self) -> None:
        box, many = self.query_one("#explain"), len(self._replies) > 1
        box.border_title = f"Explain · reply {self._index + 1} of {len(self._replies)}"
        self.say_keys(*(["← → other replies"] if many else []), "F3 what if", "S steps", "Esc closes")
        width = max(box.content_size.width - 1, 1)  # beside the scroll bar
        self.query_one("#explanation", Static).update(explanation(self._replies[self._index], width))

    def action_move(self, by: int) -> None:
        index = self._index + by
        if 0 <= index < len(self._replies):
            self._index = index
            self._show()
            self.query_one("#explain").scroll_home(animate=False)

    def action_what_if(self) -> None:
        self.dismiss(("what_if", self._index))

    def action_steps(self) -> None:
        self.dismiss(("steps", self._index))


# Only visible bars are drawn, so replies of any length open immediately; the engine computes likely tokens
# meanwhile.


TALLEST = 4.0  # usual steps that a full bar stands for; a longer one is cut off, and its number is below
FRAME_S = 1 / 20  # how often a step is shown at most while steps are played
PACES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
TONES: dict[Tone, str] = {
    "": "$foreground", "title": "bold $foreground", "good": "$text-success", "warn": "bold $text-warning", "faint": FAINT,
}  # fmt: skip
# Yellow is the engine's own doing, red the machine's.
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


class StepStrip(Widget):
    class Clicked(Message):
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
        self._index = index
        self.refresh()

    @property
    def page(self) -> int:
        return max(self.size.width, 1)

    def render(self) -> Content:
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
        first, most = self._first, max(len(self._steps) - width, 0)
        if not first <= self._index < first + width:
            first = self._index - width // 2
        return min(max(first, 0), most)

    def _height(self, index: int, rows: int) -> int:
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


TINTS = ("", "$text-success", "$text-warning", "$text-error underline")  # by ``doubt``


class StepsScreen(Dialog[Reply]):
    """A reply's steps; the result is the beginning of a new version, if the user branches at a step.

    ask, stop: start and end the computation of likely tokens. number: its question, see ``take``.
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
        Binding("u", "tint", "Tint by likelihood", id="steps.tint"),
        Binding("plus,equals_sign", "faster(1)", "Faster", id="steps.faster"),
        Binding("minus", "faster(-1)", "Slower", id="steps.slower"),
        Binding("c", "compute", "Compute or cancel the likely tokens", id="steps.compute"),
        *(Binding(str(n), f"branch({n})", f"Go on with {n}", id=f"steps.branch_{n}", show=False) for n in range(1, 6)),
    ]

    def __init__(
        self, steps: ReplySteps, ask: Callable[[], None], stop: Callable[[], None], *, number: int, tinted: bool = False
    ) -> None:
        super().__init__()
        self.set_class(tinted, "-tinted")
        self._steps, self._ask, self._stop, self._number = steps, ask, stop, number
        self._index = steps.walk.pieces if len(steps) else 0
        self._speed = PACES.index(1.0)
        self._player: Timer | None = None
        self._played_from = (0.0, 0.0)  # the clock, and milliseconds of the reply
        self._ends_ms: tuple[float, ...] = tuple(accumulate(ms or 0.0 for ms in steps.walk.ms))

    def compose(self) -> ComposeResult:
        with Vertical(classes="box", id="steps"):
            yield StepStrip(self._steps)
            yield Static(self._steps.legend() if self._steps.recorded else "", id="legend", markup=False)
            yield Static(id="around", markup=False)
            with VerticalScroll(id="step"):
                yield Static(id="step-text", markup=False)
            yield Static(id="looking", markup=False)

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one("#step").focus()
        self._ask()
        self.call_after_refresh(self._show)

    def on_resize(self, event: events.Resize) -> None:
        super().on_resize(event)
        self.call_after_refresh(self._show)

    # What the engine tells ------------------------------------------------------------------------------------------------

    def receive(self, told: LookedAt) -> None:
        if told.id != self._number:
            return
        before, count = self._steps.known, len(self._steps)
        self._steps.receive(told)
        if len(self._steps) != count:  # only now is it known how many tokens the text has
            self._ends_ms = tuple(0.0 for _ in range(len(self._steps)))
        at = self._steps.walk[self._index].token if len(self._steps) else None
        near = at is not None and before <= at + 32 and self._steps.known > before
        self._show() if near or told.prompt is not None or told.ended else self._say()

    def lost(self) -> None:
        if not self._steps.ended:
            self.receive(LookedAt(self._number, ended=True, error="The engine stopped."))

    def action_compute(self) -> None:
        if self._steps.ended:
            self._ask()
        else:
            self._stop()
        self._say()

    # Moving ---------------------------------------------------------------------------------------------------------------

    def action_move(self, by: int) -> None:
        self._pause()
        self._go(self._index + by)

    def action_page(self, by: int) -> None:
        self._pause()
        self._go(self._index + by * max(self.query_one(StepStrip).page - 1, 1))

    def action_go(self, index: int) -> None:
        self._pause()
        self._go(index if index >= 0 else len(self._steps) - 1)

    def action_tint(self) -> None:
        self.toggle_class("-tinted")
        self.call_after_refresh(self._show)

    def action_held_up(self, by: int) -> None:
        self._pause()
        tinted = self.has_class("-tinted")
        found = (self._steps.next_doubtful if tinted else self._steps.walk.next_held_up)(self._index, by)
        if found is None and tinted:
            self._say("No word after this one was unlikely." if by > 0 else "No word before this one was unlikely.")
        elif found is None:
            self._say(
                "No step after this one was unusually slow."
                if by > 0
                else "No step before this one was unusually slow."
            )
        else:
            self._go(found)

    def on_step_strip_clicked(self, message: StepStrip.Clicked) -> None:
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
        self._speed = max(0, min(self._speed + by, len(PACES) - 1))
        self._mark_time()
        self._say_keys()

    def _mark_time(self) -> None:
        before_ms = self._ends_ms[self._index - 1] if self._index else 0.0
        self._played_from = (time.monotonic(), before_ms)

    def _tick(self) -> None:
        began_s, from_ms = self._played_from
        now_ms = from_ms + (time.monotonic() - began_s) * 1e3 * PACES[self._speed]
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
        if self.has_class("-tinted"):
            parts = self._steps.tinted(self._index)
            text = Content("").join(
                Content.styled(part, "bold reverse" if here else TINTS[at]) for part, at, here in parts
            )
        elif around is not None:
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
        speed = PACES[self._speed]
        plays = "Space pauses" if self._player is not None else "Space plays"
        at = "" if speed == 1.0 else f" ×{speed:g}"
        if self.has_class("-tinted"):
            self.say_keys("← → words", "1–5 continue with that one", "n p unlikely ones", "U steps", "Esc closes")
            return
        self.say_keys(
            "← → steps",
            "U how sure",
            f"{plays}{at}",
            "1–5 continue with that token",
            "n p slow ones",
            "+ - speed",
            "Esc closes",
        )


def _line(line: StepLine, width: int) -> list[Content]:
    room = max(width - LABEL, 12)
    rows = [row.content for row in wrapped(Content.styled(line.text, TONES[line.tone]), room)]
    labels = [line.label.ljust(LABEL), *(" " * LABEL for _ in rows[1:])]
    return [Content.styled(label, FAINT) + row for label, row in zip(labels, rows, strict=True)]
