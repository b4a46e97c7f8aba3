"""The first steps after loading, taken before anybody waits for them: a GPU makes its libraries and pipelines at their first use.

On a plain CPU nothing is made at the first use that takes noticeable time, so there it is left out.
"""

import contextlib

import mlx.core as mx

from tokamac.engine.errors import TokamacError
from tokamac.engine.generation import Run
from tokamac.engine.options import Sampling
from tokamac.engine.runtime import Runtime
from tokamac.engine.sampling import Sampler

TOKENS = 32
"""Of the prompt: as many as kernels for prompts want, beyond the few that are multiplied row by row."""

STEPS = 2
"""Tokens decoded: the second is launched while the first is on its way."""


def warm_up(runtime: Runtime, sampling: Sampling) -> None:
    """Read a few tokens, decode two with this resolved ``sampling``, and drop all of it: no cache, figure or seed knows of it.

    What fails here fails again, and is told, when a prompt is sent.
    """
    room = runtime.room(0)
    tokens = TOKENS if room is None else min(TOKENS, room - STEPS)
    if tokens < 1:
        return
    with contextlib.suppress(TokamacError, RuntimeError, ValueError):
        run = Run(runtime.model, runtime.new_caches(None), [], ahead=runtime.ahead)
        for _ in run.prefill([0] * tokens, tokens):
            pass
        for _ in run.decode(0, Sampler(sampling, [0]), STEPS):
            pass
    mx.clear_cache()
    mx.reset_peak_memory()
