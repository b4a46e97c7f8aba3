"""A loaded model on the MLX thread: replies, decode steps, idle work; prompts computed ahead, and their price.

What else is asked of a model are functions over a Runner, which Engine.run runs: lab/, perf/memory.py.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import mlx.core as mx

from .chunking import whole_chunks
from .errors import (
    ContextError,
    DeviceError,
    EngineClosedError,
    MemoryLimitError,
    OptionError,
    PictureError,
    computing,
)
from .events import Message, ModelSpec, PrefillProgress, Price
from .files import FLUSH_S
from .generation import Generation, PrefillChunker, read_prompt
from .metrics import SURE_TOKENS, Recorder, rate
from .options import NOTHING_TOLD, KVBits, Sampling, Speculation, TemplateOptions
from .perf.memory import Wiring
from .prompt_cache.cache import PromptCache
from .prompt_cache.misses import ReadPrompt, remember
from .reply import ReplyTask, Request, check_context
from .runtime import IdleProfiler, Runtime
from .schedule.admission import admitted
from .schedule.decoding import Decoded, Decoder, Lane
from .schedule.schedule import Pace, ReplyEvents
from .speculation.draft_model import LoadedDraft
from .speculation.head_drafters import LoadedHeads
from .speculation.speculator import SharedSpeculation
from .text.prompt import Prompt, Prompting, Turn
from .vision.cost import PicturePrice
from .vision.picture import Picture

if TYPE_CHECKING:
    from .embedding import Embedder


class Runner:
    """A loaded model. For the MLX thread alone."""

    def __init__(
        self,
        runtime: Runtime,
        spec: ModelSpec,
        store: PromptCache,
        profiler: IdleProfiler,
        on_close: ExitStack,
        *,
        wiring: Wiring,
        parallel: int = 1,
        speculation: Speculation | None = None,
        draft: LoadedDraft | None = None,
        heads: Sequence[LoadedHeads] = (),
    ) -> None:
        self.spec, self.store, self.profiler, self.wiring, self.parallel = spec, store, profiler, wiring, parallel
        self.speculation = (
            None
            if speculation is None
            else SharedSpeculation(speculation, remembers=store.keeps, draft=draft, heads=heads)
        )
        self._decoder: Decoder | None = Decoder(runtime.model, ahead=runtime.ahead, operations=runtime.operations)
        self._runtime: Runtime | None = runtime
        self._with_bits: dict[KVBits, Runtime] = {}
        self.embedder: Embedder | None = None  # made when a text is first embedded
        self._on_close = on_close

    @property
    def runtime(self) -> Runtime:
        """What requests share. Raises EngineClosedError after ``close``."""
        runtime = self._runtime
        if runtime is None:
            raise EngineClosedError("the engine is closed", "Load it again with Engine.load.")
        return runtime

    def prompting(self, template: TemplateOptions = NOTHING_TOLD) -> Prompting:
        """Raises OptionError for a model that writes nothing: its tokens attend to later ones."""
        if self.runtime.config.get("use_bidirectional_attention") is True:
            raise OptionError(f"{self.spec.name} makes embeddings and writes no text", "Load another model.")
        return Prompting(
            self.runtime, self.spec.vocabulary_size, checkpoints=self.store.needs_checkpoints, template=template
        )

    def request(
        self,
        prompt: Prompt,
        sampling: Sampling,
        recorder: Recorder,
        *,
        continues: bool = False,
        template: TemplateOptions = NOTHING_TOLD,
    ) -> Request:
        """Render and encode a prompt. Any thread. Raises OptionError, ContextError or TemplateError."""
        resolved = sampling.resolved(self.spec.recommended)
        prompting = self.prompting(template)
        prompting.check_ids([*resolved.stop_token_ids, *(token for token, _ in resolved.logit_bias)])
        request = prompting.request(prompt, resolved, recorder, turn="continued" if continues else "opened")
        check_context(self.runtime, len(request.ids))
        return prompting.held(request)

    def reply(
        self,
        request: Request,
        cancelled: Callable[[], bool],
        *,
        background: bool = False,
        kv_bits: KVBits | None = None,
        keeps_going: Callable[[], bool] = lambda: False,
    ) -> ReplyTask:
        """Return the reply to a request, ready to run. Raises OptionError."""
        self.profiler.later()
        self.wiring.begin()
        runtime = self.runtime
        if kv_bits is not None and kv_bits != (runtime.kv.key_bits, runtime.kv.value_bits):
            if kv_bits not in self._with_bits:
                self._with_bits[kv_bits] = runtime.with_kv_bits(*kv_bits)
            runtime = self._with_bits[kv_bits]
        own = None if runtime is self.runtime else runtime.new_caches
        request = replace(request, background=background, own_caches=own)
        return ReplyTask(runtime, self.store, request, cancelled, self.speculation, keeps_going=keeps_going)

    def decode(self, lanes: Sequence[Lane]) -> list[Decoded]:
        """Compute a token of each lane; return those that became known. Raises what MLX raises."""
        assert self._decoder is not None
        return self._decoder.step(lanes)

    def settle(self) -> None:
        """Wait for the device."""
        mx.synchronize()

    def idle(self) -> float | None:
        """Do a little of what can wait; return after how many seconds there may be more, or None."""
        if self._runtime is None:
            return None
        waits = (self.wiring.idle(), self.store.idle(), self.profiler.idle())
        return min((wait for wait in waits if wait is not None), default=None)

    def close(self) -> None:
        """Free what is held and put the device's limits back."""
        self.store.flush(FLUSH_S)
        self.store.clear()
        self.profiler.end()
        self.store = PromptCache(lambda _: [])  # the other knows the model
        self._runtime = self._decoder = None  # a closed engine may be kept, its weights may not
        self._with_bits.clear()
        self.embedder = None
        self.speculation = None  # it knows conversations
        self._on_close.close()
        mx.clear_cache()


def cacheable(
    runner: Runner, prompt: Prompt, turn: Turn = "closed", template: TemplateOptions = NOTHING_TOLD
) -> Request:
    """Return the request that computes a prompt. Any thread. Raises OptionError where the prompt cache is off."""
    if not runner.store.keeps:
        raise OptionError("the prompt cache is off, so there is nothing to warm", "Load with a PromptCacheSpec.")
    return runner.prompting(template).request(prompt, Sampling(), Recorder(), turn=turn)


def compute_prompt(runner: Runner, request: Request, pace: Pace, *, cancelled: Callable[[], bool]) -> ReplyEvents:
    """Compute a request's prompt; one in the background ends where another reads the same."""
    runtime, store, ids = runner.runtime, runner.store, request.ids
    runner.wiring.begin()
    check_context(runtime, len(ids))
    lease, budget = yield from admitted(
        runtime,
        store,
        ids,
        request.keep,
        len(ids),
        pace=pace,
        cancelled=cancelled,
        background=request.background,
        sight=request.sight,
    )
    force = runtime.shape.device if budget.force_fused else None
    generation = Generation(runtime.model, lease.caches, lease.ids, force_fused=force, sight=request.sight)
    cached, total = len(lease.ids), len(ids)

    def ended() -> bool:
        return cancelled() or (request.background and store.is_coming(ids, request.keep, but=lease))

    with computing(), lease:
        lease.coming = () if request.background else ids
        if budget.pressure is not None:
            yield budget.pressure
        yield PrefillProgress(cached, total, cached)
        if ended():
            return
        recorder = request.recorder
        recorder.begin_prefill(total, cached)
        chunker = PrefillChunker(runtime.chunking, budget.chunk, cached, pace=pace, stopped=ended, sight=request.sight)
        yield from recorder.reading(
            read_prompt(chunker, generation, ids[cached:-1], recorder, total=total, cancelled=ended)
        )
        store.rates.observe_prefill(recorder.prefilled, recorder.read_s)
        if not ended():
            store.checkpoint(lease)
        if not request.background:
            remember(store.recent, ReadPrompt.of(request, lease.ids))


@dataclass(frozen=True, slots=True)
class StablePrompt:
    """The part of a conversation that the rest of its last message can't change; and the request for a reply to it all.

    known: computed beforehand, None where the prompt cache is off.
    """

    known: Request | None
    reply: Request


def stable_prompt(runner: Runner, messages: Sequence[Message], template: TemplateOptions) -> StablePrompt:
    """Render and encode what ``warm_stable`` computes. Any thread. Raises as ``cacheable``."""
    # Packed keys and values end with a whole chunk: a prompt is cut alike, and its logits are the same, however much of it
    # there was time for.
    runtime, prompting, known = runner.runtime, runner.prompting(template), None
    reply = runner.request(messages, Sampling(), Recorder(), template=template)
    ids = prompting.stable(messages) if runner.store.keeps else []
    if runtime.kv.quantized:
        ids = ids[: whole_chunks(runtime.chunking, len(ids) - 1) + 1]
    if (sight := reply.sight) is not None:
        ids = ids[: sight.end_of_part(0, len(ids) - 1) + 1] if reply.ids[: len(ids)] == ids else []
    if len(ids) > 1:
        # The template options were applied when these ids were rendered.
        of_ids = cacheable(runner, ids) if sight is None else replace(reply, ids=ids, recorder=Recorder())
        known = replace(of_ids, keep=prompting.pinned(messages), background=True)
    return StablePrompt(known, reply)


def warm_stable(
    runner: Runner, prompt: StablePrompt, pace: Pace, *, cancelled: Callable[[], bool]
) -> Generator[object, None, Price | None]:
    """Compute a stable prompt; return a reply's price then, None where it ended early or there is no room for it."""
    # It gives way to a reply that needs its memory, and to one that reads the same.

    def ended() -> bool:
        return cancelled() or pace.is_in_the_way

    try:
        if (request := prompt.known) is not None and not ended():
            held = runner.store.known(request.ids, request.keep)
            if held.tokens < len(request.ids) - 1 or held.disk_bytes:
                yield from compute_prompt(runner, request, pace, cancelled=ended)
        return None if ended() else price(runner, prompt.reply)
    except (ContextError, MemoryLimitError, DeviceError):
        return None


def tower_s(runner: Runner, operations: int) -> float | None:
    # At the speed of the last picture, else at that of prefill.
    if not operations:
        return 0.0
    runtime = runner.runtime
    speed = None if isinstance(runtime.eyes, str) else runtime.eyes.operations_per_s
    if speed is None:
        phase = runtime.predict(SURE_TOKENS, SURE_TOKENS, 0).prefill
        seconds = runner.store.rates.prefill_s(SURE_TOKENS) or phase.expected_s
        speed = None if phase.operations is None else rate(phase.operations, seconds)
    return None if speed is None else operations / speed


def picture_price(runner: Runner, picture: Picture) -> PicturePrice:
    runtime = runner.runtime
    if isinstance(runtime.eyes, str):
        raise PictureError(f"this model can't see pictures: {runtime.eyes}", "Use a model that sees.")
    found, operations = runtime.eyes.price(picture)
    prompting, asked = runner.prompting(), Message("user", "Hello", images=(picture,))
    with_it, without = (prompting.tokens([each], continues=False) for each in (asked, replace(asked, images=())))
    tokens = len(with_it) - len(without)
    read_s = runner.store.rates.prefill_s(tokens)
    if read_s is None:
        read_s = runtime.predict(tokens, tokens, 0).ttft_s
    return replace(found, tokens=tokens, see_s=tower_s(runner, operations), read_s=read_s)


def price(runner: Runner, request: Request) -> Price:
    """Return what a request takes until its first token."""
    runtime, count = runner.runtime, len(request.ids)
    known, rates = runner.store.known(request.ids, request.keep), runner.store.rates
    tokens = count - known.tokens
    computing_s = rates.prefill_s(tokens)
    estimated = computing_s is None
    if estimated:
        computing_s = runtime.predict(count, count, known.tokens).ttft_s
    seeing_s = 0.0 if request.sight is None else tower_s(runner, request.sight.operations(known.tokens))
    parts = [seeing_s, computing_s, rates.read_s(known.disk_bytes) if known.disk_bytes else 0.0]
    seconds = None if None in parts else sum(part for part in parts if part is not None)
    return Price(count, tokens, known.disk_bytes, seconds, estimated and seconds is not None)
