"""Plain numbers out of what callers give, whatever library theirs come from. No MLX here."""

import operator
from numbers import Real
from typing import Any

from tokamac.engine.errors import OptionError


def whole(value: Any, what: str) -> int:
    """Return an integer of any library as an int. Raises OptionError for anything else; a bool counts as none."""
    try:
        return index(value)
    except TypeError:
        raise OptionError(f"{what} {value!r:.60} is not an integer", "Use a whole number.") from None


def index(value: Any) -> int:
    """Return an integer of any library as an int; raise TypeError for anything else. Python's truth values count as none."""
    if isinstance(value, bool):
        raise TypeError("a bool is no number here")
    return operator.index(value)


def real(value: Any, what: str) -> float:
    """Return a real number of any library as an int or a float. Raises OptionError for anything else; a bool counts as none."""
    if type(value) in {int, float}:
        return value  # type: ignore[no-any-return]
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(f"{what} {value!r:.60} is not a number", "Use a number.")
    return float(value)
