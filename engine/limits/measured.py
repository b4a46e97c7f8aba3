"""The expected speed where no published measurement knows it: the sum of a step's parts, timed on this machine (parts.py).

    decode   t = Σ products of one row + Σ layers' attention at this depth + the other kernels + sampling
                 + Σ layers' handing over at this depth, where MLX and NumPy take turns (turns.py)
    prefill  t = Σ over chunks of the same for a chunk's rows, without sampling, and the first token's step

Parts are timed once a machine and MLX version, and kept; models share those that they have alike. Nothing here has seen a whole
step of the model, so a prediction can be wrong, and is tested as one.
"""

from dataclasses import dataclass

from tokamac.engine.limits.products import Product
from tokamac.engine.limits.work import Work

ROWS = 256
"""Rows of a chunk that is timed; fewer and more are taken in proportion."""

A_LAYER = 7
"""A layer's small kernels: two norms, two rotations, two sums, a gated product."""

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one part: of a decode step's single row, and of ROWS rows, which take no less."""

    row_s: float
    rows_s: float

    def of(self, rows: int) -> float:
        """Seconds for so many rows, in proportion."""
        return self.row_s + (self.rows_s - self.row_s) * (rows - 1) / (ROWS - 1)


@dataclass(frozen=True, slots=True)
class TimedAttention:
    """``layers`` alike: (depth, seconds of one of them), both ascending, for one row and for ROWS. limit: tokens held at most."""

    layers: int
    limit: int | None
    row: Points
    rows: Points

    def of(self, rows: int, depth: int) -> float:
        """Seconds of all these layers for so many rows after ``depth`` tokens."""
        held = depth if self.limit is None else min(depth, self.limit)
        timed = Timed(between(self.row, held), between(self.rows, held))
        return self.layers * timed.of(rows)


@dataclass(frozen=True, slots=True)
class HandingOver:
    """``layers`` alike: (depth, seconds that the parts of one take longer in turn than apart). limit: tokens held at most."""

    layers: int
    limit: int | None
    points: Points

    def of(self, depth: int) -> float:
        """Seconds of all these layers in a step after ``depth`` tokens. Below the first depth as there, so that what a step takes
        does not fall with depth where this does."""
        held = depth if self.limit is None else min(depth, self.limit)
        return self.layers * between(self.points, max(held, self.points[0][0]))


@dataclass(frozen=True, slots=True)
class Measured:
    """A machine's pace with one model, made of its timed parts.

    others: kernels that are neither products nor attention. handing: empty where MLX does all of a layer.
    """

    products: tuple[tuple[Product, Timed], ...]
    attention: tuple[TimedAttention, ...]
    launch: Timed
    others: int
    sampling_s: float
    handing: tuple[HandingOver, ...] = ()

    def decode_s(self, work: Work, context: int, batch: int = 1) -> float | None:  # noqa: ARG002
        """Seconds of a step; None for several sequences, which were not timed."""
        if batch != 1:
            return None
        multiplying = sum(product.count * timed.row_s for product, timed in self.products)
        handing = sum(layer.of(context) for layer in self.handing)
        return multiplying + self._around(1, context) + handing + self.sampling_s

    def prefill_s(self, work: Work, tokens: int, cached: int, chunk: int) -> float | None:
        """Seconds of reading ``tokens`` after ``cached`` and of the first token."""
        first = self.decode_s(work, cached + tokens)
        if tokens <= 1 or first is None:
            return first
        end = cached + tokens - 1  # the last token is the first step's
        whole, rest = divmod(end - cached, chunk)
        total = first + whole * self._multiplying(chunk) + self._attending(cached, whole, chunk)
        return total + (self._multiplying(rest) + self._around(rest, end - rest) if rest else 0.0)

    def _multiplying(self, rows: int) -> float:
        return sum(product.count * timed.of(rows) for product, timed in self.products if not product.head)

    def _attending(self, start: int, chunks: int, chunk: int) -> float:
        """Seconds of so many whole chunks' attention and other kernels: sums of the straight stretches between timed depths."""
        bends = {depth for layer in self.attention for depth, _ in (*layer.row, *layer.rows)}
        bends |= {layer.limit for layer in self.attention if layer.limit is not None}
        total, done = 0.0, 0
        for bend in (*sorted(bends), None):
            stop = chunks if bend is None else min(chunks, max(done, -(-(bend - start) // chunk)))
            if stop > done:
                ends = (self._around(chunk, start + at * chunk) for at in (done, stop - 1))
                total += (stop - done) * sum(ends) / 2
            done = stop
        return total

    def _around(self, rows: int, depth: int) -> float:
        attending = sum(layer.of(rows, depth) for layer in self.attention)
        return attending + self.others * self.launch.of(rows)


def between(points: Points, depth: int) -> float:
    """Return the value at ``depth`` on the line through the two nearest of ascending (depth, value) points; beyond them too."""
    upper = next((i for i, (at, _) in enumerate(points) if at >= depth), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(upper - 1, 0)], points[max(upper, 1)]
    return max(y0 + (y1 - y0) * (depth - x0) / (x1 - x0), 0.0)


def depths_up_to(limit: int | None) -> tuple[int, ...]:
    """Return the depths that attention is timed at: few, since it grows evenly between them; within a window, its own."""
    most = 4096 if limit is None else min(limit, 4096)
    return tuple(sorted({min(64, most), min(1024, most), most})) if most > 64 else (0, most)
