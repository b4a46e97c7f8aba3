"""One registry: every action is bound, callable, in the help and in the palette; the keys are those the product promises."""

from collections import Counter

from tokamac.app.tui.actions import ACTIONS, bindings
from tokamac.app.tui.screens.chat import ChatScreen
from tokamac.app.tui.screens.help import help_text
from tokamac.app.tui.widgets.prompt import NEWLINE_KEYS

PROMISED = {
    "send": {"enter"},
    "newline": {"shift+enter", "ctrl+j", "alt+enter"},
    "stop": {"escape"},
    "new_chat": {"ctrl+n"},
    "regenerate": {"ctrl+r"},
    "choose_model": {"ctrl+o"},
    "system_prompt": {"ctrl+s"},
    "settings": {"ctrl+t"},
    "explain": {"f2"},
    "what_if": {"f3"},
    "toggle_panel": {"ctrl+b"},
    "palette": {"ctrl+p"},
    "scroll_end": {"ctrl+end"},
    "page_up": {"pageup"},
    "page_down": {"pagedown"},
    "copy": {"ctrl+c"},
    "help": {"f1"},
    "leave": {"ctrl+q"},
}


def test_the_keys_are_those_promised() -> None:
    assert {action.id: set(action.keys) for action in ACTIONS} == PROMISED


def test_every_action_has_a_method_and_a_key_of_its_own() -> None:
    assert all(callable(getattr(ChatScreen, f"action_{action.id}")) for action in ACTIONS)
    assert max(Counter(key for action in ACTIONS for key in action.keys).values()) == 1


def test_every_action_is_in_the_help_with_its_keys() -> None:
    text = help_text().plain
    for action in ACTIONS:
        assert action.help in text
        assert action.key_names in text


def test_what_is_bound_is_bound_and_the_prompt_does_the_rest() -> None:
    assert len(bindings()) == sum(action.bound for action in ACTIONS)
    (newline,) = (action for action in ACTIONS if action.id == "newline")
    assert newline.keys == NEWLINE_KEYS
