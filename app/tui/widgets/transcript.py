"""The conversation on the screen. It follows the end until the reader scrolls away, and again when they come back to it."""

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from tokamac.app.tui.conversation import Reply
from tokamac.app.tui.widgets.message import ReplyMessage, UserMessage
from tokamac.engine.events import TextKind

WORDMARK = "▀█▀ █▀█ █▄▀ █▀█ █▀▄▀█ █▀█ █▀▀\n █  █▄█ █ █ █▀█ █ ▀ █ █▀█ █▄▄"


class Welcome(Static):
    """What an empty chat shows."""

    def __init__(self) -> None:
        hints = (
            ("Enter", "sends"),
            ("Ctrl+J", "starts a new line"),
            ("Ctrl+O", "chooses a model"),
            ("F1", "shows every key"),
        )
        lines = [
            Content.styled(key.rjust(7), "$primary") + "  " + Content.styled(does, "$foreground 70%")
            for key, does in hints
        ]
        title = Content.styled(WORDMARK, "$primary")
        text = Content.styled("A model on this machine. Nothing leaves it.", "$foreground 70%")
        super().__init__(Content("\n").join([title, Content(""), text, Content(""), *lines]), markup=False)


class Transcript(VerticalScroll, can_focus=False):
    """The turns, oldest first."""

    def compose(self) -> ComposeResult:
        """Yield the welcome."""
        yield Welcome()

    def on_mount(self) -> None:
        """Begin empty."""
        self.add_class("-empty")

    @property
    def following(self) -> bool:
        """Whether the end stays in view."""
        return self.max_scroll_y == 0 or not self._anchor_released

    def release_anchor(self) -> None:
        """Stop following, as any scrolling does; scrolling that ends at the end follows on (Textual would not notice)."""
        super().release_anchor()
        self.call_after_refresh(self._anchor_at_end)

    def _anchor_at_end(self) -> None:
        if self._anchor_released and min(self.scroll_y, self.scroll_target_y) >= self.max_scroll_y:
            self._anchor_released = False

    def begin(self, prompt: str, model: str, *, share: float, again: bool) -> None:
        """Show ``prompt`` and room for its reply, drawn with ``share`` of a core; ``again``: in place of the last reply."""
        self.remove_class("-empty")
        self.query(Welcome).remove()
        replies = self.query(ReplyMessage)
        if again and replies:
            replies.last().remove()
            self.mount(ReplyMessage(model, share))
        else:
            self.mount(UserMessage(prompt), ReplyMessage(model, share))
        self.follow()

    def add(self, text: str, kind: TextKind) -> None:
        """Append to the running reply."""
        self.query(ReplyMessage).last().add(text, kind)

    def end(self, reply: Reply) -> None:
        """Close the running reply."""
        self.query(ReplyMessage).last().end(reply)

    def clear(self) -> None:
        """Show an empty chat."""
        self.remove_children()
        self.add_class("-empty")
        self.mount(Welcome())

    def page(self, direction: int) -> None:
        """Scroll a page up (−1) or down (1). Where all is in view there is nothing to scroll, and following goes on."""
        if self.max_scroll_y > 0:
            self.scroll_relative(y=direction * max(1, self.container_size.height - 1), animate=False)

    def follow(self) -> None:
        """Jump to the end and stay there."""
        self.anchor()
