"""Decoding with and without a record of it, in a process of its own."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tests.benchmarks.servers import EngineServer
from tokamac.engine import metrics
from tokamac.engine.metrics import Cause, ProcessWatch, Recorder
from tokamac.engine.options import Sampling

if TYPE_CHECKING:
    from tokamac.engine.generation import Generation
    from tokamac.engine.sampling import Sampler

ASK_S = 0.4  # as often as the chat's engine process asks


class LiveLab:
    """A loaded model, decoded by the engine's own loop."""

    def __init__(self, model: str) -> None:
        self._server = EngineServer(model)
        self._runtime = self._server.engine._runner.runtime

    def decode(self, recorded: bool, prompt: int, new: int) -> float | None:
        """Return the decode rate of ``new`` tokens after ``prompt``, with all that is recorded of a reply, or stamps alone."""
        work = self._recorded if recorded else self._stamped
        times = self._server.engine._worker.call(lambda: work(self._server.prompt(prompt, 0), new))
        return metrics.decode_rate(times)

    def token_us(self, count: int) -> float:
        """Return the microseconds that recording a token takes, in a loop of nothing else."""
        return self._server.engine._worker.call(lambda: self._token_us(count))

    def asked_ms(self, tokens: int) -> float:
        """Return the milliseconds that all figures of a reply take after so many tokens, the last 100 of them new."""
        recorder = Recorder()
        recorder.token_times = [i * 0.004 + i % 7 * 1e-4 for i in range(tokens - 100)]
        self._figures(recorder)
        recorder.token_times += [i * 0.004 + i % 5 * 1e-4 for i in range(tokens - 100, tokens)]
        began = time.perf_counter()
        self._figures(recorder)
        return (time.perf_counter() - began) * 1e3

    def close(self) -> None:
        """Free the model."""
        self._server.close()

    def _token_us(self, count: int) -> float:
        from tokamac.engine.kv.cache import GrowthWatcher

        recorder, caches = Recorder(), self._runtime.new_caches(None)
        self._run(caches, self._server.prompt(8, 0))
        room, watch = GrowthWatcher(caches), ProcessWatch(recorder.mark, computes=True)
        began = time.perf_counter()
        for _ in range(count):
            room.grew()
            _record(watch, recorder)
        return (time.perf_counter() - began) / count * 1e6

    def _figures(self, recorder: Recorder, caches: Sequence[object] = ()) -> None:
        from tokamac.engine import kv

        cost = self._runtime.step_cost(recorder.context_tokens)
        recorder.metrics(cost, kv_bytes=kv.nbytes(list(caches)), peak_memory_bytes=None)
        recorder.outliers(ahead=self._runtime.ahead)

    def _stamped(self, ids: list[int], new: int) -> list[float]:
        run, times = self._run(self._runtime.new_caches(None), ids), []
        for _ in run.decode(ids[-1], _greedy(), new):
            times.append(time.perf_counter())
        return times

    def _recorded(self, ids: list[int], new: int) -> list[float]:
        recorder, caches, ended = Recorder(), self._runtime.new_caches(None), threading.Event()
        run = self._run(caches, ids, recorder.mark)
        asking = threading.Thread(target=self._ask, args=(recorder, caches, ended), daemon=True)
        asking.start()
        watch = ProcessWatch(recorder.mark, computes=self._runtime.device == "cpu")
        for _ in run.decode(ids[-1], _greedy(), new):
            _record(watch, recorder)
        ended.set()
        asking.join()
        return recorder.token_times

    def _ask(self, recorder: Recorder, caches: Sequence[object], ended: threading.Event) -> None:
        while not ended.wait(ASK_S):
            self._figures(recorder, caches)

    def _run(self, caches: list[Any], ids: list[int], mark: Callable[[Cause], None] = lambda _: None) -> "Generation":
        """Return a run whose caches hold all of ``ids`` but the last."""
        from tokamac.engine.generation import Generation

        run = Generation(self._runtime.model, caches, [], ahead=self._runtime.ahead, note=mark)
        for _ in run.prefill(ids[:-1], self._runtime.prefill_chunk):
            pass
        return run


def _record(watch: ProcessWatch, recorder: Recorder) -> None:
    """Do what a reply does as a token arrives."""
    watch.look()
    recorder.token()
    for _ in watch.handed(iter(("a",))):
        pass


def _greedy() -> "Sampler":
    from tokamac.engine.sampling import Sampler

    return Sampler(Sampling(temperature=0).resolved(Sampling()), [])
