"""The prompt, its completions, notices, queue and attachments."""

# Completes files after @ and commands after a slash, best first. ``@atch`` searches all of the folder by name;
# ``@~/notes``, ``@../a``, ``@/etc/h`` the named folder.

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from textual import events
from textual.content import Content
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Input, OptionList, Static, TextArea
from textual.widgets.input import Selection
from textual.widgets.option_list import Option
from textual.worker import get_current_worker

from tokamac.engine.files import expanded, is_file

from ...chat import actions
from ...chat.actions import NEWLINE_KEYS, PartialCommand, by_slash, command_at, matching
from ...chat.attachments import LINES, Draft, dropped, is_long, pasted, shell_command, size_text
from ...chat.listing import excerpt
from ...chat.session import Session
from ...chat.steps import Notice
from ...store.values import PICTURE, Attachment
from ...text.sanitise import sanitise, sanitise_line
from ..markdown.rows import wrapped
from ..theme import FAINT


def boundary(text: str, at: int, *, after: bool) -> int:
    """Move ``at`` out of a grapheme cluster, to its end (``after``) or start."""
    if text.isascii():
        return at
    import regex

    inside = (each for each in regex.finditer(r"\X", text) if each.start() < at < each.end())
    return next(((each.end() if after else each.start()) for each in inside), at)


class TextBox(TextArea):
    def get_cursor_left_location(self) -> tuple[int, int]:
        row, column = super().get_cursor_left_location()
        return row, boundary(self.document.get_line(row), column, after=False)

    def get_cursor_right_location(self) -> tuple[int, int]:
        row, column = super().get_cursor_right_location()
        return row, boundary(self.document.get_line(row), column, after=True)


class TextInput(Input):
    def action_cursor_left(self, select: bool = False) -> None:
        super().action_cursor_left(select)
        self._leave_cluster(after=False)

    def action_cursor_right(self, select: bool = False) -> None:
        super().action_cursor_right(select)
        self._leave_cluster(after=True)

    def action_delete_left(self) -> None:
        if self.selection.is_empty:
            self.action_cursor_left(select=True)
        self.delete_selection()

    def action_delete_right(self) -> None:
        if self.selection.is_empty:
            self.action_cursor_right(select=True)
        self.delete_selection()

    def _leave_cluster(self, *, after: bool) -> None:
        start, end = self.selection
        at = boundary(self.value, end, after=after)
        self.selection = Selection(at if start == end else start, at)


MOST_OFFERED = 8
USAGE_WIDE = 24  # cells for a command and its argument
MOST_FILES = 20_000
# Limits, in files and seconds, of walking a folder: deeper files are reached by writing more of their path.
WALK_S = 0.5
FRESH_S = 10.0
_SKIPPED = frozenset({"__pycache__", "node_modules", "target", "venv"})
_TOKEN = re.compile(r"(?:^|(?<=[\s(\[{\"']))@(\S*)$")
_RANGE = re.compile(r"(.+?)(:[0-9]+-[0-9]+)")
_PLACED = re.compile(r"(~[^/]*|\.{1,2})?/|~|\.{1,2}$")


@dataclass(frozen=True, slots=True)
class PartialPath:
    start: int
    part: str


def path_at(line: str, column: int) -> PartialPath | None:
    token = _TOKEN.search(line[:column])
    return None if token is None else PartialPath(token.start(), token[1])


class Finder:
    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._walked_s = -FRESH_S
        self._below: Sequence[str] = ()

    def find(self, part: str, most: int = MOST_OFFERED) -> list[str]:
        if _PLACED.match(part) is None:
            return ranked(part, self._files(), most)
        before, slash, rest = part.rpartition("/")
        typed = before + slash if slash else f"{rest}/"
        names = _entries(self._folder, typed, hidden=rest.startswith("."))
        return [typed + name for name in ranked(rest if slash else "", names, most)]

    def _files(self) -> Sequence[str]:
        if self._clock() - self._walked_s >= FRESH_S:
            self._below, self._walked_s = tuple(files_below(self._folder)), self._clock()
        return self._below


def ranked(part: str, paths: Iterable[str], most: int = MOST_OFFERED) -> list[str]:
    wanted = part.lower()
    fits = [(rank, len(path), path) for path in paths if (rank := _rank(wanted, path.lower())) is not None]
    return [path for _, _, path in sorted(fits)[:most]]


def files_below(folder: Path) -> Iterator[str]:
    until_s = time.monotonic() + WALK_S
    waiting, seen = [""], 0
    while waiting:
        within = waiting.pop(0)
        for name in _entries(folder, within, hidden=False):
            if name.endswith("/"):
                if name[:-1] not in _SKIPPED and not (folder / within / name).is_symlink():
                    waiting.append(within + name)
                continue
            yield within + name
            seen += 1
        if seen >= MOST_FILES or time.monotonic() > until_s:
            return


def _entries(folder: Path, typed: str, *, hidden: bool) -> list[str]:
    try:
        with os.scandir(folder / expanded(typed)) as entries:
            found = [each.name + ("/" if each.is_dir() else "") for each in entries if hidden or each.name[0] != "."]
    except (OSError, ValueError):
        return []
    return sorted(name for name in found if name.isprintable())


def _rank(part: str, path: str) -> int | None:
    name = path.rstrip("/").rpartition("/")[2]
    tests = (name.startswith(part), part in name, part in path, _scattered(part, name), _scattered(part, path))
    return next((rank for rank, fits in enumerate(tests) if fits), None)


def _scattered(part: str, text: str) -> bool:
    rest = iter(text)
    return all(letter in rest for letter in part)


Pick = Callable[[str], None]


class Completions(OptionList, can_focus=False):
    def __init__(self, file: Pick, command: Pick) -> None:
        super().__init__(compact=True)
        self.display = False
        self._file = file
        self._command = command
        self._named: PartialPath | PartialCommand | None = None
        self._finder = Finder(Path())
        self.prompts: Callable[[], Iterable[tuple[str, str]]] = tuple  # prompts that are files, and a line on each

    @property
    def chosen(self) -> str:
        option = self.highlighted_option if self.display else None
        return "" if option is None else str(option.id)

    def complete(self, named: PartialPath | PartialCommand | None) -> None:
        if named == self._named:
            return
        self._named = named
        match named:
            case PartialPath():
                self.run_worker(lambda: self._find(named), thread=True, exclusive=True)
            case PartialCommand():
                own = [OfferedCommand(action.usage, action.help, action.slash) for action in matching(named.part)]
                mine = [OfferedCommand(f"/{name}", told, name) for name, told in self._mine(named.part)]
                self._show(named, _rows([*mine, *own] if named.part else [*own, *mine]))
            case None:
                self.display = False

    def withdraw(self) -> None:
        self.complete(None)

    def _find(self, named: PartialPath) -> None:
        ranged, worker = _RANGE.fullmatch(named.part), get_current_worker()
        part, lines = (ranged[1], ranged[2]) if ranged else (named.part, "")
        options = [
            Option(Content(path + lines), path + lines)
            for path in self._finder.find(part)
            if not (lines and path[-1] == "/")
        ]
        if part.endswith("/") and not lines:
            whole = Content(part) + Content.styled("  all text files in it", FAINT)
            options.append(Option(whole, f"{part}."))
        if not worker.is_cancelled:
            self.app.call_from_thread(self._show, named, options)

    def _mine(self, part: str) -> Iterator[tuple[str, str]]:
        return ((name, told) for name, told in self.prompts() if name.startswith(part) and by_slash(name) is None)

    def _show(self, named: PartialPath | PartialCommand, options: Sequence[Option]) -> None:
        if named != self._named:
            return
        self.clear_options()
        self.add_options(options)
        self.highlighted = 0 if options else None
        self.display = bool(options)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        pick = self._command if isinstance(self._named, PartialCommand) else self._file
        pick(str(event.option_id))


def _cut(usage: str) -> str:
    return usage if len(usage) <= USAGE_WIDE else f"{usage[: USAGE_WIDE - 1]}…"


class OfferedCommand(NamedTuple):
    usage: str
    help: str
    name: str


def _rows(rows: Sequence[OfferedCommand]) -> list[Option]:
    usages = [_cut(row.usage) for row in rows]
    width = max(map(len, usages), default=0)
    return [
        Option(Content(usage.ljust(width + 2)) + Content.styled(row.help, FAINT), row.name)
        for usage, row in zip(usages, rows, strict=True)
    ]


PAUSE_S = 0.4  # longer than the gaps of a typist within a sentence
LONG_PASTE = 400  # characters that are read ahead without a pause
EDITING = {  # on the border
    "": "",
    "prompt": "editing · Esc cancels",
    "reply": "editing the reply · Enter keeps it · Esc cancels",
}
SHELL = "shell command · Enter asks first"  # on the border, while one is written


class Prompt(TextBox):
    """Enter sends; Shift+Enter, Ctrl+J, Alt+Enter or a trailing backslash break the line.

    obeys: whether text may be a command; an edited message may not.
    """

    @dataclass
    class Submitted(Message):
        draft: Draft

    @dataclass
    class Paused(Message):
        draft: Draft

    @dataclass
    class Picked(Message):
        path: str

    def __init__(self) -> None:
        super().__init__(
            soft_wrap=True,
            show_line_numbers=False,
            tab_behavior="focus",
            highlight_cursor_line=False,
            placeholder="Write a message",
            compact=True,
        )
        self.attachments: tuple[Attachment, ...] = ()
        self.obeys = True
        self.completions = Completions(self._pick_file, self._pick_command)
        self._typing = False
        self._rest: Timer | None = None
        self._restyled = True

    @property
    def draft(self) -> Draft:
        return Draft(self.text, self.attachments)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._restyled = True

    def render_lines(self, crop: Region) -> list[Strip]:
        """Draw with cached colours."""
        # TextArea looks up all colours on each draw, and Textual draws it whenever a neighbour changes.
        if self._restyled:
            self._restyled = False
            return super().render_lines(crop)
        return Widget.render_lines(self, crop)

    # Keys -----------------------------------------------------------------------------------------------------------------

    async def on_key(self, event: events.Key) -> None:
        self._typing = True
        if self.completions.display and self._choose(event.key):
            pass
        elif event.key == "enter":
            self._enter()
        elif event.key in NEWLINE_KEYS:
            self.insert("\n")
        elif (action := self._action_of(event.key)) is not None:
            await self.run_action(f"screen.do('{action}')")
        else:
            return
        event.stop()
        event.prevent_default()

    def _choose(self, key: str) -> bool:
        self._complete()  # for the text as it is now: a fast typist is ahead of the screen
        match key:
            case "escape":  # where that is not the key that stops
                self.completions.withdraw()
            case "enter" if self._is_whole():
                return False
            case "up":
                self.completions.action_cursor_up()
            case "down":
                self.completions.action_cursor_down()
            case "enter" | "tab":
                self.completions.action_select()
            case _:
                return False
        return True

    def _is_whole(self) -> bool:
        written = actions.parse(self.text)
        return written is not None and written.is_whole and written.action is by_slash(self.completions.chosen)

    def _enter(self) -> None:
        if self._ends_in_backslash():
            row, column = self.cursor_location
            self.replace("\n", (row, column - 1), (row, column))
        else:
            self.submit()

    def _action_of(self, key: str) -> str | None:
        match key:
            case "up" if self.navigator.is_first_wrapped_line(self.cursor_location):
                return "earlier"
            case "down" if self.navigator.is_last_wrapped_line(self.cursor_location):
                return "later"
            case "backspace" if not self.text and self.attachments:
                return "detach"
            case "ctrl+d" if not self.draft.whole:
                return "leave"
        return None

    def _ends_in_backslash(self) -> bool:
        row, column = self.cursor_location
        line = self.document.get_line(row)
        return column == len(line) and line.endswith("\\")

    # What is in the box ---------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        """Send and clear immediately: whatever is typed next is the next message."""
        draft = self.draft
        if draft.text.strip() or draft.attachments:
            self.put(Draft())
        self.post_message(self.Submitted(draft))

    def put(self, draft: Draft) -> None:
        self._typing = False
        self.completions.withdraw()
        self.text, self.attachments = sanitise(draft.text), draft.attachments
        self.move_cursor(self.document.end)

    def mark(self, editing: Literal["", "prompt", "reply"]) -> None:
        """Say on the border what is edited; then no slash commands are obeyed."""
        self.border_title = EDITING[editing]
        self.obeys = not editing

    def type(self, text: str) -> None:
        self._typing = True
        self.insert(text)

    def give_back(self, text: str, attachments: tuple[Attachment, ...] = ()) -> None:
        both = f"{text}\n{self.text}" if text and self.text.strip() and self.text != text else text or self.text
        mine = (each for each in self.attachments if each not in attachments)
        self.put(Draft(both, (*attachments, *mine)))

    def attach(self, attachment: Attachment) -> None:
        others = (each for each in self.attachments if each.name != attachment.name)
        self.attachments = (*others, attachment)
        self._pause()

    def detach(self, attachment: Attachment) -> None:
        self.attachments = tuple(each for each in self.attachments if each is not attachment)
        self.await_pause()

    def on_paste(self, event: events.Paste) -> None:
        """Strip control characters, which would reach the terminal; attach long text."""
        self._typing = False
        event.text = sanitise(event.text)
        if (path := dropped(event.text)) is not None:
            event.stop()
            event.prevent_default()
            self.post_message(self.Picked(path))
        elif is_long(event.text):
            event.stop()
            event.prevent_default()
            self.attach(pasted(event.text, self.attachments))
        elif len(event.text) >= LONG_PASTE:
            self.call_later(self._pause)  # once the text is in the box

    # Pauses, files and commands -------------------------------------------------------------------------------------------

    def on_text_area_changed(self) -> None:
        self.await_pause()
        self._complete()
        self.border_subtitle = SHELL if self.obeys and shell_command(self.text) else ""

    def on_text_area_selection_changed(self) -> None:
        if self.completions.display:
            self._complete()

    def await_pause(self) -> None:
        if self._rest is not None:
            self._rest.stop()
        self._rest = self.set_timer(PAUSE_S, self._pause)

    def _pause(self) -> None:
        self.post_message(self.Paused(self.draft))

    def _complete(self) -> None:
        if self._typing:
            self._take_named_file()
        self.completions.complete((self._command_at_cursor() or self._path_at_cursor()) if self._typing else None)

    def _path_at_cursor(self) -> PartialPath | None:
        row, column = self.cursor_location
        return path_at(self.document.get_line(row), column)

    def _take_named_file(self) -> None:
        """Attach the file whose whole name was typed, once a space follows it: who goes on writing means that one."""
        row, column = self.cursor_location
        before = self.document.get_line(row)[:column]
        if not before.endswith(" ") or (named := path_at(before, column - 1)) is None:
            return
        ranged = LINES.fullmatch(named.part)
        if is_file(expanded(named.part)) or (ranged is not None and is_file(expanded(ranged[1]))):
            self._take_path(named.part, named.start)

    def _command_at_cursor(self) -> PartialCommand | None:
        return command_at(self.text, *self.cursor_location) if self.obeys else None

    def name_file(self) -> None:
        row, column = self.cursor_location
        before = self.document.get_line(row)[:column]
        self._typing = True
        self.insert("@" if not before or before[-1].isspace() else " @")

    def _pick_file(self, path: str) -> None:
        row, column = self.cursor_location
        if (named := self._path_at_cursor()) is None:
            return
        self.completions.withdraw()
        if path.endswith("/"):
            self.replace(f"@{path}", (row, named.start), (row, column))
        else:
            self._take_path(path, named.start)

    def _take_path(self, path: str, start: int) -> None:
        row, column = self.cursor_location
        follows = self.document.get_line(row)[:start].strip()
        self.replace(f"{path} " if follows else "", (row, start), (row, column))
        self.post_message(self.Picked(path))

    def _pick_command(self, name: str) -> None:
        named, action = self._command_at_cursor(), by_slash(name)
        if named is None:
            return
        self.completions.withdraw()
        self._typing = False  # or it would be completed again
        takes = action is None or bool(action.argument)
        follows = " " if takes and not self.text[named.end :] else ""
        self.replace(f"/{name}{follows}", (0, 0), (0, named.end))
        self.move_cursor((0, len(name) + 1 + takes))


MOST_WAITING = 3  # lines for queued prompts; more would leave too little room for the text
ROOMY = 24  # rows of a window that has room for them; else one is shown


MOST_NOTICES = 5  # lines for notices; a longer one is shown whole, alone
MARKS = {"information": "$primary", "warning": "$warning", "error": "$error"}  # colours of what stands before a notice


class Chips(Static):
    def __init__(self) -> None:
        super().__init__(markup=False)
        self.display = False
        self.notices: list[Notice] = []
        self._lines: list[Content] = []
        self._shown = Content("")

    def tell(self, notice: Notice, timeout: float) -> None:
        self.notices = [*(each for each in self.notices if each != notice), notice]
        self.set_timer(timeout, lambda: self.forget(notice))
        self._draw()

    def forget(self, notice: Notice | None = None) -> None:
        self.notices = [each for each in self.notices if notice is not None and each is not notice]
        self._draw()

    def show(self, session: Session, draft: Draft, reading: Sequence[str], running: str) -> None:
        most = MOST_WAITING if self.app.size.height >= ROOMY else 1
        over = session.overfull(draft)
        pending = [f"reading {sanitise_line(name)} …" for name in reading]
        pending += [f"running {excerpt(running)} … {session.keymap.key('stop')} ends it"] if running else []
        chips = _attached(draft.attachments, pending, session, over=bool(over))
        lines = [*_waiting(session.queued, most), *(row for chip in chips for row in self._wrapped(chip))]
        lines += self._wrapped(Content.styled(over, "$text-error")) if over else []
        self._lines = lines
        self._draw()

    def _wrapped(self, text: Content, less: int = 0) -> list[Content]:
        # While it is hidden it has no size; then the column it stands in has.
        above = self.parent.size.width if isinstance(self.parent, Widget) else 0
        width = max(20, self.content_size.width or above - self.styles.margin.width - self.styles.padding.width)
        return [row.content for row in wrapped(text, width - less)]

    def on_resize(self) -> None:
        self._draw()

    def _noticed(self) -> list[Content]:
        lines: list[Content] = []
        for notice in reversed(self.notices):
            mark = Content.styled("▌ ", MARKS[notice.severity])
            said = [mark + line for part in notice.text.split("\n") for line in self._wrapped(Content(part), 2)]
            if lines and len(lines) + len(said) > MOST_NOTICES:
                break
            lines[:0] = said
        return lines

    def _draw(self) -> None:
        lines = [*self._noticed(), *self._lines]
        content = Content("\n").join(lines)
        if not content.is_same(self._shown):
            self._shown = content
            self.display = bool(lines)
            self.update(content)


def _waiting(queued: Sequence[Draft], most: int) -> list[Content]:
    lines = [Content.styled("queued ", "$text-secondary") + Content.styled(_words(draft), FAINT) for draft in queued]
    more = len(lines) - most
    return lines if more <= 0 else [*lines[:most], Content.styled(f"       and {more} more", FAINT)]


def _words(draft: Draft) -> str:
    names = ", ".join(sanitise_line(each.name) for each in draft.attachments)
    return " + ".join(part for part in (excerpt(draft.text), names) if part)


def _attached(
    attachments: Sequence[Attachment],
    pending: Sequence[str],
    session: Session,
    *,
    over: bool,
) -> list[Content]:
    # A picture's price is long: each has a line of its own, as far as there is room.
    alone = sum(each.kind == PICTURE for each in attachments) <= MOST_WAITING
    largest = max(attachments, key=lambda each: session.tokens(each) or 0, default=None) if over else None
    chips, pictures = list[Content](), list[Content]()
    for each in attachments:
        name, size = ("$text-error", "$text-error") if each is largest else ("$text-primary", FAINT)
        chip = Content.styled(f"+ {sanitise_line(each.name)}", name)
        (pictures if alone and each.kind == PICTURE else chips).append(
            chip + Content.styled(f" {size_text(each, session.tokens(each), session.picture(each))}", size)
        )
    chips += [Content.styled(each, FAINT) for each in pending]
    return [*pictures, *([Content("   ").join(chips)] if chips else [])]
