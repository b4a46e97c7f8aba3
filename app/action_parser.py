"""The parser of a command that does one of several things: ``tokamac models pull ID``. Each has help of its own."""

import argparse
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence

from tokamac.app.parser import HELP_FLAGS, Parser, did_you_mean, help_width


class ActionParser(Parser):
    """Takes an action first, and flags anywhere: argparse of Python 3.11 finds no positional argument behind a flag.

    actions: what each does, the first of them where none is named.
    """

    def __init__(self, command: str, description: str, examples: str, actions: Mapping[str, str]) -> None:
        super().__init__(command, description, examples)
        self._does = actions
        self._takers: dict[str, Collection[str]] = {}
        self._listed = True
        first = next(iter(actions))
        self.add_argument(
            "action", nargs="?", type=_one_of(actions), metavar="ACTION", default=first, help=f"see above ({first})"
        )

    def only(self, actions: Collection[str], *names: str) -> None:
        """Say that the arguments of these names are for these actions alone: the help of the others leaves them out."""
        self._takers.update(dict.fromkeys(names, actions))

    def parse_args(  # type: ignore[override]  # the cli asks for no other Namespace
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse; end with exit status 2 at what is not understood."""
        if args and args[0] in self._does and not HELP_FLAGS.isdisjoint(args):
            self._narrow(args[0])
        return super().parse_args(args, namespace)

    def _parse_known(
        self, args: Sequence[str] | None, namespace: argparse.Namespace | None
    ) -> tuple[argparse.Namespace, list[str]]:
        return self.parse_known_intermixed_args(args, namespace)

    def describe(self) -> str:
        """Return what the command is about, and what each action does."""
        if not self._listed:
            return super().describe()
        indent = max(map(len, self._does)) + 4
        lines = [
            textwrap.fill(
                f"  {name.ljust(indent - 4)}  {does}",
                help_width(),
                subsequent_indent=" " * indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            for name, does in self._does.items()
        ]
        return "\n".join([super().describe(), "", "actions:", *lines])

    def _narrow(self, action: str) -> None:
        """Leave in the help what goes with ``action``."""
        for each in self._actions:
            if each.dest == "action" or action not in self._takers.get(each.dest, self._does):
                each.help = argparse.SUPPRESS
        lines = (self.epilog or "").splitlines()
        own = [line for line in lines if line.startswith(f"  {self.prog} {action}")]
        self.epilog = "\n".join(["examples:", *own]) if own else None
        self.prog = f"{self.prog} {action}"
        self.about, self._listed = f"{action}: {self._does[action]}", False


def _one_of(words: Collection[str]) -> Callable[[str], str]:
    """Return what reads one of ``words``, as the type of an argument: it says which one was probably meant."""

    def read(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(words)}{did_you_mean(text, words)}")
        return text

    return read
