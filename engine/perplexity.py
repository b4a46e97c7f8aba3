"""Perplexity of a text of any length: exp of the mean of −ln p(the token that comes), window by window.

A window begins with what the tokenizer puts before every text; the next one begins ``stride`` tokens further on, and of it only the
tokens that no window before has seen are counted. So each token is counted once, with at least window − stride tokens
before it, but for those of the first window. A stride of the whole window is quickest and judges too hard; a small one costs
window ÷ stride as much.
"""

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import mlx.core as mx

from tokamac.engine.errors import OptionError
from tokamac.engine.kv_trial import CHUNK, log_probabilities
from tokamac.engine.runtime import Runtime

WINDOW = 2048
"""Tokens of a window, where the caller does not say and the context holds as many."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Of a text: ``value``, with its standard error, over ``tokens`` tokens that were predicted, in ``windows`` windows.

    nats: the mean of −ln p. None where that is no finite number, or the error of a single token.
    """

    value: float | None
    se: float | None
    nats: float | None
    tokens: int
    windows: int
    window: int
    stride: int


@dataclass(frozen=True, slots=True)
class PerplexityProgress:
    """Tokens that were read, and all."""

    done: int
    total: int


def windows(tokens: int, room: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield where each window begins and ends, and from which token on it counts; ``room``: tokens of the text in a window."""
    begin = done = 0
    while done < tokens:
        end = min(begin + room, tokens)
        yield begin, end, done
        done, begin = end, begin + stride


def check_windows(window: int, stride: int | None, before: int) -> int:
    """Return the stride, the default put in. Raises OptionError for one that leaves tokens out, or a window that holds none."""
    room = window - before
    if room < 2:
        raise OptionError(f"a window of {window} tokens is too small", f"Use {before + 2} or more.")
    chosen = max(1, room // 2) if stride is None else stride
    if not 1 <= chosen <= room:
        raise OptionError(
            f"a stride of {chosen} does not go with windows of {window} tokens",
            f"Use 1 to {room}: else tokens are left out.",
        )
    return chosen


def perplexity(
    runtime: Runtime,
    ids: list[int],
    before: list[int],
    *,
    window: int,
    stride: int,
    keep: int | None,
    cancelled: Callable[[], bool],
) -> Generator[PerplexityProgress | Perplexity, None, None]:
    """Yield progress, and at last the perplexity of ``ids``; each window begins with ``before``."""
    surprises: list[float] = []
    number = 0
    for begin, end, done in windows(len(ids), window - len(before), stride):
        number += 1
        first = len(before) + done - begin
        surprises += _surprises(runtime, before + ids[begin:end], max(first, 1), keep)
        mx.clear_cache()
        yield PerplexityProgress(end, len(ids))
        if cancelled():
            return
    yield _summed(surprises, number, window, stride)


def _surprises(runtime: Runtime, ids: list[int], first: int, keep: int | None) -> list[float]:
    """Return −ln p of the tokens from position ``first`` on, in nats; only a chunk's log-probabilities are held at once."""
    caches, found = runtime.new_caches(keep), list[float]()
    for start in range(0, len(ids) - 1, CHUNK):
        part = ids[start : min(start + CHUNK, len(ids) - 1)]
        rows = log_probabilities(runtime.model, caches, part)
        skipped = max(0, first - 1 - start)  # row i is of what follows token start + i
        if skipped < len(part):
            targets = mx.array(ids[start + skipped + 1 : start + len(part) + 1])
            chosen = mx.take_along_axis(rows[skipped:], targets[:, None], axis=-1)[:, 0]
            values: list[float] = (-chosen).tolist()  # type: ignore[assignment]  # of the one axis
            found += values
    return found


def _summed(surprises: list[float], number: int, window: int, stride: int) -> Perplexity:
    count = len(surprises)
    mean = math.fsum(surprises) / count if count else math.nan
    if not math.isfinite(mean) or mean > 700:
        return Perplexity(None, None, None, count, number, window, stride)
    value, error = math.exp(mean), None
    if count > 1:
        variance = math.fsum((each - mean) ** 2 for each in surprises) / (count - 1)
        error = value * math.sqrt(variance / count)
    return Perplexity(value, error, mean, count, number, window, stride)
