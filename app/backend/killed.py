"""How a process that did not end well is told of."""

import signal


def killed_by(number: int) -> str:
    """Return in words that the signal of this number ended a process; one that Python has no name for, by its number."""
    known = number in set(signal.Signals)
    return f"killed by {signal.Signals(number).name if known else f'signal {number}'}"


def how_ended(status: int) -> str:
    """Return in words how a process ended, by its exit status as ``subprocess`` has it: below zero a signal's."""
    return f"was {killed_by(-status)}" if status < 0 else f"ended with status {status}"
