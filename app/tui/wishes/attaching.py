"""What goes with a prompt, and what was sent before: attaching, letting go, going back."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.app.sanitise import sanitise
from tokamac.app.store.errors import StoreError
from tokamac.app.tui.attach import AttachError, read_file
from tokamac.app.tui.widgets.prompt import Prompt

if TYPE_CHECKING:
    from tokamac.app.tui.screens.chat import ChatScreen

MOST_SENT = 200


def attach(chat: "ChatScreen", path: str) -> None:
    """Let the file at ``path`` go with the prompt; without one, begin to name it."""
    prompt = chat.query_one(Prompt)
    if path:
        chat.run_worker(_read(chat, path))
    else:
        prompt.name_file()
    prompt.focus()


async def _read(chat: "ChatScreen", path: str) -> None:
    chat.reading.append(path)
    chat.show()
    try:
        attachment = await asyncio.to_thread(
            read_file, path, Path()
        )  # a file may be on a slow disk, a PDF takes seconds
    except AttachError as error:
        chat.notify(error.one_line(), severity="warning", markup=False, timeout=8)
    else:
        chat.query_one(Prompt).attach(attachment)
    finally:
        chat.reading.remove(path)
        chat.show()


def detach(chat: "ChatScreen", name: str) -> None:
    """Let go of the attachment ``name``, or of the last one."""
    prompt = chat.query_one(Prompt)
    named = [each for each in prompt.attachments if name in ("", each.name)]
    if named:
        prompt.detach(named[-1])
        chat.show()
    else:
        what = f"Nothing called {name} is attached." if name else "Nothing is attached."
        chat.notify(what, markup=False, timeout=3)


def earlier(chat: "ChatScreen", _: str) -> None:
    """Take back the prompt that waits, the last one first; else show what was sent before."""
    prompt = chat.query_one(Prompt)
    if chat.session.queued and chat.composer.editing is not None:
        said = "The prompt that waits goes on waiting: send or give up the edit, then take it back."
        chat.notify(said, markup=False, timeout=5)
    elif chat.session.queued:
        chat.perform(chat.session.take_back())
    elif (before := chat.history.older(prompt.draft, lambda: _sent(chat))) is not None:
        prompt.put(before)
        chat.show()
    else:
        prompt.action_cursor_up()


def later(chat: "ChatScreen", _: str) -> None:
    """Show what was sent after what is shown, at last what was being written."""
    prompt = chat.query_one(Prompt)
    if (after := chat.history.newer(prompt.draft)) is not None:
        prompt.put(after)
        chat.show()
    else:
        prompt.action_cursor_down()


def _sent(chat: "ChatScreen") -> list[str]:
    """Return what the user sent, newest first: in all chats where they are kept."""
    sent = [turn.prompt for turn in reversed(chat.session.turns) if turn.prompt]
    if chat.recording is not None:
        try:
            sent = chat.recording.store.history(MOST_SENT)
        except StoreError as error:
            chat.notify(error.one_line(), severity="warning", markup=False)
    return [sanitise(text) for text in sent]
