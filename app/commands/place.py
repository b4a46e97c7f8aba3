"""Flags that name another machine, and the place they come to. Shared by ``inspect`` and ``models suggest``."""

import argparse
from typing import TYPE_CHECKING

from tokamac.app.options import gigabytes, memory_limit, positive
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
    group.add_argument(
        "--memory",
        type=gigabytes,
        metavar="GB",
        help="its memory, as its maker says it; without --chip, what may be used of this machine's",
    )


def place_of(parser: Parser, options: argparse.Namespace) -> "Place | None":
    """Return the machine that is named; None is this one, as it is. Ends with exit status 2 for flags without effect.

    Raises OptionError.
    """
    if options.chip is None:
        if options.gpu_cores is not None:
            parser.error("--gpu-cores has no effect without --chip")
        if (limit := memory_limit(options)) is None:
            return None
        from tokamac.engine.limits.places import here

        return here(limit=limit)
    from tokamac.engine.errors import OptionError
    from tokamac.engine.limits.places import elsewhere

    try:
        return elsewhere(options.chip, options.gpu_cores, options.memory)
    except OptionError as error:
        parser.error(f"--chip: {error.one_line().rstrip('.')}")
