"""Where the plain chat reads and writes: lines in, text out as it comes; no cursor moves, and no escape sequence gets through.

Ctrl-C is heard between two steps, not raised: an exception could come in the middle of one. ``LineComposer`` has the unsent text.
"""

import codecs
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper

from tokamac.engine.events import TextKind

from ..chat.attachments import Draft, joined
from ..output import dim, is_terminal, note, quote
from ..sanitise import Sanitiser, sanitise

Complete = Callable[[str, str], list[str]]
"""Returns what a word can become, given the line before it and its beginning."""
BLOCK = '"""'
"""Alone on a line: the lines up to another one are one prompt."""
MORE = "... "
"""Before a line that continues a prompt."""


class Console:
    """stdin and stdout. typed: a person types the lines. shown: a person reads the text."""

    def __init__(self) -> None:
        self.typed = sys.stdin is not None and sys.stdin.isatty()
        self.shown = sys.stdout.isatty()
        self._edits = self.typed and self.shown
        self._gate = Sanitiser()
        self._last = "\n"
        self._label = ""  # what comes before the reply's first word
        self._replies = 0
        self._thought = False
        self._held: list[str] | None = None  # notes that wait until the line is read
        self._prompt = ""  # what stands before the line that is read
        if isinstance(sys.stdin, TextIOWrapper):
            # A locale of ASCII says nothing: piped text would lose all other letters.
            ascii_only = codecs.lookup(sys.stdin.encoding).name == "ascii"
            sys.stdin.reconfigure(encoding="utf-8" if ascii_only else None, errors="replace")

    # Reading --------------------------------------------------------------------------------------------------------------

    def prepare(self, sent: Iterable[str], complete: Complete) -> None:
        """Let the user recall what was ``sent``, newest first, and ``complete`` words with Tab."""
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
        """Return the user's input: a line, made safe; several, where they end with a backslash or are in a block.

        draft: the text that the line begins with. Raises EOFError at the end of the input, KeyboardInterrupt at Ctrl-C.
        """
        with self.holding():
            return sanitise(self._lines(prompt, draft))

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold notes back while a line is typed, or another program has the terminal."""
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
        with suppress(EOFError):  # of an unfinished prompt: what is there is sent
            if line.strip() == BLOCK:
                line = ""
                while (more := self._line(MORE)).strip() != BLOCK:
                    line += f"{more}\n"
            while line.endswith("\\"):
                line = f"{line[:-1]}\n"
                line += self._line(MORE)
        return line

    def _line(self, prompt: str, draft: str = "") -> str:
        if self._edits:
            if draft and is_libedit():  # as on every usual Mac: some of them leave the line empty
                self.aside(f"If the line is empty, this was your text:\n{draft}")
            with _starting_with(draft):
                self._prompt = "" if prompt == MORE else prompt
                try:
                    return input(prompt)
                finally:
                    self._prompt = ""
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
        """Write a line beside the text, on a line of its own; while a line is read, after that."""
        if self._held is not None:
            self._held.append(text)
            return
        if self._last != "\n" and self.shown:
            self._write("\n")
        note(text)

    def quote(self, text: str) -> None:
        """Write what the user is asked to allow: whole, with its line breaks. Not while a line is read."""
        if self.shown:
            self.end()
        quote(text)

    def announce(self, news: Callable[[], list[str]]) -> None:
        """Write ``news`` above the prompt, unless something is typed there: then they are not asked for yet. From any thread."""
        if self._held is None or not self._prompt or _typed_so_far():
            return
        if lines := news():
            sys.stdout.write("\n")
            for line in lines:
                note(line)
            sys.stdout.write(self._prompt)
            sys.stdout.flush()

    def aside(self, text: str) -> None:
        """Write a line for a person only, faint where possible."""
        if self.shown:
            safe = sanitise(text)
            self._write(f"{dim(safe) if safe and is_terminal(sys.stdout) else safe}\n")

    def begin(self, name: str) -> None:
        """Begin a reply: with a name for a person, else after a blank line."""
        self._gate = Sanitiser()
        self._label = f"{sanitise(name)}: " if self.shown else "\n" if self._replies else ""
        self._thought = False
        self._replies += 1

    def head(self, text: str) -> None:
        """Begin a reply under a line of its own, for a person and for a script."""
        above = "\n" if self._replies else ""
        self.begin("")
        self._label = ""
        self._write(f"{above}{sanitise(text)}\n")

    def grow(self, text: str, kind: TextKind) -> None:
        """Write more of the reply at once. Thinking is only mentioned, once."""
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
    """Whether this Python edits lines by libedit, which lacks some abilities of GNU Readline."""
    try:
        import readline
    except ImportError:
        return False
    backend = getattr(readline, "backend", None)  # from Python 3.13 on
    return backend == "editline" if backend is not None else "libedit" in (readline.__doc__ or "")


def _typed_so_far() -> bool:
    """Whether there is text in the line that is being read."""
    try:
        import readline
    except ImportError:
        return True  # nobody knows
    return bool(readline.get_line_buffer())


@contextmanager
def _starting_with(draft: str) -> Iterator[None]:
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
    """Return ``complete`` as readline calls it: for one completion after another."""
    import readline

    def completion(text: str, state: int) -> str | None:
        fits = complete(readline.get_line_buffer()[: readline.get_begidx()], text)
        return fits[state] if state < len(fits) else None

    return completion


@contextmanager
def heard(act: Callable[[], object]) -> Iterator[None]:
    """Let every Ctrl-C call ``act``, on the main thread and between two steps of what runs there.

    No effect on another thread, or where the shell asked to ignore Ctrl-C (a job in the background).
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
    """Hold Ctrl-C back until this is over, so that a change is complete."""
    came: list[bool] = []
    try:
        with heard(lambda: came.append(True)):
            yield
    finally:
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def noticed() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C has come since, whoever heard it. For the main thread."""
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
    """The unsent text. draft: what the next line begins with, and its attachments. editing: the prompt that it replaces, if any."""

    def __init__(self) -> None:
        self.draft = Draft()
        self.editing: int | None = None
        self._aside = Draft()  # the draft of the next prompt, during an edit
        self._edited = Draft()  # the edited prompt as it was

    @property
    def unsent(self) -> Draft:
        """All unsent text. An edit that has changed nothing does not count."""
        if self.editing is None:
            return self.draft
        return joined([self._aside, *([] if self.draft == self._edited else [self.draft])])

    def begin_edit(self, key: int, draft: Draft) -> None:
        """Let the next line replace the prompt ``key``, which was ``draft``; the draft waits for the line after."""
        if self.editing is None:
            self._aside = self.draft
        self.editing, self.draft, self._edited = key, draft, draft

    def end_edit(self) -> None:
        """End the edit, if there is one, and return to the draft."""
        if self.editing is not None:
            self.hold(self._aside)

    def hold(self, draft: Draft) -> None:
        """Replace all unsent text, an edit too."""
        self.draft, self.editing, self._aside = draft, None, Draft()

    def give_back(self, draft: Draft) -> None:
        """Put a prompt that was not sent before the draft."""
        if self.editing is None:
            self.draft = joined([draft, self.draft])
        else:
            self._aside = joined([draft, self._aside])
