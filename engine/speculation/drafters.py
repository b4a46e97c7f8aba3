"""What proposes draft tokens: the interface, and lookup in the conversation and its other versions."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class TokenDraft:
    """Draft tokens, at least one.

    match: length of the match before them; acceptance is kept by this and ``source``.
    """

    tokens: tuple[int, ...]
    source: str
    match: int


class Drafter(Protocol):
    """Drafts one reply's tokens; a wrong draft costs time, never correctness."""

    def propose(self, ids: Sequence[int], k: int) -> TokenDraft | None:
        """Return up to ``k`` draft tokens, or None; ``ids`` only grows from call to call."""


class ComputingDrafter(Protocol):
    """A drafter that computes; asked only where that pays. Times are in plain steps."""

    @property
    def source(self) -> str:
        """Its name."""

    @property
    def most(self) -> int:
        """Most tokens of a draft; 0 where it drafts no more."""

    @property
    def rests(self) -> str:
        """Why it drafts no more; "" while it does."""

    def reading(self, ids: Sequence[int], most: float) -> float | None:
        """Return the one-time cost of drafting after ``ids``; None above ``most``."""

    def drafting(self, width: int) -> float:
        """Return the cost of a draft of this width."""

    def draft(self, ids: Sequence[int], k: int) -> tuple[int, ...]:
        """Return ``k`` draft tokens after ``reading``; none where it can't."""

    def took(self, width: int, steps: float) -> None: ...
    def rested(self) -> None:
        """Record a plain step."""


# An LZ77 match finder for tokens: an open-addressing hash table of the last place of each 3-token run, and per
# place the previous one with the same hash; at most 16 bytes per token.

# A suffix automaton finds the longest match, for several times the memory; 3 to 8 recent places nearly always
# hold it.


RUN = 3  # tokens that make two places alike
CANDIDATES = 8  # places that are compared, latest first
COMPARED = 32  # tokens up to which a match is measured when it is found; followed, it grows without end
LONG = 8  # tokens of a match from which on it is realigned where it breaks
PATIENCE = 8  # tokens after which realigning is given up
NEAR = 16  # tokens of the matched text among which the newest is looked for then
BETWEEN = -1  # stands between texts: no token

_FIRST_BITS = 10
_FACTORS = (40503, 30011, 52711)  # odd, and so small that Python computes with them fast


class MatchIndex:
    """Token ids, and the places of each 3-token run; at most 16 bytes per token."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.ids = array("i", ids)
        self._rebuild()

    @property
    def nbytes(self) -> int:
        return sum(each.itemsize * len(each) for each in (self.ids, self._earlier, self._latest))

    def extend(self, tokens: Sequence[int]) -> None:
        ids, latest, earlier, mask = self.ids, self._latest, self._earlier, self._mask
        place = len(ids)
        ids.extend(tokens)
        if len(ids) > len(latest) or place < RUN - 1:
            self._rebuild()
            return
        first, second, third = _FACTORS
        before, last = ids[place - 2], ids[place - 1]
        for token in tokens:  # as ``_slot``
            slot = (before * first + last * second + token * third) & mask
            earlier.append(latest[slot])
            latest[slot] = place
            before, last, place = last, token, place + 1

    def find(self, ids: Sequence[int], end: int) -> tuple[int, int]:
        """Return (place after the longest match of ``ids[:end]``'s end, its length); (−1, 0) for none.

        Only added runs match: look before the text's last token is added.
        """
        if end < RUN:
            return -1, 0
        own, best, longest = self.ids, -1, 0
        place, left = self._latest[self._slot(ids, end)], CANDIDATES
        while place >= 0 and left:
            length, most = 0, min(COMPARED, end, place + 1)
            while length < most and own[place - length] == ids[end - 1 - length]:
                length += 1
            if length > longest and length >= RUN:
                best, longest = place + 1, length
                if length == COMPARED:
                    break
            place, left = self._earlier[place], left - 1
        return best, longest

    def _slot(self, ids: Sequence[int], end: int) -> int:
        if end < RUN:
            return 0
        first, second, third = _FACTORS
        return (ids[end - 3] * first + ids[end - 2] * second + ids[end - 1] * third) & self._mask

    def _rebuild(self) -> None:
        count = len(self.ids)
        slots = 1 << max(_FIRST_BITS, count.bit_length())
        self._mask = slots - 1
        latest = np.full(slots, -1, np.int32)
        earlier = np.full(count, -1, np.int32)
        if count >= RUN:
            known = np.array(self.ids, np.int64)
            first, second, third = _FACTORS
            at = (known[:-2] * first + known[1:-1] * second + known[2:] * third) & self._mask
            order = np.argsort(at, kind="stable")  # of one slot, in the order of their places
            same = at[order[1:]] == at[order[:-1]]
            earlier[order[1:][same] + RUN - 1] = order[:-1][same] + RUN - 1
            last = np.append(~same, True)
            latest[at[order[last]]] = order[last] + RUN - 1
        self._earlier, self._latest = array("i", earlier.tobytes()), array("i", latest.tobytes())


class Follower:
    """Follows, token by token, an indexed text that equals a conversation's end."""

    def __init__(self, index: MatchIndex) -> None:
        self._index = index
        self.at, self.match = -1, 0
        self._near = -1  # where a long match broke
        self._patience = 0

    @property
    def is_lost(self) -> bool:
        return self.at < 0 and not self._patience

    def index(self, ids: Sequence[int], end: int) -> None:
        own, token = self._index.ids, ids[end - 1]
        if 0 <= self.at < len(own) and own[self.at] == token:
            self.at += 1
            self.match += 1
            return
        broke = self.at
        if self.match >= LONG and broke >= 0:
            self._near, self._patience = broke, PATIENCE
        at, match = self._index.find(ids, end)
        if at >= 0:
            self.at, self.match, self._patience = at, match, 0
        elif self._patience:
            self._patience -= 1
            self._realign(token, broke)
        else:
            self.at, self.match = -1, 0

    def _realign(self, token: int, broke: int) -> None:
        own = self._index.ids
        for place in range(self._near, min(self._near + NEAR, len(own))):
            if own[place] == token:
                self.at, self.match = place + 1, 1
                return
        self.at, self.match = broke + 1, 0


class Lookup:
    """Drafts of a conversation's repetitions: quoted files, rewritten code, continued lists."""

    source = "lookup"

    def __init__(self) -> None:
        self._index: MatchIndex | None = None
        self._following: Follower | None = None

    def propose(self, ids: Sequence[int], k: int) -> TokenDraft | None:
        index, following = self._index, self._following
        if index is None or following is None:
            index = self._index = MatchIndex(ids[:-1])
            following = self._following = Follower(index)
        for end in range(len(index.ids) + 1, len(ids) + 1):
            if following.is_lost and end < len(ids):
                # The last token finds the longest match, whatever this one would find.
                index.extend(ids[end - 1 : -1])
                following.index(ids, len(ids))
                index.extend(ids[-1:])
                break
            following.index(ids, end)
            index.extend(ids[end - 1 : end])
        at = following.at
        if at < 0 or at >= len(index.ids):
            return None
        found = tuple(index.ids[at : at + k])
        if len(found) < k and following.match >= RUN:
            found = tuple(index.ids[at:][(number) % len(found)] for number in range(k))
        return TokenDraft(found, self.source, following.match)

    @property
    def nbytes(self) -> int:
        return 0 if self._index is None else self._index.nbytes


class Branches:
    """Drafts from other versions of the conversation: regenerated replies, edited prompts."""

    source = "branches"

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        joined = chain.from_iterable([BETWEEN, *text] for text in texts)
        self._index = MatchIndex(list(joined))
        self._following = Follower(self._index)
        self._taken = 0

    def propose(self, ids: Sequence[int], k: int) -> TokenDraft | None:
        following, own = self._following, self._index.ids
        if not self._taken:
            self._taken = len(ids)
            following.at, following.match = self._index.find(ids, len(ids))
        for end in range(self._taken + 1, len(ids) + 1):
            following.index(ids, end)
        self._taken = len(ids)
        if following.at < 0:
            return None
        found = own[following.at : following.at + k].tolist()
        if BETWEEN in found:
            found = found[: found.index(BETWEEN)]
        return TokenDraft(tuple(found), self.source, following.match) if found else None
