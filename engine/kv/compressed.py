"""The cache of a layer that sees its last tokens one by one, and older ones through compressed entries (DeepSeek V4).

    recent      the rows of the last tokens: a window, and what rewinding needs
    tails       what each compressor was given of tokens whose groups are open, or may be opened again by rewinding
    entries     one row for each closed group of ``ratio`` tokens, of each compressor

A layer without a compressor has the window alone. Nothing is lost for ``SPARE`` tokens, so that as many can be trimmed exactly;
only a state that was kept as a whole leads further back (snapshot.py).
"""

import mlx.core as mx

SPARE = 64
"""Tokens that can always be trimmed: what a window of 128 has spare elsewhere (plan.py), too."""
ROWS_STEP = 64
"""Entries by which an array grows, or a sixteenth where that is more."""

Rows = tuple[mx.array, mx.array]


class CompressedCache:
    """Rows of one layer. Its user calls ``slide`` and, for every compressor, ``close`` and ``append``; then ``advance``.

    window: tokens that a query sees one by one, its own included. ratio: tokens to an entry; 0 without compressors. reach: tokens
    before its group that also go into an entry. compressors: how many there are.
    """

    def __init__(self, window: int, ratio: int = 0, reach: int = 0, compressors: int = 0) -> None:
        self.window, self.ratio, self.reach = window, ratio, reach
        self.offset = 0
        self.recent: mx.array | None = None  # (B, R, D), the last R tokens
        self.tails: list[mx.array | None] = [None] * (2 * compressors)  # values and gates (B, R, ·) of each compressor
        self.entries: list[mx.array | None] = [None] * compressors  # (B, capacity, D)

    def slide(self, rows: mx.array) -> mx.array:
        """Add the rows (B, N, D) of the next tokens; return those that they may see (B, T, D), their own last."""
        known = rows if self.recent is None else mx.concatenate([self.recent, rows], axis=1)
        seen = self.seen_before + rows.shape[1]
        self.recent = mx.contiguous(_last(known, self.window - 1 + SPARE))  # a view would keep all of ``known``
        return _last(known, seen)

    @property
    def seen_before(self) -> int:
        """Tokens before the next that it sees one by one."""
        return min(self.offset, self.window - 1)

    def close(self, compressor: int, values: mx.array, gates: mx.array) -> Rows | None:
        """Add what a compressor is given of the next tokens, (B, N, ·) each.

        Return what the groups that they close are made of, (B, reach + G × ratio, ·), or None where no group closes. Before the
        first token, values are 0 and gates −∞.
        """
        at, end = 2 * compressor, self.offset + values.shape[1]
        pair = []
        for index, rows in ((at, values), (at + 1, gates)):
            tail = self.tails[index]
            pair.append(rows if tail is None else mx.concatenate([tail, rows], axis=1))
        begin = end - pair[0].shape[1]  # position of the first row
        first_kept = max(begin, self._first_needed(end - SPARE))
        self.tails[at], self.tails[at + 1] = (mx.contiguous(rows[:, first_kept - begin :]) for rows in pair)
        first, last = self.offset // self.ratio * self.ratio - self.reach, end // self.ratio * self.ratio
        if last == first + self.reach:
            return None
        closed = [rows[:, max(first, 0) - begin : last - begin] for rows in pair]
        if first < 0:
            closed = [
                mx.pad(rows, [(0, 0), (-first, 0), (0, 0)], constant_values=mx.array(fill, rows.dtype))
                for rows, fill in zip(closed, (0.0, -mx.inf), strict=True)
            ]
        return closed[0], closed[1]

    @property
    def groups(self) -> int:
        """Groups closed before the next token."""
        return self.offset // self.ratio

    def append(self, compressor: int, rows: mx.array) -> None:
        """Add the entries (B, G, D) of the groups that ``close`` returned."""
        first, entries = self.groups, self.entries[compressor]
        stop, capacity = first + rows.shape[1], 0 if entries is None else entries.shape[1]
        if stop > capacity:
            more = -(-max(stop - capacity, capacity // 16) // ROWS_STEP) * ROWS_STEP
            fresh = mx.zeros((rows.shape[0], more, rows.shape[2]), rows.dtype)
            entries = fresh if entries is None else mx.concatenate([entries, fresh], axis=1)
        assert entries is not None
        entries[:, first:stop] = rows
        self.entries[compressor] = entries

    def read(self, compressor: int, tokens: int) -> mx.array | None:
        """Return the entries (B, E, D) of all groups closed once ``tokens`` more are added; None where there are none."""
        entries, count = self.entries[compressor], (self.offset + tokens) // self.ratio
        return None if entries is None or not count else entries[:, :count]

    def advance(self, tokens: int) -> None:
        """Move on by ``tokens``, all of which were added."""
        self.offset += tokens

    @property
    def rewindable(self) -> int:
        """How many of the last tokens can be trimmed now, exactly."""
        if self.recent is None:
            return 0
        rows = self.recent.shape[1]
        least = 0 if rows == self.offset else self.offset - rows + self.window - 1
        for tail in self.tails[::2]:
            begin = self.offset - (0 if tail is None else tail.shape[1])
            if begin > 0:
                least = max(least, -(-(begin + self.reach) // self.ratio) * self.ratio)
        return max(0, self.offset - least)

    def is_trimmable(self) -> bool:
        """Whether anything can be trimmed (mlx-lm's name)."""
        return self.rewindable > 0 or self.offset == 0

    def trim(self, n: int) -> int:
        """Take back the last n tokens (all, if there are fewer): return how many were, 0 if ``rewindable`` does not allow it."""
        n = min(max(n, 0), self.offset)
        if not n or n > self.rewindable:
            return 0
        self.offset -= n
        assert self.recent is not None
        self.recent = self.recent[:, :-n]
        self.tails = [None if tail is None else tail[:, :-n] for tail in self.tails]
        return n

    @property
    def state(self) -> list[mx.array]:
        """All arrays, for MLX to compute."""
        return [array for array in (self.recent, *self.tails, *self.entries) if array is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, room to grow included."""
        return sum(array.nbytes for array in self.state)

    @property
    def bytes_per_token(self) -> int:
        """Mean bytes by which a token makes the entries grow; 0 before the first."""
        share = 2 if self.reach else 1  # half of what an overlapping compressor is given goes into a group's own entry
        return round(sum(_row_bytes(tail) // share for tail in self.tails[::2]) / self.ratio) if self.ratio else 0

    @property
    def fixed_bytes(self) -> int:
        """Bytes of all but the entries at most, however many tokens are held; 0 before the first."""
        tokens = SPARE + self.reach + self.ratio
        return (self.window - 1 + SPARE) * _row_bytes(self.recent) + tokens * sum(map(_row_bytes, self.tails))

    def empty(self) -> bool:
        """Whether nothing was ever written (mlx-lm's name)."""
        return self.recent is None

    def size(self) -> int:
        """Tokens held (mlx-lm's name)."""
        return self.offset

    def _first_needed(self, offset: int) -> int:
        """Return the first token whose rows a compressor needs once ``offset`` tokens are held."""
        return max(0, offset // self.ratio * self.ratio - self.reach) if offset > 0 else 0


def _last(rows: mx.array, count: int) -> mx.array:
    return rows if rows.shape[1] <= count else rows[:, -count:]


def _row_bytes(rows: mx.array | None) -> int:
    return 0 if rows is None else rows.shape[2] * rows.itemsize
