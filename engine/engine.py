"""The engine: a loaded model on a thread of its own, and everything a program may ask of it."""

import atexit
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from .chat import (
    Chat,
    given_bits,
    given_count,
    given_ids,
    given_limit,
    given_messages,
    given_prompt,
    given_question,
    given_sampling,
    given_template,
)
from .device import cannot_import, check_backends, installed_backends, leave_thread
from .errors import EngineClosedError, OptionError, TokamacError
from .events import (
    Event,
    Failed,
    Finished,
    Live,
    LoadProgress,
    MemoryPressure,
    Message,
    PrefillProgress,
    Price,
    TextChunk,
    TokenLogprob,
)
from .files import expanded
from .metrics import Recorder
from .options import (
    PARALLEL,
    KVBits,
    KVSpec,
    LoadRequest,
    Nodes,
    PromptCacheSpec,
    Sampling,
    Speculation,
    TemplateOptions,
    ToolSpec,
    sample_of,
)
from .perf.memory import check_address_space
from .schedule.many import ManyReplies
from .schedule.policy import Pace
from .schedule.schedule import ReplyEvents
from .schedule.stream import EventStream, ReplyHandle, ReplyStream
from .worker import ReplyScheduler, TextlessReply, Worker

if TYPE_CHECKING:
    import mlx.core as mx

    from .distributed.team import Team
    from .kv.divergence import Trial, TrialProgress
    from .passes.log import PassLog
    from .passes.tokens import PromptText, StepTokens
    from .perf.memory import Memory
    from .perf.roofline import Limits, Prediction
    from .prompt_cache.cache import Check
    from .prompt_cache.exchange import Exchanged
    from .reply import ReplyTask
    from .runner import ModelSpec, Runner
    from .scoring import Perplexity
    from .text.tokenizer import Tokenizer


T = TypeVar("T")
Prompt = Sequence[int] | Sequence[Message]
GivenTool = ToolSpec | Mapping[str, Any]


class Engine:
    """A loaded model. Its methods may be called from any thread; MLX is touched by one thread alone.

    What that thread must do waits for a reply in progress: ``price``, ``logprobs``, ``memory``, ``measure``, ``between``,
    ``compare_kv``, ``check_cache``, and another reply. Asked for in the loop that reads the reply, all but another reply come
    after its next event; another reply comes once the first is some way ahead of its reader: then that one rests until it is read
    on, so nobody waits for a reader who has paused. All else, like ``limits``, ``predict``, ``live`` and ``cancel``, returns at
    once.

    Use as a context manager, or call ``close``. One that nobody refers to any more closes itself.
    """

    def __init__(self, worker: Worker, runner: "Runner") -> None:
        self._worker = worker
        self._runner = runner
        worker.when_idle = runner.idle
        self._team: Team | None = None
        self._replies = ReplyScheduler(worker)
        self._replies.schedule.decode = runner.decode
        self._replies.schedule.width = runner.parallel
        # None of these refers to the engine, so it can go away. The process must not end before its thread: MLX would abort it.
        self._at_exit = partial(self._replies.close, runner.close)
        self._collected = weakref.finalize(self, self._replies.close, runner.close, wait=False)
        self._collected.atexit = False
        atexit.register(self._at_exit)

    @classmethod
    def load(
        cls,
        model: str | Path = "guide",
        *,
        kv: KVSpec = KVSpec(),  # noqa: B008  # frozen
        prompt_cache: PromptCacheSpec | None = PromptCacheSpec(),  # noqa: B008  # frozen
        dtype: str | None = None,
        memory: int | None = None,
        unchecked: bool = False,
        adapter: str | Path | None = None,
        parallel: int = PARALLEL,
        speculation: Speculation | None = Speculation(),  # noqa: B008  # frozen
        cpu_exact: bool = False,
        nodes: Nodes | None = None,
        progress: Callable[[LoadProgress], None] | None = None,
    ) -> Self:
        """Load a model; what is computed of prompts is kept in memory and **on disk**, unless ``prompt_cache`` says otherwise.

        model: a folder, a Hugging Face id (downloaded when it is not on disk), or "guide". prompt_cache: by default, prompts of 256
        tokens and more are written to the user's cache folder, keys and values as well as the tokens themselves, readable by that
        user alone. ``PromptCacheSpec(disk=False)`` keeps them in memory; None keeps nothing.

        kv: how keys and values are kept. dtype: of what is not packed; None
        takes the checkpoint's own on a GPU and float32 on a CPU. On a GPU that has TF32 (CUDA, Apple's from M5 on), MLX rounds
        factors of float32 products to 10 bits unless the process was started with MLX_ENABLE_TF32=0. memory: bytes that MLX's
        arrays of this process may take, 14_000_000_000 say, in place of the limit that the system sets (``Memory.budget``), also
        beyond it. unchecked: load a model although something of its config would be computed otherwise; ``spec.doubts`` and every
        ``Finished`` say what. adapter: a folder or a Hugging Face id of low-rank changes (LoRA or DoRA, of mlx-lm or
        PEFT) that are added to what the model's own weights compute. parallel: replies that are made at once at most; those in the
        background count apart. speculation: what guesses tokens, of which several are verified at a time while a reply is made
        alone; the text stays the same; a draft model is loaded beside; None guesses nothing. cpu_exact: on a CPU, nothing that
        packed weights are multiplied with is rounded, though it would cost the model little (``spec.rounding``). nodes: the
        processes, here or on other machines, that hold the model together; this one decides. Once one of them is gone, replies
        raise DeviceError, and this process can load nothing with nodes again. progress is called from another thread.
        Raises ModelError, DownloadError, OptionError or DeviceError.
        """
        _check_load(model, kv, prompt_cache, adapter, speculation, nodes)
        limit = None if memory is None else given_limit(memory)
        request = LoadRequest(
            model,
            kv=kv,
            prompt_cache=prompt_cache,
            dtype=dtype,
            memory=limit,
            unchecked=unchecked,
            adapter=adapter,
            parallel=given_count(parallel, "parallel", least=1),
            speculation=speculation,
            cpu_exact=cpu_exact,
        )
        if nodes is None:
            team = None
        else:
            from .distributed.team import join

            team = join(nodes)
        worker = Worker(f"tokamac-engine-{model}", at_end=leave_thread)
        given_up = threading.Event()

        def tell(at: LoadProgress) -> None:
            if given_up.is_set():
                raise EngineClosedError("loading was interrupted", "Load it again.")
            if progress is not None:
                progress(at)

        work = partial(_load, request, tell, team, nodes)
        try:
            if team is None:
                return cls(worker, worker.call(work))
            engine = cls(worker, team.guarding(worker.submit(work)))
            engine._team = team
            team.when_lost = [engine._replies.fail]
            team.stuck_s = engine._replies.schedule.stuck_s
            return engine
        except BaseException:
            # An interrupted load ends at its next tensor. The process must not exit before: MLX would abort it.
            given_up.set()
            worker.leave()
            atexit.register(worker.close)
            raise

    @property
    def spec(self) -> "ModelSpec":
        """The shape of the model: layers, parameters, bytes, context length."""
        return self._runner.spec

    @property
    def tokenizer(self) -> "Tokenizer":
        """Text to ids and back."""
        return self._runner.runtime.tokenizer

    def chat(
        self,
        system: str | None = None,
        messages: Sequence[Message] = (),
        *,
        template: TemplateOptions | None = None,
        tools: Iterable[GivenTool] = (),
    ) -> Chat:
        """Return a conversation, new or continued from ``messages``. template: what the chat template is told in all of it.

        tools: what the model may call. ``Finished.tool_calls`` are the calls of a reply; ``Chat.send_results`` answers them.
        """
        return Chat(self, system, messages, given_template(template, tools))

    def ask(
        self,
        prompt: str | Prompt,
        sampling: Sampling | None = None,
        *,
        system: str | None = None,
        template: TemplateOptions | None = None,
        tools: Iterable[GivenTool] = (),
    ) -> Finished:
        """Return the whole reply to a text, to messages or to token ids: ``.text``, ``.thinking``, ``.reason``, ``.metrics``.

        Its ``ids`` and ``logprobs`` are those of all tokens of the reply. system: a system prompt, for a text or messages without
        one. template, tools: as for ``generate``. ``cancel`` ends it from another thread, with reason "cancelled". Raises what
        ``generate`` raises.
        """
        ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        # An interrupt leaves nothing running, though its traceback holds on to this frame.
        with closing(self.generate(given_question(prompt, system), sampling, template=template, tools=tools)) as events:
            for event in events:
                if isinstance(event, TextChunk | Finished):
                    ids.extend(event.ids)
                    logprobs.extend(event.logprobs)
                if isinstance(event, Finished):
                    end = event
        return replace(end, ids=tuple(ids), logprobs=tuple(logprobs))

    def generate_async(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        continues: bool = False,
        template: TemplateOptions | None = None,
        tools: Iterable[GivenTool] = (),
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of ``generate`` to a task: ``async for event in engine.generate_async(prompt)``.

        Cancelling the task, or closing the iterator (``aclose``), ends the reply. The same as ``async for`` over ``generate``,
        ``chat.send`` or another of a chat's replies.
        """
        return aiter(self.generate(prompt, sampling, continues=continues, template=template, tools=tools))

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        continues: bool = False,
        template: TemplateOptions | None = None,
        tools: Iterable[GivenTool] = (),
        background: bool = False,
        kv_bits: KVBits | None = None,
    ) -> ReplyStream:
        """Yield the events of a reply to token ids or to messages: PrefillProgress, TextChunk, at last Finished.

        continues: the messages end with a reply that was cut; its rest is generated. TextChunks are what is new, Finished holds
        all of the reply, and ``max_tokens`` counts what is new. template: what the chat template is told beside the messages, and
        how long the model may think; what it can't be told, and anything but a budget for token ids, raises OptionError.
        tools: functions that the model may call, as ToolSpecs or as OpenAI's API writes them. A call's arguments are ToolCallDelta
        events while they are written, then a ToolCall, and ``Finished`` has all calls; a Message of role "tool" for each gives its
        result. OptionError where the model takes none.
        background: nobody waits for it: it takes a tenth of the time at most while others are asked for. kv_bits: of its keys and
        values, in place of those that the model was loaded with: nothing is taken from the prompt cache then, or kept there.
        OptionError where loading would raise it for them.
        Stop iterating, or close the iterator, to cancel; what was computed stays for reuse. ``cancel`` of what is returned ends
        this reply alone, from any thread; ``async for`` reads it without blocking an event loop.
        Raises OptionError (no prompt), ContextError (too long) and TemplateError, on the first step.
        """
        handle = ReplyHandle()
        told = template if tools == () else given_template(template, tools)
        return ReplyStream(
            self._generated(
                prompt, sampling, told, handle, continues=continues, background=background, kv_bits=kv_bits
            ),
            handle,
        )

    def generate_many(
        self,
        prompts: Iterable[str | Prompt],
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        template: TemplateOptions | None = None,
        background: bool = False,
    ) -> Generator[tuple[int, int, "Event | Failed"], None, None]:
        """Yield (prompt's number, sample's number, event) of ``n`` replies to each prompt, as they come.

        Prompts are begun in their order, several at once (``Engine.load(parallel=…)``). Every reply ends with one Finished, or one
        Failed where it alone failed. With a seed, sample i has ``seed + i``; with ``n`` above 1 the prompt is read once, unless
        there is no prompt cache. prompts: texts, messages or token ids. Stop iterating, or close the iterator, to end all. Raises
        OptionError.
        """
        given = [given_question(prompt, None) for prompt in prompts]
        how, told, samples = given_sampling(sampling), given_template(template), given_count(n, "n", least=1)

        def ask(stream: EventStream, prompt: int, sample: int) -> None:
            recorder = Recorder()
            recorder.accept()
            own = sample_of(how, sample)

            def answer(stream: EventStream) -> "ReplyTask":
                return self._runner.reply(
                    given[prompt], own, recorder, stream.is_cancelled, template=told, background=background
                )

            self._replies.open_reply(answer, stream, background=background)

        yield from ManyReplies(range(len(given)), samples, ask, self._runner.parallel).events()

    def _generated(
        self,
        prompt: Prompt,
        sampling: Sampling | None,
        template: TemplateOptions | None,
        handle: ReplyHandle,
        *,
        continues: bool,
        background: bool,
        kv_bits: KVBits | None,
    ) -> Generator[Event, None, None]:
        recorder = Recorder()
        recorder.accept()
        given, how, told = given_prompt(prompt), given_sampling(sampling), given_template(template)
        bits = None if kv_bits is None else given_bits(kv_bits)

        def answer(stream: EventStream) -> "ReplyTask":
            return self._runner.reply(
                given,
                how,
                recorder,
                stream.is_cancelled,
                continues=continues,
                template=told,
                background=background,
                kv_bits=bits,
            )

        yield from self._replies.stream(answer, opened=handle.attach, background=background)

    def cancel(self) -> None:
        """End the reply in progress and those that wait, from any thread: readers get Finished with reason "cancelled"."""
        self._replies.cancel()

    def live(self) -> Live | None:
        """Return what is measured of the reply in progress, or None when there is none."""
        current = self._replies.live
        return current() if current is not None else None

    def logprobs(self, tokens: Sequence[int], chunk: int | None = None) -> "mx.array":
        """Return (n, vocabulary) float32: row i is the model's log-probability of what follows token i.

        Computed through the engine's own prefill and KV cache, ``chunk`` tokens at a time (None: the engine chooses). Waits for a
        reply in progress. Raises OptionError for what are no token ids, ContextError where they do not fit the context, and
        MemoryLimitError where the rows would not fit the memory.
        """
        ids = given_ids(tokens, "scoring")
        size = None if chunk is None else given_count(chunk, "chunk", least=1)
        return self._replies.call(lambda: self._runner.logprobs(ids, size))

    def look_again(
        self,
        prompt: Sequence[Message],
        reply: Message,
        *,
        passes: "PassLog | None" = None,
        prompt_tokens: int | None = None,
        cached_tokens: int = 0,
        template: TemplateOptions | None = None,
    ) -> Generator["PrefillProgress | MemoryPressure | PromptText | StepTokens", None, None]:
        """Compute again how likely the tokens of a reply were, and which others were likely in their places.

        Yields progress, once the prompt's text, and the reply's tokens in order, some at a time. prompt: the messages that it
        answers. passes: its ``Finished.passes``; without it the tokens are those that its text has now. prompt_tokens,
        cached_tokens: of its metrics. Costs a pass over the reply, and over the prompt as far as the prompt cache does not hold it;
        cancelled like ``generate``. Raises what ``generate`` raises for that prompt, and PassLogError.
        """
        from .passes.likely import ReplyQuestion
        from .passes.walk import ReplyWalk

        told, walk = given_template(template), ReplyWalk(prompt_tokens or 0, cached_tokens, passes)
        asked = ReplyQuestion(tuple(given_messages(prompt)), reply, walk.timed.ids, prompt_tokens, walk.begins)
        found: deque[PromptText | StepTokens] = deque()
        events = self._replies.stream(
            lambda stream: TextlessReply(
                lambda pace: self._runner.look_again(asked, told, stream.is_cancelled, pace, found.append)
            )
        )
        with closing(events):
            for event in events:
                while found:
                    yield found.popleft()
                if isinstance(event, PrefillProgress | MemoryPressure):
                    yield event
        yield from found

    def perplexity(
        self,
        text: str | Sequence[int],
        *,
        window: int | None = None,
        stride: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> "Perplexity":
        """Return the perplexity of a text of any length, or of token ids, read in windows through the engine's own KV cache.

        Args:
            text: a text, each window of which begins with what the tokenizer puts before every text; of ids, if they do.
            window: tokens read at once; None is 2,048, or the context where that is shorter.
            stride: tokens from one window's beginning to the next one's; None is half a window. Each token counts once.
            progress: told tokens read, and all, on this thread.

        Each window waits for a reply in progress. Raises OptionError, and ContextError for a window that the context can't hold.
        """
        from .scoring import PerplexityProgress

        given = text if isinstance(text, str) else given_ids(text, "perplexity")
        size = None if window is None else given_count(window, "window", least=2)
        step = None if stride is None else given_count(stride, "stride", least=1)
        steps = self._replies.steps(lambda stopped: self._runner.perplexity(given, size, step, stopped.is_set))
        with closing(steps):
            for at in steps:
                if not isinstance(at, PerplexityProgress):
                    return at
                if progress is not None:
                    progress(at.done, at.total)
        raise EngineClosedError("the engine is closed", "Load it again with Engine.load.")

    def compare_kv(
        self,
        tokens: Sequence[int],
        bits: Sequence[KVBits],
        kv: KVSpec = KVSpec(),  # noqa: B008  # frozen
        *,
        depths: Sequence[int] = (128, 1024, 4096),
    ) -> Generator["TrialProgress | Trial", None, None]:
        """Try KV settings on the loaded weights: ``kv``, with each of ``bits`` (keys, values) and with 16, the reference.

        Yields progress, and a Trial for each setting: bytes, how far it moves the log-probabilities of ``tokens``, decode rates at
        ``depths``. A depth that the model's context can't hold is reduced. Stop iterating, or close the iterator, to cancel.
        Each step waits for a reply in progress.
        Raises OptionError where no cache of the model can be packed, or the window of ``kv`` can't be honoured; ContextError for
        more tokens than the model's context holds.
        """
        ids = given_ids(tokens, "a comparison")
        if not depths or min(depths) < 1:
            raise OptionError("a comparison needs depths of at least one token", "Check the arguments.")
        yield from self._replies.steps(
            lambda stopped: self._runner.compare_kv(ids, bits=bits, kv=kv, depths=depths, cancelled=stopped.is_set)
        )

    def warm(self, prompt: Prompt, *, template: TemplateOptions | None = None) -> Generator[Event, None, None]:
        """Compute a prompt into the prompt cache without generating; yields PrefillProgress, cancelled like ``generate``."""
        given, told = given_prompt(prompt), given_template(template)
        yield from self._replies.stream(
            lambda stream: TextlessReply(
                lambda pace: self._runner.warm(given, stream.is_cancelled, pace, template=told)
            )
        )

    def export_prompt(
        self, prompt: Prompt, file: str | Path, *, goes_on: bool = False
    ) -> Generator["Event | Exchanged", None, None]:
        """Compute a prompt, or take it from the prompt cache, and write its keys and values to ``file``, which must not be there.

        Yields PrefillProgress, at last Exchanged once the file is whole; cancelled like ``generate``. goes_on: of messages, what is
        certain however the last of them, the user's, goes on. Raises what ``warm`` raises; OptionError where it can't be written.
        """
        given, path = given_prompt(prompt), expanded(file)
        done: list[Exchanged] = []
        yield from self._replies.stream(
            lambda stream: TextlessReply(
                lambda pace: self._runner.export_prompt(
                    given, path, stream.is_cancelled, pace, done.append, goes_on=goes_on
                )
            )
        )
        yield from done

    def import_prompt(self, file: str | Path) -> "Exchanged":
        """Put a computed prompt that ``export_prompt`` wrote into the prompt cache on disk, all of it or nothing.

        It must have been computed by this very model, adapter, KV settings and versions. All of the file is checked first; what
        its numbers say no check can tell, so take one only from whom you would take a model. Raises TokamacError.
        """
        path = expanded(file)
        return self._replies.call(lambda: self._runner.import_prompt(path))

    def warm_ahead(
        self,
        messages: Sequence[Message],
        *,
        template: TemplateOptions | None = None,
        then: Callable[[Price | None], None] = lambda _: None,
    ) -> ReplyHandle:
        """Compute what is certain of a conversation whose last message, the user's, is still being written. Returns at once.

        It runs in the background, as a reply may: in a tenth of the time at most while somebody waits for something. It ends once
        a reply needs its memory, or reads the same, and when what is returned is cancelled; what was computed stays in the prompt
        cache. then: called at the end, on the engine's thread, with what a reply would take now; None where the computing was ended
        early, or the conversation can't be sent. Raises OptionError where the last message is not the user's.
        """
        given = given_messages(messages)
        if not given or given[-1].role != "user":
            raise OptionError("only a conversation that ends with the user's message can be warmed ahead", "Add one.")
        told, runner = given_template(template), self._runner
        stream, handle = EventStream(), ReplyHandle()
        handle.attach(stream)

        def events(pace: Pace) -> ReplyEvents:
            price = None
            try:
                price = yield from runner.warm_stable(given, stream.is_cancelled, pace, told)
            finally:
                then(price)

        self._replies.begin(lambda _: TextlessReply(events), stream, background=True)
        return handle

    def price(self, prompt: Prompt, *, continues: bool = False, template: TemplateOptions | None = None) -> Price:
        """Return what a prompt would take until its first token: tokens to compute, bytes to read from disk, seconds.

        continues, template: as for ``generate``. Waits for a reply in progress. Raises what ``generate`` raises for that prompt.
        """
        given, told = given_prompt(prompt), given_template(template)
        return self._replies.call(lambda: self._runner.price(given, told, continues=continues))

    def cache_trouble(self) -> str | None:
        """Return what the user should know of the prompt cache on disk, once something went wrong there. Callable at any time."""
        return self._runner.cache_trouble()

    def check_cache(self) -> Generator["Check", None, None]:
        """Compute what is stored on disk for this model again, and yield how far its logits are from the stored ones'.

        Each step waits for a reply in progress.
        """
        yield from self._replies.steps(lambda stopped: self._runner.check_cache(stopped.is_set))

    def limits(self, context: int) -> "Limits":
        """Return what this machine allows for decoding at a context of so many tokens. Arithmetic: waits for nothing."""
        return self._runner.runtime.limits(given_count(context, "context", least=0))

    def predict(self, prompt: int, context: int | None = None, *, cached: int = 0, batch: int = 1) -> "Prediction":
        """Return both phases of a reply: reading ``prompt`` tokens, ``cached`` of them there already, and decoding at ``context``.

        context: tokens in the middle of the reply; None is the prompt's. batch: replies that are decoded together; decode rates
        are of all of them. Ceilings, expected seconds, which side of the ridge. Arithmetic: waits for nothing.
        """
        tokens, known = given_count(prompt, "prompt", least=1), given_count(cached, "cached", least=0)
        if known >= tokens:
            raise OptionError(
                f"{known} tokens of a prompt of {tokens} can't be cached", "The last is always computed: give fewer."
            )
        at = tokens if context is None else given_count(context, "context", least=1)
        together = given_count(batch, "batch", least=1)
        return self._runner.runtime.predict(tokens, at, known, together)

    def measure(self) -> None:
        """Measure this machine's latency with the model now (a few seconds, once), where nothing published knows it.

        Idle time does the same by itself. Until then ``expected_tps`` is None. Waits for a reply in progress.
        """
        self._replies.call(self._runner.measure, alone=True)

    def call_when_measured(self, act: Callable[[], None]) -> None:
        """Have ``act`` called on the engine's thread whenever idle time has told more of the machine; it must return at once."""
        self._runner.call_when_measured(act)

    def call_when_lost(self, act: Callable[[TokamacError], None]) -> None:
        """Have ``act`` called by some thread, with the reason, once one of the nodes is gone; without nodes it never is."""
        if self._team is not None:
            self._team.when_lost.append(act)

    def between(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, run on the engine's thread, which alone may touch MLX, between two requests.

        For short work: the next request waits for it. Asked for in the loop that reads a reply, it runs between two of its events.
        """
        return self._replies.call(work)

    def memory(self) -> "Memory":
        """Return what is used now, and what there is, in bytes. Waits for a reply in progress.

        Earlier prompts count as used: they stay in memory for reuse, so that this grows from prompt to prompt until they take
        ``PromptCacheSpec.memory_bytes``, a tenth of the budget where nothing else was set.
        """
        return self._replies.call(self._runner.memory)

    def limit_memory(self, memory: int | None) -> None:
        """Set the bytes that MLX's arrays of this process may take from now on; None: the system's limit.

        For programs that hold several engines: what is loaded stays, and is not checked again. Replies in progress keep to it from
        the next time that their caches grow.
        """
        self._replies.call(lambda: self._runner.limit_memory(memory))

    def close(self) -> None:
        """End all replies (their readers get EngineClosedError), free the model and stop the thread. Safe to call again."""
        self._collected.detach()
        self._replies.close(self._runner.close)
        atexit.unregister(self._at_exit)

    def __repr__(self) -> str:
        return f"<Engine {self.spec.name!r} on {self.spec.device}{', closed' if self._worker.closed else ''}>"

    def __enter__(self) -> Self:
        if self._worker.closed:
            raise EngineClosedError("the engine is closed", "Load it again with Engine.load.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _load(
    request: LoadRequest, tell: Callable[[LoadProgress], None], team: "Team | None", nodes: Nodes | None
) -> "Runner":
    """Load on the engine's thread, with the team's other nodes where there is one."""
    check_backends(installed_backends())
    check_address_space()
    try:
        from .loading import load
    except ImportError as error:
        if (explained := cannot_import(error)) is None:
            raise
        raise explained from error
    if team is not None and nodes is not None:
        from .distributed.leading import load_together

        return load_together(team, nodes.split, request, tell)
    return load(request, tell)


def _check_load(  # noqa: PLR0917
    model: object, kv: object, prompt_cache: object, adapter: object, speculation: object, nodes: object
) -> None:
    """Raise OptionError for arguments of the wrong kind, before anything is read."""
    if not isinstance(model, str | Path):
        raise OptionError(f"{model!r:.60} names no model", 'Give a folder, a Hugging Face id, or "guide".')
    if not isinstance(adapter, str | Path | None):
        raise OptionError(f"{adapter!r:.60} names no adapter", "Give a folder, or a Hugging Face id.")
    if not isinstance(kv, KVSpec):
        raise OptionError(f"kv is a {type(kv).__name__}", "Use KVSpec(), or leave it out.")
    if not isinstance(prompt_cache, PromptCacheSpec | None):
        raise OptionError(f"prompt_cache is a {type(prompt_cache).__name__}", "Use PromptCacheSpec(), or None for off.")
    if not isinstance(speculation, Speculation | None):
        raise OptionError(f"speculation is a {type(speculation).__name__}", "Use Speculation(), or None for off.")
    if not isinstance(nodes, Nodes | None):
        raise OptionError(f"nodes is a {type(nodes).__name__}", "Use Nodes(), or None for this process alone.")
