"""The server's engine process: requests, events on the event loop, restart after a crash."""

#     request ─ Generate ─▶ engine process ─ events ─▶ reader thread ─▶ event loop ─▶ queue per request
#
# A separate process, so an engine crash doesn't end the server, and HTTP work doesn't slow decoding.

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tokamac.engine.events import Event, Finished, LoadProgress, Message, ModelSpec, Piece, ToolCall
from tokamac.engine.options import TemplateOptions

from ..backend.client import CHILD_COMMAND, BackendEvent, Died, EngineLink, EngineProcess
from ..backend.keep_awake import KeepAwake
from ..backend.protocol import (
    AskEmbeddings,
    AskTokens,
    AskWhatIf,
    Cancel,
    Embedded,
    EngineNotice,
    Generate,
    GoOn,
    Guests,
    Hold,
    LimitMemory,
    Load,
    Loaded,
    Loading,
    MemoryUse,
    ModelLine,
    PromptTokens,
    Question,
    ReplyEvent,
    Request,
    RequestFailed,
    Share,
    WhatIf,
)
from ..backend.sharing import EngineGuest, SharingError
from .embeddings import TOGETHER, EmbeddingRequest
from .request import KINDS, EngineDownError, Prompt, RequestError, ServedRequest, of_engine

# How many requests may wait for the engine, and how long a client that is turned away should stay away. Pure
# arithmetic.

MOST_WAITING = 8  # replies that may wait, as a multiple of those that are made at once
MOST_WAIT_S = 120.0  # a longer wait than this is refused: clients give up after some minutes, and then ask again
RECENT = 32  # replies whose mean is "of late"


@dataclass(frozen=True, slots=True)
class ReplyCost:
    """A reply's cost: seconds from its turn to its end, KV bytes; None is unknown."""

    seconds: float
    kv_bytes: int | None


class Admission:
    """Admission control by open replies.

    Args:
        parallel: max parallel replies.

    Attributes:
        open: running or waiting replies.
        room_bytes: KV budget of all replies; None: unlimited.
    """

    def __init__(self, parallel: int) -> None:
        self.parallel = parallel
        self.open = 0
        self.room_bytes: int | None = None
        self._costs: deque[ReplyCost] = deque(maxlen=RECENT)

    @property
    def places(self) -> int:
        known = [each.kv_bytes for each in self._costs if each.kv_bytes]
        if self.room_bytes is None or not known:
            return self.parallel
        return max(1, min(self.parallel, int(self.room_bytes / (sum(known) / len(known)))))

    @property
    def waiting(self) -> int:
        return max(0, self.open - self.places)

    def wait_s(self, more: int = 1) -> float | None:
        """Return the expected wait of the last of ``more`` replies; None if unknown."""
        if self.open + more <= self.places:
            return 0.0
        if not self._costs:
            return None
        mean_s = sum(each.seconds for each in self._costs) / len(self._costs)
        return math.ceil((self.open + more - self.places) / self.places) * mean_s

    def enter(self, replies: int) -> None:
        """Admit ``replies``. Raises RequestError, admitting none, if too many wait."""
        waits = self.wait_s(replies)
        before = self.open + replies - self.places
        too_many = before > MOST_WAITING * self.parallel and self.open > 0
        if too_many or (waits is not None and waits > MOST_WAIT_S and self.open > 0):
            seconds = max(1, math.ceil((waits or 10.0) / 2))
            raise RequestError(
                f"{self.waiting} replies wait for their turn already",
                f"Try again in {seconds} s.",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=seconds,
            )
        self.open += replies

    def leave(self, cost: ReplyCost | None = None) -> None:
        """Note a reply's end. cost: None if failed or cancelled."""
        self.open -= 1
        if cost is not None:
            self._costs.append(cost)


def check_told(told: PromptTokens, code: str) -> None:
    """Raise RequestError where a prompt has no tokens. code: unless its error is one of the engine's."""
    if told.error:
        raise RequestError(told.error, param="", code=KINDS.get(told.kind, (400, code))[1])


# Events that wait for a client's connection: at the first its replies are held, at the second they go on.
BEHIND, CAUGHT_UP = 256, 64
TEXT_EVERY_S = 1 / 60  # how long text may wait for more of it: as long as the engine's own thread lets it
RETRY_S = 5  # when to try again where nothing is known of how long loading takes
LASTED_S = 10.0  # an engine that dies sooner after it was loaded is not started again before somebody asks

DIED = "Died"
# Why a model can't be loaded, by the class of the error: status and code; other reasons are the request's.
LOADING = {
    "MemoryLimitError": (503, "out_of_memory"),
    "DeviceError": (503, "device_failed"),
    "DeviceLostError": (503, "device_failed"),
    DIED: (503, "engine_unavailable"),
}

# A process that another program holds: how often its successor is looked for once it is gone, and for how long.
JOIN_S, LOST_S = 0.5, 30.0

State = Literal["loading", "ready", "down"]
# The number of a reply among those of its request, and what came of it: an error ends it.
Told = tuple[int, Event | RequestError]


@dataclass(slots=True)
class OpenRequest:
    """Replies of one request and their undelivered events.

    unasked: replies to start once a prompt's first reply (by number) has prefilled it. replies: numbers by id. left: running.
    held: the engine is paused.
    """

    one_call: bool
    unasked: dict[int, list[Generate]] = field(default_factory=dict)
    replies: dict[int, int] = field(default_factory=dict)
    came: asyncio.Queue[Told] = field(default_factory=asyncio.Queue)
    left: set[int] = field(default_factory=set)
    held: bool = False


class ServedEngine:
    """The engine process (restarted on a crash) and open requests. Event loop thread only.

    Args:
        note: receives messages for the terminal.
        share: socket for guests; None: not shared.
        join: socket of an existing engine, used with whatever model it has; None: start one.

    Attributes:
        problem: why it is down.
        memory: as of the load.
    """

    def __init__(
        self,
        load: Load,
        log: Path,
        note: Callable[[str], None],
        command: Sequence[str] = CHILD_COMMAND,
        *,
        keeper: KeepAwake | None = None,
        share: Path | None = None,
        join: Path | None = None,
    ) -> None:
        self.state: State = "loading"
        self.problem = self._problem_kind = ""
        self.info: ModelSpec | None = None
        self.memory = MemoryUse()
        self.admission = Admission(load.parallel)
        self.on_progress: Callable[[LoadProgress], None] = lambda _: None
        self.on_guests: Callable[[int], None] = lambda _: None
        self._load, self._log, self._note, self._command = load, log, note, command
        self._keeper, self._share, self._join = keeper, share, join
        self.on_lost: Callable[[], None] = lambda: None
        self.on_loaded: Callable[[], None] = lambda: None
        self._lost_s = 0.0
        self._process: EngineLink | None = None
        self._number = 0
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._open: dict[int, OpenRequest] = {}
        self._questions: dict[int, asyncio.Future[PromptTokens]] = {}
        self._embeddings: dict[int, asyncio.Future[Embedded]] = {}
        self._weighings: dict[int, asyncio.Future[tuple[ModelLine, ...]]] = {}
        self._changed = asyncio.Event()
        self._loads = 0  # the number of the last load that was heard of
        self._began_s = self._loaded_s = 0.0
        self._load_s: float | None = None
        self._closing = False

    # Its life -------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin loading in a new or begun process; ``ready`` awaits it."""
        self.begin()
        self._ask(self._load)
        self._tell_busy()

    def begin(self) -> None:
        """Start a process unless an unloaded one runs. Raises EngineDownError."""
        if self._process is not None and self._process.alive and self.state == "loading":
            return
        self.state, self.problem, self._began_s = "loading", "", time.monotonic()
        self._problem_kind = ""
        self._changed.clear()
        self._number += 1  # by which its events are known: the first may come before it is held here
        loop, number = self._loop, self._number

        def receive(event: BackendEvent) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._receive, number, event)

        try:
            self._process = self._connected(receive)
        except (OSError, SharingError) as error:
            why = getattr(error, "strerror", None) or error
            self.state, self.problem, self._problem_kind = "down", f"the engine can't be started: {why}", DIED
            self._changed.set()
            raise self._down() from error

    def _connected(self, receive: Callable[[BackendEvent], object]) -> EngineLink:
        if self._join is not None:
            return EngineGuest(self._join, receive, follows=True)
        process = EngineProcess(self._command, self._log, receive)
        if self._share is not None:
            process.send(Share(str(self._share)))
        return process

    async def weigh(self, names: Sequence[str], context: int) -> tuple[ModelLine, ...]:
        """Return the needs of local models at a KV context. Raises RequestError."""
        self.begin()
        id = next(self._ids)
        answer: asyncio.Future[tuple[ModelLine, ...]] = self._loop.create_future()
        self._weighings[id] = answer
        question = Question("disk", "", kv=self._load.kv, context=context, prompt=context, names=tuple(names))
        self._ask(AskWhatIf(id, question))
        try:
            return await answer
        finally:
            self._weighings.pop(id, None)

    def limit_memory(self, nbytes: int | None) -> None:
        """Set the byte limit; None: the system's limit."""
        if nbytes != self._load.memory:
            self._load = replace(self._load, memory=nbytes)
            if self.state == "ready":
                self._ask(LimitMemory(nbytes))
                self._reckon_room()

    async def ready(self) -> None:
        """Wait for the load. Raises RequestError if it fails."""
        while self.state == "loading":
            await self._changed.wait()
        if self.state == "down":
            status, code = LOADING.get(self._problem_kind, (400, "model_not_loaded"))
            raise RequestError(self.problem, status=status, code=code, retry_after_s=RETRY_S if status == 503 else None)

    async def close(self) -> None:
        self._closing = True
        if self._process is not None:
            await asyncio.to_thread(self._process.close)

    def _down(self) -> EngineDownError:
        began_s = self._began_s if self.state == "loading" else time.monotonic()  # it is started again
        left = RETRY_S if self._load_s is None else max(1, round(began_s + self._load_s - time.monotonic()))
        why = self.problem or "the model is being loaded"
        return EngineDownError(why, left)

    def _check(self) -> None:
        """Raise EngineDownError if there is no engine; restarts one that was given up."""
        if self.state == "down" and not self._closing and self._join is None:
            problem = self.problem
            self.start()
            self.problem = problem
        if self.state != "ready":
            raise self._down()

    def _ask(self, request: Request) -> None:
        assert self._process is not None
        self._process.send(request)

    def _tell_busy(self) -> None:
        busy = bool(self._open) or self.state == "loading"
        if self._process is not None:
            self._process.set_busy(busy)
        if self._keeper is not None:
            self._keeper.tell(self, busy=bool(self._open))

    # Requests -------------------------------------------------------------------------------------------------------------

    def check(self, request: ServedRequest) -> None:
        """Raise RequestError for what the engine would refuse after a long look. Any thread."""
        biases, size = request.sampling.logit_bias, 0 if self.info is None else self.info.vocabulary_size
        if size and biases and biases[-1][0] >= size:
            why = f"token id {biases[-1][0]} is not in the vocabulary of {size:,}"
            raise RequestError(why, "Use the model's own tokenizer.", param="logit_bias", code="unsupported_value")
        self.check_length(request.prompts)

    def check_length(self, prompts: Sequence[Prompt], contexts: int = 1) -> None:
        """Raise RequestError for a prompt that has more tokens than so many contexts, whatever they are. Any thread."""
        info, kv = self.info, self._load.kv
        if info is None or info.capacity is None or info.rolls or kv.when_full == "truncate-middle":
            return
        for prompt in prompts:
            # What templates may leave out: white space at both ends, and parts of replies.
            said = [each.content for each in prompt if isinstance(each, Message) and each.role != "assistant"]
            texts = [prompt] if isinstance(prompt, str) else said
            least = sum(info.longest_pieces.least_tokens(each.strip()) for each in texts)
            if least > contexts * info.capacity:
                raise of_engine(
                    "ContextError",
                    f"the prompt has at least {least:,} tokens, but the model's context is {info.capacity:,}",
                    "Shorten it, or start the server with --on-full truncate-middle.",
                )

    @asynccontextmanager
    async def replies(self, request: ServedRequest, model: ModelSpec) -> "AsyncIterator[ReplyFeed]":
        """Start the replies of a request; leaving the block cancels them. Raises RequestError."""
        self._check()
        if self.info != model:
            raise self._down()
        count = len(request.prompts) * request.n
        self.admission.enter(count)
        load, opened = self._loads, OpenRequest(request.one_call)
        try:
            prompts = [
                await self._tokens_of(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompts
            ]
            self._check()
            for first in range(0, count, request.n):
                prompt = prompts[first // request.n]
                asked, *others = [self._asked(request, prompt, sample, load) for sample in range(request.n)]
                self._generate(opened, first, [asked])
                if self._load.prompt_cache:
                    opened.unasked[first] = others
                else:
                    self._generate(opened, first + 1, others)
            self._tell_busy()
            yield ReplyFeed(self, opened)
        finally:
            for id in list(opened.left):
                self._forget(opened, id)
                if self.state != "down":
                    self._ask(Cancel(id))
            for _ in range(count - len(opened.replies)):
                self.admission.leave()
            self._tell_busy()

    def _asked(self, request: ServedRequest, prompt: Prompt, sample: int, load: int) -> Generate:
        return Generate(
            next(self._ids),
            tuple(each for each in prompt if isinstance(each, Message)),
            request.sampling_of(sample),
            continues=request.continues,
            template=request.template,
            tokens=tuple(each for each in prompt if isinstance(each, int)),
            watched=False,
            load=load,
        )

    def _generate(self, opened: OpenRequest, first: int, asked: Sequence[Generate]) -> None:
        """Start replies numbered from ``first``."""
        for number, each in enumerate(asked, first):
            opened.replies[each.id] = number
            opened.left.add(each.id)
            self._open[each.id] = opened
            self._ask(each)
            if opened.held:
                self._ask(Hold(each.id))

    async def _tokens_of(self, text: str) -> tuple[int, ...]:
        told = await self.tokens(text)
        check_told(told, "invalid_prompt")
        if not told.tokens:
            raise RequestError("the prompt is empty", param="prompt", code="invalid_prompt")
        return told.tokens

    async def tokens(
        self,
        text: str,
        messages: tuple[Message, ...] = (),
        template: TemplateOptions | None = None,
        *,
        continues: bool = False,
    ) -> PromptTokens:
        """Tokenize a text or conversation. continues: it ends with a reply to be continued. Raises EngineDownError."""
        self._check()
        id, load = next(self._ids), self._loads
        answer: asyncio.Future[PromptTokens] = self._loop.create_future()
        self._questions[id] = answer
        self._ask(AskTokens(id, text, messages, template or TemplateOptions(), continues))
        try:
            told = await answer
        finally:
            self._questions.pop(id, None)
        if load != self._loads:
            raise self._down()
        return told

    async def embeddings(self, asked: EmbeddingRequest) -> list[Embedded]:
        """Embed texts, some at a time: replies take turns. Raises RequestError."""
        made = []
        for first in range(0, len(asked.texts), TOGETHER):
            self._check()
            id = next(self._ids)
            answer: asyncio.Future[Embedded] = self._loop.create_future()
            self._embeddings[id] = answer
            self._ask(
                AskEmbeddings(id, asked.texts[first : first + TOGETHER], asked.prompt, asked.dimensions, asked.truncate)
            )
            try:
                told = await answer
            finally:
                self._embeddings.pop(id, None)
            if told.error:
                raise of_engine(told.kind, told.error, told.hint)
            made.append(told)
        return made

    def _forget(self, opened: OpenRequest, id: int, cost: ReplyCost | None = None) -> None:
        if id in opened.left:
            opened.left.discard(id)
            self._open.pop(id, None)
            self.admission.leave(cost)
            self._tell_busy()

    def read(self, opened: OpenRequest) -> None:
        if opened.held and opened.came.qsize() <= CAUGHT_UP:
            opened.held = False
            self._hold(opened)

    def _hold(self, opened: OpenRequest) -> None:
        for id in opened.left:
            self._ask(Hold(id) if opened.held else GoOn(id))

    # What the process says ------------------------------------------------------------------------------------------------

    def _receive(self, number: int, event: BackendEvent) -> None:
        if number != self._number:
            return
        match event:
            case ReplyEvent(id, said):
                if (opened := self._open.get(id)) is not None and isinstance(said, Event):
                    self._receive_event(opened, id, said)
            case RequestFailed(int(id), error, hint, kind):
                if (opened := self._open.get(id)) is not None:
                    number = opened.replies[id]
                    self._forget(opened, id)
                    opened.came.put_nowait((number, of_engine(kind, error, hint)))
            case PromptTokens(id):
                if (answer := self._questions.get(id)) is not None and not answer.done():
                    answer.set_result(event)
            case Embedded(id):
                if (vectors := self._embeddings.get(id)) is not None and not vectors.done():
                    vectors.set_result(event)
            case WhatIf(id, answer, error) if answer is not None or error:
                if (weighed := self._weighings.get(id)) is not None and not weighed.done():
                    weighed.set_result(() if answer is None else answer.models)
            case LoadProgress():
                self.on_progress(event)
            case Loading():  # a chat whose engine this is loads another model
                self.state, self._began_s = "loading", time.monotonic()
                self._changed.clear()
            case Loaded(info, memory=memory, load=load):
                self._loads = load
                self._loaded(info, memory)
            case RequestFailed(None, error, hint, kind):
                self._give_up(" ".join(f"{error}. {hint}".split()), kind)
            case Guests(count):
                self.on_guests(count)
            case EngineNotice(text):
                self._note(text)
            case Died(why, last_line):
                self._died(f"the engine ended ({why})", last_line)

    def _receive_event(self, opened: OpenRequest, id: int, said: Event) -> None:
        number = opened.replies[id]
        if isinstance(said, Piece | ToolCall | Finished):
            # It has read its prompt: the others find that in the prompt cache.
            self._generate(opened, number + 1, opened.unasked.pop(number, ()))
        if isinstance(said, Finished):
            metrics = said.metrics
            known = said.reason != "cancelled" and metrics.total_s is not None
            cost = ReplyCost((metrics.total_s or 0.0) - (metrics.queue_s or 0.0), metrics.kv_bytes) if known else None
            self._forget(opened, id, cost)
        elif isinstance(said, ToolCall) and not said.problem and opened.one_call:
            self._ask(Cancel(id))
        opened.came.put_nowait((number, said))
        if not opened.held and opened.came.qsize() >= BEHIND:
            opened.held = True
            self._hold(opened)

    def _loaded(self, info: ModelSpec, memory: MemoryUse) -> None:
        self._loaded_s = time.monotonic()
        if self.state == "loading":
            self._load_s = self._loaded_s - self._began_s
        self.info, self.state = info, "ready"
        self.problem = ""
        self.memory = memory
        self._reckon_room()
        self._tell_busy()
        self._changed.set()
        self.on_loaded()

    def _reckon_room(self) -> None:
        most = self.memory.budget_bytes if self._load.memory is None else self._load.memory
        if most is not None and self.memory.active_bytes is not None:
            self.admission.room_bytes = max(0, most - self.memory.active_bytes)

    def _give_up(self, problem: str, kind: str) -> None:
        self.state, self.problem, self._problem_kind = "down", problem, kind
        if self._process is not None and self._join is None:  # whose engine it is may load another model
            self._process.kill()
        self._changed.set()
        self._fail_all()

    def _died(self, problem: str, last_line: str) -> None:
        lasted = self.state == "ready" and time.monotonic() - self._loaded_s > LASTED_S
        self.state, self.problem, self._problem_kind = "down", problem, DIED
        self.on_guests(0)
        self._note(f"{problem}; {last_line}" if last_line else problem)
        self._fail_all()
        if self._join is not None:
            self._changed.set()
            self._lost_s = time.monotonic()
            self._join_again()
        elif lasted and not self._closing:
            with suppress(EngineDownError):  # it is started by who asks next
                self.start()
                self.problem = problem
        else:
            self._changed.set()

    def _join_again(self) -> None:
        if self._closing or self.state != "down":
            return
        problem = self.problem
        try:
            self.start()
        except EngineDownError:
            self.problem = problem
            if time.monotonic() - self._lost_s < LOST_S:
                self._loop.call_later(JOIN_S, self._join_again)
            else:
                self.on_lost()

    def _fail_all(self) -> None:
        error = self._down()
        for id, opened in list(self._open.items()):
            number = opened.replies[id]
            self._forget(opened, id)
            opened.came.put_nowait((number, error))
        waiting: list[asyncio.Future[Any]] = [
            *self._questions.values(),
            *self._embeddings.values(),
            *self._weighings.values(),
        ]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(error)


class ReplyFeed:
    def __init__(self, engine: ServedEngine, opened: OpenRequest) -> None:
        self._engine, self._opened = engine, opened

    async def next(self, within_s: float | None = None) -> list[Told]:
        """Return events since the last call: at least one, or none after ``within_s`` seconds."""
        came = self._opened.came
        try:
            first = came.get_nowait()
        except asyncio.QueueEmpty:
            try:
                async with asyncio.timeout(within_s):
                    first = await came.get()
            except TimeoutError:
                return []
        found = [first]
        while not came.empty():
            found.append(came.get_nowait())
        self._engine.read(self._opened)
        return found
