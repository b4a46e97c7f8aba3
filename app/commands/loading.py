"""Find and load a model for a terminal command, with progress on stderr and Ctrl-C at any time."""

import argparse
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.engine.errors import ModelNotFoundError
from tokamac.engine.events import Event, Finished, LoadProgress
from tokamac.engine.options import KVSpec, Nodes, PromptCacheSpec, Speculation

from .. import INTERRUPTED, settings
from ..options import adapter_of, is_cpu_exact, known_settings, memory_limit, pace_of
from ..settings import CHAT_KV
from ..text.terminal import Progress, note

if TYPE_CHECKING:
    from tokamac.engine import Engine


COMPILING = "compiling CPU kernels: some seconds, once"
MEASURING = "measuring the rounding error of this model, once"  # told where loading waits for that


def load(
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
    """Load ``model`` with the command's flags, downloading it if needed. Raises TokamacError.

    parallel: max parallel replies. speculation: None is off. nodes: None is this process alone.
    """
    # Ctrl-C during the download raises KeyboardInterrupt and keeps partial files. After it, it calls ``on_interrupt``
    # and exits with 130: MLX can't stop in the middle of a load.
    from tokamac.engine.hub import download

    fetch(model, download.resolve)
    if (adapter := adapter_of(options, model)) is not None:
        fetch(adapter, download.resolve_adapter)
    if speculation is not None and speculation.draft is not None:
        fetch(str(speculation.draft), download.resolve)
    from tokamac.engine import Engine

    pace, on_battery = pace_of(options)
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
                memory=memory_limit(options),
                unchecked=getattr(options, "unchecked", False),
                adapter=adapter,
                parallel=parallel,
                speculation=speculation,
                cpu_exact=is_cpu_exact(options),
                wired=known_settings().wired,
                pace=pace,
                pace_on_battery=on_battery,
                nodes=nodes,
                progress=lambda at: tell_loading(at, bar),
            )
        finally:
            bar.clear()
    for remark in engine.spec.memory_notes:
        note(f"note: {remark}")
    told = ("adapter", "draft", *(("alone",) if parallel > 1 else ()))
    for each in engine.spec.model_notes:  # what was asked for is not done otherwise in silence
        if kv not in (KVSpec(), CHAT_KV) or nodes is not None or each.about in told:
            note(f"note: {each.text}")
    if (advice := engine.spec.advice) is not None and settings.is_new(advice):
        note(f"note: {advice}")
    return engine


def on_disk(model: str) -> Path:
    """Return a local model's folder, never downloading. Raises ModelNotFoundError."""
    from tokamac.engine.hub import download

    folder = download.find(model)
    if folder is None:
        raise ModelNotFoundError(f"{model} is not complete on this disk", f"Download it: tokamac models pull {model}.")
    return folder


def fetch(model: str, act: Callable[..., Path]) -> Path:
    """Call ``act(model, progress=…)``, which may download, with a progress bar."""
    bar = Progress("downloading")

    def tell(at: LoadProgress) -> None:
        bar.update(at.done, at.total)

    try:
        return act(model, progress=tell)
    finally:
        bar.clear()


def tell_loading(at: LoadProgress, bar: Progress) -> None:
    if at.stage == "compile":
        bar.say(COMPILING)
    elif at.stage == "rounding":
        bar.say(MEASURING)
    elif at.stage != "warm-up":
        bar.update(at.done, at.total)


def process_age_s() -> float:
    """Return seconds since the process started; its CPU time where the system doesn't tell."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        began_s = int(fields[19]) / os.sysconf(
            "SC_CLK_TCK"
        )  # starttime, the 22nd field; the name before may hold anything
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s
    except (OSError, ValueError, IndexError, AttributeError):
        return _mac_age_s() or time.process_time()


def _mac_age_s() -> float | None:
    """The same on macOS, whose kernel gives wall-clock start times. Untested."""
    if os.uname().sysname != "Darwin":
        return None
    import ctypes

    name = (ctypes.c_int * 4)(1, 14, 1, os.getpid())  # CTL_KERN, KERN_PROC, KERN_PROC_PID (sys/sysctl.h)
    found, size = ctypes.create_string_buffer(1024), ctypes.c_size_t(1024)
    if ctypes.CDLL("/usr/lib/libSystem.B.dylib").sysctl(name, 4, found, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return None
    seconds, micros = struct.unpack_from("=qi", found.raw)  # struct kinfo_proc begins with p_starttime, a timeval
    began_s: float = seconds + micros / 1e6
    return max(time.time() - began_s, 0.0)


class CommandTime:
    """Accounts a command's time from process start to each reply's end.

    clock: seconds since process start. Loading counts from construction until ``loaded``.
    """

    def __init__(self, clock: Callable[[], float] = process_age_s) -> None:
        self._clock = clock
        self._start_s = clock()
        self._load_s = self._from_s = 0.0

    def loaded(self) -> None:
        self._load_s = self._clock() - self._start_s

    def counted(self, event: Event) -> Event:
        """Complete ``Finished`` with all time since the start or the last reply; other events are unchanged."""
        if not isinstance(event, Finished):
            return event
        now_s, since_s, spent = self._clock(), self._from_s, (self._start_s, self._load_s)
        if event.tool_calls:  # the replies that follow count from here
            self._from_s, self._start_s, self._load_s = now_s, 0.0, 0.0
        if event.diagnosis is None:
            return event
        timed = event.diagnosis.since(now_s - since_s, start_s=spent[0], load_s=spent[1])
        return replace(event, diagnosis=timed)


@contextmanager
def interrupting(act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` at the first Ctrl-C; the second interrupts as usual."""
    # No effect outside the main thread, or where the shell ignores SIGINT (background job).

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
