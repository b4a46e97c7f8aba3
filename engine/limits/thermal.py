"""Whether macOS slows the chip down: because of its heat, or by Low Power Mode. Asked between tokens, in microseconds.

Heat counts from the thermal pressure "heavy" on: macOS's own load advisory calls "moderate" acceptable and what is above it bad
(PowerManagement, SystemLoad.c). "nominal" proves nothing: chips were seen to slow down under it (angristan/MacThrottle#19), so that
a reply is only ever said to have been slowed, never not to have been.
"""

import time
from collections.abc import Callable

from tokamac.engine.limits import macos
from tokamac.engine.limits.gaps import Throttle
from tokamac.engine.limits.macos import System

EVERY_S = 5.0
"""A chip takes longer to get hot."""


class ThrottleWatch:
    """Remembers for one reply what slowed the chip down. mac: whom to ask; None where nobody tells.

    seen: all of it.
    """

    def __init__(self, mac: System | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.seen: tuple[Throttle, ...] = ()
        self._from_start: tuple[Throttle, ...] = ()
        self._mac = mac
        self._clock = clock
        self._due_s: float | None = None

    def look(self, *, now: bool = False) -> None:
        """Ask, if the last time is long enough ago; or in any case."""
        if self._mac is None or (not now and self._due_s is not None and self._clock() < self._due_s):
            return
        said = throttles(self._mac)
        if self._due_s is None:
            self._from_start = said
        self.seen += tuple(each for each in said if each not in self.seen)
        self._due_s = self._clock() + EVERY_S

    @property
    def explains_gaps(self) -> tuple[Throttle, ...]:
        """What may have made single gaps longer than others: heat, and a mode that was not on from the first token."""
        return tuple(each for each in self.seen if each == "thermal" or each not in self._from_start)


def throttles(mac: System) -> tuple[Throttle, ...]:
    """Return what the system says now that it slows the chip down for; nothing where it does not tell."""
    said: tuple[tuple[Throttle, bool | None], ...] = (
        ("thermal", macos.throttled(mac)),
        ("low power", mac.low_power()),
    )
    return tuple(name for name, on in said if on)
