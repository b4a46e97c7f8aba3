"""A turn's messages as rows: prompt, and reply with thinking, text and figures."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat

from textual.content import Content

from tokamac.engine.events import TextKind

from ...chat.conversation import EDITED, ENDINGS, REMEDIES, Reply, Turn
from ...chat.preferences import budget_spent
from ...models.local import shown_name
from ...reports.verdict import figures_text, remark
from ...store.values import Attachment, ToolResult
from ...text.sanitise import Sanitiser, sanitise, sanitise_line
from ...text.units import seconds
from ...tools.calls import call_line, call_lines
from ..theme import FAINT, LABEL
from .page import BLANK, PLAIN, Frame, PageRow, Prose, guess, keep_same
from .rows import Row, wrapped

BAR = "█"
USER = Frame(Content.styled(BAR, "$primary") + Content.styled(" ", "on $surface"), "on $surface", right=0)
USER_SELECTED = Frame(
    Content.styled("▸", "bold reverse $accent") + Content.styled(" ", "on $surface"), "on $surface", right=0
)
THOUGHT = f"italic {FAINT}"
FOLDED = Frame(Content(" "), THOUGHT)
UNFOLDED = Frame(Content(" ") + Content.styled(BAR, "$foreground 15%") + " ", THOUGHT)
SELECTED = Frame(Content(" ") + Content.styled(BAR, "$primary") + " ", THOUGHT)
SELECTED_NAME = Frame(Content.styled("▸", "$accent"))
ASIDE = Frame(Content(" "), FAINT)
FIGURES = Frame(Content(" "), LABEL)
SYSTEM = "System"
LEFT_OUT = "left out of the context"  # beside what is kept in the chat, but not sent
SIDES = 2  # free cells at both sides of a message's text, together


Place = tuple[int, int]  # the number of a version, from 1, and how many there are


class UserMessage:
    def __init__(
        self, text: str, key: int = 0, place: Place = (1, 1), attachments: tuple[Attachment, ...] = ()
    ) -> None:
        self.text = sanitise(text)
        self._attached = [sanitise_line(each.name) for each in attachments]
        self.left_out = False
        self.files_left_out: frozenset[str] = frozenset()
        self.key = key
        self.selected = False
        self._place = place

    def rows(self, width: int) -> list[PageRow]:
        frame = USER_SELECTED if self.selected else USER
        names = Content("\n").join(map(self._chip, self._attached))
        note = Content.styled(LEFT_OUT if self.left_out else "", FAINT)
        parts = [part for part in (note, names, Content(self.text)) if part.plain]
        text = [PageRow(row, frame) for part in parts for row in wrapped(part, width - SIDES - len(BAR))]
        return [*([PageRow(Row(_placed(self._place)), frame)] if self._place[1] > 1 else []), *text]

    def guess(self, width: int) -> int:
        return guess(self.text, width) + len(self._attached) + self.left_out

    def _chip(self, name: str) -> Content:
        note = f"  {LEFT_OUT}" if name in self.files_left_out and not self.left_out else ""
        return Content.styled(f"+ {name}", "$text-primary") + Content.styled(note, FAINT)


class SystemMessage:
    def __init__(self, text: str, key: int = 0) -> None:
        self.key = key
        self._text = sanitise(text)

    def rows(self, width: int) -> list[PageRow]:
        parts = (Content.styled(SYSTEM, "bold"), Content(self._text))
        return [PageRow(row, ASIDE) for part in parts if part.plain for row in wrapped(part, width - SIDES)]

    def guess(self, width: int) -> int:
        return 1 + guess(self._text, width)


class Thinking:
    def __init__(self) -> None:
        self.folded = False
        self.selected = False  # by the keyboard
        self._text = ""
        self._over = False
        self._seconds: float | None = None
        self._ended_at: int | None = None
        self._laid: list[PageRow] = []
        self._whole = _Whole()

    def __bool__(self) -> bool:
        return bool(self._text.strip())

    @property
    def height(self) -> int:
        return len(self._laid)

    def add(self, text: str) -> None:
        self._text += text

    def fold(self, took_s: float | None, text: str | None = None, ended_at: int | None = None) -> None:
        self._text = self._text if text is None else text
        self._seconds, self._ended_at = took_s, ended_at
        self._over = self.folded = True

    def toggle(self) -> None:
        if self._over:
            self.folded = not self.folded

    def rows(self, width: int) -> list[PageRow]:
        took = "" if self._seconds is None else f" for {seconds(self._seconds)}"
        took += "" if self._ended_at is None else f", {budget_spent(self._ended_at)}"
        if self.folded:
            laid = [PageRow(Row(Content(f"▸ thought{took}")), SELECTED if self.selected else FOLDED)]
        else:
            frame = SELECTED if self.selected else UNFOLDED
            head = Content.styled(f"▾ thought{took}" if self._over else "thinking …", "bold")
            laid = [PageRow(Row(head), frame), *self._text_rows(frame, width - len(BAR) - SIDES)]
        self._laid = keep_same(self._laid, [*laid, BLANK])
        return self._laid

    def _text_rows(self, frame: Frame, width: int) -> list[PageRow]:
        text = self._text.strip()
        end = text.rfind("\n") + 1
        if (self._whole.frame, self._whole.width) != (frame, width) or not text.startswith(self._whole.text):
            self._whole = _Whole(frame, width)
        whole = self._whole
        if lines := text[len(whole.text) : end]:
            whole.rows += (PageRow(row, frame) for row in wrapped(Content(lines[:-1]), width))
            whole.text = text[:end]
        return [*whole.rows, *(PageRow(row, frame) for row in wrapped(Content(text[end:]), width))]


@dataclass(slots=True)
class _Whole:
    frame: Frame = FOLDED
    width: int = 0
    text: str = ""
    rows: list[PageRow] = field(default_factory=list)


class ReplyMessage:
    def __init__(
        self,
        model: str,
        key: int = 0,
        place: Place = (1, 1),
        clock: Callable[[], float] = time.monotonic,
        *,
        tinted: bool = False,
    ) -> None:
        self.thinking = Thinking()
        self.reply: Reply | None = None
        self.key = key
        self._model = shown_name(model)
        self._place = place
        self._selected = self._left_out = False
        self._name = self._named()
        self._prose = Prose(tinted=tinted)
        self._marked: list[PageRow] = []  # the rows while it is selected
        self._cleaners = {"answer": Sanitiser(), "thinking": Sanitiser()}
        self._clock = clock
        self._thinking_from: float | None = None

    @property
    def selected(self) -> bool:
        return self._selected

    @selected.setter
    def selected(self, selected: bool) -> None:
        self._selected = self.thinking.selected = selected
        self._name = self._named()

    @property
    def left_out(self) -> bool:
        return self._left_out

    @left_out.setter
    def left_out(self, left_out: bool) -> None:
        self._left_out = left_out
        self._name = self._named()

    def add(self, text: str, kind: TextKind, guessed: Sequence[tuple[int, int]] = ()) -> None:
        """Append ``text``, sanitised. guessed: draft ranges [from, to) to tint in an answer."""
        if guessed and kind == "answer":
            at = 0
            for start, end in guessed:
                self._add_answer(text[at:start])
                self._add_answer(text[start:end], guessed=True)
                at = end
            text = text[at:]
        if kind == "thinking":
            if self._thinking_from is None:
                self._thinking_from = self._clock()
            self.thinking.add(self._cleaners[kind].feed(text))
            return
        self._add_answer(text)
        if self._thinking_from is not None:
            self.thinking.fold(self._clock() - self._thinking_from)
            self._thinking_from = None

    def _add_answer(self, text: str, *, guessed: bool = False) -> None:
        self._prose.add(self._cleaners["answer"].feed(text), guessed=guessed)

    def begin(self, said: Reply) -> None:
        thought = self._cleaners["thinking"].feed(said.thinking)
        self._prose.add(self._cleaners["answer"].feed(said.text))
        if thought:
            self.thinking.add(thought)
            if said.text:
                self.thinking.fold(said.thinking_s)
            else:
                self._thinking_from = self._clock() - (said.thinking_s or 0.0)

    def end(self, reply: Reply) -> None:
        self.reply = reply
        if reply.thinking:
            self.thinking.fold(reply.thinking_s, sanitise(reply.thinking), reply.thinking_ended_at)
        self._prose.finish(sanitise(reply.text))

    def rows(self, width: int) -> list[PageRow]:
        self._prose.look()
        room = width - SIDES
        thinking = self.thinking.rows(room) if self.thinking else []
        rows = [*thinking, *self._prose.rows(room), *self._figures(room)]
        self._marked = keep_same(self._marked, list(map(_marked, rows))) if self._selected else []
        return [self._name, *(self._marked or rows)]

    def guess(self, width: int) -> int:
        if self.reply is None:
            return 0
        return 3 + guess(self.reply.text, width) + len(self.reply.reason) // max(1, width)

    def _named(self) -> PageRow:
        name = Content.styled(self._model, "bold reverse $text-accent" if self._selected else "bold $text-primary")
        place = Content("  ") + _placed(self._place) if self._place[1] > 1 else Content("")
        note = Content.styled(f"  {LEFT_OUT}" if self._left_out else "", FAINT)
        return PageRow(Row(name + place + note), SELECTED_NAME if self._selected else PLAIN)

    def is_thinking(self, row: int) -> bool:
        return bool(self.thinking) and 1 <= row < self.thinking.height

    def is_figures(self, row: int, width: int) -> bool:
        rows = self.rows(width)
        return (
            self.reply is not None and self.reply.metrics is not None and row < len(rows) and rows[row].frame is FIGURES
        )

    def _figures(self, width: int) -> list[PageRow]:
        if self.reply is None:
            return []
        text = Content(" · ").join(part for part in _ended(self.reply) if part.plain)
        return [PageRow(row, FIGURES) for row in wrapped(text, width)] if text.plain else []


def _ended(reply: Reply) -> Iterator[Content]:
    yield Content(EDITED if reply.edited else "")
    yield Content(sanitise_line(reply.compared))
    yield Content.styled(ENDINGS[reply.ending], "$text-warning")
    yield Content.styled(sanitise_line(reply.reason), "$foreground")
    yield Content(REMEDIES.get(reply.ending, "") if reply.text or reply.thinking else "")
    if reply.metrics is not None:
        yield Content(figures_text(reply.metrics))
        yield Content(remark(reply.metrics, reply.diagnosis))


def _marked(row: PageRow) -> PageRow:
    lead = row.frame.lead
    if not lead.plain.startswith(" "):
        return row
    return PageRow(row.row, replace(row.frame, lead=Content.styled("▎", "$accent") + lead[1:]))


class ToolMessage:
    def __init__(self, result: ToolResult, key: int = 0) -> None:
        self.key = key
        self.selected = False
        self.folded = True
        self._result = result

    def toggle(self) -> None:
        self.folded = not self.folded

    def rows(self, width: int) -> list[PageRow]:
        frame = SELECTED if self.selected else FOLDED if self.folded else UNFOLDED
        head = Content(f"{'▸' if self.folded else '▾'} {call_line(self._result.call)}")
        head += Content.styled(f" · {self._came()}", "" if self._result.outcome == "done" else "$text-warning")
        room = width - SIDES - len(BAR)
        if self.folded:
            return [PageRow(Row(head.truncate(room, ellipsis=True)), frame)]
        text = Content("\n".join([*call_lines(self._result.call)[1:], "", sanitise(self._result.text)]))
        return [PageRow(row, frame) for part in (head, text) for row in wrapped(part, room)]

    def guess(self, width: int) -> int:
        return 1 if self.folded else 2 + guess(self._result.text, width)

    def _came(self) -> str:
        match self._result.outcome:
            case "done":
                lines = len(self._result.text.splitlines())
                return sanitise_line(self._result.text) if lines < 2 else f"{lines} lines"
            case "failed":
                return sanitise_line(self._result.text)
            case "refused":
                return "not run"


Spoken = UserMessage | ReplyMessage | ToolMessage  # messages that can be selected


def messages_of(turns: Iterable[Turn]) -> Iterator[Spoken | SystemMessage]:
    for turn in turns:
        yield from map(ToolMessage, turn.results, chain(turn.result_keys, repeat(0)))
        yield from map(SystemMessage, turn.system, chain(turn.system_keys, repeat(0)))
        if turn.key or turn.asked:  # else the reply has no prompt
            yield UserMessage(turn.prompt, turn.key, turn.place, turn.attachments)
        yield from map(SystemMessage, turn.between, chain(turn.between_keys, repeat(0)))
        if turn.reply is not None:
            message = ReplyMessage(turn.reply.model, turn.reply_key, turn.reply_place)
            message.end(turn.reply)
            yield message


def mark_left_out(
    messages: Iterable[object], turns: Iterable[Turn], pruned: Collection[tuple[int, str]]
) -> Iterator[UserMessage | ReplyMessage]:
    whole = {key for turn in turns if (turn.key, "") in pruned for key in (turn.key, turn.reply_key)}
    for message in messages:
        if isinstance(message, UserMessage | ReplyMessage):
            left_out = bool(message.key) and message.key in whole
            files = frozenset(name for key, name in pruned if key == message.key and name)
            changed = left_out is not message.left_out
            if isinstance(message, UserMessage) and files != message.files_left_out:
                message.files_left_out, changed = files, True
            if changed:
                message.left_out = left_out
                yield message


def _placed(place: Place) -> Content:
    return Content.styled(f"‹ {place[0]} of {place[1]} ›", FAINT)
