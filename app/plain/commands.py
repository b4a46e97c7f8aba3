"""The registry's slash commands, done without a screen. What only a screen can show says so, and what does the same elsewhere."""

from collections.abc import Callable
from pathlib import Path

from tokamac.app.plain import chats, options
from tokamac.app.plain.reading import last_turn
from tokamac.app.plain.repl import Repl
from tokamac.app.sanitise import sanitise
from tokamac.app.tui.actions import ACTIONS, Action, by_slash
from tokamac.app.tui.attachments import Draft
from tokamac.app.tui.clipboard import copy_by_tool
from tokamac.app.tui.editor import EditorError, edit_text, editor_command
from tokamac.app.tui.prose.code import Back, code_blocks
from tokamac.app.tui.tree import Node
from tokamac.engine.errors import TokamacError

Command = Callable[[Repl, str], None]

NEEDS_SCREEN = "/{} needs the full screen: leave, and open it with tokamac chat."
INSTEAD = {
    "what_if": "tokamac inspect MODEL",
    "convert": "tokamac convert MODEL",
    "pull": "tokamac models pull ID",
    "guide": 'tokamac ask -m guide "QUESTION"',
}
ARGUMENTS = {"chats": "[WORDS]", "edit": "[TEXT]", "system_prompt": "[TEXT]", "settings": "[NAME VALUE]"}
"""What may follow a command here, where the registry's has a dialog for it."""
_BACK = Back()


def obey(repl: Repl, text: str) -> bool:
    """Do the slash command that ``text`` is; return whether it is one."""
    word, _, argument = text.rstrip().partition(" ")
    if not (word.startswith("/") and word[1:].isalpha()):
        return False
    action, argument = by_slash(word[1:].lower()), argument.strip()
    if action is None:
        repl.console.note(f"There is no command {word}. /help lists them; a space before it sends it as it is.")
    elif argument and not takes(action):
        repl.console.note(f"{word} stands alone; a space before it sends all of this as it is.")
    elif (command := COMMANDS.get(action.id)) is None:
        instead = INSTEAD.get(action.id)
        repl.console.note(NEEDS_SCREEN.format(action.slash) + (f" Or: {instead}" if instead else ""))
    else:
        try:
            command(repl, argument)
        except TokamacError as error:
            repl.console.note(error.one_line())
    return True


def takes(action: Action) -> str:
    """Return what may follow the command, as the help names it."""
    return ARGUMENTS.get(action.id, action.argument)


def slashes() -> list[str]:
    """Return every command that can be done here, with its slash."""
    return [f"/{action.slash}" for action in ACTIONS if action.slash and action.id in COMMANDS]


def _help(repl: Repl, _: str) -> None:
    listed = [action for action in ACTIONS if action.slash and action.id in COMMANDS]
    lines = [f"/{action.slash} {takes(action)}".rstrip() + f": {action.help}" for action in listed]
    lines += ["A line that ends with a backslash goes on in the next one.", 'Lines between two """ are one prompt.']
    repl.console.say("\n".join(lines))


def _leave(repl: Repl, _: str) -> None:
    repl.leaving = True


def _stop(repl: Repl, _: str) -> None:
    repl.console.note("No reply is running. Ctrl-C stops one.")


# Messages ---------------------------------------------------------------------------------------------------------------


def _again(repl: Repl, _: str) -> None:
    repl.driver.settle(loaded=True)
    repl.driver.perform(repl.driver.session.regenerate())


def _continue(repl: Repl, _: str) -> None:
    repl.driver.settle(loaded=True)
    repl.driver.perform(repl.driver.session.continue_reply())


def _unload(repl: Repl, _: str) -> None:
    repl.driver.perform(repl.driver.session.unload())


def _edit(repl: Repl, text: str) -> None:
    """Ask the last prompt anew: as ``text``, or as it is changed on the next line."""
    node = _last(repl)
    if node is None:
        repl.console.note("There is no message to edit yet.")
        return
    prompt = repl.driver.session.talk.prompt_of(node.key)
    if prompt is None:
        repl.console.note("There is no prompt to edit here.")
        return
    repl.editing, repl.draft = prompt.key, Draft(sanitise(prompt.prompt or ""), prompt.attachments)
    if text:
        repl.ask(text)
    elif repl.console.typed:
        repl.console.note(
            "The next line is asked in place of the last prompt, which stays beside it. Ctrl-C gives it up."
        )
    else:
        repl.editing, repl.draft = None, Draft()
        repl.console.note("Write the new prompt after the command: /edit TEXT")


def _older(repl: Repl, _: str) -> None:
    _step(repl, -1)


def _newer(repl: Repl, _: str) -> None:
    _step(repl, 1)


def _step(repl: Repl, by: int) -> None:
    """Go to a version of the last message that has several, and read it out."""
    node, session = _last(repl), repl.driver.session
    other = None if node is None else session.talk.tree.beside(node.key, by)
    if other is None:
        repl.console.note("There is one version only: /edit or /again make another.")
        return
    repl.driver.perform(session.go(other))
    repl.console.say(last_turn(session.turns))


def _copy(repl: Repl, _: str) -> None:
    node = _last(repl)
    text = "" if node is None else node.prompt or (node.reply.text if node.reply is not None else "")
    _copied(repl, text, "There is no message to copy yet.")


def _code(repl: Repl, _: str) -> None:
    replies = [turn.reply.text for turn in repl.driver.session.turns if turn.reply is not None]
    blocks = [block for text in replies for block in code_blocks(text)]
    back = _BACK.again(repl.driver.session.talk.tree.head or 0, len(blocks)) if blocks else 0
    _copied(repl, blocks[-back] if blocks else "", "There is no code block here.")


def _copied(repl: Repl, text: str, nothing: str) -> None:
    tool = copy_by_tool(sanitise(text)) if text else None
    if not text:
        repl.console.note(nothing)
    elif tool is None:
        repl.console.note("No tool for copying is here (pbcopy, wl-copy). /export writes the chat to a file.")
    else:
        repl.console.note(f"Copied {len(text):,} characters ({tool}).")


def _last(repl: Repl) -> Node | None:
    tree = repl.driver.session.talk.tree
    return None if tree.head is None else tree.nodes[tree.head]


# Writing ----------------------------------------------------------------------------------------------------------------


def _editor(repl: Repl, _: str) -> None:
    """Write a prompt in the user's own editor, and send it."""
    try:
        text = edit_text(editor_command(), repl.draft.text)
    except EditorError as error:
        repl.console.note(str(error))
        return
    if text.strip():
        repl.console.say(text)
        repl.ask(text.strip())


def _attach(repl: Repl, path: str) -> None:
    from tokamac.app.tui.attach import read_file

    if not path:
        repl.console.note("Write the file after the command: /attach notes.md")
        return
    made = read_file(path, Path())
    others = tuple(each for each in repl.draft.attachments if each.name != made.name)
    repl.draft = Draft(repl.draft.text, (*others, made))
    repl.console.note(f"{made.name}, {len(made.text):,} characters, goes with the next prompt.")


def _detach(repl: Repl, name: str) -> None:
    named = [each for each in repl.draft.attachments if name in ("", each.name)]
    if not named:
        repl.console.note(f"Nothing called {name} is attached." if name else "Nothing is attached.")
        return
    repl.draft = Draft(repl.draft.text, tuple(each for each in repl.draft.attachments if each is not named[-1]))
    repl.console.note(f"{named[-1].name} does not go with the next prompt.")


COMMANDS: dict[str, Command] = {
    "stop": _stop,
    "new_chat": chats.new,
    "chats": chats.listed,
    "open": chats.opened,
    "title": chats.title,
    "fork": chats.fork,
    "export": chats.export,
    "import": chats.imported,
    "regenerate": _again,
    "edit": _edit,
    "continue": _continue,
    "older": _older,
    "newer": _newer,
    "copy_message": _copy,
    "copy_code": _code,
    "choose_model": options.model,
    "unload": _unload,
    "system_prompt": options.system,
    "settings": options.settings,
    "explain": options.explain,
    "editor": _editor,
    "attach": _attach,
    "detach": _detach,
    "help": _help,
    "leave": _leave,
}
"""By the registry's ids."""
