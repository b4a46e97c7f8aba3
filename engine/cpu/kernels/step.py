"""A decode step as one sequence of kernels over fixed buffers; ../stepping.py says of what."""

#     embedding → layers (norm, QKV, rotation, attention, output, sum, norm, gated feed-forward, sum) → norm → head
#
# One call without the interpreter or MLX. Products and attention use the pool; the rest takes a microsecond per
# row, on the caller. Rows are computed independently, so bits don't depend on the batch.

import math
from typing import Any

import numpy as np

from ..formats import LANES
from ..words.attention import ALL as ATTENTION
from ..words.attention import HEADS, NEW_BYTES, QUERIES, REPEATS, SIZE
from ..words.products import ROWS_AT_ONCE
from ..words.step import *
from .attention import exponential
from .pool import call, inner, run
from .products import floats_at, words_at
from .tiles import dot

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


@inner
def step(  # noqa: PLR0917
    pool: int,
    model_at: int,
    layers_at: int,
    depth: int,
    runs_at: int,
    count: int,
    attentions_at: int,
    numbers_at: int,
    logits_at: int,
    wide: int,
) -> None:
    """Compute logits (rows, wide); for a prompt piece, where runs end early, only keys and values.

    model: MODEL words; layers (depth, LAYER); runs (count: RUNS · depth + 1, RUN); attentions (depth, ATTENTION);
    numbers: EMBEDDED … EPS.
    """
    model, layers, runs = (
        words_at(model_at, MODEL),
        words_at(layers_at, (depth, LAYER)),
        words_at(runs_at, (count, RUN)),
    )
    attentions, numbers = words_at(attentions_at, (depth, ATTENTION)), floats_at(numbers_at, EPS + 1)
    logits = floats_at(logits_at, (model[COUNT], wide))
    rows, between, eps = model[COUNT], model[INNER], numbers[EPS]
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
                gated = model[GATED] + 8 * between * row
                _add_bias(gated, layer[GATED_BIAS], 2 * between)
                _gate(gated, between, model[ACTIVATION], model[ACTED] + 4 * between * row)
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
