"""The model and KV settings that were picked: what the next start begins with, once they are known to load."""

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokamac.app.tui.screens.chat import ChatScreen


def keep_picked(chat: "ChatScreen") -> None:
    """Keep what was picked, now that it has loaded."""
    load, known = chat.session.load, chat.memory.settings
    model = load.model if load.model == chat.picked else known.model
    kv = load.kv if load.kv == chat.picked_kv else known.kv
    if (model, kv) != (known.model, known.kv):
        chat.keep(replace(known, model=model, kv=kv))
