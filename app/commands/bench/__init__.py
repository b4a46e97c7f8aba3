"""``tokamac bench``: measured speed against the machine's limits."""

from .bench import parser, run

__all__ = ["parser", "run"]
