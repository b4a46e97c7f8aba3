"""What goes with a prompt, and what was sent before: attaching, letting go, going back.

Writing: sending, stopping, slash commands, and an editor of the user's own.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.app.chat import actions
from tokamac.app.chat.attachments import AttachError, Draft, read_file
from tokamac.app.chat.external_programs import EditorError, edit_text, editor_command
from tokamac.app.chat.steps import TurnBegun
from tokamac.app.sanitise import sanitise
from tokamac.app.store.values import StoreError
from tokamac.app.tui.widgets.prompt_input import Prompt

if TYPE_CHECKING:
    from tokamac.app.tui.screens.chat import ChatScreen


def send(chat: "ChatScreen", _: str) -> None:
    """Send what is written."""
    chat.query_one(Prompt).submit()


def newline(chat: "ChatScreen", _: str) -> None:
    """Start a new line."""
    chat.query_one(Prompt).insert("\n")


def stop(chat: "ChatScreen", _: str) -> None:
    """Stop what is nearest: what is offered, what runs; else let go of a selection, and of a message that is pointed at."""
    prompt = chat.query_one(Prompt)
    if prompt.offers.display:
        prompt.offers.withdraw()
    elif chat.session.engine.busy:
        chat.perform(chat.session.stop())
    else:
        chat.clear_selection()
        chat.let_go_of_edit()
        prompt.focus()


def submit(chat: "ChatScreen", draft: Draft) -> None:
    """Send ``draft``, in place of what is edited, or do the command that it is."""
    prompt, words = chat.query_one(Prompt), Draft(draft.text.strip(), draft.attachments)
    chat.history.forget()
    if chat.reading:
        prompt.give_back(draft.text, draft.attachments)
        chat.notify("A file is still being read: Enter again in a moment.", markup=False, timeout=3)
    elif not words.whole:
        chat.notify("Write something first; Enter sends it.", markup=False, timeout=3)
    elif chat.composer.editing is not None:
        _send_edit(chat, chat.composer.editing, words)
    elif (command := actions.parse(draft.text)) is not None:
        prompt.attachments += draft.attachments  # they are not the command's
        _obey(chat, command, draft.text.rstrip())
    else:
        chat.perform(chat.session.submit(words.text, words.attachments))


def _send_edit(chat: "ChatScreen", key: int, draft: Draft) -> None:
    steps = chat.session.edit(key, draft.text, draft.attachments)
    if any(isinstance(step, TurnBegun) for step in steps):
        chat.composer.end_edit()
    else:
        chat.query_one(Prompt).give_back(draft.text, draft.attachments)
    chat.perform(steps)


def _obey(chat: "ChatScreen", command: actions.Command, text: str) -> None:
    """Do the slash command that was written as ``text``."""
    word, action = command.word, command.action
    if action is None:
        lists = chat.session.keymap.key("help")
        _refuse(chat, text, f"{actions.unknown(word)} {lists} lists them; a space before it sends it as it is.")
    elif command.argument and not action.argument:
        _refuse(chat, text, f"{word} stands alone: a space before it sends all of this as it is.")
    else:
        chat.do(action.id, command.argument)


def _refuse(chat: "ChatScreen", text: str, why: str) -> None:
    chat.query_one(Prompt).give_back(text)
    chat.notify(why, markup=False, timeout=6)


def editor(chat: "ChatScreen", _: str) -> None:
    """Write the prompt in the user's own editor."""
    prompt = chat.query_one(Prompt)
    try:
        command = editor_command()
        with chat.app.suspend():
            text = edit_text(command, prompt.text)
    except EditorError as error:
        chat.notify(str(error), severity="warning", markup=False, timeout=8)
    else:
        prompt.put(Draft(text, prompt.attachments))
        prompt.focus()


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
