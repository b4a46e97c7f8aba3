"""Argument parser of all commands: one-line errors with suggestions, help as wide as the terminal."""

# Commands with actions (``tokamac models pull ID``) have help per action.

import argparse
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NoReturn

from tokamac.engine.errors import shortened
from tokamac.engine.files import exists, expanded
from tokamac.engine.hub.names import GUIDE, nearest

from .text.sanitise import sanitise_line

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

HELP_FLAGS = frozenset({"-h", "--help"})
WIDEST, NARROWEST = 100, 20  # columns that help is written in
# What `tokamac help` has on a command.
TOPICS = {
    "chat": "chat, profiles, keys, kv, context, memory, sampling, settings, thinking",
    "ask": "each, json, profiles, kv, cache, sampling, thinking",
    "convert": "convert, adapters",
    "inspect": "speed, kv, memory, models",
    "quality": "convert",
    "bench": "speed, each, kv",
    "serve": "serve, kv, cache, sampling, thinking, memory",
    "launch": "serve",
    "models": "models",
    "cache": "cache",
    "chats": "chat, backup",
    "backup": "backup",
    "restore": "backup",
    "completion": "completion, environment",
    "doctor": "doctor, environment, exit",
}


class Parser(argparse.ArgumentParser):
    """Parser with one-line errors and examples in --help. about: what the command does."""

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
        self._model_is: Literal["", "optional", "required"] = ""

    def add_model(self, kind: Callable[[str], str], about: str, *, required: bool = False) -> None:
        """Take a model by place or with -m: ``options.model``, None where neither is given."""
        self._model_is = "required" if required else "optional"
        self.add_argument("model", nargs="?", type=kind, metavar="MODEL", help=about)
        self.add_argument("-m", "--model", type=kind, dest="named", metavar="MODEL", help="the same as MODEL")

    def unnamed(self, flags: Iterable[str]) -> None:
        """Report errors as the program itself: the command was implied. flags: its own ones."""
        self._speaker = "tokamac"
        self._see = f"`tokamac --help` and {self._see}"
        self._also = tuple(flags)

    def parse_args(  # type: ignore[override]  # the cli asks for no other Namespace
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        options, unknown = self._parse_known(args, namespace)
        if unknown:
            flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
            meant = did_you_mean(flag, [*self._option_string_actions, *self._also])
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        if self._model_is:
            if None not in (options.model, options.named):
                self.error("give MODEL once, with -m or without")
            options.model = options.named if options.model is None else options.model
            if options.model is None and self._model_is == "required":
                self.error("the following arguments are required: MODEL")
        return options

    def _parse_known(
        self, args: Sequence[str] | None, namespace: argparse.Namespace | None
    ) -> tuple[argparse.Namespace, list[str]]:
        return self.parse_known_args(args, namespace)

    def _print_message(self, message: str, file: "SupportsWrite[str] | None" = None) -> None:
        # argparse would ignore the error, and truncated help would exit with 0.
        if message and file is not None and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        said = shortened(" ".join(sanitise_line(message).split()))
        self.exit(2, f"{self._speaker}: {said}{'' if said.endswith('?') else '.'} See {self._see}.\n")

    def format_help(self) -> str:
        self.description = self.describe()
        return super().format_help()

    def describe(self) -> str:
        return _filled(self.about)


def _filled(text: str, indent: int = 0) -> str:
    after = " " * indent
    return textwrap.fill(text, help_width(), subsequent_indent=after, break_long_words=False, break_on_hyphens=False)


def did_you_mean(written: str, known: Iterable[str]) -> str:
    """Return a "did you mean" suffix, or ""."""
    near = nearest(written, known) if written else None
    return "" if near is None else f"; did you mean {near}?"


def help_width() -> int:
    """Return the help's width: terminal columns minus two, as in argparse."""
    return max(NARROWEST, min(shutil.get_terminal_size().columns, WIDEST) - 2)


class ActionParser(Parser):
    """Parser with a leading action; actions: help by name, the first is the default."""

    # argparse of Python 3.11 finds no positional argument behind a flag.

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
        return self._does

    def takes(self, action: str, name: str) -> bool:
        return action in self._takers.get(name, self._does)

    def only(self, actions: Collection[str], *names: str) -> None:
        """Restrict arguments to these actions; the help of others omits them."""
        self._takers.update(dict.fromkeys(names, actions))

    def parse_args(  # type: ignore[override]  # the cli asks for no other Namespace
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        if args and args[0] in self._does and not HELP_FLAGS.isdisjoint(args):
            self._narrow(args[0])
        return super().parse_args(args, namespace)

    def _parse_known(
        self, args: Sequence[str] | None, namespace: argparse.Namespace | None
    ) -> tuple[argparse.Namespace, list[str]]:
        return self.parse_known_intermixed_args(args, namespace)

    def describe(self) -> str:
        if not self._listed:
            return super().describe()
        indent = max(map(len, self._does)) + 4
        lines = [_filled(f"  {name.ljust(indent - 4)}  {does}", indent) for name, does in self._does.items()]
        return "\n".join([super().describe(), "", "actions:", *lines])

    def _narrow(self, action: str) -> None:
        """Limit the help to ``action``."""
        for each in self._actions:
            if each.dest == "action" or not self.takes(action, each.dest):
                each.help = argparse.SUPPRESS
        lines = (self.epilog or "").splitlines()
        own = [line for line in lines if line.startswith(f"  {self.prog} {action}")]
        self.epilog = "\n".join(["examples:", *own]) if own else None
        self.prog = f"{self.prog} {action}"
        self.about, self._listed = f"{action}: {self._does[action]}", False


def _one_of(words: Collection[str]) -> Callable[[str], str]:
    """Return an argument type for ``words`` that suggests near ones."""

    def read(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(words)}{did_you_mean(text, words)}")
        return text

    return read


# What other programs call what this one has under another name.
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
    "settings": "/settings in the chat",
    "version": "tokamac --version",
}


def meant_command(word: str, commands: Iterable[str]) -> str | None:
    if (known := ELSEWHERE.get(word)) is not None:
        return known
    if word == GUIDE or "/" in word or (":" in word and " " not in word):
        return f"tokamac chat {shlex.quote(word)}" if " " not in word or exists(expanded(word)) else None
    near = nearest(word, commands) if " " not in word else None
    return None if near is None else f"tokamac {near}"


def no_command(word: str, meant: str | None) -> str:
    """Return a one-line error for an unknown command. meant: the suggestion."""
    said = f"there is no command {word!r}"
    if meant is None:
        return f"{said}. See `tokamac --help`; to ask: tokamac ask {shlex.quote(word)}; to chat: tokamac chat MODEL"
    return f"{said}; did you mean {meant}? See `tokamac --help`."
