"""What the parts of a step take here: timed in passes, of which the quickest counts, and kept, so that a later start goes on."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tokamac.engine.limits import kept
from tokamac.engine.limits.bandwidth import is_busy

PASSES = 3
"""How often each part is timed, in passes over all of them. What slows a machine comes and goes in seconds (others' work, the
clock, a virtual machine's neighbours): it meets all of one time of a part, and seldom three that lie apart."""


@dataclass(frozen=True, slots=True)
class Part:
    """key: names all it depends on. time_it: times it once. better: of two such times (or of two rates), the less disturbed."""

    key: str
    time_it: Callable[[], float]
    better: Callable[[float, float], float] = min


class Timings:
    """The times of some parts: those that a file holds, and those that ``steps`` adds to it."""

    def __init__(self, file: Path, parts: tuple[Part, ...]) -> None:
        self._file = file
        self._parts = parts
        self._best: dict[str, float] = {}
        on_file = kept.read_all(file)
        self._open: list[tuple[int, Part]] = []
        for number, part in product(range(1, PASSES + 1), parts):
            if (found := on_file.get(name(part.key, number))) is None:
                self._open.append((number, part))
            else:
                self._add(part, found)

    @property
    def best(self) -> Mapping[str, float]:
        """The best time so far of each part that was timed, by its key."""
        return self._best

    @property
    def missing(self) -> int:
        """Parts that were not timed yet."""
        return sum(part.key not in self._best for part in self._parts)

    @property
    def remaining(self) -> int:
        """Timings still to be made: PASSES of each part."""
        return len(self._open)

    def steps(self) -> Iterator[None]:
        """Make what remains, a timing a step. What is timed on a busy machine takes too long: it is used, but not kept."""
        import mlx.core as mx

        began = time.process_time()
        while self._open:
            number, part = self._open.pop(0)
            busy = is_busy(time.process_time() - began)
            found = part.time_it()
            busy = busy or is_busy(time.process_time() - began)
            mx.clear_cache()  # the copies of a matrix take as much memory as the model may
            self._add(part, found)
            if not busy:
                kept.keep(self._file, {name(part.key, number): found})
            yield

    def _add(self, part: Part, found: float) -> None:
        self._best[part.key] = part.better(found, self._best.get(part.key, found))


def name(key: str, number: int) -> str:
    """Return what a part's time in a pass, 1 to PASSES, is kept as."""
    return f"{key} | pass {number}"
