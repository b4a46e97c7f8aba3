"""F1: all actions and keys, from the registry. F7: the embedded guide, in its own process while open."""

import sys
from collections.abc import Iterator, Sequence

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.theme import Theme
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from ...backend.client import Died
from ...backend.protocol import Request
from ...chat import setup
from ...chat.actions import ACTIONS, LEADER, Action, key_name, one_name, refusal
from ...chat.connection import GuideChat, GuideExchange
from ...chat.controller import Bridge, ChatController, RefusedError
from ..markdown.page import Prose
from ..markdown.rows import wrapped
from ..theme import AUTOMATIC, DARK, FAINT, LIGHT, TERMINAL
from ..widgets.prompt_input import TextInput
from .dialog import Dialog, EngineSaid, ListDialog, has_words

KEY_COLUMN = 14
LEAST_TEXT = 24  # cells; with fewer beside the keys, these have a line of their own
INDENT = 2
ALSO = "Other"
# Actions by id. Those that are not named are in the last group.
GROUPS: dict[str, str] = {
    "Writing": "send newline stop attach detach shell earlier later search_prompts prompt_files undo redo editor",
    "Selected message (Tab, then Up and Down)": (
        "messages edit edit_reply again continue older newer fork pin_turn copy_message copy_code links"
    ),
    "Conversations": (
        "new_chat private chats find_meaning open title pin folder context regenerate compact edit_earlier "
        "undo_turn branches delete_chat restore_chat export import"
    ),
    "Models and settings": (
        "choose_model models pull jobs adapter draft unload convert system_prompt remember project settings show thinking"
    ),
    "Speed and memory": "toggle_panel all_figures gauges explain stats steps sure what_if",
    "Reading": "scroll_top scroll_end page_up page_down copy",
    ALSO: "leader palette keys theme ask_guide help suspend leave",
}
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
# What terminals on a Mac do with keys: shown first there, and last elsewhere, where a Mac may be at the other end of
# SSH.
ON_MACS = (
    "On a Mac keyboard, F1 to F10 need fn; {leader} and a letter does the same. Terminal.app keeps PageUp, PageDown, Home and "
    "End for itself, and has no Ctrl+End: use /up, /down, /top and /end. Option+Enter starts a new line once Settings > "
    "Profiles > Keyboard > Use Option as Meta Key is on; Shift+Enter may send the prompt; Ctrl+J works everywhere. The terminal"
    " in VS Code keeps F1, F5 and F6: use /help, /figures and /branches. Every key has a command or an entry in the palette "
    "({palette}) that does the same."
)
MAC = sys.platform == "darwin"


class HelpScreen(Dialog[bool]):
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
        with Vertical(classes="box", id="help") as box:
            box.border_title = "Help"
            yield TextInput(placeholder="Type to search", id="help-search", compact=True)
            with VerticalScroll(id="help-scroll", can_focus=False):
                yield Static(id="help-text", markup=False)

    def on_mount(self) -> None:
        asks = next(action.key_name for action in self._actions if action.id == "ask_guide")
        self.say_keys("Type to search", f"{asks} asks the guide", "Esc closes")
        self.query_one(Input).focus()

    def on_resize(self, event: Resize) -> None:
        del event
        self.call_after_refresh(self._show)

    @on(Input.Changed)
    def search(self) -> None:
        self._show()
        self.query_one("#help-scroll").scroll_home(animate=False)

    def _show(self) -> None:
        width = max(self.query_one("#help-scroll").content_size.width - 1, LEAST_TEXT)
        wanted = self.query_one(Input).value
        self.query_one("#help-text", Static).update(help_text(self._actions, width, mac=MAC, wanted=wanted))

    def action_scroll(self, rows: int) -> None:
        self.query_one("#help-scroll").scroll_relative(y=rows, animate=False)

    def action_page(self, direction: int) -> None:
        shown = self.query_one("#help-scroll")
        shown.scroll_relative(y=direction * max(1, shown.size.height - 1), animate=False)

    def action_leave(self) -> None:
        search = self.query_one(Input)
        if search.value:
            search.value = ""
        else:
            self.dismiss(None)

    def action_ask(self) -> None:
        self.dismiss(True)


def help_text(actions: Sequence[Action] = ACTIONS, width: int = 240, *, mac: bool = False, wanted: str = "") -> Content:
    keys, words = {action.id: action.key_name for action in actions}, wanted.casefold().split()

    def notes(*texts: str) -> list[list[Content]]:
        said = [text.format(**keys) for text in texts]
        return [list(_wrapped(text, FAINT, width)) for text in said if has_words(words, text)]

    groups = [
        [*_wrapped(title, "bold", width), *(row for each in members for row in _rows(each, width))]
        for title, group in _groups(actions)
        if (members := [each for each in group if has_words(words, title, *_said(each))])
    ]
    last = () if mac else (ON_MACS,)
    ids = ", ".join(action.id for action in actions if action.bound)
    asked = "_" in wanted or has_words(
        words, IDS.format(**keys)
    )  # else the ids of all actions are in every second search
    parts = [*(notes(ON_MACS) if mac else []), *groups, *notes(*NOTES, *last, *([f"{IDS}{ids}."] if asked else []))]
    parts = parts or [list(_wrapped(NOTHING.format(**keys), FAINT, width))]
    return Content("\n").join([line for part in parts for line in [*part, Content("")]][:-1])


IDS = "To change a key: {keys}, or [keys] in settings.toml by the action's id: "
NOTHING = "Nothing here has these words. {ask_guide} asks the guide."


def _said(action: Action) -> tuple[str, ...]:
    return action.id, action.label, action.key_names, action.help, action.usage, *action.also


def _wrapped(text: str, style: str, width: int) -> Iterator[Content]:
    return (row.content for row in wrapped(Content.styled(text, style), width))


def _groups(actions: Sequence[Action]) -> Iterator[tuple[str, list[Action]]]:
    by_id = {action.id: action for action in actions}
    named = {name for names in GROUPS.values() for name in names.split()}
    rest = [action.id for action in actions if action.id not in named]
    for title, names in GROUPS.items():
        wanted = [*rest, *names.split()] if title == ALSO else names.split()
        if members := [by_id[name] for name in wanted if name in by_id]:
            yield title, members


def _rows(action: Action, width: int) -> Iterator[Content]:
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
    CSS_PATH = "guide.tcss"
    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("f7", "leave", "Close", id="guide.leave", show=False),
        Binding("pageup,f8", "page(-1)", "Page up", id="guide.page_up", show=False),
        Binding("pagedown,f9", "page(1)", "Page down", id="guide.page_down", show=False),
    ]

    def __init__(self, bridge: Bridge, question: str = "", *, private: bool = False) -> None:
        super().__init__()
        self._private = private
        self.guide_chat = GuideChat(private=private)
        self._bridge = bridge
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(classes="box", id="guide") as box:
            box.border_title = "The guide"
            with VerticalScroll(id="guide-said", can_focus=False):
                yield Static(id="guide-text", markup=False)
            yield TextInput(placeholder="Ask about this app, or how it works", id="guide-question", compact=True)

    def on_mount(self) -> None:
        self.query_one(Input).focus()
        self._bridge.post = lambda event, number: self.post_message(EngineSaid(event, number))
        self._start()
        if self._question:
            self._ask_process(self.guide_chat.ask(self._question))

    def on_unmount(self) -> None:
        self._bridge.end()

    def on_resize(self, event: Resize) -> None:
        del event
        self.call_after_refresh(self._show)

    @on(Input.Submitted)
    def ask(self, message: Input.Submitted) -> None:
        question = message.value.strip()
        if question and not self.guide_chat.answering:
            message.input.value = ""
            if self.guide_chat.problem:
                self.guide_chat = GuideChat(private=self._private)
                self._start()
            self._ask_process(self.guide_chat.ask(question))
            self._show()

    def on_engine_said(self, message: EngineSaid) -> None:
        message.stop()
        if message.process_number == self._bridge.process_number:
            if isinstance(message.event, Died):
                self._bridge.end()
            self._ask_process(self.guide_chat.on_event(message.event))
            self._show()

    def action_page(self, direction: int) -> None:
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


# ``KeyPress`` receives every key, the app's too (``TokamacApp.check_action`` lets them through).


COLUMNS = 26  # cells for a letter and what it does
KEYS_WIDE = 24  # cells for an action's keys in the list


class LeaderScreen(Dialog[str]):
    def __init__(self, leader: str, actions: Sequence[Action]) -> None:
        super().__init__()
        self._leader = leader
        self._actions = sorted(actions, key=lambda action: action.chord)

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = f"{self._leader}, then"
            yield Static(id="letters", markup=False)

    def on_mount(self) -> None:
        self.say_keys("a letter, with Ctrl held or not", "Esc closes")
        self._show()

    def on_resize(self, event: events.Resize) -> None:
        del event
        self.call_after_refresh(self._show)

    def _show(self) -> None:
        text = self.query_one("#letters", Static)
        columns = max(1, text.content_size.width // COLUMNS)
        rows = -(-len(self._actions) // columns)
        lines = [Content("").join(map(_letter, self._actions[row::rows])) for row in range(rows)]
        text.update(Content("\n").join(lines))

    def on_key(self, event: events.Key) -> None:
        event.stop()
        written = event.character if event.is_printable and event.character else event.key.removeprefix("ctrl+")
        self.dismiss(next((each.id for each in self._actions if each.chord == written.lower()), None))


def _letter(action: Action) -> Content:
    return Content.styled(f"{action.chord.upper():>2}  ", "bold $text-primary") + action.label.ljust(COLUMNS - 4)


class KeyPress(Dialog[str]):
    """Waits for a key or chord; the result is its name in settings, None for Esc.

    take: returns why a key can't be used, or "".
    """

    def __init__(self, action: Action, leader: Sequence[str], problem: str = "") -> None:
        super().__init__()
        self._action = action
        self._leader = leader
        self._problem = problem
        self._led = ""

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = f"New key: {self._action.label}"
            yield Static(id="asked", markup=False)

    def on_mount(self) -> None:
        self.say_keys("Esc cancels")
        self._ask("Press the new key.")

    def _ask(self, text: str) -> None:
        self.query_one("#asked", Static).update(Content("\n").join(map(Content, filter(None, (self._problem, text)))))

    def action_leave(self) -> None:
        self.dismiss(None)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        if event.key == "escape":
            self.dismiss(None)
        elif self._led:
            letter = event.character if event.is_printable and event.character else event.key.removeprefix("ctrl+")
            self.dismiss(f"{LEADER} {letter.lower()}")
        elif event.key in self._leader and self._action.id != LEADER:
            self._led = event.key
            self._ask(f"{key_name(event.key)}, and a letter …")
        else:
            self.dismiss(event.key)


class KeysScreen(ListDialog[None]):
    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("ctrl+d", "remove", "Remove a key", id="keys.remove", priority=True),
        Binding("ctrl+r", "reset", "Reset", id="keys.reset", priority=True),
    ]

    def __init__(self, chat: ChatController) -> None:
        super().__init__()
        self._chat = chat
        self._told = ""  # the action whose help is shown
        self._wanted = ""  # the key that another action has, to be moved when it is pressed again

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = "Keys"
            yield TextInput(placeholder="Type to filter: a name, an id, a key", compact=True)
            yield OptionList(markup=False, compact=True)
            yield Static("", id="key-help", classes="note", markup=False)

    def on_mount(self) -> None:
        self.say_keys("Enter sets a key", "Ctrl+D removes one", "Ctrl+R resets", "Esc closes")
        self._list()

    @property
    def _actions(self) -> tuple[Action, ...]:
        return self._chat.preferences.keymap.actions

    @property
    def _chosen(self) -> Action | None:
        option = self.query_one(OptionList).highlighted_option
        return next((each for each in self._actions if option is not None and each.id == option.id), None)

    @on(Input.Changed)
    def filter(self) -> None:
        self._list()

    def _list(self, at: str = "") -> None:
        words = self.query_one(Input).value.casefold().split()
        shown = [each for each in self._actions if all(word in _searched(each) for word in words)]
        listed = self.query_one(OptionList)
        wide = max((len(each.id) for each in self._actions), default=0) + 2
        listed.clear_options()
        listed.add_options([Option(_row(each, wide), each.id) for each in shown])
        ids = [each.id for each in shown]
        listed.highlighted = ids.index(at) if at in ids else 0 if ids else None
        self._tell()

    @on(OptionList.OptionHighlighted)
    def highlighted(self) -> None:
        if (action := self._chosen) is not None and action.id != self._told:
            self._wanted = ""
            self._tell()

    def _tell(self, said: str = "") -> None:
        action = self._chosen
        self._told = "" if action is None else action.id
        text = "No matches." if action is None else action.help
        self.query_one("#key-help", Static).update(said or text)

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def ask(self, event: Input.Submitted | OptionList.OptionSelected) -> None:
        event.stop()
        self._ask()

    def _ask(self, problem: str = "") -> None:
        action = self._chosen
        if action is None:
            return
        if not action.bound:
            self._tell("Its keys belong to the prompt and are fixed.")
            return
        leader = next(each.keys for each in self._actions if each.id == LEADER)
        self.app.push_screen(KeyPress(action, leader, problem), self._pressed)

    def _pressed(self, key: str | None) -> None:
        action = self._chosen
        if key is None or action is None:
            self._wanted = ""
            return
        chosen = self._chat.preferences.settings.keys
        keys = (key, *(each for each in action.keys if one_name(each) != one_name(key)))
        why = refusal(action.id, keys, chosen)
        holder = next((each for each in self._actions if each.id in why.split() and each.id != action.id), None)
        if why and holder is not None and self._wanted == key and holder.bound:
            left = tuple(each for each in holder.keys if one_name(each) != one_name(key))
            if self._choose(holder, left):
                self._choose(action, keys)
        elif why:
            self._wanted = key
            if holder is not None and holder.bound:
                why = (
                    f"{key_name(key)} is already a key of {holder.label} ({holder.id}). Press it again to move it here"
                )
            self._ask(f"{why[:1].upper()}{why[1:]}.")
        else:
            self._choose(action, keys)

    def action_remove(self) -> None:
        if (action := self._chosen) is not None and action.keys:
            self._choose(action, action.keys[1:])

    def action_reset(self) -> None:
        if (action := self._chosen) is not None:
            self._choose(action, None)

    def _choose(self, action: Action, keys: tuple[str, ...] | None) -> bool:
        usual = next(each.keys for each in ACTIONS if each.id == action.id)
        self._wanted = ""
        try:
            said = setup.choose_keys(self._chat, action.id, None if keys == usual else keys)
        except RefusedError as error:
            self._tell(error.one_line())
            return False
        self._list(action.id)
        self._tell(said)
        return True


def _searched(action: Action) -> str:
    return " ".join((action.id, action.label, action.help, action.key_names, action.usage)).casefold()


def _row(action: Action, wide: int) -> Content:
    held = ", ".join(key_name(key) for key in action.keys) or "–"
    held = held if len(held) <= KEYS_WIDE else f"{held[: KEYS_WIDE - 1]}…"
    return (
        Content(action.id.ljust(wide))
        + Content.styled(held.ljust(KEYS_WIDE), "$text-primary" if action.keys else FAINT)
        + Content.styled(f"  {action.label}", FAINT)
    )


THEME_WIDE = 19  # cells for a theme's name: the longest, and a gap


class ThemeScreen(Dialog[str]):
    def __init__(self, chosen: str, automatic: str) -> None:
        super().__init__()
        self._chosen = chosen
        self._automatic = automatic
        self._before = ""

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = "Theme"
            yield OptionList(markup=False, compact=True)

    def on_mount(self) -> None:
        self.say_keys("Up and Down preview", "Enter keeps", "Esc goes back")
        self._before = self.app.theme
        own = [theme.name for theme in (TERMINAL, DARK, LIGHT)]
        names = [*own, *sorted(set(self.app.available_themes) - set(own))]
        listed = self.query_one(OptionList)
        usual = Content(AUTOMATIC.ljust(THEME_WIDE)) + Content.styled("by the terminal's background", FAINT)
        listed.add_option(Option(usual, AUTOMATIC))
        listed.add_options([Option(_theme(self.app.available_themes[name]), name) for name in names])
        listed.highlighted = 1 + names.index(self._before) if self._chosen else 0
        listed.focus()

    @on(OptionList.OptionHighlighted)
    def preview(self, event: OptionList.OptionHighlighted) -> None:
        self.app.theme = self._automatic if event.option_id == AUTOMATIC else event.option_id or self._before

    @on(OptionList.OptionSelected)
    def keep(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    def action_leave(self) -> None:
        self.app.theme = self._before
        self.dismiss(None)


def _theme(theme: Theme) -> Content:
    kind = "terminal's colours" if theme.ansi else "dark" if theme.dark else "light"
    return Content(theme.name.ljust(THEME_WIDE)) + Content.styled(kind, FAINT)
