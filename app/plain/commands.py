"""The slash commands of the plain chat. What needs no screen is in ``app/chat/commands``; here is what reads and prints lines.

What only a screen can show says so, and names what does the same elsewhere. The versions of a conversation are a numbered outline:
each message that has other versions, and inside it those that follow.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.engine.errors import TokamacError
from tokamac.engine.files import expanded
from tokamac.engine.hub.names import nearest

from .. import units
from ..backend.shell import ShellCommand, ShellEnding, user_shell, working_folder
from ..chat import actions, commands
from ..chat.actions import ACTIONS
from ..chat.attachments import Draft, output_of, read_named, shell_command
from ..chat.commands import USUAL, RefusedError, recording_of
from ..chat.conversation import EDITED, Reply, Tree, Turn
from ..chat.external_programs import EditorError, edit_text, editor_command
from ..chat.figures import FIGURES, Explained, Figure, explain
from ..chat.listing import EXCERPT, ago, date_of, ending_text, part, said_in
from ..chat.recording import LEFT
from ..chat.steps import EnginePhase
from ..models.names import lasting
from ..settings_form import GROUPS, THE_MODEL, THIS_CHAT, Field, Form, whole_number
from ..store.values import Attachment, StoredChat
from ..verdict import figures_text
from . import jobs, processes
from .console import heard

if TYPE_CHECKING:
    from .repl import Repl

PlainCommand = Callable[["Repl", str], None]
MOST_LISTED = 20

# Conversations ------------------------------------------------------------------------------------------------------------


def new_chat(repl: "Repl", _: str) -> None:
    """Start another conversation, and say so even where this one is empty."""
    if repl.begin_new():
        repl.tell(LEFT)
    repl.tell("New chat. The model stays loaded.")


def chats(repl: "Repl", words: str) -> None:
    """List the chats that were used last, or those that contain the words."""
    store, now = recording_of(repl).store, time.time()
    found = store.chats(words, limit=MOST_LISTED, pinned_first=True)
    lines = [_chat_line(chat, now) for chat in found]
    repl.listed = tuple(chat.id for chat in found)
    if words:
        hits = store.search(words, MOST_LISTED)
        lines += [f"{hit.title}, {hit.role}: {part(hit)} ({hit.chat})" for hit in hits]
        repl.listed += tuple(hit.chat for hit in hits)
    if lines:
        repl.say("\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1)))
        repl.console.aside("/open and a number or an ID opens one.")
    else:
        repl.say("No matches." if words else "No chats yet.")


def _chat_line(chat: StoredChat, now: float) -> str:
    notes = [ago(now - chat.updated_at), date_of(chat.updated_at, now)]
    notes += ["pinned"] if chat.pinned_at is not None else []
    notes += [f"in {chat.folder}"] if chat.folder else []
    return f"{chat.title or 'untitled'}, {', '.join(notes)} ({chat.id})"


def open_(repl: "Repl", name: str) -> None:
    """Open a chat by its number in the last list, or by its ID."""
    recording_of(repl)
    if not name:
        raise RefusedError("Write the number or the ID of a chat after the command: /open 1. /chats lists them.")
    repl.open_chat(repl.find_chat(name).id)


def export(repl: "Repl", written: str) -> None:
    """Export the conversation to a new file."""
    from ..export import export_chat, free_name

    chat, missing = commands.exported(repl)
    archive = recording_of(repl).store.archive(chat)
    path = expanded(written) if written else free_name(archive.chat.title, Path())
    export_chat(archive, path)
    repl.tell(f"Exported to {path}. {missing}".strip())


def import_(repl: "Repl", written: str) -> None:
    """Create a chat from a file, and open it."""
    store = recording_of(repl).store
    if not written:
        raise RefusedError("Write the file after the command: /import chat.md (or .json)")
    repl.open_chat(commands.imported(store.file, written))


# Messages and versions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outline:
    """The versions of ``tree`` as they were listed: ``keys`` of the messages by their numbers, and a line for each."""

    tree: Tree
    keys: tuple[int, ...]
    lines: tuple[str, ...]


def outline(tree: Tree) -> Outline:
    """Return the outline as it is now."""
    shown = {node.key for node in tree.path_to(tree.head)}
    keys, lines = [], []
    for key, depth in _versions(tree):
        keys.append(key)
        lines.append(f"{'  ' * depth}{len(keys)}. {_outline_line(tree, key, shown=key in shown)}")
    return Outline(tree, tuple(keys), tuple(lines))


def _versions(tree: Tree) -> Iterator[tuple[int, int]]:
    """Yield every message that has other versions, and how many of those it is inside of."""
    todo: list[tuple[int | None, int]] = [(None, 0)]
    while todo:  # a loop: a path may be longer than Python's stack
        at, depth = todo.pop()
        if at is not None and len(tree.siblings(at)) > 1:
            yield at, depth
            depth += 1
        todo += [(key, depth) for key in reversed(tree.children(at))]


def _outline_line(tree: Tree, key: int, *, shown: bool) -> str:
    number, many = tree.place(key)
    turn = sum(each.prompt is not None for each in tree.path_to(key))
    who, said = said_in(tree.nodes[key], EXCERPT)
    return f"turn {turn}, {who}, version {number} of {many}{', shown now' if shown else ''}: {said}"


def branches(repl: "Repl", number: str) -> None:
    """List the versions of this chat, or switch to the one with this number in the last list."""
    tree = repl.session.conversation.tree
    if not number or repl.outline is None or repl.outline.tree is not tree:
        repl.outline = outline(tree)
    keys, lines = repl.outline.keys, repl.outline.lines
    wanted = whole_number(number) or 0
    if not keys:
        raise RefusedError(commands.one_version(repl))
    if not number:
        repl.say("\n".join(lines))
        repl.console.aside("/branches and a number switches to that version.")
    elif 0 < wanted <= len(keys):
        repl.go(keys[wanted - 1])
    else:
        raise RefusedError(f"There is no version {number:.40}: /branches lists them, 1 to {len(keys)}.")


def last_turn(turns: Sequence[Turn]) -> str:
    """Return the last prompt and its reply, and how many turns there are."""
    if not turns:
        return "No messages yet."
    turn = turns[-1]
    lines = [f"Turn {len(turns)} of {len(turns)}."] if len(turns) > 1 else []
    lines += [f"system: {text}" for text in turn.system]
    lines += [f"you{_version(turn.place)}: {turn.prompt}"] if turn.key or turn.prompt else []  # else there is no prompt
    lines += [f"attached: {each.name}" for each in turn.attachments]
    lines += [f"system: {text}" for text in turn.between]
    return "\n".join([*lines, *([_reply(turn.reply, turn.reply_place)] if turn.reply is not None else [])])


def _reply(reply: Reply, place: tuple[int, int]) -> str:
    figures = "" if reply.metrics is None else figures_text(reply.metrics)
    parts = (EDITED if reply.edited else "", reply.compared, ending_text(reply.ending, reply.reason), figures)
    said = " · ".join(filter(None, parts))
    return f"{reply.model or 'reply'}{_version(place)}: {reply.text}" + (f"\n({said})" if said else "")


def _version(place: tuple[int, int]) -> str:
    return f" (version {place[0]} of {place[1]})" if place[1] > 1 else ""


def top(repl: "Repl", _: str) -> None:
    """Print the first turn."""
    repl.say(last_turn(repl.session.turns[:1]))


def end(repl: "Repl", _: str) -> None:
    """Print the last turn again."""
    repl.say(last_turn(repl.session.turns))


def context(repl: "Repl", number: str) -> None:
    """List what is in the context, or leave a part out."""
    draft = repl.composer.draft
    repl.perform(repl.session.count_context(draft))
    repl.driver.settle_counts()
    use = repl.session.context_use(draft)
    wanted = whole_number(number) or 0
    if number and not 0 < wanted <= len(use.rows):
        raise RefusedError(f"There is no part {number:.40}: /context lists them, 1 to {len(use.rows)}.")
    if number:
        row = use.rows[wanted - 1]
        repl.tell(use.consequence(wanted - 1))
        if row.key:
            repl.perform(repl.session.prune(row.key, row.file))
        return
    for at, row in enumerate(use.rows, 1):
        left = ", left out" if row.left_out else ""
        repl.say(f"{at}. {row.kind}, {units.count(row.tokens)} tokens{left}: {row.name[:EXCERPT]}")
    repl.say(f"{units.count(use.used)} tokens used, {units.count(use.free)} free of {units.count(use.capacity)}.")
    repl.console.aside("/context and a number leaves a file or a turn out, or sends it again.")


def editor(repl: "Repl", _: str) -> None:
    """Write a prompt in the user's own editor, and send it."""
    try:
        command = editor_command()
        with repl.away():
            text = edit_text(command, repl.composer.draft.text)
    except EditorError as error:
        raise RefusedError(str(error)) from None
    if text.strip():
        repl.say(text)
        repl.ask(text.strip())


def attach(repl: "Repl", path: str) -> None:
    """Attach a file to the next prompt."""
    if not path:
        raise RefusedError("Write the file after the command: /attach notes.md")
    _attach(repl, read_named(path, Path()))


def shell(repl: "Repl", text: str) -> None:
    """Run a shell command, once the user has allowed it, and attach its output to the next prompt."""
    if not text:
        raise RefusedError("Write the command after the !, such as !ls.")
    if not repl.console.typed:
        repl.driver.failed = True
        raise RefusedError("No one is here to allow a shell command. To send this as a prompt, put a space before it.")
    folder = working_folder()
    repl.tell(
        f"This command runs in {folder} with {Path(user_shell()).name}; its output is attached to the next prompt:"
    )
    repl.console.quote(text)
    try:
        allowed = repl.console.read("run it? [y]es, [n]o> ").strip().lower() in ("y", "yes")
    except EOFError:
        allowed = False
    if not allowed:
        repl.tell("The command was not run.")
        return
    command = ShellCommand(text, folder)
    with repl.away(), heard(command.stop):
        output = command.run()
    if output.how:
        repl.tell(f"The command did not end well: {output.how}.")
    if output.text or output.ending is not ShellEnding.STOPPED:
        _attach(repl, output_of(output))


def _attach(repl: "Repl", made: Attachment) -> None:
    draft = repl.composer.draft
    others = tuple(each for each in draft.attachments if each.name != made.name)
    repl.composer.draft = Draft(draft.text, (*others, made))
    repl.tell(f"Attached to the next prompt: {made.name}, {len(made.text):,} characters.")


def detach(repl: "Repl", name: str) -> None:
    """Remove an attachment, or the last one."""
    draft = repl.composer.draft
    named = [each for each in draft.attachments if name in ("", each.name)]
    if not named:
        raise RefusedError(f"Nothing called {name} is attached." if name else "Nothing is attached.")
    repl.composer.draft = Draft(draft.text, tuple(each for each in draft.attachments if each is not named[-1]))
    repl.tell(f"No longer attached: {named[-1].name}.")


# Models and settings ------------------------------------------------------------------------------------------------------


def model(repl: "Repl", name: str) -> None:
    """Load another model, which the next start then takes, or say which one is loaded."""
    session = repl.session
    if not name:
        repl.say(session.engine.load.model)
        return
    name = lasting(name)
    if not repl.console.typed:  # a script's line: the model before is loaded first, so that there is one to return to
        repl.driver.settle(loaded=True)
    repl.chosen.model = name
    repl.load(session.engine.load.of(name, *repl.preferences.settings.beside(name)))
    if session.engine.info is not None and session.engine.load.model == name:
        repl.tell(f"{session.engine.info.name} is loaded.")


def unload(repl: "Repl", _: str) -> None:
    """Free the model's memory."""
    if repl.session.engine.phase is EnginePhase.LOADING and not repl.console.typed:
        repl.driver.settle(loaded=True)  # typed, the command stops the loading; in a script it is only early
    if repl.session.engine.phase is EnginePhase.IDLE:
        repl.tell("The model is unloaded. It reloads when you send a prompt.")
    repl.perform(repl.session.unload())


def system(repl: "Repl", text: str) -> None:
    """Give this chat a system prompt, or print it."""
    if not text:
        repl.say(repl.session.system or "No system prompt.")
        return
    commands.apply_choice(repl, repl.preferences.choose_system("" if text.lower() == "none" else text, own=True))
    repl.tell("The system prompt applies to this chat from the next message on. /system none removes it.")


def thinking(repl: "Repl", text: str) -> None:
    """Print what the chat template is told in this chat, or change it."""
    if repl.session.engine.info is None and not repl.console.typed:
        repl.driver.settle(loaded=True)  # a script's line: the model says what it supports
    commands.thinking(repl, text)


SETTINGS = tuple(field for group in GROUPS for field in group.fields)


def settings(repl: "Repl", written: str) -> None:
    """Print the settings, or change one."""
    name, _, value = written.partition(" ")
    form, before = Form(), commands.current_sheet(repl)
    texts = form.texts(before)
    if not name:
        for scope, groups in groupby(form.groups, key=lambda group: group.scope):
            repl.say(f"{scope}:")
            fields = [field for group in groups for field in group.fields]
            repl.say("\n".join(_setting_line(field, texts, form) for field in fields))
        repl.console.aside("/settings NAME VALUE changes one; default as the value goes back to its default.")
        return
    if name not in texts:
        near = nearest(name, texts)
        raise RefusedError(
            f"There is no setting {name:.40}. " + (f"Did you mean {near}?" if near else "/settings lists them.")
        )
    sheet = form.read({**texts, name: form.defaults[name] if value.lower() == USUAL else value}, own=before.own)
    text = form.texts(sheet)[name] or "not set"
    if form.texts(sheet) == texts:
        repl.tell(f"{name} is already {text}.")
        return
    scope = next(group.scope for group in form.groups for field in group.fields if field.name == name)
    reloads = scope == THE_MODEL and name != "unload_after_min"
    if reloads:
        repl.tell(commands.RELOADING)
    elif scope == THIS_CHAT:
        where = (
            "This applies to this chat alone."
            if sheet.own
            else "This applies to every chat that has no settings of its own."
        )
        repl.tell(where)
    else:
        repl.tell(f"{name} is now {text}.")
    commands.apply_sheet(repl, sheet)


def _setting_line(field: Field, texts: Mapping[str, str], form: Form) -> str:
    """Return a setting, its note, and its default where it differs from that."""
    text, usual = texts[field.name], form.defaults[field.name]
    differs = "" if text == usual else f"; default {usual or 'not set'}"
    return f"{field.name}: {text or 'not set'} ({field.note}{differs})"


# Figures ------------------------------------------------------------------------------------------------------------------

LISTED_FIGURES = tuple(figure for figure in FIGURES if figure != "now")
"""A line is read when no reply is running: nothing has a current rate then."""
BESIDE: Mapping[Figure, tuple[str, ...]] = {
    "cached": ("prompt",),
    "gaps": ("p95", "p99"),
    "ceiling": ("ceiling",),
    "expected": ("expected rate",),
    "context": ("context length",),
    "peak": ("limit",),
}
"""Figures that are listed with some of their inputs."""


def gauges(repl: "Repl", name: str) -> None:
    """Print the figures of the last reply, or explain one."""
    known = {figure: explain(figure, repl.session) for figure in LISTED_FIGURES}
    if not name:
        repl.say("\n".join(_figure_line(figure, each) for figure, each in known.items()))
        repl.console.aside("/gauges and a name explains a figure: its formula, inputs and source.")
        return
    wanted = name.casefold()
    named = [each for figure, each in known.items() if wanted in (figure, each.name.casefold())]
    if not named:
        raise RefusedError(f"There is no figure {name}. /gauges lists them.")
    figure = named[0]
    lines = [f"{figure.name}: {figure.value}" + (f" ({figure.why})" if figure.why else ""), figure.meaning]
    lines.append(f"How: {figure.name} = {figure.formula}")
    lines += [f"From: {each.name}: {each.value} ({each.source})" for each in figure.inputs]
    repl.say("\n".join([*lines, f"Source: {figure.source}"]))


def _figure_line(figure: Figure, known: Explained) -> str:
    beside = [f"{each.name} {each.value}" for each in known.inputs if each.name in BESIDE.get(figure, ())]
    told = ", ".join([*([known.why] if known.why else []), *beside])
    return f"{known.name}: {known.value}" + (f" ({told})" if told else "")


def explain_reply(repl: "Repl", turn: str) -> None:
    """Print why the reply of a turn took as long as it did, or the last one that was measured."""
    from .. import verdict

    turns = repl.session.turns
    wanted = whole_number(turn) or 0
    if turn and not 0 < wanted <= len(turns):
        raise RefusedError(f"There is no turn {turn:.40}. This chat has {len(turns)}.")
    replies = [each.reply for each in (turns[wanted - 1 : wanted] if turn else turns)]
    measured = [reply for reply in replies if reply is not None and reply.metrics is not None]
    if not measured:
        raise RefusedError("There is no reply to explain yet." if not turn else f"Nothing was measured of turn {turn}.")
    reply = repl.session.engine.with_ceiling(measured[-1])
    assert reply.metrics is not None
    lines = [] if reply.diagnosis is None else verdict.lines(reply.diagnosis)
    repl.say("\n".join([verdict.sentence(reply.metrics, reply.diagnosis), *lines]))


# The commands -------------------------------------------------------------------------------------------------------------


def help_(repl: "Repl", _: str) -> None:
    """List the commands."""
    lines = [f"{action.usage}: {action.help}" for action in _available()]
    lines += ["A line that ends with a backslash continues on the next one.", 'Lines between two """ are one prompt.']
    lines += ["A line that begins with ! is a shell command, unless a space or a backslash is before it."]
    repl.say("\n".join(lines))


def stop(repl: "Repl", _: str) -> None:
    """Say how a reply is stopped: none runs while a command is read."""
    repl.tell("No reply is running. Ctrl-C stops one.")


def leave(repl: "Repl", _: str) -> None:
    """Quit; while models are downloaded or converted, once the user has asked twice."""
    if repl.console.typed and (asks := repl.jobs.before_quitting()):
        repl.tell(asks)
    else:
        repl.leaving = True


COMMANDS: Mapping[str, PlainCommand] = {
    **commands.COMMANDS,
    "stop": stop,
    "new_chat": new_chat,
    "chats": chats,
    "open": open_,
    "export": export,
    "import": import_,
    "branches": branches,
    "context": context,
    "scroll_top": top,
    "scroll_end": end,
    "choose_model": model,
    "models": processes.models,
    "jobs": jobs.jobs,
    "unload": unload,
    "system_prompt": system,
    "settings": settings,
    "thinking": thinking,
    "gauges": gauges,
    "explain": explain_reply,
    "steps": processes.steps,
    "what_if": processes.what_if,
    "convert": processes.convert,
    "editor": editor,
    "attach": attach,
    "detach": detach,
    "shell": shell,
    "ask_guide": processes.ask,
    "help": help_,
    "leave": leave,
}
"""By the registry's ids."""
INSTEAD = dict.fromkeys(("toggle_panel", "all_figures"), " Here, /gauges prints the figures.")


def obey(repl: "Repl", text: str) -> bool:
    """Run the slash command in ``text``; return whether it is one."""
    written = actions.parse(text, multiline=True)
    if written is None and (to_run := shell_command(text)) is not None:
        written = actions.Command("!", to_run, actions.by_slash("shell"))
    if written is None:
        return False
    word, argument, action = written.word, written.argument, written.action
    try:
        if action is None:
            repl.tell(f"{actions.unknown(word)} /help lists them. To send this as a prompt, put a space before it.")
        elif argument and not action.for_plain.argument:
            repl.tell(f"{word} takes no argument. To send this as a prompt, put a space before it.")
        elif (command := COMMANDS.get(action.id)) is not None:
            command(repl, argument)
        else:
            instead = INSTEAD.get(action.id, "")
            repl.tell(f"/{action.slash} needs the full screen: quit, and open it with tokamac chat.{instead}")
    except TokamacError as error:
        repl.tell(error.one_line())
    return True


def completed(before: str, begun: str) -> list[str]:
    """Return what the word ``begun`` can become after ``before``: a command, or the name of a setting."""
    if not before:
        names = [f"/{action.slash}" + (" " if action.argument else "") for action in _available()]
        return [name for name in names if begun.startswith("/") and name.startswith(begun.lower())]
    return [f"{field.name} " for field in SETTINGS if before.split() == ["/settings"] and field.name.startswith(begun)]


def _available() -> Iterator[actions.Action]:
    """Yield the actions whose commands the plain chat has."""
    return (action.for_plain for action in ACTIONS if action.slash and action.id in COMMANDS)
