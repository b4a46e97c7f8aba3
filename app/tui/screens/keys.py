"""Keys: the menu after the leader key, and the list of actions in which keys are changed; and the list of themes.

``KeyPress`` takes whatever key comes, those of the app too (``TokamacApp.check_action`` lets them through while it is open).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.theme import Theme
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from ...chat import commands
from ...chat.actions import ACTIONS, LEADER, Action, key_name, one_name, refusal
from ...chat.commands import RefusedError
from ..theme import AUTOMATIC, DARK, FAINT, LIGHT, TERMINAL
from . import Dialog

if TYPE_CHECKING:
    from .chat import ChatScreen

COLUMNS = 26
"""Cells for a letter and what it does."""
KEYS_WIDE = 24
"""Cells for an action's keys in the list."""


class LeaderScreen(Dialog[str]):
    """What the letters after the leader key do; the result is the action of the key that comes, or None."""

    def __init__(self, leader: str, actions: Sequence[Action]) -> None:
        super().__init__()
        self._leader = leader
        self._actions = sorted(actions, key=lambda action: action.chord)

    def compose(self) -> ComposeResult:
        """Yield the letters."""
        with Vertical(classes="box") as box:
            box.border_title = f"{self._leader}, then"
            yield Static(id="letters", markup=False)

    def on_mount(self) -> None:
        """Name the keys."""
        self.say_keys("a letter, with Ctrl held or not", "Esc closes")
        self._show()

    def on_resize(self, event: events.Resize) -> None:
        """Lay out again."""
        del event
        self.call_after_refresh(self._show)

    def _show(self) -> None:
        text = self.query_one("#letters", Static)
        columns = max(1, text.content_size.width // COLUMNS)
        rows = -(-len(self._actions) // columns)
        lines = [Content("").join(map(_letter, self._actions[row::rows])) for row in range(rows)]
        text.update(Content("\n").join(lines))

    def on_key(self, event: events.Key) -> None:
        """Do what the key is for; any other closes."""
        event.stop()
        written = event.character if event.is_printable and event.character else event.key.removeprefix("ctrl+")
        self.dismiss(next((each.id for each in self._actions if each.chord == written.lower()), None))


def _letter(action: Action) -> Content:
    return Content.styled(f"{action.chord.upper():>2}  ", "bold $text-primary") + action.label.ljust(COLUMNS - 4)


class KeyPress(Dialog[str]):
    """Waits for a key, or for the leader and a letter. The result is the key as settings name it; None where Esc was pressed.

    take: told of each key, it says why that can't be had, or "" where it can.
    """

    def __init__(self, action: Action, leader: Sequence[str], problem: str = "") -> None:
        super().__init__()
        self._action = action
        self._leader = leader
        self._problem = problem
        self._led = ""

    def compose(self) -> ComposeResult:
        """Yield the question."""
        with Vertical(classes="box") as box:
            box.border_title = f"New key: {self._action.label}"
            yield Static(id="asked", markup=False)

    def on_mount(self) -> None:
        """Ask."""
        self.say_keys("Esc cancels")
        self._ask("Press the new key.")

    def _ask(self, text: str) -> None:
        self.query_one("#asked", Static).update(Content("\n").join(map(Content, filter(None, (self._problem, text)))))

    def action_leave(self) -> None:
        """Cancel."""
        self.dismiss(None)

    def on_key(self, event: events.Key) -> None:
        """Take the key; after the leader, another one."""
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


class KeysScreen(Dialog[None]):
    """Every action with its id, keys and help; a chosen one gets another key. Changes are saved at once."""

    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("up", "move(-1)", "Up", id="keys.up", show=False, priority=True),
        Binding("down", "move(1)", "Down", id="keys.down", show=False, priority=True),
        Binding("pageup,f8", "page(-1)", "Page up", id="keys.page_up", show=False, priority=True),
        Binding("pagedown,f9", "page(1)", "Page down", id="keys.page_down", show=False, priority=True),
        Binding("ctrl+d", "remove", "Remove a key", id="keys.remove", priority=True),
        Binding("ctrl+r", "reset", "Reset", id="keys.reset", priority=True),
    ]

    def __init__(self, chat: "ChatScreen") -> None:
        super().__init__()
        self._chat = chat
        self._told = ""  # the action whose help is shown
        self._wanted = ""  # the key that another action has, to be moved when it is pressed again

    def compose(self) -> ComposeResult:
        """Yield the filter, the list, and the chosen action's help."""
        with Vertical(classes="box") as box:
            box.border_title = "Keys"
            yield Input(placeholder="Type to filter: a name, an id, a key", compact=True)
            yield OptionList(markup=False, compact=True)
            yield Static("", id="key-help", classes="note", markup=False)

    def on_mount(self) -> None:
        """List the actions."""
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
        """Show what matches."""
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
        """Show the help of another action; of the same one, what was said of it stays."""
        if (action := self._chosen) is not None and action.id != self._told:
            self._wanted = ""
            self._tell()

    def _tell(self, said: str = "") -> None:
        action = self._chosen
        self._told = "" if action is None else action.id
        text = "No matches." if action is None else action.help
        self.query_one("#key-help", Static).update(said or text)

    def action_move(self, step: int) -> None:
        """Select the next action, or the one before."""
        listed = self.query_one(OptionList)
        listed.action_cursor_up() if step < 0 else listed.action_cursor_down()

    def action_page(self, step: int) -> None:
        """Go a page up or down."""
        listed = self.query_one(OptionList)
        if listed.highlighted is not None:
            at = listed.highlighted + step * max(1, listed.size.height - 1)
            listed.highlighted = max(0, min(listed.option_count - 1, at))

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def ask(self, event: Input.Submitted | OptionList.OptionSelected) -> None:
        """Ask for the new key of the chosen action."""
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
        """Give the chosen action the key, before its others; a key of another action is moved when it is pressed again."""
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
        """Remove the key of the chosen action that is shown first."""
        if (action := self._chosen) is not None and action.keys:
            self._choose(action, action.keys[1:])

    def action_reset(self) -> None:
        """Give the chosen action its usual keys back."""
        if (action := self._chosen) is not None:
            self._choose(action, None)

    def _choose(self, action: Action, keys: tuple[str, ...] | None) -> bool:
        """Set the keys, and show them; return whether that could be done."""
        usual = next(each.keys for each in ACTIONS if each.id == action.id)
        self._wanted = ""
        try:
            said = commands.choose_keys(self._chat, action.id, None if keys == usual else keys)
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


THEME_WIDE = 19
"""Cells for a theme's name: the longest, and a gap."""


class ThemeScreen(Dialog[str]):
    """The themes; the one pointed at is shown. The result is the chosen one, or None, where the one before is back.

    chosen: the one in the settings; "" is none. automatic: the one that is taken then.
    """

    def __init__(self, chosen: str, automatic: str) -> None:
        super().__init__()
        self._chosen = chosen
        self._automatic = automatic
        self._before = ""

    def compose(self) -> ComposeResult:
        """Yield the list."""
        with Vertical(classes="box") as box:
            box.border_title = "Theme"
            yield OptionList(markup=False, compact=True)

    def on_mount(self) -> None:
        """List the themes, our own first."""
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
        """Show the theme."""
        self.app.theme = self._automatic if event.option_id == AUTOMATIC else event.option_id or self._before

    @on(OptionList.OptionSelected)
    def keep(self, event: OptionList.OptionSelected) -> None:
        """Close with the theme."""
        self.dismiss(event.option_id)

    def action_leave(self) -> None:
        """Go back to the theme before."""
        self.app.theme = self._before
        self.dismiss(None)


def _theme(theme: Theme) -> Content:
    kind = "terminal's colours" if theme.ansi else "dark" if theme.dark else "light"
    return Content(theme.name.ljust(THEME_WIDE)) + Content.styled(kind, FAINT)
