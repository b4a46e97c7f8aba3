"""What the child needs of an engine, and the real one in that shape. MLX is imported when a model is loaded, not before."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from tokamac.app.backend.protocol import Load, Loaded, MemoryUse, ModelInfo
from tokamac.engine.errors import OptionError
from tokamac.engine.events import Event, Live, LoadProgress, Message, Price
from tokamac.engine.options import NOTHING_TOLD, KVSpec, PromptCacheSpec, Sampling, TemplateOptions
from tokamac.engine.perf.memory import SOURCES

if TYPE_CHECKING:
    from tokamac.engine import Engine

T = TypeVar("T")


class EnginePort(Protocol):
    """An engine as the child sees it. ``cancel`` and ``live`` may be called from any thread at any time."""

    def loaded(self) -> Loaded:
        """Describe the model."""

    def reply(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        continues: bool = False,
        template: TemplateOptions = NOTHING_TOLD,
    ) -> Iterator[Event]:
        """Yield the reply's events; the last is Finished, also after ``cancel``. continues: the rest of the reply at the end."""

    def cancel(self) -> None:
        """End the running reply within a token; without one, do nothing."""

    def live(self) -> Live | None:
        """Measure the running reply; None when there is none."""

    def warm(
        self,
        messages: Sequence[Message],
        template: TemplateOptions = NOTHING_TOLD,
    ) -> None:
        """Compute in idle time what is certain of a conversation whose last message is still being written. Returns at once."""

    def price(
        self,
        messages: Sequence[Message],
        *,
        continues: bool = False,
        template: TemplateOptions = NOTHING_TOLD,
    ) -> Price:
        """Tell what a reply would take until its first token. May be called from any thread; waits until the engine is free."""

    def count(self, text: str) -> int:
        """Return how many tokens ``text`` is. May be called from any thread; waits until the engine is free."""

    def cache_trouble(self) -> str | None:
        """Tell what went wrong with the prompt cache on disk, once something did. Returns at once."""

    def between(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, run where MLX may be touched, once the engine is free. May be called from any thread."""

    def memory_use(self) -> MemoryUse:
        """Tell what memory is in use. To be called between replies: the engine's thread answers."""

    def close(self) -> None:
        """Give everything back."""


class _RealEngine:
    """``tokamac.engine.Engine`` as an EnginePort."""

    def __init__(self, engine: "Engine", notes: tuple[str, ...] = ()) -> None:
        """Notes: what of the settings was changed for this model, beside what the engine says itself."""
        self._engine = engine
        self._notes = notes
        tokenizer = engine.tokenizer
        self._later_system = tokenizer.has_chat_template and tokenizer.takes_later_system()

    def loaded(self) -> Loaded:
        spec, limits = self._engine.spec, self._engine.limits(1)
        info = ModelInfo(
            name=spec.name,
            path=str(spec.path),
            device=spec.device,
            architecture=spec.architecture,
            parameters=spec.parameters,
            weight_bytes=spec.weight_bytes,
            bits_per_weight=spec.bits_per_weight,
            context_length=spec.context_length,
            thinks=spec.thinks,
            later_system=self._later_system,
            capacity=spec.capacity,
            rolls=spec.rolls,
            recommended=Sampling().resolved(spec.recommended),
            notes=(*self._notes, *spec.notes),
            advice=spec.advice,
            memory_notes=spec.memory_notes,
            doubts=spec.doubts,
            adapter=spec.adapter,
            adapter_digest=spec.adapter_digest,
            thinking_modes=spec.thinking_modes,
            template_names=spec.template_names,
        )
        return Loaded(info, limits.ceiling_tps, limits.bandwidth_gbs, self.memory_use())

    def reply(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        continues: bool = False,
        template: TemplateOptions = NOTHING_TOLD,
    ) -> Iterator[Event]:
        return self._engine.generate(self._taken(messages), sampling, continues=continues, template=template)

    def cancel(self) -> None:
        self._engine.cancel()

    def live(self) -> Live | None:
        return self._engine.live()

    def warm(
        self,
        messages: Sequence[Message],
        template: TemplateOptions = NOTHING_TOLD,
    ) -> None:
        self._engine.warm_ahead(self._taken(messages), template=template)

    def price(
        self,
        messages: Sequence[Message],
        *,
        continues: bool = False,
        template: TemplateOptions = NOTHING_TOLD,
    ) -> Price:
        return self._engine.price(self._taken(messages), continues=continues, template=template)

    def _taken(self, messages: Sequence[Message]) -> list[Message]:
        """Return what the chat template takes. Later system messages that it does not take the screen says are left out."""
        later = self._later_system
        return [each for at, each in enumerate(messages) if later or at == 0 or each.role != "system"]

    def count(self, text: str) -> int:
        # On the engine's thread: a tokenizer is one thread's at a time.
        return self._engine.between(lambda: len(self._engine.tokenizer.encode(text)))

    def cache_trouble(self) -> str | None:
        return self._engine.cache_trouble()

    def between(self, work: Callable[[], T]) -> T:
        return self._engine.between(work)

    def memory_use(self) -> MemoryUse:
        memory = self._engine.memory()
        source = "" if memory.budget_source is None else SOURCES[memory.budget_source]
        return MemoryUse(
            memory.active, memory.peak, memory.budget, budget_source=source, total_bytes=memory.device_total
        )

    def close(self) -> None:
        self._engine.close()


def load_engine(request: Load, progress: Callable[[LoadProgress], None]) -> EnginePort:
    """Load the model that ``request`` names; raise TokamacError if it can't be.

    A group size is stored for all models: where this one can't have it, the default is used, and a note says so.
    """
    from tokamac.engine import Engine

    cache = PromptCacheSpec() if request.prompt_cache else None

    def load(kv: KVSpec) -> "Engine":
        if not kv.rolls:
            kv = replace(kv, keep=KVSpec().keep)  # a chat names it for the day when something rolls
        return Engine.load(
            request.model,
            kv=kv,
            prompt_cache=cache,
            memory=request.memory,
            unchecked=request.unchecked,
            adapter=request.adapter,
            progress=progress,
        )

    try:
        return _RealEngine(load(request.kv))
    except OptionError as refused:
        usual = replace(request.kv, group_size=KVSpec().group_size)
        if usual == request.kv:
            raise
        return _RealEngine(load(usual), (f"{refused.message}; the default is used",))
