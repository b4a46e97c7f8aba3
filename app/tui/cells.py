"""Text cut to a number of the terminal's cells: a letter of Chinese or an emoji takes two."""

from rich.cells import cell_len


def end_of(name: str, most: int) -> str:
    """Return ``name``, or as much of its end, after an ellipsis, as has room in ``most`` cells; two at least."""
    if cell_len(name) <= most:
        return name
    end = name[1 - max(most, 2) :]
    while cell_len(end) >= max(most, 2):
        end = end[1:]
    return f"…{end}"
