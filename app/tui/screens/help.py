"""F1: every action with its keys, from the registry, grouped by what one wants to do."""

import sys
from collections.abc import Iterable, Iterator, Sequence

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.widgets import Static

from tokamac.app.tui.actions import ACTIONS, Action
from tokamac.app.tui.prose.rows import wrapped
from tokamac.app.tui.screens.dialog import Dialog
from tokamac.app.tui.theme import FAINT

KEY_COLUMN = 14
LEAST_TEXT = 24  # cells; where a line has less beside the keys, they have a line of their own
INDENT = 2
ALSO = "Also"
GROUPS: dict[str, tuple[str, ...]] = {
    "Writing": ("send", "newline", "stop", "attach", "detach", "earlier", "later", "editor"),
    "A message that is pointed at (Tab, then Up and Down)": (
        "messages",
        "edit",
        "again",
        "continue",
        "older",
        "newer",
        "fork",
        "copy_message",
        "copy_code",
    ),
    "Conversations": (
        "new_chat",
        "chats",
        "open",
        "title",
        "regenerate",
        "branches",
        "delete_chat",
        "restore_chat",
        "export",
        "import",
    ),
    "Models and settings": (
        "choose_model",
        "pull",
        "adapter",
        "unload",
        "convert",
        "system_prompt",
        "settings",
        "thinking",
    ),
    "Speed and memory": ("toggle_panel", "gauges", "explain", "what_if"),
    "Reading": ("scroll_end", "page_up", "page_down", "copy"),
    ALSO: ("palette", "ask_guide", "help", "leave"),
}
"""Actions by id. One that is not named stands in the last group."""
NOTES = (  # keys that the user may change by the action's id
    "What stands behind a slash is the same as a command: written in the prompt, Enter does it. After a slash, as after @, what "
    "fits is offered below the prompt: Up and Down choose, Tab or Enter completes.",
    "Tab goes from the prompt to the messages, on to the gauges, and back to the prompt; Esc does so at once.",
    "At a message, the line above the prompt says what making it again, going on, editing, forking or another version would "
    "cost: most of what was read before is still in the prompt cache; in the tree of versions each says the same. Nothing is "
    "ever overwritten: every version stays beside the others.",
    "At a figure of the gauges, Enter says how it is computed, from what, and where that comes from. TTFT is the wait for the "
    "first token; prefill is the prompt being read, bound by arithmetic; decode is the reply being written, bound by memory "
    "bandwidth. The ceiling is what the bandwidth allows: no program can be faster.",
    "Scrolling up stops following, {scroll_end} takes it up again. Your place in the text is never moved.",
    "The engine runs in a process of its own. If it dies, the chat stays, and it is started again.",
)
ON_MACS = (
    "On a Mac keyboard F1 to F9 need fn. Terminal.app keeps PageUp, PageDown, Home and End for itself, and has no Ctrl+End: /up, "
    "/down and /end do the same. Option+Enter is a new line once Settings > Profiles > Keyboard > Use Option as Meta Key is on "
    "there, and Shift+Enter may send the prompt; Ctrl+J is a new line everywhere. The terminal in VS Code keeps F1, F5 and F6: "
    "/help, /panel and /branches do the same. What a key does, a command or an entry of the palette ({palette}) does as well."
)
"""What terminals there do with keys: said first on a Mac, and last elsewhere, which may be at the other end of SSH."""
MAC = sys.platform == "darwin"


class HelpScreen(Dialog[bool]):
    """The help. Its result is True where the guide is to be asked."""

    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("f1", "leave", "Close", id="help.leave", show=False),
        Binding(
            "f7", "ask", "The guide", id="ask_guide", show=False
        ),  # the chat's own key for it, also where that is another
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
        """Lay out for the room there is now."""
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
    """Yield the groups that have members, in order; what is named nowhere comes last."""
    by_id = {action.id: action for action in actions}
    named = {name for names in GROUPS.values() for name in names}
    rest = [action.id for action in actions if action.id not in named]
    for title, names in GROUPS.items():
        wanted: Iterable[str] = (*rest, *names) if title == ALSO else names
        if members := [by_id[name] for name in wanted if name in by_id]:
            yield title, members


def _rows(action: Action, width: int) -> Iterator[Content]:
    """Yield the keys, and beside them what they do and the command that does the same; long keys have a row of their own."""
    keys, command = action.key_names, action.usage.replace(" ", "\u00a0")  # it is not torn apart
    does = Content(action.help) + (Content.styled(f"  {command}", FAINT) if command else Content(""))
    column = KEY_COLUMN if width >= KEY_COLUMN + LEAST_TEXT else INDENT
    beside = len(keys) < column
    if not beside:
        yield from _wrapped(keys, "bold $text-primary", width)
    for index, row in enumerate(wrapped(does, width - column)):
        lead = keys if beside and index == 0 else ""
        yield Content.styled(lead.ljust(column), "bold $text-primary") + row.content
