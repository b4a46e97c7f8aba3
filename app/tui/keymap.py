"""The user's own keys: the registry with the keys that the settings name, and in plain sentences what of them can't be had."""

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace

from textual.keys import Keys

from tokamac.app.tui.actions import ACTIONS, Action, Scope
from tokamac.engine.spelling import nearest

Chosen = Mapping[str, tuple[str, ...]]
"""Keys of actions, by id."""

MODIFIERS = frozenset(("ctrl", "alt", "shift", "super"))
EDITING = frozenset(("space", "backspace", "delete", "insert", "left", "right", "up", "down", "home", "end"))
"""What the prompt needs for itself."""
SAME = {"ctrl+i": "Tab", "ctrl+m": "Enter", "ctrl+left_square_bracket": "Esc"}
"""What a terminal sends alike."""
_NAMED = frozenset(key.value for key in Keys if key.value.isascii() and not key.value.startswith("<"))


@dataclass(frozen=True, slots=True)
class Keymap:
    """The actions with the keys that hold, and why some of the wished ones don't."""

    actions: tuple[Action, ...] = ACTIONS
    warnings: tuple[str, ...] = ()

    def key(self, action: str) -> str:
        """Return how a text names what the action of this id is done with: its first key, or its command."""
        return next(each.key_name for each in self.actions if each.id == action)

    @property
    def changed(self) -> dict[str, str]:
        """The keys that differ from the registry's, as Textual takes a keymap."""
        mine = {action.id: action for action in ACTIONS}
        return {each.id: each.bound_keys for each in self.actions if each.keys != mine[each.id].keys}


def keymap(chosen: Chosen) -> Keymap:
    """Return the registry with the chosen keys. What is wrong with an entry is said, and its action keeps the keys it had."""
    taken, warnings = {}, []
    for name, keys in chosen.items():
        if problem := _problem(name, keys):
            warnings.append(f"settings.toml: [keys] {name}: {problem}. It is kept and not used.")
        else:
            taken[name] = tuple(dict.fromkeys(key if len(key) == 1 else one_name(key) for key in keys))
    while (clash := _clash(_with(taken))) is not None:
        key, holders = clash
        loser = next(action for action in reversed(taken) if action in holders)
        other = next(action for action in holders if action != loser)
        warnings.append(f"settings.toml: [keys] {loser}: {key} is already a key of {other}. It is kept and not used.")
        del taken[loser]
    return Keymap(_with(taken), tuple(warnings))


def _with(taken: Chosen) -> tuple[Action, ...]:
    return tuple(
        replace(each, keys=taken[each.id], shown="") if each.id in taken else _giving_way(each, taken)
        for each in ACTIONS
    )


def _giving_way(action: Action, taken: Chosen) -> Action:
    """Return an action without those of its further keys that the user wants for another one; its first key it keeps."""
    wanted = {one_name(key) for keys in taken.values() for key in keys}
    kept = tuple(
        key for at, key in enumerate(action.keys) if at == 0 or not action.bound or one_name(key) not in wanted
    )
    return action if kept == action.keys else replace(action, keys=kept, shown="")


def _problem(name: str, keys: tuple[str, ...]) -> str:
    """Return why an action can't have these keys, whoever else has them; "" where it can."""
    action = next((each for each in ACTIONS if each.id == name), None)
    if action is None:
        near = nearest(name, (each.id for each in ACTIONS))
        return "there is no such action" + (f"; {near} is one" if near else "")
    if not action.bound:
        return "its keys are the prompt's own and fixed"
    if not keys and not (action.slash or action.palette):
        return "without a key it could not be reached"
    return next((problem for key in keys if (problem := _unusable(key, action.scope))), "")


def _unusable(key: str, scope: Scope) -> str:
    """Return why a key can't be had in that scope; "" where it can."""
    held, last = _parts(key)
    if not held <= MODIFIERS or not _is_key(last):
        return f"there is no key {key!r:.30}"
    one = one_name(key)
    if one in SAME:
        return f"a terminal sends {key} as {SAME[one]}"
    writes = held <= {"shift"} and (last not in _NAMED or last in EDITING)
    return f"{key} is needed for writing" if scope == "chat" and writes else ""


def one_name(key: str) -> str:
    """Return the name that Textual gives a key: ``[`` is ``left_square_bracket``, and what is held down comes in one order."""
    held, last = _parts(key)
    if len(last) == 1 and not last.isalnum():
        last = unicodedata.name(last, last).lower().replace(" ", "_").replace("-", "_")
    return "+".join([*sorted(held), last])


def _parts(key: str) -> tuple[set[str], str]:
    """Return what is held down, and the key that is pressed."""
    *held, last = [key] if len(key) == 1 else key.split("+")
    return set(held), last


def _is_key(name: str) -> bool:
    if len(name) == 1:
        return name.isprintable() and name != " "
    if name in _NAMED:
        return True
    try:
        unicodedata.lookup(name.replace("_", " "))  # left_square_bracket
    except KeyError:
        return False
    return True


def _clash(actions: tuple[Action, ...]) -> tuple[str, tuple[str, str]] | None:
    """Return a key that two actions have where both are heard, and their ids; None where there is none."""
    scopes: tuple[Scope, ...] = ("chat", "message")
    for scope in scopes:
        holders: dict[str, str] = {}
        for action in actions:
            for key in action.keys if action.scope in ("chat", scope) else ():
                first = holders.setdefault(one_name(key), action.id)
                if first != action.id:
                    return key, (first, action.id)
    return None
