"""Loads a model on all nodes at once, from rank 0."""

import gc
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from ..errors import OptionError
from ..events import LoadProgress
from ..loading import load
from ..options import KVSpec, PromptCacheSpec, Speculation, Split
from ..runner import Runner
from .split import NodeShare
from .team import Team


def load_together(
    team: Team,
    split: Split,
    model: str | Path,
    *,
    kv: KVSpec,
    prompt_cache: PromptCacheSpec | None,
    dtype: str | None,
    memory: int | None,
    progress: Callable[[LoadProgress], None] | None,
    unchecked: bool,
    adapter: str | Path | None,
    parallel: int,
    speculation: Speculation | None,
    cpu_exact: bool,
) -> Runner:
    """Return the Runner of rank 0, once all have loaded their part. Runs on the engine's thread. Raises TokamacError.

    Computed prompts are kept in memory alone: each node has a part of them.
    """
    if adapter is not None:
        raise OptionError("an adapter can't be added to a model that several nodes hold", "Load it without nodes.")
    gc.collect()  # what held an earlier model refers to itself
    group = team.connect()
    team.load(
        {
            "model": str(model),
            "kv": asdict(kv),
            "dtype": dtype,
            "memory": memory,
            "unchecked": unchecked,
            "parallel": parallel,
            "split": split,
        }
    )
    return load(
        model,
        kv=kv,
        prompt_cache=None if prompt_cache is None else replace(prompt_cache, disk=False),
        dtype=dtype,
        memory=memory,
        progress=progress,
        unchecked=unchecked,
        parallel=parallel,
        speculation=speculation,
        cpu_exact=cpu_exact,
        share=NodeShare(group, group.rank(), group.size(), split),
        team=team,
    )
