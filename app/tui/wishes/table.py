"""Every action's id, and what it does."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tokamac.app.tui.wishes import attaching, conversation, deleting, figures, guiding, model, reading, sharing, writing

if TYPE_CHECKING:
    from tokamac.app.tui.screens.chat import ChatScreen

Wish = Callable[["ChatScreen", str], None]

WISHES: dict[str, Wish] = {
    "send": writing.send,
    "newline": writing.newline,
    "editor": writing.editor,
    "attach": attaching.attach,
    "detach": attaching.detach,
    "earlier": attaching.earlier,
    "later": attaching.later,
    "stop": writing.stop,
    "new_chat": conversation.new_chat,
    "chats": conversation.chats,
    "open": conversation.open_,
    "title": conversation.title,
    "delete_chat": deleting.delete_chat,
    "restore_chat": deleting.restore_chat,
    "export": sharing.export,
    "import": sharing.import_,
    "branches": conversation.branches,
    "regenerate": conversation.regenerate,
    "edit": conversation.edit,
    "again": conversation.again,
    "continue": conversation.continue_,
    "older": conversation.older,
    "newer": conversation.newer,
    "fork": conversation.fork,
    "choose_model": model.choose_model,
    "pull": model.pull,
    "adapter": model.adapter,
    "unload": model.unload,
    "system_prompt": model.system_prompt,
    "settings": model.settings,
    "thinking": model.thinking,
    "explain": reading.explain,
    "what_if": model.what_if,
    "convert": model.convert,
    "toggle_panel": reading.toggle_panel,
    "palette": reading.palette,
    "messages": reading.messages,
    "gauges": figures.gauges,
    "copy_message": reading.copy_message,
    "copy_code": reading.copy_code,
    "scroll_end": reading.scroll_end,
    "page_up": reading.page_up,
    "page_down": reading.page_down,
    "copy": reading.copy,
    "ask_guide": guiding.ask_guide,
    "help": reading.help_,
    "leave": reading.leave,
}
