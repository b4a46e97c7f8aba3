"""One registry of actions, and the user's own keys: taken where they can be had, shown and heard."""

import ast
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.binding import Binding
from textual.keys import Keys
from textual.widgets import TextArea

from tests.scripted_engine import model_spec
from tokamac.app import settings
from tokamac.app.backend.protocol import Load, Loaded
from tokamac.app.chat import actions as keymap_module
from tokamac.app.chat.actions import ACTIONS, NAMED_KEYS, NEWLINE_KEYS, Keymap, by_slash, keymap, one_name, refusal
from tokamac.app.chat.commands import COMMANDS
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import EnginePhase, Notice
from tokamac.app.settings import Settings
from tokamac.app.tui.actions import Dialogs, PromptActions
from tokamac.app.tui.screens.chat import ChatScreen
from tokamac.app.tui.screens.chats import BranchesScreen
from tokamac.app.tui.screens.explain import ExplainScreen
from tokamac.app.tui.screens.help import ON_MACS, HelpScreen, help_text
from tokamac.app.tui.widgets.transcript import bindings
from tokamac.engine.options import Sampling

# One registry: every action is bound, callable, in the help and in the palette; the keys are those the product
# promises.

PROMISED = """
send: enter; newline: shift+enter, ctrl+j, alt+enter; stop: escape; new_chat: ctrl+n; chats: ctrl+l;
context: ctrl+x i; shell: !; branches: f6, ctrl+x t; regenerate: ctrl+x r; search_prompts: ctrl+r; pin_turn: p;
keep_going: ctrl+k; choose_model: ctrl+o; system_prompt: ctrl+s; settings: ctrl+t; profile: ctrl+x p;
convert: f4, ctrl+x c; explain: f2, ctrl+x e; steps: f10, ctrl+x s; sure: ctrl+x o; what_if: f3, ctrl+x w; attach: @;
detach: backspace; earlier: up; later: down; undo: ctrl+underscore, ctrl+slash; redo: ctrl+y; editor: ctrl+g; paste: ctrl+v;
toggle_panel: ctrl+b, ctrl+x b; all_figures: f5, ctrl+x y; palette: ctrl+p; messages: tab; gauges: ctrl+x f; edit: e;
again: r; continue: g; older: [; newer: ]; fork: f; copy_message: y; copy_code: c; links: l;
scroll_top: ctrl+home, ctrl+x a; scroll_end: ctrl+end, ctrl+x z; page_up: pageup, f8, ctrl+x u;
page_down: pagedown, f9, ctrl+x d; copy: ctrl+c; ask_guide: f7, ctrl+x g; help: f1, ctrl+x h; leader: ctrl+x;
keys: ctrl+x k; theme: ctrl+x v; suspend: ctrl+z; leave: ctrl+q
"""


def test_a_mac_is_told_of_keys_without_fn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [Keymap().key(action) for action in ("explain", "stop", "pull")] == ["F2", "Esc", "/pull"]
    monkeypatch.setattr(keymap_module, "MAC", True)
    assert [Keymap().key(action) for action in ("explain", "stop", "pull")] == ["Ctrl+X E", "Esc", "/pull"]
    assert keymap({"explain": ("f18",)}).key("explain") == "F18"


def test_the_keys_are_those_promised() -> None:
    promised = dict(each.strip().split(": ") for each in PROMISED.split(";"))
    assert {action.id: ", ".join(sorted(action.keys)) for action in ACTIONS if action.keys} == {
        action: ", ".join(sorted(keys.split(", "))) for action, keys in promised.items()
    }


def test_every_action_can_be_done_and_is_reached_by_a_key_or_a_command_of_its_own() -> None:
    done = [*COMMANDS, *ChatScreen.ACTIONS, *Dialogs.ACTIONS, *PromptActions.ACTIONS]
    assert set(done) == {action.id for action in ACTIONS}
    assert all(action.keys or action.slash for action in ACTIONS)
    for scope in ("chat", "message"):
        keys = Counter(key for action in ACTIONS if action.scope in ("chat", scope) for key in action.keys)
        assert max(keys.values()) == 1
    commands = Counter(action.slash for action in ACTIONS if action.slash)
    assert max(commands.values()) == 1
    assert all(by_slash(command) is not None for command in commands)


def test_whatever_a_terminal_may_keep_for_itself_has_a_command_or_stands_in_the_palette() -> None:
    keyed = [action for action in ACTIONS if not action.slash and not action.palette]
    known = {"earlier": {"up"}, "later": {"down"}, "again": {"r"}, "copy": {"ctrl+c"}}  # no terminal keeps Ctrl+C
    assert {action.id: set(action.keys) for action in keyed} == known
    assert by_slash("again") is not None  # of the last reply; "r" is of the one that is pointed at


async def test_the_page_is_turned_by_commands(chat: Callable[..., Any]) -> None:
    async with chat("prose", ready=False) as c:
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


# The user's own keys: taken where they can be had, named where not, and then bound, shown and heard.

Start = Callable[..., Any]
KEYS = st.sampled_from(["f2", "f3", "f18", "ctrl+k", "ctrl+r", "x", "e", "[", "alt+x", "nonsense", "up", "ctrl+m", ""])


def keys_of(actions: tuple[Any, ...]) -> dict[str, tuple[str, ...]]:
    return {action.id: action.keys for action in actions}


def test_nothing_chosen_changes_nothing() -> None:
    made = keymap({})
    assert (made.actions, made.warnings, made.changed) == (ACTIONS, (), {})


def test_a_key_is_taken_and_shown() -> None:
    made = keymap({"explain": ("f18", "alt+k"), "title": ("alt+t",)})
    assert made.warnings == ()
    assert made.changed == {"explain": "f18,alt+k", "title": "alt+t"}
    text = help_text(made.actions).plain
    assert "F18, Alt+K" in text
    assert "Alt+T" in text
    assert not any(line.startswith("F2 ") for line in text.splitlines())


def test_two_actions_swap_their_keys() -> None:
    made = keymap({"explain": ("f3",), "what_if": ("f2",)})
    assert made.warnings == ()
    assert made.changed == {"explain": "f3", "what_if": "f2"}


def test_a_key_can_be_given_up_where_a_command_or_the_palette_is_left() -> None:
    made = keymap({"explain": ()})
    assert made.warnings == ()
    assert dict(keys_of(made.actions))["explain"] == ()
    assert "/explain" in help_text(made.actions).plain


@pytest.mark.parametrize(
    ("name", "keys", "why"),
    [
        ("explian", ("f18",), "no such action; the nearest: explain"),
        ("explian", ("f18",), "/keys, or tokamac help keys, lists all"),
        ("explain", ("ctrl+k x",), "does not begin with the leader key"),
        ("explain", ("leader up",), "does not end with one letter"), ("zzz", ("f18",), "no such action"),
        ("send", ("f18",), "fixed"), ("explain", ("f3",), "already a key of what_if"),
        ("explain", ("enter",), "already a key of send"), ("edit", ("ctrl+r",), "already a key of search_prompts"),
        ("explain", ("x",), "needed for writing"), ("explain", ("shift+x",), "needed for writing"),
        ("explain", ("left",), "needed for writing"), ("explain", ("ctrl+m",), "as Enter"),
        ("explain", ("hyper+x",), "no key"), ("explain", ("f99",), "no key"), ("explain", ("ctrl+",), "no key"),
        ("again", (), "could not be reached"),
    ],
)  # fmt: skip
def test_what_can_not_be_had_is_named_with_its_reason(name: str, keys: tuple[str, ...], why: str) -> None:
    made = keymap({name: keys})
    (warning,) = made.warnings
    assert name in warning
    assert why in warning
    assert made.actions == ACTIONS


def test_a_chord_is_taken_by_any_name_of_its_leader_and_moves_with_it() -> None:
    made = keymap({"title": ("leader q",), "leader": ("ctrl+k",), "export": ("ctrl+k x",)})
    assert made.warnings == ()
    assert [made.key(name) for name in ("title", "export")] == ["Ctrl+K Q", "Ctrl+K X"]
    assert next(each for each in made.actions if each.id == "explain").key_names == "F2, Ctrl+K E"
    assert keymap({"leader": ()}).key("gauges") == "/gauges"


def test_a_chord_that_came_later_gives_way_to_the_users_and_so_does_a_key_of_a_new_action() -> None:
    made = keymap({"title": ("ctrl+x e",), "export": ("ctrl+z",), "palette": ("ctrl+x",)})
    assert made.warnings == ()
    assert made.key("explain") == "F2"
    assert dict(keys_of(made.actions))["suspend"] == ()


def test_why_a_key_can_not_be_had_is_told_before_it_is_chosen() -> None:
    assert refusal("explain", ("f3",), {}) == "f3 is already a key of what_if"
    assert refusal("explain", ("f3",), {"what_if": ("f18",)}) == ""


def test_of_two_entries_that_want_one_key_the_first_has_it() -> None:
    made = keymap({"explain": ("f18",), "what_if": ("f18",)})
    (warning,) = made.warnings
    assert "what_if: f18 is already a key of explain" in warning
    assert made.changed == {"explain": "f18"}


def test_a_second_key_of_another_action_may_be_taken_and_its_first_key_stays() -> None:
    made = keymap({"stop": ("f9",)})
    assert made.warnings == ()
    assert made.changed == {"stop": "f9", "page_down": "pagedown"}
    assert "already a key of page_down" in keymap({"stop": ("pagedown",)}).warnings[0]


def test_one_key_by_two_names_is_one_key() -> None:
    assert one_name("[") == "left_square_bracket"
    assert one_name("shift+ctrl+x") == one_name("ctrl+shift+x")
    assert "already a key of older" in keymap({"edit": ("left_square_bracket",)}).warnings[0]


def test_keys_on_a_message_may_be_letters_and_are_apart_from_those_of_other_messages_only() -> None:
    assert keymap({"edit": ("x",)}).changed == {"edit": "x"}
    assert "already a key of again" in keymap({"edit": ("r",)}).warnings[0]


@given(
    st.dictionaries(
        st.sampled_from([*(action.id for action in ACTIONS), "nobody"]), st.lists(KEYS, max_size=2).map(tuple)
    )
)
def test_no_choice_gives_a_key_two_meanings_or_loses_an_entry(chosen: dict[str, tuple[str, ...]]) -> None:
    made = keymap(chosen)
    for scope in ("chat", "message"):
        heard = [one_name(key) for each in made.actions if each.scope in ("chat", scope) for key in each.keys]
        assert len(heard) == len(set(heard))
    now = keys_of(made.actions)
    held = {
        name
        for name, keys in chosen.items()
        if now.get(name) is not None and set(map(one_name, now[name])) == set(map(one_name, filter(None, keys)))
    }
    named = {warning.split("[keys] ")[1].split(":")[0] for warning in made.warnings}
    assert chosen.keys() - held <= named


async def test_chosen_keys_are_heard_and_the_old_ones_are_not(chat: Start, tmp_path: Path) -> None:
    chosen = {"explain": ("f18",), "branches": ("ctrl+k",), "again": ("x",), "nobody": ("f19",)}
    settings.save(tmp_path / "settings.toml", Settings(keys=chosen))
    async with chat("fast", size=(110, 90), ready=False) as c:
        await c.until(lambda: "[keys] nobody: there is no such action" in c.notices)
        await c.phase(EnginePhase.IDLE)
        await c.ask("hi")
        await c.pilot.press("f2")
        await c.pilot.pause()
        assert c.app.screen is c.app.view
        assert "F18 explain" in c.screen_text()
        await c.opened("f18", ExplainScreen)
        await c.pilot.press("escape", "ctrl+k")
        await c.until(lambda: isinstance(c.app.screen, BranchesScreen))
        await c.pilot.press("escape", "f1")
        await c.until(lambda: isinstance(c.app.screen, HelpScreen))
        assert "F18" in c.screen_text()
        await c.pilot.press("escape", "tab", "r")
        await c.pilot.pause()
        assert c.session.turns[0].reply_place == (1, 1)
        await c.pilot.press("escape", "tab", "x", "enter")
        await c.until(lambda: c.session.turns[0].reply_place == (2, 2) and c.session.turns[0].reply)


def test_no_second_key_is_one_that_the_prompt_needs_or_that_another_action_has() -> None:
    plain = {action.id: [key for key in action.keys if " " not in key] for action in ACTIONS if action.bound}
    second = {name: keys[1] for name, keys in plain.items() if len(keys) > 1}
    assert second == {"page_up": "f8", "page_down": "f9", "undo": "ctrl+slash"}
    prompt = {binding.key for binding in Binding.make_bindings(TextArea.BINDINGS)}
    assert prompt & {"f6", "pageup"}  # what it has is found
    assert not prompt & set(second.values())


async def test_the_second_keys_do_what_the_first_do_while_something_is_written(chat: Start) -> None:
    async with chat("list", size=(100, 20)) as c:
        await c.ask("list")
        await c.type("half a thought")
        await c.until(lambda: c.transcript.scroll_y == c.transcript.max_scroll_y > 40)
        await c.pilot.press("f8")
        await c.until(lambda: c.transcript.scroll_y < c.transcript.max_scroll_y)
        up = c.transcript.scroll_y
        await c.pilot.press("pageup")
        await c.until(lambda: c.transcript.scroll_y < up)
        await c.pilot.press("f9")
        await c.until(lambda: c.transcript.scroll_y == up)
        assert c.prompt.text == "half a thought"
        assert c.prompt.has_focus


CHANGED = {
    "choose_model": ("f18",),
    "help": ("f19",),
    "stop": ("ctrl+k",),
    "leave": (),
    "scroll_end": ("alt+e",),
    "edit": ("x",),
}


def test_an_action_is_named_by_its_first_key_or_its_command() -> None:
    made = keymap({**CHANGED, "older": (",",)})
    assert made.key("choose_model") == "F18"
    assert made.key("leave") == "/quit"
    assert made.key("older") == ","
    assert Keymap().key("newline") == "Shift+Enter"


@pytest.mark.parametrize("event", ["stop_loading", "unload", "regenerate", "go"])
def test_the_session_names_the_keys_that_hold(event: str) -> None:
    session = Session(Load("guide"), Sampling(), "", lambda: 100.0)
    session.keymap = keymap(CHANGED)
    session.start()
    if event == "stop_loading":
        steps = session.stop()
        assert "F18 chooses a model" in session.engine.problem
    else:
        session.on_event(Loaded(model_spec("guide")))
        session.submit("hi")
        wishes: dict[str, Callable[[], Any]] = {
            "unload": session.unload,
            "regenerate": session.regenerate,
            "go": lambda: session.show_path(1),
        }
        steps = wishes[event]()
        assert any("Ctrl+K" in step.text for step in steps if isinstance(step, Notice))
    assert not any(key in step.text for step in steps if isinstance(step, Notice) for key in ("Esc", "Ctrl+O"))


async def test_what_is_shown_names_the_keys_that_hold(chat: Start, tmp_path: Path) -> None:
    settings.save(tmp_path / "settings.toml", Settings(keys=CHANGED, toured=True))
    async with chat("slow", size=(110, 30)) as c:
        shown = c.screen_text()
        assert "F18  chooses a model" in shown
        assert "F19  shows every key" in shown
        await c.send("/nosuch")
        await c.until(lambda: "There is no command /nosuch. F19 lists them" in c.notices)
        c.prompt.text = ""
        await c.send("hi")
        await c.until(lambda: "Ctrl+K stops" in c.screen_text())
        await c.pilot.press("ctrl+k")
        await c.phase(EnginePhase.IDLE)
        c.app.view.do("help")
        await c.until(lambda: isinstance(c.app.screen, HelpScreen))
        assert "Alt+E follows again" in help_text(c.app.chat.preferences.keymap.actions).plain


def test_no_text_names_a_key_that_can_be_changed() -> None:
    """A key's name may stand in a text only where it is a dialog's own, or not the user's to change."""
    changeable = {action.key_name for action in ACTIONS if action.bound and action.scope == "chat"} - {"Esc"}
    own = {
        "F3", "F4", "F5", "F6", "F7", "Ctrl+K", "Ctrl+S", "Ctrl+R", "Ctrl+Z", "Ctrl+G", "Ctrl+Y",
    }  # of dialogs, which have them by themselves  # fmt: skip
    pattern = re.compile(r"(?:Ctrl|Alt)\+[A-Z][a-z]*|\bF[0-9]{1,2}\b")
    named = set()
    app = Path(keymap_module.__file__).parent.parent
    for file in sorted([*(app / "chat").rglob("*.py"), *(app / "tui").rglob("*.py")]):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                named |= {(file.name, key) for key in pattern.findall(node.value) if key in changeable - own}
    assert named == {("help.py", key) for key in pattern.findall(ON_MACS) if key in changeable - own}  # terminals' own


def test_the_keys_that_have_a_name_are_textuals() -> None:
    named = {
        key.value for key in Keys if "+" not in key.value and not key.value.startswith("<") and key.value.isascii()
    }
    assert named - {"ctrl-at"} == NAMED_KEYS
