"""mlx-lm in a process of its own, as its users have it: ``python -m tokamac.app.commands.peer_child FOLDER``.

The protocol is in peer.py. Time stamps are sent as they were taken, where a token arrives; what they come to is reckoned over
there. The file descriptor of stdout is taken away at the start, so that a stray print of any library can't break the protocol.
When stdin closes (the other side is gone, however it went) the process ends, also in the middle of a reply.
"""

import json
import os
import queue
import sys
import threading
import time
import traceback
from importlib import metadata
from typing import Any, BinaryIO

from tokamac.engine.files import import_mlx_lm


class MlxLm:
    """The model in a folder, as ``mlx_lm.load`` loads it. No code of the folder's is run: that is mlx-lm's default."""

    def __init__(self, folder: str) -> None:
        import_mlx_lm()  # which would fail by itself where few files may be open
        from mlx_lm import load

        self._model, self._tokenizer, *_ = load(folder)
        self._tokenizer.eos_token_ids = set()  # every reply is as long as it is asked to be

    def reply(self, prompt: list[int], new: int) -> dict[str, Any]:
        """Generate ``new`` tokens greedily, which is mlx-lm's default; return when each arrived (seconds of one clock)."""
        import mlx.core as mx
        from mlx_lm import stream_generate

        mx.reset_peak_memory()
        began_s = time.perf_counter()
        responses = stream_generate(self._model, self._tokenizer, mx.array(prompt), max_tokens=new)
        times = [time.perf_counter() for _ in responses]
        return {"began_s": began_s, "token_times_s": times, "peak_memory_bytes": mx.get_peak_memory()}


def serve(folder: str, requests: "queue.SimpleQueue[bytes]", out: BinaryIO) -> None:
    """Load, and answer requests until one fails."""
    try:
        model = MlxLm(folder)
        _put(out, {"ready": {"version": metadata.version("mlx-lm")}})
        while True:
            asked = json.loads(requests.get())
            _put(out, model.reply(asked["prompt"], asked["new"]))
    except Exception as error:  # whatever a model's code raises is told in a line
        traceback.print_exc()
        _put(out, {"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    """Serve the process's stdin and stdout, then end the process."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, requests), name="reader", daemon=True).start()
    serve(sys.argv[1], requests, out)
    sys.stderr.flush()
    os._exit(1)  # the reader still waits for stdin, and Python aborts when it is torn down around such a thread


def _read(stdin: BinaryIO, requests: "queue.SimpleQueue[bytes]") -> None:
    while line := stdin.readline():
        requests.put(line)
    os._exit(0)


def _put(out: BinaryIO, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer).encode() + b"\n")
    out.flush()


if __name__ == "__main__":
    main()
