"""Where the user writes: a box that grows with its text."""

from dataclasses import dataclass

from textual import events
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import TextArea

from tokamac.app.sanitise import sanitise

NEWLINE_KEYS = ("shift+enter", "ctrl+j", "alt+enter")
PAUSE_S = 0.4  # longer than the gaps of a typist within a sentence
LONG_PASTE = 400  # characters, after which nobody need wait for a pause


class Prompt(TextArea):
    """Enter sends; Shift+Enter, Ctrl+J, Alt+Enter or a backslash at the end of the line make a new one."""

    @dataclass
    class Submitted(Message):
        """The user sent ``text``, which the box no longer holds."""

        text: str

    @dataclass
    class Paused(Message):
        """The user rests; ``text`` is what they have written so far."""

        text: str

    def __init__(self) -> None:
        super().__init__(
            soft_wrap=True,
            show_line_numbers=False,
            tab_behavior="focus",
            highlight_cursor_line=False,
            placeholder="Write a message",
            compact=True,
        )
        self._rest: Timer | None = None
        self._restyled = True

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

    def on_key(self, event: events.Key) -> None:
        """Send, or break the line."""
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            if self._ends_in_backslash():
                row, column = self.cursor_location
                self.replace("\n", (row, column - 1), (row, column))
            else:
                self.submit()
        elif event.key in NEWLINE_KEYS:
            event.stop()
            event.prevent_default()
            self.insert("\n")

    def submit(self) -> None:
        """Send what is written. The box is emptied here and now: what is typed next, however fast, is the next message."""
        text = self.text
        if text.strip():
            self.clear()
        self.post_message(self.Submitted(text))

    def on_paste(self, event: events.Paste) -> None:
        """Let no control character in: what stands in the box is written to the terminal as it is."""
        event.text = sanitise(event.text)
        if len(event.text) >= LONG_PASTE:
            self.call_later(self._pause)  # once the text stands in the box

    def on_text_area_changed(self) -> None:
        """Begin to wait for a pause."""
        self.await_pause()

    def await_pause(self) -> None:
        """Say ``Paused`` when nothing was written for a moment; called again, wait anew."""
        if self._rest is not None:
            self._rest.stop()
        self._rest = self.set_timer(PAUSE_S, self._pause)

    def _pause(self) -> None:
        self.post_message(self.Paused(self.text))

    def give_back(self, text: str) -> None:
        """Put ``text`` before what is written by now."""
        self.text = f"{text}\n{self.text}" if self.text.strip() and self.text != text else text
        self.move_cursor(self.document.end)

    def _ends_in_backslash(self) -> bool:
        row, column = self.cursor_location
        line = self.document.get_line(row)
        return column == len(line) and line.endswith("\\")
