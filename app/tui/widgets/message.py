"""One turn on the screen: what the user wrote, and the model's reply with its thinking, its text and its verdict."""

import time

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from tokamac.app.sanitise import Sanitiser, sanitise
from tokamac.app.tui.conversation import Ending, Reply
from tokamac.app.tui.pace import Pace
from tokamac.app.tui.units import seconds
from tokamac.app.tui.verdict import verdict
from tokamac.app.tui.widgets.prose import Prose
from tokamac.engine.events import TextKind

LOOK_S = 1 / 15
ENDINGS: dict[Ending, str] = {
    "stop": "",
    "length": "cut at the token limit",
    "cancelled": "stopped",
    "lost": "lost with the engine",
    "failed": "failed",
}


class UserMessage(Static):
    """What the user wrote, verbatim."""

    def __init__(self, text: str) -> None:
        super().__init__(Content(sanitise(text)), markup=False)


class Thinking(Static):
    """The model's thinking: open while it goes on, folded into one line after; Enter or a click unfolds it."""

    can_focus = True

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._text = ""
        self._seconds: float | None = None
        self.folded = False

    def add(self, text: str) -> None:
        """Append ``text``; ``look`` shows it."""
        self._text += text

    def look(self) -> None:
        """Show what was added."""
        if self._text and not self.folded:
            head = "thinking …" if self._seconds is None else f"▾ thought for {seconds(self._seconds)}"
            self.update(Content.styled(head, "bold") + "\n" + self._text.strip())

    def fold(self, took_s: float | None, text: str | None = None) -> None:
        """The thinking is over: show that it was, and for how long. ``text`` replaces what was added."""
        self._text = self._text if text is None else text
        self._seconds = took_s
        self._set_folded(True)

    def _set_folded(self, folded: bool) -> None:
        self.folded = folded
        self.set_class(folded, "-folded")
        if folded:
            took = "" if self._seconds is None else f" for {seconds(self._seconds)}"
            self.update(Content(f"▸ thought{took}"))
        else:
            self.look()

    def toggle(self) -> None:
        """Fold or unfold, once the thinking is over."""
        if self._seconds is not None:
            self._set_folded(not self.folded)

    def on_click(self) -> None:
        """Unfold or fold."""
        self.toggle()

    def on_key(self, event: events.Key) -> None:
        """Unfold or fold by Enter or Space."""
        if event.key in ("enter", "space"):
            event.stop()
            self.toggle()


class ReplyMessage(Vertical):
    """A reply that grows. ``add`` is cheap; drawing happens at most 15 times a second, and more rarely where it is dear.

    share: of a core, that drawing may take.
    """

    def __init__(self, model: str, share: float) -> None:
        super().__init__()
        self._pace = Pace(share)
        self._model = model
        self._thinking = Thinking()
        self._prose = Prose()
        self._footer = Static(classes="verdict", markup=False)
        self._cleaners = {"answer": Sanitiser(), "thinking": Sanitiser()}
        self._reply: Reply | None = None
        self._dirty = False
        self._ready = False
        self._thinking_from: float | None = None

    def compose(self) -> ComposeResult:
        """Yield name, thinking, text and footer; what has nothing to show is hidden."""
        self._thinking.display = self._footer.display = False
        yield Static(self._model, classes="speaker", markup=False)
        yield self._thinking
        yield self._prose
        yield self._footer

    def on_mount(self) -> None:
        """Begin to look for what was added. A quick reply may have ended before there was room to draw it."""
        self._ready = True
        self._timer = self.set_interval(LOOK_S, self._look)
        self._draw_end()

    def add(self, text: str, kind: TextKind) -> None:
        """Append ``text``, made safe."""
        clean = self._cleaners[kind].feed(text)
        self._dirty = True
        if kind == "answer":
            self._prose.add(clean)
            self._fold_thinking()
        else:
            if self._thinking_from is None:
                self._thinking_from = time.monotonic()
                self._thinking.display = True
            self._thinking.add(clean)

    def end(self, reply: Reply) -> None:
        """Show the whole reply and what it cost."""
        self._reply = reply
        if self._ready:
            self._draw_end()

    def _draw_end(self) -> None:
        reply = self._reply
        if reply is None:
            return
        self._timer.stop()
        if reply.thinking:
            self._thinking.display = True
            self._thinking.fold(reply.thinking_s, sanitise(reply.thinking))
        self._prose.finish(sanitise(reply.text))
        ending = ENDINGS[reply.ending]
        cost = verdict(reply.metrics) if reply.metrics is not None else ""
        parts = [Content.styled(ending, "$warning"), Content(cost)]
        self._footer.update(Content(" · ").join(part for part in parts if part.plain))
        self._footer.display = bool(ending or cost)

    def _look(self) -> None:
        if self._dirty and self._pace.is_due():
            self._dirty = False
            self._thinking.look()
            self._prose.look()

    def _fold_thinking(self) -> None:
        if self._thinking_from is not None and not self._thinking.folded:
            self._thinking.fold(time.monotonic() - self._thinking_from)
