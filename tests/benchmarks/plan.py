"""What is measured: on which model, how often."""

from dataclasses import dataclass
from typing import Any

from tests.benchmarks.remote import Remote
from tests.benchmarks.servers import EngineServer


class BenchError(Exception):
    """A measurement could not be made."""


@dataclass(frozen=True, slots=True)
class Plan:
    """model: as the user names it. folder: where it lies. device: what MLX computes on. quick: small counts, to try the script.

    patient: every round of the slowest peer, however long it takes.
    """

    model: str
    folder: str
    device: str
    described: str
    quick: bool
    patient: bool

    @property
    def rounds(self) -> int:
        """Runs that a median is taken of."""
        return 2 if self.quick else 5

    @property
    def many_rounds(self) -> int:
        """Runs where a run is short, so that other work on the machine weighs much in it."""
        return 3 * self.rounds

    def count(self, full: int, quick: int) -> int:
        """Return how many of something."""
        return quick if self.quick else full


def make_plan(model: str, *, quick: bool, patient: bool) -> Plan:
    """Load the model once, to know it."""
    with Remote(EngineServer, model) as server:
        known: dict[str, Any] = server.call("describe")
    return Plan(model, known["folder"], known["device"], known["described"], quick, patient)
