"""Both sides of a load on several machines; ``python -m`` of it is the process of other ranks, which team.py starts."""

import gc
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ..errors import OptionError, TokamacError, computing_error
from ..events import LoadProgress
from ..files import raise_open_files
from ..loading import load
from ..options import KVSpec, LoadRequest, Split
from ..runner import Runner
from .team import BEAT_S, Channel, NodeShare, Record, Team, join_group, records, token_bytes_of

if TYPE_CHECKING:
    from .mirror import PassReplay


def load_together(
    team: Team,
    split: Split,
    request: LoadRequest,
    progress: Callable[[LoadProgress], None],
) -> Runner:
    """Return rank 0's Runner once all have loaded; on the engine's thread. Raises TokamacError."""
    # Computed prompts stay in memory only: each node has a part of them.
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


# Records on stdin, answers on stdout, logs on stderr. A closed stdin means that rank 0 is gone: it ends immediately.


class NodeFollower:
    def __init__(self, out: Channel) -> None:
        self._out = out
        self._files: dict[str, str] = {}
        self._group: Any = None
        self._runner: Runner | None = None
        self._replay: PassReplay | None = None
        self._loaded = self._held = 0  # which load, and the bytes of its model alone

    def run(self, told: "queue.SimpleQueue[Record]") -> None:
        while True:
            record = told.get()
            match record["do"]:
                case "beat":
                    pass
                case "begin":
                    os.environ.update(record["env"])  # what MLX reads of it
                    self._files = record["files"]
                    threading.Thread(target=self._beat, name="beat", daemon=True).start()
                    self._out.send({"said": "begun"})
                case "connect":
                    with self._telling_failures():
                        self._group = join_group(str(record["backend"]), self._files)
                case "load":
                    with self._telling_failures(f"failed {record['number']}"):
                        self._load(record)
                case "unload":
                    self._unload()
                case "leave":
                    os._exit(0)  # before rank 0: MLX would complain of a closed socket
                case _ if self._replay is not None:
                    with self._telling_failures(fatal=True):
                        self._replay.do(record)

    def _beat(self) -> None:
        while True:
            self._tell_room()
            threading.Event().wait(BEAT_S)

    def _tell_room(self) -> None:
        found: Record = {}
        if (runner := self._runner) is not None and (budget := runner.runtime.memory_budget) is not None:
            room, token_bytes = budget - self._held, token_bytes_of(runner.runtime.plan)
            found = {"loaded": self._loaded, "room": room, "token_bytes": token_bytes}
        self._out.send({"said": "alive", **found})

    @contextmanager
    def _telling_failures(self, said: str = "failed", *, fatal: bool = False) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            known = error if isinstance(error, TokamacError) else computing_error(error)
            if known is None:
                traceback.print_exc()
                known = TokamacError(f"{type(error).__name__}: {error}", "Its log has the details.")
            self._out.send({"said": said, "error": known.message, "hint": known.hint, "fatal": fatal})
            if fatal:
                sys.stderr.flush()
                os._exit(1)

    def _load(self, record: Record) -> None:
        import mlx.core as mx

        from ..loading import described, load
        from .mirror import PassReplay
        from .team import NodeShare

        self._unload()
        share = NodeShare(self._group, self._group.rank(), self._group.size(), record["split"])
        number, request = record["number"], record["request"]
        runner = load(LoadRequest(**{**request, "kv": KVSpec(**request["kv"])}), share=share)
        self._loaded, self._held = number, mx.get_active_memory()
        self._runner, runtime = runner, runner.runtime
        self._replay = PassReplay(
            runtime.model,
            runtime.plan,
            self._group,
            fused=runtime.shape.device,
            vocabulary=runner.spec.vocabulary_size,
        )
        self._tell_room()  # before rank 0 asks
        self._out.send({"said": f"loaded {number}", **described(runner.spec, runtime.plan)})

    def _unload(self) -> None:
        runner, self._runner, self._replay = self._runner, None, None
        if runner is not None:
            runner.close()
            gc.collect()


def follow() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0
    raise_open_files()
    out = Channel(os.dup(1))
    os.dup2(2, 1)
    told: queue.SimpleQueue[Record] = queue.SimpleQueue()

    def listen() -> None:
        for record in records(sys.stdin.buffer):
            told.put(record)
        os._exit(0)

    threading.Thread(target=listen, name="listen", daemon=True).start()
    NodeFollower(out).run(told)


if __name__ == "__main__":
    follow()
