"""Every action of the chat, once: its id, label, help, keys and slash command.

Both views are made from this table: the bindings, footer, palette and help of the full screen, and the commands of the plain chat.
What an action does is in ``app/chat/commands`` or in the view, under the same id. Keys from the user's settings replace the
table's where they can. A slash command is found by a part of its name, by what other programs call it, or by a name that is nearly
right; any other text is a prompt.

Laptops have F-keys behind fn, and terminals keep some keys for themselves. So there is a leader key: after it, a letter does what
an F-key does. Such a chord is written as its two keys with a space between: ``ctrl+x e``.
"""

import sys
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from tokamac.engine.hub.names import nearest

Scope = Literal["chat", "message"]
"""Where keys work: everywhere in the chat, or while a message is selected (Tab)."""
ARGUMENT: Final = "[on|off|low|medium|high|default|TOKENS]"
"""Of /thinking."""
MAC = sys.platform == "darwin"
"""F-keys are behind fn there."""
LEADER: Final = "leader"
"""The action whose key begins chords; in settings, its name may stand for that key: ``leader e``."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that the user can do.

    Attributes:
        id: its key binding's id too, so that a keymap can refer to it.
        keys: as Textual names them, the first shown first.
        label: a word or two for the footer and the palette.
        help: one sentence for F1, the palette and the slash menu.
        footer, palette: whether it is listed there.
        shown: how the keys are printed, where not by their names.
        bound: whether the chat screen binds the keys; the prompt handles the others itself.
        scope: where the keys work.
        slash: the command that does the same.
        argument: what follows the command, in brackets where it is optional.
        multiline: whether that may have several lines in the plain chat.
        plain_argument, plain_help: the same for the plain chat, where its command differs; None: it does not.
        also: what other programs call the command.
        yields: whether the user's choice for another action may take even its first key, which came later than the choice may have.
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
    multiline: bool = False
    plain_argument: str | None = None
    plain_help: str | None = None
    also: tuple[str, ...] = ()
    yields: bool = False

    @property
    def key_names(self) -> str:
        """The keys as a person reads them, or the command where there are none."""
        return self.shown or ", ".join(map(key_name, self.keys)) or f"/{self.slash}"

    @property
    def key_name(self) -> str:
        """The first key as a person reads it, or the command where there is none."""
        return key_name(self.keys[0]) if self.keys else f"/{self.slash}"

    @property
    def plain_key(self) -> str:
        """The first key that is no F-key, as a person reads it, for keyboards that have those behind fn; else the first."""
        return next((key_name(key) for key in self.keys if not is_f_key(key)), self.key_name)

    @property
    def either_key(self) -> str:
        """The first key, and beside an F-key one that is none: ``F2, Ctrl+X E``."""
        return ", ".join(dict.fromkeys((self.key_name, self.plain_key)))

    @property
    def usage(self) -> str:
        """The command and its argument; "" where there is no command."""
        return f"/{self.slash} {self.argument}".rstrip() if self.slash else ""

    @property
    def bound_keys(self) -> str:
        """The keys as Textual binds them; without keys, one that no terminal sends, so that a keymap can replace it.

        Chords are left out: the leader's menu has them.
        """
        return ",".join(_KEYS.get(key, key) for key in self.keys if " " not in key) or f"none_{self.id}"

    @property
    def chord(self) -> str:
        """The key after the leader; "" where there is none."""
        return next((key.partition(" ")[2] for key in self.keys if " " in key), "")

    @property
    def for_plain(self) -> "Action":
        """The action as the plain chat has it: without keys, with the argument and help of its command there."""
        argument = self.argument if self.plain_argument is None else self.plain_argument
        return replace(self, keys=(), shown="", argument=argument, help=self.plain_help or self.help)


def is_f_key(key: str) -> bool:
    """Whether a key is F1 or the like."""
    return key[:1] == "f" and key[1:].isdecimal()


def key_name(key: str) -> str:
    """Return a key, or a chord, as a person reads it."""
    if " " in key:
        leader, _, then = key.partition(" ")
        return f"{key_name(leader)} {then.upper()}"
    return key if len(key) == 1 else "+".join(_NAMES.get(part, part.capitalize()) for part in key.split("+"))


_NAMES = {
    "escape": "Esc",
    "pageup": "PageUp",
    "pagedown": "PageDown",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "underscore": "_",
    "slash": "/",
}
_KEYS = {"[": "left_square_bracket", "]": "right_square_bracket", ",": "comma"}
NEWLINE_KEYS = ("shift+enter", "ctrl+j", "alt+enter")

ACTIONS: tuple[Action, ...] = (
    Action(
        "send", ("enter",), "Send", "Send the prompt. While a reply is running, it is queued.", footer=True, bound=False
    ),
    Action(
        "newline",
        NEWLINE_KEYS,
        "New line",
        "Start a new line in the prompt.",
        shown="Shift+Enter, Ctrl+J, Alt+Enter, or a backslash at the end of the line",
        bound=False,
    ),
    Action(
        "stop",
        ("escape",),
        "Stop",
        "Stop the reply: within a token, or after the current chunk of the prompt. The text so far is kept.",
        footer=True,
        slash="stop",
        also=("abort", "cancel"),
    ),
    Action(
        "new_chat",
        ("ctrl+n",),
        "New chat",
        "Start a new chat. The model stays loaded.",
        footer=True,
        slash="new",
        also=("clear", "reset"),
    ),
    Action(
        "chats",
        ("ctrl+l",),
        "Conversations",
        "Open an earlier chat, or search all messages.",
        footer=True,
        slash="chats",
        plain_argument="[WORDS]",
        also=("find", "history", "resume", "search"),
    ),
    Action(
        "open",
        (),
        "Open",
        "Open a chat by its ID.",
        slash="open",
        argument="[ID]",
        palette=False,
        plain_argument="NUMBER|ID",
        plain_help="Open a chat by its number in the last list, or by its ID.",
    ),
    Action("title", (), "Title", "Rename this chat.", slash="title", argument="TITLE", also=("rename",)),
    Action(
        "pin",
        (),
        "Pin chat",
        "Pin this chat, or the one with this ID, to the top of the list, or unpin it.",
        slash="pin",
        argument="[ID]",
        plain_argument="[NUMBER|ID]",
        plain_help="Pin this chat, or the one with this number or ID, to the top of the list, or unpin it.",
    ),
    Action(
        "folder",
        (),
        "Folder",
        "Move this chat to a folder; none takes it out. Without a name: list the folders.",
        slash="folder",
        argument="[NAME|none]",
        also=("move",),
    ),
    Action(
        "delete_chat",
        (),
        "Delete chat",
        "Delete this chat, or the one with this ID. It can be restored for 30 days.",
        slash="delete",
        argument="[ID]",
        plain_argument="[NUMBER|ID]",
        plain_help="Delete this chat, or the one with this number or ID. It can be restored for 30 days.",
        also=("remove",),
    ),
    Action(
        "restore_chat",
        (),
        "Restore chat",
        "Restore and open the chat deleted last, or the one with this ID.",
        slash="restore",
        argument="[ID]",
    ),
    Action(
        "export",
        (),
        "Export",
        "Export this chat to a new file: .md, .json, .html or .svg.",
        slash="export",
        argument="[PATH]",
        also=("save",),
    ),
    Action("import", (), "Import", "Create a chat from a file: .md or .json.", slash="import", argument="PATH"),
    Action(
        "branches",
        ("f6", "ctrl+x t"),
        "Branches",
        "Show all versions of this chat as a tree, and switch between them.",
        slash="branches",
        plain_argument="[NUMBER]",
        plain_help="List the versions of this chat, or switch to one.",
        also=("tree",),
    ),
    Action(
        "context",
        ("ctrl+x i",),
        "Context",
        "Show what is in the context, in tokens; leave parts of it out, or send them again.",
        slash="context",
        plain_argument="[NUMBER]",
        plain_help="List what is in the context, in tokens, or leave out the part with this number; again: send it.",
    ),
    Action(
        "regenerate",
        ("ctrl+r",),
        "Regenerate",
        "Regenerate the last reply, or write several versions at once, side by side. The old version is kept.",
        footer=True,
        slash="again",
        argument="[2-8]",
        also=("redo", "retry"),
    ),
    Action(
        "compare",
        (),
        "Compare",
        "Write the reply with several values of one setting, side by side: temperature, kv-bits, thinking, seed and others.",
        slash="compare",
        argument="SETTING VALUES",
        also=("versus",),
    ),
    Action(
        "choose_model",
        ("ctrl+o",),
        "Model",
        "Choose a model: one on this disk, one to download, a folder or a Hugging Face ID.",
        footer=True,
        slash="model",
        argument="[NAME]",
        also=("load",),
    ),
    Action(
        "models",
        (),
        "Models",
        "List the models here, or search Hugging Face for words.",
        slash="models",
        argument="[search WORDS]",
    ),
    Action(
        "pull",
        (),
        "Download",
        "Download a model by its Hugging Face ID in the background.",
        slash="pull",
        argument="ID",
    ),
    Action(
        "jobs",
        (),
        "Downloads and conversions",
        "Show what is being downloaded or converted in the background.",
        slash="jobs",
        plain_argument="[stop [NUMBER]]",
        plain_help="List what is being downloaded or converted in the background, or stop one.",
        also=("background", "downloads"),
    ),
    Action(
        "adapter",
        (),
        "Adapter",
        "Load the model with a LoRA adapter, now and from now on: a folder or a Hugging Face ID. none removes it.",
        slash="adapter",
        argument="[DIR|ID|none]",
        also=("lora",),
    ),
    Action(
        "draft",
        (),
        "Draft model",
        "Load a smaller model that guesses for this one, now and from now on: a folder or a Hugging Face ID. none removes it.",
        slash="draft",
        argument="[DIR|ID|none]",
        also=("speculation", "guess"),
    ),
    Action(
        "serve",
        (),
        "Server",
        "Serve this chat's model to editors and scripts, as tokamac serve does, until the chat ends or /serve stop.",
        slash="serve",
        argument="[PORT|stop]",
        also=("server", "api"),
    ),
    Action("unload", (), "Unload", "Free the model's memory. The model reloads when you write again.", slash="unload"),
    Action(
        "system_prompt",
        ("ctrl+s",),
        "System prompt",
        "Edit the system prompt.",
        slash="system",
        plain_argument="[TEXT]",
        multiline=True,
    ),
    Action(
        "settings",
        ("ctrl+t",),
        "Settings",
        "Change all settings in one sheet: thinking, chat template, sampling, KV cache, memory, speed, app.",
        slash="settings",
        plain_argument="[NAME VALUE]",
        also=("config", "options"),
    ),
    Action(
        "profile",
        ("ctrl+x p",),
        "Profiles",
        "Apply a profile to this chat: a model, settings and a system prompt under a name. Or save this chat's as one.",
        slash="profile",
        argument="[NAME|none|save NAME|delete NAME]",
        plain_help="List the profiles, apply one to this chat (none: no profile), or save this chat's setup as one.",
        also=("persona", "preset", "profiles"),
    ),
    Action(
        "thinking",
        (),
        "Thinking",
        "Show or change thinking in this chat: on, off, low, medium, high, default, or a limit in tokens.",
        slash="thinking",
        argument=ARGUMENT,
    ),
    Action(
        "tools",
        (),
        "Tools",
        "Show the tools that the model may call; turn them on or off in this chat, or take back what they are allowed.",
        slash="tools",
        argument="[on|off|ask] [NAME …]",
        also=("mcp", "functions"),
    ),
    Action(
        "explain",
        ("f2", "ctrl+x e"),
        "Explain",
        "Explain why the last or the selected reply took as long as it did, and what would help.",
        footer=True,
        slash="explain",
        plain_argument="[TURN]",
        plain_help="Explain why the last reply, or the reply of a turn, took as long as it did, and what would help.",
        also=("why",),
    ),
    Action(
        "steps",
        ("f10", "ctrl+x s"),
        "Steps",
        "Walk through the steps of a reply: what each read, how long it took, and which other tokens were likely.",
        slash="steps",
        plain_argument="[NUMBER [TOKEN]]",
        plain_help="List the slow steps of the last reply, explain one step, or go on from it with another likely TOKEN, 1 to 5.",
        also=("passes", "tokens"),
    ),
    Action(
        "what_if",
        ("f3", "ctrl+x w"),
        "What if",
        "Compare precisions, KV settings, contexts, chips and replies at once: memory, fit and speed.",
        slash="whatif",
        plain_argument="[MODEL] [FLAGS]",
        plain_help="Compare precisions, KV settings, contexts, chips and replies at once. FLAGS: see tokamac inspect.",
    ),
    Action(
        "convert",
        ("f4", "ctrl+x c"),
        "Convert",
        "Quantize a model: see the plan, run it, use the result.",
        slash="convert",
        argument="[MODEL]",
        plain_argument="[MODEL] [FLAGS]",
        plain_help="Plan a quantization; FLAGS: see tokamac convert. Without arguments: run the last plan in the background.",
        also=("quantize",),
    ),
    Action(
        "attach",
        ("@",),
        "Attach",
        "Attach a file: type @ and part of its path, then Enter. main.py:10-40 attaches those lines; a folder, its text files.",
        bound=False,
        slash="attach",
        argument="[PATH]",
        plain_argument="PATH",
        plain_help="Attach a file, lines of it (main.py:10-40) or a folder's text files to the next prompt.",
        also=("add", "file"),
    ),
    Action(
        "detach",
        ("backspace",),
        "Detach",
        "In an empty input box: remove the last attachment.",
        bound=False,
        slash="detach",
        argument="[NAME]",
        plain_help="Remove an attachment, or the last one.",
        also=("drop",),
    ),
    Action(
        "shell",
        ("!",),
        "Shell command",
        "Run a shell command and attach its output: type ! and the command, such as !ls. It asks first. Esc ends it.",
        shown="! first",
        bound=False,
        slash="shell",
        argument="[COMMAND]",
        plain_argument="COMMAND",
        plain_help="Run a shell command, after asking, and attach its output to the next prompt; !COMMAND does the same.",
        also=("bash", "run"),
    ),
    Action(
        "earlier",
        ("up",),
        "Earlier prompt",
        "On the first line: take back the queued prompt, or recall an earlier one.",
        palette=False,
        bound=False,
    ),
    Action("later", ("down",), "Later prompt", "On the last line: recall the next prompt.", palette=False, bound=False),
    Action(
        "undo",
        ("ctrl+underscore", "ctrl+slash"),
        "Undo",
        "Undo the last change to the prompt.",
        yields=True,
    ),
    Action("redo", ("ctrl+y",), "Redo", "Redo what was undone in the prompt.", yields=True),
    Action("editor", ("ctrl+g",), "Editor", "Write the prompt in $VISUAL or $EDITOR.", slash="editor"),
    Action("toggle_panel", ("ctrl+b", "ctrl+x b"), "Side panel", "Show or hide the side panel.", slash="panel"),
    Action(
        "all_figures",
        ("f5", "ctrl+x y"),
        "All figures",
        "Show every figure in the side panel, or only speed, first token and context.",
        slash="figures",
    ),
    Action(
        "palette",
        ("ctrl+p",),
        "Commands",
        "Open the command palette, which also has the themes.",
        footer=True,
        palette=False,
        slash="palette",
    ),
    Action(
        "messages",
        ("tab",),
        "Messages",
        "Select a message: Up and Down move; a letter, or Left and Right, chooses what to do, and Enter does it.",
        bound=False,
    ),
    Action(
        "gauges",
        ("ctrl+x f",),
        "Gauges",
        "Select a figure: Up and Down move, Enter explains it.",
        slash="gauges",
        plain_argument="[FIGURE]",
        plain_help="Show the figures of the last reply, or explain one.",
    ),
    Action(
        "edit",
        ("e",),
        "Edit",
        "Edit this message: a prompt, or a reply in your words. The old version is kept.",
        scope="message",
        slash="edit",
        plain_argument="[TEXT]",
        plain_help="Edit the last prompt. The old version and its replies are kept.",
        multiline=True,
    ),
    Action(
        "edit_reply",
        (),
        "Edit the reply",
        "Edit the last reply, or the selected one. Enter keeps your version; the old one is kept too.",
        slash="revise",
        plain_argument="[TEXT]",
        plain_help="Replace the last reply with your own text. The old version is kept.",
        multiline=True,
    ),
    Action(
        "again",
        ("r",),
        "Regenerate this",
        "Regenerate this reply. The old version is kept.",
        scope="message",
        palette=False,
    ),
    Action(
        "continue",
        ("g",),
        "Continue",
        "Continue this reply, which was cut off or stopped, as a new version; or answer the unanswered prompt.",
        scope="message",
        slash="continue",
    ),
    Action("older", ("[",), "Older version", "Show the previous version.", scope="message", slash="older"),
    Action("newer", ("]",), "Newer version", "Show the next version.", scope="message", slash="newer"),
    Action("fork", ("f",), "Fork", "Continue from this message in a new chat.", scope="message", slash="fork"),
    Action("copy_message", ("y",), "Copy message", "Copy this message as Markdown.", scope="message", slash="copy"),
    Action(
        "copy_code",
        ("c",),
        "Copy code",
        "Copy the last code block; again for the one before it.",
        scope="message",
        slash="code",
    ),
    Action(
        "links",
        ("l",),
        "Links",
        "Show the links of this message; open or copy one.",
        scope="message",
        slash="links",
        plain_help="List the links of the last reply.",
    ),
    Action(
        "scroll_top",
        ("ctrl+home", "ctrl+x a"),
        "Top",
        "Jump to the start of the chat.",
        slash="top",
        plain_help="Show the first turn.",
        yields=True,
    ),
    Action(
        "scroll_end",
        ("ctrl+end", "ctrl+x z"),
        "Follow",
        "Jump to the end and follow the reply.",
        slash="end",
        plain_help="Show the last turn again.",
    ),
    Action("page_up", ("pageup", "f8", "ctrl+x u"), "Page up", "Scroll up; this stops following.", slash="up"),
    Action("page_down", ("pagedown", "f9", "ctrl+x d"), "Page down", "Scroll down.", slash="down"),
    Action(
        "copy",
        ("ctrl+c",),
        "Copy or stop",
        "Copy the selected text (drag to select), or else stop the reply; pressed twice when idle, it quits.",
        palette=False,
    ),
    Action(
        "ask_guide",
        ("f7", "ctrl+x g"),
        "Ask the guide",
        "Ask the embedded guide about this app. The chat and its model stay as they are.",
        slash="guide",
        argument="[QUESTION]",
        plain_argument="QUESTION",
    ),
    Action(
        "help",
        ("f1", "ctrl+x h"),
        "Help",
        "Show keys and actions. Type to search.",
        footer=True,
        slash="help",
        plain_help="List these commands.",
    ),
    Action(
        LEADER,
        ("ctrl+x",),
        "Keys",
        "A letter after it does what an F-key does; alone, it lists the letters. With text selected in the prompt, it cuts.",
        footer=True,
        yields=True,
    ),
    Action(
        "keys",
        ("ctrl+x k",),
        "Change keys",
        "List every action with its keys, and change them.",
        slash="keys",
        argument="[ACTION KEY]",
        plain_help="List the keys of the full screen, or set one: /keys explain f8; /keys explain default.",
        also=("bindings", "keymap", "shortcuts"),
    ),
    Action(
        "theme",
        ("ctrl+x v",),
        "Theme",
        "Choose the colours: each theme is shown as you move to it.",
        slash="theme",
        argument="[NAME]",
        also=("colors", "colours"),
    ),
    Action(
        "suspend",
        ("ctrl+z",),
        "Suspend",
        "Go back to the shell; fg returns. A running reply continues.",
        yields=True,
    ),
    Action("leave", ("ctrl+q",), "Quit", "Quit tokamac.", slash="quit", also=("bye", "exit")),
)
ALIASES = {word: action.slash for action in ACTIONS for word in action.also}
ALIKE = 0.7
"""From this ratio on a word is taken for a misspelt name: two swapped letters of four are still found, ``/etc`` is not."""


def by_slash(word: str) -> Action | None:
    """Return the action of a slash command, without its slash."""
    return next((action for action in ACTIONS if action.slash and action.slash == word), None)


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command as it was written. ``word`` has its slash; action: None where there is no such command."""

    word: str
    argument: str
    action: Action | None

    @property
    def is_whole(self) -> bool:
        """Whether there is such a command, and it has the argument that it needs."""
        needed = "" if self.action is None else self.action.argument
        return self.action is not None and (bool(self.argument) or not needed or needed.startswith("["))


def parse(text: str, *, multiline: bool = False) -> Command | None:
    """Return the command in ``text``; None where it is a prompt.

    Args:
        text: what was written.
        multiline: accept several lines after the commands that take them; else a text of several lines is a prompt.
    """
    word, _, argument = text.rstrip().partition(" ")
    if not (word.startswith("/") and word[1:].isalpha()):
        return None
    action = by_slash(word[1:].lower())
    if "\n" in argument and not (multiline and action is not None and action.multiline):
        return None
    return Command(word, argument.strip(), action)


@dataclass(frozen=True, slots=True)
class PartialCommand:
    """A command that is being typed: ``part`` of its name is before the cursor; its word ends before column ``end``."""

    part: str
    end: int


def command_at(text: str, row: int, column: int) -> PartialCommand | None:
    """Return the command that is being typed at the cursor in ``text``; None where there is none."""
    word = text.rstrip().partition(" ")[0]
    letters = word[1:]
    if not word.startswith("/") or (letters and not letters.isalpha()) or "\n" in text.rstrip():
        return None
    return PartialCommand(text[1:column], len(word)) if row == 0 and 1 <= column <= len(word) else None


def matching(part: str) -> list[Action]:
    """Return the actions whose command fits ``part`` of a name, best first; all commands for "".

    The order: the same name, names that begin with it, aliases that do, names that contain it.
    """
    wanted = part.lower()
    ranked = [(rank, action) for action in ACTIONS if action.slash and (rank := _rank(wanted, action)) is not None]
    return [action for _, action in sorted(ranked, key=lambda each: each[0])]


def unknown(word: str) -> str:
    """Return the sentence that there is no command ``word``, which has its slash; with the nearest that there is."""
    names = {name: action.slash for action in ACTIONS if action.slash for name in (*_aliases(action), action.slash)}
    near = nearest(word.removeprefix("/"), names, ALIKE)
    return f"There is no command {word}" + (f"; did you mean /{names[near]}?" if near is not None else ".")


def _rank(part: str, action: Action) -> int | None:
    name = action.slash
    aliased = any(alias.startswith(part) for alias in _aliases(action))
    tests = (name == part, name.startswith(part), aliased, part in name)
    return next((rank for rank, fits in enumerate(tests) if fits), None)


def _aliases(action: Action) -> Iterator[str]:
    """Yield the command's other names: the action's label, where that is one word, and other programs' words."""
    if action.label.isalpha():
        yield action.label.lower()
    yield from action.also


Chosen = Mapping[str, tuple[str, ...]]
"""Keys of actions, by id."""
_LEADER_KEY = next(action.keys[0] for action in ACTIONS if action.id == LEADER)
MODIFIERS = frozenset(("ctrl", "alt", "shift", "super"))
EDITING = frozenset(("space", "backspace", "delete", "insert", "left", "right", "up", "down", "home", "end"))
"""Keys that the prompt needs for itself."""
SAME = {"ctrl+i": "Tab", "ctrl+m": "Enter", "ctrl+left_square_bracket": "Esc"}
"""What a terminal sends alike."""
RENAMED = {
    "solidus": "slash",
    "reverse_solidus": "backslash",
    "commercial_at": "at",
    "hyphen_minus": "minus",
    "plus_sign": "plus",
    "low_line": "underscore",
}
"""Keys that Textual calls otherwise than Unicode does."""
NAMED_KEYS = EDITING | {"tab", "enter", "return", "escape", "pageup", "pagedown"} | {f"f{n}" for n in range(1, 25)}
"""Keys that have a name, as Textual has it."""


@dataclass(frozen=True, slots=True)
class Keymap:
    """The actions with the keys in use, and why some of the user's keys can't be."""

    actions: tuple[Action, ...] = ACTIONS
    warnings: tuple[str, ...] = ()

    def key(self, action: str) -> str:
        """Return how a text names the way to do the action of this id: its first key, or its command.

        On a Mac it is a key that needs no fn, where there is one.
        """
        return next(each.plain_key if MAC else each.key_name for each in self.actions if each.id == action)

    @property
    def changed(self) -> dict[str, str]:
        """The keys that differ from the registry's, as Textual takes a keymap."""
        default = {action.id: action.keys for action in ACTIONS}
        return {each.id: each.bound_keys for each in self.actions if each.keys != default[each.id]}


def keymap(chosen: Chosen) -> Keymap:
    """Return the registry with the chosen keys. An entry that is wrong gets a warning, and its action keeps its keys."""
    taken, problems = _taken(chosen)
    warnings = [f"settings.toml: [keys] {name}: {why}. It stays in the file, unused." for name, why in problems.items()]
    return Keymap(_led(_with(taken)), tuple(warnings))


def refusal(action: str, keys: tuple[str, ...], chosen: Chosen) -> str:
    """Return why an action can't have ``keys`` beside what else is chosen; "" where it can."""
    others = {name: each for name, each in chosen.items() if name != action}
    return _taken({**others, action: keys})[1].get(action, "")


def _taken(chosen: Chosen) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the chosen keys that can be had, and why the others can't, by action. Of two that want one key, the first has it."""
    taken: dict[str, tuple[str, ...]] = {}
    problems: dict[str, str] = {}
    leaders = {LEADER, _LEADER_KEY, *chosen.get(LEADER, ())}
    for name, listed in chosen.items():
        keys = tuple(_on_usual_leader(key, leaders) for key in listed)
        if problem := _problem(name, keys):
            problems[name] = problem
        else:
            taken[name] = tuple(dict.fromkeys(key if len(key) == 1 else one_name(key) for key in keys))
    while (clash := _clash(_with(taken))) is not None:
        key, holders = clash
        loser = next(action for action in reversed(taken) if action in holders)
        other = next(action for action in holders if action != loser)
        problems[loser] = f"{key} is already a key of {other}"
        del taken[loser]
    return taken, problems


def _on_usual_leader(key: str, leaders: Collection[str]) -> str:
    """Return a chord with the leader's usual key, by whichever name that was written."""
    first, space, then = key.strip().partition(" ")
    return f"{_LEADER_KEY} {then.strip()}" if space and first in leaders else key


def _led(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return the actions with their chords on the leader's own key; without a leader, without chords."""
    (leader,) = (each.keys for each in actions if each.id == LEADER)
    if leader[:1] == (_LEADER_KEY,):
        return tuple(actions)
    led = []
    for each in actions:
        chords = [f"{leader[0]} {key.partition(' ')[2]}" for key in each.keys if " " in key and leader]
        keys = (*(key for key in each.keys if " " not in key), *chords)
        led.append(replace(each, keys=keys) if keys != each.keys else each)
    return tuple(led)


def _with(taken: Chosen) -> tuple[Action, ...]:
    """Return the actions with the keys ``taken`` by the user; others give up those of their keys, but never their first."""
    wanted = {one_name(key) for keys in taken.values() for key in keys}
    actions = []
    for action in ACTIONS:
        keys = taken.get(action.id)
        if keys is None:
            spare = action.keys[0 if action.yields else 1 :] if action.bound else ()
            keys = tuple(key for key in action.keys if key not in spare or one_name(key) not in wanted)
        changed = action.id in taken or keys != action.keys
        actions.append(replace(action, keys=keys, shown="") if changed else action)
    return tuple(actions)


def _problem(name: str, keys: tuple[str, ...]) -> str:
    """Return why an action can't have these keys, whoever else has them; "" where it can."""
    action = next((each for each in ACTIONS if each.id == name), None)
    if action is None:
        return no_action(name)
    if not action.bound:
        return "its keys belong to the prompt and are fixed"
    if not keys and not (action.slash or action.palette):
        return "without a key it could not be reached"
    return next((problem for key in keys if (problem := _unusable(key, action.scope))), "")


NEAREST = 3


def no_action(name: str) -> str:
    """Return a clause that there is no action of this id, with the nearest there are, and what lists all."""
    from difflib import get_close_matches

    near = get_close_matches(name.casefold(), [each.id for each in ACTIONS], NEAREST)
    meant = f"; the nearest: {', '.join(near)}" if near else ""
    return f"there is no such action{meant} (/keys, or tokamac help keys, lists all)"


def _unusable(key: str, scope: Scope) -> str:
    """Return why a key can't be used in that scope; "" where it can."""
    if " " in key:
        first, _, then = key.partition(" ")
        if first != _LEADER_KEY:
            return f"{key!r:.30} does not begin with the leader key"
        return "" if len(then) == 1 and then.isprintable() else f"{key!r:.30} does not end with one letter"
    modifiers, last = _parts(key)
    if not modifiers <= MODIFIERS or not _is_key(last):
        return f"there is no key {key!r:.30}"
    one = one_name(key)
    if one in SAME:
        return f"a terminal sends {key} as {SAME[one]}"
    writes = modifiers <= {"shift"} and (last not in NAMED_KEYS or last in EDITING)
    return f"{key} is needed for writing" if scope == "chat" and writes else ""


def one_name(key: str) -> str:
    """Return the name that Textual gives a key: ``[`` is ``left_square_bracket``, and modifiers come in one order."""
    if " " in key:
        leader, _, then = key.partition(" ")
        return f"{one_name(leader)} {then.lower()}"
    modifiers, last = _parts(key)
    if len(last) == 1 and not last.isalnum():
        last = unicodedata.name(last, last).lower().replace(" ", "_").replace("-", "_")
    return "+".join([*sorted(modifiers), RENAMED.get(last, last)])


def _parts(key: str) -> tuple[set[str], str]:
    """Return the modifiers, and the key that is pressed."""
    *modifiers, last = [key] if len(key) == 1 else key.split("+")
    return set(modifiers), last


def _is_key(name: str) -> bool:
    if len(name) == 1:
        return name.isprintable() and name != " "
    if name in NAMED_KEYS or name in RENAMED.values():
        return True
    try:
        unicodedata.lookup(name.replace("_", " "))  # left_square_bracket
    except KeyError:
        return False
    return True


def _clash(actions: Sequence[Action]) -> tuple[str, tuple[str, str]] | None:
    """Return a key that two actions have in one scope, and their ids; None where there is none."""
    for scope in ("chat", "message"):
        holders: dict[str, str] = {}
        for action in actions:
            for key in action.keys if action.scope in ("chat", scope) else ():
                first = holders.setdefault(one_name(key), action.id)
                if first != action.id:
                    return key, (first, action.id)
    return None
