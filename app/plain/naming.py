"""How texts name an action where there are no keys: by its command; and what stops a reply, by Ctrl-C."""

from dataclasses import replace

from tokamac.app.tui.actions import ACTIONS
from tokamac.app.tui.keymap import Keymap


class NoKeys(Keymap):
    """The registry without keys."""

    def __init__(self) -> None:
        super().__init__(tuple(replace(action, keys=(), shown="") for action in ACTIONS))

    def key(self, action: str) -> str:
        """Return how a text names what the action of this id is done with."""
        return "Ctrl-C" if action == "stop" else super().key(action)
