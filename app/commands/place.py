"""Flags that name another machine, and the place they come to. Shared by ``inspect`` and ``models suggest``."""

import argparse
from typing import TYPE_CHECKING

from tokamac.app.options import positive
from tokamac.app.parser import Parser

if TYPE_CHECKING:
    from tokamac.engine.limits.places import Place


def add_place_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--chip``, ``--gpu-cores`` and ``--memory``."""
    group = parser.add_argument_group("another machine (what is left out is this one)")
    group.add_argument("--chip", metavar="NAME", help='a chip, such as "Apple M4 Max"')
    group.add_argument(
        "--gpu-cores", type=positive, metavar="N", help="its GPU cores, which tell bins of one name apart"
    )
    group.add_argument("--memory", type=gigabytes, metavar="GB", help="its memory, as its maker says it")


def gigabytes(text: str) -> float:
    """Return a size of memory above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in GB above 0")
    return value


def place_of(parser: Parser, options: argparse.Namespace) -> "Place | None":
    """Return the machine that is named; None is this one. Ends with exit status 2 for flags without effect. Raises OptionError."""
    if options.chip is None:
        for flag, value in (("--gpu-cores", options.gpu_cores), ("--memory", options.memory)):
            if value is not None:
                parser.error(f"{flag} has no effect without --chip")
        return None
    from tokamac.engine.errors import OptionError
    from tokamac.engine.limits.places import elsewhere

    try:
        return elsewhere(options.chip, options.gpu_cores, options.memory)
    except OptionError as error:
        parser.error(f"--chip: {error.one_line().rstrip('.')}")
