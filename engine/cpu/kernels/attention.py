"""Attention of single rows over caches in place: store keys and values, then scores, softmax, values."""

# A work item is a row of one KV head with all its query heads; it walks the visible slots in token order, BLOCK
# at a time, with a running softmax: no copies, no score memory, and batch-independent bits. ``CacheWords``
# describe a row's cache, rebuilt when arrays move; a step adds only the position.

from typing import Any

import numpy as np

from ..words.attention import *
from . import tiles
from .pool import call, inner, let_go, make_room
from .products import bytes_at, floats_at, words_at

BLOCK = 256  # tokens whose scores are held at once

KERNEL_WORDS = tiles.COUNT + 1  # of the arguments of a kernel that scores or mixes

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
ROUNDER = np.float32(12582912.0)  # 1.5 · 2^23: adding it leaves a whole number in the low bits
ONE, HALF = np.float32(1), np.float32(0.5)
# Of the polynomial for e^x within half of ln 2 around 0 (Cephes, expf).
C5, C4, C3, C2, C1, C0 = (
    np.float32(each)
    for each in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
LEAST, MOST = np.float32(-87), np.float32(88)


@inner
def exponential(x: Any) -> Any:
    """Return vectorisable float32 e^x, within two ulp."""
    x = min(max(x, LEAST), MOST)
    moved = np.float32(x * LOG2_E) + ROUNDER
    whole = moved - ROUNDER
    x = (x - whole * LN2_HIGH) - whole * LN2_LOW
    y = ((((C5 * x + C4) * x + C3) * x + C2) * x + C1) * x + C0
    y = y * (x * x) + x + ONE
    bits = np.uint32(np.float32(moved).view(np.uint32) << np.uint32(23)) + np.uint32(0x3F800000)
    return y * np.uint32(bits).view(np.float32)


@inner
def rotate(x: Any, block: int) -> None:
    """Rotate x (D,) in place by Hadamard matrices of ``block`` channels."""
    length = np.float32(1.0 / np.sqrt(np.float64(block)))
    width = 1
    while width < block:
        for begin in range(0, len(x), 2 * width):
            for i in range(begin, begin + width):
                a, b = x[i], x[i + width]
                x[i], x[i + width] = a + b, a - b
        width *= 2
    for i in range(len(x)):
        x[i] *= length


@inner
def _pack(x: Any, side: Any, numbers: int, place: int) -> None:
    bits, groups = side[BITS], side[GROUPS]
    size = len(x) // groups
    most = np.float32((1 << bits) - 1)
    out = bytes_at(numbers, side[TOKEN_BYTES])
    scales = floats_at(side[SCALES] + 4 * groups * place, groups)
    biases = floats_at(side[BIASES] + 4 * groups * place, groups)
    waiting, filled, at = np.uint64(0), 0, 0
    for group in range(groups):
        low = high = x[group * size]
        for i in range(group * size, (group + 1) * size):
            low, high = min(low, x[i]), max(high, x[i])
        from_low = abs(low) > abs(high)
        scale = max((high - low) / most, np.float32(1e-7))
        scale = scale if from_low else -scale
        edge = low if from_low else high
        steps = np.rint(edge / scale)
        bias = np.float32(0)
        if steps != 0:
            scale, bias = edge / steps, edge
        scales[group], biases[group] = scale, bias
        for i in range(group * size, (group + 1) * size):
            number = min(max(np.rint((x[i] - bias) / scale), np.float32(0)), most)
            waiting |= np.uint64(number) << np.uint64(filled)
            filled += bits
            while filled >= 8:
                out[at] = waiting & np.uint64(255)
                waiting >>= np.uint64(8)
                filled -= 8
                at += 1


@inner
def _slot(cache: Any, position: Any) -> Any:
    if cache[WINDOW] == 0:
        return position - cache[PREFIX_TOKENS]
    keep = cache[KEEP]
    return position if position < keep else keep + (position - keep) % (cache[WINDOW] + cache[SPARE] - keep)


@inner
def _store(x: Any, cache: Any, first: int, head: int, slot: int) -> None:
    side = cache[first : first + SIDE]
    place = head * cache[CAPACITY] + slot
    numbers = side[NUMBERS] + place * side[TOKEN_BYTES]
    if side[BITS] == 32:
        out = floats_at(numbers, len(x))
        for i in range(len(x)):
            out[i] = x[i]
        return
    if side[ROTATED]:
        rotate(x, side[ROTATED])
    _pack(x, side, numbers, place)


@inner
def write_rows(arguments: int, first: int, last: int) -> None:
    given = words_at(arguments, ALL)
    size, heads = given[SIZE], given[HEADS]
    table = words_at(given[TABLE], (given[ROWS], given[LAYERS], 2))
    for row in range(first, last):
        words, position = table[row, given[LAYER], 0], table[row, given[LAYER], 1]
        cache = words_at(words, PARTS)
        slot = _slot(cache, position)
        for head in range(heads):
            for side in range(2):
                new = given[NEW_KEYS] if side == 0 else given[NEW_VALUES]
                x = floats_at(new + row * given[NEW_BYTES] + 4 * size * head, size)
                _store(x, cache, KEYS if side == 0 else VALUES, head, slot)


@inner
def _softmax(scores: Any, count: int, state: Any, softcap: float) -> Any:
    """Turn scores (count,) into weights; return the factor for earlier sums. state: (max score, sum)."""
    if softcap > 0:
        for i in range(count):
            scores[i] = softcap * (ONE - np.float32(2) / (ONE + exponential(np.float32(2) * (scores[i] / softcap))))
    largest = state[0]
    for i in range(count):
        largest = max(largest, scores[i])
    shrunk = exponential(state[0] - largest)
    for i in range(count):
        scores[i] = exponential(scores[i] - largest)
    a = b = c = d = np.float32(0)
    for i in range(0, count - 3, 4):
        a += scores[i]
        b += scores[i + 1]
        c += scores[i + 2]
        d += scores[i + 3]
    for i in range(count - count % 4, count):
        a += scores[i]
    state[0], state[1] = largest, state[1] * shrunk + ((a + b) + (c + d))
    return shrunk


@inner
def _point(  # noqa: PLR0917
    address: int, segment: Any, at: int, head: int, side: int, words: Any
) -> int:
    cache = words_at(address, PARTS)
    first, prefix = VALUES if side else KEYS, segment[0]
    arrays = words_at(address + 8 * (first if prefix < 0 else PARTS + PART * prefix + 1 + 3 * side), 3)
    moved = head * segment[3] + at
    words[tiles.FIRST] = arrays[0] + moved * cache[first + TOKEN_BYTES]
    words[tiles.SCALES] = arrays[1] + 4 * moved * cache[first + GROUPS]
    words[tiles.BIASES] = arrays[2] + 4 * moved * cache[first + GROUPS]
    kernel: int = cache[first + KERNEL]
    return kernel


@inner
def _read(  # noqa: PLR0917
    address: int, segments: Any, block: Any, head: int, work: Any, scores: Any, states: Any, sums: Any, softcap: float
) -> None:
    """Attend to all segments, BLOCK tokens at a time across them: shared prefixes change no bit.

    segments (n, 4): prefix or -1 for own, first slot, last + 1, slots per head. block (n, 3): pieces. work (2,
    words) of two kernels. scores (R, BLOCK), states (R, 2), sums (R, D) continue.
    """
    scores_at = np.intp(scores.ctypes.data)
    part, begin = 0, segments[0, 1]
    while True:
        pieces, filled = 0, 0
        while part < len(segments) and filled < BLOCK:
            count = min(BLOCK - filled, segments[part, 2] - begin)
            if count > 0:
                block[pieces, 0], block[pieces, 1], block[pieces, 2] = part, begin, count
                pieces += 1
                filled += count
                begin += count
            if begin >= segments[part, 2]:
                part += 1
                begin = segments[part, 1] if part < len(segments) else 0
        if filled == 0:
            return
        for side in range(2):
            if side == 1:
                for row in range(len(scores)):
                    shrunk = _softmax(scores[row], filled, states[row], softcap)
                    for i in range(sums.shape[1]):
                        sums[row, i] *= shrunk
            at = scores_at
            for piece in range(pieces):
                words, count = work[side], block[piece, 2]
                kernel = _point(address, segments[block[piece, 0]], block[piece, 1], head, side, words)
                words[tiles.ROWS if side == 1 else tiles.OUT] = at
                call(kernel, words.ctypes.data, 0, count)
                at += 4 * count


@inner
def _ask(  # noqa: PLR0917
    given: Any, cache: Any, row: int, head: int, own: Any, queries: Any
) -> None:
    size, repeats, swapped, rotated = given[SIZE], given[REPEATS], cache[KEYS + SWAPS], cache[KEYS + ROTATED]
    scale = floats_at(given[TUNING], 2)[0]
    asked = floats_at(given[QUERIES] + row * given[NEW_BYTES] + 4 * size * repeats * head, (repeats, size))
    for each in range(repeats):
        for i in range(size):
            own[i] = asked[each, i] * scale
        if rotated:
            rotate(own, rotated)
        for begin in range(0, size, 16):
            for i in range(16):
                queries[each, begin + i] = own[begin + (8 * (i % 2) + i // 2 if swapped else i)]


@inner
def _see(address: int, cache: Any, position: int, segments: Any) -> Any:
    """Write a position's segments in token order (prefixes, then up to three own runs); return their number."""
    window, keep, prefixes = cache[WINDOW], cache[KEEP], cache[PREFIXES]
    for part in range(prefixes):
        tokens = words_at(address + 8 * (PARTS + PART * part), 1)[0]
        segments[part, 0], segments[part, 1], segments[part, 2], segments[part, 3] = part, 0, tokens, tokens
    for part in range(prefixes, prefixes + 3):
        segments[part, 0], segments[part, 1], segments[part, 2], segments[part, 3] = -1, 0, 0, cache[CAPACITY]
    if window == 0:
        segments[prefixes, 2] = position + 1 - cache[PREFIX_TOKENS]
    elif position < window:
        segments[prefixes, 2] = position + 1
    else:
        segments[prefixes, 2] = keep
        oldest, newest = _slot(cache, position - (window - keep) + 1), _slot(cache, position)
        if oldest > newest:
            segments[prefixes + 1, 1], segments[prefixes + 1, 2] = oldest, window + cache[SPARE]
            oldest = keep
        segments[prefixes + 2, 1], segments[prefixes + 2, 2] = oldest, newest + 1
    return prefixes + 3


@inner
def _answer(  # noqa: PLR0917
    given: Any, cache: Any, row: int, head: int, sums: Any, states: Any
) -> None:
    size, repeats = given[SIZE], given[REPEATS]
    out = floats_at(given[OUT] + row * given[OUT_BYTES] + 4 * size * repeats * head, (repeats, size))
    for each in range(repeats):
        total = states[each, 1]
        for i in range(size):
            out[each, i] = sums[each, i] / total
        if cache[VALUES + ROTATED]:
            rotate(out[each], cache[VALUES + ROTATED])


@inner
def attend_pieces(arguments: int, first: int, last: int) -> None:
    given = words_at(arguments, ALL)
    size, repeats = given[SIZE], given[REPEATS]
    table, most = words_at(given[TABLE], (given[ROWS], given[LAYERS], 2)), 0
    for row in range(given[ROWS]):
        most = max(most, words_at(table[row, given[LAYER], 0], PARTS)[PREFIXES])
    # One array, shared out by hand: what makes an array is compiled for each kind.
    room = make_room(2 * KERNEL_WORDS + 7 * (most + 3) + repeats * (BLOCK + 2 + 2 * size) + size, 8)
    at = room
    work, at = words_at(at, (2, KERNEL_WORDS)), at + 16 * KERNEL_WORDS
    parts, at = words_at(at, (most + 3, 4)), at + 32 * (most + 3)
    block, at = words_at(at, (most + 3, 3)), at + 24 * (most + 3)
    scores, at = floats_at(at, (repeats, BLOCK)), at + 4 * repeats * BLOCK
    states, at = floats_at(at, (repeats, 2)), at + 8 * repeats
    sums, at = floats_at(at, (repeats, size)), at + 4 * repeats * size
    queries, at = floats_at(at, (repeats, size)), at + 4 * repeats * size
    own = floats_at(at, size)
    for piece in range(first, last):
        row, head = piece // given[HEADS], piece % given[HEADS]
        address, position = table[row, given[LAYER], 0], table[row, given[LAYER], 1]
        cache = words_at(address, PARTS)
        _ask(given, cache, row, head, own, queries)
        for each in range(repeats):
            for i in range(size):
                sums[each, i] = np.float32(0)
            states[each, 0], states[each, 1] = np.float32(-np.inf), np.float32(0)
        for side in range(2):
            words, side_of = work[side], KEYS if side == 0 else VALUES
            words[tiles.ROW_BYTES], words[tiles.GROUPS] = cache[side_of + TOKEN_BYTES], cache[side_of + GROUPS]
            words[tiles.BLOCKS], words[tiles.COUNT] = cache[side_of + BLOCKS], repeats
            words[tiles.ROWS] = scores.ctypes.data if side else queries.ctypes.data
            words[tiles.OUT] = sums.ctypes.data if side else scores.ctypes.data
            words[tiles.ROWS_BYTES], words[tiles.OUT_BYTES] = (
                4 * (BLOCK if side else size),
                4 * (size if side else BLOCK),
            )
        segments = parts[: _see(address, cache, position, parts)]
        _read(address, segments, block, head, work, scores, states, sums, floats_at(given[TUNING], 2)[1])
        _answer(given, cache, row, head, sums, states)
    let_go(room)


def scoring(form: int) -> Any:
    """Return what scores tokens of a form: f(arguments, 0, tokens)."""

    def kernel(arguments: int, first: int, last: int) -> None:
        tiles.write_all_scores(form, arguments, last - first)

    return inner(kernel)


def mixing(form: int) -> Any:
    """Return what mixes tokens of a form: f(arguments, 0, tokens)."""

    def kernel(arguments: int, first: int, last: int) -> None:
        tiles.write_all_sums(form, arguments, last - first)

    return inner(kernel)
