"""What each action of the registry does, given the chat screen and what was written after a slash command; and its keys."""

from textual.binding import Binding, BindingType

from ...chat.actions import ACTIONS, Scope


def bindings(scope: Scope = "chat") -> list[BindingType]:
    """Return the key bindings of the chat screen, or those that work while a message is selected.

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
