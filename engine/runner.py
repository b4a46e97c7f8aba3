"""What runs on the MLX thread: prompts become replies, log-probabilities, prices and warm caches.

In idle time it writes the prompt cache to disk and, where no published measurement knows this machine's speed with the loaded
model, measures it once. Until then the expected speed is unknown; a busy machine is not measured, for its times would be too long.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from .chunking import whole_chunks
from .device import DeviceKind
from .errors import (
    ContextError,
    DeviceError,
    EngineClosedError,
    MemoryLimitError,
    OptionError,
    TemplateError,
    computing,
)
from .events import Message, ModelNote, PrefillProgress, Price
from .files import FLUSH_S
from .generation import Generation, PrefillChunker, read_prompt
from .kv.divergence import Trial, TrialProgress
from .metrics import Recorder
from .model.rounding_cost import RoundingCost
from .options import NOTHING_TOLD, KVBits, KVSpec, Sampling, Speculation, TemplateOptions, Thinking
from .passes.likely import ReplyQuestion, look_again
from .passes.tokens import PromptText, StepTokens
from .perf.bandwidth import is_busy
from .perf.memory import Memory, snapshot
from .perf.timing import LatencyProfiler
from .prompt_cache.cache import Check, OwnCaches, check
from .prompt_cache.exchange import Exchanged, check_worth, export, take_in
from .prompt_cache.memory import CacheStore
from .reply import ReplyTask, Request, check_context
from .runtime import MachineSpeed, Runtime
from .schedule.admission import admitted
from .schedule.decoding import Decoded, Decoder, Lane
from .schedule.policy import Pace
from .schedule.schedule import ReplyEvents
from .scoring import (
    CHUNK,
    LOGPROBS_CHUNK,
    WINDOW,
    Perplexity,
    PerplexityProgress,
    check_scored,
    check_windows,
    compare,
    perplexity,
    score,
)
from .speculation.head_drafters import LoadedHeads
from .speculation.shared import LoadedDraft, SharedSpeculation
from .text.prompt import Prompt, Prompting, Turn
from .text.tokenizer import opening

QUIET_S = 3.0
"""Seconds without a request before measuring begins, so that the next prompt does not wait for it."""

AGAIN_S = 20.0
"""Seconds until a busy machine is looked at again."""

MOST_AGAIN_S = 1800.0
"""The same at most, where timing the bandwidth came to nothing and it is tried more and more rarely."""


class IdleProfiler:
    """Times the bandwidth where it is not trusted, then a part of a step at a time; hands over the latency once all are known.

    when_measured: called after the bandwidth was timed.
    """

    def __init__(
        self, machine: MachineSpeed, measuring: LatencyProfiler | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._machine = machine
        self._measuring = measuring
        self._steps: Iterator[None] | None = None
        self._clock = clock
        self._quiet_since: float | None = None
        self._ended = False
        self.when_measured: Callable[[], None] = lambda: None
        self._resting_until, self._again_s = 0.0, AGAIN_S
        self._take()
        if measuring is not None and not measuring.remaining:
            self._measuring = None

    def later(self) -> None:
        """A request has come: wait again, from when it is done."""
        self._quiet_since = None

    def idle(self) -> float | None:
        """Measure one part, if it is time; return after how many seconds to call again, or None when all is known."""
        if self._steps is None and not self._wanted:
            return None
        now = self._clock()
        if self._quiet_since is None:
            self._quiet_since = now  # idle again
        begins = max(self._quiet_since + QUIET_S, self._resting_until)
        if now < begins:
            return begins - now
        if self._steps is None:
            if is_busy():
                return AGAIN_S
            self._steps = self._work()
        try:
            self._step(self._steps)
        except (RuntimeError, ValueError):  # a product that MLX has no kernel for here: the latency stays unknown
            self._measuring = self._steps = None
        if self._steps is None and self._wanted:  # others came in between
            wait_s, self._again_s = self._again_s, min(2 * self._again_s, MOST_AGAIN_S)
            self._resting_until = now + wait_s
            return wait_s
        return None if self._steps is None else 0.0

    def finish(self) -> None:
        """Measure all that is missing now, busy or not: for a benchmark, which takes the machine for itself."""
        steps = self._steps or (self._work() if self._wanted else None)
        if steps is not None:
            self._steps = steps
            while self._steps is not None:
                self._step(steps)

    def end(self) -> None:
        """Measure no more, and let go of the model."""
        self._measuring = self._steps = None
        self._ended = True

    @property
    def _wanted(self) -> bool:
        return not self._ended and (self._measuring is not None or self._machine.wants_timing)

    def _work(self) -> Iterator[None]:
        if self._machine.wants_timing:
            yield from self._machine.time_bandwidth()
            self.when_measured()
        if self._measuring is not None:
            yield from self._measuring.steps()

    def _step(self, steps: Iterator[None]) -> None:
        for _ in steps:
            self._take()  # known after the first pass, and truer after each further part
            return
        self._measuring = self._steps = None  # known, or it can't be

    def _take(self) -> None:
        """Hand over the latency, if it is known."""
        if self._measuring is not None and (latency := self._measuring.latency()) is not None:
            self._machine.latency = latency
            chip = self._machine.chip
            if chip.fp16_tflops is None or chip.peak_source == "measured":
                self._machine.chip = replace(chip, fp16_tflops=self._measuring.peak_tflops, peak_source="measured")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a loaded model. Sizes in bytes.

    device: what it computes on. capacity: tokens that the context holds at once, as it was loaded; rolls: whether the oldest make
    room then.
    recommended: the sampling values its makers suggest. model_notes: what the user should know of it.
    advice: what to do about the installation, where that holds it up. memory_notes: what loading it cost other programs.
    doubts: what of its config is computed otherwise, where it was loaded unchecked.
    adapter: the one that changes it, as it was asked for; adapter_digest: of all its bytes.
    draft: the draft model beside it, as it was asked for; draft_bytes: of its weights.
    heads: its own heads that guess further tokens, in words; heads_bytes: of their weights, and at most of their keys and values.
    thinking_modes: what its chat template can be told of thinking; template_names: all that it reads beside the messages.
    takes_tools: whether tools can be defined in it, and the model's calls be read.
    rounding: what rounding rows on a CPU costs it, by which they are rounded or not; None where none can be, or none may.
    """

    name: str
    path: Path
    device: DeviceKind
    architecture: str
    layers: int
    parameters: int
    weight_bytes: int
    bits_per_weight: float | None
    context_length: int | None
    capacity: int | None
    rolls: bool
    vocabulary_size: int
    thinks: bool
    recommended: Sampling
    model_notes: tuple[ModelNote, ...] = ()
    advice: str | None = None
    memory_notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    adapter: str | None = None
    adapter_digest: str | None = None
    draft: str | None = None
    draft_bytes: int | None = None
    heads: str | None = None
    heads_bytes: int | None = None
    thinking_modes: tuple[Thinking, ...] = ()
    template_names: tuple[str, ...] = ()
    takes_tools: bool = False
    rounding: RoundingCost | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of it, in clauses."""
        return tuple(note.text for note in self.model_notes)


class Runner:
    """A loaded model and what may be done with it, on the MLX thread alone."""

    def __init__(
        self,
        runtime: Runtime,
        spec: ModelSpec,
        store: CacheStore,
        profiler: IdleProfiler,
        on_close: ExitStack,
        *,
        parallel: int = 1,
        speculation: Speculation | None = None,
        draft: LoadedDraft | None = None,
        heads: Sequence[LoadedHeads] = (),
    ) -> None:
        self.spec = spec
        self._speculation = (
            None
            if speculation is None
            else SharedSpeculation(speculation, remembers=store.keeps, draft=draft, heads=heads)
        )
        self.parallel = parallel
        self._decoder: Decoder | None = Decoder(runtime.model, ahead=runtime.ahead, operations=runtime.operations)
        self._runtime: Runtime | None = runtime
        self._store: CacheStore = store
        self._with_bits: dict[KVBits, Runtime] = {}
        self._on_close = on_close
        self._profiler = profiler

    @property
    def runtime(self) -> Runtime:
        """What requests share. Raises EngineClosedError after ``close``."""
        runtime = self._runtime
        if runtime is None:
            raise EngineClosedError("the engine is closed", "Load it again with Engine.load.")
        return runtime

    def _prompting(self, template: TemplateOptions = NOTHING_TOLD) -> Prompting:
        return Prompting(
            self.runtime, self.spec.vocabulary_size, checkpoints=self._store.needs_checkpoints, template=template
        )

    def reply(
        self,
        prompt: Prompt,
        sampling: Sampling,
        recorder: Recorder,
        cancelled: Callable[[], bool],
        *,
        continues: bool = False,
        template: TemplateOptions = NOTHING_TOLD,
        background: bool = False,
        kv_bits: KVBits | None = None,
    ) -> ReplyTask:
        """Return the reply to a prompt, ready to run; ``continues``: the rest of the reply that ends it; background: it gives way.

        kv_bits: of its keys and values, other than the model was loaded with.
        Raises OptionError, ContextError or TemplateError.
        """
        self._profiler.later()
        self.runtime.machine.refresh()
        resolved = sampling.resolved(self.spec.recommended)
        prompting = self._prompting(template)
        prompting.check_ids([*resolved.stop_token_ids, *(token for token, _ in resolved.logit_bias)])
        request = prompting.request(prompt, resolved, recorder, turn=_turn(continues))
        check_context(self.runtime, len(request.ids))
        request = prompting.held(request)
        runtime, store = self._of_bits(kv_bits)
        return ReplyTask(runtime, store, replace(request, background=background), cancelled, self._speculation)

    def _of_bits(self, kv_bits: KVBits | None) -> tuple[Runtime, CacheStore]:
        """Return what a reply shares with others, and where its caches come from: of other bits, they are its own."""
        runtime = self.runtime
        if kv_bits is None or kv_bits == (runtime.kv.key_bits, runtime.kv.value_bits):
            return runtime, self._store
        if kv_bits not in self._with_bits:
            self._with_bits[kv_bits] = runtime.with_kv_bits(*kv_bits)
        own = self._with_bits[kv_bits]
        return own, OwnCaches(own.new_caches, self._store)

    def decode(self, lanes: Sequence[Lane]) -> list[Decoded]:
        """Compute a token of each lane; return those that became known. Raises what MLX raises."""
        assert self._decoder is not None
        return self._decoder.step(lanes)

    def warm(
        self,
        prompt: Prompt,
        cancelled: Callable[[], bool],
        pace: Pace,
        *,
        template: TemplateOptions = NOTHING_TOLD,
    ) -> ReplyEvents:
        """Compute a prompt into the prompt cache, all but its last token."""
        yield from self._warmed(self._to_warm(prompt, template=template), cancelled, pace)

    def export_prompt(
        self,
        prompt: Prompt,
        file: Path,
        cancelled: Callable[[], bool],
        pace: Pace,
        then: Callable[[Exchanged], None],
        *,
        goes_on: bool,
    ) -> ReplyEvents:
        """Compute a prompt, or take it from the prompt cache, write its keys and values to a file, and tell ``then``.

        goes_on: of messages, all but what may follow inside the last of them; else with the assistant's turn opened.
        """
        request = self._to_warm(prompt, "closed" if goes_on else "opened")
        messages = [item for item in prompt if isinstance(item, Message)]
        if goes_on and messages:
            stable = self._prompting().stable(messages)
            request = replace(request, ids=[*stable, stable[-1]] if stable else [])
        check_worth(request.ids[:-1])
        yield from self._warmed(request, cancelled, pace)
        if not cancelled():
            then(export(self.runtime, self._store, file, request.ids[:-1], request.keep))

    def import_prompt(self, file: Path) -> Exchanged:
        """Put a computed prompt from a file into the prompt cache on disk. Raises TokamacError."""
        with computing():
            return take_in(self.runtime, self._store, file, self.spec.vocabulary_size)

    def _to_warm(
        self,
        prompt: Prompt,
        turn: Turn = "closed",
        template: TemplateOptions = NOTHING_TOLD,
    ) -> Request:
        if not self._store.keeps:
            raise OptionError("the prompt cache is off, so there is nothing to warm", "Load with a PromptCacheSpec.")
        return self._prompting(template).request(prompt, Sampling(), Recorder(), turn=turn)

    def _warmed(self, request: Request, cancelled: Callable[[], bool], pace: Pace) -> ReplyEvents:
        """Compute a request's prompt; one in the background ends where another reads the same."""
        runtime, ids = self.runtime, request.ids
        check_context(runtime, len(ids))
        lease, budget = yield from admitted(
            runtime,
            self._store,
            ids,
            request.keep,
            len(ids),
            pace=pace,
            cancelled=cancelled,
            background=request.background,
        )
        force = self.runtime.shape.device if budget.force_fused else None
        generation = Generation(self.runtime.model, lease.caches, lease.ids, force_fused=force)
        cached, total = len(lease.ids), len(ids)

        def ended() -> bool:
            return cancelled() or (request.background and self._store.is_coming(ids, request.keep, but=lease))

        with computing(), lease:
            lease.coming = () if request.background else ids
            if budget.pressure is not None:
                yield budget.pressure
            yield PrefillProgress(cached, total, cached)
            if ended():
                return
            recorder = request.recorder
            recorder.begin_prefill(total, cached)
            chunker = PrefillChunker(runtime.chunking, budget.chunk, cached, pace=pace, stopped=ended)
            yield from recorder.reading(
                read_prompt(chunker, generation, ids[cached:-1], recorder, total=total, cancelled=ended)
            )
            self._store.rates.saw_prefill(recorder.prefilled, recorder.read_s)
            if not ended():
                self._store.checkpoint(lease)

    def warm_stable(
        self, messages: Sequence[Message], cancelled: Callable[[], bool], pace: Pace, template: TemplateOptions
    ) -> Generator[object, None, Price | None]:
        """Compute what is certain of a conversation that goes on: all but what the rest of its last message may change.

        It gives way: to a reply that needs its memory, and to one that reads the same. Packed keys and values end with a whole
        chunk: so a prompt is cut alike, and its logits are the same, however much of it there was time for. Computes nothing where
        the prompt cache is off.

        Returns:
            What a reply would take now; None where it ended early, or the conversation can't be sent: that is said when it is.
        """
        store = self._store
        try:
            prompting = self._prompting(template)
            ids = prompting.stable(messages) if store.keeps and not cancelled() else []
            if self.runtime.kv.quantized:
                ids = ids[: whole_chunks(self.runtime.chunking, len(ids) - 1) + 1]
            keep = prompting.pinned(messages)

            def ended() -> bool:
                return cancelled() or pace.is_in_the_way

            known = store.known(ids, keep)
            if len(ids) > 1 and (known.tokens < len(ids) - 1 or known.disk_bytes):
                # The template was told what it is told when these ids were rendered.
                request = replace(self._to_warm(ids), keep=keep, background=True)
                yield from self._warmed(request, ended, pace)
            return None if ended() else self.price(messages, template)
        except (OptionError, TemplateError, ContextError, MemoryLimitError, DeviceError):
            return None

    def price(self, prompt: Prompt, template: TemplateOptions, *, continues: bool = False) -> Price:
        """Return what a prompt takes until its first token. Raises OptionError, ContextError or TemplateError."""
        request = self._prompting(template).request(prompt, Sampling(), Recorder(), turn=_turn(continues))
        check_context(self.runtime, len(request.ids))
        known, rates = self._store.known(request.ids, request.keep), self._store.rates
        tokens = len(request.ids) - known.tokens
        computing_s = rates.prefill_s(tokens)
        estimated = computing_s is None
        if estimated:
            computing_s = self.runtime.predict(len(request.ids), len(request.ids), len(request.ids) - tokens).ttft_s
        parts = [computing_s, rates.read_s(known.disk_bytes) if known.disk_bytes else 0.0]
        seconds = None if None in parts else sum(part for part in parts if part is not None)
        return Price(len(request.ids), tokens, known.disk_bytes, seconds, estimated and seconds is not None)

    def cache_trouble(self) -> str | None:
        """Return what the user should know of the prompt cache on disk; None while all is well."""
        return self._store.trouble

    def check_cache(self, cancelled: Callable[[], bool]) -> Generator[Check, None, None]:
        """Compute what is stored on disk for this model again, and compare."""
        yield from check(self.runtime, self._store, cancelled)

    def logprobs(self, ids: list[int], chunk: int | None) -> mx.array:
        """ids (n,) → (n, V) float32 log-probabilities of what follows each.

        Raises OptionError for ids that are none, ContextError and MemoryLimitError where they or their rows do not fit.
        """
        prompting = self._prompting()
        prompting.check_ids(ids)
        size = min(chunk or LOGPROBS_CHUNK, len(ids))
        check_scored(self.runtime, self._store, len(ids), size, self.spec.vocabulary_size)
        with computing():
            return score(self.runtime, ids, size, keep=prompting.pinned([]))

    def look_again(
        self,
        question: ReplyQuestion,
        template: TemplateOptions,
        cancelled: Callable[[], bool],
        pace: Pace,
        then: Callable[[PromptText | StepTokens], None],
    ) -> ReplyEvents:
        """Compute the probabilities of a reply's tokens again; see ``Engine.look_again``."""
        self._profiler.later()
        prompting = self._prompting(template)
        yield from look_again(self.runtime, self._store, prompting, question, cancelled=cancelled, pace=pace, then=then)

    def perplexity(
        self, given: str | list[int], window: int | None, stride: int | None, cancelled: Callable[[], bool]
    ) -> Generator[PerplexityProgress | Perplexity, None, None]:
        """Yield progress, and the perplexity of a text or of ids; see ``Engine.perplexity``."""
        prompting, tokenizer, longest = self._prompting(), self.runtime.tokenizer, self.runtime.longest
        before, ids = opening(tokenizer), tokenizer.encode(given) if isinstance(given, str) else given
        if not isinstance(given, str):  # as they are: with what stands before a text, or without
            before = before if given[: len(before)] == before else []
            ids = given[len(before) :]
        prompting.check_ids(ids)
        if len(before) + len(ids) < 2:
            raise OptionError("a text of fewer than two tokens has no perplexity", "Give a longer one.")
        size = min(WINDOW, longest or WINDOW) if window is None else window
        step = check_windows(size, stride, len(before))
        most = min(size, len(before) + len(ids))
        check_scored(self.runtime, self._store, most, min(CHUNK, most), self.spec.vocabulary_size, rows=2 * CHUNK)
        pinned = prompting.pinned([])
        with computing():
            yield from perplexity(self.runtime, ids, before, window=size, stride=step, keep=pinned, cancelled=cancelled)

    def compare_kv(
        self,
        ids: list[int],
        *,
        bits: Sequence[KVBits],
        kv: KVSpec,
        depths: Sequence[int],
        cancelled: Callable[[], bool],
    ) -> Generator[TrialProgress | Trial, None, None]:
        """Try other KV settings on the loaded weights; see ``scoring.compare``."""
        self._prompting().check_ids(ids)
        yield from compare(self.runtime, ids, bits=bits, base=kv, depths=depths, cancelled=cancelled)

    def call_when_measured(self, act: Callable[[], None]) -> None:
        """Have ``act`` called on this thread after the bandwidth was timed in idle time."""
        self._profiler.when_measured = act

    def measure(self) -> None:
        """Measure the machine's latency with this model now, where nothing published knows it."""
        self._profiler.finish()

    def idle(self) -> float | None:
        """Do a little of what can wait; return after how many seconds there may be more, or None."""
        if self._runtime is None:
            return None
        return min((wait for wait in (self._store.idle(), self._profiler.idle()) if wait is not None), default=None)

    def memory(self) -> Memory:
        """Return what is used and what there is."""
        return snapshot(self.runtime.memory_limit.nbytes)

    def limit_memory(self, memory: int | None) -> None:
        """Set the bytes that arrays may take from now on; None is the system's limit."""
        self.runtime.memory_limit.nbytes = memory

    def close(self) -> None:
        """Free what is held and put the device's limits back."""
        self._store.flush(FLUSH_S)
        self._store.clear()
        self._profiler.end()
        self._store = CacheStore(lambda _: [])  # the other knows the model
        self._runtime = self._decoder = None  # a closed engine may be kept, its weights may not
        self._with_bits.clear()
        self._speculation = None  # it knows conversations
        self._on_close.close()
        mx.clear_cache()


def _turn(continues: bool) -> Turn:
    return "continued" if continues else "opened"


SENSIBLE = 1e9
"""Above any number that a model suggests; JSON holds others, and Python's infinities."""


def recommended_sampling(generation_config: dict[str, object]) -> Sampling:
    """Return what a model's generation_config.json suggests; what it leaves out, or gets wrong, is None."""

    def number(name: str) -> float | None:
        value = generation_config.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        return float(value) if abs(value) < SENSIBLE else None  # NaN is not less, either

    greedy = generation_config.get("do_sample") is False
    suggested = Sampling()
    for change in (
        {"temperature": 0.0 if greedy else number("temperature")},
        {"top_p": number("top_p")},
        {"top_k": None if number("top_k") is None else int(number("top_k") or 0)},
        {"min_p": number("min_p")},
        {"repetition_penalty": number("repetition_penalty")},
    ):
        try:
            suggested = replace(suggested, **change)
        except OptionError:
            continue  # a nonsense suggestion is no suggestion
    return suggested
