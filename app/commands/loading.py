"""Find and load a model for a command that answers on the terminal, with progress on stderr and Ctrl-C at any time."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.engine.errors import ModelNotFoundError
from tokamac.engine.events import LoadProgress
from tokamac.engine.options import KVSpec, Nodes, PromptCacheSpec, Speculation

from .. import INTERRUPTED, settings
from ..options import adapter_of, is_cpu_exact, memory_limit
from ..output import Progress, note

if TYPE_CHECKING:
    from tokamac.engine import Engine


COMPILING = "compiling kernels for this processor: some seconds, once"
MEASURING = "measuring what rounding would cost this model, once"
"""Told where loading waits for that."""


def load(
    model: str,
    *,
    kv: KVSpec,
    prompt_cache: PromptCacheSpec | None,
    memory: int | None,
    on_interrupt: Callable[[], None] = lambda: None,
    unchecked: bool = False,
    adapter: str | None = None,
    parallel: int = 1,
    speculation: Speculation | None = None,
    cpu_exact: bool = False,
    nodes: Nodes | None = None,
) -> "Engine":
    """Return the engine for ``model``, downloaded first if need be. memory: bytes it may take; None is the system's limit.

    parallel: replies that will be asked for at once. speculation: what guesses tokens; None is nothing. cpu_exact: a CPU rounds
    nothing. nodes: the processes that hold it together; None is this one alone.

    Ctrl-C during the download raises KeyboardInterrupt, and what has arrived is kept. After it the program ends at once with
    status 130, ``on_interrupt`` called first: MLX can't be stopped in the middle of a load, and there is nothing to save.
    Raises TokamacError.
    """
    from tokamac.engine.hub import download

    fetch(model, download.resolve)
    if adapter is not None:
        fetch(adapter, download.resolve_adapter)
    if speculation is not None and speculation.draft is not None:
        fetch(str(speculation.draft), download.resolve)
    from tokamac.engine import Engine

    bar = Progress("loading", plain=False)

    def leave() -> None:
        bar.clear()
        on_interrupt()

    with _ending_at_once(leave):
        try:
            engine = Engine.load(
                model,
                kv=kv,
                prompt_cache=prompt_cache,
                memory=memory,
                unchecked=unchecked,
                adapter=adapter,
                parallel=parallel,
                speculation=speculation,
                cpu_exact=cpu_exact,
                nodes=nodes,
                progress=lambda at: tell_loading(at, bar),
            )
        finally:
            bar.clear()
    for remark in engine.spec.memory_notes:
        note(f"note: {remark}")
    told = ("adapter", "draft", *(("alone",) if parallel > 1 else ()))
    for each in engine.spec.model_notes:  # what was asked for is not done otherwise in silence
        if kv != KVSpec() or nodes is not None or each.about in told:
            note(f"note: {each.text}")
    if (advice := engine.spec.advice) is not None and settings.is_new(advice):
        note(f"note: {advice}")
    return engine


def load_for(
    options: argparse.Namespace,
    model: str,
    kv: KVSpec,
    prompt_cache: PromptCacheSpec | None = None,
    *,
    parallel: int = 1,
    speculation: Speculation | None = None,
    nodes: Nodes | None = None,
    on_interrupt: Callable[[], None] = lambda: None,
) -> "Engine":
    """Return the engine for ``model`` as the command's flags have it; the others are as for ``load``. Raises TokamacError."""
    return load(
        model,
        kv=kv,
        prompt_cache=prompt_cache,
        memory=memory_limit(options),
        on_interrupt=on_interrupt,
        unchecked=getattr(options, "unchecked", False),
        adapter=adapter_of(options, model),
        parallel=parallel,
        speculation=speculation,
        cpu_exact=is_cpu_exact(options),
        nodes=nodes,
    )


def on_disk(model: str) -> Path:
    """Return the folder of a model that is here already: to look at one is no reason to download it.

    Raises ModelNotFoundError.
    """
    from tokamac.engine.hub import download

    folder = download.find(model)
    if folder is None:
        raise ModelNotFoundError(f"{model} is not complete on this disk", f"Download it: tokamac models pull {model}.")
    return folder


def fetch(model: str, act: Callable[..., Path]) -> Path:
    """Return ``act(model, progress=…)``, which may download, with a bar."""
    bar = Progress("downloading")

    def tell(at: LoadProgress) -> None:
        bar.update(at.done, at.total)

    try:
        return act(model, progress=tell)
    finally:
        bar.clear()


def tell_loading(at: LoadProgress, bar: Progress) -> None:
    """Show how far loading has come."""
    if at.stage == "compile":
        bar.say(COMPILING)
    elif at.stage == "rounding":
        bar.say(MEASURING)
    elif at.stage != "warm-up":
        bar.update(at.done, at.total)


@contextmanager
def interrupting(act: Callable[[], None]) -> Iterator[None]:
    """Let the first Ctrl-C call ``act``, and the second interrupt as usual.

    Without effect outside the main thread, and where the shell asked for Ctrl-C to be ignored (a job in the background).
    """

    def first(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        act()

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _ending_at_once(first: Callable[[], None]) -> Iterator[None]:
    def end() -> None:
        first()
        sys.stdout.flush()
        os._exit(INTERRUPTED)

    with interrupting(end):
        yield
