"""One registry: every action is bound, callable, in the help and in the palette; the keys are those the product promises."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from tokamac.app.chat.actions import ACTIONS, NEWLINE_KEYS, by_slash
from tokamac.app.tui.bindings import bindings
from tokamac.app.tui.screens.chat import COMMANDS
from tokamac.app.tui.screens.help import help_text

PROMISED = {
    "send": {"enter"},
    "newline": {"shift+enter", "ctrl+j", "alt+enter"},
    "stop": {"escape"},
    "new_chat": {"ctrl+n"},
    "chats": {"ctrl+l"},
    "open": set(),
    "title": set(),
    "delete_chat": set(),
    "restore_chat": set(),
    "export": set(),
    "import": set(),
    "branches": {"f6"},
    "regenerate": {"ctrl+r"},
    "choose_model": {"ctrl+o"},
    "pull": set(),
    "adapter": set(),
    "unload": set(),
    "system_prompt": {"ctrl+s"},
    "settings": {"ctrl+t"},
    "thinking": set(),
    "convert": {"f4"},
    "explain": {"f2"},
    "what_if": {"f3"},
    "attach": {"@"},
    "detach": {"backspace"},
    "earlier": {"up"},
    "later": {"down"},
    "editor": {"ctrl+g"},
    "toggle_panel": {"ctrl+b", "f5"},
    "palette": {"ctrl+p"},
    "messages": {"tab"},
    "gauges": set(),
    "edit": {"e"},
    "again": {"r"},
    "continue": {"g"},
    "older": {"["},
    "newer": {"]"},
    "fork": {"f"},
    "copy_message": {"y"},
    "copy_code": {"c"},
    "scroll_end": {"ctrl+end"},
    "page_up": {"pageup", "f8"},
    "page_down": {"pagedown", "f9"},
    "copy": {"ctrl+c"},
    "ask_guide": {"f7"},
    "help": {"f1"},
    "leave": {"ctrl+q"},
}


def test_the_keys_are_those_promised() -> None:
    assert {action.id: set(action.keys) for action in ACTIONS} == PROMISED


def test_every_action_can_be_done_and_is_reached_by_a_key_or_a_command_of_its_own() -> None:
    assert set(COMMANDS) == {action.id for action in ACTIONS}
    assert all(action.keys or action.slash for action in ACTIONS)
    for scope in ("chat", "message"):
        keys = Counter(key for action in ACTIONS if action.scope in ("chat", scope) for key in action.keys)
        assert max(keys.values()) == 1
    commands = Counter(action.slash for action in ACTIONS if action.slash)
    assert max(commands.values()) == 1
    assert all(by_slash(command) is not None for command in commands)


def test_whatever_a_terminal_may_keep_for_itself_has_a_command_or_stands_in_the_palette() -> None:
    keyed = [action for action in ACTIONS if not action.slash and not action.palette]
    assert {action.id: set(action.keys) for action in keyed} == {"earlier": {"up"}, "later": {"down"}, "again": {"r"}}
    assert by_slash("again") is not None  # of the last reply; "r" is of the one that is pointed at


async def test_the_page_is_turned_by_commands(chat: Callable[..., Any]) -> None:
    async with chat("prose") as c:
        await c.ask("one")
        end = c.transcript.scroll_offset.y
        c.prompt.insert("/up")
        c.prompt.submit()
        await c.until(lambda: c.transcript.scroll_offset.y < end, "a page up")
        up = c.transcript.scroll_offset.y
        c.prompt.insert("/down")
        c.prompt.submit()
        await c.until(lambda: c.transcript.scroll_offset.y > up, "a page down")


def test_every_action_is_in_the_help_with_its_keys() -> None:
    text = help_text().plain
    for action in ACTIONS:
        assert action.help in text
        assert action.key_names in text
        assert f"/{action.slash}" in text or not action.slash


def test_what_is_bound_is_bound_and_the_prompt_does_the_rest() -> None:
    bound = [action for action in ACTIONS if action.bound]
    assert len(bindings()) + len(bindings("message")) == len(bound)
    (newline,) = (action for action in ACTIONS if action.id == "newline")
    assert newline.keys == NEWLINE_KEYS
