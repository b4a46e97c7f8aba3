"""The registry's slash commands, done without a screen. What only a screen can show says so, and what does the same elsewhere."""

from collections.abc import Callable, Iterator

from tokamac.app.plain import chats, convert, figures, guide, messages, options, pull, whatif, writing
from tokamac.app.plain.repl import Repl
from tokamac.app.tui import slash
from tokamac.app.tui.actions import ACTIONS, Action
from tokamac.app.tui.command_names import unknown
from tokamac.app.tui.phase import Phase
from tokamac.engine.errors import TokamacError

Command = Callable[[Repl, str], None]

NEEDS_SCREEN = "/{} needs the full screen: leave, and open it with tokamac chat."
INSTEAD = {"toggle_panel": "/gauges says the figures"}
ARGUMENTS = {
    "chats": "[WORDS]",
    "open": "NUMBER|ID",
    "delete_chat": "[NUMBER|ID]",
    "branches": "[NUMBER]",
    "attach": "PATH",
    "ask_guide": "QUESTION",
    "edit": "[TEXT]",
    "system_prompt": "[TEXT]",
    "settings": "[NAME VALUE]",
    "gauges": "[FIGURE]",
    "what_if": "[MODEL] [FLAGS]",
    "convert": "[MODEL] [FLAGS]",
}
"""What may, or must, follow a command here, where the registry's has a dialog for it."""
LINED = frozenset({"edit", "system_prompt"})
"""What follows these may have several lines; else such a text is a prompt."""
HELP = {
    "open": "Open a chat by its number in the last list, or by its id.",
    "delete_chat": "Delete this chat, or the one of that number or id; it can be brought back for 30 days.",
    "branches": "List the versions of this chat, or go to one.",
    "pull": "Download a model by its Hugging Face id, and wait for it.",
    "gauges": "Say the last reply's figures, or explain one.",
    "what_if": "Other precisions, KV settings, contexts and chips: memory, fit and speed; flags as of tokamac inspect.",
    "convert": "Plan packing a model into fewer bits, with flags as of tokamac convert; alone after that: do it.",
    "attach": "Let a file go with the next prompt.",
    "detach": "Let go of an attachment, or of the last one.",
    "scroll_end": "Read the last turn out again.",
    "help": "These commands.",
}
"""What a command does here, where the registry's help speaks of keys and dialogs."""


def obey(repl: Repl, text: str) -> bool:
    """Do the slash command that ``text`` is; return whether it is one."""
    if (written := slash.parse(text, LINED)) is None:
        return False
    word, argument, action = written.word, written.argument, written.action
    if action is None:
        repl.console.note(f"{unknown(word)} /help lists them; a space before it sends it as it is.")
    elif argument and not takes(action):
        repl.console.note(f"{word} stands alone; a space before it sends all of this as it is.")
    elif (command := COMMANDS.get(action.id)) is None:
        instead = INSTEAD.get(action.id)
        repl.console.note(NEEDS_SCREEN.format(action.slash) + (f" Here: {instead}." if instead else ""))
    else:
        try:
            command(repl, argument)
        except TokamacError as error:
            repl.console.note(error.one_line())
    return True


def takes(action: Action) -> str:
    """Return what may follow the command, as the help names it."""
    return ARGUMENTS.get(action.id, action.argument)


def completed(before: str, begun: str) -> list[str]:
    """Return what the word that is ``begun`` can become, after what stands ``before`` it: a command, or a setting's name."""
    if not before:
        return [name for name in _names() if begun.startswith("/") and name.startswith(begun.lower())]
    names = options.NAMES if before.split() == ["/settings"] else ()
    return [f"{name} " for name in names if name.startswith(begun)]


def _names() -> Iterator[str]:
    """Yield every command that can be done here, with its slash, and a space where something may follow it."""
    for action in ACTIONS:
        if action.slash and action.id in COMMANDS:
            yield f"/{action.slash}" + (" " if takes(action) else "")


def _help(repl: Repl, _: str) -> None:
    listed = [action for action in ACTIONS if action.slash and action.id in COMMANDS]
    lines = [f"/{action.slash} {takes(action)}".rstrip() + f": {HELP.get(action.id, action.help)}" for action in listed]
    lines += ["A line that ends with a backslash goes on in the next one.", 'Lines between two """ are one prompt.']
    repl.console.say("\n".join(lines))


def _leave(repl: Repl, _: str) -> None:
    repl.leaving = True


def _stop(repl: Repl, _: str) -> None:
    repl.console.note("No reply is running. Ctrl-C stops one.")


def _unload(repl: Repl, _: str) -> None:
    driver = repl.driver
    if driver.session.phase is Phase.LOADING and not repl.console.typed:
        driver.settle(loaded=True)  # who types stops it by this; a script comes only too early
    if driver.session.phase is Phase.IDLE:
        repl.console.note("The model gives its memory back; it loads again when you ask.")
    driver.perform(driver.session.unload())


COMMANDS: dict[str, Command] = {
    "stop": _stop,
    "new_chat": chats.new,
    "chats": chats.listed,
    "open": chats.opened,
    "title": chats.title,
    "delete_chat": chats.delete,
    "restore_chat": chats.restore,
    "fork": chats.fork,
    "export": chats.export,
    "import": chats.imported,
    "branches": messages.branches,
    "regenerate": messages.again,
    "edit": messages.edit,
    "continue": messages.continue_,
    "older": messages.older,
    "newer": messages.newer,
    "copy_message": messages.copy,
    "copy_code": messages.code,
    "scroll_end": messages.end,
    "choose_model": options.model,
    "pull": pull.pull,
    "adapter": options.adapter,
    "unload": _unload,
    "system_prompt": options.system,
    "settings": options.settings,
    "thinking": options.thinking,
    "gauges": figures.gauges,
    "explain": figures.why,
    "what_if": whatif.what_if,
    "convert": convert.convert,
    "editor": writing.editor,
    "attach": writing.attach,
    "detach": writing.detach,
    "ask_guide": guide.ask,
    "help": _help,
    "leave": _leave,
}
"""By the registry's ids."""
