"""Every action of the chat, once. Keys, slash commands, footer, command palette and help (F1) are made from this table.

An action's ``id`` is its binding's id too (a keymap refers to it); what it does is in ``wishes``, under the same id.
"""

from dataclasses import dataclass
from typing import Final, Literal

from textual.binding import Binding, BindingType

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
