"""Where the user writes: a box that grows with its text, and holds what goes with it.

Below the prompt: what fits the word that is being written, the best first: files after @, commands after a slash.

Finding a file by a part of its path, written after @. Looks at names only; nothing is opened.

``@atch`` is looked for in all of the folder; ``@~/notes``, ``@../a`` and ``@/etc/h`` in the folder that they name.

Above the prompt: the prompts that wait for their turn, and what goes with the one that is being written.
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

from tokamac.app import units
from tokamac.app.chat import actions
from tokamac.app.chat.actions import Action, Calling, by_slash, calling, fitting
from tokamac.app.chat.attachments import Draft, is_long, pasted
from tokamac.app.chat.listing import excerpt
from tokamac.app.chat.session import Session
from tokamac.app.sanitise import sanitise, sanitise_line
from tokamac.app.store.values import Attachment
from tokamac.app.tui.theme import FAINT

MOST_OFFERED = 8
MOST_FILES = 20_000
WALK_S = 0.5
"""Walking a folder ends after so many files or seconds: what lies deeper is reached by writing more of its path."""
FRESH_S = 10.0
_SKIPPED = frozenset({"__pycache__", "node_modules", "target", "venv"})
_TOKEN = re.compile(r"(?:^|(?<=[\s(\[{\"']))@(\S*)$")
_PLACED = re.compile(r"(~[^/]*|\.{1,2})?/|~|\.{1,2}$")


@dataclass(frozen=True, slots=True)
class Naming:
    """A file that is being named: ``part`` of its path, after the @ in column ``start``."""

    start: int
    part: str


def naming(line: str, column: int) -> Naming | None:
    """Return what is being named before the cursor in ``line``; None where no word there begins with @."""
    token = _TOKEN.search(line[:column])
    return None if token is None else Naming(token.start(), token[1])


class Finder:
    """Finds files for somebody who stands in ``folder``. What is below it is looked up anew after ``FRESH_S``."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._walked_s = -FRESH_S
        self._below: Sequence[str] = ()

    def find(self, part: str, most: int = MOST_OFFERED) -> list[str]:
        """Return paths that fit ``part``, best first; those of folders end with a slash. May take ``WALK_S``."""
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
    """Return those of ``paths`` that hold the letters of ``part`` in their order, best first.

    A name that begins with it goes before a name that holds it, then a path that does, then letters that are scattered.
    """
    wanted = part.lower()
    fits = [(rank, len(path), path) for path in paths if (rank := _rank(wanted, path.lower())) is not None]
    return [path for _, _, path in sorted(fits)[:most]]


def files_below(folder: Path) -> Iterator[str]:
    """Yield the files below ``folder`` by their relative paths, nearest first; hidden ones and heaps of others' files left out."""
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
    """Return the names in a folder, those of folders with a slash; none where it can't be read."""
    try:
        with os.scandir(folder / Path(typed).expanduser()) as entries:
            found = [each.name + ("/" if each.is_dir() else "") for each in entries if hidden or each.name[0] != "."]
    except (OSError, RuntimeError, ValueError):
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


class Offers(OptionList, can_focus=False):
    """A list that is there while there is something to choose from. The prompt keeps the keyboard, and moves it."""

    def __init__(self, file: Pick, command: Pick) -> None:
        """``file`` is called with the path that is chosen, a folder's with a slash at its end; ``command`` with a name."""
        super().__init__(compact=True)
        self.display = False
        self._file = file
        self._command = command
        self._named: Naming | Calling | None = None
        self._finder = Finder(Path())

    @property
    def chosen(self) -> str:
        """What is pointed at: a path, or a command's name; "" while nothing is offered."""
        option = self.highlighted_option if self.display else None
        return "" if option is None else str(option.id)

    def offer(self, named: Naming | Calling | None) -> None:
        """Offer what fits what is being named: commands now, files once they are found; nothing where nothing is."""
        if named == self._named:
            return
        self._named = named
        match named:
            case Naming():
                self.run_worker(lambda: self._find(named), thread=True, exclusive=True)
            case Calling():
                self._show(named, _rows(fitting(named.part)))
            case None:
                self.display = False

    def withdraw(self) -> None:
        """Offer nothing."""
        self.offer(None)

    def _find(self, named: Naming) -> None:
        paths, worker = self._finder.find(named.part), get_current_worker()
        if not worker.is_cancelled:
            self.app.call_from_thread(self._show, named, [Option(Content(path), path) for path in paths])

    def _show(self, named: Naming | Calling, options: Sequence[Option]) -> None:
        if named != self._named:
            return
        self.clear_options()
        self.add_options(options)
        self.highlighted = 0 if options else None
        self.display = bool(options)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Pass on what was chosen, by a key or the mouse."""
        event.stop()
        pick = self._command if isinstance(self._named, Calling) else self._file
        pick(str(event.option_id))


def _rows(actions: Sequence[Action]) -> list[Option]:
    """Return a row for each command: its name, what may follow it, what it does."""
    usages = [action.usage for action in actions]
    width = max(map(len, usages), default=0)
    return [
        Option(Content(usage.ljust(width + 2)) + Content.styled(action.help, FAINT), action.slash)
        for usage, action in zip(usages, actions, strict=True)
    ]


NEWLINE_KEYS = ("shift+enter", "ctrl+j", "alt+enter")
PAUSE_S = 0.4  # longer than the gaps of a typist within a sentence
LONG_PASTE = 400  # characters, after which nobody need wait for a pause


class Prompt(TextArea):
    """Enter sends; Shift+Enter, Ctrl+J, Alt+Enter or a backslash at the end of the line make a new one.

    attachments: what goes with the text. offers: the files that fit a word that begins with @, or the commands that fit one
    that begins with a slash, to be shown below. obeys: whether a text can be a command; an edited message can't.
    """

    @dataclass
    class Submitted(Message):
        """The user sent ``draft``, which the box no longer holds."""

        draft: Draft

    @dataclass
    class Paused(Message):
        """The user rests; ``draft`` is what they have written so far."""

        draft: Draft

    @dataclass
    class Picked(Message):
        """The user chose the file at ``path`` to go with the text."""

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
        self.offers = Offers(self._pick_file, self._pick_command)
        self._typing = False
        self._rest: Timer | None = None
        self._restyled = True

    @property
    def draft(self) -> Draft:
        """What is written, and what goes with it."""
        return Draft(self.text, self.attachments)

    def notify_style_update(self) -> None:
        """Note that the next drawing must look its colours up."""
        super().notify_style_update()
        self._restyled = True

    def render_lines(self, crop: Region) -> list[Strip]:
        """Draw; TextArea would look all its colours up each time, and Textual asks for each drawing of its neighbours."""
        if self._restyled:
            self._restyled = False
            return super().render_lines(crop)
        return Widget.render_lines(self, crop)

    # Keys -----------------------------------------------------------------------------------------------------------------

    async def on_key(self, event: events.Key) -> None:
        """Send, break the line, choose an offer, go back in what was sent, or let go of an attachment; write everything else."""
        self._typing = True
        if self.offers.display and self._choose(event.key):
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
        """Do what ``key`` does to what is offered; return whether it does anything."""
        self._offer()  # for the text as it is now: who types fast is ahead of what is shown
        match key:
            case "escape":  # where that is not the key that stops
                self.offers.withdraw()
            case "enter" if self._is_whole():
                return False
            case "up":
                self.offers.action_cursor_up()
            case "down":
                self.offers.action_cursor_down()
            case "enter" | "tab":
                self.offers.action_select()
            case _:
                return False
        return True

    def _is_whole(self) -> bool:
        """Whether the command that is pointed at is written already, with all that it needs: Enter does it then."""
        written = actions.parse(self.text)
        return written is not None and written.is_whole and written.word.lower() == f"/{self.offers.chosen}"

    def _enter(self) -> None:
        if self._ends_in_backslash():
            row, column = self.cursor_location
            self.replace("\n", (row, column - 1), (row, column))
        else:
            self.submit()

    def _action_of(self, key: str) -> str | None:
        """Return the action that ``key`` stands for where the cursor is; None where it is the text's."""
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

    # What the box holds ---------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        """Send what is written. The box is emptied here and now: what is typed next, however fast, is the next message."""
        draft = self.draft
        if draft.text.strip() or draft.attachments:
            self.put(Draft())
        self.post_message(self.Submitted(draft))

    def put(self, draft: Draft) -> None:
        """Hold ``draft`` instead of what is there."""
        self._typing = False
        self.offers.withdraw()
        self.text, self.attachments = sanitise(draft.text), draft.attachments
        self.move_cursor(self.document.end)

    def give_back(self, text: str, attachments: tuple[Attachment, ...] = ()) -> None:
        """Put ``text``, and what goes with it, before what is written by now."""
        both = f"{text}\n{self.text}" if text and self.text.strip() and self.text != text else text or self.text
        mine = (each for each in self.attachments if each not in attachments)
        self.put(Draft(both, (*attachments, *mine)))

    def attach(self, attachment: Attachment) -> None:
        """Let ``attachment`` go with the text, in place of an older one of the same name."""
        others = (each for each in self.attachments if each.name != attachment.name)
        self.attachments = (*others, attachment)
        self._pause()

    def detach(self, attachment: Attachment) -> None:
        """Let ``attachment`` go."""
        self.attachments = tuple(each for each in self.attachments if each is not attachment)
        self.await_pause()

    def on_paste(self, event: events.Paste) -> None:
        """Let no control character in: what stands in the box is written to the terminal as it is. A long text is attached."""
        self._typing = False
        event.text = sanitise(event.text)
        if is_long(event.text):
            event.stop()
            event.prevent_default()
            self.attach(pasted(event.text, self.attachments))
        elif len(event.text) >= LONG_PASTE:
            self.call_later(self._pause)  # once the text stands in the box

    # Pauses, files and commands -------------------------------------------------------------------------------------------

    def on_text_area_changed(self) -> None:
        """Begin to wait for a pause; offer files or commands where one is being named."""
        self.await_pause()
        self._offer()

    def on_text_area_selection_changed(self) -> None:
        """Follow the cursor to another word."""
        if self.offers.display:
            self._offer()

    def await_pause(self) -> None:
        """Say ``Paused`` when nothing was written for a moment; called again, wait anew."""
        if self._rest is not None:
            self._rest.stop()
        self._rest = self.set_timer(PAUSE_S, self._pause)

    def _pause(self) -> None:
        self.post_message(self.Paused(self.draft))

    def _offer(self) -> None:
        """Offer what fits the word at the cursor. Only what is typed is taken for a path or a command, not what was pasted."""
        self.offers.offer((self._calling() or self._naming()) if self._typing else None)

    def _naming(self) -> Naming | None:
        row, column = self.cursor_location
        return naming(self.document.get_line(row), column)

    def _calling(self) -> Calling | None:
        return calling(self.text, *self.cursor_location) if self.obeys else None

    def name_file(self) -> None:
        """Begin to name a file at the cursor."""
        row, column = self.cursor_location
        before = self.document.get_line(row)[:column]
        self._typing = True
        self.insert("@" if not before or before[-1].isspace() else " @")

    def _pick_file(self, path: str) -> None:
        """Write ``path`` in place of the word at the cursor; a file is attached, a folder looked into."""
        row, column = self.cursor_location
        if (named := self._naming()) is None:
            return
        self.offers.withdraw()
        if path.endswith("/"):
            self.replace(f"@{path}", (row, named.start), (row, column))
        else:
            self.replace(f"{path} ", (row, named.start), (row, column))
            self.post_message(self.Picked(path))

    def _pick_command(self, name: str) -> None:
        """Write the command ``name`` in place of the first word, and a space where something may follow it."""
        named, action = self._calling(), by_slash(name)
        if named is None or action is None:
            return
        self.offers.withdraw()
        self._typing = False  # or it would be offered again
        follows = " " if action.argument and not self.text[named.end :] else ""
        self.replace(f"/{name}{follows}", (0, 0), (0, named.end))
        self.move_cursor((0, len(name) + 1 + bool(action.argument)))


MOST_WAITING = 3
"""Lines for prompts that wait; more would take the room of the text."""
ROOMY = 24
"""Rows of a window that has room for them; else one is shown."""
OVER = "over the context of {} tokens"
"""Said before it is sent, as the engine would refuse it."""


class Chips(Static):
    """One line a prompt that waits, one for the attachments, and one where they are too much; not there where there are none."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.display = False
        self._shown = Content("")

    def show(self, session: Session, attachments: Sequence[Attachment], reading: Sequence[str]) -> None:
        """Show what waits, what is attached, and the files that are being read."""
        most = MOST_WAITING if self.app.size.height >= ROOMY else 1
        over = session.counts.exceed(session.engine.info, session.engine.load.kv, attachments)
        lines = [*_waiting(session.queued, most), *_attached(attachments, reading, session.tokens, over=over)]
        if over and session.engine.info is not None:
            lines.append(Content.styled(OVER.format(units.count(session.engine.info.capacity)), "$text-error"))
        content = Content("\n").join(lines)
        if not content.is_same(self._shown):
            self._shown = content
            self.display = bool(lines)
            self.update(content)


def _waiting(queued: Sequence[Draft], most: int) -> list[Content]:
    """Return a line for each of the first prompts that wait. Up takes the last one back."""
    lines = [Content.styled("waits  ", "$text-secondary") + Content.styled(_words(draft), FAINT) for draft in queued]
    more = len(lines) - most
    return lines if more <= 0 else [*lines[:most], Content.styled(f"       and {more} more", FAINT)]


def _words(draft: Draft) -> str:
    names = ", ".join(sanitise_line(each.name) for each in draft.attachments)
    return " + ".join(part for part in (excerpt(draft.text), names) if part)


def _attached(
    attachments: Sequence[Attachment],
    reading: Sequence[str],
    tokens: Callable[[Attachment], int | None],
    *,
    over: bool,
) -> list[Content]:
    name, size = ("$text-error", "$text-error") if over else ("$text-primary", FAINT)
    chips = [
        Content.styled(f"+ {sanitise_line(each.name)}", name) + Content.styled(f" {_size(each, tokens(each))}", size)
        for each in attachments
    ]
    chips += [Content.styled(f"reading {sanitise_line(name)} …", FAINT) for name in reading]
    return [Content("   ").join(chips)] if chips else []


def _size(attachment: Attachment, tokens: int | None) -> str:
    if tokens is None:
        return f"{units.count(len(attachment.text))} characters"
    return f"{units.count(tokens)} token{'' if tokens == 1 else 's'}"
