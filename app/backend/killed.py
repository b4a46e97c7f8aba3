"""How a process that a signal ended is told of."""

import signal


def killed_by(number: int) -> str:
    """Return in words that the signal of this number ended a process; one that Python has no name for, by its number."""
    known = number in set(signal.Signals)
    return f"killed by {signal.Signals(number).name if known else f'signal {number}'}"
