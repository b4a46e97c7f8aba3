"""Finding a slash command by a part of its name, by what other programs call it, or by a name that is nearly right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokamac.app.tui.actions import ACTIONS, Action
from tokamac.engine.spelling import nearest

ALSO_CALLED = {
    "abort": "stop",
    "add": "attach",
    "bye": "quit",
    "cancel": "stop",
    "clear": "new",
    "config": "settings",
    "download": "pull",
    "drop": "detach",
    "exit": "quit",
    "file": "attach",
    "find": "chats",
    "history": "chats",
    "keys": "help",
    "load": "model",
    "lora": "adapter",
    "options": "settings",
    "quantize": "convert",
    "redo": "again",
    "remove": "delete",
    "rename": "title",
    "reset": "new",
    "resume": "chats",
    "retry": "again",
    "save": "export",
    "search": "chats",
    "tree": "branches",
    "why": "explain",
}
"""Commands by the words under which somebody who comes from another program looks for them."""
ALIKE = 0.7
"""From this ratio on a word is taken for a misspelt name: two swapped letters of four are still found, ``/etc`` is not."""


@dataclass(frozen=True, slots=True)
class Calling:
    """A command that is being named: ``part`` of its name is before the cursor; its word ends before column ``end``."""

    part: str
    end: int


def calling(text: str, row: int, column: int) -> Calling | None:
    """Return the command that is being named at the cursor in ``text``; None where the text is none, or the cursor elsewhere.

    As for ``slash.parse``, a text is none where its first word holds more than a slash and letters, or where it has more lines.
    """
    word = text.rstrip().partition(" ")[0]
    letters = word[1:]
    if not word.startswith("/") or (letters and not letters.isalpha()) or "\n" in text.rstrip():
        return None
    return Calling(text[1:column], len(word)) if row == 0 and 1 <= column <= len(word) else None


def fitting(part: str, actions: Sequence[Action] = ACTIONS) -> list[Action]:
    """Return the actions with a command that fits ``part`` of a name, best first; where nothing is written, all of them.

    What is called so goes before names that begin with it, then what is also called so, then names that hold it.
    """
    wanted = part.lower()
    ranked = [(rank, action) for action in _called(actions) if (rank := _rank(wanted, action)) is not None]
    return [action for _, action in sorted(ranked, key=lambda each: each[0])]


def unknown(word: str, actions: Sequence[Action] = ACTIONS) -> str:
    """Return the sentence that there is no command ``word``, which has its slash; with the nearest that there is."""
    near = _nearest(word.removeprefix("/"), actions)
    return f"There is no command {word}" + (f"; did you mean /{near}?" if near else ".")


def _nearest(word: str, actions: Sequence[Action]) -> str:
    """Return the command whose name, or whose other name, is nearest; "" where none is near."""
    names = {name: action.slash for action in _called(actions) for name in (*_others(action), action.slash)}
    found = nearest(word, names, ALIKE)
    return names[found] if found is not None else ""


def _called(actions: Sequence[Action]) -> Iterator[Action]:
    return (action for action in actions if action.slash)


def _rank(part: str, action: Action) -> int | None:
    name = action.slash
    others = any(other.startswith(part) for other in _others(action))
    tests = (name == part, name.startswith(part), others, part in name)
    return next((rank for rank, fits in enumerate(tests) if fits), None)


def _others(action: Action) -> Iterator[str]:
    """Yield what a command is called besides: its action's label, where that is one word, and other programs' words."""
    if action.label.isalpha():
        yield action.label.lower()
    yield from (other for other, slash in ALSO_CALLED.items() if slash == action.slash)
