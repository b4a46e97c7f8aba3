"""Where the user writes: a box that grows with its text, and holds what goes with it."""

from dataclasses import dataclass

from textual import events
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import TextArea

from tokamac.app.sanitise import sanitise
from tokamac.app.store.values import Attachment
from tokamac.app.tui import slash
from tokamac.app.tui.actions import by_slash
from tokamac.app.tui.attachments import Draft, is_long, pasted
from tokamac.app.tui.command_names import Calling, calling
from tokamac.app.tui.completion import Naming, naming
from tokamac.app.tui.widgets.offers import Offers

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
        written = slash.parse(self.text)
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
