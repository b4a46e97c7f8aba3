"""Every action of the chat, once. Keys, footer, command palette and help (F1) are made from this table.

An action's ``id`` is its binding's id too (a keymap refers to it) and names the method ``action_<id>`` of the chat screen.
"""

from dataclasses import dataclass

from textual.binding import Binding, BindingType


@dataclass(frozen=True, slots=True)
class Action:
    """``keys`` as Textual names them, the first shown first. ``shown`` overrides how they are printed."""

    id: str
    keys: tuple[str, ...]
    label: str
    help: str
    footer: bool = False
    palette: bool = True
    shown: str = ""
    bound: bool = True

    @property
    def key_names(self) -> str:
        """The keys as a person reads them."""
        return self.shown or ", ".join(_name(key) for key in self.keys)


def _name(key: str) -> str:
    return "+".join(
        {"escape": "Esc", "pageup": "PageUp", "pagedown": "PageDown"}.get(p, p.capitalize()) for p in key.split("+")
    )


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
    Action("stop", ("escape",), "Stop", "Stop the reply within a token; what was written stays.", footer=True),
    Action("new_chat", ("ctrl+n",), "New chat", "Start a new chat; the model stays loaded.", footer=True),
    Action("regenerate", ("ctrl+r",), "Regenerate", "Make the last reply again.", footer=True),
    Action("choose_model", ("ctrl+o",), "Model", "Choose a model: a folder or a Hugging Face id.", footer=True),
    Action("system_prompt", ("ctrl+s",), "System prompt", "Edit the system prompt."),
    Action("settings", ("ctrl+t",), "Settings", "Sampling and KV cache settings."),
    Action(
        "explain",
        ("f2",),
        "Explain",
        "Say why the last reply took as long as it did, and what would help.",
        footer=True,
    ),
    Action("what_if", ("f3",), "What if", "Other precisions, KV settings, contexts and chips: memory, fit and speed."),
    Action("toggle_panel", ("ctrl+b",), "Side panel", "Show or hide the gauges."),
    Action(
        "palette",
        ("ctrl+p",),
        "Commands",
        "Open the command palette; themes are there too.",
        footer=True,
        palette=False,
    ),
    Action("scroll_end", ("ctrl+end",), "Follow", "Jump to the end and follow the reply."),
    Action("page_up", ("pageup",), "Page up", "Scroll up; following stops.", palette=False),
    Action("page_down", ("pagedown",), "Page down", "Scroll down.", palette=False),
    Action("copy", ("ctrl+c",), "Copy", "Copy the selected text (drag with the mouse to select)."),
    Action("help", ("f1",), "Help", "Keys and actions.", footer=True),
    Action("leave", ("ctrl+q",), "Quit", "Leave tokamac."),
)


def bindings() -> list[BindingType]:
    """Return the key bindings of the chat screen.

    They have priority, so that they work while the prompt has the focus; Esc, too, must reach a running reply at once.
    """
    return [
        Binding(
            ",".join(action.keys), action.id, action.label, id=action.id, priority=True, show=False, tooltip=action.help
        )
        for action in ACTIONS
        if action.bound
    ]
