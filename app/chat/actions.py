"""Registry of all chat actions: id, label, help, keys, slash command."""

import re
import sys
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from tokamac.engine.hub.names import nearest

# Both views derive from it: bindings, footer, palette and help of the full screen, commands of the plain chat.
# Implementations live in ``app/chat/commands`` or a view, under the same id. Users' keys override the table's.
# A leader key replaces F-keys (laptops hide them behind fn, terminals reserve some): ``ctrl+x e`` is a chord.


Scope = Literal["chat", "message"]  # where keys work: everywhere in the chat, or while a message is selected (Tab)
ARGUMENT: Final = "[on|off|low|medium|high|default|TOKENS]"  # of /thinking
MAC = sys.platform == "darwin"  # F-keys are behind fn there
LEADER: Final = "leader"  # the action whose key begins chords; in settings, its name may stand for that key: `leader e`


@dataclass(frozen=True, slots=True)
class Action:
    """A user action.

    Attributes:
        id: also the key binding's id, so that a keymap can refer to it.
        keys: Textual names; the first is shown first.
        footer, palette: whether it is listed there.
        shown: display form of the keys, where not their names.
        bound: whether the chat screen binds the keys; else the prompt handles them.
        argument: of the command; in brackets if optional. multiline: allowed in the plain chat.
        plain_argument, plain_help: overrides for the plain chat.
        also: command aliases from other programs.
        yields: whether a user's key for another action may take even its first key.
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
        return self.shown or ", ".join(map(key_name, self.keys)) or f"/{self.slash}"

    @property
    def key_name(self) -> str:
        return key_name(self.keys[0]) if self.keys else f"/{self.slash}"

    @property
    def plain_key(self) -> str:
        """The first key that is not an F-key (behind fn on some keyboards), else the first."""
        return next((key_name(key) for key in self.keys if not is_f_key(key)), self.key_name)

    @property
    def either_key(self) -> str:
        """The first key, plus a non-F-key alternative: ``F2, Ctrl+X E``."""
        return ", ".join(dict.fromkeys((self.key_name, self.plain_key)))

    @property
    def usage(self) -> str:
        return f"/{self.slash} {self.argument}".rstrip() if self.slash else ""

    @property
    def bound_keys(self) -> str:
        """Keys as Textual binds them, without chords (the leader's menu has them)."""
        # Without keys: one that no terminal sends, so that a keymap can replace it.
        return ",".join(_KEYS.get(key, key) for key in self.keys if " " not in key) or f"none_{self.id}"

    @property
    def chord(self) -> str:
        return next((key.partition(" ")[2] for key in self.keys if " " in key), "")

    @property
    def for_plain(self) -> "Action":
        """The action in the plain chat: no keys, that chat's argument and help."""
        argument = self.argument if self.plain_argument is None else self.plain_argument
        return replace(self, keys=(), shown="", argument=argument, help=self.plain_help or self.help)


def is_f_key(key: str) -> bool:
    return key[:1] == "f" and key[1:].isdecimal()


def key_name(key: str) -> str:
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

# A table: an action a paragraph.
# fmt: off
ACTIONS: tuple[Action, ...] = (
    Action("send", ("enter",), "Send", "Send the prompt. While a reply is running, it is queued.", footer=True,
        bound=False),
    Action("newline", NEWLINE_KEYS, "New line", "Start a new line in the prompt.",
        shown="Shift+Enter, Ctrl+J, Alt+Enter, or a backslash at the end of the line", bound=False),
    Action("stop", ("escape",), "Stop",
        "Stop the reply: within a token, or after the current chunk of the prompt. The text so far is kept.",
        footer=True, slash="stop", also=("abort", "cancel")),
    Action("new_chat", ("ctrl+n",), "New chat", "Start a new chat. The model stays loaded.", footer=True, slash="new",
        also=("clear", "reset")),
    Action("private", (), "Private chat",
        "Begin a chat of which nothing is kept: no messages, no prompt cache on disk, no input history. Again: end and forget it.",
        slash="private", also=("incognito", "temporary")),
    Action("chats", ("ctrl+l",), "Chats", "Open an earlier chat, or search all messages and attached files.",
        footer=True, slash="chats",
        argument="[WORDS]", also=("find", "history", "resume", "search")),
    Action("find_meaning", (), "Find by meaning",
        "Search all messages and attached files by meaning, with an embedding model that is here.", slash="meaning",
        argument="[WORDS]", plain_argument="WORDS"),
    Action("open", (), "Open", "Open a chat by its ID; ID:MESSAGE goes to that message, whatever its branch.", slash="open",
        argument="[ID]", palette=False, plain_argument="NUMBER|ID",
        plain_help="Open a chat, or go to a message that was found, by its number in the last list or its ID."),
    Action("title", (), "Title", "Rename this chat.", slash="title", argument="TITLE", also=("rename",)),
    Action("pin", (), "Pin chat", "Pin this chat, or the one with this ID, to the top of the list, or unpin it.",
        slash="pin", argument="[ID]", plain_argument="[NUMBER|ID]",
        plain_help="Pin this chat, or the one with this number or ID, to the top of the list, or unpin it."),
    Action("folder", (), "Folder", "Move this chat to a folder; none takes it out. Without a name: list the folders.",
        slash="folder", argument="[NAME|none]", also=("move",)),
    Action("delete_chat", (), "Delete chat", "Delete this chat, or the one with this ID. It can be restored for 30 days.",
        slash="delete", argument="[ID]", plain_argument="[NUMBER|ID]",
        plain_help="Delete this chat, or the one with this number or ID. It can be restored for 30 days.",
        also=("remove",)),
    Action("restore_chat", (), "Restore chat", "Restore and open the chat deleted last, or the one with this ID.",
        slash="restore", argument="[ID]"),
    Action("export", (), "Export", "Export this chat to a new file: .md, .json, .html or .svg.", slash="export",
        argument="[PATH]", also=("save",)),
    Action("import", (), "Import", "Import a chat from .md or .json, or all of another program's.", slash="import",
        argument="PATH"),
    Action("branches", ("f6", "ctrl+x t"), "Branches",
        "Show all versions of this chat as a tree, and switch between them.", slash="branches",
        plain_argument="[NUMBER]", plain_help="List the versions of this chat, or switch to one.", also=("tree",)),
    Action("context", ("ctrl+x i",), "Context",
        "Show what is in the context, in tokens; leave parts of it out, or send them again.", slash="context",
        plain_argument="[NUMBER]",
        plain_help="List what is in the context, in tokens, or leave out the part with this number; again: send it."),
    Action("regenerate", ("ctrl+x r",), "Regenerate",
        "Regenerate the last reply, or write several versions at once, side by side. The old version is kept.",
        footer=True, slash="again", argument="[2-8]", also=("redo", "retry"), yields=True),
    Action("undo_turn", (), "Undo turn",
        "Take the last turn back; its prompt returns to an empty input box. Nothing is deleted: it stays a branch.",
        slash="undo"),
    Action("shorter", (), "Shorter",
        "Regenerate the last reply with a quarter of its tokens at most, or with as many as you say. The old version is kept.",
        slash="shorter", argument="[TOKENS]"),
    Action("keep_going", ("ctrl+k",), "Keep going", "Let a reply go on that repeats itself, and would be stopped for it.",
        palette=False, slash="keep", yields=True),
    Action("compact", (), "Compact",
        "Go on from the model's summary of this chat: its price is told, now does it. The whole chat stays as another branch.",
        slash="compact", argument="[now]", also=("summarize", "summarise")),
    Action("compare", (), "Compare",
        "Write the reply with several values of one setting, side by side: temperature, kv-bits, thinking, …; or model A B.",
        slash="compare", argument="SETTING VALUES", also=("versus",)),
    Action("choose_model", ("ctrl+o",), "Model",
        "Choose a model: one on this disk, one to download, a folder or a Hugging Face ID.", footer=True, slash="model",
        argument="[NAME]", also=("load",)),
    Action("models", (), "Models", "List the models here, or search Hugging Face for words.", slash="models",
        argument="[search WORDS]"),
    Action("pull", (), "Download", "Download a model by its Hugging Face ID in the background.", slash="pull",
        argument="ID"),
    Action("jobs", (), "Downloads and conversions", "Show what is being downloaded or converted in the background.",
        slash="jobs", plain_argument="[stop [NUMBER]]",
        plain_help="List what is being downloaded or converted in the background, or stop one.",
        also=("background", "downloads")),
    Action("adapter", (), "Adapter",
        "Load the model with a LoRA adapter, now and from now on: a folder or a Hugging Face ID. none removes it.",
        slash="adapter", argument="[DIR|ID|none]", also=("lora",)),
    Action("draft", (), "Draft model",
        "Load a smaller model that guesses for this one, now and from now on: a folder or a Hugging Face ID. none removes it.",
        slash="draft", argument="[DIR|ID|none]", also=("speculation", "guess")),
    Action("serve", (), "Server",
        "Serve this chat's model to editors and scripts, as tokamac serve does, until the chat ends or /serve stop.",
        slash="serve", argument="[PORT|stop]", also=("server", "api")),
    Action("unload", (), "Unload", "Free the model's memory. The model reloads when you write again.", slash="unload"),
    Action("system_prompt", ("ctrl+s",), "System prompt", "Edit the system prompt.", slash="system", argument="[TEXT]",
        multiline=True),
    Action("remember", (), "Remember",
        "Add a fact to this profile's memory: a file that is part of the system prompt, and that nothing else writes.",
        slash="remember", argument="[TEXT|edit]", also=("memory",)),
    Action("project", (), "Project",
        "Make AGENTS.md or README.md of this folder part of the system prompt, in this chat and new ones; its price is told.",
        slash="project", argument="[on|off]", also=("agents",)),
    Action("settings", ("ctrl+t",), "Settings",
        "Search and change all settings. NAME VALUE changes one at once, a chat's own in this chat alone.",
        slash="settings", argument="[NAME VALUE]",
        plain_help="List the settings, or change one: a chat's own in this chat alone; everywhere NAME VALUE: in every chat.",
        also=("set", "config", "options")),
    Action("show", (), "Show",
        "Show the model, the settings that differ, the chat template's options or the system prompt.", slash="show",
        argument="[model|settings|template|system]", also=("info",)),
    Action("profile", ("ctrl+x p",), "Profiles",
        "Apply a profile to this chat: a model, settings and a system prompt under a name. Or save this chat's as one.",
        slash="profile", argument="[NAME|none|save NAME|delete NAME]",
        plain_help="List the profiles, apply one to this chat (none: no profile), or save this chat's setup as one.",
        also=("persona", "preset", "profiles")),
    Action("thinking", (), "Thinking",
        "Show or change thinking in this chat: on, off, low, medium, high, default, or a limit in tokens.",
        slash="thinking", argument=ARGUMENT),
    Action("pace", (), "Pace",
        "Let the GPU work less of the time, for the screen, other programs, heat or the battery: per cent; 100 is always.",
        slash="pace", argument="[PERCENT]"),
    Action("tools", (), "Tools",
        "Show the tools that the model may call; turn them on or off in this chat, or take back what they are allowed.",
        slash="tools", argument="[on|off|ask] [NAME …]", also=("mcp", "functions")),
    Action("explain", ("f2", "ctrl+x e"), "Explain",
        "Explain why the last or the selected reply took as long as it did, and what would help.", footer=True,
        slash="explain", plain_argument="[TURN]",
        plain_help="Explain why the last reply, or the reply of a turn, took as long as it did, and what would help.",
        also=("why",)),
    Action("stats", (), "Figures", "Show the figures of the last reply.", slash="stats"),
    Action("steps", ("f10", "ctrl+x s"), "Steps",
        "Walk through the steps of a reply: what each read, how long it took, and which other tokens were likely.",
        slash="steps", plain_argument="[NUMBER [TOKEN]]",
        plain_help="List the slow steps of the last reply, explain one step, or go on from it with another likely TOKEN, 1 to 5.",
        also=("passes", "tokens")),
    Action("sure", ("ctrl+x o",), "How sure", "Tint the words of a reply by how likely each was; choose one to go on with another.",
        slash="sure", plain_help="Show the last reply with its unlikely words marked, and what else was likely there.",
        also=("odds", "confidence")),
    Action("what_if", ("f3", "ctrl+x w"), "What if",
        "Compare precisions, KV settings, contexts, chips and replies at once: memory, fit and speed.", slash="whatif",
        argument="[MODEL]", plain_argument="[MODEL] [FLAGS]",
        plain_help="Compare precisions, KV settings, contexts, chips and replies at once. FLAGS: see tokamac inspect."),
    Action("convert", ("f4", "ctrl+x c"), "Convert", "Quantize a model: see the plan, run it, use the result.",
        slash="convert", argument="[MODEL]", plain_argument="[MODEL] [FLAGS]",
        plain_help="Plan a quantization; FLAGS: see tokamac convert. Without arguments: run the last plan in the background.",
        also=("quantize",)),
    Action("attach", ("@",), "Attach",
        "Attach a file: type @ and part of its path, then Enter. main.py:10-40 attaches those lines; a folder, its text files; "
        "/attach URL, a web page.",
        bound=False, slash="attach", argument="[PATH|URL]", plain_argument="PATH|URL",
        plain_help="Attach a file, lines of it (main.py:10-40), a folder's text files, or a web page, after asking.",
        also=("add", "file")),
    Action("detach", ("backspace",), "Detach", "In an empty input box: remove the last attachment.", bound=False,
        slash="detach", argument="[NAME]", plain_help="Remove an attachment, or the last one.", also=("drop",)),
    Action("paste", ("ctrl+v",), "Paste picture", "Attach the picture in the clipboard; without one, paste what was copied here.",
        slash="paste", plain_help="Attach the picture in the clipboard to the next prompt.", yields=True),
    Action("shell", ("!",), "Shell command",
        "Run a shell command and attach its output: type ! and the command, such as !ls. It asks first. Esc ends it.",
        shown="! first", bound=False, slash="shell", argument="[COMMAND]", plain_argument="COMMAND",
        plain_help="Run a shell command, after asking, and attach its output to the next prompt; !COMMAND does the same.",
        also=("bash", "run")),
    Action("earlier", ("up",), "Earlier prompt",
        "On the first line: take back the queued prompt, or recall an earlier one.", palette=False, bound=False),
    Action("later", ("down",), "Later prompt", "On the last line: recall the next prompt.", palette=False, bound=False),
    Action("search_prompts", ("ctrl+r",), "Search prompts",
        "Search what you sent, in all chats; Enter puts it into the input box.", slash="sent"),
    Action("prompt_files", (), "Prompts",
        "List your prompts, edit one, or save the last message as one: prompts/NAME.md beside the settings is the command /NAME.",
        slash="prompts", argument="[edit NAME|save NAME]", also=("templates",)),
    Action("edit_earlier", (), "Edit earlier prompt",
        "Choose an earlier prompt of this chat, and edit it. The old version and its replies are kept.",
        shown="Esc Esc in an empty input box", slash="rewind", argument="[TURN [TEXT]]",
        plain_help="List the prompts of this chat, or edit that of a turn. The old version and its replies are kept.",
        also=("checkpoint",)),
    Action("undo", ("ctrl+underscore", "ctrl+slash"), "Undo", "Undo the last change to the prompt.", yields=True),
    Action("redo", ("ctrl+y",), "Redo", "Redo what was undone in the prompt.", yields=True),
    Action("editor", ("ctrl+g",), "Editor", "Write the prompt in $VISUAL or $EDITOR.", slash="editor"),
    Action("toggle_panel", ("ctrl+b", "ctrl+x b"), "Side panel", "Show or hide the side panel.", slash="panel"),
    Action("all_figures", ("f5", "ctrl+x y"), "All figures",
        "Show every figure in the side panel, or only speed, first token and context.", slash="figures"),
    Action("palette", ("ctrl+p",), "Commands", "Open the command palette, which also has the themes.", footer=True,
        palette=False, slash="palette"),
    Action("messages", ("tab",), "Messages",
        "Select a message: Up and Down move; a letter, or Left and Right, chooses what to do, and Enter does it.",
        bound=False),
    Action("gauges", ("ctrl+x f",), "Gauges", "Select a figure: Up and Down move, Enter explains it.", slash="gauges",
        plain_argument="[FIGURE]", plain_help="Show the figures of the last reply, or explain one."),
    Action("edit", ("e",), "Edit", "Edit this message: a prompt, or a reply in your words. The old version is kept.",
        scope="message", slash="edit", argument="[TEXT]",
        plain_help="Edit the last prompt. The old version and its replies are kept.", multiline=True),
    Action("edit_reply", (), "Edit the reply",
        "Edit the last reply, or the selected one. Enter keeps your version; the old one is kept too.", slash="revise",
        argument="[TEXT]", plain_help="Replace the last reply with your own text. The old version is kept.",
        multiline=True),
    Action("again", ("r",), "Regenerate this", "Regenerate this reply. The old version is kept.", scope="message",
        palette=False),
    Action("continue", ("g",), "Continue",
        "Continue this reply, which was cut off or stopped, as a new version; or answer the unanswered prompt.",
        scope="message", slash="continue"),
    Action("older", ("[",), "Older version", "Show the previous version.", scope="message", slash="older"),
    Action("newer", ("]",), "Newer version", "Show the next version.", scope="message", slash="newer"),
    Action("fork", ("f",), "Fork", "Continue from this message in a new chat.", scope="message", slash="fork"),
    Action("pin_turn", ("p",), "Pin turn", "Keep this turn word for word when the chat is compacted; again: no longer.",
        scope="message", slash="pinturn", plain_help="Keep the last turn word for word when the chat is compacted."),
    Action("copy_message", ("y",), "Copy message", "Copy this message as Markdown.", scope="message", slash="copy"),
    Action("copy_code", ("c",), "Copy code", "Copy the last code block; again for the one before it.", scope="message",
        slash="code"),
    Action("links", ("l",), "Links", "Show the links of this message; open or copy one.", scope="message", slash="links",
        plain_help="List the links of the last reply."),
    Action("scroll_top", ("ctrl+home", "ctrl+x a"), "Top", "Jump to the start of the chat.", slash="top",
        plain_help="Show the first turn.", yields=True),
    Action("scroll_end", ("ctrl+end", "ctrl+x z"), "Follow", "Jump to the end and follow the reply.", slash="end",
        plain_help="Show the last turn again."),
    Action("page_up", ("pageup", "f8", "ctrl+x u"), "Page up", "Scroll up; this stops following.", slash="up"),
    Action("page_down", ("pagedown", "f9", "ctrl+x d"), "Page down", "Scroll down.", slash="down"),
    Action("copy", ("ctrl+c",), "Copy or stop",
        "Copy the selected text (drag to select), or else stop the reply; pressed twice when idle, it quits.",
        palette=False),
    Action("ask_guide", ("f7", "ctrl+x g"), "Ask the guide",
        "Ask the embedded guide about this app. The chat and its model stay as they are.", slash="guide",
        argument="[QUESTION]", plain_argument="QUESTION"),
    Action("help", ("f1", "ctrl+x h"), "Help", "Show keys and actions. Type to search.", footer=True, slash="help",
        plain_help="List these commands.", also=("?",)),
    Action(LEADER, ("ctrl+x",), "Keys",
        "A letter after it does what an F-key does; alone, it lists the letters. With text selected in the prompt, it cuts.",
        footer=True, yields=True),
    Action("keys", ("ctrl+x k",), "Change keys", "List every action with its keys, and change them.", slash="keys",
        argument="[ACTION KEY]",
        plain_help="List the keys of the full screen, or set one: /keys explain f8; /keys explain default.",
        also=("bindings", "keymap", "shortcuts")),
    Action("theme", ("ctrl+x v",), "Theme", "Choose the colours: each theme is shown as you move to it.", slash="theme",
        argument="[NAME]", also=("colors", "colours")),
    Action("suspend", ("ctrl+z",), "Suspend", "Go back to the shell; fg returns. A running reply continues.", yields=True),
    Action("leave", ("ctrl+q",), "Quit", "Quit tokamac. In an empty input box, Ctrl+D does too.", slash="quit",
        plain_help="Quit tokamac.", also=("bye", "exit")),
)
# fmt: on
ALIASES = {word: action.slash for action in ACTIONS for word in action.also}
# From this ratio on a word is taken for a misspelt name: two swapped letters of four are still found, `/etc` is not.
ALIKE = 0.7
_WORD = re.compile(r"/[^\W\d_][\w-]*")


def by_slash(word: str) -> Action | None:
    """Return the action of a command (without slash) by any of its names."""
    named = next((action for action in ACTIONS if action.slash and action.slash == word), None)
    return named or next((action for action in ACTIONS if action.slash and word in _aliases(action)), None)


@dataclass(frozen=True, slots=True)
class Command:
    """A parsed slash command. word: with its slash; action: None if unknown."""

    word: str
    argument: str
    action: Action | None

    @property
    def is_whole(self) -> bool:
        needed = "" if self.action is None else self.action.argument
        return self.action is not None and (bool(self.argument) or not needed or needed.startswith("["))


def parse(text: str, *, multiline: bool = False) -> Command | None:
    """Return the command in ``text``; None for a prompt.

    Args:
        multiline: accept several lines for commands that allow them; else such a text is a prompt.
    """
    word, _, argument = text.rstrip().partition(" ")
    if not (_WORD.fullmatch(word) or word == "/?"):
        return None
    action = by_slash(word[1:].lower())
    if "\n" in argument and not (multiline and action is not None and action.multiline):
        return None
    return Command(word, argument.strip(), action)


@dataclass(frozen=True, slots=True)
class PartialCommand:
    """A command being typed: ``part`` of its name before the cursor; the word ends at column ``end``."""

    part: str
    end: int


def command_at(text: str, row: int, column: int) -> PartialCommand | None:
    word = text.rstrip().partition(" ")[0]
    letters = word[1:]
    if not word.startswith("/") or (letters and not _WORD.fullmatch(word)) or "\n" in text.rstrip():
        return None
    return PartialCommand(text[1:column], len(word)) if row == 0 and 1 <= column <= len(word) else None


def matching(part: str) -> list[Action]:
    """Return the actions matching ``part``: exact, prefix, alias prefix, substring; all for ""."""
    wanted = part.lower()
    ranked = [(rank, action) for action in ACTIONS if action.slash and (rank := _rank(wanted, action)) is not None]
    return [action for _, action in sorted(ranked, key=lambda each: each[0])]


def unknown(word: str) -> str:
    names = {name: action.slash for action in ACTIONS if action.slash for name in (*_aliases(action), action.slash)}
    near = nearest(word.removeprefix("/"), names, ALIKE)
    return f"There is no command {word}" + (f"; did you mean /{names[near]}?" if near is not None else ".")


def refused(command: Command, action: Action | None, helps: str) -> str:
    """Return why a command can't run as written, or "". action: this view's. helps: the command that lists all."""
    if action is None:
        return f"{unknown(command.word)} {helps} lists them. {AS_PROMPT}"
    return f"{command.word} takes no argument. {AS_PROMPT}" if command.argument and not action.argument else ""


AS_PROMPT = "To send this as a prompt, put a space before it."


def _rank(part: str, action: Action) -> int | None:
    name = action.slash
    aliased = any(alias.startswith(part) for alias in _aliases(action))
    tests = (name == part, name.startswith(part), aliased, part in name)
    return next((rank for rank, fits in enumerate(tests) if fits), None)


def _aliases(action: Action) -> Iterator[str]:
    """Yield aliases: the label, if one word, and other programs' names."""
    if action.label.isalpha():
        yield action.label.lower()
    yield from action.also


Chosen = Mapping[str, tuple[str, ...]]  # keys of actions, by id
_LEADER_KEY = next(action.keys[0] for action in ACTIONS if action.id == LEADER)
MODIFIERS = frozenset(("ctrl", "alt", "shift", "super"))
# Keys that the prompt needs for itself.
EDITING = frozenset(("space", "backspace", "delete", "insert", "left", "right", "up", "down", "home", "end"))
SAME = {"ctrl+i": "Tab", "ctrl+m": "Enter", "ctrl+left_square_bracket": "Esc"}  # what a terminal sends alike
# Keys that Textual calls otherwise than Unicode does.
RENAMED = {
    "solidus": "slash",
    "reverse_solidus": "backslash",
    "commercial_at": "at",
    "hyphen_minus": "minus",
    "plus_sign": "plus",
    "low_line": "underscore",
}
# Keys that have a name, as Textual has it.
NAMED_KEYS = EDITING | {"tab", "enter", "return", "escape", "pageup", "pagedown"} | {f"f{n}" for n in range(1, 25)}


@dataclass(frozen=True, slots=True)
class Keymap:
    """The actions with the keys in use, and why some of the user's keys are refused."""

    actions: tuple[Action, ...] = ACTIONS
    warnings: tuple[str, ...] = ()

    def key(self, action: str) -> str:
        """Return the key or command to name in texts; on a Mac a key without fn, if there is one."""
        return next(each.plain_key if MAC else each.key_name for each in self.actions if each.id == action)

    @property
    def changed(self) -> dict[str, str]:
        default = {action.id: action.keys for action in ACTIONS}
        return {each.id: each.bound_keys for each in self.actions if each.keys != default[each.id]}


def keymap(chosen: Chosen) -> Keymap:
    """Return the registry with ``chosen`` keys; an invalid entry gives a warning and keeps its action's keys."""
    taken, problems = _taken(chosen)
    warnings = [f"settings.toml: [keys] {name}: {why}. It stays in the file, unused." for name, why in problems.items()]
    return Keymap(_led(_with(taken)), tuple(warnings))


def refusal(action: str, keys: tuple[str, ...], chosen: Chosen) -> str:
    """Return why ``action`` can't have ``keys`` given the other choices, or ""."""
    others = {name: each for name, each in chosen.items() if name != action}
    return _taken({**others, action: keys})[1].get(action, "")


def _taken(chosen: Chosen) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return accepted keys and refusals by action; on a conflict the first action wins."""
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
    first, space, then = key.strip().partition(" ")
    return f"{_LEADER_KEY} {then.strip()}" if space and first in leaders else key


def _led(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Put chords on the actual leader key; without one, drop them."""
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
    """Apply ``taken`` keys; other actions give up theirs, but never their first."""
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
    """Return why an action can't have these keys, regardless of others, or ""."""
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
    from difflib import get_close_matches

    near = get_close_matches(name.casefold(), [each.id for each in ACTIONS], NEAREST)
    meant = f"; the nearest: {', '.join(near)}" if near else ""
    return f"there is no such action{meant} (/keys, or tokamac help keys, lists all)"


def _unusable(key: str, scope: Scope) -> str:
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
    """Normalize to Textual's name: ``[`` is ``left_square_bracket``, modifiers in one order."""
    if " " in key:
        leader, _, then = key.partition(" ")
        return f"{one_name(leader)} {then.lower()}"
    modifiers, last = _parts(key)
    if len(last) == 1 and not last.isalnum():
        last = unicodedata.name(last, last).lower().replace(" ", "_").replace("-", "_")
    return "+".join([*sorted(modifiers), RENAMED.get(last, last)])


def _parts(key: str) -> tuple[set[str], str]:
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
    """Return a key bound twice in one scope, and the two ids; None if none."""
    for scope in ("chat", "message"):
        holders: dict[str, str] = {}
        for action in actions:
            for key in action.keys if action.scope in ("chat", scope) else ():
                first = holders.setdefault(one_name(key), action.id)
                if first != action.id:
                    return key, (first, action.id)
    return None
