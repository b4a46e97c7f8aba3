"""The engine: a loaded model on its own thread, and its public API."""

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from .chat import Chat
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
    ModelSpec,
    PrefillProgress,
    Price,
    TextChunk,
    TokenLogprob,
    given_ids,
    given_messages,
    given_prompt,
    given_question,
    given_text,
)
from .files import expanded
from .metrics import Recorder
from .options import (
    FULL_PACE,
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
    WiredMode,
    given_bits,
    given_count,
    given_limit,
    given_pace,
    given_sampling,
    given_template,
    given_wired,
    sample_of,
)
from .perf.hardware import PowerShare, on_battery, system
from .perf.memory import check_address_space, snapshot
from .schedule.schedule import Pace, Pacing, ReplyEvents
from .schedule.stream import EventStream, ManyReplies, ReplyHandle, ReplyStream
from .vision.picture import Picture
from .worker import ReplyScheduler, TextlessReply, Worker

if TYPE_CHECKING:
    import mlx.core as mx

    from .distributed.team import Team
    from .embedding import Embeddings
    from .events import PromptText, StepTokens
    from .lab.exchange import Exchanged
    from .lab.passes import PassLog
    from .lab.scoring import Perplexity, Trial, TrialProgress
    from .perf.memory import Memory
    from .perf.roofline import Limits, Prediction
    from .prompt_cache.cache import Check
    from .reply import ReplyTask
    from .runner import Runner
    from .text.tokenizer import Tokenizer
    from .vision.cost import PicturePrice


T = TypeVar("T")
P = ParamSpec("P")
Prompt = str | Sequence[int] | Sequence[Message]  # token ids, messages, or the text of a user's message
GivenTool = ToolSpec | Mapping[str, Any]


class Engine:
    """A loaded model. Methods are thread-safe; a single thread touches MLX.

    ``price``, ``logprobs``, ``memory``, ``measure``, ``between``, ``compare_kv``, ``check_cache`` and further
    replies wait for a reply in progress. Called in the loop that reads it, they run after its next event; another
    reply starts once the first is ahead of its reader, then rests until read on, so a paused reader blocks
    nobody. All else, like ``limits``, ``predict``, ``live``, ``cancel``, returns immediately.

    Use as a context manager, or call ``close``; garbage collection closes, too.
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
        wired: WiredMode = "auto",
        pace: int = FULL_PACE,
        pace_on_battery: int | None = None,
        nodes: Nodes | None = None,
        progress: Callable[[LoadProgress], None] | None = None,
    ) -> Self:
        """Load a model; computed prompts are kept in memory and **on disk** by default.

        Args:
            model: a folder, a GGUF file, a Hugging Face id (downloaded if missing), or "guide".
            prompt_cache: by default, prompts from 256 tokens are stored in the user's cache folder (tokens, keys and
                values, readable by the user only). ``PromptCacheSpec(disk=False)``: in memory only; None: not at all.
            dtype: of unpacked weights; None: the checkpoint's on a GPU, float32 on a CPU. With TF32 (CUDA, Apple from
                M5), MLX rounds float32 factors to 10 bits unless started with MLX_ENABLE_TF32=0.
            memory: limit of MLX's arrays in bytes, even above the system's (``Memory.budget``).
            unchecked: load despite unsupported config fields, listed in ``spec.doubts`` and every ``Finished``.
            adapter: folder or Hugging Face id of LoRA or DoRA weights (mlx-lm or PEFT).
            parallel: maximum replies in parallel, background ones apart.
            speculation: drafts tokens for single replies, without changing the text; None: off.
            cpu_exact: no rounding of packed products' inputs on a CPU (``spec.rounding``).
            wired: whether a Mac keeps the model's memory from being moved: while it works, "on" always, or "off".
            pace, pace_on_battery: see ``pace``.
            nodes: processes or machines that share the model. If one is lost, replies raise DeviceError, and this
                process can't load with nodes again.
            progress: called from another thread.

        Raises:
            ModelError, DownloadError, OptionError, DeviceError.
        """
        _check_load(model, kv, prompt_cache, adapter, speculation, nodes)
        limit = None if memory is None else given_limit(memory)
        for percent in (pace, FULL_PACE if pace_on_battery is None else pace_on_battery):
            given_pace(percent)
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
            wired=given_wired(wired),
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
            engine = cls(worker, worker.call(work) if team is None else team.guarding(worker.submit(work)))
            if team is not None:
                engine._team = team
                team.when_lost = [engine._replies.fail]
                team.stuck_s = engine._replies.schedule.stuck_s
            engine.pace(pace, pace_on_battery)
            return engine
        except BaseException:
            # An interrupted load ends at its next tensor. The process must not exit before: MLX would abort it.
            given_up.set()
            worker.leave()
            atexit.register(worker.close)
            raise

    @property
    def spec(self) -> ModelSpec:
        """The model's shape: layers, parameters, bytes, context length."""
        return self._runner.spec

    @property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer."""
        return self._runner.runtime.tokenizer

    def chat(
        self,
        system: str | None = None,
        messages: Sequence[Message] = (),
        *,
        template: TemplateOptions | None = None,
        tools: Iterable[GivenTool] = (),
    ) -> Chat:
        """Return a conversation, new or continued from ``messages``.

        tools: functions that the model may call; answer ``Finished.tool_calls`` by ``Chat.send_results``.
        """
        return Chat(self, system, messages, given_template(template, tools))

    def ask(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        system: str | None = None,
        template: TemplateOptions | None = None,
        tools: Iterable[GivenTool] = (),
    ) -> Finished:
        """Return the whole reply to a text, messages or token ids: ``.text``, ``.thinking``, ``.reason``, ``.metrics``.

        ``ids`` and ``logprobs`` cover all its tokens. system: for prompts without one. ``cancel`` from another thread
        ends it with reason "cancelled". Raises what ``generate`` raises.
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
        """``generate`` as an async iterator, like ``async for`` over ``generate`` or ``chat.send``.

        Cancelling the task or ``aclose`` ends the reply.
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
        """Yield a reply's events: PrefillProgress, TextChunk, finally Finished.

        Stop iterating or close the iterator to cancel, or call its ``cancel`` from any thread; the computed prompt
        stays cached. ``async for`` works, too.

        Args:
            continues: continue a cut reply at the end of the messages. TextChunks and ``max_tokens`` concern the new
                text, Finished the whole.
            template: chat template options and thinking budget; token ids accept only a budget.
            tools: ToolSpecs, or OpenAI's format. Calls arrive as ToolCallDelta, then ToolCall, and in ``Finished``;
                answer each by a Message of role "tool".
            background: at most a tenth of the time while others wait.
            kv_bits: replaces the loaded KV bits, without the prompt cache.

        Raises:
            OptionError: no prompt, or unsupported options, tools or kv_bits. On the first step, like all.
            ContextError: prompt too long.
            TemplateError
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
        prompts: Iterable[Prompt],
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        template: TemplateOptions | None = None,
        background: bool = False,
    ) -> Generator[tuple[int, int, "Event | Failed"], None, None]:
        """Yield (prompt index, sample index, event) of ``n`` replies to each prompt, as they come.

        Prompts start in order, in parallel (``Engine.load(parallel=…)``). Each reply ends with a Finished, or a
        Failed of its own. Sample i uses ``seed + i``; samples share the prefill through the prompt cache. Stop
        iterating to cancel all. Raises OptionError.
        """
        given = [given_question(prompt, None) for prompt in prompts]
        how, told, samples = given_sampling(sampling), given_template(template), given_count(n, "n", least=1)

        def ask(stream: EventStream, prompt: int, sample: int) -> None:
            recorder = Recorder()
            recorder.accept()
            request = self._runner.request(given[prompt], sample_of(how, sample), recorder, template=told)

            def answer(stream: EventStream) -> "ReplyTask":
                return self._runner.reply(request, stream.is_cancelled, background=background)

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
        stream = EventStream()
        handle.attach(stream)
        self._replies.expect(stream)
        try:
            # On this thread: a long prompt takes seconds to render and encode, and the engine's would make no token meanwhile.
            request = self._runner.request(given, how, recorder, continues=continues, template=told)

            def answer(stream: EventStream) -> "ReplyTask":
                return self._runner.reply(
                    request, stream.is_cancelled, background=background, kv_bits=bits, keeps_going=stream.keeps_going
                )

            self._replies.open_reply(answer, stream, background=background)
            while (batch := stream.next_batch()) is not None:
                yield from batch
        finally:
            stream.abandon()

    def cancel(self) -> None:
        """End running and waiting replies from any thread, with reason "cancelled"."""
        self._replies.cancel()

    def live(self) -> Live | None:
        """Return live metrics of the reply in progress, or None."""
        current = self._replies.live
        return current() if current is not None else None

    def logprobs(self, tokens: Sequence[int], chunk: int | None = None) -> "mx.array":
        """Return (n, vocabulary) float32: row i has the log-probabilities of what follows token i.

        Uses the engine's prefill and KV cache, ``chunk`` tokens at a time (None: automatic). Waits for a reply in
        progress. Raises OptionError for invalid ids, ContextError or MemoryLimitError for too many.
        """
        from .lab.scoring import logprobs

        ids = given_ids(tokens, "scoring")
        size = None if chunk is None else given_count(chunk, "chunk", least=1)
        return self.run(logprobs, ids, size)

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> "Embeddings":
        """Return a vector for each text: ``.vectors``, (texts, dimensions) float32, each of length 1.

        States are pooled as the model's sentence-transformers files say, with the dense layers after them. Without such
        files: the last token's where the tokenizer ends a text with a mark, else the mean.

        Args:
            prompt: name of one of the model's prompts, put before each text; None: its default, mostly none.
            dimensions: the first so many (of models trained for it), again of length 1; None: all.
            truncate: cut a text that is longer than the context.

        Runs beside replies, a chunk of a prompt at a time. Raises OptionError, ContextError, MemoryLimitError, ModelError.
        """
        from .embedding import embed

        given = [given_text(text, "a text to embed") for text in ([texts] if isinstance(texts, str) else texts)]
        if not given:
            raise OptionError("there is no text to embed", "Give one or more.")
        size = None if dimensions is None else given_count(dimensions, "dimensions", least=1)
        found: list[Embeddings] = []
        for _ in self._computed(embed, given, prompt, size, truncate=truncate, then=found.append):
            pass
        if not found:
            raise EngineClosedError("the embeddings were cancelled", "Ask again.")
        return found[0]

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
        """Recompute the likelihood of a reply's tokens, and their likely alternatives.

        Yields progress, the prompt's text once, and the tokens in order. Costs a pass over the reply and the uncached
        prompt. passes: ``Finished.passes``; without, the text is tokenized anew. prompt_tokens, cached_tokens: from
        its metrics. Raises PassLogError, and what ``generate`` raises.
        """
        from .lab.likely import ReplyQuestion, look_again
        from .lab.passes import ReplyWalk

        told, walk = given_template(template), ReplyWalk(prompt_tokens or 0, cached_tokens, passes)
        asked = ReplyQuestion(tuple(given_messages(prompt)), reply, walk.timed.ids, prompt_tokens, walk.begins)
        found: deque[PromptText | StepTokens] = deque()
        with closing(self._computed(look_again, asked, told, then=found.append)) as events:
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
        """Return the perplexity of a text or token ids of any length, in windows through the KV cache.

        Args:
            text: each window of a text begins with the tokenizer's prefix; of ids, if they do.
            window: tokens; None: 2,048, or a shorter context.
            stride: tokens between windows; None: half a window. Each token counts once.
            progress: called with tokens read and all, on this thread.

        Each window waits for a reply in progress. Raises OptionError, or ContextError for a too large window.
        """
        from .lab.scoring import PerplexityProgress, perplexity_of

        given = text if isinstance(text, str) else given_ids(text, "perplexity")
        size = None if window is None else given_count(window, "window", least=2)
        step = None if stride is None else given_count(stride, "stride", least=1)
        with closing(self._steps(perplexity_of, given, size, step)) as steps:
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
        """Compare ``kv`` at each of ``bits`` (keys, values) and at 16, the reference, on the loaded weights.

        Yields progress, and a Trial per setting: bytes, change of log-probabilities of ``tokens``, decode rates at
        ``depths`` (reduced to the context). Steps wait for a reply in progress; stop iterating to cancel. Raises
        OptionError where the cache can't be packed or windowed so, ContextError for too many tokens.
        """
        from .lab.scoring import compare

        ids = given_ids(tokens, "a comparison")
        if not depths or min(depths) < 1:
            raise OptionError("a comparison needs depths of at least one token", "Check the arguments.")
        yield from self._steps(compare, ids, bits=bits, base=kv, depths=depths)

    def warm(self, prompt: Prompt, *, template: TemplateOptions | None = None) -> Generator[Event, None, None]:
        """Prefill into the prompt cache; yields PrefillProgress, cancelled like ``generate``."""
        from .runner import cacheable, compute_prompt

        request = cacheable(self._runner, given_prompt(prompt), template=given_template(template))
        yield from self._computed(compute_prompt, request)

    def export_prompt(
        self, prompt: Prompt, file: str | Path, *, goes_on: bool = False
    ) -> Generator["Event | Exchanged", None, None]:
        """Prefill, or read from the prompt cache, and write keys and values to a new ``file``.

        Yields PrefillProgress, finally Exchanged; cancelled like ``generate``. goes_on: only the prefix that holds
        however the last user message continues. Raises what ``warm`` raises; OptionError where it can't be written.
        """
        from .lab.exchange import export_prompt

        given, path = given_prompt(prompt), expanded(file)
        done: list[Exchanged] = []
        yield from self._computed(export_prompt, given, path, then=done.append, goes_on=goes_on)
        yield from done

    def import_prompt(self, file: str | Path) -> "Exchanged":
        """Import ``export_prompt``'s file into the disk prompt cache, all or nothing.

        Requires the same model, adapter, KV settings and versions. The file is verified, but not its numbers: trust
        it as you would a model. Raises TokamacError.
        """
        from .lab.exchange import import_prompt

        return self.run(import_prompt, expanded(file))

    def warm_ahead(
        self,
        messages: Sequence[Message],
        *,
        template: TemplateOptions | None = None,
        then: Callable[[Price | None], None] = lambda _: None,
    ) -> ReplyHandle:
        """Prefill a conversation whose last user message is still being written, in the background.

        Uses at most a tenth of the time while others wait. Ends when a reply needs the memory or reads the same, or
        when the handle is cancelled; results stay cached. then: called on another thread with a reply's price,
        None if ended early or unsendable. Raises OptionError where the last message is not the user's.
        """
        from .runner import stable_prompt, warm_stable

        given = given_messages(messages)
        if not given or given[-1].role != "user":
            raise OptionError("only a conversation that ends with the user's message can be warmed ahead", "Add one.")
        told, runner = given_template(template), self._runner
        stream, handle = EventStream(), ReplyHandle()
        handle.attach(stream)

        def prepare() -> None:
            try:
                asked = stable_prompt(runner, given, told)

                def events(pace: Pace) -> ReplyEvents:
                    price = None
                    try:
                        price = yield from warm_stable(runner, asked, pace, cancelled=stream.is_cancelled)
                    finally:
                        then(price)

                self._replies.begin(lambda _: TextlessReply(events), stream, background=True)
            except BaseException as error:
                then(None)
                if not isinstance(error, TokamacError):  # which is reported when the conversation is sent
                    raise

        threading.Thread(target=prepare, name="warm", daemon=True).start()
        return handle

    def price(self, prompt: Prompt, *, continues: bool = False, template: TemplateOptions | None = None) -> Price:
        """Return a prompt's cost to first token: tokens to compute, bytes from disk, seconds.

        Waits for a reply in progress. Raises what ``generate`` raises for that prompt.
        """
        from .runner import price

        given, told = given_prompt(prompt), given_template(template)
        return self.run(price, self._runner.request(given, Sampling(), Recorder(), continues=continues, template=told))

    def picture_price(self, picture: "Picture | str | os.PathLike[str] | bytes") -> "PicturePrice":
        """Return the size a picture is seen at, its tokens and seconds. Waits for a reply. Raises PictureError."""
        from .runner import picture_price

        return self.run(picture_price, Picture.of(picture))

    def tokens(
        self, prompt: str | Sequence[Message], *, continues: bool = False, template: TemplateOptions | None = None
    ) -> list[int]:
        """Return a prompt's tokens; those of a text begin as the tokenizer begins texts. Works on this thread; doesn't wait.

        Raises OptionError or TemplateError, and ContextError for a prompt several times as long as the context.
        """
        return self._runner.prompting(given_template(template)).tokens(prompt, continues=continues)

    def cache_trouble(self) -> str | None:
        """Return a warning about the disk prompt cache, if any. Callable at any time."""
        return self._runner.store.trouble

    def check_cache(self) -> Generator["Check", None, None]:
        """Recompute stored prompts and yield how far logits differ. Steps wait for a reply in progress."""
        from .prompt_cache.cache import check

        yield from self._steps(check)

    def limits(self, context: int) -> "Limits":
        """Return this machine's decode limits at a context length. Arithmetic; doesn't wait."""
        return self._runner.runtime.limits(given_count(context, "context", least=0))

    def predict(self, prompt: int, context: int | None = None, *, cached: int = 0, batch: int = 1) -> "Prediction":
        """Predict a reply's prefill of ``prompt`` tokens, ``cached`` of them reused, and decode.

        context: tokens at the middle of the reply; None: the prompt's. batch: replies decoded together; rates are
        totals. Gives ceilings, expected seconds, side of the ridge. Arithmetic; doesn't wait.
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
        """Measure latency once (a few seconds) where none is published; idle time does so, too.

        Until then ``expected_tps`` is None. Waits for a reply in progress.
        """
        self._replies.call(self._runner.profiler.finish, alone=True)

    def call_when_measured(self, act: Callable[[], None]) -> None:
        """Call ``act`` on the engine's thread after idle measurements; it must return immediately."""
        self._runner.profiler.when_measured = act

    def call_when_lost(self, act: Callable[[TokamacError], None]) -> None:
        """Call ``act`` with the reason, on some thread, if a node is lost."""
        if self._team is not None:
            self._team.when_lost.append(act)

    def run(self, function: "Callable[Concatenate[Runner, P], T]", *args: P.args, **named: P.kwargs) -> T:
        """Run ``function(runner, *args)`` on the engine's thread, which owns the model, between requests."""
        return self._replies.call(lambda: function(self._runner, *args, **named))

    def _computed(self, function: Callable[..., ReplyEvents], *args: Any, **named: Any) -> Generator[Event, None, None]:
        """Yield the events of ``function(runner, *args, pace, cancelled=…)``, which computes a prompt."""
        return self._replies.stream(
            lambda stream: TextlessReply(partial(function, self._runner, *args, cancelled=stream.is_cancelled, **named))
        )

    def _steps(
        self, function: Callable[..., Generator[T, None, None]], *args: Any, **named: Any
    ) -> Generator[T, None, None]:
        """Yield what ``function(runner, *args, cancelled=…)`` does; each step waits for a reply in progress."""
        return self._replies.steps(lambda stopped: function(self._runner, *args, cancelled=stopped.is_set, **named))

    def between(self, work: Callable[[], T]) -> T:
        """Run short ``work`` on the engine's thread, which alone may touch MLX, and return its result.

        Runs between requests, or between two events of a reply if called in its loop.
        """
        return self._replies.call(work)

    def memory(self) -> "Memory":
        """Return used and available bytes. Waits for a reply in progress.

        Includes cached prompts, which grow up to ``PromptCacheSpec.memory_bytes``, by default a tenth of the budget.
        """
        return self.run(lambda runner: snapshot(runner.runtime.memory_limit.nbytes))

    def limit_memory(self, memory: int | None) -> None:
        """Limit MLX's arrays of this process, in bytes; None: the system's limit.

        For several engines: loaded models aren't rechecked; running replies obey from their caches' next growth.
        """
        self.run(lambda runner: setattr(runner.runtime.memory_limit, "nbytes", memory))

    def pace(self, percent: int, battery: int | None = None) -> None:
        """Let the device work ``percent`` of the time, and rest between steps.

        battery: the same on battery; None: no other. Raises OptionError.
        """
        given_pace(percent)
        whole = percent == FULL_PACE and (battery is None or given_pace(battery) == FULL_PACE)
        share = PowerShare(percent, battery, lambda: on_battery(system()))
        self._replies.pace(None if whole else Pacing(share, self._runner.settle))

    def close(self) -> None:
        """End all replies (readers get EngineClosedError), free the model, stop the thread. Repeatable."""
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
    check_backends(installed_backends())
    check_address_space()
    try:
        from .loading import load
    except ImportError as error:
        if (explained := cannot_import(error)) is None:
            raise
        raise explained from error
    if team is not None and nodes is not None:
        from .distributed.follower import load_together

        return load_together(team, nodes.split, request, tell)
    return load(request, tell)


def _check_load(  # noqa: PLR0917
    model: object, kv: object, prompt_cache: object, adapter: object, speculation: object, nodes: object
) -> None:
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
