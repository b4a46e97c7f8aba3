"""mlx-lm as a peer process that answers the same prompts, for ``bench --compare``."""

# A separate process, because the engine patches mlx-lm's attention function in this one. It runs this file
# (``python -m tokamac.app.commands.bench.peer FOLDER``) with JSON lines over pipes:
#
#     ▶ {"prompt": [ids], "new": 128}      ◀ {"ready": {"version": "0.32.2"}}, once
#                                          ◀ {"began_s": 8.1, "token_times_s": [8.4, …], "peak_memory_bytes": 1234}
#     ▶ {"prompts": [[ids], …], "new": 128}    ◀ the same with a list of token_times_s for each prompt
#                                          ◀ {"error": "what failed"}, and it ends
#
# It sends raw time stamps; rates are computed here. It owns a private copy of stdout, safe from stray prints.

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from tokamac.engine import metrics
from tokamac.engine.errors import TokamacError
from tokamac.engine.mlx_lm_package import import_mlx_lm

from ...backend.client import how_ended
from ...text.sanitise import sanitise_line
from ...text.units import size

NAME = "mlx-lm"
GRACE_S = 3.0
WITHOUT = "Run without --compare to measure the engine alone."


class PeerError(TokamacError):
    """The peer can't be started, or failed."""


@dataclass(frozen=True, slots=True)
class PeerRun:
    """A peer reply by our metrics' definitions: seconds, tokens/s, bytes; None is unknown."""

    prompt_tokens: int
    generated_tokens: int
    ttft_s: float
    prefill_tps: float | None
    decode_tps: float | None
    peak_memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class PeerBatch:
    """Parallel peer replies: token times in seconds from the request."""

    token_times_s: tuple[tuple[float, ...], ...]
    peak_memory_bytes: int | None


def run_from_times(prompt_tokens: int, began_s: float, token_times_s: Sequence[float], peak: int | None) -> PeerRun:
    """Compute a run from time stamps; ``token_times_s`` is not empty."""
    ttft_s = token_times_s[0] - began_s
    return PeerRun(
        prompt_tokens=prompt_tokens,
        generated_tokens=len(token_times_s),
        ttft_s=ttft_s,
        prefill_tps=metrics.rate(prompt_tokens, ttft_s),
        decode_tps=metrics.decode_rate(token_times_s),
        peak_memory_bytes=peak,
    )


def check_memory(*, held: int, wanted: int, budget: int | None) -> None:
    """Raise PeerError unless ``wanted`` bytes fit next to ``held``; None: no check."""
    if budget is not None and held + wanted > budget:
        raise PeerError(
            f"--compare needs the weights twice, and they don't fit together: {size(held)} are held here, {NAME} needs "
            f"{size(wanted)} more, and the budget is {size(budget)}",
            "Compare on a smaller model, or set another limit with --memory.",
        )


class PeerProcess:
    """mlx-lm with ``folder`` loaded; ends with its context. Raises PeerError.

    It has its own session, so Ctrl-C reaches only this program. ``command`` replaces it in tests.
    """

    def __init__(self, folder: Path, command: Sequence[str] | None = None) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # its warnings; the last line is told if it dies
        try:
            self._process = subprocess.Popen(
                command or [sys.executable, "-m", "tokamac.app.commands.bench.peer", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        except OSError as error:
            self._log.close()
            raise PeerError(f"{NAME}'s process can't be started: {error.strerror}", WITHOUT) from error
        try:
            self.version = self._started()
        except BaseException:
            self.close()
            raise

    @property
    def title(self) -> str:
        return f"{NAME} {self.version}"

    def reply(self, ids: Sequence[int], new: int) -> PeerRun:
        """Generate ``new`` tokens greedily, ignoring end-of-sequence. Raises PeerError."""
        times, began_s, peak = self._times({"prompt": list(ids), "new": new}, lambda given: (given,))
        self._check_tokens(times, new)
        return run_from_times(len(ids), began_s, times[0], peak)

    def replies(self, prompts: Sequence[Sequence[int]], new: int) -> PeerBatch:
        """Generate ``new`` tokens per prompt as ``batch_generate`` does. Raises PeerError."""
        times, began_s, peak = self._times({"prompts": [list(ids) for ids in prompts], "new": new}, tuple)
        self._check_tokens(times, new)
        if len(times) != len(prompts):
            raise PeerError(f"{NAME} answered {len(times):,} of {len(prompts):,} prompts", WITHOUT)
        return PeerBatch(tuple(tuple(at_s - began_s for at_s in each) for each in times), peak)

    def _times(
        self, request: dict[str, Any], replies_of: Callable[[Any], tuple[Any, ...]]
    ) -> tuple[list[list[float]], float, int | None]:
        """Return token times per reply, start time and peak bytes. Raises PeerError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._dead() from None
        answer = self._answer()
        try:
            times = [[float(at_s) for at_s in each] for each in replies_of(answer["token_times_s"])]
            began_s, peak = float(answer["began_s"]), answer["peak_memory_bytes"]
        except (KeyError, TypeError, ValueError) as error:
            raise PeerError(f"{NAME}'s process gave an answer without time stamps", WITHOUT) from error
        return times, began_s, peak if isinstance(peak, int) else None

    @staticmethod
    def _check_tokens(times: Sequence[Sequence[float]], new: int) -> None:
        if short := [len(each) for each in times if len(each) != new]:
            raise PeerError(f"{NAME} made {short[0]:,} of {new:,} tokens", WITHOUT)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._ended()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> str:
        match self._answer():
            case {"ready": {"version": str(version)}}:
                return sanitise_line(version)
        raise PeerError(f"{NAME}'s process did not say which version it is", WITHOUT)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._dead()
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise PeerError(f"{NAME}'s process gave an answer that is not JSON", WITHOUT) from error
        if not isinstance(answer, dict):
            raise PeerError(f"{NAME}'s process gave an answer that is no object", WITHOUT)
        if "error" in answer:
            raise PeerError(f"{NAME} failed: {sanitise_line(str(answer['error']))}", WITHOUT)
        return answer

    def _ended(self) -> int:
        try:
            return self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _dead(self) -> PeerError:
        code = self._ended()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        last = next((sanitise_line(line) for line in reversed(lines) if line.strip()), "")
        return PeerError(f"{NAME}'s process {how_ended(code)}{': ' if last else ''}{last}", WITHOUT)


class MlxLm:
    """A model loaded by ``mlx_lm.load``, which by default runs no code of the folder."""

    def __init__(self, folder: str) -> None:
        import_mlx_lm()  # which would fail by itself where few files may be open
        from mlx_lm import load

        self._model, self._tokenizer, *_ = load(folder)
        self._tokenizer.eos_token_ids = set()  # every reply is as long as it is asked to be

    def reply(self, prompt: list[int], new: int) -> dict[str, Any]:
        """Generate greedily (mlx-lm's default); return arrival times on one clock."""
        import mlx.core as mx
        from mlx_lm import stream_generate

        mx.reset_peak_memory()
        began_s = time.perf_counter()
        responses = stream_generate(self._model, self._tokenizer, mx.array(prompt), max_tokens=new)
        times = [time.perf_counter() for _ in responses]
        return {"began_s": began_s, "token_times_s": times, "peak_memory_bytes": mx.get_peak_memory()}

    def replies(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """Generate greedily in one batch, like ``batch_generate`` with its defaults."""
        # ``batch_generate`` gives no time stamps per token, so its generator is driven here in the same way.
        import mlx.core as mx
        from mlx_lm.generate import BatchGenerator

        mx.reset_peak_memory()
        began_s = time.perf_counter()
        generator = BatchGenerator(self._model)
        try:
            names = generator.insert(prompts, [new] * len(prompts))
            times: dict[Any, list[float]] = {name: [] for name in names}
            while made := generator.next_generated():
                now_s = time.perf_counter()
                for each in made:
                    times[each.uid].append(now_s)
        finally:
            generator.close()
        stamps = [times[name] for name in names]
        return {"began_s": began_s, "token_times_s": stamps, "peak_memory_bytes": mx.get_peak_memory()}


def serve(folder: str, requests: "queue.SimpleQueue[bytes]", out: BinaryIO) -> None:
    try:
        model = MlxLm(folder)
        _put(out, {"ready": {"version": metadata.version("mlx-lm")}})
        while True:
            asked = json.loads(requests.get())
            together = "prompts" in asked
            made = (
                model.replies(asked["prompts"], asked["new"])
                if together
                else model.reply(asked["prompt"], asked["new"])
            )
            _put(out, made)
    except Exception as error:  # whatever a model's code raises is told in a line
        traceback.print_exc()
        _put(out, {"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    """Serve stdin and stdout; exits when stdin closes, also during a reply."""
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
