"""A client of the engine process: its replies by its own ids, and threads for its questions, what-ifs among them."""

import base64
import queue
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar, get_args

from tokamac.engine.errors import TokamacError, panic_error
from tokamac.engine.events import Message, PrefillProgress, PromptText, StepTokens
from tokamac.engine.metrics import rate
from tokamac.engine.options import TemplateOptions

from .client import Outbox, Pulse
from .protocol import (
    Answer,
    AskCount,
    AskEmbeddings,
    AskPrice,
    AskTokens,
    AskWhatIf,
    CaseLine,
    Change,
    ChatCase,
    ChipLine,
    Counted,
    CurvePoint,
    Embedded,
    EngineMessage,
    Figures,
    Generate,
    Load,
    LookAgain,
    LookedAt,
    ModelLine,
    Priced,
    PromptTokens,
    Question,
    ReplyEvent,
    Roof,
    Spot,
    Wanted,
    Weighing,
    WhatIf,
    Where,
)

if TYPE_CHECKING:
    from tokamac.engine import Engine, ReplyStream
    from tokamac.engine.perf.hardware import Chip
    from tokamac.engine.perf.inspection import Inspection, ModelRef, Prospect
    from tokamac.engine.perf.roofline import Phase, Prediction
    from tokamac.engine.perf.what_if import Machine, Suggestion, WhatIfCase, WhatIfOutcome
    from tokamac.engine.schedule.stream import ReplyHandle


# What-if questions run on the engine thread in short steps while it is free. One thread per kind of question (weighing
# the catalogue takes seconds); of the waiting questions of one kind only the last is answered.


PhaseName = Literal["decode", "prefill"]
POINTS = 48  # contexts that a curve is drawn through


def answers(question: Question, limit: int | None = None) -> Iterator[Answer | Weighing]:
    """Yield progress, then the answer; ``limit`` in bytes. Raises TokamacError for an unknown model or chip."""
    match question.wanted:
        case "table":
            yield _table(question, limit)
        case "at once":
            yield _at_once(question, limit)
        case "guesses":
            yield _guesses(question, limit)
        case "cache":
            yield _cache(question, limit)
        case "chips":
            yield _chips(question)
        case "models":
            yield from _weigh_catalogue(question, limit)
        case "disk":
            yield from _weigh_disk(question, limit)


def _weigh_catalogue(question: Question, limit: int | None) -> Iterator[Answer | Weighing]:
    """Weigh one catalogue model per step; the last step yields the answer. Raises OptionError."""
    from tokamac.engine.perf.catalogue import standings
    from tokamac.engine.perf.what_if import WhatIfCase, here, nominal, suggestion

    place = _place(question.where) or here(limit=limit)
    case = WhatIfCase(context=question.context, prompt=question.prompt)
    asked, found = standings(nominal(place, limit=limit)), []
    for each in asked:
        found.append(model_line(suggestion(each.entry, each.repository, case, place)))
        yield Weighing(len(found), len(asked), found[-1])
    yield Answer("", place.chip.label, place.budget_rule or "", models=tuple(found))


def _weigh_disk(question: Question, limit: int | None) -> Iterator[Answer | Weighing]:
    """Weigh the named models, one per step; what can't be weighed is unknown. Raises OptionError."""
    from tokamac.engine.perf.inspection import prospect
    from tokamac.engine.perf.what_if import here

    place, case, found = _place(question.where) or here(limit=limit), case_of(question), []
    for name in question.names:
        known = prospect(name, case, place)
        found.append(replace(_line(known.model, None, known), text_only=known.text_only))
        yield Weighing(len(found), len(question.names), found[-1])
    yield Answer("", place.chip.label, place.budget_rule or "", models=tuple(found))


def _table(question: Question, limit: int | None) -> Answer:
    from tokamac.engine.perf.what_if import curve, notes, table

    case, found, subject = _inspected(question, limit)
    outcomes = table(subject.config, case, found.place, own=subject.packing)
    last = max(found.context_length or 0, case.context)
    contexts = sorted({max(1, round(last * step / POINTS)) for step in range(POINTS + 1)})
    points = curve(subject.config, case, found.place, contexts, own=subject.packing)
    return Answer(
        model=found.model,
        place=found.place.chip.label,
        rule=found.place.budget_rule or "",
        context_length=found.context_length,
        cases=(*_now(question.now, subject, found.place), *(_case(each, case) for each in outcomes)),
        curve=tuple(CurvePoint(each.context, each.ceiling_tps, each.expected_tps) for each in points),
        roof=None if found.prediction is None else _roof(found.prediction, found.place.chip),
        notes=notes(outcomes),
    )


def _now(chat: ChatCase | None, subject: "ModelRef", place: "Machine") -> Iterator[CaseLine]:
    from tokamac.engine.perf.what_if import WhatIfCase, outcome

    if chat is not None:
        case = WhatIfCase(kv=chat.kv, context=chat.context, prompt=chat.prompt)
        yield replace(_case(outcome(subject.config, case, place, own=subject.packing), case), change="as now")


def _chips(question: Question) -> Answer:
    from tokamac.engine.perf.inspection import model_ref
    from tokamac.engine.perf.what_if import everywhere, on_chips

    subject = model_ref(question.model)
    outcomes = on_chips(subject.config, case_of(question), everywhere(question.where.memory_gb), own=subject.packing)
    return Answer(subject.name, "every chip of the table", chips=tuple(map(_chip, outcomes)))


def _cache(question: Question, limit: int | None) -> Answer:
    from tokamac.engine.errors import OptionError
    from tokamac.engine.lab.without_cache import cache_worth
    from tokamac.engine.perf.footprint import weigh
    from tokamac.engine.perf.what_if import contexts_up_to

    case, found, subject = _inspected(question, limit)
    place, packing = found.place, case.packing(subject.packing)
    weighed = weigh(subject.config, place.device, packing=packing)
    if isinstance(weighed, str):
        raise OptionError(weighed, "Choose another model.")
    worth = cache_worth(weighed, case, place, contexts_up_to(subject.config))
    return Answer(found.model, place.chip.label, place.budget_rule or "", found.context_length, cache=worth)


def _at_once(question: Question, limit: int | None) -> Answer:
    from tokamac.engine.schedule.capacity import capacity_of

    case, found, subject = _inspected(question, limit)
    place = found.place
    several = capacity_of(subject.config, case, place, own=subject.packing)
    rule, notes = place.budget_rule or "", several.notes
    return Answer(found.model, place.chip.label, rule, found.context_length, notes=notes, at_once=several)


def _guesses(question: Question, limit: int | None) -> Answer:
    from tokamac.engine.perf.catalogue import draft_for
    from tokamac.engine.perf.inspection import model_ref
    from tokamac.engine.speculation.gain import gain_of

    case, found, subject = _inspected(question, limit)
    known = None if question.draft else draft_for(question.model)
    name = question.draft or (known.id if known is not None else "")
    gained = gain_of(subject, case, found.place, question.acceptance, model_ref(name) if name else None)
    rule, notes = found.place.budget_rule or "", gained.notes
    return Answer(found.model, found.place.chip.label, rule, found.context_length, notes=notes, guesses=gained)


def _inspected(question: Question, limit: int | None) -> "tuple[WhatIfCase, Inspection, ModelRef]":
    from tokamac.engine.perf.inspection import inspect, model_ref
    from tokamac.engine.perf.what_if import here

    subject, case = model_ref(question.model), case_of(question)
    place = _place(question.where) or (None if limit is None else here(limit=limit))
    return case, inspect(subject, case, place), subject


def case_of(question: Question) -> "WhatIfCase":
    """Raises OptionError for an impossible case."""
    from tokamac.engine.perf.what_if import WhatIfCase

    return WhatIfCase(question.bits, 64, question.kv, question.context, question.prompt)


def _place(where: Where) -> "Machine | None":
    from tokamac.engine.perf.what_if import elsewhere

    return elsewhere(where.chip, where.gpu_cores, where.memory_gb) if where.chip else None


def _case(found: "WhatIfOutcome", base: "WhatIfCase") -> CaseLine:
    case = found.case
    return CaseLine(_change(case, base), case.bits, case.kv.key_bits, case.kv.value_bits, case.context, _figures(found))


def _change(case: "WhatIfCase", base: "WhatIfCase") -> Change:
    if case.bits != base.bits:
        return "weights"
    if case.kv != base.kv:
        return "keys and values"
    return "context" if case.context != base.context else "as asked"


def _figures(found: "WhatIfOutcome") -> Figures:
    memory = found.memory
    return Figures(
        memory_bytes=None if memory is None else memory.total,
        budget_bytes=None if memory is None else memory.budget,
        fits=None if memory is None else memory.fits,
        ceiling_tps=found.ceiling_tps,
        expected_tps=found.expected_tps,
        ttft_s=found.ttft_s,
        reason=found.reason or "",
        from_others=0 if memory is None else memory.from_others,
    )


def _chip(found: "WhatIfOutcome") -> ChipLine:
    chip = found.place.chip
    return ChipLine(chip.label, chip.bandwidth_gbs, _figures(found))


def model_line(found: "Suggestion") -> ModelLine:
    return _line(found.id, found.download_bytes, found)


def _line(model: str, download_bytes: int | None, found: "Suggestion | Prospect") -> ModelLine:
    outcome = found.outcome
    return ModelLine(
        model=model,
        download_bytes=download_bytes,
        parameters=found.parameters,
        active_parameters=found.active_parameters,
        verdict=found.verdict,
        figures=replace(_figures(outcome), reason=found.reason),
        bits_per_weight=outcome.bits_per_weight,
        context=outcome.case.context,
    )


def _roof(predicted: "Prediction", chip: "Chip") -> Roof | None:
    """Return the roofline; None where one of its roofs is unknown."""
    if chip.bandwidth_gbs is None or predicted.ridge is None:
        return None
    spots = tuple(_spots(predicted))
    return Roof(chip.bandwidth_gbs, predicted.ridge * chip.bandwidth_gbs / 1e3, predicted.ridge, spots)


def _spots(predicted: "Prediction") -> Iterator[Spot]:
    phases: Sequence[tuple[PhaseName, Phase]] = (("decode", predicted.decode), ("prefill", predicted.prefill))
    for name, phase in phases:
        if phase.intensity is not None:
            both = (_tflops(phase, phase.ceiling_s), _tflops(phase, phase.expected_s))
            yield Spot(name, phase.intensity, "host" if phase.by_host else phase.bound, *both)


def _tflops(phase: "Phase", seconds: float | None) -> float | None:
    per_second = None if phase.operations is None else rate(phase.operations, seconds)
    return None if per_second is None else per_second / 1e12


T = TypeVar("T")


class Between(Protocol):
    """Runs work on the thread that may touch MLX, once it is free."""

    def __call__(self, work: Callable[[], T]) -> T:
        """Run ``work`` and return its result."""


class Advisor:
    """Answers ``AskWhatIf``. limit: usable bytes of this machine; None: the system's limit."""

    def __init__(self, outbox: Outbox) -> None:
        self.limit: int | None = None
        self._kinds: dict[Wanted, _Kind] = {wanted: _Kind(wanted, outbox) for wanted in get_args(Wanted)}

    def ask(self, between: Between, request: AskWhatIf) -> None:
        """Queue ``request``; doesn't block."""
        self._kinds[request.question.wanted].ask(between, request, self.limit)

    def close(self) -> None:
        for kind in self._kinds.values():
            kind.close()


class _Kind:
    def __init__(self, wanted: Wanted, outbox: Outbox) -> None:
        self._outbox = outbox
        self._latest: AskWhatIf | None = None
        self._asked: queue.SimpleQueue[tuple[Between, AskWhatIf, int | None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"advisor-{wanted}", daemon=True).start()

    def ask(self, between: Between, request: AskWhatIf, limit: int | None) -> None:
        self._latest = request
        self._asked.put((between, request, limit))

    def close(self) -> None:
        self._latest = None
        self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            self._answer(*asked)

    def _answer(self, between: Between, request: AskWhatIf, limit: int | None) -> None:
        try:
            self._tell(between, request, limit)
        except TokamacError as error:
            self._outbox.put(WhatIf(request.id, None, error.one_line()))
        except Exception as error:  # a config may hold anything: it must not end this thread
            traceback.print_exc()
            why = f"The comparison failed: {type(error).__name__}. The log has the details."
            self._outbox.put(WhatIf(request.id, None, why))

    def _tell(self, between: Between, request: AskWhatIf, limit: int | None) -> None:
        """Send progress and the answer; stop as soon as a later question arrives."""
        left = answers(request.question, limit)
        while self._latest is request:
            match between(lambda: next(left)):
                case Weighing(done, total, line):
                    self._outbox.put(WhatIf(request.id, None, done=done, total=total, line=line))
                case Answer() as found:
                    self._outbox.put(WhatIf(request.id, found))
                    return


# The first client is the parent, over stdin; the others are guests, over a socket. Clients are isolated.


# Answers `LookAgain`: how likely the tokens of a reply were. On a thread: the process hears the next request meanwhile.

STOPPED = "Stopped before all likely tokens were computed."


class Looker:
    """Answers the last ``LookAgain`` asked.

    accept: drops messages that the chat template can't take. wait: returns once nothing more urgent runs.
    """

    def __init__(
        self, outbox: Outbox, accept: Callable[[Sequence[Message]], list[Message]], wait: Callable[[], None]
    ) -> None:
        self._outbox, self._accept, self._wait = outbox, accept, wait
        self._latest: LookAgain | None = None
        self._asked: queue.SimpleQueue[tuple[Engine, LookAgain] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="looker", daemon=True).start()

    def ask(self, engine: "Engine | None", question: LookAgain) -> None:
        """Replace any question in progress; doesn't block."""
        self._latest = question
        if engine is None:
            self._outbox.put(LookedAt(question.id, ended=True, error="No model is loaded."))
        else:
            self._asked.put((engine, question))

    def stop(self) -> None:
        self._latest = None

    def close(self) -> None:
        self.stop()
        self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            engine, question = asked
            why = ""
            try:
                self._wait()
                why = self._answer(engine, question)
            except TokamacError as error:
                why = error.one_line()
            except Exception as error:  # whatever a model's code raises must not end this thread
                traceback.print_exc()
                why = f"The likely tokens could not be computed: {type(error).__name__}. The log has the details."
            self._outbox.put(LookedAt(question.id, ended=True, error=why))

    def _answer(self, engine: "Engine", question: LookAgain) -> str:
        """Send results piece by piece; return why it ended early, or ""."""
        number = question.id
        found = engine.look_again(
            self._accept(question.prompt),
            question.reply,
            passes=question.passes,
            prompt_tokens=question.prompt_tokens,
            cached_tokens=question.cached_tokens,
            template=question.template,
        )
        with closing(found):
            for event in found:
                if self._latest is not question:
                    return STOPPED
                match event:
                    case PromptText():
                        self._outbox.put(LookedAt(number, prompt=event))
                    case StepTokens():
                        self._outbox.put(LookedAt(number, tokens=event))
                    case PrefillProgress(done, total):
                        self._outbox.put(LookedAt(number, done=done, total=total))
        return ""


Asked = TypeVar("Asked", bound=AskCount | AskEmbeddings | AskPrice | AskTokens)


class Answerer(Generic[Asked]):
    """A thread that answers questions of one kind, each of which waits for the engine."""

    def __init__(
        self,
        outbox: Outbox,
        answer: "Callable[[Engine, Asked], EngineMessage]",
        unknown: Callable[[Asked], EngineMessage],
        replaces: Callable[[Asked], Hashable] = lambda question: question.id,
        *,
        together: bool = False,
    ) -> None:
        """Start the thread.

        Args:
            answer: asks the engine; may raise.
            unknown: makes the answer where there is none.
            replaces: key; of the waiting questions with the same key only the last is answered.
            together: each question has its own thread, so that none waits for a longer one.
        """
        self._outbox = outbox
        self._answer, self._unknown, self._replaces, self._together = answer, unknown, replaces, together
        self._questions: queue.SimpleQueue[tuple[Engine, Asked] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="answerer", daemon=True).start()

    def ask(self, engine: "Engine | None", question: Asked) -> None:
        """Queue ``question`` (engine None: nothing is loaded); doesn't block."""
        if engine is None:
            self._outbox.put(self._unknown(question))
        else:
            self._questions.put((engine, question))

    def close(self) -> None:
        self._questions.put(None)

    def _run(self) -> None:
        while (first := self._questions.get()) is not None:
            waiting = {self._replaces(first[1]): first}
            while not self._questions.empty():
                if (more := self._questions.get()) is None:
                    return
                waiting[self._replaces(more[1])] = more
            for engine, question in waiting.values():
                if self._together:
                    threading.Thread(target=self._tell, args=(engine, question), name="answer", daemon=True).start()
                else:
                    self._tell(engine, question)

    def _tell(self, engine: "Engine", question: Asked) -> None:
        self._outbox.put(self._answered(engine, question))

    def _answered(self, engine: "Engine", question: Asked) -> EngineMessage:
        try:
            return self._answer(engine, question)
        except TokamacError:
            pass  # too long, no Unicode, or closed meanwhile: sending the prompt will say so
        except BaseException as error:
            if not isinstance(error, Exception) and panic_error(error) is None:
                raise
            traceback.print_exc()
        return self._unknown(question)


# Numbers of replies that were cancelled while they did not run: most had ended, and one may still be asked for.
KEPT_CANCELS = 1000
PROBE = (Message("user", "Hello"),)  # a prompt that is rendered with tools and without, to tell what they add


def counter(outbox: Outbox) -> Answerer[AskCount]:
    def count(engine: "Engine", ask: AskCount) -> Counted:
        if ask.tools:
            with_them = engine.price(PROBE, template=TemplateOptions(tools=ask.tools)).prompt_tokens
            return Counted(ask.id, with_them - engine.price(PROBE).prompt_tokens)
        if ask.picture is not None:
            found = engine.picture_price(ask.picture)
            return Counted(ask.id, found.tokens, found)
        return Counted(ask.id, len(engine.tokenizer.encode(ask.text)))

    return Answerer(outbox, count, lambda ask: Counted(ask.id, None))


def pricer(outbox: Outbox, accept: Callable[[Sequence[Message]], list[Message]] = list) -> Answerer[AskPrice]:
    """Price prompts, the last question of each client only. accept: as in ``Looker``."""

    def price(engine: "Engine", ask: AskPrice) -> Priced:
        found = engine.price(accept(ask.messages), continues=ask.continues, template=ask.template)
        return Priced(ask.asker, ask.id, found)

    return Answerer(outbox, price, lambda ask: Priced(ask.asker, ask.id, None), replaces=lambda ask: ask.asker)


def embedding(outbox: Outbox) -> Answerer[AskEmbeddings]:
    def embedded(engine: "Engine", ask: AskEmbeddings) -> Embedded:
        try:
            made = engine.embed(ask.texts, prompt=ask.prompt, dimensions=ask.dimensions, truncate=ask.truncate)
        except TokamacError as error:
            return Embedded(ask.id, error=error.message, hint=error.hint, kind=type(error).__name__)
        vectors = tuple(base64.b64encode(each.astype("<f4").tobytes()).decode("ascii") for each in made.vectors)
        return Embedded(ask.id, vectors, made.tokens)

    return Answerer(outbox, embedded, lambda ask: Embedded(ask.id, error="the engine can't embed"))


def tokenizing(outbox: Outbox, accept: Callable[[Sequence[Message]], list[Message]]) -> Answerer[AskTokens]:
    def tokens(engine: "Engine", ask: AskTokens) -> PromptTokens:
        try:
            if ask.messages:
                found = engine.tokens(accept(ask.messages), continues=ask.continues, template=ask.template)
            else:
                found = engine.tokens(ask.text)
            return PromptTokens(ask.id, tuple(found))
        except TokamacError as error:
            return PromptTokens(ask.id, error=error.one_line(), kind=type(error).__name__)

    return Answerer(outbox, tokens, lambda ask: PromptTokens(ask.id, error="the engine can't tell"), together=True)


@dataclass(slots=True)
class OpenReply:
    """A running reply and its reader thread. may_go_on: cleared while the client is behind."""

    request: Generate
    stream: "ReplyStream"
    reader: threading.Thread
    may_go_on: threading.Event
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True
        self.stream.cancel()
        self.may_go_on.set()

    def hold(self, *, held: bool) -> None:
        if held and not self.cancelled:
            self.may_go_on.clear()
        else:
            self.may_go_on.set()


class AskedProcess(Protocol):
    def accept(self, messages: Sequence[Message]) -> list[Message]: ...
    def wait_for_foreground(self) -> None:
        """Wait until no foreground reply runs."""


class EngineClient:
    """A client and its open requests.

    Attributes:
        joined: the model a guest expects; None is any, and for the parent.
        text_every_s: text batching interval; None suits a screen.
        warming: its last warm-up.
    """

    def __init__(self, outbox: Outbox, process: AskedProcess) -> None:
        self.outbox = outbox
        self.joined: Load | None = None
        self.text_every_s: float | None = None
        self.warming: ReplyHandle | None = None
        self.prices = pricer(outbox, process.accept)
        self.counts = counter(outbox)
        self.tokens = tokenizing(outbox, process.accept)
        self.embeddings = embedding(outbox)
        self.advisor = Advisor(outbox)
        self.looker = Looker(outbox, process.accept, process.wait_for_foreground)
        self.pulse = Pulse(outbox, self._measurements)
        self._running: dict[int, OpenReply] = {}
        self._cancelled: dict[int, None] = {}  # of which no reply runs, in order: it may still be asked for
        self._leaving = False
        self._lock = threading.Lock()  # held for these three

    def began(self, running: OpenReply) -> None:
        """Start the reply's thread; one that was already cancelled, or whose client is leaving, ends immediately."""
        id = running.request.id
        self.pulse.start()
        with self._lock:
            self._running[id] = running
            if id in self._cancelled or self._leaving:
                running.cancel()
            self._cancelled.pop(id, None)
            running.reader.start()  # before others see it, who may wait for its end

    def ended(self, reply: int) -> None:
        with self._lock:
            del self._running[reply]
        self.pulse.stop()

    def cancel(self, reply: int) -> None:
        with self._lock:
            if reply in self._running:
                self._running[reply].cancel()
            else:
                self._cancelled[reply] = None

    def keep_going(self, reply: int) -> None:
        with self._lock:
            if (running := self._running.get(reply)) is not None:
                running.stream.keep_going()

    def forget_cancels(self, nothing_waits: Callable[[], bool]) -> None:
        """Drop the oldest cancels of ended replies. nothing_waits: whether no read request is still queued."""
        with self._lock:
            if len(self._cancelled) > KEPT_CANCELS and nothing_waits():
                for each in list(self._cancelled)[:-KEPT_CANCELS]:
                    del self._cancelled[each]

    def hold(self, reply: int, *, held: bool) -> None:
        with self._lock:
            if (running := self._running.get(reply)) is not None:
                running.hold(held=held)

    def replies(self) -> list[OpenReply]:
        with self._lock:
            return list(self._running.values())

    def end_warming(self) -> None:
        warming, self.warming = self.warming, None
        if warming is not None:
            warming.cancel()

    def leave(self) -> None:
        self.end_warming()
        with self._lock:
            self._leaving = True
            for each in self._running.values():
                each.cancel()

    def close(self) -> None:
        self.leave()
        for each in (self.prices, self.counts, self.tokens, self.embeddings, self.advisor, self.looker, self.pulse):
            each.close()

    def _measurements(self) -> list[ReplyEvent]:
        watched = [each for each in self.replies() if each.request.watched and not each.request.background]
        measured = [(each.request.id, each.stream.live()) for each in watched]
        return [ReplyEvent(reply, live) for reply, live in measured if live is not None]
