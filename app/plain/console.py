"""Terminal I/O of the plain chat: lines in, streamed text out; no cursor movement or escape sequences.

Ctrl-C sets a flag between steps instead of raising, so no step is torn. ``LineComposer`` holds unsent text.
"""

import codecs
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper

from tokamac.engine.events import TextKind

from ..chat.attachments import Draft, joined
from ..store.values import Attachment
from ..text.sanitise import Sanitiser, sanitise
from ..text.terminal import dim, is_terminal, note, quote

Complete = Callable[[str, str], list[str]]  # returns what a word can become, given the line before it and its beginning
BLOCK = '"""'  # alone on a line: the lines up to another one are one prompt
MORE = "... "  # before a line that continues a prompt


class Console:
    """stdin and stdout. typed: a person types. shown: a person reads."""

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
        """Set the history (newest first) and Tab completion."""
        if not self._edits:
            return
        with suppress(ImportError):  # not every Python has it; the line is then as the terminal edits it
            import readline

            for text in reversed([text for text in sent if text.isprintable()]):
                readline.add_history(text)
            readline.set_completer(_completer(complete))
            readline.set_completer_delims(" ")
            readline.parse_and_bind("bind ^I rl_complete" if is_libedit() else "tab: complete")
            if not is_libedit() and os.environ.get("TERM", "dumb") != "dumb":  # elsewhere a pasted line is a message
                readline.parse_and_bind("set enable-bracketed-paste on")

    @staticmethod
    def remember(remember: bool) -> None:
        """Whether lines that are read can be recalled."""
        with suppress(ImportError):
            import readline

            readline.set_auto_history(remember)

    def read(self, prompt: str, draft: str = "") -> str:
        """Return sanitized input: a line, or several by trailing backslashes or in a block.

        draft: initial text. Raises EOFError, and KeyboardInterrupt at Ctrl-C.
        """
        with self.holding():
            return sanitise(self._lines(prompt, draft))

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Buffer notes while a line is typed or another program has the terminal."""
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
        sys.stdout.write(f"{sanitise(text)}\n")
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Write a note on its own line; deferred while a line is read."""
        if self._held is not None:
            self._held.append(text)
            return
        if self._last != "\n" and self.shown:
            self._write("\n")
        note(text)

    def quote(self, lines: Iterable[tuple[str, str]]) -> None:
        """Write a consent request in full, line breaks included. Not while a line is read."""
        if self.shown:
            self.end()
        quote(lines)

    def announce(self, news: Callable[[], list[str]]) -> None:
        """Write ``news`` above the prompt, or later (without calling it) if something is typed. Thread-safe."""
        if self._held is None or not self._prompt or _typed_so_far():
            return
        if lines := news():
            sys.stdout.write("\n")
            for line in lines:
                note(line)
            sys.stdout.write(self._prompt)
            sys.stdout.flush()

    def aside(self, text: str) -> None:
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
        above = "\n" if self._replies else ""
        self.begin("")
        self._label = ""
        self._write(f"{above}{sanitise(text)}\n")

    def grow(self, text: str, kind: TextKind) -> None:
        """Write more of the reply immediately; thinking is mentioned once."""
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
        if self._last != "\n":
            self._write("\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._last = text[-1]


def is_libedit() -> bool:
    try:
        import readline
    except ImportError:
        return False
    backend = getattr(readline, "backend", None)  # from Python 3.13 on
    return backend == "editline" if backend is not None else "libedit" in (readline.__doc__ or "")


def _typed_so_far() -> bool:
    try:
        import readline
    except ImportError:
        return True  # nobody knows
    return bool(readline.get_line_buffer())


@contextmanager
def _starting_with(draft: str) -> Iterator[None]:
    """Prefill the next line with ``draft``, where this Python can."""
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
    """Adapt ``complete`` to readline's one-at-a-time protocol."""
    import readline

    def completion(text: str, state: int) -> str | None:
        fits = complete(readline.get_line_buffer()[: readline.get_begidx()], text)
        return fits[state] if state < len(fits) else None

    return completion


@contextmanager
def interruptible(act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` at every Ctrl-C, on the main thread between two steps."""
    # No effect on another thread, or where the shell ignores SIGINT (background job).
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
    came: list[bool] = []
    try:
        with interruptible(lambda: came.append(True)):
            yield
    finally:
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def noticed() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C came since. Main thread only."""
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


HEARD_S = 0.2  # a thread that is woken by Ctrl-C has stopped waiting by then


class Meanwhile:
    """Runs ``work`` on a thread every ``every_s`` seconds, only while the main thread is ``waiting`` or ``working``."""

    # Readline loses a Ctrl-C that comes between the prompt and the wait for a key: Python notes it, nothing wakes
    # the waiting thread. This thread gets it too and sends it again.

    def __init__(self, every_s: float, work: Callable[[], None]) -> None:
        self._every_s = every_s
        self._work = work
        self._waits = 0  # how many have begun
        self._over = threading.Event()
        self._turn = threading.Lock()
        self._turn.acquire()
        self._ear, self._mouth = os.pipe()
        for end in (self._ear, self._mouth):
            os.set_blocking(end, False)
        threading.Thread(target=self._run, name="meanwhile", daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Run work during the block and make Ctrl-C wake this thread. Main thread only."""
        with self.working():
            before = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(before)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Run work during the block; finishes it on exit, despite Ctrl-C. Main thread only."""
        with suppress(BlockingIOError):  # what an earlier wait was woken by
            os.read(self._ear, 4096)
        self._waits += 1
        self._turn.release()
        try:
            yield
        finally:
            with unbroken():  # without its turn back, this thread could not give it away again
                self._turn.acquire()

    def close(self) -> None:
        """Stop the thread."""
        # The pipe stays open: a wait may still name one end to the signal's handler.
        self._over.set()
        os.write(self._mouth, b"\0")

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C must wake the thread that waits
        while not self._over.is_set():
            if not select.select([self._ear], [], [], self._every_s)[0]:
                with self._turn:
                    self._work()
                continue
            with suppress(BlockingIOError):
                if signal.SIGINT in os.read(self._ear, 4096):
                    self._see_that_it_woke(self._waits)

    def _see_that_it_woke(self, wait: int) -> None:
        threading.Event().wait(HEARD_S)
        if self._turn.acquire(blocking=False):  # nobody took it back: the wait goes on
            self._turn.release()
            if wait == self._waits:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


class LineBox:
    """The input line: what it begins with when it is read, and what is attached to it."""

    def __init__(self) -> None:
        self.draft = Draft()

    def put(self, draft: Draft) -> None:
        self.draft = draft

    def give_back(self, text: str, attachments: tuple[Attachment, ...] = ()) -> None:
        self.draft = joined([Draft(text, attachments), self.draft])

    def mark(self, editing: str) -> None:
        """Show nothing: a line has no border."""
