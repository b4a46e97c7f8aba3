"""The conversation on the screen: it grows, and its messages can be pointed at.

How often what grows is drawn, so that drawing takes no more of the machine than the model can spare.

What an empty chat shows: the first keys to know; at the very first start a tour of five lines.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from textual import events
from textual.content import Content
from textual.reactive import var

from tokamac.app.chat.actions import Keymap, bindings
from tokamac.app.chat.conversation import Reply, Turn
from tokamac.app.tui.markdown.page import BLANK, PLAIN, Frame, PageItem, PageRow
from tokamac.app.tui.markdown.rows import Row, wrapped
from tokamac.app.tui.markdown.turns import ReplyMessage, Spoken, SystemMessage, told
from tokamac.app.tui.theme import FAINT
from tokamac.app.tui.widgets.page_view import PageView
from tokamac.engine.events import TextKind

Hints = tuple[tuple[str, str], ...]
WORDMARK = "▀█▀ █▀█ █▄▀ █▀█ █▀▄▀█ █▀█ █▀▀\n █  █▄█ █ █ █▀█ █ ▀ █ █▀█ █▄▄"
PROMISE = "A model on this machine. Nothing leaves it."
ALONE = "guide answers about this app alone."
"""Where the embedded model is the one that is asked."""
ELSE = {"chooses a model": "a model for more than help", "choose or get a model": "a model for more than help"}
"""What is then said of one of the keys, which the smallest window shows too."""
HINTS = (
    ("Enter", "sends"),
    ("Ctrl+J", "starts a new line"),
    ("{messages}", "points at a message"),
    ("{choose_model}", "chooses a model"),
    ("{help}", "shows every key"),
)
"""Keys, those that the user may change by the action's id, and what they do."""
TOUR = (
    ("{help}", "all keys; {ask_guide} asks the guide"),
    ("{choose_model}", "choose or get a model"),
    ("{chats}", "earlier chats, and search"),
    ("{explain}", "how fast it was, and why"),
    ("{settings}", "sampling, memory, idle time"),
)
"""As ``HINTS``. What is said of each has at most 27 characters, so that the smallest window shows it on one row."""
GAP = 2  # cells between keys and what they do


class Welcome:
    """The name, and the first keys to know, in the middle of ``height`` rows.

    tour: it is the very first start. guide: the model is the embedded one, which declines what is not about the app.
    """

    def __init__(self, height: int, *, tour: bool = False, keymap: Keymap | None = None, guide: bool = False) -> None:
        self._height, self._guide = height, guide
        hints = TOUR if tour else HINTS
        known = tuple((key, ELSE.get(text, text)) for key, text in hints) if guide else hints
        self._hints = with_keys(known, keymap or Keymap())

    def rows(self, width: int) -> list[PageRow]:
        """Return the rows at ``width`` cells. Where they have no room for all of it the keys stay, and the name goes first."""
        lines = _fitting(_parts(self._hints, width, guide=self._guide), self._height)
        indent = max(0, (width - max(line.cell_length for line in lines)) // 2)
        above = max(0, (self._height - len(lines)) // 2)
        frame = Frame(Content(" " * indent), PLAIN.style)
        return [BLANK] * above + [PageRow(Row(line), frame) for line in lines]


def with_keys(hints: Hints, keymap: Keymap) -> Hints:
    """Return ``hints`` with the keys that hold."""
    keys = {action.id: action.key_name for action in keymap.actions}
    return tuple((key.format(**keys), text.format(**keys)) for key, text in hints)


def _parts(hints: Hints, width: int, *, guide: bool) -> list[list[Content]]:
    """Return the name, the promise, what the guide is for where it is the model, and the keys, as lines of ``width`` cells."""
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
    """Return the last of ``parts`` that have room in ``height`` rows, a blank row between two, or none between the last two."""
    airy = [line for part in parts for line in [Content(""), *part]][1:]
    if len(airy) <= height or len(parts) == 1:
        return airy
    tight = [line for part in parts for line in part]
    return tight if len(parts) == 2 and len(tight) <= height else _fitting(parts[1:], height)


SHARE: dict[str, float] = {"cpu": 0.03}
"""Of one core, where the model computes on the same cores;"""
SHARE_BESIDE_GPU = 0.3
"""and where it does not."""

SLOWEST_S = 1 / 3
"""However dear drawing is, so often it happens."""


def share_on(device: str) -> float:
    """Return the share of a core that drawing may take while the model computes on ``device``."""
    return SHARE.get(device, SHARE_BESIDE_GPU)


class FramePacer:
    """Says when to draw again: later the more this process worked since it last did, painting and all included."""

    def __init__(
        self, share: float, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.process_time
    ) -> None:
        self._share = share
        self._clock, self._cpu = clock, cpu
        self._drawn_s = float("-inf")
        self._worked_s = 0.0

    def is_due(self, *, now: bool = False) -> bool:
        """Whether to draw; if so, it counts from now. ``now``: draw in any case."""
        clock_s, worked_s = self._clock(), self._cpu()
        if not now and clock_s - self._drawn_s < min(SLOWEST_S, (worked_s - self._worked_s) / self._share):
            return False
        self._drawn_s, self._worked_s = clock_s, worked_s
        return True


WIDEST = 96  # cells: longer lines are hard to read
NARROWEST = 8
SIDE = 2


class Transcript(PageView, can_focus=False):
    """The turns, oldest first. Tab goes to the messages: Up and Down choose one, Enter unfolds its thinking."""

    FOCUS_ON_CLICK = False
    BINDINGS = bindings("message")

    chosen: var[int | None] = var(None)
    """The key of the message that is pointed at by the keyboard."""

    def __init__(self, *, tour: bool = False, keymap: Keymap | None = None) -> None:
        super().__init__()
        self._tour, self._keymap, self._guide = tour, keymap, False
        self._reply: ReplyMessage | None = None
        self._grown = False
        self._pace = FramePacer(SHARE_BESIDE_GPU)
        self._chosen: Spoken | None = None

    # What the chat says ---------------------------------------------------------------------------------------------------

    @property
    def growing(self) -> bool:
        """Whether a reply is being written."""
        return self._reply is not None

    @property
    def messages(self) -> list[PageItem]:
        """What is shown, oldest first."""
        return self._page.messages

    @property
    def replies(self) -> list[ReplyMessage]:
        """The model's part of it."""
        return [message for message in self.messages if isinstance(message, ReplyMessage)]

    def begin(self, turn: Turn, model: str, *, share: float, again: bool) -> None:
        """Show a prompt and room for its reply, drawn with ``share`` of a core; ``again``: in place of the last reply."""
        if again:
            if isinstance(self.messages[-1], ReplyMessage):  # else it is the first to this prompt
                self._page.pop()
        else:
            if self._welcomes:
                self._page.clear()
            for message in told([replace(turn, system=(), reply=None)]):  # what stands before the prompt is shown
                self._page.append(message)
        self._reply = ReplyMessage(model, turn.reply_key, turn.reply_place)
        if turn.reply is not None:
            self._reply.begin(turn.reply)
        self._page.append(self._reply)
        self._pace = FramePacer(share)
        self.can_focus = True
        self._keep_pointing()
        self._let_go_of_selection()
        if self._chosen in (None, self._reply):
            self.follow()
        else:  # what waited is sent while the reader is elsewhere: there they stay
            self._show()

    def show_turns(self, turns: Sequence[Turn]) -> None:
        """Show another conversation, or another path of this one, at its end."""
        self._page.clear()
        self._reply = self._chosen = self.chosen = None
        for message in told(turns):
            self._page.append_later(message, message.guess(self._page.width))
        self.can_focus = bool(turns)
        self._keep_pointing()
        self._let_go_of_selection()
        if not turns:
            self._welcome()
        self.follow()

    def greet(self, *, guide: bool) -> None:
        """Say in the welcome, if it is what is shown, what the model is good for. guide: it is the embedded one."""
        changed, self._guide = guide is not self._guide, guide
        if changed and self.messages and self._welcomes:
            self._page.clear()
            self._welcome()
            self._show()

    def add(self, text: str, kind: TextKind) -> None:
        """Append to the running reply."""
        if self._reply is not None:
            self._reply.add(text, kind)
            self._grown = True
            self.look()

    def look(self, *, now: bool = False) -> None:
        """Draw what was added, if it is time; ``now``: it is, since something else is drawn as well."""
        if self._reply is not None and self._grown and self._pace.is_due(now=now):
            self._grown = False
            self._update(self._reply)

    def end(self, reply: Reply) -> None:
        """Close the running reply."""
        ended, self._reply, self._grown = self._reply, None, False
        if ended is not None:
            ended.end(reply)
            self._update(ended)

    # Size and place -------------------------------------------------------------------------------------------------------

    def on_resize(self) -> None:
        """Lay out for the room there is now; the reader keeps their place."""
        width = max(NARROWEST, min(WIDEST, self.size.width - 2 * SIDE))
        if self._welcomes:
            self._page.clear()
            self._page.fit(width)
            self._welcome()
        elif width != self._page.width:
            index, within = self._page.at(self.scroll_offset.y)
            before = self._page.rows_of(index)
            self._page.fit(width)
            self._let_go_of_selection()
            if not self._following:
                self._set_height()
                self._scroll(self._page.start(index) + within * self._page.rows_of(index) // max(1, before))
        self._show()
        self._move_bar(exact=True)

    @property
    def _welcomes(self) -> bool:
        """Whether there is no conversation to show."""
        return all(isinstance(message, Welcome) for message in self.messages)

    def _welcome(self) -> None:
        height = self.size.height - 1  # a message ends with a blank row
        self._page.append(Welcome(height, tour=self._tour, keymap=self._keymap, guide=self._guide))

    def _update(self, message: PageItem) -> None:
        self._page.update(message)
        self._show()

    # Choosing -------------------------------------------------------------------------------------------------------------

    def choose(self, key: int) -> None:
        """Point at the message ``key``, if it is shown, and bring it into view.

        A system message can't be pointed at: the one before it is then, or else the first one.
        """
        shown = [message for message in self.messages if isinstance(message, Spoken | SystemMessage)]
        at = next((index for index, message in enumerate(shown) if message.key == key), None)
        if at is None:
            self._choose(None)
            return
        nearest = (*shown[at::-1], *shown[at + 1 :])
        self._choose(next((message for message in nearest if isinstance(message, Spoken)), None))
        self._bring_into_view(shown[at])

    @property
    def _choosable(self) -> list[Spoken]:
        return [message for message in self.messages if isinstance(message, Spoken)]

    def on_click(self, event: events.Click) -> None:
        """Unfold or fold the thinking that was clicked."""
        y = self.scroll_offset.y + event.y
        if self.text_selection is not None or not 0 <= y < self._page.height:
            return
        index, within = self._page.at(y)
        message = self.messages[index]
        if isinstance(message, ReplyMessage) and message.is_thinking(within):
            self._toggle(message)

    def on_focus(self) -> None:
        """Choose the last message, unless one is chosen."""
        self._point_at_last()

    def _keep_pointing(self) -> None:
        """Keys of messages never go to a message that nobody sees pointed at: where that one is gone, the last is next."""
        if self._chosen is not None and self._chosen not in self.messages:
            self._choose(None)
        if self.has_focus:
            self._point_at_last()

    def _point_at_last(self) -> None:
        if self._chosen is None and self._choosable:
            self._choose(self._choosable[-1])

    def on_blur(self) -> None:
        """Choose none."""
        self._choose(None)

    def on_key(self, event: events.Key) -> None:
        """Choose another one, or unfold or fold its thinking."""
        if self._chosen is None:
            return
        match event.key:
            case "enter" | "space" if isinstance(self._chosen, ReplyMessage):
                self._toggle(self._chosen)
            case "up" | "down":
                messages = self._choosable
                index = messages.index(self._chosen) + (1 if event.key == "down" else -1)
                self._choose(messages[max(0, min(len(messages) - 1, index))])
            case _:
                return
        event.stop()
        event.prevent_default()

    def _toggle(self, message: ReplyMessage) -> None:
        if not message.thinking:
            return
        message.thinking.toggle()
        self._let_go_of_selection()
        self._following = False  # what was clicked stays where it is
        self._update(message)
        self._following = self.scroll_offset.y >= self.max_scroll_y

    def _choose(self, message: Spoken | None) -> None:
        before, self._chosen = self._chosen, message
        self.chosen = None if message is None else message.key
        for each in (before, message):
            if each is not None and each in self.messages:
                each.chosen = each is message
                self._update(each)
        if message is not None:
            self._bring_into_view(message)

    def _bring_into_view(self, message: PageItem) -> None:
        y = self._page.start(self.messages.index(message))
        if not self.scroll_offset.y <= y < self.scroll_offset.y + self.size.height - 1:
            self._scroll(y)
