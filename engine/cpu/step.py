"""A decoder's decode step from ids to logits, as one sequence of kernels over fixed buffers."""

#     embedding → layers (norm, QKV, rotation, attention, output, sum, norm, gated feed-forward, sum) → norm → head
#
# One call without the interpreter or MLX. Products and attention use the pool; the rest takes a microsecond per
# row, on the caller. Rows are computed independently, so bits don't depend on the batch.

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from .attention import HEADS, NEW_BYTES, QUERIES, REPEATS, SIZE, attending, exponential, writing
from .pool import alone, call, compiled, inner, is_missing, run, run_beside
from .products import ROWS_AT_ONCE, floats_at, several, words_at
from .tiles import LANES, dot

SILU, GELU, GELU_TANH = range(3)

# Words of a model, and of a layer. Rows; a row's numbers, and those between the products of a feed-forward block; of a
# head, those that are rotated, and whether pairs stand side by side; how many rotations, and the address of their
# cosines and sines; then addresses of buffers: the sum of what layers add, what is normed of it, what one adds, gates
# and what they gate, both in one; and of the last norm's weights.
COUNT, DIMS, INNER, ROPE_DIMS, PAIRED, ROPES, ROPES_AT, ACTIVATION, HIDDEN, NORMED, ADDED, GATED, ACTED, LAST_NORM = (
    range(14)
)
# Where the embedding's kernel and its arguments stand, and attention's kernels; how many words in all.
EMBEDDING, WRITE, ATTEND, MODEL = 14, 16, 17, 18

# Addresses: weights of the norms before attention and before feed-forward, and of those of what either adds, and the
# biases of what either adds; weights of the heads' norms; biases of what the first products give. 0: none. Then which
# rotation, and how many words in all.
BEFORE, AFTER, ADDED_BIAS, QUERY_NORM, KEY_NORM, JOINED_BIAS, GATED_BIAS, ROPE, LAYER = 0, 2, 4, 6, 7, 8, 9, 10, 11

RUNS = 4  # groups of products in a layer, each with rows of its own. The head's stands after those of all layers.
# Words of products that share their rows: kernel, arguments, pieces, pieces at once; what prepares the rows, and how
# many such.
RUN = 6
PREPARATION = 2  # words of what prepares rows: kernel and arguments; its pieces are rows

# Numbers of a model. What embeddings, what layers add and logits are multiplied by; what bounds logits, or 0; what is
# added to the mean of squares.
EMBEDDED, RESIDUAL, LOGITS, SOFTCAP, EPS = range(5)

ATTENDED = 64  # how many times the pool takes heads of rows from an attention, at most


@inner
def _norm(x: int, weight: int, size: int, eps: float, out: int) -> None:
    """Write x ÷ √(mean of squares + eps) · weight, all at addresses."""
    mean = dot(x, x, size // LANES) / np.float32(size)
    factor = np.float32(1) / np.sqrt(mean + eps)
    given, weights, into = floats_at(x, size), floats_at(weight, size), floats_at(out, size)
    for i in range(size):
        into[i] = given[i] * factor * weights[i]


@inner
def _add_bias(x: int, bias: int, size: int) -> None:
    if bias != 0:
        into, added = floats_at(x, size), floats_at(bias, size)
        for i in range(size):
            into[i] += added[i]


@inner
def _turn(x: int, dims: int, paired: bool, turns: Any) -> None:
    """Rotate a head in place. turns (2, dims / 2): cosines and sines."""
    head = floats_at(x, dims)
    half = dims // 2
    if paired:
        for i in range(half):
            a, b, c, s = head[2 * i], head[2 * i + 1], turns[0, i], turns[1, i]
            head[2 * i], head[2 * i + 1] = a * c - b * s, b * c + a * s
    else:
        for i in range(half):
            a, b, c, s = head[i], head[half + i], turns[0, i], turns[1, i]
            head[i], head[half + i] = a * c - b * s, b * c + a * s


@inner
def _gate(x: int, size: int, kind: int, out: int) -> None:
    """Write activation(x) · y, for adjacent x and y of ``size`` numbers."""
    gates, values, into = (
        floats_at(x, size),
        floats_at(x + 4 * size, size),
        floats_at(out, size),
    )
    one, half = np.float32(1), np.float32(0.5)
    if kind == SILU:
        for i in range(size):
            into[i] = gates[i] / (one + exponential(-gates[i])) * values[i]
    elif kind == GELU_TANH:
        inner, cubed = np.float32(0.7978845608028654), np.float32(0.044715)
        for i in range(size):
            g = gates[i]
            e = exponential(np.float32(2) * inner * (g + cubed * g * g * g))
            into[i] = half * g * (np.float32(2) - np.float32(2) / (one + e)) * values[i]
    else:
        for i in range(size):
            g = gates[i]
            into[i] = half * g * (one + np.float32(math.erf(g * np.float32(0.7071067811865476)))) * values[i]


@inner
def _multiply(pool: int, words: Any, rows: int) -> None:
    preparations = words_at(words[4], (words[5], PREPARATION))
    at_once: Any = np.intp(ROWS_AT_ONCE)  # a literal would be a type of its own, and compiled again
    for each in range(words[5]):
        run(pool, preparations[each, 0], preparations[each, 1], rows, at_once)
    run(pool, words[0], words[1], words[2], words[3])


@inner
def _rotate_heads(model: Any, layer: Any, attention: Any, turns: Any, eps: float) -> None:
    size, keys = attention[SIZE], attention[HEADS]
    queries = keys * attention[REPEATS]
    for row in range(model[COUNT]):
        joined = attention[QUERIES] + row * attention[NEW_BYTES]
        _add_bias(joined, layer[JOINED_BIAS], size * (queries + 2 * keys))
        for head in range(queries + keys):
            x = joined + 4 * size * head
            weight = layer[QUERY_NORM] if head < queries else layer[KEY_NORM]
            if weight != 0:
                _norm(x, weight, size, eps, x)
            if model[ROPE_DIMS] > 0:
                _turn(x, model[ROPE_DIMS], model[PAIRED] != 0, turns[row, layer[ROPE]])


@inner
def _add(model: Any, bias: int, norm: int, numbers: Any) -> None:
    dims = model[DIMS]
    for row in range(model[COUNT]):
        place = 4 * dims * row
        added = model[ADDED] + place
        _add_bias(added, bias, dims)
        if norm != 0:
            _norm(added, norm, dims, numbers[EPS], added)
        hidden, more = floats_at(model[HIDDEN] + place, dims), floats_at(added, dims)
        for i in range(dims):
            hidden[i] += more[i] * numbers[RESIDUAL]


@compiled
def run_step(  # noqa: PLR0917
    pool: int, model: Any, layers: Any, runs: Any, attentions: Any, numbers: Any, logits: Any
) -> None:
    """Compute logits (rows, vocabulary); for a prompt piece, where ``runs`` end early, only keys and values.

    model: MODEL words; layers (L, LAYER); runs (RUNS · L + 1, RUN); attentions (L, ALL of attention.py); numbers:
    EMBEDDED … EPS.
    """
    rows, inner, eps = model[COUNT], model[INNER], numbers[EPS]
    call(model[EMBEDDING], model[EMBEDDING + 1], 0, rows)
    hidden = floats_at(model[HIDDEN], rows * model[DIMS])
    for i in range(len(hidden)):
        hidden[i] *= numbers[EMBEDDED]
    turns = floats_at(model[ROPES_AT], (rows, model[ROPES], 2, model[ROPE_DIMS] // 2))
    head = RUNS * len(layers)
    for index in range(len(runs)):
        at, phase = min(index // RUNS, len(layers) - 1), index % RUNS
        layer, attention = layers[at], attentions[at]
        block = phase // 2  # attention, feed-forward
        if phase % 2 == 0:
            weight = layer[BEFORE + block] if index < head else model[LAST_NORM]
            for row in range(rows):
                place = 4 * model[DIMS] * row
                _norm(model[HIDDEN] + place, weight, model[DIMS], eps, model[NORMED] + place)
        _multiply(pool, runs[index], rows)
        if phase % 2 == 1:
            _add(model, layer[ADDED_BIAS + block], layer[AFTER + block], numbers)
        elif block == 1:
            for row in range(rows):
                gated = model[GATED] + 8 * inner * row
                _add_bias(gated, layer[GATED_BIAS], 2 * inner)
                _gate(gated, inner, model[ACTIVATION], model[ACTED] + 4 * inner * row)
        elif index < head:
            _rotate_heads(model, layer, attention, turns, eps)
            words: Any = np.intp(attention.ctypes.data)
            call(model[WRITE], words, 0, rows)
            if index < len(runs) - 1:
                pieces = rows * attention[HEADS]
                run(pool, model[ATTEND], words, pieces, 1 + pieces // ATTENDED)
    _finish(logits, numbers)


@inner
def _finish(logits: Any, numbers: Any) -> None:
    factor, softcap = numbers[LOGITS], numbers[SOFTCAP]
    one, two = np.float32(1), np.float32(2)
    for row in range(logits.shape[0]):
        for i in range(logits.shape[1]):
            logits[row, i] *= factor
            if softcap > 0:
                logits[row, i] = softcap * (one - two / (one + exponential(two * (logits[row, i] / softcap))))


def prepare(*, from_end: bool = False) -> None:
    """Compile every step's functions. from_end: reversed, to share work with another process."""
    parts = (several, writing, attending, _compile_step)
    for part in reversed(parts) if from_end else parts:
        part()


def prepare_beside() -> None:
    if is_missing(run_step.py_func):  # type: ignore[attr-defined]
        run_beside(f"from {__name__} import prepare\nprepare(from_end=True)")


def _compile_step() -> None:
    words, table, numbers = types.int64[::1], types.int64[:, ::1], types.float32[::1]
    given = (types.intp, words, table, table, table, numbers, types.float32[:, ::1])
    with alone(run_step.py_func):  # type: ignore[attr-defined]
        run_step.compile(given)  # type: ignore[attr-defined]


Floats = npt.NDArray[np.float32]
