"""Where the user writes: the prompt, its completions below, and the queued prompts and attachments above.

The prompt grows with its text. Completions are files after @ and commands after a slash, the best first. A file is found by a part
of its path, from names only: ``@atch`` looks in the whole folder; ``@~/notes``, ``@../a`` and ``@/etc/h`` in the folder they name.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from textual import events
from textual.content import Content
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import OptionList, Static, TextArea
from textual.widgets.option_list import Option
from textual.worker import get_current_worker

from tokamac.engine.files import expanded

from ... import units
from ...chat import actions
from ...chat.actions import NEWLINE_KEYS, Action, PartialCommand, by_slash, command_at, matching
from ...chat.attachments import Draft, is_long, pasted, shell_command
from ...chat.listing import excerpt
from ...chat.session import Session
from ...sanitise import sanitise, sanitise_line
from ...store.values import Attachment
from ..markdown.rows import wrapped
from ..theme import FAINT

MOST_OFFERED = 8
USAGE_WIDE = 24
"""Cells for a command and its argument."""
MOST_FILES = 20_000
WALK_S = 0.5
"""Limits, in files and seconds, of walking a folder: deeper files are reached by writing more of their path."""
FRESH_S = 10.0
_SKIPPED = frozenset({"__pycache__", "node_modules", "target", "venv"})
_TOKEN = re.compile(r"(?:^|(?<=[\s(\[{\"']))@(\S*)$")
_RANGE = re.compile(r"(.+?)(:[0-9]+-[0-9]+)")
_PLACED = re.compile(r"(~[^/]*|\.{1,2})?/|~|\.{1,2}$")


@dataclass(frozen=True, slots=True)
class PartialPath:
    """A path that is being typed: ``part`` of it, after the @ in column ``start``."""

    start: int
    part: str


def path_at(line: str, column: int) -> PartialPath | None:
    """Return the path that is being typed before the cursor in ``line``; None where no word there begins with @."""
    token = _TOKEN.search(line[:column])
    return None if token is None else PartialPath(token.start(), token[1])


class Finder:
    """Finds files from ``folder``. The files below it are listed again after ``FRESH_S``."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._walked_s = -FRESH_S
        self._below: Sequence[str] = ()

    def find(self, part: str, most: int = MOST_OFFERED) -> list[str]:
        """Return paths that match ``part``, best first; folders end with a slash. May take ``WALK_S``."""
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
    """Return those of ``paths`` that contain the letters of ``part`` in order, best first.

    The order: names that begin with it, names that contain it, paths that do, then scattered letters.
    """
    wanted = part.lower()
    fits = [(rank, len(path), path) for path in paths if (rank := _rank(wanted, path.lower())) is not None]
    return [path for _, _, path in sorted(fits)[:most]]


def files_below(folder: Path) -> Iterator[str]:
    """Yield the relative paths of files below ``folder``, nearest first, without hidden files and folders of dependencies."""
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
    """Return the names in a folder, folders with a slash; none where it can't be read."""
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
    """A list that is shown while there are completions. The prompt keeps the focus, and moves the cursor of the list."""

    def __init__(self, file: Pick, command: Pick) -> None:
        """``file`` is called with the chosen path, which ends with a slash for a folder; ``command`` with a name."""
        super().__init__(compact=True)
        self.display = False
        self._file = file
        self._command = command
        self._named: PartialPath | PartialCommand | None = None
        self._finder = Finder(Path())

    @property
    def chosen(self) -> str:
        """The selected path or command name; "" while there is none."""
        option = self.highlighted_option if self.display else None
        return "" if option is None else str(option.id)

    def complete(self, named: PartialPath | PartialCommand | None) -> None:
        """Show the completions: of commands now, of files once they are found; None hides them."""
        if named == self._named:
            return
        self._named = named
        match named:
            case PartialPath():
                self.run_worker(lambda: self._find(named), thread=True, exclusive=True)
            case PartialCommand():
                self._show(named, _rows(matching(named.part)))
            case None:
                self.display = False

    def withdraw(self) -> None:
        """Hide the completions."""
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

    def _show(self, named: PartialPath | PartialCommand, options: Sequence[Option]) -> None:
        if named != self._named:
            return
        self.clear_options()
        self.add_options(options)
        self.highlighted = 0 if options else None
        self.display = bool(options)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Pass on what was chosen, by a key or the mouse."""
        event.stop()
        pick = self._command if isinstance(self._named, PartialCommand) else self._file
        pick(str(event.option_id))


def _cut(usage: str) -> str:
    return usage if len(usage) <= USAGE_WIDE else f"{usage[: USAGE_WIDE - 1]}…"


def _rows(actions: Sequence[Action]) -> list[Option]:
    """Return a row for each command: its name, argument and help. A long argument is cut: it must not push away all help."""
    usages = [_cut(action.usage) for action in actions]
    width = max(map(len, usages), default=0)
    return [
        Option(Content(usage.ljust(width + 2)) + Content.styled(action.help, FAINT), action.slash)
        for usage, action in zip(usages, actions, strict=True)
    ]


PAUSE_S = 0.4  # longer than the gaps of a typist within a sentence
LONG_PASTE = 400  # characters that are read ahead without a pause
SHELL = "shell command · Enter asks first"
"""On the border, while one is written."""


class Prompt(TextArea):
    """Enter sends; Shift+Enter, Ctrl+J, Alt+Enter or a backslash at the end of the line make a new one.

    attachments: what goes with the text. completions: the list to be shown below. obeys: whether a text can be a command; an
    edited message can't.
    """

    @dataclass
    class Submitted(Message):
        """The user sent ``draft``, which is no longer in the box."""

        draft: Draft

    @dataclass
    class Paused(Message):
        """The user pauses; ``draft`` is the text so far."""

        draft: Draft

    @dataclass
    class Picked(Message):
        """The user chose the file at ``path`` as an attachment."""

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
        """The text and its attachments."""
        return Draft(self.text, self.attachments)

    def notify_style_update(self) -> None:
        """Note that the next drawing must look up its colours."""
        super().notify_style_update()
        self._restyled = True

    def render_lines(self, crop: Region) -> list[Strip]:
        """Draw; TextArea would look up all its colours each time, and Textual draws it whenever a neighbour changes."""
        if self._restyled:
            self._restyled = False
            return super().render_lines(crop)
        return Widget.render_lines(self, crop)

    # Keys -----------------------------------------------------------------------------------------------------------------

    async def on_key(self, event: events.Key) -> None:
        """Send, break the line, choose a completion, recall a prompt, or remove an attachment; write everything else."""
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
        """Do what ``key`` does to the completions; return whether it does anything."""
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
        """Whether the selected command is written already, with its argument: Enter runs it then."""
        written = actions.parse(self.text)
        return written is not None and written.is_whole and written.word.lower() == f"/{self.completions.chosen}"

    def _enter(self) -> None:
        if self._ends_in_backslash():
            row, column = self.cursor_location
            self.replace("\n", (row, column - 1), (row, column))
        else:
            self.submit()

    def _action_of(self, key: str) -> str | None:
        """Return the action of ``key`` at the cursor; None where the key edits the text."""
        match key:
            case "up" if self.navigator.is_first_wrapped_line(self.cursor_location):
                return "earlier"
            case "down" if self.navigator.is_last_wrapped_line(self.cursor_location):
                return "later"
            case "backspace" if not self.text and self.attachments:
                return "detach"
        return None

    def _ends_in_backslash(self) -> bool:
        row, column = self.cursor_location
        line = self.document.get_line(row)
        return column == len(line) and line.endswith("\\")

    # What is in the box ---------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        """Send the text. The box is cleared at once: what is typed next, however fast, is the next message."""
        draft = self.draft
        if draft.text.strip() or draft.attachments:
            self.put(Draft())
        self.post_message(self.Submitted(draft))

    def put(self, draft: Draft) -> None:
        """Put ``draft`` in place of the text."""
        self._typing = False
        self.completions.withdraw()
        self.text, self.attachments = sanitise(draft.text), draft.attachments
        self.move_cursor(self.document.end)

    def type(self, text: str) -> None:
        """Write ``text`` at the cursor, as if it came from the keyboard."""
        self._typing = True
        self.insert(text)

    def give_back(self, text: str, attachments: tuple[Attachment, ...] = ()) -> None:
        """Put ``text`` and its attachments before what is written by now."""
        both = f"{text}\n{self.text}" if text and self.text.strip() and self.text != text else text or self.text
        mine = (each for each in self.attachments if each not in attachments)
        self.put(Draft(both, (*attachments, *mine)))

    def attach(self, attachment: Attachment) -> None:
        """Add ``attachment``, in place of an older one of the same name."""
        others = (each for each in self.attachments if each.name != attachment.name)
        self.attachments = (*others, attachment)
        self._pause()

    def detach(self, attachment: Attachment) -> None:
        """Remove ``attachment``."""
        self.attachments = tuple(each for each in self.attachments if each is not attachment)
        self.await_pause()

    def on_paste(self, event: events.Paste) -> None:
        """Remove control characters: the text is written to the terminal as it is. A long text is attached."""
        self._typing = False
        event.text = sanitise(event.text)
        if is_long(event.text):
            event.stop()
            event.prevent_default()
            self.attach(pasted(event.text, self.attachments))
        elif len(event.text) >= LONG_PASTE:
            self.call_later(self._pause)  # once the text is in the box

    # Pauses, files and commands -------------------------------------------------------------------------------------------

    def on_text_area_changed(self) -> None:
        """Begin to wait for a pause; complete paths and commands."""
        self.await_pause()
        self._complete()
        self.border_subtitle = SHELL if self.obeys and shell_command(self.text) else ""

    def on_text_area_selection_changed(self) -> None:
        """Follow the cursor to another word."""
        if self.completions.display:
            self._complete()

    def await_pause(self) -> None:
        """Post ``Paused`` when nothing was written for a moment; called again, wait anew."""
        if self._rest is not None:
            self._rest.stop()
        self._rest = self.set_timer(PAUSE_S, self._pause)

    def _pause(self) -> None:
        self.post_message(self.Paused(self.draft))

    def _complete(self) -> None:
        """Complete the word at the cursor, if it was typed: a pasted word is no path or command."""
        self.completions.complete((self._command_at_cursor() or self._path_at_cursor()) if self._typing else None)

    def _path_at_cursor(self) -> PartialPath | None:
        row, column = self.cursor_location
        return path_at(self.document.get_line(row), column)

    def _command_at_cursor(self) -> PartialCommand | None:
        return command_at(self.text, *self.cursor_location) if self.obeys else None

    def name_file(self) -> None:
        """Begin a path at the cursor."""
        row, column = self.cursor_location
        before = self.document.get_line(row)[:column]
        self._typing = True
        self.insert("@" if not before or before[-1].isspace() else " @")

    def _pick_file(self, path: str) -> None:
        """Write ``path`` in place of the word at the cursor; a file is attached, a folder is completed further."""
        row, column = self.cursor_location
        if (named := self._path_at_cursor()) is None:
            return
        self.completions.withdraw()
        if path.endswith("/"):
            self.replace(f"@{path}", (row, named.start), (row, column))
        else:
            self.replace(f"{path} ", (row, named.start), (row, column))
            self.post_message(self.Picked(path))

    def _pick_command(self, name: str) -> None:
        """Write the command ``name`` in place of the first word, and a space where it takes an argument."""
        named, action = self._command_at_cursor(), by_slash(name)
        if named is None or action is None:
            return
        self.completions.withdraw()
        self._typing = False  # or it would be completed again
        follows = " " if action.argument and not self.text[named.end :] else ""
        self.replace(f"/{name}{follows}", (0, 0), (0, named.end))
        self.move_cursor((0, len(name) + 1 + bool(action.argument)))


MOST_WAITING = 3
"""Lines for queued prompts; more would leave too little room for the text."""
ROOMY = 24
"""Rows of a window that has room for them; else one is shown."""


class Chips(Static):
    """A line for each queued prompt, one for the attachments, and one where they are too long; hidden where there are none."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.display = False
        self._shown = Content("")

    def show(self, session: Session, draft: Draft, reading: Sequence[str], running: str) -> None:
        """Show queued prompts, attachments, files that are read, the shell command that runs, and why the prompt can't be sent."""
        most = MOST_WAITING if self.app.size.height >= ROOMY else 1
        over = session.overfull(draft)
        pending = [f"reading {sanitise_line(name)} …" for name in reading]
        pending += [f"running {excerpt(running)} … {session.keymap.key('stop')} ends it"] if running else []
        lines = [*_waiting(session.queued, most), *_attached(draft.attachments, pending, session, over=bool(over))]
        if over:
            width = max(20, self.content_size.width or self.container_size.width - 6)
            lines += [row.content for row in wrapped(Content.styled(over, "$text-error"), width)]
        content = Content("\n").join(lines)
        if not content.is_same(self._shown):
            self._shown = content
            self.display = bool(lines)
            self.update(content)


def _waiting(queued: Sequence[Draft], most: int) -> list[Content]:
    """Return a line for each of the first queued prompts. Up takes the last one back."""
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
    """Return a line of chips, what is to come last. over: together they are too long; the largest is marked."""
    largest = max(attachments, key=lambda each: session.tokens(each) or 0, default=None) if over else None
    chips = []
    for each in attachments:
        name, size = ("$text-error", "$text-error") if each is largest else ("$text-primary", FAINT)
        chip = Content.styled(f"+ {sanitise_line(each.name)}", name)
        chips.append(chip + Content.styled(f" {_size(each, session.tokens(each))}", size))
    chips += [Content.styled(each, FAINT) for each in pending]
    return [Content("   ").join(chips)] if chips else []


def _size(attachment: Attachment, tokens: int | None) -> str:
    if tokens is None:
        return f"{units.count(len(attachment.text))} characters"
    return f"{units.count(tokens)} token{'' if tokens == 1 else 's'}"
