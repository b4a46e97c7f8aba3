"""Main loop of the plain chat: a prompt and its reply, or a slash command."""

# Ctrl-C stops a reply or command; twice at the prompt, or once in a script, quits with 130. End of input quits with 0, or
# in a script with 1 if a reply or a load failed.
#
#     session ─ steps ─▶ Chat ─▶ process, console, recording        process ─ reader thread ─▶ events ─▶ Repl ─▶ session
#
# The main thread steps the session; while it waits for a line another thread does (idle unload, title). The store belongs
# to the main thread: it is read before that wait, and the title is written after it.

from collections.abc import Sequence
from pathlib import Path

from .. import INTERRUPTED, prompt_files
from ..chat import actions, commands
from ..chat.actions import ACTIONS, Keymap
from ..chat.attachments import Draft, shell_command, unescaped
from ..chat.recording import purge
from ..chat.settings_form import GROUPS
from ..chat.start import ChatOptions, begin, open_store
from ..chat.steps import EnginePhase
from ..store.values import StoreError
from ..text.terminal import note
from .commands import DONE, LISTS, available
from .console import Console, noticed
from .view import RESUMES, PlainView

MOST_SENT = 200
# Of a script, in which nobody can choose another model. Commands work without one.
ENDED = "No model is loaded, so the chat ends here. The rest of the input is not read."
GREETING = "/help lists the commands. Ctrl-C stops a reply; /quit or Ctrl-D quits."
INSTEAD = {
    **dict.fromkeys(("toggle_panel", "all_figures"), " Here, /gauges prints the figures."),
    "search_prompts": " Here, Ctrl-R searches what you sent, where this Python has readline.",
}


class NoKeys(Keymap):
    def __init__(self) -> None:
        super().__init__(tuple(action.for_plain for action in ACTIONS))

    def key(self, action: str) -> str:
        return "Ctrl-C" if action == "stop" else super().key(action)


def completed(before: str, begun: str, prompts: Sequence[str] = ()) -> list[str]:
    """Return what the word that has ``begun``, after the line ``before`` it, can become. prompts: names of files."""
    if not before:
        names = [f"/{action.slash}" + (" " if action.argument else "") for action in available()]
        names += [f"/{name} " for name in prompts]
        return [name for name in names if begun.startswith("/") and name.startswith(begun.lower())]
    written = actions.parse(before)
    sets = written is not None and written.action is actions.by_slash("settings") and not written.argument
    fields = (field.name for group in GROUPS for field in group.fields)
    return [f"{name} " for name in fields if sets and name.startswith(begun)]


def run_plain(options: ChatOptions) -> int:
    """Run until the user quits or input ends; return the exit status. Raises StoreError for a missing chat."""
    console, begun = Console(), begin(options)
    begun.session.keymap, begun.session.attended = NoKeys(), console.typed
    repl = Repl(begun, console)
    try:
        for warning in begun.warnings:
            console.note(warning)
        repl.begin_recording(options)
        folder = commands.prompt_folder(repl.chat)
        console.prepare(repl.sent(), lambda before, begun: completed(before, begun, prompt_files.names(folder)))
        repl.chat.perform(repl.chat.session.start())
        if options.prompt is not None:
            repl.send_first(options.prompt)
        return repl.run()
    finally:
        repl.close()


class Repl(PlainView):
    """Reads lines, and does what they ask for."""

    def open(self, action: str, argument: str = "") -> None:
        LISTS[action](self, argument)

    # The loop -------------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Read and reply until the user leaves; return the exit status."""
        self.console.aside(GREETING)
        interrupts, goes_on = 0, True
        while goes_on and not self._leaving:
            try:
                text = self._read()
                interrupts = 0
                goes_on = self._take_line(text)
            except EOFError:
                self.console.aside("")
                break
            except KeyboardInterrupt:
                self.console.aside("")
                interrupts += 1
                if interrupts > 1 or not self.console.typed:
                    return INTERRUPTED
                self.console.note("Press Ctrl-C again to quit.")
                self.chat.composer.end_edit()
        recording = self.chat.recording
        if recording is not None and recording.chat is not None:
            self.console.aside(f"To continue: tokamac chat --chat {recording.chat}")
        return int(self.failed and not self.console.typed)

    def _read(self) -> str:
        """Return the next line. Raises EOFError, KeyboardInterrupt."""
        for line in self.jobs.news():
            self.console.note(line)
        self._catch_up()
        self._entitle()
        recording = self.chat.recording
        if recording is not None:
            recording.look()
        self._may_title = recording is not None and recording.may_be_entitled()
        try:
            with self._meanwhile.waiting():
                return self.console.read(
                    "private> " if self.chat.private else "you> ", self.line.draft.text if self.console.typed else ""
                )
        finally:
            self._entitle()

    def _entitle(self) -> None:
        title, self._title = self._title, ""
        if title and self.chat.recording is not None:
            self.chat.recording.entitled(title)

    def _take_line(self, text: str) -> bool:
        """Do what the line asks for; return whether the chat goes on. Raises KeyboardInterrupt where nobody types."""
        with noticed() as interrupted:
            commanded = self._do(text)
            if interrupted() and not self.console.typed:
                raise KeyboardInterrupt
        if not self.console.typed and self.chat.session.engine.phase is EnginePhase.FAILED:
            self.failed = True
            if not commanded:
                self.console.note(ENDED)
                return False
        self._take_back()
        return True

    def _do(self, text: str) -> bool:
        """Do what the line asks for, and wait until nobody waits for a reply; return whether it is a command.

        Raises KeyboardInterrupt where nobody types.
        """
        session = self.chat.session
        begun = commanded = False
        while True:
            try:
                if not begun:
                    begun = commanded = True
                    commanded = self._obey(text)
                    if not commanded:
                        self._prompted(unescaped(text.strip()))
                self.settle()
                return commanded
            except KeyboardInterrupt:  # also just before settle hears of it itself
                if not self.console.typed:
                    raise
                waited = session.engine.replying or bool(session.queued)
                if waited:
                    self.chat.perform(session.stop())
                else:
                    self.console.note("Stopped.")

    def _obey(self, text: str) -> bool:
        """Do the slash command that ``text`` is, or say why not; return whether it is one."""
        written = actions.parse(text, multiline=True)
        if (named := commands.written_prompt(self.chat, text.strip())) is not None:
            self.chat.attempt(lambda: self._send_file(*named))
            return True
        if written is None and (to_run := shell_command(text)) is not None:
            written = actions.Command("!", to_run, actions.by_slash("shell"))
        if written is None:
            return False
        action = None if written.action is None else written.action.for_plain
        if (why := actions.refused(written, action, "/help")) or action is None:
            self.tell(why)
        elif action.id in DONE:
            if action.id == "thinking" and self.chat.session.engine.info is None and not self.console.typed:
                self.wait()  # a script's line: the model says what it supports
            commands.do(self.chat, action.id, written.argument)
        else:
            instead = INSTEAD.get(action.id, "")
            self.tell(f"/{action.slash} needs the full screen: quit, and open it with tokamac chat.{instead}")
        return True

    def send_first(self, name: str) -> None:
        self.chat.attempt(lambda: self._send_file(name, ""))
        self.settle()

    def _send_file(self, name: str, arguments: str) -> None:
        attachments = self.line.draft.attachments
        commands.send_prompt(self.chat, name, arguments, attachments)
        self.chat.composer.hold(Draft())

    def _prompted(self, text: str) -> None:
        """Send ``text``. Nothing, in place of a prompt that was given back, gives that one up; what goes with it stays."""
        composer, draft = self.chat.composer, self.line.draft
        offered = draft.text if self.console.typed and self.console.shown and composer.editing is None else ""
        if offered and not text:
            composer.hold(Draft("", draft.attachments))
        elif text or draft.attachments:
            self.send(text)

    def _take_back(self) -> None:
        returned, self._returned = self._returned, Draft()
        if returned.whole:
            self.chat.composer.give_back(returned)
        failed, self._failed_prompt = self._failed_prompt, None
        if failed is not None and not self.chat.composer.unsent.whole:
            self.chat.composer.begin_edit(failed.key, failed.draft)

    # What is saved --------------------------------------------------------------------------------------------------------

    def begin_recording(self, options: ChatOptions) -> None:
        """Save the chat from here on, and open the one to begin with. Raises StoreError where that one is not there."""
        try:
            store, chosen = open_store(options)
        except StoreError as error:
            if options.chat is not None:
                raise
            note(f"Chats are not saved: {error.one_line()}")
            return
        self.chat.record(store, chosen)
        if options.private:
            self.chat.keep_nothing()
            self.forget(private=True)
        if options.resume and chosen is None:
            self.console.note("There is no saved chat yet. This is a new one.")

    def sent(self) -> Sequence[str]:
        """Return what the user sent before, newest first."""
        recording = self.chat.recording
        return [] if recording is None else recording.store.history(MOST_SENT)

    def close(self) -> None:
        """Keep what was not sent and the reply that runs, remove what was deleted long ago, and end the engine."""
        try:
            if (file := self.chat.close_recording()) and (problem := purge(Path(file))):
                self.console.note(problem)
        finally:
            self._meanwhile.close()
            if self.jobs.busy:
                self.console.note(f"Stopped {'; '.join(self.jobs.lines())}. {RESUMES}")
            self.jobs.close()
            self.chat.preferences.close()
            self.chat.bridge.close()
