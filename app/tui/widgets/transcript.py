"""The conversation on screen: it grows, and messages can be selected."""

# Drawing is paced to leave the machine to the model (``FramePacer``).

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.reactive import var

from tokamac.engine.events import TextKind

from ...chat.actions import ACTIONS, Action, Keymap, Scope, one_name
from ...chat.conversation import Reply, Turn
from ...chat.figures import PRIMER
from ...store.values import ToolResult
from ..markdown.page import BLANK, PLAIN, Frame, PageItem, PageRow, PageView
from ..markdown.rows import Row, wrapped
from ..markdown.turns import ReplyMessage, Spoken, SystemMessage, ToolMessage, mark_left_out, messages_of
from ..theme import FAINT, LABEL


def bindings(scope: Scope = "chat") -> list[BindingType]:
    """Return the bindings of the registry's actions, for the screen or for a selected message."""
    return [
        Binding(
            action.bound_keys,
            f"screen.do('{action.id}')",
            action.label,
            id=action.id,
            priority=scope == "chat",
            show=False,
            tooltip=action.help,
        )
        for action in ACTIONS
        if action.bound and action.scope == scope
    ]


Hints = tuple[tuple[str, str], ...]
WORDMARK = "▀█▀ █▀█ █▄▀ █▀█ █▀▄▀█ █▀█ █▀▀\n █  █▄█ █ █ █▀█ █ ▀ █ █▀█ █▄▄"
PROMISE = "A model on this machine. Nothing leaves it."
ALONE = "guide only answers about this app."  # shown while the embedded model is loaded
# What one of the keys is for then, which the smallest window shows too.
ELSE = {"chooses a model": "gets a model for real chats", "choose or get a model": "get a model for real chats"}
# Keys, by the action's id where the user may change them, and what they do.
HINTS = (
    ("Enter", "sends"),
    ("Ctrl+J", "starts a new line"),
    ("{messages}", "selects a message"),
    ("{choose_model}", "chooses a model"),
    ("{help}", "shows every key"),
)
# As `HINTS`. Each text has at most 27 characters, so that the smallest window shows it on one row.
TOUR = (
    ("{help}", "all keys; {ask_guide} asks the guide"),
    ("{choose_model}", "choose or get a model"),
    ("{chats}", "earlier chats, and search"),
    ("{explain}", "how fast it was, and why"),
    ("{settings}", "sampling, memory, idle time"),
)
GAP = 2  # cells between keys and what they do


class Welcome:
    def __init__(self, height: int, *, tour: bool = False, keymap: Keymap | None = None, guide: bool = False) -> None:
        self._height, self._guide = height, guide
        hints = TOUR if tour else HINTS
        self._hints = tuple((key, ELSE.get(text, text)) for key, text in hints) if guide else hints
        self._keymap = keymap or Keymap()

    def rows(self, width: int) -> list[PageRow]:
        hints = with_keys(self._hints, self._keymap, either=True)
        if max(len(key) for key, _ in hints) + GAP + max(len(text) for _, text in hints) > width:
            hints = with_keys(self._hints, self._keymap)
        lines = _fitting(_parts(hints, width, guide=self._guide), self._height)
        indent = max(0, (width - max(line.cell_length for line in lines)) // 2)
        above = max(0, (self._height - len(lines)) // 2)
        frame = Frame(Content(" " * indent), PLAIN.style)
        return [BLANK] * above + [PageRow(Row(line), frame) for line in lines]


def with_keys(hints: Hints, keymap: Keymap, *, either: bool = False) -> Hints:
    keys = {action.id: keymap.key(action.id) for action in keymap.actions}
    first = {action.id: action.either_key for action in keymap.actions} if either else keys
    return tuple((key.format(**first), text.format(**keys)) for key, text in hints)


def _parts(hints: Hints, width: int, *, guide: bool) -> list[list[Content]]:
    said = (PROMISE, ALONE) if guide else (PROMISE,)
    texts = [[row.content for row in wrapped(Content.styled(text, FAINT), width)] for text in said]
    column = max(len(key) for key, _ in hints)
    keys = []
    for key, does in hints:
        for index, row in enumerate(wrapped(Content.styled(does, FAINT), max(1, width - column - GAP))):
            lead = "" if index else key
            keys.append(Content.styled(lead.rjust(column), "$text-primary") + " " * GAP + row.content)
    return [Content.styled(WORDMARK, "$primary").split("\n"), *texts, keys]


def _fitting(parts: list[list[Content]], height: int) -> list[Content]:
    airy = [line for part in parts for line in [Content(""), *part]][1:]
    if len(airy) <= height or len(parts) == 1:
        return airy
    tight = [line for part in parts for line in part]
    return tight if len(parts) == 2 and len(tight) <= height else _fitting(parts[1:], height)


class Primer:
    def rows(self, width: int) -> list[PageRow]:
        lines: list[Content] = []
        beside = width >= PRIMER_WIDE
        for name, meaning in PRIMER:
            lead = Content.styled(name.ljust(PRIMER_NAME) if beside else f"{name}: ", "bold")
            indent = PRIMER_NAME if beside else 0
            text = Content(meaning) if beside else lead + meaning
            for index, row in enumerate(wrapped(text, max(1, width - indent - 2))):
                before = (lead if index == 0 else Content(" " * indent)) if beside else Content("")
                lines.append(before + row.content)
        return [PageRow(Row(line), PRIMED) for line in lines]


PRIMER_NAME, PRIMER_WIDE = 20, 60  # cells
PRIMED = Frame(Content.styled(" ▎", "$secondary"), LABEL)
SHARE: dict[str, float] = {"cpu": 0.03}  # of one core, where the model computes on the same cores
SHARE_BESIDE_GPU = 0.3  # the share where it does not

SLOWEST_S = 1 / 3  # the longest time between two drawings


def share_on(device: str) -> float:
    return SHARE.get(device, SHARE_BESIDE_GPU)


class FramePacer:
    def __init__(
        self, share: float, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.process_time
    ) -> None:
        self._share = share
        self._clock, self._cpu = clock, cpu
        self._drawn_s = float("-inf")
        self._worked_s = 0.0

    def is_due(self, *, now: bool = False) -> bool:
        clock_s, worked_s = self._clock(), self._cpu()
        if not now and clock_s - self._drawn_s < min(SLOWEST_S, (worked_s - self._worked_s) / self._share):
            return False
        self._drawn_s, self._worked_s = clock_s, worked_s
        return True


SHOWS = ("older", "newer")  # actions on a message that only show another one: their keys need no Enter
WIDEST = 96  # cells: longer lines are hard to read
NARROWEST = 8
SIDE = 2


class Transcript(PageView, can_focus=False):
    """The turns, oldest first. Tab enters the messages: Up and Down select, Enter unfolds thinking.

    A letter only preselects an action that Enter runs; two letters are text for the prompt.
    """

    FOCUS_ON_CLICK = False
    BINDINGS = bindings("message")

    class FiguresClicked(Message):
        def __init__(self, key: int) -> None:
            super().__init__()
            self.key = key

    selected: var[int | None] = var(None)  # the key of the selected message
    chosen: var[Action | None] = var(None)  # what Enter does with the selected message; None: it unfolds its thinking

    def __init__(
        self,
        *,
        tour: bool = False,
        keymap: Keymap | None = None,
        act: Callable[[str], None] = lambda _: None,
        write: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self._act, self._write = act, write
        self._tour, self._keymap, self._guide = tour, keymap or Keymap(), False
        self._letter = ""  # that was typed to choose, and is the first of a text if another one follows
        self._reply: ReplyMessage | None = None
        self._grown = False
        self._pace = FramePacer(SHARE_BESIDE_GPU)
        self._selected: Spoken | None = None

    # What the chat does ---------------------------------------------------------------------------------------------------

    @property
    def growing(self) -> bool:
        return self._reply is not None

    @property
    def messages(self) -> list[PageItem]:
        return self._page.messages

    @property
    def replies(self) -> list[ReplyMessage]:
        return [message for message in self.messages if isinstance(message, ReplyMessage)]

    def begin(self, turn: Turn, model: str, *, share: float, again: bool, tinted: bool = False) -> None:
        self._unprime()
        if again:
            if isinstance(self.messages[-1], ReplyMessage):  # else it is the first to this prompt
                self._page.pop()
        else:
            if self._welcomes:
                self._page.clear()
            for message in messages_of(
                [replace(self._unshown(turn), system=(), reply=None)]
            ):  # what comes before the prompt is shown already
                self._page.append(message)
        self._reply = ReplyMessage(model, turn.reply_key, turn.reply_place, tinted=tinted)
        if turn.reply is not None:
            self._reply.begin(turn.reply)
        self._page.append(self._reply)
        self._pace = FramePacer(share)
        self.can_focus = True
        self._keep_selection()
        self._clear_text_selection()
        if self._selected in (None, self._reply):
            self.follow()
        else:  # a queued prompt is sent while the reader is elsewhere: there they stay
            self._show()

    def _unshown(self, turn: Turn) -> Turn:
        shown = {message.key for message in self.messages if isinstance(message, ToolMessage)}
        pairs = [pair for pair in zip(turn.results, turn.result_keys, strict=True) if pair[1] not in shown]
        return replace(turn, results=tuple(each for each, _ in pairs), result_keys=tuple(key for _, key in pairs))

    def answer(self, result: ToolResult, key: int) -> None:
        self._page.append(ToolMessage(result, key))
        self._show()

    def show_turns(self, turns: Sequence[Turn], pruned: Collection[tuple[int, str]] = ()) -> None:
        self._page.clear()
        self._reply = self._selected = self.selected = None
        messages = list(messages_of(turns))
        for _ in mark_left_out(messages, turns, pruned):
            pass  # it is laid out below
        for message in messages:
            self._page.append_later(message, message.guess(self._page.width))
        self.can_focus = bool(turns)
        self._keep_selection()
        self._clear_text_selection()
        if not turns:
            self._welcome()
        self.follow()

    def prune(self, turns: Sequence[Turn], pruned: Collection[tuple[int, str]]) -> None:
        for message in mark_left_out(self.messages, turns, pruned):
            self._page.update(message)
        self._show()

    def greet(self, *, guide: bool) -> None:
        changed, self._guide = guide is not self._guide, guide
        if changed and self.messages and self._welcomes:
            self._page.clear()
            self._welcome()
            self._show()

    def add(self, text: str, kind: TextKind, guessed: Sequence[tuple[int, int]] = ()) -> None:
        if self._reply is not None:
            self._reply.add(text, kind, guessed)
            self._grown = True
            self.look()

    def look(self, *, now: bool = False) -> None:
        if self._reply is not None and self._grown and self._pace.is_due(now=now):
            self._grown = False
            self._update(self._reply)

    def end(self, reply: Reply) -> None:
        ended, self._reply, self._grown = self._reply, None, False
        if ended is not None:
            ended.end(reply)
            self._update(ended)

    def prime(self) -> None:
        self._page.append(Primer())
        self._show()

    def _unprime(self) -> None:
        if self.messages and isinstance(self.messages[-1], Primer):
            self._clear_text_selection()
            self._page.pop()

    # Size and place -------------------------------------------------------------------------------------------------------

    def on_resize(self) -> None:
        width = max(NARROWEST, min(WIDEST, self.size.width - 2 * SIDE))
        if self._welcomes:
            self._page.clear()
            self._page.fit(width)
            self._welcome()
        elif width != self._page.width:
            index, within = self._page.locate(self.scroll_offset.y)
            before = self._page.rows_of(index)
            self._page.fit(width)
            self._clear_text_selection()
            if not self._following:
                self._set_height()
                self._scroll(self._page.start(index) + within * self._page.rows_of(index) // max(1, before))
        self._show()
        self._move_bar(exact=True)

    @property
    def _welcomes(self) -> bool:
        return all(isinstance(message, Welcome) for message in self.messages)

    def _welcome(self) -> None:
        height = self.size.height - 1  # a message ends with a blank row
        self._page.append(Welcome(height, tour=self._tour, keymap=self._keymap, guide=self._guide))

    def _update(self, message: PageItem) -> None:
        self._page.update(message)
        self._show()

    # Selecting ------------------------------------------------------------------------------------------------------------

    def select_message(self, key: int) -> None:
        shown = [message for message in self.messages if isinstance(message, Spoken | SystemMessage)]
        at = next((index for index, message in enumerate(shown) if message.key == key), None)
        if at is None:
            self._select(None)
            return
        nearest = (*shown[at::-1], *shown[at + 1 :])
        self._select(next((message for message in nearest if isinstance(message, Spoken)), None))
        self._bring_into_view(shown[at])

    @property
    def _selectable(self) -> list[Spoken]:
        return [message for message in self.messages if isinstance(message, Spoken)]

    @dataclass
    class LinkClicked(Message):
        address: str
        opens: bool

    @dataclass
    class CodeClicked(Message):
        text: str

    def on_click(self, event: events.Click) -> None:
        y = self.scroll_offset.y + event.y
        if self.text_selection is not None or not 0 <= y < self._page.height:
            return
        row, address = self._page.row(y), event.style.link
        if address:
            self.post_message(self.LinkClicked(address, event.ctrl or event.meta))
            return
        if row is not None and row.code is not None:
            self.post_message(self.CodeClicked(row.code.code))
            return
        index, within = self._page.locate(y)
        message = self.messages[index]
        if isinstance(message, ToolMessage):
            event.stop()
            self._toggle(message)
            return
        if not isinstance(message, ReplyMessage):
            return
        if message.is_thinking(within):
            self._toggle(message)
        elif message.is_figures(within, self._page.width):
            self.post_message(self.FiguresClicked(message.key))

    def rekey(self, keymap: Keymap) -> None:
        self._keymap = keymap

    def on_focus(self) -> None:
        if self._selected is None:
            top, bottom = self.scroll_offset.y, self.scroll_offset.y + self.size.height
            starts = {self._page.start(self.messages.index(each)): each for each in self._selectable}
            seen = [each for y, each in starts.items() if y < bottom and y + self._rows_of(each) > top]
            among = seen or self._selectable
            self._select(among[-1] if among else None, follow=False)

    def _rows_of(self, message: Spoken) -> int:
        return self._page.rows_of(self.messages.index(message))

    def _keep_selection(self) -> None:
        """Select the last message if the selected one is gone: keys must not act on an unmarked one."""
        if self._selected is not None and self._selected not in self.messages:
            self._select(None)
        if self.has_focus:
            self._select_last()

    def _select_last(self) -> None:
        if self._selected is None and self._selectable:
            self._select(self._selectable[-1])

    def on_blur(self) -> None:
        self._choose(None)
        self._select(None)

    def on_key(self, event: events.Key) -> None:
        letter = event.character if event.is_printable and event.character and not event.character.isspace() else ""
        if letter:
            self._typed(letter, event.key)
        elif self._selected is None or not self._pressed(event.key):
            return
        event.stop()
        event.prevent_default()

    def _typed(self, letter: str, key: str) -> None:
        actions = {one_name(each): action for action in self._for_message for each in action.keys}
        action = actions.get(key) if self._selected is not None and not self._letter else None
        if action is None:
            text, self._letter = self._letter + letter, ""
            self._write(text)
        elif action.id in SHOWS:
            self._act(action.id)
        else:
            self._letter, self.chosen = letter, action

    def _pressed(self, key: str) -> bool:
        match key:
            case "enter" if self.chosen is not None:
                action = self.chosen
                self._choose(None)
                self._act(action.id)
            case "enter" | "space" if isinstance(self._selected, ReplyMessage | ToolMessage):
                self._toggle(self._selected)
            case "left" | "right":
                actions = [action for action in self._for_message if action.keys and action.id not in SHOWS]
                at = actions.index(self.chosen) if self.chosen in actions else -1 if key == "right" else 0
                self._choose(actions[(at + (1 if key == "right" else -1)) % len(actions)])
            case "backspace" | "delete" if self.chosen is not None:
                self._choose(None)
            case "up" | "down" if self._selected is not None:
                self._choose(None)
                messages = self._selectable
                index = messages.index(self._selected) + (1 if key == "down" else -1)
                self._select(messages[max(0, min(len(messages) - 1, index))])
            case _:
                return False
        return True

    @property
    def _for_message(self) -> list[Action]:
        return [action for action in self._keymap.actions if action.scope == "message"]

    def _choose(self, action: Action | None) -> None:
        self._letter, self.chosen = "", action

    def _toggle(self, message: ReplyMessage | ToolMessage) -> None:
        if isinstance(message, ToolMessage):
            message.toggle()
        elif message.thinking:
            message.thinking.toggle()
        else:
            return
        self._clear_text_selection()
        self._following = False  # what was clicked stays where it is
        self._update(message)
        self._following = self.scroll_offset.y >= self.max_scroll_y

    def _select(self, message: Spoken | None, *, follow: bool = True) -> None:
        before, self._selected = self._selected, message
        self.selected = None if message is None else message.key
        for each in (before, message):
            if each is not None and each in self.messages:
                each.selected = each is message
                self._update(each)
        if message is not None and follow:
            self._bring_into_view(message)

    def _bring_into_view(self, message: PageItem) -> None:
        y = self._page.start(self.messages.index(message))
        if not self.scroll_offset.y <= y < self.scroll_offset.y + self.size.height - 1:
            self._scroll(y)
