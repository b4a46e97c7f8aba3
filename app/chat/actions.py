"""Every action of the chat, once. Keys, slash commands, footer, command palette and help (F1) are made from this table.

An action's ``id`` is its binding's id too (a keymap refers to it); what it does is in ``app/tui/actions``, under the same id. Keys
that the user's settings name replace the table's where they can. A slash command is found by a part of its name, by what other
programs call it, or by a name that is nearly right; any other text is a prompt.
"""

import unicodedata
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from textual.binding import Binding, BindingType
from textual.keys import Keys

from tokamac.engine.hub.cache import nearest

Scope = Literal["chat", "message"]
"""Where keys hold: everywhere in the chat, or while a message is pointed at (Tab)."""


ARGUMENT: Final = "[on|off|low|medium|high|default|TOKENS]"
"""Of /thinking."""


@dataclass(frozen=True, slots=True)
class Action:
    """``keys`` as Textual names them, the first shown first. ``shown`` overrides how they are printed.

    slash: the command that does the same. argument: what follows it, as the help names it; in brackets where it need not.
    """

    id: str
    keys: tuple[str, ...]
    label: str
    help: str
    footer: bool = False
    palette: bool = True
    shown: str = ""
    bound: bool = True
    scope: Scope = "chat"
    slash: str = ""
    argument: str = ""

    @property
    def key_names(self) -> str:
        """The keys as a person reads them, or the command where there are none."""
        return self.shown or ", ".join(_name(key) for key in self.keys) or f"/{self.slash}"

    @property
    def key_name(self) -> str:
        """The first of the keys as a person reads it, or the command where there are none: how a text names the action."""
        return _name(self.keys[0]) if self.keys else f"/{self.slash}"

    @property
    def usage(self) -> str:
        """The command and what may follow it; "" where there is none."""
        return f"/{self.slash} {self.argument}".rstrip() if self.slash else ""

    @property
    def bound_keys(self) -> str:
        """The keys as Textual binds them; where there are none, one that no terminal sends, so that a keymap can give one."""
        return ",".join(_KEYS.get(key, key) for key in self.keys) or f"none_{self.id}"


def _name(key: str) -> str:
    return key if len(key) == 1 else "+".join(_NAMES.get(part, part.capitalize()) for part in key.split("+"))


_NAMES = {
    "escape": "Esc",
    "pageup": "PageUp",
    "pagedown": "PageDown",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
}


ACTIONS: tuple[Action, ...] = (
    # Enter and the newline keys act inside the prompt, which handles them itself: `bound` is off.
    Action(
        "send", ("enter",), "Send", "Send the prompt. While a reply runs it waits its turn.", footer=True, bound=False
    ),
    Action(
        "newline",
        ("shift+enter", "ctrl+j", "alt+enter"),
        "New line",
        "Start a new line in the prompt.",
        shown="Shift+Enter, Ctrl+J, Alt+Enter, or a backslash at the end of the line",
        bound=False,
    ),
    Action(
        "stop",
        ("escape",),
        "Stop",
        "Stop the reply within a token, or after the piece of the prompt being read; what was written stays.",
        footer=True,
        slash="stop",
    ),
    Action("new_chat", ("ctrl+n",), "New chat", "Start a new chat; the model stays loaded.", footer=True, slash="new"),
    Action(
        "chats",
        ("ctrl+l",),
        "Conversations",
        "Open an earlier chat, or search in all that was said.",
        footer=True,
        slash="chats",
    ),
    Action("open", (), "Open", "Open a chat by its id.", slash="open", argument="[ID]", palette=False),
    Action("title", (), "Title", "Give this chat another title.", slash="title", argument="TITLE"),
    Action(
        "delete_chat",
        (),
        "Delete chat",
        "Delete this chat, or the one of that id; it can be brought back for 30 days.",
        slash="delete",
        argument="[ID]",
    ),
    Action(
        "restore_chat",
        (),
        "Restore chat",
        "Bring back the chat that was deleted last, or the one of that id, and open it.",
        slash="restore",
        argument="[ID]",
    ),
    Action(
        "export",
        (),
        "Export",
        "Write this chat to a new file: .md, .json, .html or .svg.",
        slash="export",
        argument="[PATH]",
    ),
    Action("import", (), "Import", "Make a new chat of a file: .md or .json.", slash="import", argument="PATH"),
    Action(
        "branches", ("f6",), "Branches", "See all versions of this chat as a tree, and go to one.", slash="branches"
    ),
    Action(
        "regenerate",
        ("ctrl+r",),
        "Regenerate",
        "Make the last reply again; the old one stays beside it.",
        footer=True,
        slash="again",
    ),
    Action(
        "choose_model",
        ("ctrl+o",),
        "Model",
        "Choose a model: here, or to download; a folder or a Hugging Face id.",
        footer=True,
        slash="model",
        argument="[NAME]",
    ),
    Action(
        "pull",
        (),
        "Download",
        "Download a model by its Hugging Face id; the chat goes on.",
        slash="pull",
        argument="ID",
    ),
    Action(
        "adapter",
        (),
        "Adapter",
        "Load the model with a LoRA adapter, now and in future: a folder or a Hugging Face id; none takes it away.",
        slash="adapter",
        argument="[DIR|ID|none]",
    ),
    Action("unload", (), "Unload", "Give the model's memory back now; it loads again when you write.", slash="unload"),
    Action("system_prompt", ("ctrl+s",), "System prompt", "Edit the system prompt.", slash="system"),
    Action("settings", ("ctrl+t",), "Settings", "Sampling and KV cache settings.", slash="settings"),
    Action(
        "thinking",
        (),
        "Thinking",
        "Say whether the model thinks first in this chat, or change it: on, off, low, medium, high, default, or tokens at most.",
        slash="thinking",
        argument=ARGUMENT,
    ),
    Action(
        "explain",
        ("f2",),
        "Explain",
        "Say why the last reply took as long as it did, and what would help.",
        footer=True,
        slash="explain",
    ),
    Action(
        "what_if",
        ("f3",),
        "What if",
        "Other precisions, KV settings, contexts and chips: memory, fit and speed.",
        slash="whatif",
    ),
    Action(
        "convert",
        ("f4",),
        "Convert",
        "Pack a model into fewer bits: the plan, the run, the result.",
        slash="convert",
        argument="[MODEL]",
    ),
    Action(
        "attach",
        ("@",),
        "Attach",
        "Attach a file: @ and a part of its path, then Enter.",
        bound=False,
        slash="attach",
        argument="[PATH]",
    ),
    Action(
        "detach",
        ("backspace",),
        "Detach",
        "In an empty box: let go of the last attachment.",
        bound=False,
        slash="detach",
        argument="[NAME]",
    ),
    Action(
        "earlier",
        ("up",),
        "Earlier prompt",
        "On the first line: take back the prompt that waits, or what was sent before.",
        palette=False,
        bound=False,
    ),
    Action("later", ("down",), "Later prompt", "On the last line: and forward again.", palette=False, bound=False),
    Action("editor", ("ctrl+g",), "Editor", "Write the prompt in $VISUAL or $EDITOR.", slash="editor"),
    Action("toggle_panel", ("ctrl+b", "f5"), "Side panel", "Show or hide the gauges.", slash="panel"),
    Action(
        "palette",
        ("ctrl+p",),
        "Commands",
        "Open the command palette; themes are there too.",
        footer=True,
        palette=False,
        slash="palette",
    ),
    Action(
        "messages", ("tab",), "Messages", "Point at a message: Up and Down choose, Enter unfolds thinking.", bound=False
    ),
    Action("gauges", (), "Gauges", "Point at a figure: Up and Down choose, Enter explains it.", slash="gauges"),
    Action(
        "edit",
        ("e",),
        "Edit",
        "Write this prompt anew; what followed it stays beside it.",
        scope="message",
        slash="edit",
    ),
    Action(
        "again",
        ("r",),
        "Make again",
        "Make this reply again; the old one stays beside it.",
        scope="message",
        palette=False,
    ),
    Action(
        "continue",
        ("g",),
        "Go on",
        "Go on with this reply, which was cut or stopped, in a copy beside it; or answer the prompt that has none.",
        scope="message",
        slash="continue",
    ),
    Action("older", ("[",), "Older version", "Read the version before this one.", scope="message", slash="older"),
    Action("newer", ("]",), "Newer version", "Read the version after this one.", scope="message", slash="newer"),
    Action("fork", ("f",), "Fork", "Go on from this message in a new chat.", scope="message", slash="fork"),
    Action(
        "copy_message", ("y",), "Copy message", "Copy this message as it was written.", scope="message", slash="copy"
    ),
    Action(
        "copy_code",
        ("c",),
        "Copy code",
        "Copy the last code block; again for the one before it.",
        scope="message",
        slash="code",
    ),
    Action("scroll_end", ("ctrl+end",), "Follow", "Jump to the end and follow the reply.", slash="end"),
    Action("page_up", ("pageup", "f8"), "Page up", "Scroll up; following stops.", slash="up"),
    Action("page_down", ("pagedown", "f9"), "Page down", "Scroll down.", slash="down"),
    Action("copy", ("ctrl+c",), "Copy", "Copy the selected text (drag with the mouse to select)."),
    Action(
        "ask_guide",
        ("f7",),
        "Ask the guide",
        "Ask the embedded guide about this app; the chat and its model stay as they are.",
        slash="guide",
        argument="[QUESTION]",
    ),
    Action("help", ("f1",), "Help", "Keys and actions.", footer=True, slash="help"),
    Action("leave", ("ctrl+q",), "Quit", "Leave tokamac.", slash="quit"),
)


def bindings(scope: Scope = "chat") -> list[BindingType]:
    """Return the key bindings of the chat screen, or those that hold while a message is pointed at.

    The screen's have priority, so that they work while the prompt has the focus; Esc, too, must reach a running reply at once.
    """
    return [
        Binding(
            action.bound_keys,
            f"screen.do('{action.id}')",
            action.label,
            id=action.id,
            priority=scope == "chat",
            show=False,
            tooltip=action.help,
        )
        for action in ACTIONS
        if action.bound and action.scope == scope
    ]


_KEYS = {"[": "left_square_bracket", "]": "right_square_bracket", ",": "comma"}


def by_slash(word: str) -> Action | None:
    """Return the action of a slash command, without its slash."""
    return next((action for action in ACTIONS if action.slash and action.slash == word), None)


@dataclass(frozen=True, slots=True)
class Command:
    """``word`` has its slash. action: None where no command is called so."""

    word: str
    argument: str
    action: Action | None

    @property
    def is_whole(self) -> bool:
        """Whether there is such a command, and what has to follow it follows."""
        needed = "" if self.action is None else self.action.argument
        return self.action is not None and (bool(self.argument) or not needed or needed.startswith("["))


def parse(text: str, lined: Container[str] = ()) -> Command | None:
    """Return the command that ``text`` is; None where it is a prompt, as it is where it has several lines.

    lined: ids of the actions that may be followed by several.
    """
    word, _, argument = text.rstrip().partition(" ")
    if not (word.startswith("/") and word[1:].isalpha()):
        return None
    action = by_slash(word[1:].lower())
    if "\n" in argument and (action is None or action.id not in lined):
        return None
    return Command(word, argument.strip(), action)


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
