"""Writing: sending, stopping, slash commands, and an editor of the user's own."""

from typing import TYPE_CHECKING

from tokamac.app.tui import command_names, slash
from tokamac.app.tui.attachments import Draft
from tokamac.app.tui.editor import EditorError, edit_text, editor_command
from tokamac.app.tui.steps import TurnBegun
from tokamac.app.tui.widgets.prompt import Prompt

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
    elif chat.session.busy:
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
    elif (command := slash.parse(draft.text)) is not None:
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


def _obey(chat: "ChatScreen", command: slash.Command, text: str) -> None:
    """Do the slash command that was written as ``text``."""
    word, action = command.word, command.action
    if action is None:
        lists = chat.session.keymap.key("help")
        _refuse(chat, text, f"{command_names.unknown(word)} {lists} lists them; a space before it sends it as it is.")
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
