"""Whether what is stored is what a cold run computes: stored prefixes are computed again, and the logits after them compared."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from tokamac.engine.prompt_cache.cache import Store

if TYPE_CHECKING:
    from tokamac.engine.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Check:
    """A stored prefix: its tokens, the largest difference of the logits after it (warm, cold), and whether their top is one."""

    tokens: int
    difference: float
    top_same: bool


def check(runtime: "Runtime", store: Store, cancelled: Callable[[], bool]) -> Generator[Check, None, None]:
    """Yield a check for every stored prefix that no other continues, the longest first. The store's own caches are left alone."""
    for ids, keep in sorted(store.stored(), key=lambda each: -len(each[0])):
        prompt = [*ids, ids[-1]]
        slot = store.anew().take(prompt, keep)
        if len(slot.ids) == len(ids):  # else it was damaged, and is gone now
            warm = _after(runtime.model, slot.caches, prompt[len(ids) :], 1)
            cold = _after(runtime.model, runtime.new_caches(keep), prompt, runtime.prefill_chunk)
            difference = float(mx.max(mx.abs(warm - cold)))
            yield Check(len(ids), difference, mx.argmax(warm).item() == mx.argmax(cold).item())
        if cancelled():
            return


def _after(model: Any, caches: list[Any], ids: list[int], chunk: int) -> mx.array:
    """Return the logits (vocabulary,) after the last of ``ids``, computed in chunks; float32."""
    logits = mx.zeros(0)
    for begin in range(0, len(ids), chunk):
        logits = model(mx.array([ids[begin : begin + chunk]]), cache=caches)[0, -1]
        mx.eval(logits, [cache.state for cache in caches])
    return logits.astype(mx.float32)
