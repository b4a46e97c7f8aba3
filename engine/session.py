"""The engine: a loaded model on a thread of its own, and everything a program may ask of it."""

import atexit
import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tokamac.engine.chat import Chat
from tokamac.engine.device import leave_thread
from tokamac.engine.errors import EngineClosedError, OptionError
from tokamac.engine.events import Event, Live, LoadProgress, Message
from tokamac.engine.options import KVSpec, PromptCacheSpec, Sampling
from tokamac.engine.price import Price
from tokamac.engine.recorder import Recorder
from tokamac.engine.worker import Stream, Worker

if TYPE_CHECKING:
    import mlx.core as mx

    from tokamac.engine.core import Core, ModelSpec
    from tokamac.engine.kv.quality import Trial, TrialProgress
    from tokamac.engine.limits.limits import Limits
    from tokamac.engine.limits.memory import Memory
    from tokamac.engine.limits.prediction import Prediction
    from tokamac.engine.prompt_cache.check import Check
    from tokamac.engine.tokens import Tokenizer

T = TypeVar("T")
Prompt = Sequence[int] | Sequence[Message]


class Engine:
    """A loaded model. Its methods may be called from any thread; MLX is touched by one thread alone.

    Use as a context manager, or call ``close``.
    """

    def __init__(self, worker: Worker, core: "Core") -> None:
        self._worker = worker
        self._core = core
        worker.when_idle = core.idle
        self._streams: list[Stream] = []  # open ones: the running reply's first, then those that wait
        self._lock = threading.Lock()
        self._live: Callable[[], Live] | None = None
        self._ahead = threading.Event()  # ends what is being warmed ahead
        atexit.register(self.close)

    @classmethod
    def load(
        cls,
        model: str | Path = "guide",
        *,
        kv: KVSpec = KVSpec(),  # noqa: B008  # frozen
        prompt_cache: PromptCacheSpec | None = PromptCacheSpec(),  # noqa: B008  # frozen
        dtype: str | None = None,
        progress: Callable[[LoadProgress], None] | None = None,
    ) -> Self:
        """Load a model: a folder, a Hugging Face id (downloaded when it is not on disk), or "guide".

        kv: how keys and values are kept. prompt_cache: None computes every prompt afresh. dtype: of what is not packed; None
        takes the checkpoint's own on a GPU and float32 on a CPU. progress is called from another thread.
        Raises ModelError, DownloadError, OptionError or DeviceError.
        """
        worker = Worker(f"tokamac-engine-{model}", at_end=leave_thread)
        given_up = threading.Event()

        def tell(at: LoadProgress) -> None:
            if given_up.is_set():
                raise EngineClosedError("loading was interrupted", "Load it again.")
            if progress is not None:
                progress(at)

        def work() -> "Core":
            from tokamac.engine.loading import load

            return load(model, kv=kv, prompt_cache=prompt_cache, dtype=dtype, progress=tell)

        try:
            return cls(worker, worker.call(work))
        except BaseException:
            # An interrupted load ends at its next tensor. The process must not exit before: MLX would abort it.
            given_up.set()
            worker.leave()
            atexit.register(worker.close)
            raise

    @property
    def spec(self) -> "ModelSpec":
        """The shape of the model: layers, parameters, bytes, context length."""
        return self._core.spec

    @property
    def tokenizer(self) -> "Tokenizer":
        """Text to ids and back."""
        return self._core.runtime.tokenizer

    def chat(self, system: str | None = None, messages: Sequence[Message] = ()) -> Chat:
        """Return a conversation, new or continued from ``messages``."""
        return Chat(self, system, messages)

    def generate(self, prompt: Prompt, sampling: Sampling | None = None, *, continues: bool = False) -> Iterator[Event]:
        """Yield the events of a reply to token ids or to messages: PrefillProgress, TextChunk, at last Finished.

        continues: the messages end with a reply that was cut; its rest is generated. TextChunks are what is new, Finished holds
        all of the reply, and ``max_tokens`` counts what is new.
        Stop iterating, or close the iterator, to cancel; what was computed stays for reuse.
        Raises OptionError (empty prompt), ContextError (too long) and TemplateError, on the first step.
        """
        recorder = Recorder()
        recorder.accept()
        yield from self._stream_from(
            lambda stream: self._answer(list(prompt), sampling or Sampling(), recorder, stream, continues)
        )

    def cancel(self) -> None:
        """End the reply in progress and those that wait, from any thread: readers get Finished with reason "cancelled"."""
        with self._lock:
            for stream in self._streams:
                stream.cancel()

    def live(self) -> Live | None:
        """Return what is measured of the reply in progress, or None when there is none."""
        current = self._live
        return current() if current is not None else None

    def logprobs(self, tokens: Sequence[int], chunk: int | None = None) -> "mx.array":
        """Return (n, vocabulary) float32: row i is the model's log-probability of what follows token i.

        Computed through the engine's own prefill and KV cache, ``chunk`` tokens at a time (None: the engine chooses).
        """
        ids = list(tokens)
        if not ids or (chunk is not None and chunk < 1):
            raise OptionError("logprobs needs at least one token, and chunks of at least one", "Check the arguments.")
        return self._worker.call(lambda: self._core.logprobs(ids, chunk))

    def compare_kv(
        self,
        tokens: Sequence[int],
        bits: Sequence[tuple[int, int]],
        kv: KVSpec = KVSpec(),  # noqa: B008  # frozen
        *,
        depths: Sequence[int] = (128, 1024, 4096),
    ) -> Iterator["TrialProgress | Trial"]:
        """Try KV settings on the loaded weights: ``kv``, with each of ``bits`` (keys, values) and with 16, the reference.

        Yields progress, and a Trial for each setting: bytes, how far it moves the log-probabilities of ``tokens``, decode rates at
        ``depths``. A depth that the model's context can't hold is reduced. Stop iterating, or close the iterator, to cancel.
        Raises OptionError where no cache of the model can be packed, or the window of ``kv`` can't be honoured.
        """
        ids, stopped = list(tokens), threading.Event()
        if not ids or not depths or min(depths) < 1:
            raise OptionError("a comparison needs a text, and depths of at least one token", "Check the arguments.")
        steps = self._worker.call(
            lambda: self._core.compare_kv(ids, bits=bits, kv=kv, depths=depths, cancelled=stopped.is_set)
        )
        yield from self._steps(steps, stopped)

    def warm(self, prompt: Prompt) -> Iterator[Event]:
        """Compute a prompt into the prompt cache without generating; yields PrefillProgress, cancelled like ``generate``."""
        yield from self._stream_from(lambda stream: self._core.warm(prompt, stream.is_cancelled))

    def warm_ahead(self, messages: Sequence[Message]) -> None:
        """Compute what is certain of a conversation whose last message, the user's, is still being written. Returns at once.

        Any request for tokens ends it, and so does another call; a price waits for it. What was computed stays in the prompt cache.
        """
        given = list(messages)
        if not given or given[-1].role != "user":
            raise OptionError("only a conversation that ends with the user's message can be warmed ahead", "Add one.")
        with self._lock:
            self._ahead.set()
            cancelled = self._ahead = threading.Event()
        self._worker.submit(lambda: self._core.warm_stable(given, cancelled.is_set))

    def price(self, prompt: Prompt, *, continues: bool = False) -> Price:
        """Return what a prompt would take until its first token: tokens to compute, bytes to read from disk, seconds.

        continues: as for ``generate``. Waits for a reply in progress. Raises what ``generate`` raises for that prompt.
        """
        given: Any = list(prompt)
        return self._worker.call(lambda: self._core.price(given, continues=continues))

    def cache_trouble(self) -> str | None:
        """Return what the user should know of the prompt cache on disk, once something went wrong there. Callable at any time."""
        return self._core.cache_trouble()

    def check_cache(self) -> Iterator["Check"]:
        """Compute what is stored on disk for this model again, and yield how far its logits are from the stored ones'."""
        stopped = threading.Event()
        steps = self._worker.call(lambda: self._core.check_cache(stopped.is_set))
        yield from self._steps(steps, stopped)

    def limits(self, context: int) -> "Limits":
        """Return what this machine allows for decoding at a context of so many tokens."""
        return self._worker.call(lambda: self._core.limits(context))

    def predict(self, prompt: int, context: int | None = None, *, cached: int = 0) -> "Prediction":
        """Return both phases of a reply: reading ``prompt`` tokens, ``cached`` of them there already, and decoding at ``context``.

        context: tokens in the middle of the reply; None is the prompt's. Ceilings, expected seconds, which side of the ridge.
        """
        if prompt < 1 or not 0 <= cached < prompt or (context is not None and context < 1):
            raise OptionError("a prediction needs a prompt, and part of it left to compute", "Check the arguments.")
        return self._worker.call(lambda: self._core.predict(prompt, context or prompt, cached))

    def measure(self) -> None:
        """Measure this machine's pace with the model now (a few seconds, once), where nothing published knows it.

        Idle time does the same by itself. Until then ``expected_tps`` is None.
        """
        self._worker.call(self._core.measure)

    def between(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, run on the engine's thread, which alone may touch MLX, between two requests.

        For short work: the next request waits for it.
        """
        return self._worker.call(work)

    def memory(self) -> "Memory":
        """Return what is used now, and what there is, in bytes."""
        return self._worker.call(self._core.memory)

    def close(self) -> None:
        """End all replies (their readers get EngineClosedError), free the model and stop the thread. Safe to call again."""
        atexit.unregister(self.close)
        with self._lock:
            self._ahead.set()
        with contextlib.suppress(EngineClosedError):  # by an earlier call
            self._worker.submit(self._core.close)
        self._worker.leave()
        with self._lock:
            for stream in self._streams:
                stream.close()
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _steps(self, steps: Generator[T, None, None], stopped: threading.Event) -> Iterator[T]:
        """Run a generator on the engine's thread, a step at a time, and yield its values on this one."""
        try:
            while (step := self._worker.call(lambda: next(steps, None))) is not None:
                yield step
        finally:
            stopped.set()
            with contextlib.suppress(EngineClosedError):
                self._worker.submit(steps.close)  # on the thread that runs it

    def _stream_from(self, source: Callable[[Stream], Iterator[Event]]) -> Iterator[Event]:
        """Run ``source`` on the engine's thread and yield its events on this one."""
        stream = Stream()
        with self._lock:
            self._ahead.set()
            self._streams.append(stream)
        try:
            job = self._worker.submit(lambda: self._pump(source, stream))
            try:
                yield from stream.read()
            finally:
                stream.abandon()
                job.cancel()
        finally:
            with self._lock:
                self._streams.remove(stream)

    def _pump(self, source: Callable[[Stream], Iterator[Event]], stream: Stream) -> None:
        if stream.is_abandoned():
            return
        try:
            with contextlib.closing(source(stream)) as events:  # type: ignore[type-var]
                for event in events:
                    if stream.is_abandoned():
                        break
                    stream.put(event)
            stream.end()
        except BaseException as error:
            stream.end(error)
        finally:
            self._live = None

    def _answer(
        self, prompt: Any, sampling: Sampling, recorder: Recorder, stream: Stream, continues: bool
    ) -> Iterator[Event]:
        reply = self._core.reply(prompt, sampling, recorder, stream.is_cancelled, continues=continues)
        self._live = reply.live
        yield from reply.events()
