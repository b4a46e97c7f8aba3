"""Two lines: above the prompt the current activity, below it the model, its figures and the keys."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from rich.cells import cell_len
from textual.content import Content
from textual.widgets import Static

from tokamac.engine import metrics as rates

from ... import units
from ...chat import figures, preferences
from ...chat.actions import ACTIONS, Action, Keymap
from ...chat.background import READY, KnownPrice, amount, is_of_disk, is_ready, of_path
from ...chat.connection import WITHOUT_BYTES
from ...chat.listing import excerpt
from ...chat.session import Session
from ...chat.steps import EnginePhase
from ...sanitise import sanitise_line
from ..theme import FAINT, bar, end_of

BAR = 20
ROOMY = 56  # columns for a bar and a whole sentence
LAMP = "● "
GAP = 3  # cells between the two halves of the last line, at least
LONGEST_NAME = 28  # cells
SEPARATOR = Content.styled(" · ", FAINT)
UNLOADED = "model unloaded; it reloads when you write"
UNLOADED_SHORT = "model unloaded"
ACTED = {
    "again": "regenerate",
    "continue": "continue",
    "edit": "edit",
    "fork": "fork",
    "older": "older version",
    "newer": "newer version",
    "other": "other version",
}
"""Actions that have a price, by the ids of price questions."""
MODE, MODE_SHORT = " MESSAGE ", " MSG "
"""Shown while a message is selected."""
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
"""The keys of a selected message, by the ids of actions; the first stay longest where the line is short."""


class Activity(Static):
    """The line above the prompt: loading, reading, writing, queued prompts, the price of the draft, or how to follow again."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._shown: Content | None = None

    def show(self, session: Session, now: float, *, following: bool, aside: str = "", elsewhere: str = "") -> None:
        """Show where ``session`` is, and what runs in the background. elsewhere: the title of the chat whose reply does."""
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
        """Return the whole line. rooms: the cells for the queue, and for the activity."""
        # What asks for the reader comes first: in a narrow window the rest is cut.
        parts = [_more(session, following=following)]
        if waiting := len(session.queued):
            text, back = ("1 prompt queued", "it") if waiting == 1 else (f"{waiting} prompts queued", "the last")
            text += f": Up takes {back} back" if rooms[0] >= ROOMY else ""
            parts.append(Content.styled(text, "$text-secondary"))
        parts.append(_elsewhere(session, elsewhere, rooms[1]) if elsewhere else _doing(session, now, rooms[1]))
        parts.append(Content.styled(aside, FAINT))
        return _joined(*parts)


def _more(session: Session, *, following: bool) -> Content:
    text = "" if following else f"▼ more below: {session.keymap.key('scroll_end')}"
    return Content.styled(text, "$text-secondary")


def _of_message(session: Session, width: int, *, more: Content, aside: str) -> Content | None:
    """Return the prices of the actions on the selected message, if they are known and the engine is idle."""
    known = [each for each in session.prices.known if each.question.id in ACTED]
    if not known or session.engine.phase is not EnginePhase.IDLE or session.queued:
        return None
    content = Content.styled(_prices(known, session.keymap, width), FAINT)
    for longer in (_joined(more, content), _joined(more, content, Content.styled(aside, FAINT))):
        content = longer if longer.cell_length <= width else content
    return content


def _joined(*parts: Content) -> Content:
    return Content.styled(" · ", FAINT).join(part for part in parts if part.plain)


def _elsewhere(session: Session, title: str, width: int) -> Content:
    """Return what the reply that runs in the background is doing."""
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


def _doing(session: Session, now: float, width: int) -> Content:
    match session.engine.phase:
        case EnginePhase.LOADING:
            return _loading(session, width)
        case EnginePhase.PREFILL:
            return _prefill(session, now, width)
        case EnginePhase.DECODING:
            written = session.metrics.generated_tokens if session.metrics is not None else None
            tokens = "" if not written else f" {units.count(written)} tokens"
            rate = figures.decode_now(session)
            speed = "" if rate is None else f" at {units.rate(rate)}"
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


def _calling(session: Session) -> Content:
    """Return which call waits for the user, or runs."""
    if (waiting := session.tools.waiting) is not None:
        return Content.styled(f"{sanitise_line(waiting.name)} waits for you", "$text-warning")
    running = "" if session.tools.running is None else f" {sanitise_line(session.tools.running.name)}"
    return Content.styled(f"calling{running} … · {session.keymap.key('stop')} stops", FAINT)


def _next(session: Session, width: int) -> Content:
    """Return the price of sending the draft now."""
    price = session.warmup.price
    if price is None:
        return Content("")
    if is_ready(price):
        return Content.styled("prompt already processed", FAINT)
    takes = amount(price, " to read") if width >= ROOMY else amount(price, brief=True)
    return Content.styled(f"next: {takes}", FAINT)


def _prices(known: Sequence[KnownPrice], keymap: Keymap, width: int) -> str:
    """Return actions and their prices in the longest form that fits; in the shortest, an action is its key."""
    said = [" · ".join(map(form, known)) for form in (_price, _short_price, partial(_keyed_price, keymap))]
    return next((each for each in said if len(each) <= width), said[-1])


def _price(known: KnownPrice) -> str:
    """Return an action and its price: ``edit: up to 240 tokens, about 0.4 s``, or ``fork: instant``."""
    question = known.question
    if is_ready(known.price):
        return f"{ACTED[question.id]}: {READY}"
    takes = amount(known.price) if question.key is None else of_path(known.price)
    return f"{ACTED[question.id]}: {'up to ' if question.most else ''}{takes}"


def _short_price(known: KnownPrice) -> str:
    """Return that in short: ``edit: ≤240``, or ``fork: 310 MB``, which come from the disk."""
    return f"{ACTED[known.question.id]}: {_short_amount(known)}"


def _keyed_price(keymap: Keymap, known: KnownPrice) -> str:
    """Return that with the action's key: ``e: ≤240``. Of two versions, either key shows the other: ``[: instant``."""
    action = known.question.id
    return f"{keymap.key('older' if action == 'other' else action)}: {_short_amount(known)}"


def _short_amount(known: KnownPrice) -> str:
    question, price = known.question, known.price
    most = units.size(price.disk_bytes) if is_of_disk(price) else units.short(price.tokens)
    return READY if question.key is not None and is_ready(price) else ("≤" if question.most else "") + most


def _loading(session: Session, width: int) -> Content:
    name, loading = sanitise_line(session.engine.load.model), session.engine.loading
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
    prefill = session.prefill
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
    """The last line: model and essentials at the left; the keys of ``actions`` at the right, as many as fit.

    While a message is selected, they are those of a message. unsaved: tells whether anything of the chat is not saved.
    """

    def __init__(self, actions: Sequence[Action] = ACTIONS) -> None:
        super().__init__(markup=False)
        self.unsaved: Callable[[], bool] = lambda: False
        self._shown: Content | None = None
        self.rekey(actions)

    def rekey(self, actions: Sequence[Action]) -> None:
        """Show the keys of ``actions`` from now on."""
        self._actions = sorted((action for action in actions if action.footer), key=_importance)
        found = {action.id: action for action in actions}
        self._message_keys = [
            replace(found[name], label=word) for name, word in MESSAGE_KEYS.items() if found[name].keys
        ]

    def show(self, session: Session, *, essentials: bool, selecting: bool, chosen: Action | None = None) -> None:
        """Show the model, and its figures if the panel does not.

        selecting: a message is selected: the line says so, and has its keys. chosen: the action that Enter does with it.
        """
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
        for part in _essentials(session) if essentials and not selecting else ():
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
    """Return the model's name, or as much of its end as has room in ``most`` cells."""
    return end_of(
        sanitise_line(session.engine.load.model if session.engine.info is None else session.engine.info.name), most
    )


def _essentials(session: Session) -> list[str]:
    """Return the figures of the reply, the most important first."""
    m, held = session.metrics, figures.context_held(session)
    parts = []
    if (rate := figures.decode_now(session) or (m.decode_tps if m else None)) is not None:
        parts.append(units.rate(rate))
    if m is not None and m.ttft_s is not None:
        parts.append(f"first token {units.wait(m.ttft_s)}")
    if held is not None and session.engine.info is not None:
        parts.append(f"context {units.percent(rates.share(held, session.engine.info.capacity))} full")
    if gone := figures.tokens_out_of_sight(session):
        parts.append(f"{units.short(gone)} forgotten")
    return parts


def _beside(left: Content, keys: Sequence[Content], width: int) -> Content:
    """Return ``left``, and at the right as many of ``keys`` as fit."""
    shown = Content("")
    for key in keys:
        longer = shown + ("  " if shown.plain else "") + key
        if left.cell_length + GAP + longer.cell_length > width:
            break
        shown = longer
    return left + " " * max(0, width - left.cell_length - shown.cell_length) + shown


def _mode(chosen: Action | None, width: int) -> Content:
    """Return what says that keys go to a message, and what Enter does."""
    does = "" if chosen is None else f" Enter: {chosen.label.lower()}" if width >= ROOMY else " Enter"
    return Content.styled(MODE if width >= ROOMY else MODE_SHORT, "bold reverse") + Content.styled(
        does, "bold $text-primary"
    )


def _key(action: Action, *, chosen: bool = False) -> Content:
    if chosen:
        return Content.styled(f"{action.key_name} {action.label.lower()}", "bold reverse")
    return Content.styled(action.key_name, "$text-primary") + Content.styled(f" {action.label.lower()}", FAINT)


def _useful(actions: Sequence[Action], session: Session) -> list[Action]:
    """Return the actions that do something now: stop only while something runs."""
    return [action for action in actions if action.id != "stop" or session.engine.busy or session.engine.replying]


def _for_message(usual: Sequence[Action], of_message: Sequence[Action], session: Session) -> list[Action]:
    """Return the keys of a message; before them, while something runs, the key that stops it."""
    if session.engine.busy:
        return [usual[0], *(action for action in of_message if action.id != usual[0].id)]
    return list(of_message)


def _importance(action: Action) -> int:
    """Return the rank of an action; those of low rank stay where the line is short."""
    order = ("stop", "help", "leader", "choose_model", "new_chat", "chats", "explain", "regenerate", "palette", "send")
    return order.index(action.id)
