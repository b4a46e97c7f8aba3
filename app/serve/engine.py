"""The engine's process as the server has it: asked for replies, heard in the event loop, started again when it dies.

    request ─ Generate ─▶ engine's process ─ events ─▶ reader's thread ─▶ event loop ─▶ the queue of each request

The engine is a process of its own here as in the chat: what ends it ends no server, and writing HTTP takes nothing from its turns.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tokamac.engine.events import Event, Finished, LoadProgress, Message, Piece, ToolCall
from tokamac.engine.options import TemplateOptions

from ..backend.client import CHILD_COMMAND, BackendEvent, Died, EngineLink, EngineProcess
from ..backend.keep_awake import KeepAwake
from ..backend.protocol import (
    AskTokens,
    AskWhatIf,
    Cancel,
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
    ModelInfo,
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
from .admission import Admission, ReplyCost
from .errors import EngineDownError, RequestError, of_engine
from .request import Prompt, ServedRequest

BEHIND, CAUGHT_UP = 256, 64
"""Events that wait for a client's connection: at the first its replies are held, at the second they go on."""
TEXT_EVERY_S = 1 / 60
"""How long text may wait for more of it: as long as the engine's own thread lets it."""
RETRY_S = 5
"""When to try again where nothing is known of how long loading takes."""
LASTED_S = 10.0
"""An engine that dies sooner after it was loaded is not started again before somebody asks."""

DIED = "Died"
LOADING = {
    "MemoryLimitError": (503, "out_of_memory"),
    "DeviceError": (503, "device_failed"),
    DIED: (503, "engine_unavailable"),
}
"""Why a model can't be loaded, by the class of the error: status and code; other reasons are the request's."""

JOIN_S, LOST_S = 0.5, 30.0
"""A process that another program holds: how often its successor is looked for once it is gone, and for how long."""

State = Literal["loading", "ready", "down"]
Told = tuple[int, Event | RequestError]
"""The number of a reply among those of its request, and what came of it: an error ends it."""


@dataclass(slots=True)
class OpenRequest:
    """The replies to one request, and what came of them that nobody has read.

    unasked: by the number of a prompt's first reply, those that begin once it has read the prompt. replies: by their ids, their
    numbers. left: those that have not ended. held: whether the engine was told to wait.
    """

    one_call: bool
    unasked: dict[int, list[Generate]] = field(default_factory=dict)
    replies: dict[int, int] = field(default_factory=dict)
    came: asyncio.Queue[Told] = field(default_factory=asyncio.Queue)
    left: set[int] = field(default_factory=set)
    held: bool = False


class ServedEngine:
    """The engine's process, one after another, and the requests that are open. Used in the event loop's thread alone.

    Args:
        load: the model, and how it is loaded.
        log: the file of the process.
        note: told what a person at the terminal should know.
        command: starts the process.
        keeper: keeps the machine awake while replies are made.
        share: where other programs of the user may ask the same process; None: nowhere.
        join: the socket of a process that is there already, of which whatever model it has is taken; None: one is started.

    Attributes:
        state: what the engine is doing. problem: why it is down.
        info, memory: the loaded model, and what it took when it was loaded.
        admission: how many replies are open.
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
        self.info: ModelInfo | None = None
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
        self._weighings: dict[int, asyncio.Future[tuple[ModelLine, ...]]] = {}
        self._changed = asyncio.Event()
        self._loads = 0  # the number of the last load that was heard of
        self._began_s = self._loaded_s = 0.0
        self._load_s: float | None = None
        self._closing = False

    # Its life -------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Have the model loaded, in a new process unless one was begun; ``ready`` waits for it."""
        self.begin()
        self._ask(self._load)
        self._tell_busy()

    def begin(self) -> None:
        """Start a process, unless one runs that has loaded nothing. Raises EngineDownError where it can't be."""
        if self._process is not None and self._process.alive and self.state == "loading":
            return
        self.state, self.problem, self._began_s = "loading", "", time.monotonic()
        self._problem_kind = ""
        self._changed.clear()
        self._number += 1  # by which its events are known: the first may come before it is held here
        loop, number = self._loop, self._number

        def hear(event: BackendEvent) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._hear, number, event)

        try:
            self._process = self._connected(hear)
        except (OSError, SharingError) as error:
            why = getattr(error, "strerror", None) or error
            self.state, self.problem, self._problem_kind = "down", f"the engine can't be started: {why}", DIED
            self._changed.set()
            raise self._down() from error

    def _connected(self, hear: Callable[[BackendEvent], object]) -> EngineLink:
        if self._join is not None:
            return EngineGuest(self._join, hear, follows=True)
        process = EngineProcess(self._command, self._log, hear)
        if self._share is not None:
            process.send(Share(str(self._share)))
        return process

    async def weigh(self, names: Sequence[str], context: int) -> tuple[ModelLine, ...]:
        """Return what models on the disk would take here, with keys and values of such a context. Raises RequestError."""
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
        """Let the model take so many bytes from now on; None is the system's limit."""
        if nbytes != self._load.memory:
            self._load = replace(self._load, memory=nbytes)
            if self.state == "ready":
                self._ask(LimitMemory(nbytes))
                self._reckon_room()

    async def ready(self) -> None:
        """Wait until the model is loaded. Raises RequestError where it is not going to be."""
        while self.state == "loading":
            await self._changed.wait()
        if self.state == "down":
            status, code = LOADING.get(self._problem_kind, (400, "model_not_loaded"))
            raise RequestError(self.problem, status=status, code=code, retry_after_s=RETRY_S if status == 503 else None)

    async def close(self) -> None:
        """End the process; what it computed of prompts is written before."""
        self._closing = True
        if self._process is not None:
            await asyncio.to_thread(self._process.close)

    def _down(self) -> EngineDownError:
        """Return what a client is told while there is no engine."""
        began_s = self._began_s if self.state == "loading" else time.monotonic()  # it is started again
        left = RETRY_S if self._load_s is None else max(1, round(began_s + self._load_s - time.monotonic()))
        why = self.problem or "the model is being loaded"
        return EngineDownError(why, left)

    def _check(self) -> None:
        """Raise EngineDownError where there is no engine; start one that was given up."""
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

    @asynccontextmanager
    async def replies(self, request: ServedRequest, model: ModelInfo) -> "AsyncIterator[ReplyFeed]":
        """Ask ``model`` for the replies to a request; those that run when the block is left are cancelled. Raises RequestError."""
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
        """Return what asks for sample ``i`` of a prompt of the model of that load."""
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
        """Ask for replies whose numbers begin with ``first``."""
        for number, each in enumerate(asked, first):
            opened.replies[each.id] = number
            opened.left.add(each.id)
            self._open[each.id] = opened
            self._ask(each)
            if opened.held:
                self._ask(Hold(each.id))

    async def _tokens_of(self, text: str) -> tuple[int, ...]:
        told = await self.tokens(text)
        if told.error or not told.tokens:
            raise RequestError(told.error or "the prompt is empty", param="prompt", code="invalid_prompt")
        return told.tokens

    async def tokens(
        self,
        text: str,
        messages: tuple[Message, ...] = (),
        template: TemplateOptions | None = None,
        *,
        continues: bool = False,
    ) -> PromptTokens:
        """Return the tokens of a text, or of a conversation, which may end with a reply that goes on. Raises EngineDownError."""
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

    def _forget(self, opened: OpenRequest, id: int, cost: ReplyCost | None = None) -> None:
        """A reply is over."""
        if id in opened.left:
            opened.left.discard(id)
            self._open.pop(id, None)
            self.admission.leave(cost)
            self._tell_busy()

    def read(self, opened: OpenRequest) -> None:
        """Let replies go on whose client has caught up."""
        if opened.held and opened.came.qsize() <= CAUGHT_UP:
            opened.held = False
            self._hold(opened)

    def _hold(self, opened: OpenRequest) -> None:
        for id in opened.left:
            self._ask(Hold(id) if opened.held else GoOn(id))

    # What the process says ------------------------------------------------------------------------------------------------

    def _hear(self, number: int, event: BackendEvent) -> None:
        if number != self._number:
            return
        match event:
            case ReplyEvent(id, said):
                if (opened := self._open.get(id)) is not None and isinstance(said, Event):
                    self._take(opened, id, said)
            case RequestFailed(int(id), error, hint, kind):
                if (opened := self._open.get(id)) is not None:
                    number = opened.replies[id]
                    self._forget(opened, id)
                    opened.came.put_nowait((number, of_engine(kind, error, hint)))
            case PromptTokens(id):
                if (answer := self._questions.get(id)) is not None and not answer.done():
                    answer.set_result(event)
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

    def _take(self, opened: OpenRequest, id: int, said: Event) -> None:
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

    def _loaded(self, info: ModelInfo, memory: MemoryUse) -> None:
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
        """Go on with the process that follows one that died, as soon as it is there."""
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
        waiting: list[asyncio.Future[Any]] = [*self._questions.values(), *self._weighings.values()]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(error)


class ReplyFeed:
    """The replies to one request, while they are made."""

    def __init__(self, engine: ServedEngine, opened: OpenRequest) -> None:
        self._engine, self._opened = engine, opened

    async def next(self, within_s: float | None = None) -> list[Told]:
        """Return what came since the last call, in order: at least one, but none after ``within_s`` seconds without any."""
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
