"""The model, its adapter and the KV settings that were picked: what the next start begins with, once they are known to load."""

from dataclasses import replace
from typing import TYPE_CHECKING

from tokamac.app.settings import with_adapter

if TYPE_CHECKING:
    from tokamac.app.tui.screens.chat import ChatScreen


def keep_picked(chat: "ChatScreen") -> None:
    """Keep what was picked, now that it has loaded."""
    load, known = chat.session.load, chat.memory.settings
    model = load.model if load.model == chat.picked else known.model
    kv = load.kv if load.kv == chat.picked_kv else known.kv
    adapters = known.adapters
    if chat.picked_adapter == (load.model, load.adapter):
        adapters = with_adapter(known, *chat.picked_adapter)
    if (model, kv, adapters) != (known.model, known.kv, known.adapters):
        chat.keep(replace(known, model=model, kv=kv, adapters=adapters))
