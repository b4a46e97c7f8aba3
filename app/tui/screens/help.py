"""F1: every action with its keys, from the registry. F7: questions about the app, to the embedded guide.

The guide runs in a process of its own, as long as its screen is open.
"""

import sys
from collections.abc import Iterator, Sequence

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.widgets import Input, Static

from ...backend.client import Died
from ...backend.protocol import Request
from ...chat.actions import ACTIONS, Action
from ...chat.jobs import GuideChat, GuideExchange
from ..bridge import Bridge, EngineSaid
from ..markdown.page import Prose
from ..markdown.rows import wrapped
from ..theme import FAINT
from . import Dialog

KEY_COLUMN = 14
LEAST_TEXT = 24  # cells; with fewer beside the keys, these have a line of their own
INDENT = 2
ALSO = "Other"
GROUPS: dict[str, str] = {
    "Writing": "send newline stop attach detach earlier later editor",
    "Selected message (Tab, then Up and Down)": (
        "messages edit again continue older newer fork copy_message copy_code links"
    ),
    "Conversations": "new_chat chats open title pin folder context regenerate branches delete_chat restore_chat export import",
    "Models and settings": "choose_model pull adapter unload convert system_prompt settings thinking",
    "Speed and memory": "toggle_panel gauges explain steps what_if",
    "Reading": "scroll_end page_up page_down copy",
    ALSO: "palette ask_guide help leave",
}
"""Actions by id. Those that are not named are in the last group."""
NOTES = (  # keys that the user may change by the action's id
    "A name with a slash is a command: type it in the prompt and press Enter. After a slash or @, completions appear below the "
    "prompt: Up and Down move, Tab or Enter completes.",
    "Tab moves from the prompt to the messages, to the gauges, and back to the prompt. Esc returns to the prompt at once.",
    "While a message is selected, the line above the prompt shows the cost of regenerating, continuing, editing or forking it, and "
    "of its other versions; the tree of branches shows it too. Most of the earlier text is still in the prompt cache. Nothing is "
    "ever overwritten: every version is kept.",
    "On a figure of the gauges, Enter shows its formula, inputs and source. TTFT is the time to the first token. Prefill reads the "
    "prompt and is limited by arithmetic; decode writes the reply and is limited by memory bandwidth. The ceiling is the limit "
    "that the bandwidth sets: no program can be faster.",
    "Scrolling up stops following; {scroll_end} follows again. Your place in the text never moves by itself.",
    "The engine runs in a process of its own. If it crashes, the chat is safe, and the engine restarts.",
    "In a shell, tokamac help lists topics in depth: kv, cache, context, memory, speed, settings and more.",
)
ON_MACS = (
    "On a Mac keyboard, F1 to F9 need fn. Terminal.app keeps PageUp, PageDown, Home and End for itself, and has no Ctrl+End: use "
    "/up, /down and /end. Option+Enter starts a new line once Settings > Profiles > Keyboard > Use Option as Meta Key is on; "
    "Shift+Enter may send the prompt; Ctrl+J works everywhere. The terminal in VS Code keeps F1, F5 and F6: use /help, /panel and "
    "/branches. Every key has a command or an entry in the palette ({palette}) that does the same."
)
"""What terminals on a Mac do with keys: shown first there, and last elsewhere, where a Mac may be at the other end of SSH."""
MAC = sys.platform == "darwin"


class HelpScreen(Dialog[bool]):
    """The help. Its result is True where the user wants the guide."""

    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("f1", "leave", "Close", id="help.leave", show=False),
        Binding(
            "f7", "ask", "The guide", id="ask_guide", show=False
        ),  # the default key for it, also where the user has another
    ]

    def __init__(self, actions: Sequence[Action]) -> None:
        super().__init__()
        self._actions = actions

    def compose(self) -> ComposeResult:
        """Yield the table and the notes."""
        with VerticalScroll(classes="box", id="help") as box:
            box.border_title = "Help"
            yield Static(id="help-text", markup=False)

    def on_mount(self) -> None:
        """Name the keys."""
        asks = next(action.key_name for action in self._actions if action.id == "ask_guide")
        self.say_keys(f"{asks} asks the guide", "Esc closes")

    def on_resize(self, event: Resize) -> None:
        """Lay out again."""
        del event
        self.call_after_refresh(self._show)

    def _show(self) -> None:
        width = max(self.query_one("#help").content_size.width - 1, LEAST_TEXT)
        self.query_one("#help-text", Static).update(help_text(self._actions, width, mac=MAC))

    def action_ask(self) -> None:
        """Close, and open the guide."""
        self.dismiss(True)


def help_text(actions: Sequence[Action] = ACTIONS, width: int = 240, *, mac: bool = False) -> Content:
    """Return the whole help at ``width`` cells."""
    keys = {action.id: action.key_name for action in actions}
    lines: list[Content] = [*_wrapped(ON_MACS.format(**keys), FAINT, width), Content("")] if mac else []
    for title, members in _groups(actions):
        lines += _wrapped(title, "bold", width)
        lines += [*(row for each in members for row in _rows(each, width)), Content("")]
    for note in NOTES if mac else (*NOTES, ON_MACS):
        lines += [*_wrapped(note.format(**keys), FAINT, width), Content("")]
    return Content("\n").join(lines[:-1])


def _wrapped(text: str, style: str, width: int) -> Iterator[Content]:
    return (row.content for row in wrapped(Content.styled(text, style), width))


def _groups(actions: Sequence[Action]) -> Iterator[tuple[str, list[Action]]]:
    """Yield the groups that have members, in order; actions that no group names come last."""
    by_id = {action.id: action for action in actions}
    named = {name for names in GROUPS.values() for name in names.split()}
    rest = [action.id for action in actions if action.id not in named]
    for title, names in GROUPS.items():
        wanted = [*rest, *names.split()] if title == ALSO else names.split()
        if members := [by_id[name] for name in wanted if name in by_id]:
            yield title, members


def _rows(action: Action, width: int) -> Iterator[Content]:
    """Yield the keys, and beside them the help and the command; long keys have a row of their own."""
    keys, command = action.key_names, action.usage.replace(" ", "\u00a0")  # it is not split
    does = Content(action.help) + (Content.styled(f"  {command}", FAINT) if command else Content(""))
    column = KEY_COLUMN if width >= KEY_COLUMN + LEAST_TEXT else INDENT
    beside = len(keys) < column
    if not beside:
        yield from _wrapped(keys, "bold $text-primary", width)
    for index, row in enumerate(wrapped(does, width - column)):
        lead = keys if beside and index == 0 else ""
        yield Content.styled(lead.ljust(column), "bold $text-primary") + row.content


EXAMPLES = ("How do I choose another model?", "What does --kv-bits 8,4 do?", "Why is decode memory-bound?")


class GuideScreen(Dialog[None]):
    """A short exchange with the guide, which knows the app and how inference works, but does not see the chat."""

    CSS_PATH = "guide.tcss"
    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("f7", "leave", "Close", id="guide.leave", show=False),
        Binding("pageup,f8", "page(-1)", "Page up", id="guide.page_up", show=False),
        Binding("pagedown,f9", "page(1)", "Page down", id="guide.page_down", show=False),
    ]

    def __init__(self, bridge: Bridge, question: str = "") -> None:
        super().__init__()
        self.guide_chat = GuideChat()
        self._bridge = bridge
        self._question = question

    def compose(self) -> ComposeResult:
        """Yield the exchange and the input line."""
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
            self._ask_process(self.guide_chat.ask(self._question))

    def on_unmount(self) -> None:
        """End the process, which frees the guide's memory."""
        self._bridge.end()

    def on_resize(self, event: Resize) -> None:
        """Lay out again."""
        del event
        self.call_after_refresh(self._show)

    @on(Input.Submitted)
    def ask(self, message: Input.Submitted) -> None:
        """Ask the question, unless an answer is running. After a failure, start a new exchange in a new process."""
        question = message.value.strip()
        if question and not self.guide_chat.answering:
            message.input.value = ""
            if self.guide_chat.problem:
                self.guide_chat = GuideChat()
                self._start()
            self._ask_process(self.guide_chat.ask(question))
            self._show()

    def on_engine_said(self, message: EngineSaid) -> None:
        """Take what the guide's process says."""
        message.stop()
        if message.process_number == self._bridge.process_number:
            if isinstance(message.event, Died):
                self._bridge.end()
            self._ask_process(self.guide_chat.on_event(message.event))
            self._show()

    def action_page(self, direction: int) -> None:
        """Scroll a page."""
        said = self.query_one("#guide-said")
        said.scroll_relative(y=direction * max(1, said.size.height - 1), animate=False)

    def _start(self) -> None:
        self._bridge.start()
        self._ask_process(self.guide_chat.start())

    def _ask_process(self, requests: list[Request]) -> None:
        for request in requests:
            self._bridge.ask(request)
        self._bridge.set_busy(self.guide_chat.busy)

    def _show(self) -> None:
        keys = ("Enter asks a new guide" if self.guide_chat.problem else "Enter asks", "Esc closes")
        if keys != self._keys:
            self.say_keys(*keys)
        said = self.query_one("#guide-said")
        width = max(said.content_size.width - 1, 10)
        self.query_one("#guide-text", Static).update(Content("\n").join(_answer_rows(self.guide_chat, width)))
        said.scroll_end(animate=False)


def _answer_rows(guide_chat: GuideChat, width: int) -> Iterator[Content]:
    for each in guide_chat.said:
        yield from _said(each, width)
    if guide_chat.problem:
        yield from (row.content for row in wrapped(Content.styled(guide_chat.problem, "$text-error"), width))
    elif not guide_chat.said:
        yield Content.styled("The guide knows this app and how inference works.", FAINT)
        yield Content.styled("It does not see your chat. For example, ask:", FAINT)
        yield Content("")
        yield from (Content.styled(f"  {example}", "$text-secondary") for example in EXAMPLES)


def _said(said: GuideExchange, width: int) -> Iterator[Content]:
    yield from (row.content for row in wrapped(Content.styled(f"▌ {said.question}", "bold $text-primary"), width))
    yield Content("")
    prose = Prose()
    prose.finish(said.answer)
    yield from (row.frame.lead + row.row.content for row in prose.rows(width))
    if not said.over:
        yield Content.styled("…" if said.answer else "thinking …", FAINT)
