"""Sizes as text, the same wherever one is told."""


def figures(value: float) -> str:
    """Return a number in three figures, or more where it has more before the point: 0.98, 2.26, 50.4, 1,024."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def size(value: int) -> str:
    """Return bytes in decimal units: 2.26 GB."""
    for factor, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if value >= factor:
            return f"{figures(value / factor)} {unit}"
    return f"{value} B"


def sizes(first: int, second: int) -> tuple[str, str]:
    """Return two sizes as text, to the byte where they differ and would look alike."""
    if first == second or size(first) != size(second):
        return size(first), size(second)
    return f"{first:,} B", f"{second:,} B"
