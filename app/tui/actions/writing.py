"""Writing a prompt: sending, stopping, slash and shell commands, attachments, earlier prompts, and the user's own editor."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from ...backend.shell import ShellCommand, ShellEnding, ShellError, user_shell, working_folder
from ...chat import actions, commands
from ...chat.attachments import AttachError, Draft, output_of, read_named, shell_command, unescaped
from ...chat.commands import RefusedError
from ...chat.external_programs import EditorError, edit_text, editor_command
from ...chat.listing import excerpt
from ...chat.steps import Revised, TurnBegun
from ...sanitise import sanitise
from ...store.values import StoreError
from ..widgets.prompt_input import Prompt
from ..widgets.transcript import Transcript

if TYPE_CHECKING:
    from ..screens.chat import ChatScreen

MOST_SENT = 200


def send(chat: "ChatScreen", _: str) -> None:
    """Send what is written."""
    chat.query_one(Prompt).submit()


def newline(chat: "ChatScreen", _: str) -> None:
    """Start a new line."""
    chat.query_one(Prompt).insert("\n")


def stop(chat: "ChatScreen", _: str) -> None:
    """Close the completions, or stop what runs, a shell command first; else clear the selection and cancel an edit."""
    prompt = chat.query_one(Prompt)
    if prompt.completions.display:
        prompt.completions.withdraw()
    elif chat.shell is not None:
        chat.shell.stop()
    elif chat.session.engine.busy or chat.session.engine.replying:
        chat.perform(chat.session.stop())
    else:
        chat.clear_selection()
        chat.cancel_edit()
        prompt.focus()


def is_prompt(chat: "ChatScreen", text: str) -> bool:
    """Whether what is being written will go to the model, rather than be obeyed here."""
    if chat.composer.editing is not None:
        return True
    return text != "/" and actions.parse(text) is None and shell_command(text) is None


def submit(chat: "ChatScreen", draft: Draft) -> None:
    """Send ``draft``, in place of an edited prompt, or run the command in it."""
    prompt, words = chat.query_one(Prompt), Draft(draft.text.strip(), draft.attachments)
    chat.history.forget()
    if why := still_attaching(chat):
        prompt.give_back(draft.text, draft.attachments)
        chat.tell(why)
    elif not words.whole:
        chat.tell("Write a message first. Enter sends it.")
    elif chat.composer.editing is not None:
        _send_edit(chat, chat.composer.editing, words)
    elif (command := actions.parse(draft.text)) is not None:
        prompt.attachments += draft.attachments  # they are not the command's
        _obey(chat, command, draft.text.rstrip())
    elif (to_run := shell_command(draft.text)) is not None:
        prompt.attachments += draft.attachments
        chat.do("shell", to_run)
    else:
        chat.perform(chat.session.submit(unescaped(words.text), words.attachments))


def edit(chat: "ChatScreen", text: str) -> None:
    """Edit the selected message; without one, the last prompt."""
    selected = chat.query_one(Transcript).selected
    of_reply = selected is not None and chat.session.conversation.tree.nodes[selected].is_reply
    (commands.edit_reply if of_reply else commands.edit)(chat, text)


def _send_edit(chat: "ChatScreen", key: int, draft: Draft) -> None:
    if chat.session.conversation.tree.nodes[key].is_reply:
        steps = chat.session.revise(key, draft.text)
    else:
        steps = chat.session.edit(key, draft.text, draft.attachments)
    if any(isinstance(step, TurnBegun | Revised) for step in steps):
        chat.composer.end_edit()
        if any(isinstance(step, Revised) for step in steps):
            chat.query_one(Prompt).attachments += draft.attachments  # a reply has none
    else:
        chat.query_one(Prompt).give_back(draft.text, draft.attachments)
    chat.perform(steps)


def _obey(chat: "ChatScreen", command: actions.Command, text: str) -> None:
    """Run the slash command that was written as ``text``, or give it back."""
    word, action = command.word, command.action
    as_prompt = "To send this as a prompt, put a space before it."
    if action is not None and (not command.argument or action.argument):
        chat.do(action.id, command.argument)
        return
    chat.query_one(Prompt).give_back(text)
    if action is None:
        chat.tell(f"{actions.unknown(word)} {chat.session.keymap.key('help')} lists them. {as_prompt}")
    else:
        chat.tell(f"{word} takes no argument. {as_prompt}")


def editor(chat: "ChatScreen", _: str) -> None:
    """Write the prompt in the user's own editor."""
    prompt = chat.query_one(Prompt)
    try:
        command = editor_command()
        with chat.app.suspend():
            text = edit_text(command, prompt.text)
    except EditorError as error:
        raise RefusedError(str(error)) from None
    prompt.put(Draft(text, prompt.attachments))
    prompt.focus()


def attach(chat: "ChatScreen", path: str) -> None:
    """Attach the file at ``path``; without one, begin to name it."""
    prompt = chat.query_one(Prompt)
    if path:
        chat.run_worker(_read(chat, path))
    else:
        prompt.name_file()
    prompt.focus()


async def _read(chat: "ChatScreen", path: str) -> None:
    chat.reading.append(path)
    chat.show()
    try:  # aside: a file may be on a slow disk, a PDF takes seconds
        chat.query_one(Prompt).attach(await asyncio.to_thread(read_named, path, Path()))
    except AttachError as error:
        chat.tell(error.one_line(), "warning")
    finally:
        chat.reading.remove(path)
        chat.show()


def still_attaching(chat: "ChatScreen") -> str:
    """Return why this chat's prompt is not whole yet: what is on its way belongs to it; "" where nothing is."""
    if chat.reading:
        return "A file is still being read. Try again in a moment."
    return "" if chat.shell is None else f"A shell command is still running. {chat.session.keymap.key('stop')} ends it."


def shell(chat: "ChatScreen", text: str) -> None:
    """Ask whether to run a shell command, whose output is attached then; without one, begin to write it."""
    from ..screens.tools import ShellScreen

    prompt, folder = chat.query_one(Prompt), working_folder()
    if chat.shell is not None:
        raise RefusedError(still_attaching(chat))
    if not text:
        prompt.type("" if prompt.text else "!")
        chat.tell("Write the command after the !, at the start of the prompt: !ls")
        return

    def answered(runs: bool | None) -> None:
        if runs:
            chat.run_worker(_run(chat, ShellCommand(text, folder)))
        else:
            prompt.give_back(f"!{text}")
        prompt.focus()

    chat.app.push_screen(ShellScreen(text, folder, user_shell()), answered)


async def _run(chat: "ChatScreen", command: ShellCommand) -> None:
    chat.shell = command
    chat.show()
    try:
        output = await asyncio.to_thread(command.run)
    except ShellError as error:
        chat.tell(error.one_line(), "warning")
    else:
        if output.text or output.ending is not ShellEnding.STOPPED:
            chat.query_one(Prompt).attach(output_of(output))
        if output.how:
            chat.tell(f"{excerpt(command.text)}: {output.how}.", "warning")
    finally:
        command.stop()  # where the app quits
        chat.shell = None
    chat.show()


def detach(chat: "ChatScreen", name: str) -> None:
    """Remove the attachment ``name``, or the last one."""
    prompt = chat.query_one(Prompt)
    named = [each for each in prompt.attachments if name in ("", each.name)]
    if not named:
        raise RefusedError(f"Nothing called {name} is attached." if name else "Nothing is attached.")
    prompt.detach(named[-1])
    chat.show()


def earlier(chat: "ChatScreen", _: str) -> None:
    """Take back the prompt queued last; else recall what was sent before."""
    prompt = chat.query_one(Prompt)
    if chat.session.queued and chat.composer.editing is not None:
        chat.tell("The queued prompt stays queued: send or cancel the edit, then take it back.")
    elif chat.session.queued:
        chat.perform(chat.session.take_back())
    elif (before := chat.history.older(prompt.draft, lambda: _sent(chat))) is not None:
        prompt.put(before)
        chat.show()
    else:
        prompt.action_cursor_up()


def later(chat: "ChatScreen", _: str) -> None:
    """Recall what was sent after the prompt shown, at last the draft."""
    prompt = chat.query_one(Prompt)
    if (after := chat.history.newer(prompt.draft)) is not None:
        prompt.put(after)
        chat.show()
    else:
        prompt.action_cursor_down()


def _sent(chat: "ChatScreen") -> list[str]:
    """Return what the user sent, newest first: in all chats where they are saved."""
    sent = [turn.prompt for turn in reversed(chat.session.turns) if turn.prompt]
    if chat.recording is not None:
        try:
            sent = chat.recording.store.history(MOST_SENT)
        except StoreError as error:
            chat.tell(error.one_line(), "warning")
    return [sanitise(text) for text in sent]
