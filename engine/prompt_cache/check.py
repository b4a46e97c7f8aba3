"""Whether what is stored is what a cold run computes: stored prefixes are computed again, and the logits after them compared."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from tokamac.engine.prompt_cache.seam import Store

if TYPE_CHECKING:
    from tokamac.engine.runtime import Runtime


ROUNDING, PACKED_ROUNDING = 1e-3, 0.05
"""Differences of logits that rounding explains: what was stored was computed in chunks that ended elsewhere. Where keys and values
are packed, one in the last digit may put a number on the next step of its group's scale."""

STEPS = 8
"""Steps of the number type, at the size of the largest logit, that come on top: bfloat16 has few."""


@dataclass(frozen=True, slots=True)
class Check:
    """A stored prefix of so many tokens, computed again.

    difference: the largest of the logits after it, warm against cold. bound: up to that it is rounding. top_same: whether the
    likeliest token is the same.
    """

    tokens: int
    difference: float
    bound: float
    top_same: bool


def check(runtime: "Runtime", store: Store, cancelled: Callable[[], bool]) -> Generator[Check, None, None]:
    """Yield a check for every stored prefix that no other continues, the longest first. The store's own caches are left alone."""
    for ids, keep in sorted(store.stored(), key=lambda each: -len(each[0])):
        prompt = [*ids, ids[-1]]
        slot = store.anew().take(prompt, keep)
        if len(slot.ids) == len(ids):  # else it was damaged, and is gone now
            warm = _after(runtime.model, slot.caches, prompt[len(ids) :], 1, cancelled)
            cold = _after(runtime.model, runtime.new_caches(keep), prompt, runtime.prefill_chunk, cancelled)
            if cancelled():
                return
            yield _compared(len(ids), warm, cold, packed=runtime.kv.quantized)


def _compared(tokens: int, warm: mx.array, cold: mx.array, *, packed: bool) -> Check:
    step = mx.finfo(cold.dtype).eps * float(mx.max(mx.abs(cold)))
    bound = (PACKED_ROUNDING if packed else ROUNDING) + STEPS * step
    difference = float(mx.max(mx.abs(warm.astype(mx.float32) - cold.astype(mx.float32))))
    return Check(tokens, difference, bound, mx.argmax(warm).item() == mx.argmax(cold).item())


def _after(model: Any, caches: list[Any], ids: list[int], chunk: int, cancelled: Callable[[], bool]) -> mx.array:
    """Return the logits (vocabulary,) after the last of ``ids``, computed in chunks; of an earlier one when cancelled."""
    logits = mx.zeros(0)
    for begin in range(0, len(ids), chunk):
        logits = model(mx.array([ids[begin : begin + chunk]]), cache=caches)[0, -1]
        mx.eval(logits, [cache.state for cache in caches])
        if cancelled():
            break
    return logits
