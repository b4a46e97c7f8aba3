"""Plain commands about messages: make again, go on, edit, go to another version, copy."""

from tokamac.app.plain.copying import copied
from tokamac.app.plain.outline import outline
from tokamac.app.plain.reading import last_turn
from tokamac.app.plain.repl import Repl
from tokamac.app.sanitise import sanitise
from tokamac.app.tui.attachments import Draft
from tokamac.app.tui.digits import whole_number
from tokamac.app.tui.prose.code import code_blocks
from tokamac.app.tui.tree import Node

ONE_VERSION = "There is one version only: /edit or /again make another."


def again(repl: Repl, _: str) -> None:
    """Make the last reply again."""
    repl.driver.settle(loaded=True)
    repl.driver.perform(repl.driver.session.regenerate())


def continue_(repl: Repl, _: str) -> None:
    """Go on with the last reply."""
    repl.driver.settle(loaded=True)
    repl.driver.perform(repl.driver.session.continue_reply())


def edit(repl: Repl, text: str) -> None:
    """Ask the last prompt anew: as ``text``, or as it is changed on the next line."""
    node = _last(repl)
    if node is None:
        repl.console.note("There is no message to edit yet.")
        return
    prompt = repl.driver.session.talk.prompt_of(node.key)
    if prompt is None:
        repl.console.note("There is no prompt to edit here.")
        return
    if not text and not repl.console.typed:
        repl.console.note("Write the new prompt after the command: /edit TEXT")
        return
    repl.composer.begin_edit(prompt.key, Draft(sanitise(prompt.prompt or ""), prompt.attachments))
    if text:
        repl.ask(text)
    else:
        said = "The next line is asked in place of the last prompt, which stays beside it. Ctrl-C gives it up."
        repl.console.note(said)


def older(repl: Repl, _: str) -> None:
    """Read the version before this one."""
    _step(repl, -1)


def newer(repl: Repl, _: str) -> None:
    """Read the version after this one."""
    _step(repl, 1)


def _step(repl: Repl, by: int) -> None:
    """Go to a version of the last message that has several, and read it out."""
    node = _last(repl)
    other = None if node is None else repl.driver.session.talk.tree.beside(node.key, by)
    if other is None:
        repl.console.note(ONE_VERSION)
    else:
        _go(repl, other)


def branches(repl: Repl, number: str) -> None:
    """List the versions of this chat, or go to the one of this number in the last list, and read it out."""
    tree = repl.driver.session.talk.tree
    if not number or repl.outline is None or repl.outline.tree is not tree:
        repl.outline = outline(tree)
    keys, lines = repl.outline.keys, repl.outline.lines
    wanted = whole_number(number) or 0
    if not keys:
        repl.console.note(ONE_VERSION)
    elif not number:
        repl.console.say("\n".join(lines))
        repl.console.aside("/branches and a number goes there.")
    elif 0 < wanted <= len(keys):
        _go(repl, keys[wanted - 1])
    else:
        repl.console.note(f"There is no version {number:.40}: /branches lists them, 1 to {len(keys)}.")


def _go(repl: Repl, key: int) -> None:
    session = repl.driver.session
    repl.driver.perform(session.go(key))
    repl.console.say(last_turn(session.turns))


def end(repl: Repl, _: str) -> None:
    """Read the last turn out again."""
    repl.console.say(last_turn(repl.driver.session.turns))


def copy(repl: Repl, _: str) -> None:
    """Copy the last message."""
    node = _last(repl)
    text = "" if node is None else node.prompt or (node.reply.text if node.reply is not None else "")
    _copy(repl, text, "There is no message to copy yet.")


def code(repl: Repl, _: str) -> None:
    """Copy the last code block; asked again, the one before it."""
    replies = [turn.reply.text for turn in repl.driver.session.turns if turn.reply is not None]
    blocks = [block for text in replies for block in code_blocks(text)]
    back = repl.code_back.again(repl.driver.session.talk.tree.head or 0, len(blocks)) if blocks else 0
    which = f"Code block {len(blocks) - back + 1} of {len(blocks)}. " if len(blocks) > 1 else ""
    _copy(repl, blocks[-back] if blocks else "", "There is no code block here.", which)


def _copy(repl: Repl, text: str, nothing: str, which: str = "") -> None:
    said = copied(sanitise(text), repl.driver.memory.home) if text else nothing
    repl.console.note(which + said if text else said)


def _last(repl: Repl) -> Node | None:
    tree = repl.driver.session.talk.tree
    return None if tree.head is None else tree.nodes[tree.head]
