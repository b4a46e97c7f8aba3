"""What the user is told once in all, not at every start."""

from tokamac.engine.limits import kept

FILE = "told.json"


def is_new(text: str) -> bool:
    """Whether this was never told, and remember that it is now. Where that can't be written, it is told again."""
    file = kept.store_file(FILE)
    if kept.read(file, text) is not None:
        return False
    kept.keep(file, {text: 1.0})
    return True
