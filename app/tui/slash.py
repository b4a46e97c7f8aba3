"""A text that is written as a slash command, taken apart. Whatever is not one is a prompt."""

from collections.abc import Container
from dataclasses import dataclass

from tokamac.app.tui.actions import Action, by_slash


@dataclass(frozen=True, slots=True)
class Command:
    """``word`` has its slash. action: None where no command is called so."""

    word: str
    argument: str
    action: Action | None

    @property
    def is_whole(self) -> bool:
        """Whether there is such a command, and what has to follow it follows."""
        needed = "" if self.action is None else self.action.argument
        return self.action is not None and (bool(self.argument) or not needed or needed.startswith("["))


def parse(text: str, lined: Container[str] = ()) -> Command | None:
    """Return the command that ``text`` is; None where it is a prompt, as it is where it has several lines.

    lined: ids of the actions that may be followed by several.
    """
    word, _, argument = text.rstrip().partition(" ")
    if not (word.startswith("/") and word[1:].isalpha()):
        return None
    action = by_slash(word[1:].lower())
    if "\n" in argument and (action is None or action.id not in lined):
        return None
    return Command(word, argument.strip(), action)
