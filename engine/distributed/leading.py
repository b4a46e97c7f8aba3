"""Loads a model on all nodes at once, from rank 0."""

import gc
from collections.abc import Callable
from dataclasses import asdict, replace

from ..errors import OptionError
from ..events import LoadProgress
from ..loading import load
from ..options import LoadRequest, Split
from ..runner import Runner
from .split import NodeShare
from .team import Team


def load_together(
    team: Team,
    split: Split,
    request: LoadRequest,
    progress: Callable[[LoadProgress], None],
) -> Runner:
    """Return the Runner of rank 0, once all have loaded their part. Runs on the engine's thread. Raises TokamacError.

    Computed prompts are kept in memory alone: each node has a part of them.
    """
    if request.adapter is not None:
        raise OptionError(
            "an adapter can't be added to a model that several nodes hold",
            "Load it without nodes, or without the adapter (--adapter none).",
        )
    gc.collect()  # what held an earlier model refers to itself
    group = team.connect()
    prompts = request.prompt_cache
    request = replace(request, prompt_cache=None if prompts is None else replace(prompts, disk=False))
    # To guess, and to keep prompts, is for this one.
    told = replace(request, model=str(request.model), prompt_cache=None, speculation=None)
    team.load({"request": asdict(told), "split": split})
    return load(request, progress, share=NodeShare(group, group.rank(), group.size(), split), team=team)
