"""The plain chat's loop: a prompt, its reply, and so on; or a command of the registry, with a slash.

Ctrl-C stops a reply, or a command; twice at the prompt it leaves with 130, and at once where nobody types. The end of input leaves
with 0, or with 1 where nobody types and a reply, or loading a model, failed.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tokamac.app.exit_status import INTERRUPTED
from tokamac.app.output import note
from tokamac.app.plain.composer import Composer
from tokamac.app.plain.console import Console
from tokamac.app.plain.driver import Driver
from tokamac.app.plain.interrupts import heard, noticed, unbroken
from tokamac.app.plain.naming import NoKeys
from tokamac.app.plain.outline import Outline
from tokamac.app.plain.reading import last_turn
from tokamac.app.plain.waiting import Meanwhile
from tokamac.app.store.errors import StoreError
from tokamac.app.tui.attachments import Draft, apart, joined
from tokamac.app.tui.phase import Phase
from tokamac.app.tui.prose.code import Back
from tokamac.app.tui.purging import purge
from tokamac.app.tui.recording import LEFT, Recording
from tokamac.app.tui.run import Begun, ChatOptions, begin, open_store
from tokamac.app.tui.steps import TurnBegun

MOST_SENT = 200
LOOK_S = 2.0
"""How often it is looked, while a line is waited for, whether the model is to give the chat a title, or its memory back."""
ENDED = "No model is loaded, so the chat ends here: what follows that prompt is not read."
"""Said where nobody types, and nobody is there to choose another model. Commands are done without one."""
GREETING = "/help lists the commands. Ctrl-C stops a reply; /quit or Ctrl-D leaves."
Obey = Callable[["Repl", str], bool]
"""Does the slash command that a text is; returns whether it is one."""


def run_plain(options: ChatOptions) -> int:
    """Run the chat until the user leaves, or what is piped in ends; return the exit status.

    Raises StoreError for a chat that is not there.
    """
    from tokamac.app.plain.commands import completed, obey

    console, begun = Console(), begin(options)
    begun.session.keymap, begun.session.attended = NoKeys(), console.typed
    repl = Repl(begun, console)
    try:
        for warning in begun.warnings:
            console.note(warning)
        repl.open_store(options)
        console.prepare(repl.sent(), completed)
        repl.driver.perform(repl.driver.session.start())
        return repl.run(obey)
    finally:
        repl.close()


class Repl:
    """One plain chat. listed: ids of the chats that were listed last. outline: the versions that were.

    planned: the flags and the model of the conversion that was planned last. leaving: the user has had enough.
    """

    def __init__(self, begun: Begun, console: Console) -> None:
        self.driver = Driver(begun, console)
        self.console = console
        self.composer = Composer()
        self.code_back = Back()
        self.listed: tuple[str, ...] = ()
        self.outline: Outline | None = None
        self.planned: tuple[str, ...] = ()
        self.leaving = False
        self._meanwhile = Meanwhile(LOOK_S, self.driver.rest)

    # The loop -------------------------------------------------------------------------------------------------------------

    def run(self, obey: Obey) -> int:
        """Read and reply until the user leaves; return the exit status."""
        self.console.aside(GREETING)
        interrupts = 0
        while not self.leaving:
            try:
                text = self._read()
            except EOFError:
                self.console.aside("")
                break
            except KeyboardInterrupt:
                self.console.aside("")
                interrupts += 1
                if interrupts > 1 or not self.console.typed:
                    return INTERRUPTED
                self.console.note("Ctrl-C again leaves, as /quit does.")
                self.composer.end_edit()
                continue
            interrupts = 0
            with noticed() as interrupted:
                commanded = self._do(obey, text)
                if interrupted() and not self.console.typed:
                    return INTERRUPTED
            if not self.console.typed and self.driver.session.phase is Phase.FAILED:
                self.driver.failed = True
                if not commanded:
                    self.console.note(ENDED)
                    break
            self._take_back()
        recording = self.driver.recording
        if recording is not None and recording.chat is not None:
            self.console.aside(f"To go on: tokamac chat --chat {recording.chat}")
        return int(self.driver.failed and not self.console.typed)

    def _do(self, obey: Obey, text: str) -> bool:
        """Do what the line asks for, and wait until nobody waits for a reply; return whether it is a command.

        Raises KeyboardInterrupt where nobody types.
        """
        commanded = True
        try:
            commanded = obey(self, text)
            if not commanded:
                self._prompted(text.strip())
        except KeyboardInterrupt:
            if not self.console.typed:
                raise
            self.console.note("Stopped.")
            self.driver.stop()
        self.driver.settle()
        return commanded

    def _prompted(self, text: str) -> None:
        """Ask ``text``. Nothing, in place of a prompt that was given back, gives that one up; what goes with it stays."""
        composer, draft = self.composer, self.composer.draft
        offered = draft.text if self.console.typed and self.console.shown and composer.editing is None else ""
        if offered and not text:
            composer.hold(Draft("", draft.attachments))
        elif text or draft.attachments:
            self.ask(text)

    def _read(self) -> str:
        """Return the next line. Raises EOFError, KeyboardInterrupt."""
        self.driver.before_wait()
        try:
            with self._meanwhile.waiting():
                return self.console.read("you> ", self.composer.draft.text if self.console.typed else "")
        finally:
            self.driver.after_wait()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Let another program have the terminal; the engine is heard meanwhile. Ctrl-C is for that program."""
        with self.console.holding(), heard(lambda: None), self._meanwhile.working():
            yield

    def ask(self, text: str) -> None:
        """Send ``text``, with what is attached, in place of the prompt that is edited if there is one."""
        composer, draft = self.composer, Draft(text, self.composer.draft.attachments)
        if composer.editing is None:
            with unbroken():
                composer.hold(Draft())
                self.driver.perform(self.driver.session.submit(draft.text, draft.attachments))
        else:
            self._ask_anew(composer.editing, draft)
        if self.driver.recording is not None:
            self.driver.recording.drafted(composer.unsent.whole)

    def _ask_anew(self, key: int, draft: Draft) -> None:
        """Send ``draft`` in place of the prompt ``key``; where that is refused, it goes on being edited."""
        self.driver.settle(loaded=True)
        with unbroken():
            steps = self.driver.session.edit(key, draft.text, draft.attachments)
            if any(isinstance(step, TurnBegun) for step in steps):
                self.composer.end_edit()
            else:
                self.composer.draft = draft
            self.driver.perform(steps)

    def _take_back(self) -> None:
        """Put what was not sent before the next line."""
        returned, self.driver.returned = self.driver.returned, Draft()
        if returned.whole:
            self.composer.give_back(returned)

    # What is kept ---------------------------------------------------------------------------------------------------------

    def open_store(self, options: ChatOptions) -> None:
        """Open the store, and the chat to begin with. Raises StoreError where that one is not there."""
        try:
            store, chosen = open_store(options)
        except StoreError as error:
            if options.chat is not None:
                raise
            note(f"Chats are not kept: {error.one_line()}")
            return
        driver = self.driver
        driver.recording = Recording(driver.session, store, driver.memory, self.console.note, time.monotonic)
        if chosen is not None:
            self.open(chosen)
        elif options.resume:
            self.console.note("No chat is kept yet: this is a new one.")

    @unbroken()
    def open(self, chat: str) -> None:
        """Hold the stored conversation ``chat``, and read out how it ended. Raises StoreError."""
        driver, recording = self.driver, self.driver.recording
        if recording is None:
            return
        unkept = self.keep_draft()  # before it is read: the chat may be the one that is held
        left = recording.chat
        (tree, draft), own = recording.read(chat), recording.own(chat)
        if chat != left:
            self.tell_left(unkept)
        driver.memory.hold(own, driver.session)
        driver.perform(driver.session.open(tree))
        recording.hold(chat, tree, draft)
        self.composer.hold(joined([apart(draft), unkept]))
        if self.console.shown:
            self.console.say(f"{recording.store.chat(chat).title} ({chat})\n{last_turn(driver.session.turns)}")

    def keep_draft(self) -> Draft:
        """Keep what was not sent with the chat that is held; return what nothing keeps."""
        recording, unsent = self.driver.recording, self.composer.unsent
        return Draft() if recording is not None and recording.drafted(unsent.whole) else unsent

    def tell_left(self, unkept: Draft) -> None:
        """Say where the draft is when another chat is held, if there is one and it was kept."""
        if self.composer.unsent.whole and not unkept.whole:
            self.console.note(LEFT)

    def sent(self) -> list[str]:
        """Return what the user sent before, newest first."""
        recording = self.driver.recording
        return [] if recording is None else recording.store.history(MOST_SENT)

    def close(self) -> None:
        """Keep what was not sent and the reply that runs, remove what was deleted long ago, and end the engine."""
        try:
            if (recording := self.driver.recording) is not None:
                recording.close(self.composer.unsent.whole)
                if problem := purge(recording.store.file):
                    self.console.note(problem)
        finally:
            self._meanwhile.close()
            self.driver.close()
