"""Where the plain chat reads and writes: lines in, text out as it comes. No cursor is moved, and nothing foreign is obeyed.

Ctrl-C as something that is heard: an exception could come in the middle of a step.

What is written and not sent: what the next line begins with and what goes with it, and while a prompt is edited, that one.
"""

import codecs
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper

from tokamac.app.chat.attachments import Draft, joined
from tokamac.app.output import dim, is_terminal, note
from tokamac.app.sanitise import Sanitiser, sanitise
from tokamac.engine.events import TextKind

Complete = Callable[[str, str], list[str]]
"""Returns what a word can become, given what stands before it on the line and how it begins."""
BLOCK = '"""'
"""Alone on a line: what follows, up to another, is one prompt."""


class Console:
    """stdin and stdout. typed: a person writes the lines. shown: a person reads the text."""

    def __init__(self) -> None:
        self.typed = sys.stdin is not None and sys.stdin.isatty()
        self.shown = sys.stdout.isatty()
        self._edits = self.typed and self.shown
        self._gate = Sanitiser()
        self._last = "\n"
        self._label = ""  # what still stands before the reply's first word
        self._replies = 0
        self._thought = False
        self._held: list[str] | None = None  # notes that wait for the end of the line that is read
        if isinstance(sys.stdin, TextIOWrapper):
            # Where the locale says ASCII it says nothing: what is piped in would lose all other letters.
            ascii_only = codecs.lookup(sys.stdin.encoding).name == "ascii"
            sys.stdin.reconfigure(encoding="utf-8" if ascii_only else None, errors="replace")

    # Reading --------------------------------------------------------------------------------------------------------------

    def prepare(self, sent: Iterable[str], complete: Complete) -> None:
        """Let the user go back in what was ``sent``, newest first, and ``complete`` words with Tab."""
        if not self._edits:
            return
        with suppress(ImportError):  # not every Python has it; the line is then as the terminal edits it
            import readline

            for text in reversed([text for text in sent if text.isprintable()]):
                readline.add_history(text)
            readline.set_completer(_completer(complete))
            readline.set_completer_delims(" ")
            readline.parse_and_bind("bind ^I rl_complete" if is_libedit() else "tab: complete")

    def read(self, prompt: str, draft: str = "") -> str:
        """Return what the user asks: a line, made safe; several, where they end with a backslash or stand in a block.

        draft: what they may go on from. Raises EOFError at the end of what is written, KeyboardInterrupt at Ctrl-C.
        """
        with self.holding():
            return sanitise(self._lines(prompt, draft))

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keep notes back while a line is written, or another program has the terminal: they would stand in the middle."""
        self._held = []
        try:
            yield
        except (EOFError, KeyboardInterrupt):
            if self._held:
                self.aside("")  # the line has no end of its own
            raise
        finally:
            held, self._held = self._held, None
            for text in held:
                self.note(text)

    def _lines(self, prompt: str, draft: str) -> str:
        line = self._line(prompt, draft)
        with suppress(EOFError):  # of an unfinished prompt: what is there is asked
            if line.strip() == BLOCK:
                line = ""
                while (more := self._line("... ")).strip() != BLOCK:
                    line += f"{more}\n"
            while line.endswith("\\"):
                line = f"{line[:-1]}\n"
                line += self._line("... ")
        return line

    def _line(self, prompt: str, draft: str = "") -> str:
        if self._edits:
            if draft and is_libedit():  # as on every usual Mac: some of them leave the line empty
                self.aside(f"What was written, should the line be empty:\n{draft}")
            with _begun_with(draft):
                return input(prompt)
        if self.typed:
            sys.stderr.write(prompt)
            sys.stderr.flush()
        line = sys.stdin.readline() if sys.stdin is not None else ""
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    # Writing --------------------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Write lines that were asked for."""
        sys.stdout.write(f"{sanitise(text)}\n")
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Write one line about what goes on, beside the text; on a line of its own where both meet, so after one that is read."""
        if self._held is not None:
            self._held.append(text)
            return
        if self._last != "\n" and self.shown:
            self._write("\n")
        note(text)

    def aside(self, text: str) -> None:
        """Write a line that is for a person alone; faint where that can be."""
        if self.shown:
            safe = sanitise(text)
            self._write(f"{dim(safe) if safe and is_terminal(sys.stdout) else safe}\n")

    def begin(self, name: str) -> None:
        """Begin a reply: with a name where a person reads it, else after a blank line."""
        self._gate = Sanitiser()
        self._label = f"{sanitise(name)}: " if self.shown else "\n" if self._replies else ""
        self._thought = False
        self._replies += 1

    def grow(self, text: str, kind: TextKind) -> None:
        """Write more of the reply, at once. That it thinks is said once; the thinking is not read out."""
        if kind == "thinking":
            if not self._thought:
                self._thought = True
                self.aside("thinking …")
            return
        safe = self._gate.feed(text)
        if safe:
            self._write(self._label + safe)
            self._label = ""

    def end(self) -> None:
        """End the reply's last line."""
        if self._last != "\n":
            self._write("\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._last = text[-1]


def is_libedit() -> bool:
    """Whether this Python edits lines by libedit, which has not all of GNU Readline's abilities."""
    try:
        import readline
    except ImportError:
        return False
    backend = getattr(readline, "backend", None)  # from Python 3.13 on
    return backend == "editline" if backend is not None else "libedit" in (readline.__doc__ or "")


@contextmanager
def _begun_with(draft: str) -> Iterator[None]:
    """Let the next line begin with ``draft``, where this Python can."""
    try:
        import readline
    except ImportError:
        yield
        return
    readline.set_startup_hook((lambda: readline.insert_text(draft)) if draft else None)
    try:
        yield
    finally:
        readline.set_startup_hook(None)


def _completer(complete: Complete) -> Callable[[str, int], str | None]:
    """Return ``complete`` as readline calls it: for one word after another, until there is none."""
    import readline

    def completion(text: str, state: int) -> str | None:
        fits = complete(readline.get_line_buffer()[: readline.get_begidx()], text)
        return fits[state] if state < len(fits) else None

    return completion


@contextmanager
def heard(act: Callable[[], object]) -> Iterator[None]:
    """Let every Ctrl-C call ``act``, on the main thread and between two steps of whatever runs there.

    Without effect on another thread, and where the shell asked for Ctrl-C to be ignored (a job in the background).
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def unbroken() -> Iterator[None]:
    """Hold Ctrl-C back until this is over, so that a change is made whole; it comes then as it would have come."""
    came: list[bool] = []
    try:
        with heard(lambda: came.append(True)):
            yield
    finally:
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def noticed() -> Iterator[Callable[[], bool]]:
    """Yield what tells whether Ctrl-C has come since, whoever heard it. To be used on the main thread, and in here."""
    ear, mouth = os.pipe()
    for end in (ear, mouth):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)

    def came() -> bool:
        with suppress(BlockingIOError):  # nothing came
            return signal.SIGINT in os.read(ear, 4096)
        return False

    try:
        yield came
    finally:
        signal.set_wakeup_fd(before)
        os.close(ear)
        os.close(mouth)


class LineComposer:
    """draft: what the next line begins with, and what goes with it. editing: the prompt it is asked in place of; None: of none."""

    def __init__(self) -> None:
        self.draft = Draft()
        self.editing: int | None = None
        self._aside = Draft()  # what is for the next prompt, while one is edited
        self._edited = Draft()  # that one as it was

    @property
    def unsent(self) -> Draft:
        """All that is written and not sent. An edit that has changed nothing is not."""
        if self.editing is None:
            return self.draft
        return joined([self._aside, *([] if self.draft == self._edited else [self.draft])])

    def begin_edit(self, key: int, draft: Draft) -> None:
        """Have the next line asked in place of the prompt ``key``, which was ``draft``; what was there waits for the one after."""
        if self.editing is None:
            self._aside = self.draft
        self.editing, self.draft, self._edited = key, draft, draft

    def end_edit(self) -> None:
        """Give back what waited while a prompt was edited, if one was."""
        if self.editing is not None:
            self.hold(self._aside)

    def hold(self, draft: Draft) -> None:
        """Hold ``draft`` in place of all that was held, an edit too."""
        self.draft, self.editing, self._aside = draft, None, Draft()

    def give_back(self, draft: Draft) -> None:
        """Take a prompt that was not sent, before what is there for the next one."""
        if self.editing is None:
            self.draft = joined([draft, self.draft])
        else:
            self._aside = joined([draft, self._aside])
