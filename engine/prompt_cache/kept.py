"""What the prompt cache holds: the caches in use, and what is kept of each run of tokens."""

from dataclasses import dataclass
from typing import Any

from tokamac.engine.kv import segments
from tokamac.engine.kv.segments import Piece, States


@dataclass(slots=True)
class Slot:
    """Caches and the token ids they hold; ``keep`` is the number of pinned tokens they were made with."""

    ids: list[int]
    caches: list[Any]
    keep: int | None


class Kept:
    """What is kept of a run of tokens. piece: None while it lies in the live caches. states: of what can't be cut, at its end.

    stored: whether a segment on disk ends here. nbytes: of piece and states; known without asking hundreds of arrays.
    """

    __slots__ = ("_piece", "_piece_bytes", "_states", "_states_bytes", "stored")

    def __init__(self, piece: Piece | None = None, states: States | None = None, *, stored: bool = False) -> None:
        self.stored = stored
        self.piece = piece
        self.states = states

    @property
    def piece(self) -> Piece | None:
        """The run's tokens, of all caches that grow."""
        return self._piece

    @piece.setter
    def piece(self, piece: Piece | None) -> None:
        self._piece = piece
        self._piece_bytes = 0 if piece is None else segments.piece_bytes(piece)

    @property
    def states(self) -> States | None:
        """What can't be cut, at the run's end."""
        return self._states

    @states.setter
    def states(self, states: States | None) -> None:
        self._states = states
        self._states_bytes = 0 if states is None else segments.states_bytes(states)

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self._piece_bytes + self._states_bytes
