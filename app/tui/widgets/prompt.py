"""Where the user writes: a box that grows with its text."""

from dataclasses import dataclass

from textual import events
from textual.message import Message
from textual.widgets import TextArea

from tokamac.app.sanitise import sanitise

NEWLINE_KEYS = ("shift+enter", "ctrl+j", "alt+enter")


class Prompt(TextArea):
    """Enter sends; Shift+Enter, Ctrl+J, Alt+Enter or a backslash at the end of the line make a new one."""

    @dataclass
    class Submitted(Message):
        """The user sent ``text``, which the box no longer holds."""

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

    def give_back(self, text: str) -> None:
        """Put ``text`` before what is written by now."""
        self.text = f"{text}\n{self.text}" if self.text.strip() and self.text != text else text
        self.move_cursor(self.document.end)

    def _ends_in_backslash(self) -> bool:
        row, column = self.cursor_location
        line = self.document.get_line(row)
        return column == len(line) and line.endswith("\\")
