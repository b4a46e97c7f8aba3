"""The session's model of the engine process: phase, responsiveness, idle unload. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tokamac.engine import metrics as rates
from tokamac.engine.events import Finished, LoadProgress, Message, ModelSpec, TextChunk, has_calls
from tokamac.engine.hub.names import GUIDE
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import KVSpec, Sampling, TemplateOptions, ToolSpec
from tokamac.engine.perf.diagnosis import at_bandwidth

from ..backend.client import BackendEvent, Died, Garbled
from ..backend.protocol import (
    Generate,
    Load,
    Loaded,
    MachineMeasured,
    MemoryUse,
    ReplyEvent,
    Request,
    RequestFailed,
    SetPace,
)
from ..settings import CHAT_KV
from ..text.sanitise import Sanitiser, sanitise
from . import preferences
from .conversation import Reply
from .steps import Ask, EndEngine, EnginePhase, Notice, StartEngine, Step


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


# What is said of stages of loading that have no size.
WITHOUT_BYTES = {
    "warm-up": "warming up",
    "compile": "compiling kernels for this processor, once, for",
    "rounding": "measuring, once, what rounding costs",
}


class Idle:
    """Decides when an unused model is unloaded: loaded weights are wired, so nobody else can use that memory.

    Without a setting only a model with a large share of the machine's memory is unloaded.

    Attributes:
        after_min: idle minutes; 0 is never; None: ``HEAVY_MIN`` for a heavy model.
    """

    HEAVY_SHARE = 1 / 3
    HEAVY_MIN = 30

    def __init__(self, clock: Callable[[], float]) -> None:
        self.after_min: int | None = None
        self._heavy = False
        self._clock = clock
        self._seen_s = clock()

    def weigh(self, model_bytes: int | None, total_bytes: int | None) -> None:
        """Note the model's share of memory; unknown counts as not heavy."""
        known = model_bytes is not None and total_bytes is not None
        self._heavy = known and model_bytes > self.HEAVY_SHARE * total_bytes  # type: ignore[operator]

    @property
    def minutes(self) -> int:
        if self.after_min is not None:
            return self.after_min
        return self.HEAVY_MIN if self._heavy else 0

    def seen(self) -> None:
        self._seen_s = self._clock()

    def due(self, since_s: float) -> bool:
        """Whether both user and engine (idle since ``since_s``) were quiet long enough."""
        return self.minutes > 0 and self.quiet_s(since_s) >= 60 * self.minutes

    def quiet_s(self, since_s: float) -> float:
        """Return seconds since both user and engine were active."""
        return self._clock() - max(since_s, self._seen_s)


class CancelWatchdog:
    """Decides whether an engine that was asked to stop hangs."""

    # A stop waits for a token, or in prefill for a chunk: seconds for a large model. A restart reloads everything,
    # so an engine with a heartbeat is given several times its chunks' duration.

    # After how long a stop counts as not heard. Reading is slower: the first chunk may bring the weights from the disk.
    WRITING_S, READING_S = 5.0, 30.0
    CHUNKS = 4  # the same in the longest time between two signs of progress of this reply
    # The same where the user asks a second time.
    INSISTING_WRITING_S, INSISTING_READING_S, INSISTING_CHUNKS = 1.0, 10.0, 2
    HEARTBEAT_S = 3.0  # a busy engine's heart beats every second

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        self.reading = True
        self._heard_s = self._clock()
        self._progress_s: float | None = None
        self._longest_s = 0.0

    def note_event(self) -> None:
        self._heard_s = self._clock()

    def progress(self, *, reading: bool) -> None:
        now = self._clock()
        if self._progress_s is not None:
            self._longest_s = max(self._longest_s, now - self._progress_s)
        self._progress_s, self.reading = now, reading

    def timed_out(self, since_s: float, *, insists: bool) -> bool:
        """Whether the stop asked for at ``since_s`` is overdue. insists: the user asked twice."""
        now = self._clock()
        alive = now - self._heard_s < self.HEARTBEAT_S
        writing_s = self.INSISTING_WRITING_S if insists else self.WRITING_S
        reading_s = self.INSISTING_READING_S if insists else self.READING_S
        chunks = self.INSISTING_CHUNKS if insists else self.CHUNKS
        chunks_s = chunks * self._longest_s if alive else 0.0
        return now - since_s > max(reading_s if alive and self.reading else writing_s, chunks_s)


class ToldOnce:
    """Notices on what the model can't be given as asked; once per model."""

    def __init__(self) -> None:
        self._untold: set[str] = set()
        self._without_tools = self._without_system = ""  # the model of which it was told last

    def opened(self) -> None:
        self._without_system = ""

    def notices(
        self,
        info: ModelSpec | None,
        template: TemplateOptions,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> list[Step]:
        """Return the notices for a request. tools: those that are on."""
        if info is None:
            return []
        found = [
            *self._later_system(info, messages),
            *self._options(info, template),
            *self._calls(info, messages, tools),
        ]
        return [Notice(each, "warning") for each in found]

    def _options(self, info: ModelSpec, template: TemplateOptions) -> Iterator[str]:
        _, why = preferences.supported(template, info)
        for each in why:
            if each not in self._untold:
                self._untold.add(each)
                yield sentence(each)

    def _calls(self, info: ModelSpec, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Iterator[str]:
        called = has_calls(messages)
        if not info.takes_tools and self._without_tools != info.name and (called or tools):
            self._without_tools = info.name
            past = " It gets earlier calls as text." if called else ""
            yield f"{info.name} can't call tools: its chat template has no place for them.{past}"

    def _later_system(self, info: ModelSpec, messages: Sequence[Message]) -> Iterator[str]:
        many = sum(each.role == "system" for each in messages[1:])
        if many and not info.later_system and self._without_system != info.name:
            self._without_system = info.name
            what = "1 system message of this chat is" if many == 1 else f"{many} system messages of this chat are"
            yield f"{what} told as the user's: the chat template of {info.name} accepts only one, at the start."


class EngineConnection:
    """State of the engine process and its model, as last reported.

    Attributes:
        load: the wanted model and settings.
        phase, phase_since: current phase, and its start on the session's clock.
        problem: why no model is loaded, or "".
        info, memory, ceiling_tps, bandwidth_gbs: of the loaded model; None is unknown.
        bandwidth_note: how the bandwidth was measured, or why it is unknown.
        deaths: crashes since the last good reply.
    """

    def __init__(self, load: Load, clock: Callable[[], float]) -> None:
        self.load = load
        self.phase = EnginePhase.FAILED
        self.phase_since = clock()
        self.problem = ""
        self.info: ModelSpec | None = None
        self.loading: LoadProgress | None = None
        self.memory = MemoryUse()
        self.ceiling_tps: float | None = None
        self.bandwidth_gbs: float | None = None
        self.bandwidth_note = ""
        self.deaths = 0
        self._clock = clock
        self._alive = False
        self._last_working: Load | None = None
        self._notices: set[str] = set()
        self._load_began_s = self._loaded_s = clock()

    @property
    def replying(self) -> bool:
        return self.at_work or self.phase is EnginePhase.TOOLS

    @property
    def at_work(self) -> bool:
        return self.phase in (EnginePhase.PREFILL, EnginePhase.DECODING, EnginePhase.STOPPING)

    @property
    def busy(self) -> bool:
        return self.at_work or self.phase is EnginePhase.LOADING

    def enter(self, phase: EnginePhase) -> None:
        if phase is not self.phase:
            self.phase = phase
            self.phase_since = self._clock()

    def start(self) -> list[Step]:
        """Load the model, in a new process if none lives or it is still loading."""
        steps: list[Step] = [] if self._alive and self.phase is not EnginePhase.LOADING else [StartEngine()]
        self._alive = True
        self.loading = self.info = None
        self.problem = ""
        self.enter(EnginePhase.LOADING)
        self._load_began_s = self.phase_since
        return [*steps, Ask(self.load)]

    def end(self) -> list[Step]:
        self.lost()
        return [EndEngine()]

    def lost(self) -> None:
        self._alive = False

    def unload(self) -> list[Step]:
        self.memory = MemoryUse()
        self.enter(EnginePhase.UNLOADED)
        return self.end()

    def fail(self, problem: str) -> None:
        self.problem = problem
        self.loading = self.info = None
        self.enter(EnginePhase.FAILED)

    def loaded(self, event: Loaded) -> list[Step]:
        self.info, self.memory = event.info, event.memory
        self.measured(event)
        self._last_working = self.load
        self.loading = None
        self._loaded_s = self._clock()
        self.enter(EnginePhase.IDLE)
        chosen = self.load.kv not in (KVSpec(), CHAT_KV)
        notes = [note.text for note in event.info.model_notes if chosen or note.about in ("adapter", "draft", "heads")]
        worse = [note.text for note in event.info.model_notes if note.about == "quality"]
        costs = [Notice(sentence(note), "warning") for note in event.info.memory_notes]
        return [*costs, *(step for text in worse for step in self.notify(text)), *(Notice(note) for note in notes)]

    def loading_since(self, since_s: float) -> float:
        """Return the seconds of loading after ``since_s`` on the session's clock."""
        return max(self._loaded_s - max(self._load_began_s, since_s), 0.0)

    def measured(self, event: Loaded | MachineMeasured) -> None:
        self.ceiling_tps, self.bandwidth_gbs = event.ceiling_tps, event.bandwidth_gbs
        self.bandwidth_note = event.bandwidth_note

    def learn(self, metrics: Metrics) -> None:
        """Adopt the engine's bandwidth after a reply, which may exceed the measured one."""
        if (step := rates.bytes_per_step(metrics)) is not None:
            self.bandwidth_gbs = rates.achieved_gbs(step, metrics.ceiling_tps)
            self.ceiling_tps = rates.ceiling_tps(self.bandwidth_gbs, metrics.weight_bytes_per_token)

    def with_ceiling(self, reply: Reply) -> Reply:
        """Update the ceiling by the current bandwidth, if the loaded model made ``reply``."""
        if reply.metrics is None or self.info is None or self.info.name != reply.model:
            return reply
        metrics, diagnosis = at_bandwidth(reply.metrics, reply.diagnosis, self.bandwidth_gbs)
        return replace(reply, metrics=metrics, diagnosis=diagnosis)

    def pace(self, percent: int, on_battery: int | None) -> list[Step]:
        self.load = replace(self.load, pace=percent, pace_on_battery=on_battery)
        if self._last_working is not None:
            self._last_working = replace(self._last_working, pace=percent, pace_on_battery=on_battery)
        return [Ask(SetPace(percent, on_battery))] if self._alive else []

    def fall_back(self) -> bool:
        """Select the last working model; return whether it differs from the failed one."""
        if self._last_working is None or replace(self._last_working, private=self.load.private) == self.load:
            return False
        self.load = replace(self._last_working, private=self.load.private)
        self.enter(EnginePhase.FAILED)
        return True

    def notify(self, text: str) -> list[Step]:
        new = text not in self._notices
        self._notices.add(text)
        return [Notice(text, "warning")] if new else []


LONGEST = Sampling(max_tokens=400)


@dataclass(slots=True)
class GuideExchange:
    """A question and its answer so far, sanitized."""

    question: str
    answer: str = ""
    over: bool = False
    _clean: Sanitiser = field(default_factory=Sanitiser)

    def add(self, text: str) -> None:
        self.answer += self._clean.feed(text)


class GuideChat:
    """Chat with the guide. problem: why it isn't ready or didn't answer."""

    def __init__(self, *, private: bool = False) -> None:
        self._private = private
        self.said: list[GuideExchange] = []
        self.loaded = False
        self.problem = ""
        self._id = 0

    @property
    def busy(self) -> bool:
        return not self.problem and (not self.loaded or self.answering)

    @property
    def answering(self) -> bool:
        return bool(self.said) and not self.said[-1].over

    def start(self) -> list[Request]:
        return [Load(GUIDE, private=self._private)]

    def ask(self, question: str) -> list[Request]:
        """Ask now or once ready; refused while it answers."""
        self.said.append(GuideExchange(sanitise(question)))
        return self._send() if self.loaded else []

    def on_event(self, event: BackendEvent) -> list[Request]:
        match event:
            case Loaded():
                self.loaded = True
                return self._send() if self.answering else []
            case ReplyEvent(id, TextChunk(text)) if id == self._id and self.answering:
                self.said[-1].add(text)
            case ReplyEvent(id, Finished(_, text)) if id == self._id and self.answering:
                self.said[-1].answer, self.said[-1].over = sanitise(text), True
            case RequestFailed(_, error, hint):
                self._end(sanitise(" ".join(f"{error}. {hint}".split())))
            case Died(why, _):
                self.loaded = False
                self._end(f"The guide stopped ({sanitise(why)}). Your chat is not affected.")
            case Garbled(error):
                self._end(f"The guide's answer is not readable: {error}")
            case _:
                pass
        return []

    def _end(self, problem: str) -> None:
        self.problem = problem
        if self.said:
            self.said[-1].over = True

    def _send(self) -> list[Request]:
        """Send the whole exchange: the guide is stateless."""
        self._id += 1
        messages: list[Message] = []
        for each in self.said[:-1]:
            messages += [Message("user", each.question), Message("assistant", each.answer)] if each.answer else []
        return [Generate(self._id, (*messages, Message("user", self.said[-1].question)), LONGEST)]
