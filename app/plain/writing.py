"""Plain commands about the next prompt: an editor of the user's own, and files that go with it."""

from pathlib import Path

from tokamac.app.plain.repl import Repl
from tokamac.app.tui.attachments import Draft
from tokamac.app.tui.editor import EditorError, edit_text, editor_command


def editor(repl: Repl, _: str) -> None:
    """Write a prompt in the user's own editor, and send it."""
    try:
        command = editor_command()
        with repl.away():
            text = edit_text(command, repl.composer.draft.text)
    except EditorError as error:
        repl.console.note(str(error))
        return
    if text.strip():
        repl.console.say(text)
        repl.ask(text.strip())


def attach(repl: Repl, path: str) -> None:
    """Let a file go with the next prompt."""
    from tokamac.app.tui.attach import read_file

    if not path:
        repl.console.note("Write the file after the command: /attach notes.md")
        return
    made, draft = read_file(path, Path()), repl.composer.draft
    others = tuple(each for each in draft.attachments if each.name != made.name)
    repl.composer.draft = Draft(draft.text, (*others, made))
    repl.console.note(f"{made.name}, {len(made.text):,} characters, goes with the next prompt.")


def detach(repl: Repl, name: str) -> None:
    """Let go of a file, or of the last one."""
    draft = repl.composer.draft
    named = [each for each in draft.attachments if name in ("", each.name)]
    if not named:
        repl.console.note(f"Nothing called {name} is attached." if name else "Nothing is attached.")
        return
    repl.composer.draft = Draft(draft.text, tuple(each for each in draft.attachments if each is not named[-1]))
    repl.console.note(f"{named[-1].name} does not go with the next prompt.")
