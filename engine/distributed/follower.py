"""The process of every rank but the first: ``python -m tokamac.engine.distributed.follower``. Started by team.py.

Records on stdin, what it says on stdout, all else to stderr. When stdin closes, rank 0 is gone, and it ends at once, whatever it
computes.
"""

import gc
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import TokamacError, computing_error
from ..files import raise_open_files
from ..options import KVSpec, LoadRequest
from .channel import Channel, Record, records
from .team import BEAT_S, join_group, token_bytes_of

if TYPE_CHECKING:
    from ..runner import Runner
    from .mirror import PassReplay


class NodeFollower:
    """One process of a group. group: MLX's, once joined."""

    def __init__(self, out: Channel) -> None:
        self._out = out
        self._files: dict[str, str] = {}
        self._group: Any = None
        self._runner: Runner | None = None
        self._replay: PassReplay | None = None
        self._loaded = self._held = 0  # which load, and the bytes of its model alone

    def run(self, told: "queue.SimpleQueue[Record]") -> None:
        """Do what is told, for ever; what fails while the group computes ends the process."""
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
                        self._connect(str(record["backend"]))
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
        """Say that it lives, how many bytes there are beside the model, and how many a token takes of them."""
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

    def _connect(self, backend: str) -> None:
        self._group = join_group(backend, self._files)

    def _load(self, record: Record) -> None:
        import mlx.core as mx

        from ..loading import described, load
        from .mirror import PassReplay
        from .split import NodeShare

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
    """Follow rank 0 until it is gone."""
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
