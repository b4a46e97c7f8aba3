"""What timing asks of a machine, played: how busy it is, how fast it reads, and where that is kept."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tokamac.engine.perf import bandwidth
from tokamac.engine.perf.bandwidth import Sample


@dataclass(eq=False)
class TimedMachine:
    """A machine that reads its memory as ``samples`` say. timed: the sizes that it was timed with."""

    patch: pytest.MonkeyPatch
    file: Path
    busy: bool = False
    samples: tuple[Sample, ...] = (Sample(50.0, 0.1),) * 4
    timed: list[int] = field(default_factory=list)

    def play(self) -> None:
        def trials(size: int, _: object) -> Iterator[Sample]:
            self.timed.append(size)
            return iter(self.samples)

        played: dict[str, Callable[..., object]] = {
            "store_file": lambda: self.file,
            "is_busy": lambda: self.busy,
            "trials": trials,
        }
        for name, instead in played.items():
            self.patch.setattr(bandwidth, name, instead)
        self.restart()

    def restart(self) -> None:
        """Another process begins."""
        for kept, nothing in {"_timed": set(), "_unkept": {}}.items():
            self.patch.setattr(bandwidth, kept, nothing)


@pytest.fixture
def timed_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TimedMachine:
    machine = TimedMachine(monkeypatch, tmp_path / "cache" / "bandwidth.json")
    machine.play()
    return machine
