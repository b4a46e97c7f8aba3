"""One pass that reads a lane's last token and a draft of those to come, and finds out how far the draft is right.

rows      t      d1     d2     d3            read at once
chosen    d1     d2     x      –             what plain decoding chooses after each, with its seed, by its position
brings    d1     d2     x                    d3 is taken back; x, as after any step, is in no cache yet
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ..errors import ModelDamagedError
from ..kv.operations import LOCAL, CacheOperations
from ..model.head import asking_for_logits, keeping_hidden_states
from ..sampling import SamplerState

if TYPE_CHECKING:
    from .decoding import Lane

NOT_NUMBERS = "the model computed values that are not numbers", "Load it with dtype float32, or download it again."


def verify(
    model: Any, lane: "Lane", drafted: Sequence[int], operations: CacheOperations = LOCAL, *, on_host: bool = False
) -> list[int]:
    """Return the tokens that plain decoding would choose next: those of ``drafted`` that it would, and one more.

    None follows one that ends the reply. The lane holds all but the last of them then, in its caches or behind them. on_host: where
    the likeliest are chosen. Raises ModelDamagedError.
    """
    allowed = None if lane.constraint is None else lane.constraint.allowed_along(drafted)
    behind = [*lane.behind, lane.last]
    read = [*behind, *drafted]
    before = operations.before_pass(lane.caches)
    with asking_for_logits(), keeping_hidden_states() as kept:
        logits = model(mx.array([read], mx.uint32), cache=lane.caches)  # (1, …, V), of which the last 1 + k are meant
    if on_host and allowed is None and lane.sampler.takes_likeliest:
        rows = np.asarray(logits.astype(mx.float32))[0, len(behind) - 1 :]
        tokens, states = lane.sampler.take_likeliest_rows(rows)
        sound = bool(np.isfinite(rows[np.arange(len(rows)), tokens]).all())
    else:
        tokens, states, sound = _chosen(lane, logits[0, len(behind) - 1 :], allowed)
    if not sound:
        raise ModelDamagedError(*NOT_NUMBERS)
    right = 0
    while right < len(drafted) and tokens[right] == drafted[right] and tokens[right] not in lane.sampler.ends:
        right += 1
    lane.sampler.restore(states[right])
    if lane.hidden is not None:
        lane.hidden.passed(len(lane.cached_ids), kept[-1][:, : len(behind) + right])
    held = before.take_back(len(drafted) - right, len(read))
    lane.cached_ids.extend(read[:held])
    lane.behind = read[held : len(behind) + right]
    return tokens[: right + 1]


def _chosen(
    lane: "Lane", logits: mx.array, allowed: Sequence[np.ndarray] | None
) -> tuple[list[int], list[SamplerState], bool]:
    """Return what a lane chooses from logits (1 + k, V), the sampler's states after each, and whether they are numbers."""
    chosen, states = lane.sampler.choose_rows(logits, allowed)  # (1 + k,)
    sound = mx.all(mx.isfinite(mx.max(logits, axis=-1)))
    mx.eval(chosen, sound, *lane.sampler.newest_scores(len(logits)))
    tokens: list[int] = chosen.tolist()  # type: ignore[assignment]
    return tokens, states, bool(sound.item())
