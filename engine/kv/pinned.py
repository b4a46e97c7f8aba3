"""The keys of a ring's pinned tokens, which move along with the window.

Their positions were absolute once, and further from the query with every token: beyond what the model was trained for, however
short the window. StreamingLLM (https://arxiv.org/abs/2309.17453) numbers positions inside the cache instead. Attention depends on
differences of positions alone, so moving the pinned keys is enough; where they are is ``Ring.shift``.

Kept are the keys as the model made them, in its own type, beside the slots: what lies in the slots is rotated from them and encoded
once, wherever it is moved to and back. That takes the bytes of a plain key for each pinned token.
"""

import mlx.core as mx

from tokamac.engine.kv.codec import Encoded
from tokamac.engine.kv.layout import Ring, Slots, Span
from tokamac.engine.kv.rotary import Rotation


class Pinned:
    """The keys of the first ``ring.keep`` tokens, rotated on by ``rotation``. shift: by how many positions, in the ring's slots."""

    def __init__(self, ring: Ring, rotation: Rotation) -> None:
        self.ring, self._rotation = ring, rotation
        self._made = Slots(ring.keep)
        self.shift = 0

    @property
    def arrays(self) -> Encoded:
        """The keys as the model made them (B, H, keep, D); () while there are none."""
        return self._made.arrays

    def restore(self, arrays: Encoded, held: int) -> None:
        """Go on from these ``arrays``, and slots that were kept with them when ``held`` tokens were."""
        self._made.arrays, self.shift = tuple(arrays), self.ring.shift(held - 1)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._made.nbytes

    @property
    def span(self) -> Span:
        """Where they lie among the ring's slots."""
        return Span(0, 0, self.ring.keep)

    def take(self, keys: mx.array, start: int) -> None:
        """Take in those of the keys (B, H, N, D) after ``start`` tokens that are pinned."""
        count = min(keys.shape[2], self.ring.keep - start)
        if count > 0:
            own = mx.contiguous(keys[:, :, :count])  # a view that fills all slots would keep the keys of the whole call
            self._made.write((own,), [Span(0, start, count)], start + count)

    def moved(self, shift: int) -> mx.array:
        """Return all of them (B, H, keep, D), ``shift`` positions further on than the model made them."""
        return self._rotation.move(self._made.arrays[0], shift)

    def shared(self) -> "Pinned":
        """Return another of the same arrays; whichever of the two writes first makes its own copy then."""
        other = Pinned(self.ring, self._rotation)
        other._made, other.shift = self._made.shared(), self.shift
        return other
