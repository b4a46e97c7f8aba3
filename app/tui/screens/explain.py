"""F2: why a reply took as long as it did, and what would help."""

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.widgets import Static

from tokamac.app.tui.conversation import Reply
from tokamac.app.tui.explanation import explanation
from tokamac.app.tui.screens.dialog import Dialog


class ExplainScreen(Dialog[bool]):
    """The diagnosis of one of ``replies``, the last at first. The result is whether the reader wants to ask "what if"."""

    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("f2", "leave", "Close", id="explain.leave", show=False),
        Binding("left", "move(-1)", "Earlier reply", id="explain.earlier", priority=True),
        Binding("right", "move(1)", "Later reply", id="explain.later", priority=True),
        Binding("f3", "what_if", "What if", id="explain.what_if"),
    ]

    def __init__(self, replies: Sequence[Reply]) -> None:
        super().__init__()
        self._replies = replies
        self._index = len(replies) - 1

    def compose(self) -> ComposeResult:
        """Yield the box."""
        with VerticalScroll(classes="box", id="explain"):
            yield Static(id="explanation", markup=False)

    def on_mount(self) -> None:
        """Take the keys."""
        self.query_one("#explain").focus()

    def on_resize(self, event: Resize) -> None:
        """Lay out for the room there is now."""
        del event
        self.call_after_refresh(self._show)

    def _show(self) -> None:
        box, many = self.query_one("#explain"), len(self._replies) > 1
        box.border_title = f"Explain · reply {self._index + 1} of {len(self._replies)}"
        self.say_keys(*(["← → other replies"] if many else []), "F3 what if", "Esc closes")
        width = max(box.content_size.width - 1, 1)  # beside the scroll bar
        self.query_one("#explanation", Static).update(explanation(self._replies[self._index], width))

    def action_move(self, by: int) -> None:
        """Show the reply before or after."""
        index = self._index + by
        if 0 <= index < len(self._replies):
            self._index = index
            self._show()
            self.query_one("#explain").scroll_home(animate=False)

    def action_what_if(self) -> None:
        """Close, and ask what if."""
        self.dismiss(True)
