"""Log-probabilities of a text, row by row, through the engine's own prefill and caches. Runs on the engine's thread."""

import mlx.core as mx

from tokamac.engine.errors import ContextError, MemoryLimitError
from tokamac.engine.kv_trial import log_probabilities
from tokamac.engine.limits import memory
from tokamac.engine.limits.ladder import gb, override, told_apart
from tokamac.engine.limits.peak import predict_peak
from tokamac.engine.prompt_cache.seam import Store
from tokamac.engine.runtime import Runtime

LOGPROBS_CHUNK = 2048
"""Tokens scored at once, where the caller does not say."""

FLOAT32 = 4


def score(runtime: Runtime, ids: list[int], chunk: int, *, keep: int | None) -> mx.array:
    """ids (n,) → (n, V) float32 log-probabilities of what follows each, ``chunk`` ids at a time. Evaluated."""
    caches = runtime.new_caches(keep)
    rows = [log_probabilities(runtime.model, caches, ids[begin : begin + chunk]) for begin in range(0, len(ids), chunk)]
    result = mx.concatenate(rows, axis=0)
    mx.eval(result)
    return result


def check_scored(
    runtime: Runtime, store: Store, tokens: int, chunk: int, vocabulary: int, *, rows: int | None = None
) -> None:
    """Raise ContextError where so many tokens do not fit the context, MemoryLimitError where their rows can't fit the memory.

    rows: held at once; None is all of them.
    """
    longest = runtime.longest
    if longest is not None and tokens > longest:
        raise ContextError(
            f"{tokens:,} tokens are to be scored, but {runtime.what_bounds()} {longest:,}", "Score fewer at a time."
        )
    budget = runtime.memory_budget
    row_bytes = FLOAT32 * vocabulary * (_rows_at_once(tokens, chunk) if rows is None else rows)
    least = predict_peak(runtime.shape, held=0, new=tokens, chunk=chunk, prompt_cache=store.nbytes).total + row_bytes
    if budget is not None and least > budget:
        needed, most = told_apart(least, budget)
        raise MemoryLimitError(
            f"the log-probabilities of {tokens:,} tokens need {needed} of memory ({gb(row_bytes)} of it for the rows of "
            f"{vocabulary:,} numbers), and {most} may be used",
            f"Score fewer tokens at a time.{override(least, memory.device_total())}",
        )


def _rows_at_once(tokens: int, chunk: int) -> int:
    """Return the rows held at the highest moment, at least: while a chunk is computed its logits are beside its rows and those
    before; at the end all are joined."""
    joined = tokens if tokens <= chunk else 2 * tokens
    return max(joined, tokens + min(chunk, tokens))
