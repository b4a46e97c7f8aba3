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
from ...chat.guide_chat import GuideChat, GuideExchange
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
    "Writing": "send newline stop attach detach shell earlier later undo redo editor",
    "Selected message (Tab, then Up and Down)": (
        "messages edit edit_reply again continue older newer fork copy_message copy_code links"
    ),
    "Conversations": "new_chat chats open title pin folder context regenerate branches delete_chat restore_chat export import",
    "Models and settings": "choose_model models pull jobs adapter draft unload convert system_prompt settings thinking",
    "Speed and memory": "toggle_panel all_figures gauges explain steps what_if",
    "Reading": "scroll_top scroll_end page_up page_down copy",
    ALSO: "leader palette keys theme ask_guide help suspend leave",
}
"""Actions by id. Those that are not named are in the last group."""
NOTES = (  # keys that the user may change by the action's id
    "A name with a slash is a command: type it in the prompt and press Enter. After a slash or @, completions appear below the "
    "prompt: Up and Down move, Tab or Enter completes.",
    "Tab moves from the prompt to the messages, to the gauges, and back to the prompt. Esc returns to the prompt at once. Whatever "
    "you type goes to the prompt, wherever you are: on a message, one letter only chooses what to do, and Enter does it.",
    "{leader} and a letter does what an F-key does; {leader} alone lists the letters. {copy} copies a selection, or stops a "
    "reply; pressed twice, it quits.",
    "While a message is selected, the line above the prompt shows the cost of regenerating, continuing, editing or forking it, and "
    "of its other versions; the tree of branches shows it too. Most of the earlier text is still in the prompt cache. Nothing is "
    "ever overwritten: every version is kept.",
    "The side panel shows the reply that is selected, or else the last one. On one of its figures, Enter shows the formula, inputs "
    "and source. TTFT is the time to the first token. Prefill reads the prompt and is limited by arithmetic; decode writes the "
    "reply and is limited by memory bandwidth. The ceiling is the hardware limit that the bandwidth sets. A click on the line "
    "below a reply explains that reply, as {explain} does for the selected one.",
    "Scrolling up stops following; {scroll_end} follows again. Your place in the text never moves by itself.",
    "The engine runs in a process of its own. If it crashes, the chat is safe, and the engine restarts.",
    "In a shell, tokamac help lists topics in depth: kv, cache, context, memory, speed, settings and more.",
)
ON_MACS = (
    "On a Mac keyboard, F1 to F10 need fn; {leader} and a letter does the same. Terminal.app keeps PageUp, PageDown, Home and "
    "End for itself, and has no Ctrl+End: use /up, /down, /top and /end. Option+Enter starts a new line once Settings > "
    "Profiles > Keyboard > Use Option as Meta Key is on; Shift+Enter may send the prompt; Ctrl+J works everywhere. The terminal"
    " in VS Code keeps F1, F5 and F6: use /help, /figures and /branches. Every key has a command or an entry in the palette "
    "({palette}) that does the same."
)
"""What terminals on a Mac do with keys: shown first there, and last elsewhere, where a Mac may be at the other end of SSH."""
MAC = sys.platform == "darwin"


class HelpScreen(Dialog[bool]):
    """The help. What is typed narrows it. Its result is True where the user wants the guide."""

    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("f1", "leave", "Close", id="help.leave", show=False),
        Binding(
            "f7", "ask", "The guide", id="ask_guide", show=False
        ),  # the default key for it, also where the user has another
        Binding("up", "scroll(-1)", "Up", id="help.up", show=False, priority=True),
        Binding("down", "scroll(1)", "Down", id="help.down", show=False, priority=True),
        Binding("pageup,f8", "page(-1)", "Page up", id="help.page_up", show=False, priority=True),
        Binding("pagedown,f9", "page(1)", "Page down", id="help.page_down", show=False, priority=True),
        Binding("ctrl+home", "scroll(-9999)", "Top", id="help.top", show=False, priority=True),
        Binding("ctrl+end", "scroll(9999)", "End", id="help.end", show=False, priority=True),
    ]

    def __init__(self, actions: Sequence[Action]) -> None:
        super().__init__()
        self._actions = actions

    def compose(self) -> ComposeResult:
        """Yield the filter, the table and the notes."""
        with Vertical(classes="box", id="help") as box:
            box.border_title = "Help"
            yield Input(placeholder="Type to search", id="help-search", compact=True)
            with VerticalScroll(id="help-scroll", can_focus=False):
                yield Static(id="help-text", markup=False)

    def on_mount(self) -> None:
        """Name the keys."""
        asks = next(action.key_name for action in self._actions if action.id == "ask_guide")
        self.say_keys("Type to search", f"{asks} asks the guide", "Esc closes")
        self.query_one(Input).focus()

    def on_resize(self, event: Resize) -> None:
        """Lay out again."""
        del event
        self.call_after_refresh(self._show)

    @on(Input.Changed)
    def search(self) -> None:
        """Show what matches, from its beginning."""
        self._show()
        self.query_one("#help-scroll").scroll_home(animate=False)

    def _show(self) -> None:
        width = max(self.query_one("#help-scroll").content_size.width - 1, LEAST_TEXT)
        wanted = self.query_one(Input).value
        self.query_one("#help-text", Static).update(help_text(self._actions, width, mac=MAC, wanted=wanted))

    def action_scroll(self, rows: int) -> None:
        """Scroll."""
        self.query_one("#help-scroll").scroll_relative(y=rows, animate=False)

    def action_page(self, direction: int) -> None:
        """Scroll a page."""
        shown = self.query_one("#help-scroll")
        shown.scroll_relative(y=direction * max(1, shown.size.height - 1), animate=False)

    def action_leave(self) -> None:
        """Clear the search, or close."""
        search = self.query_one(Input)
        if search.value:
            search.value = ""
        else:
            self.dismiss(None)

    def action_ask(self) -> None:
        """Close, and open the guide."""
        self.dismiss(True)


def help_text(actions: Sequence[Action] = ACTIONS, width: int = 240, *, mac: bool = False, wanted: str = "") -> Content:
    """Return the whole help at ``width`` cells, or the actions and notes that have all words of ``wanted``."""
    keys, words = {action.id: action.key_name for action in actions}, wanted.casefold().split()

    def notes(*texts: str) -> list[list[Content]]:
        said = [text.format(**keys) for text in texts]
        return [list(_wrapped(text, FAINT, width)) for text in said if _has(words, text)]

    groups = [
        [*_wrapped(title, "bold", width), *(row for each in members for row in _rows(each, width))]
        for title, group in _groups(actions)
        if (members := [each for each in group if _has(words, title, *_said(each))])
    ]
    last = () if mac else (ON_MACS,)
    ids = ", ".join(action.id for action in actions if action.bound)
    asked = "_" in wanted or _has(words, IDS.format(**keys))  # else the ids of all actions are in every second search
    parts = [*(notes(ON_MACS) if mac else []), *groups, *notes(*NOTES, *last, *([f"{IDS}{ids}."] if asked else []))]
    parts = parts or [list(_wrapped(NOTHING.format(**keys), FAINT, width))]
    return Content("\n").join([line for part in parts for line in [*part, Content("")]][:-1])


IDS = "To change a key: {keys}, or [keys] in settings.toml by the action's id: "
NOTHING = "Nothing here has these words. {ask_guide} asks the guide."


def _has(words: Sequence[str], *texts: str) -> bool:
    """Whether all ``words`` are somewhere in the texts."""
    everything = " ".join(texts).casefold()
    return all(word in everything for word in words)


def _said(action: Action) -> tuple[str, ...]:
    return action.id, action.label, action.key_names, action.help, action.usage, *action.also


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
        yield from _exchange(each, width)
    if guide_chat.problem:
        yield from (row.content for row in wrapped(Content.styled(guide_chat.problem, "$text-error"), width))
    elif not guide_chat.said:
        yield Content.styled("The guide knows this app and how inference works.", FAINT)
        yield Content.styled("It does not see your chat. For example, ask:", FAINT)
        yield Content("")
        yield from (Content.styled(f"  {example}", "$text-secondary") for example in EXAMPLES)


def _exchange(said: GuideExchange, width: int) -> Iterator[Content]:
    yield from (row.content for row in wrapped(Content.styled(f"▌ {said.question}", "bold $text-primary"), width))
    yield Content("")
    prose = Prose()
    prose.finish(said.answer)
    yield from (row.frame.lead + row.row.content for row in prose.rows(width))
    if not said.over:
        yield Content.styled("…" if said.answer else "thinking …", FAINT)
