"""Guesses from text that is there already: in the conversation itself, and in other versions of it.

A match finder as in LZ77, for tokens: where every run of three stood last, in a table of open hashing, and for each place the one
before it with the same hash. So a token costs 16 bytes at most, and a lookup a few places; a suffix automaton would find the
longest match of all, for several times the memory, and 3 to 8 recent places hold it nearly always.

    … x  d e f g h i …          … x  d E f g h i …        where a long match breaks, the same text often goes on a few
          ╰ followed ─▶               ╰ realigned ─▶       tokens later: a word was edited, a name was changed
"""

from array import array
from collections.abc import Sequence
from itertools import chain

import numpy as np

from .drafters import TokenDraft

RUN = 3
"""Tokens that make two places alike."""
CANDIDATES = 8
"""Places that are compared, latest first."""
COMPARED = 32
"""Tokens up to which a match is measured when it is found; followed, it grows without end."""
LONG = 8
"""Tokens of a match from which on it is realigned where it breaks."""
PATIENCE = 8
"""Tokens after which realigning is given up."""
NEAR = 16
"""Tokens of the matched text among which the newest is looked for then."""
BETWEEN = -1
"""Stands between texts: no token."""

_FIRST_BITS = 10
_FACTORS = (40503, 30011, 52711)
"""Odd, and so small that Python computes with them fast."""


class MatchIndex:
    """Token ids, and where each run of three stands. 16 bytes a token at most."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.ids = array("i", ids)
        self._rebuild()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(each.itemsize * len(each) for each in (self.ids, self._earlier, self._latest))

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the next tokens."""
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
        """Return where the text goes on that equals the end of ``ids[:end]`` the longest, and how many tokens do: (−1, 0) for none.

        Only runs that were added are found: look before the last token of the same text is added.
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
        """Return the slot of the run that ends before ``end``."""
        if end < RUN:
            return 0
        first, second, third = _FACTORS
        return (ids[end - 3] * first + ids[end - 2] * second + ids[end - 1] * third) & self._mask

    def _rebuild(self) -> None:
        """Make the tables anew, large enough for some more tokens."""
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
    """Follows, token by token, the text of an index that equals the end of a conversation.

    Attributes:
        at: place of the token that it expects next; −1 for none.
        match: how many tokens before it were the same, without one that differed.
    """

    def __init__(self, index: MatchIndex) -> None:
        self._index = index
        self.at, self.match = -1, 0
        self._near = -1  # where a long match broke
        self._patience = 0

    @property
    def is_lost(self) -> bool:
        """Whether it expects nothing, and goes on from nowhere."""
        return self.at < 0 and not self._patience

    def take(self, ids: Sequence[int], end: int) -> None:
        """Take ``ids[end − 1]`` in, the newest of a conversation of which all before it was taken."""
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
        """Expect what follows the token near where the match broke; else take it that one token stands in place of another."""
        own = self._index.ids
        for place in range(self._near, min(self._near + NEAR, len(own))):
            if own[place] == token:
                self.at, self.match = place + 1, 1
                return
        self.at, self.match = broke + 1, 0


class Lookup:
    """Guesses that the conversation repeats itself: a file that is quoted, code that is written again, a list that goes on."""

    source = "lookup"

    def __init__(self) -> None:
        self._index: MatchIndex | None = None
        self._following: Follower | None = None

    def propose(self, ids: Sequence[int], k: int) -> TokenDraft | None:
        """Return what followed where the last tokens stood before; a text that has just begun to repeat itself goes on so."""
        index, following = self._index, self._following
        if index is None or following is None:
            index = self._index = MatchIndex(ids[:-1])
            following = self._following = Follower(index)
        for end in range(len(index.ids) + 1, len(ids) + 1):
            if following.is_lost and end < len(ids):
                # The last token finds the longest match, whatever this one would find.
                index.extend(ids[end - 1 : -1])
                following.take(ids, len(ids))
                index.extend(ids[-1:])
                break
            following.take(ids, end)
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
        """Bytes of the index."""
        return 0 if self._index is None else self._index.nbytes


class Branches:
    """Guesses that a reply goes as in other versions of the conversation: made again, or to a prompt that was edited.

    Args:
        texts: Token ids of each, from a little before it goes its own way; the latest last.
    """

    source = "branches"

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        joined = chain.from_iterable([BETWEEN, *text] for text in texts)
        self._index = MatchIndex(list(joined))
        self._following = Follower(self._index)
        self._taken = 0

    def propose(self, ids: Sequence[int], k: int) -> TokenDraft | None:
        """Return what followed there where the last tokens stood."""
        following, own = self._following, self._index.ids
        if not self._taken:
            self._taken = len(ids)
            following.at, following.match = self._index.find(ids, len(ids))
        for end in range(self._taken + 1, len(ids) + 1):
            following.take(ids, end)
        self._taken = len(ids)
        if following.at < 0:
            return None
        found = own[following.at : following.at + k].tolist()
        if BETWEEN in found:
            found = found[: found.index(BETWEEN)]
        return TokenDraft(tuple(found), self.source, following.match) if found else None
