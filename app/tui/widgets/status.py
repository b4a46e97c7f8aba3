"""What is shown beside the transcript: what goes on, the status line, and the gauges of the side panel."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rich.cells import cell_len
from textual import events
from textual.binding import Binding
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static

from tokamac.engine import metrics as rates

from ...chat import figures, preferences
from ...chat.actions import ACTIONS, Action, Keymap
from ...chat.background import READY, KnownPrice, amount, is_of_disk, is_ready, of_path
from ...chat.connection import WITHOUT_BYTES
from ...chat.figures import Figure, Measured, explain
from ...chat.listing import excerpt
from ...chat.session import Session
from ...chat.steps import EnginePhase
from ...models.local import shown_name
from ...reports.verdict import speed_text
from ...text import units
from ...text.sanitise import sanitise_line
from ..markdown.page import segments, select, selected_in
from ..markdown.rows import wrapped
from ..screens.explain import shares
from ..theme import EMPTY, FAINT, LABEL, bar, end_of, sparkline

BAR = 20
ROOMY = 56  # columns for a bar and a whole sentence
LAMP = "● "
GAP = 3  # cells between the two halves of the last line, at least
LONGEST_NAME = 28  # cells
STARTS_AT_ONCE = f"{READY}: starts at once"
SEPARATOR = Content.styled(" · ", FAINT)
UNLOADED = "model unloaded; it reloads when you write"
UNLOADED_SHORT = "model unloaded"
# Actions that have a price, by the ids of price questions.
ACTED = {
    "again": "regenerate",
    "continue": "continue",
    "edit": "edit",
    "fork": "fork",
    "older": "older version",
    "newer": "newer version",
    "other": "other version",
}
MODE, MODE_SHORT = " MESSAGE ", " MSG "  # shown while a message is selected
# The keys of a selected message, by the ids of actions; the first stay longest where the line is short.
MESSAGE_KEYS = {
    "again": "again",
    "edit": "edit",
    "fork": "fork",
    "copy_message": "copy",
    "stop": "back",
    "older": "older",
    "newer": "newer",
    "continue": "continue",
    "copy_code": "copy code",
    "links": "links",
}


class Activity(Static):
    def __init__(self) -> None:
        super().__init__(markup=False)
        self._shown: Content | None = None

    def show(self, session: Session, now: float, *, following: bool, aside: str = "", elsewhere: str = "") -> None:
        width = self.content_size.width
        prices = _of_message(session, width, more=_more(session, following=following), aside=aside)
        if prices is not None:
            self._draw(prices)
            return
        for rooms in ((width, width), (width, 0), (0, 0)):  # in fewer words; what is too long even so ends in dots
            content = self._said(session, now, rooms, following=following, aside=aside, elsewhere=elsewhere)
            if content.cell_length <= width:
                break
        self._draw(content)

    def _draw(self, content: Content) -> None:
        if self._shown is None or not content.is_same(self._shown):
            self._shown = content
            self.update(content, layout=False)  # it is one line high

    @staticmethod
    def _said(
        session: Session, now: float, rooms: tuple[int, int], *, following: bool, aside: str, elsewhere: str
    ) -> Content:
        # What asks for the reader comes first: in a narrow window the rest is cut.
        parts = [_more(session, following=following)]
        if waiting := len(session.queued):
            text, back = ("1 prompt queued", "it") if waiting == 1 else (f"{waiting} prompts queued", "the last")
            text += f": Up takes {back} back" if rooms[0] >= ROOMY else ""
            parts.append(Content.styled(text, "$text-secondary"))
        parts.append(_elsewhere(session, elsewhere, rooms[1]) if elsewhere else doing(session, now, rooms[1]))
        parts.append(Content.styled(aside, FAINT))
        return _joined(*parts)


def _more(session: Session, *, following: bool) -> Content:
    text = "" if following else f"▼ more below: {session.keymap.key('scroll_end')}"
    return Content.styled(text, "$text-secondary")


def _of_message(session: Session, width: int, *, more: Content, aside: str) -> Content | None:
    known = [each for each in session.prices.known if each.question.id in ACTED]
    if not known or session.engine.phase is not EnginePhase.IDLE or session.queued:
        return None
    content = Content.styled(_prices(known, session.keymap, width, whole=not session.prices.waiting), FAINT)
    for longer in (_joined(more, content), _joined(more, content, Content.styled(aside, FAINT))):
        content = longer if longer.cell_length <= width else content
    return content


def _joined(*parts: Content) -> Content:
    return Content.styled(" · ", FAINT).join(part for part in parts if part.plain)


def _elsewhere(session: Session, title: str, width: int) -> Content:
    conversation = session.elsewhere
    if conversation is None:
        return Content("")
    m = conversation.progress.metrics
    verb = {EnginePhase.PREFILL: "reading", EnginePhase.STOPPING: "stopping"}.get(session.engine.phase, "writing")
    tokens = f" · {units.count(m.generated_tokens)} tokens" if m is not None and m.generated_tokens else ""
    hint = f" · {session.keymap.key('stop')} stops" if width >= ROOMY else ""
    several = len(session.versions_of(conversation))
    what = f" {several} versions" if several > 1 else ""
    return Content.styled(f"{verb}{what} in “{excerpt(title)}”{tokens}{hint}", FAINT)


def doing(session: Session, now: float, width: int) -> Content:
    match session.engine.phase:
        case EnginePhase.LOADING:
            return _loading(session, width)
        case EnginePhase.PREFILL:
            return _prefill(session, now, width)
        case EnginePhase.DECODING if (loop := _loop(session, width)) is not None:
            return loop
        case EnginePhase.DECODING:
            m = session.progress.metrics
            tokens = f" {units.count(m.generated_tokens)} tokens" if m is not None and m.generated_tokens else ""
            speed = "" if m is None or m.shown_decode_tps is None else f" at {units.rate(m.shown_decode_tps)}"
            hint = f" · {session.keymap.key('stop')} stops" if width >= ROOMY else ""
            if several := session.at_once:
                return Content.styled(f"writing {several}{hint}", FAINT)
            called = session.conversation.progress.called
            call = f" a call of {excerpt(called)} ·" if called else ""
            return Content.styled(f"writing{call}{tokens}{speed}{hint}", FAINT)
        case EnginePhase.TOOLS:
            return _calling(session)
        case EnginePhase.STOPPING:
            return Content.styled("stopping …", "$text-warning")
        case EnginePhase.FAILED:
            return Content.styled(
                f"no model is loaded · {session.keymap.key('choose_model')} chooses one", "$text-error"
            )
        case EnginePhase.UNLOADED:
            return Content.styled(UNLOADED if width >= len(UNLOADED) else UNLOADED_SHORT, FAINT)
        case EnginePhase.IDLE:
            return _next(session, width)


def _loop(session: Session, width: int) -> Content | None:
    if session.loop is None or session.loop.ends_at is None or session.progress.metrics is None:
        return None
    left, key = session.loop.ends_at - session.progress.metrics.generated_tokens, session.keymap.key("keep_going")
    if left <= 0:
        return None
    whole = f"This reply repeats itself: stopping in {units.count(left)} tokens · {key} keeps it going"
    brief = f"repeats itself: {units.count(left)} tokens left · {key} keeps it going"
    return Content.styled(whole if len(whole) <= width else brief, "$text-warning")


def _calling(session: Session) -> Content:
    if (waiting := session.tools.waiting) is not None:
        return Content.styled(f"{sanitise_line(waiting.name)} waits for you", "$text-warning")
    running = "" if session.tools.running is None else f" {sanitise_line(session.tools.running.name)}"
    return Content.styled(f"calling{running} … · {session.keymap.key('stop')} stops", FAINT)


def _next(session: Session, width: int) -> Content:
    price = session.warmup.price
    if price is None:
        return Content("")
    if is_ready(price):
        return Content.styled("prompt already processed", FAINT)
    takes = amount(price, " to read") if width >= ROOMY else amount(price, brief=True)
    return Content.styled(f"next: {takes}", FAINT)


def _prices(known: Sequence[KnownPrice], keymap: Keymap, width: int, *, whole: bool) -> str:
    if whole and all(is_ready(each.price) for each in known):
        return STARTS_AT_ONCE if len(STARTS_AT_ONCE) <= width else READY
    said = [" · ".join(map(form, known)) for form in (_price, _short_price, partial(_keyed_price, keymap))]
    return next((each for each in said if len(each) <= width), said[-1])


def _price(known: KnownPrice) -> str:
    question = known.question
    if is_ready(known.price):
        return f"{ACTED[question.id]}: {READY}"
    takes = amount(known.price) if question.key is None else of_path(known.price)
    return f"{ACTED[question.id]}: {'up to ' if question.most else ''}{takes}"


def _short_price(known: KnownPrice) -> str:
    return f"{ACTED[known.question.id]}: {_short_amount(known)}"


def _keyed_price(keymap: Keymap, known: KnownPrice) -> str:
    action = known.question.id
    return f"{keymap.key('older' if action == 'other' else action)}: {_short_amount(known)}"


def _short_amount(known: KnownPrice) -> str:
    question, price = known.question, known.price
    most = units.size(price.disk_bytes) if is_of_disk(price) else units.short(price.tokens)
    return "0" if question.key is not None and is_ready(price) else ("≤" if question.most else "") + most


def _loading(session: Session, width: int) -> Content:
    name, loading = shown_name(session.engine.load.model), session.engine.loading
    if loading is None:
        return Content.styled(f"loading {name} …", FAINT)
    if loading.stage in WITHOUT_BYTES:
        return Content.styled(f"{WITHOUT_BYTES[loading.stage]} {name} …", FAINT)
    verb = "downloading" if loading.stage == "download" else "loading"
    done = units.size(loading.done)
    total = "" if loading.total is None else f" of {units.size(loading.total)}"
    progress = bar(rates.share(loading.done, loading.total), _bar(width)) + " " if loading.total else Content("")
    return progress + Content.styled(f"{verb} {name} {done}{total}", FAINT)


def _prefill(session: Session, now: float, width: int) -> Content:
    prefill = session.progress.prefill
    if prefill is None:
        return Content.styled("sending …", FAINT)
    eta = figures.prefill_eta_s(session, now)
    left = "" if eta is None or prefill.done >= prefill.total else f" · {units.seconds(eta)} left"
    write, verb = (units.count, "reading ") if width >= ROOMY else (units.short, "")
    text = f" {verb}{write(prefill.done)} of {write(prefill.total)} tokens{left}"
    return bar(rates.share(prefill.done, prefill.total), _bar(width)) + Content.styled(text, FAINT)


def _bar(width: int) -> int:
    return BAR if width >= ROOMY + BAR else BAR // 3


class StatusLine(Static):
    def __init__(self, actions: Sequence[Action] = ACTIONS) -> None:
        super().__init__(markup=False)
        self.unsaved: Callable[[], bool] = lambda: False
        self._shown: Content | None = None
        self.rekey(actions)

    def rekey(self, actions: Sequence[Action]) -> None:
        self._actions = sorted((action for action in actions if action.footer), key=_importance)
        found = {action.id: action for action in actions}
        self._message_keys = [
            replace(found[name], label=word) for name, word in MESSAGE_KEYS.items() if found[name].keys
        ]

    def show(self, session: Session, *, essentials: bool, selecting: bool, chosen: Action | None = None) -> None:
        actions = _useful(self._actions, session)
        keys = [
            _key(action, chosen=chosen is not None and action.id == chosen.id)
            for action in (_for_message(actions, self._message_keys, session) if selecting else actions)
        ]
        width = self.content_size.width
        room = width - GAP - keys[0].cell_length  # the first key always stands there
        warning = Content.styled(" · not saved" if self.unsaved() else "", "$text-error")
        name = _name(session, min(LONGEST_NAME, room - len(LAMP) - warning.cell_length))
        left = Content.styled(LAMP, _lamp(session)) + Content.styled(name, FAINT) + warning
        if selecting:
            left = _mode(chosen, width)
        else:
            profile = sanitise_line(session.profile)
            if profile and left.cell_length + SEPARATOR.cell_length + cell_len(profile) <= room:
                left += SEPARATOR + Content.styled(profile, FAINT)
            if set_ := preferences.state(session.template):
                left += SEPARATOR + Content.styled(set_, FAINT)
        if session.tools.specs:
            left += SEPARATOR + Content.styled(f"tools {len(session.tools.specs)}", FAINT)
        for part in essentials_of(session) if essentials and not selecting else ():
            if left.cell_length + SEPARATOR.cell_length + len(part) <= room:
                left += SEPARATOR + Content.styled(part, FAINT)
        content = _beside(left, keys, width)
        if self._shown is None or not content.is_same(self._shown):
            self._shown = content
            self.update(content, layout=False)  # it is one line high


def _lamp(session: Session) -> str:
    if session.engine.phase is EnginePhase.FAILED:
        return "$error"
    return "$success" if session.engine.phase is EnginePhase.IDLE else "$warning"


def _name(session: Session, most: int) -> str:
    return end_of(
        shown_name(session.engine.load.model if session.engine.info is None else session.engine.info.name), most
    )


def essentials_of(session: Session) -> list[str]:
    m, held = session.progress.metrics, figures.context_held(session)
    parts = []
    if m is not None and m.shown_decode_tps is not None:
        parts.append(units.rate(m.shown_decode_tps))
    if m is not None and m.ttft_s is not None:
        parts.append(f"first token {units.wait(m.ttft_s)}")
    if held is not None and session.engine.info is not None:
        parts.append(f"context {units.percent(rates.share(held, session.engine.info.capacity))} full")
    if gone := figures.tokens_out_of_sight(session):
        parts.append(f"{units.short(gone)} forgotten")
    return parts


def _beside(left: Content, keys: Sequence[Content], width: int) -> Content:
    shown = Content("")
    for key in keys:
        longer = shown + ("  " if shown.plain else "") + key
        if left.cell_length + GAP + longer.cell_length > width:
            break
        shown = longer
    return left + " " * max(0, width - left.cell_length - shown.cell_length) + shown


def _mode(chosen: Action | None, width: int) -> Content:
    does = "" if chosen is None else f" Enter: {chosen.label.lower()}" if width >= ROOMY else " Enter"
    return Content.styled(MODE if width >= ROOMY else MODE_SHORT, "bold reverse") + Content.styled(
        does, "bold $text-primary"
    )


def _key(action: Action, *, chosen: bool = False) -> Content:
    if chosen:
        return Content.styled(f"{action.key_name} {action.label.lower()}", "bold reverse")
    return Content.styled(action.key_name, "$text-primary") + Content.styled(f" {action.label.lower()}", FAINT)


def _useful(actions: Sequence[Action], session: Session) -> list[Action]:
    return [action for action in actions if action.id != "stop" or session.engine.busy or session.engine.replying]


def _for_message(usual: Sequence[Action], of_message: Sequence[Action], session: Session) -> list[Action]:
    if session.engine.busy:
        return [usual[0], *(action for action in of_message if action.id != usual[0].id)]
    return list(of_message)


def _importance(action: Action) -> int:
    order = ("stop", "help", "leader", "choose_model", "new_chat", "chats", "explain", "regenerate", "palette", "send")
    return order.index(action.id)


# Shows the running, last or selected reply. The row count is constant during a reply, and only changed rows are
# redrawn, without timer or layout.


WIDTH = 30
VERDICT_ROWS = 7  # rows for the verdict, at most: what does not fit is left out by whole sentences
NONE_YET = "–"  # there is no reply to measure; what a reply does not tell is "unknown"
CACHED, COMPUTED, WRITTEN = "$secondary", "$primary", "$success"


@dataclass(frozen=True, slots=True)
class GaugeRow:
    content: Content
    figure: Figure | None = None
    switches: bool = False


BLANK = GaugeRow(Content(""))


@dataclass(frozen=True, slots=True)
class Layout:
    room: int
    every: bool = False
    focused: bool = False
    verdict: int = 0


def rows(reply: Measured, layout: Layout) -> list[GaugeRow]:
    first = [*_model(reply)], [*verdict_rows(reply, layout.verdict)]
    last = [*_hints(reply, layout)]
    if layout.every:
        parts = (_first_token, _decode, _limits, _context, _memory)
        groups = [*first, *([*part(reply)] for part in parts), last]
    else:
        groups = [*first, [*_few(reply)], last]
    tight = sum(map(len, groups))
    airy = tight + len(groups) - 1 <= layout.room or tight > layout.room  # what scrolls anyway may as well be readable
    found = [row for group in groups for row in ([BLANK, *group] if airy else group)]
    return found[1:] if airy else found


def _title(text: str) -> GaugeRow:
    return GaugeRow(Content.styled(text, "bold"))


def _row(figure: Figure, label: str, value: str, strong: str = "") -> GaugeRow:
    style, room = f"{strong} $foreground", WIDTH - len(label) - 1
    if value in (units.UNKNOWN, NONE_YET):
        style = LABEL
    value = value if len(value) <= room else f"{value[: room - 1]}…"
    gap = " " * (WIDTH - len(label) - len(value))
    return GaugeRow(Content.styled(label, LABEL) + gap + Content.styled(value, style.strip()), figure)


def _of(part: int | None, whole: int | None) -> str:
    if part is None:
        return units.UNKNOWN
    return units.count(part) if whole is None else f"{units.count(part)} of {units.count(whole)}"


def _model(reply: Measured) -> Iterator[GaugeRow]:
    info = reply.engine.info
    name = end_of(shown_name(reply.engine.load.model if info is None else info.name), WIDTH)
    yield GaugeRow(Content.styled(name, "bold $text-primary"), "model")
    if info is None:
        yield GaugeRow(Content.styled("not loaded", LABEL), "model")
    else:
        bits = "" if info.bits_per_weight is None else f"{info.bits_per_weight:.2g} bits"
        parts = [units.short(info.parameters), bits, units.size(info.weight_bytes)]
        yield GaugeRow(Content.styled(" · ".join(part for part in parts if part), LABEL), "model")


def verdict_rows(reply: Measured, least: int) -> Iterator[GaugeRow]:
    yield GaugeRow(Content.styled(reply.which.upper(), "bold"), "diagnosis")
    shown: list[Content] = []
    for sentence in figures.verdict(reply):
        lines = [row.content for row in wrapped(Content(f"{' '.join((*_plain_of(shown), sentence))}"), WIDTH)]
        if shown and len(lines) > VERDICT_ROWS:
            break
        shown = lines
    yield from (GaugeRow(line, "diagnosis") for line in shown)
    yield from (BLANK for _ in range(least - len(shown)))


def _plain_of(lines: Sequence[Content]) -> list[str]:
    return [line.plain for line in lines]


def _few(reply: Measured) -> Iterator[GaugeRow]:
    m, context, limit = reply.progress.metrics, figures.context_of(reply), figures.capacity_of(reply)
    yield _row("mean", "speed", speed_text(m) if m and m.ttft_s is not None else NONE_YET, "bold")
    yield _row("ttft", "first token", units.wait(m.ttft_s) if m else NONE_YET, "bold")
    held = NONE_YET if context is None else units.count(context.held)
    value = held if limit is None else f"{held} of {units.count(limit)}"
    yield _row("context", "context", value, "bold")
    yield GaugeRow(_context_bar(context), "context")
    if reply.progress.left_out or (reply.engine.info is not None and reply.engine.info.rolls):
        gone = 0 if context is None else context.out_of_sight
        yield _row("context", "forgotten", f"{units.count(gone)} tokens" if gone else "none")


def _hints(reply: Measured, layout: Layout) -> Iterator[GaugeRow]:
    key = reply.keymap.key("all_figures")
    explains = "↑ ↓ · Enter explains" if layout.focused else "Tab or click · Enter explains"
    yield GaugeRow(Content.styled(explains, "$text-primary" if layout.focused else LABEL))
    switch = f"{key} {'fewer' if layout.every else 'all'} figures"
    yield GaugeRow(Content.styled(switch, LABEL), switches=True)


def _first_token(reply: Measured) -> Iterator[GaugeRow]:
    m, prefill = reply.progress.metrics, reply.progress.prefill
    cached = m.cached_tokens if m is not None else prefill.cached if prefill is not None else None
    total = m.prompt_tokens if m is not None else prefill.total if prefill is not None else None
    yield _title("FIRST TOKEN")
    yield _row("ttft", "TTFT", units.wait(m.ttft_s) if m else NONE_YET)
    if m and m.image_s is not None:
        yield _row("ttft", "of it, pictures", units.wait(m.image_s))
    yield _row("prefill", "prefill", _rate(m.shown_prefill_tps if m else None))
    yield _row("cached", "cached tokens", NONE_YET if cached is None else _of(cached, total))


def _decode(reply: Measured) -> Iterator[GaugeRow]:
    m, live = reply.progress.metrics, reply.progress.live
    gaps = m.itl_ms if m and not m.accepted_tokens else None  # no time lies between the tokens of one pass
    yield _title("DECODE")
    yield _row("now", "now", _rate(figures.decode_now(reply)))
    yield _row("mean", "mean", _rate(m.shown_decode_tps if m else None))
    yield _row("guessed", "guesses", figures.guessed_right(m) if m else NONE_YET)
    line = sparkline(live.gaps_ms, WIDTH) if live is not None else ""
    yield GaugeRow(Content.styled(line or "─" * WIDTH, "$secondary" if line else EMPTY), "gaps")
    yield _row("gaps", "time per token", units.milliseconds(gaps.p50) if gaps else NONE_YET)
    yield _row("gaps", "slowest 5 % above", units.milliseconds(gaps.p95) if gaps else NONE_YET)
    yield from _slowest(reply)


def _rate(tps: float | None) -> str:
    return NONE_YET if tps is None else units.rate(tps)


def _slowest(reply: Measured) -> Iterator[GaugeRow]:
    if not reply.progress.outliers:
        yield _row("slowest", "slowest gap", NONE_YET if reply.progress.metrics is None else "no outliers")
        yield BLANK
        return
    outlier = reply.progress.outliers[0]
    why = f"token {units.count(outlier.token)}: {figures.causes(outlier)}"
    yield _row("slowest", "slowest gap", units.milliseconds(outlier.gap_ms))
    yield _row("slowest", "", why if len(why) < WIDTH else f"{why[: WIDTH - 2]}…")


def _limits(reply: Measured) -> Iterator[GaugeRow]:
    m, achieved = reply.progress.metrics, figures.achieved_gbs(reply)
    none = NONE_YET if m is None else units.UNKNOWN
    ceiling = m.ceiling_tps if m is not None else reply.engine.ceiling_tps
    expected = m.expected_tps if m is not None else None
    of_ceiling = m.share_of_ceiling if m is not None else None
    of_expected = m.share_of_expected if m is not None else None
    yield _title("CEILING")
    yield _row("ceiling", f"ceiling{_allowed(ceiling)}", _share(of_ceiling, none if ceiling is None else NONE_YET))
    yield GaugeRow(bar(of_ceiling, WIDTH, "$success"), "ceiling")
    yield _row("expected", f"expected{_allowed(expected)}", _share(of_expected, none if expected is None else NONE_YET))
    yield GaugeRow(bar(of_expected, WIDTH, "$secondary"), "expected")
    yield _row("achieved", "achieved", NONE_YET if achieved is None else units.bandwidth(achieved))


def _share(share: float | None, without: str) -> str:
    return without if share is None else units.percent(share)


def _allowed(tps: float | None) -> str:
    return "" if tps is None else f" {units.rate(tps)}"


def _context(reply: Measured) -> Iterator[GaugeRow]:
    context, limit = figures.context_of(reply), figures.capacity_of(reply)
    if context is None:
        yield _titled("context", "CONTEXT", NONE_YET if limit is None else f"{NONE_YET} of {units.count(limit)}")
    else:
        yield _titled("context", "CONTEXT", _of(context.held, limit))
    yield GaugeRow(_context_bar(context), "context")
    if context is None:
        yield BLANK
        yield BLANK
        yield _row("out of sight", "forgotten", NONE_YET)
        return
    yield from _legend(context)
    gone = context.out_of_sight
    yield _row("out of sight", "forgotten", f"{units.count(gone)} tokens" if gone else "none")


def _context_bar(context: figures.Context | None) -> Content:
    if context is None:
        return bar(None, WIDTH)
    cached, read = (
        (context.cached, context.computed) if not context.out_of_sight else (0, context.cached + context.computed)
    )
    parts = ((cached, CACHED), (read, COMPUTED), (context.written, WRITTEN), (context.free or 0, EMPTY))
    cells = shares([float(count) for count, _ in parts], WIDTH)
    drawn = (
        Content.styled(("─" if style == EMPTY else "━") * count, style)
        for count, (_, style) in zip(cells, parts, strict=True)
    )
    return Content("").join(drawn)


def _titled(figure: Figure, title: str, value: str) -> GaugeRow:
    gap = " " * max(1, WIDTH - len(title) - len(value))
    style = LABEL if value.startswith(NONE_YET) else "$foreground"
    return GaugeRow(Content.styled(title, "bold") + gap + Content.styled(value, style), figure)


def _legend(context: figures.Context) -> Iterator[GaugeRow]:
    # Parts are unknown once tokens were dropped: nobody knows which part they were of.
    cached, read = ("cached", units.short(context.cached), CACHED), ("read", units.short(context.computed), COMPUTED)
    written = ("written", units.short(context.written), WRITTEN)
    free = ("free", "any" if context.free is None else units.short(context.free), EMPTY)
    parts = [cached, read, written, free]
    if context.out_of_sight:
        parts = [("prompt", units.short(context.cached + context.computed), COMPUTED), written, free]
    shown = [
        Content.styled("─ " if style == EMPTY else "■ ", style) + Content.styled(f"{name} {count}", LABEL)
        for name, count, style in parts
    ]
    column = max(WIDTH // 2, *(each.cell_length + 1 for each in shown[::2]))
    for index in (0, 2):
        first, *second = shown[index : index + 2]
        gap = " " * (column - first.cell_length)
        yield GaugeRow(Content("").join([first, gap, *second]) if second else first, "context")


def _memory(reply: Measured) -> Iterator[GaugeRow]:
    m, memory, peak = reply.progress.metrics, reply.engine.memory, figures.peak_bytes(reply)
    most = NONE_YET if peak is None else units.size(peak)
    budget = "" if memory.budget_bytes is None or peak is None else f" of {units.size(memory.budget_bytes)}"
    promised = memory.predicted_peak_bytes
    yield _title("MEMORY")
    yield _row("kv", "KV cache", units.size(m.kv_bytes) if m else NONE_YET)
    yield _row("peak", "peak", most + budget)
    yield GaugeRow(bar(rates.share(peak, memory.budget_bytes), WIDTH, "$secondary"), "peak")
    yield _row("predicted", "expected peak", NONE_YET if promised is None else units.size(promised))


POINTER = "◂"  # beside all rows of the selected figure


class Gauges(Widget, can_focus=True):
    class Switched(Message):
        """The user wants all figures, or the few."""

    FOCUS_ON_CLICK = False
    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("up", "move(-1)", "Figure above", id="gauges.up", show=False),
        Binding("down", "move(1)", "Figure below", id="gauges.down", show=False),
        Binding("home", "move(-99)", "First figure", id="gauges.first", show=False),
        Binding("end", "move(99)", "Last figure", id="gauges.last", show=False),
        Binding("enter,space", "explain", "Explain", id="gauges.explain", show=False),
        Binding("right", "every(True)", "All figures", id="gauges.all", show=False),
        Binding("left", "every(False)", "Fewer figures", id="gauges.few", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._reply: Measured | None = None
        self._every = self._entered = False
        self._verdict = 0  # its rows, as they were when no reply was being made
        self._rows: list[GaugeRow] = []
        self._drawn: list[Content] = []
        self._selected: Figure | None = None

    def show(self, reply: Measured, *, every: bool) -> None:
        self._reply, self._every = reply, every
        if not reply.replying:
            self._verdict = len([*verdict_rows(reply, 0)]) - 1
        room = (
            self.parent.size.height if isinstance(self.parent, Widget) else 0
        )  # its own container is as high as it is
        self._rows = rows(reply, Layout(room, every, self._entered, self._verdict))
        if self._selected is not None and self._selected not in self._figures:
            self._selected = "ttft"
        self._draw()

    @property
    def _figures(self) -> list[Figure]:
        return list(dict.fromkeys(row.figure for row in self._rows if row.figure is not None))

    @property
    def selected(self) -> Figure | None:
        return self._selected

    def _draw(self) -> None:
        first = next(
            (y for y, row in enumerate(self._rows) if row.figure is not None and row.figure == self._selected), -1
        )
        before, self._drawn = self._drawn, [self._marked(row, y == first) for y, row in enumerate(self._rows)]
        if len(before) != len(self._drawn):
            self.refresh(layout=True)
            return
        changed = [y for y, (was, row) in enumerate(zip(before, self._drawn, strict=True)) if not was.is_same(row)]
        if changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def _marked(self, row: GaugeRow, first: bool) -> Content:
        if row.figure is None or row.figure != self._selected:
            return row.content
        pad = " " * (WIDTH - row.content.cell_length)
        whole = Content.styled(row.content.plain + pad, "reverse") if first else row.content + pad
        return whole + Content.styled(POINTER, "$primary")

    # Selecting ------------------------------------------------------------------------------------------------------------

    def on_focus(self) -> None:
        self._enter(entered=True)
        self._select(self._selected or "ttft")

    def on_blur(self) -> None:
        if self.screen.is_current:
            self._enter(entered=False)
            self._select(None)

    def _enter(self, *, entered: bool) -> None:
        self._entered = entered
        if self._reply is not None:
            self.show(self._reply, every=self._every)

    def action_move(self, by: int) -> None:
        shown = self._figures
        index = shown.index(self._selected or "ttft") + by
        self._select(shown[max(0, min(len(shown) - 1, index))])

    def action_every(self, every: bool) -> None:
        if every is not self._every:
            self.post_message(self.Switched())

    def action_explain(self) -> None:
        if self._selected is not None:
            self._open(self._selected)

    def on_click(self, event: events.Click) -> None:
        if self.text_selection is not None or not 0 <= event.y < len(self._rows):
            return
        row = self._rows[event.y]
        if row.switches:
            self.post_message(self.Switched())
        elif row.figure is not None:
            self._open(row.figure)

    def _select(self, figure: Figure | None) -> None:
        self._selected = figure
        self._draw()
        if figure is not None:
            self.call_after_refresh(self._bring_into_view, figure)  # the panel may be about to be shown

    def _bring_into_view(self, figure: Figure) -> None:
        shown = [y for y, row in enumerate(self._rows) if row.figure == figure]
        if shown and isinstance(self.parent, Widget):
            top = max(0, shown[0] - 1)
            self.parent.scroll_to_region(Region(0, top, 1, shown[-1] + 1 - top), animate=False)

    def _open(self, figure: Figure) -> None:
        from ..screens.explain import FigureScreen

        if (reply := self._reply) is not None:
            shown = self._figures
            explained = [explain(each, reply) for each in shown]
            self.app.push_screen(FigureScreen(explained, shown.index(figure)), self._explained)

    def _explained(self, index: int | None) -> None:
        if self.has_focus and index is not None:
            self._select(self._figures[index])

    # Drawing --------------------------------------------------------------------------------------------------------------

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        del container, viewport, width  # Textual's signature
        return len(self._rows)

    def render_line(self, y: int) -> Strip:
        if y >= len(self._drawn):
            return Strip.blank(self.size.width, self.visual_style.rich_style)
        selected = selected_in(self, y)
        return Strip(segments(select(self._drawn[y], selected), self.visual_style)).apply_offsets(0, y)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        return selection.extract("\n".join(_plain(self._rows))), "\n"


def _plain(shown: Sequence[GaugeRow]) -> list[str]:
    return [row.content.plain for row in shown]


NARROW = 90  # below this many columns, the gauges would leave too little for the text
