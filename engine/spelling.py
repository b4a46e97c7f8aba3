"""What a name that nobody knows was probably meant to be."""

from collections.abc import Iterable


def nearest(written: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """Return the name in ``known`` that ``written`` is most like, whatever their case; None where none is like it.

    alike: the least likeness, where 1 is the same.
    """
    from difflib import get_close_matches

    names = {name.casefold(): name for name in known}
    near = get_close_matches(written.casefold(), names, 1, alike)
    return names[near[0]] if near else None
