"""F7: questions about the app itself, to the embedded guide. It runs in a process of its own, for as long as this is open."""

from collections.abc import Iterator

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.widgets import Input, Static

from tokamac.app.backend.client import Died
from tokamac.app.backend.wire import Request
from tokamac.app.tui.bridge import Bridge, EngineSaid
from tokamac.app.tui.guidance import Guidance, Said
from tokamac.app.tui.prose.prose import Prose
from tokamac.app.tui.prose.rows import wrapped
from tokamac.app.tui.screens.dialog import Dialog
from tokamac.app.tui.theme import FAINT

EXAMPLES = ("How do I choose another model?", "What does --kv-bits 8,4 do?", "Why is decode memory-bound?")


class GuideScreen(Dialog[None]):
    """A short exchange with the guide: it knows the app and how inference works, and not what is said in the chat."""

    CSS_PATH = "guide.tcss"
    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("f7", "leave", "Close", id="guide.leave", show=False),
        Binding("pageup,f8", "page(-1)", "Page up", id="guide.page_up", show=False),
        Binding("pagedown,f9", "page(1)", "Page down", id="guide.page_down", show=False),
    ]

    def __init__(self, bridge: Bridge, question: str = "") -> None:
        super().__init__()
        self.guidance = Guidance()
        self._bridge = bridge
        self._question = question

    def compose(self) -> ComposeResult:
        """Yield the exchange, and the box to ask in."""
        with Vertical(classes="box", id="guide") as box:
            box.border_title = "The guide"
            with VerticalScroll(id="guide-said", can_focus=False):
                yield Static(id="guide-text", markup=False)
            yield Input(placeholder="Ask about this app, or how it works", id="guide-question", compact=True)

    def on_mount(self) -> None:
        """Start the guide's process."""
        self.query_one(Input).focus()
        self._bridge.post = self.post_message
        self._start()
        if self._question:
            self._ask_process(self.guidance.ask(self._question))

    def on_unmount(self) -> None:
        """End it: the guide gives its memory back."""
        self._bridge.end()

    def on_resize(self, event: Resize) -> None:
        """Lay out for the room there is now."""
        del event
        self.call_after_refresh(self._show)

    @on(Input.Submitted)
    def ask(self, message: Input.Submitted) -> None:
        """Ask what is written, unless an answer is being written. After a failure all begins anew: the exchange was part of it."""
        question = message.value.strip()
        if question and not self.guidance.answering:
            message.input.value = ""
            if self.guidance.problem:
                self.guidance = Guidance()
                self._start()
            self._ask_process(self.guidance.ask(question))
            self._show()

    def on_engine_said(self, message: EngineSaid) -> None:
        """Take what the guide's process says."""
        message.stop()
        if message.life == self._bridge.life:
            if isinstance(message.event, Died):
                self._bridge.end()
            self._ask_process(self.guidance.on_event(message.event))
            self._show()

    def action_page(self, direction: int) -> None:
        """Scroll a page."""
        said = self.query_one("#guide-said")
        said.scroll_relative(y=direction * max(1, said.size.height - 1), animate=False)

    def _start(self) -> None:
        self._bridge.start()
        self._ask_process(self.guidance.start())

    def _ask_process(self, requests: list[Request]) -> None:
        for request in requests:
            self._bridge.ask(request)
        self._bridge.set_busy(self.guidance.busy)

    def _show(self) -> None:
        keys = ("Enter asks a new guide" if self.guidance.problem else "Enter asks", "Esc closes")
        if keys != self._keys:
            self.say_keys(*keys)
        said = self.query_one("#guide-said")
        width = max(said.content_size.width - 1, 10)
        self.query_one("#guide-text", Static).update(Content("\n").join(_rows(self.guidance, width)))
        said.scroll_end(animate=False)


def _rows(guidance: Guidance, width: int) -> Iterator[Content]:
    for each in guidance.said:
        yield from _said(each, width)
    if guidance.problem:
        yield from (row.content for row in wrapped(Content.styled(guidance.problem, "$text-error"), width))
    elif not guidance.said:
        yield Content.styled("The guide knows this app and how inference works.", FAINT)
        yield Content.styled("It does not see the chat, which stays as it is. Ask for example:", FAINT)
        yield Content("")
        yield from (Content.styled(f"  {example}", "$text-secondary") for example in EXAMPLES)


def _said(said: Said, width: int) -> Iterator[Content]:
    yield from (row.content for row in wrapped(Content.styled(f"▌ {said.question}", "bold $text-primary"), width))
    yield Content("")
    prose = Prose()
    prose.finish(said.answer)
    yield from (row.frame.lead + row.row.content for row in prose.rows(width))
    if not said.over:
        yield Content.styled("…" if said.answer else "thinking …", FAINT)
