"""The argument parser of every command: complaints of one line that name what was meant, and help that fits the terminal."""

import argparse
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import NoReturn

from tokamac.app.sanitise import sanitise_line
from tokamac.engine.errors import shortened
from tokamac.engine.spelling import nearest

HELP_FLAGS = frozenset({"-h", "--help"})
WIDEST, NARROWEST = 100, 20
"""Columns that help is written in."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line, with an example under --help. about: what the command does."""

    def __init__(self, command: str, description: str, examples: str) -> None:
        super().__init__(
            prog=f"tokamac {command}",
            epilog=f"examples:\n{examples}",
            formatter_class=_formatter,
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
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        return options

    def _parse_known(
        self, args: Sequence[str] | None, namespace: argparse.Namespace | None
    ) -> tuple[argparse.Namespace, list[str]]:
        return self.parse_known_args(args, namespace)

    def _meant(self, unknown: Iterable[str]) -> str:
        """Return which flag the first unknown one was probably meant to be; nothing where there is none."""
        flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
        return did_you_mean(flag, [*self._option_string_actions, *self._also])

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
        return textwrap.fill(self.about, help_width(), break_long_words=False, break_on_hyphens=False)


def did_you_mean(written: str, known: Iterable[str]) -> str:
    """Return a question to end a complaint with; nothing where nothing known is like what was written."""
    near = nearest(written, known) if written else None
    return "" if near is None else f"; did you mean {near}?"


def help_width() -> int:
    """Return the columns to write help in: as argparse does, two less than there are."""
    return max(NARROWEST, min(shutil.get_terminal_size().columns, WIDEST) - 2)


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, width=help_width())
