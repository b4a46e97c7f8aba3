"""The argument parser of every command: complaints of one line that name what was meant, and help that fits the terminal.

A command that does one of several things (``tokamac models pull ID``) has help for each of its actions.
"""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from tokamac.engine.errors import shortened
from tokamac.engine.hub.names import GUIDE, nearest

from .sanitise import sanitise_line

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

HELP_FLAGS = frozenset({"-h", "--help"})
WIDEST, NARROWEST = 100, 20
"""Columns that help is written in."""
TOPICS = {
    "chat": "chat, profiles, keys, kv, context, memory, sampling, settings, thinking",
    "ask": "each, json, profiles, kv, cache, sampling, thinking",
    "convert": "convert, adapters",
    "inspect": "speed, kv, memory, models",
    "quality": "convert",
    "bench": "speed, each, kv",
    "serve": "serve, kv, cache, sampling, thinking, memory",
    "models": "models",
    "cache": "cache",
    "chats": "chat",
    "completion": "completion, environment",
    "doctor": "doctor, environment, exit",
}
"""What `tokamac help` has on a command."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line, with an example under --help. about: what the command does."""

    def __init__(self, command: str, description: str, examples: str) -> None:
        super().__init__(
            prog=f"tokamac {command}",
            epilog=f"examples:\n{examples}\n\nmore: tokamac help {TOPICS[command]}",
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=help_width()),
            allow_abbrev=False,
        )
        self.about = description
        self._speaker = self.prog
        self._see = f"`{self.prog} --help`"
        self._also: tuple[str, ...] = ()

    def unnamed(self, flags: Iterable[str]) -> None:
        """Complain as the program itself, since the command was not written. flags: what it alone takes."""
        self._speaker = "tokamac"
        self._see = f"`tokamac --help` and {self._see}"
        self._also = tuple(flags)

    def parse_args(  # type: ignore[override]  # the cli asks for no other Namespace
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse; end with exit status 2 at what is not understood."""
        options, unknown = self._parse_known(args, namespace)
        if unknown:
            flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
            meant = did_you_mean(flag, [*self._option_string_actions, *self._also])
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return options

    def _parse_known(
        self, args: Sequence[str] | None, namespace: argparse.Namespace | None
    ) -> tuple[argparse.Namespace, list[str]]:
        return self.parse_known_args(args, namespace)

    def _print_message(self, message: str, file: "SupportsWrite[str] | None" = None) -> None:
        """Write, and raise OSError where stdout takes no more: argparse would keep silent, and help cut short end well."""
        if message and file is not None and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        """End with exit status 2."""
        said = shortened(" ".join(sanitise_line(message).split()))
        self.exit(2, f"{self._speaker}: {said}{'' if said.endswith('?') else '.'} See {self._see}.\n")

    def format_help(self) -> str:
        """Return the help, no wider than the terminal."""
        self.description = self.describe()
        return super().format_help()

    def describe(self) -> str:
        """Return what the command does, in lines."""
        return _filled(self.about)


def _filled(text: str, indent: int = 0) -> str:
    after = " " * indent
    return textwrap.fill(text, help_width(), subsequent_indent=after, break_long_words=False, break_on_hyphens=False)


def did_you_mean(written: str, known: Iterable[str]) -> str:
    """Return a question to end a complaint with; nothing where nothing known is like what was written."""
    near = nearest(written, known) if written else None
    return "" if near is None else f"; did you mean {near}?"


def help_width() -> int:
    """Return the columns to write help in: as argparse does, two less than there are."""
    return max(NARROWEST, min(shutil.get_terminal_size().columns, WIDEST) - 2)


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

    @property
    def actions(self) -> Mapping[str, str]:
        """The actions, and what each does."""
        return self._does

    def takes(self, action: str, name: str) -> bool:
        """Return whether an action takes the argument of this name."""
        return action in self._takers.get(name, self._does)

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
        lines = [_filled(f"  {name.ljust(indent - 4)}  {does}", indent) for name, does in self._does.items()]
        return "\n".join([super().describe(), "", "actions:", *lines])

    def _narrow(self, action: str) -> None:
        """Leave in the help what goes with ``action``."""
        for each in self._actions:
            if each.dest == "action" or not self.takes(action, each.dest):
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


ELSEWHERE = {
    "config": "/settings in the chat",
    "download": "tokamac models pull",
    "generate": "tokamac ask",
    "list": "tokamac models list",
    "ls": "tokamac models list",
    "pull": "tokamac models pull",
    "quantize": "tokamac convert",
    "remove": "tokamac models remove",
    "rm": "tokamac models remove",
    "run": "tokamac chat",
    "settings": "/settings in the chat",
    "version": "tokamac --version",
}
"""What other programs call what this one has under another name."""


def no_command(word: str, commands: Iterable[str]) -> str:
    """Return, for one line, that ``word`` is no command, and which was probably meant."""
    meant = ELSEWHERE.get(word) or (f"tokamac chat {word}" if word == GUIDE or "/" in word else None)
    if meant is None and (near := nearest(word, commands)) is not None:
        meant = f"tokamac {near}"
    said = f"there is no command {word!r}"
    if meant is None:
        return f"{said}. See `tokamac --help`; to chat with a model: tokamac chat MODEL"
    return f"{said}; did you mean {meant}? See `tokamac --help`."
