"""A server's models: resident ones, admission, eviction."""

#     request ─ name ─▶ lease ─▶ in memory: immediate
#                               else one at a time: weigh ─▶ evict idle ─▶ wait for busy, evict ─▶ load
#
# One engine process per model, so an eviction frees everything and a crash affects one model. Leased models are never
# evicted. While a load waits for a busy model, new requests for that one queue behind it, or two models with room for one
# would never alternate. Requests for a loading model share the load, which is cancelled when the last of them leaves.

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokamac.engine.hub.cache import list_models
from tokamac.engine.hub.names import nearest
from tokamac.engine.options import Sampling, TemplateOptions

from ..backend.protocol import Load
from ..backend.sharing import EngineCard
from ..text import units
from .engine import ServedEngine
from .request import RequestError, ServedModel, stopping

# Which models leave memory for another one. Pure arithmetic: who is in use never leaves, of the others the least
# recently used.


@dataclass(frozen=True, slots=True)
class InMemory:
    """A resident model. nbytes: with a context; None is unknown. used: increases with each use."""

    name: str
    nbytes: int | None
    in_use: bool
    used: int


@dataclass(frozen=True, slots=True)
class Eviction:
    """Models to evict, LRU first. idle: immediately. busy: after use. fits: False if it can't fit even alone."""

    idle: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()
    fits: bool = True


def eviction(wanted: int | None, held: Sequence[InMemory], budget: int | None) -> Eviction:
    """Choose evictions for ``wanted`` bytes; an unknown size counts as all memory."""
    if wanted is not None and budget is not None and wanted > budget:
        return Eviction(fits=False)
    left = sorted(held, key=lambda each: (each.in_use, each.used))
    leaving: list[InMemory] = []
    while left and not _fit(wanted, left, budget):
        leaving.append(left.pop(0))
    idle = tuple(each.name for each in leaving if not each.in_use)
    busy = tuple(each.name for each in leaving if each.in_use)
    return Eviction(idle, busy)


def _fit(wanted: int | None, beside: Sequence[InMemory], budget: int | None) -> bool:
    taken = [each.nbytes for each in beside if each.nbytes is not None]
    if wanted is None or budget is None or len(taken) < len(beside):
        return False
    return wanted + sum(taken) <= budget


def shares(taken: Mapping[str, int | None], budget: int | None) -> dict[str, int | None]:
    """Return byte limits per model, with the rest divided evenly. None: the system's limit, if any is unknown."""
    known = [each for each in taken.values() if each is not None]
    if budget is None or len(known) < len(taken):
        return dict.fromkeys(taken, None)
    spare = max(0, budget - sum(known)) // len(taken)
    return {name: (nbytes or 0) + spare for name, nbytes in taken.items()}


# Tokens of keys and values that a model is given room for, beside its weights, when it is asked whether it fits.
CONTEXT = 8192
WAIT_S = 120.0  # how long a request may wait for models that are in use to end their replies; then it is refused
RETRY_S = 10
LONGEST_KEEP_S = 1e7  # more than this is for ever, and more than timers take
LISTED_S = 5.0  # how long the list of models on the disk is believed

Loads = Callable[[str], Load]
EngineMaker = Callable[[Load, Path, Path | None], ServedEngine]
CardMaker = Callable[[int, Load], EngineCard]


@dataclass(frozen=True, slots=True)
class Offer:
    """Models that can be requested.

    load, id, aliases: the default model. allowed: others. any_downloaded: also any complete model in the Hugging Face
    cache. load_of: load settings of another model.
    """

    load: Load
    id: str
    aliases: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    any_downloaded: bool = False
    load_of: Loads | None = None

    @property
    def several(self) -> bool:
        return bool(self.allowed) or self.any_downloaded

    def loaded_as(self, id: str) -> Load:
        if id == self.id:
            return self.load
        return self.load.for_model(id, None, None) if self.load_of is None else self.load_of(id)


@dataclass(slots=True)
class Resident:
    """A resident or loading model.

    nbytes: with a context; None is unknown. leases: requests and guests. leaving: evict once unused. card: of its shared
    engine. keep_alive_s: how long it stays unused; None as the server has it. expires_s: when it leaves, since 1970. loaded_s:
    when it was loaded, monotonic.
    """

    id: str
    engine: ServedEngine
    number: int
    card: EngineCard | None = None
    guests: int = 0
    model: ServedModel | None = None
    nbytes: int | None = None
    leases: int = 0
    used: int = 0
    leaving: bool = False
    keep_alive_s: float | None = None
    expiry: asyncio.TimerHandle | None = None
    expires_s: float = math.inf
    loaded_s: float = 0.0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def served(self) -> ServedModel:
        assert self.model is not None
        return self.model


@dataclass(slots=True)
class PendingLoad:
    """A queued or running load. waiting: requests that each get a lease."""

    id: str
    waiting: int = 0
    task: "asyncio.Task[Resident]" = field(init=False)


class ModelPool:
    """The server's models. Event loop thread only.

    Args:
        make_engine: from load settings, log and share socket.
        card: makes the engine card of a socket; None: not shared.
        log: the first engine's; others are next to it.
        note: receives messages for the terminal.
        sampling, template: request defaults.
        idle_s: how long an unused model stays, unless a request says otherwise; inf for ever.
    """

    def __init__(
        self,
        offer: Offer,
        make_engine: EngineMaker,
        log: Path,
        note: Callable[[str], None],
        *,
        sampling: Sampling = Sampling(),  # noqa: B008  # frozen
        template: TemplateOptions = TemplateOptions(),  # noqa: B008
        card: CardMaker | None = None,
        idle_s: float = math.inf,
    ) -> None:
        self._idle_s = idle_s
        self._offer, self._make_engine, self._log, self._note = offer, make_engine, log, note
        self._sampling, self._template = sampling, template
        self._card = card
        self._residents: dict[str, Resident] = {}
        self._loads: dict[str, PendingLoad] = {}
        self._turn = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()
        self._uses = itertools.count(1)
        self._budget = offer.load.memory
        self._weighed: dict[str, int] = {}
        self._downloaded: tuple[float, tuple[str, ...]] = (float("-inf"), ())
        self._closing = False
        self._first = self._admit(offer.id)

    # Its life -------------------------------------------------------------------------------------------------------------

    @property
    def first_engine(self) -> ServedEngine:
        return self._first.engine

    async def start(self) -> ServedModel:
        """Load the first model. Raises RequestError."""
        async with self._turn:
            self._first.engine.start()
            await self._first.engine.ready()
            self._is_loaded(self._first)
        self._leave_later(self._first)
        return self.default

    async def close(self) -> None:
        self._closing = True
        for load in self._loads.values():
            load.task.cancel()
        for each in self._residents.values():
            self._hide(each)
        await asyncio.gather(*(each.engine.close() for each in self._residents.values()))
        async with self._turn:  # what was being loaded has ended
            pass

    @property
    def default(self) -> ServedModel:
        assert self._first.model is not None
        return self._first.model

    @property
    def loaded(self) -> list[Resident]:
        return sorted((each for each in self._residents.values() if each.model), key=lambda each: -each.used)

    @property
    def busy(self) -> tuple[int, int]:
        admissions = [each.engine.admission for each in self.loaded]
        return sum(min(each.open, each.places) for each in admissions), sum(each.waiting for each in admissions)

    def source(self, id: str) -> str:
        return self._offer.loaded_as(id).model

    async def offered(self) -> list[str]:
        here = {each.id for each in self.loaded}
        return [
            id
            for id in dict.fromkeys((self._offer.id, *self._offer.allowed, *await self._on_disk()))
            if id and id not in here
        ]

    # Leases ---------------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, name: str | None, keep_alive_s: float | None = None) -> AsyncIterator[Resident]:
        """Hold a model in memory, loading it if needed. Raises RequestError.

        keep_alive_s: how long it shall stay afterwards, until another request says otherwise; inf for ever.
        """
        resident = await self._leased(await self.meant(name))
        resident.keep_alive_s = resident.keep_alive_s if keep_alive_s is None else keep_alive_s
        try:
            yield resident
        finally:
            self._give_back(resident)

    def _give_back(self, resident: Resident) -> None:
        resident.leases -= 1
        resident.used = next(self._uses)
        if not resident.leases:
            resident.idle.set()
            self._leave_later(resident)

    def _leave_later(self, resident: Resident) -> None:
        keep_s = self._idle_s if resident.keep_alive_s is None else resident.keep_alive_s
        if keep_s > LONGEST_KEEP_S or not resident.id or self._closing:  # a chat's engine is the chat's to end
            return
        loop = asyncio.get_running_loop()
        resident.expires_s = time.time() + keep_s
        why = f"nobody used it for {units.seconds(keep_s)}" if keep_s else "its keep_alive is over"
        resident.expiry = loop.call_later(
            keep_s, lambda: self._leaving.add(loop.create_task(self._expire(resident, why)))
        )

    async def _expire(self, resident: Resident, why: str) -> None:
        """Give an unused model's memory back: the next request loads it again."""
        async with self._turn:
            if not resident.leases and self._residents.get(resident.id) is resident and not self._closing:
                await self._let_go([resident], f"{why}; the next request loads it again")
                self._share()
        self._leaving = {task for task in self._leaving if not task.done()}

    def _count_guests(self, resident: Resident, count: int) -> None:
        while resident.guests < count:
            resident.guests += 1
            self._hold(resident)
        while resident.guests > count:
            resident.guests -= 1
            self._give_back(resident)

    async def meant(self, name: str | None) -> str:
        """Resolve a name to an ID, with or without Ollama's tag. Raises RequestError."""
        offer, name = self._offer, None if name is None else name.removesuffix(":latest")
        if name is None or name in (offer.id, *offer.aliases) or name in self.default.names:
            return offer.id
        for each in self.loaded:
            if name in each.served.names:
                return each.id
        if name in offer.allowed or name in await self._on_disk():
            return name
        raise self._unknown(name)

    def _unknown(self, name: str) -> RequestError:
        known = [self._offer.id, *self._offer.allowed, *self._downloaded[1]]
        if not self._offer.several:
            why = f"model {name!r:.200} not found"
            hint = f"This server has {self._offer.id}. Ask for that, or start it with --allow {name:.200}."
        else:
            near = nearest(name, known)
            why = f"model {name!r:.200} not found: it may not be asked for"
            hint = f"Did you mean {near}?" if near else f"There are {', '.join(known[:5])}{', …' if known[5:] else ''}."
        return RequestError(why, hint, status=404, param="model", code="model_not_found")

    async def _on_disk(self) -> tuple[str, ...]:
        if not self._offer.any_downloaded:
            return ()
        since, found = self._downloaded
        if time.monotonic() - since > LISTED_S:
            found = tuple(each.id for each in await asyncio.to_thread(list_models) if each.whole)
            self._downloaded = (time.monotonic(), found)
        return found

    async def _leased(self, id: str) -> Resident:
        resident = self._residents.get(id)
        if resident is not None and resident.model is not None and not resident.leaving:
            return self._hold(resident)
        if (load := self._loads.get(id)) is None:
            load = self._loads[id] = PendingLoad(id)
            load.task = asyncio.ensure_future(self._lease_to_all(load))
        load.waiting += 1
        try:
            await asyncio.wait((load.task,))
        except asyncio.CancelledError:
            self._leave(load)
            raise
        if load.task.cancelled():
            raise stopping()
        return load.task.result()

    async def _lease_to_all(self, load: PendingLoad) -> Resident:
        try:
            async with self._turn:  # a lock of asyncio lets in who asked first
                resident = self._residents.get(load.id) or await self._loaded(load.id)
                for _ in range(load.waiting):
                    self._hold(resident)
                return resident
        finally:
            self._forget(load)

    def _leave(self, load: PendingLoad) -> None:
        """Release a waiting request's lease; cancels a load that nobody awaits."""
        load.waiting -= 1
        if load.task.done():
            if not load.task.cancelled() and load.task.exception() is None:
                self._give_back(load.task.result())
        elif not load.waiting:
            self._forget(load)  # who asks from here on has it loaded anew
            load.task.cancel()

    def _forget(self, load: PendingLoad) -> None:
        if self._loads.get(load.id) is load:
            del self._loads[load.id]

    def _hold(self, resident: Resident) -> Resident:
        resident.leases += 1
        if resident.expiry is not None:
            resident.expiry.cancel()
            resident.expiry, resident.expires_s = None, math.inf
        resident.idle.clear()
        resident.used = next(self._uses)
        return resident

    # Loads ----------------------------------------------------------------------------------------------------------------

    def _admit(self, id: str) -> Resident:
        taken = {each.number for each in self._residents.values()}
        number = next(each for each in itertools.count() if each not in taken)
        log = self._log if not number else self._log.with_stem(f"{self._log.stem}-{number}")
        load = self._offer.loaded_as(id)
        card = None if self._card is None else self._card(number, load)
        engine = self._make_engine(load, log, None if card is None else Path(card.socket))
        resident = Resident(id, engine, number, card)
        engine.on_loaded = partial(self._renew, resident)
        engine.on_guests = partial(self._count_guests, resident)
        resident.nbytes = self._weighed.get(id)
        resident.idle.set()
        self._residents[id] = resident
        return resident

    async def _loaded(self, id: str) -> Resident:
        """Load after evictions. Raises RequestError, leaving nothing behind."""
        if self._closing:
            raise stopping()
        resident = self._admit(id)
        engine = resident.engine
        try:
            if resident.nbytes is None:
                await self._weigh(resident)
            await self._make_room(resident)
            self._share()
            self._note(f"loading {id}")
            engine.start()
            await engine.ready()
        except BaseException as error:
            del self._residents[id]
            self._share()
            try:
                await _finished(engine.close())
            finally:
                self._hide(resident)  # the process may have been ended before it took its socket away
            if isinstance(error, RequestError) and not error.param:
                error.message, error.param = f"{id} can't be loaded: {error.message}", "model"
            raise
        self._is_loaded(resident)
        return resident

    def _renew(self, resident: Resident) -> None:
        """Update what is served: a chat that owns the engine may have loaded another model."""
        info = resident.engine.info
        assert info is not None
        if resident.model is None or resident.model.info != info:
            aliases = self._offer.aliases if resident.id == self._offer.id else ()
            created = int(time.time())
            resident.model = ServedModel(
                resident.id or info.name, info, aliases, self._sampling, self._template, created
            )
        self._show(resident)

    def _show(self, resident: Resident) -> None:
        """Publish the engine's card again: during a restart, others may have removed it."""
        if resident.card is None or self._closing or self._residents.get(resident.id) is not resident:
            return
        try:
            resident.card.write()
        except OSError as error:
            self._note(f"other programs will not find this engine: {error.strerror or error}")

    def _is_loaded(self, resident: Resident) -> None:
        engine, offer = resident.engine, self._offer
        resident.loaded_s = time.monotonic()
        if resident.id == offer.id:
            self._first = resident
        if self._budget is None and len(self._residents) == 1:
            self._budget = engine.memory.budget_bytes  # the system's, while no other model takes of it
        known = [each for each in (resident.nbytes, engine.memory.active_bytes) if each is not None]
        resident.nbytes = None if resident.nbytes is None else max(known)

    async def _weigh(self, wanted: Resident) -> None:
        unknown = [each for each in self._residents.values() if each.nbytes is None]
        names: dict[str, list[str]] = {}
        for each in unknown:
            load = self._offer.loaded_as(each.id)
            names[each.id] = [load.model, *([] if load.draft is None else [load.draft])]
        lines = iter(await wanted.engine.weigh([name for each in names.values() for name in each], CONTEXT))
        for each in unknown:
            taken = [line.figures.memory_bytes for line in itertools.islice(lines, len(names[each.id]))]
            if taken and None not in taken:
                each.nbytes = self._weighed[each.id] = max(
                    sum(filter(None, taken)), each.engine.memory.active_bytes or 0
                )

    async def _make_room(self, wanted: Resident) -> None:
        """Evict until it fits. Raises RequestError if impossible or not in time."""
        while True:  # who is idle may be in use once another one has left
            beside = [each for each in self._residents.values() if each is not wanted]
            held = [InMemory(each.id, each.nbytes, bool(each.leases), each.used) for each in beside]
            leave = eviction(wanted.nbytes, held, self._budget)
            if not leave.fits:
                raise self._too_large(wanted)
            if leave.idle:
                await self._let_go([self._residents[leave.idle[0]]], f"{wanted.id} needs it")
            elif leave.busy:
                await self._outlast([self._residents[id] for id in leave.busy], wanted.id)
            else:
                return

    def _too_large(self, wanted: Resident) -> RequestError:
        taken, most = units.size(wanted.nbytes), units.size(self._budget)
        return RequestError(
            f"{wanted.id} does not fit: with a context of {CONTEXT:,} tokens it needs {taken}, and {most} are available",
            "Ask for a smaller model.",
            param="model",
            code="model_too_large",
        )

    async def _outlast(self, busy: Sequence[Resident], wanted: str) -> None:
        """Wait for models to become idle and evict them. Raises RequestError after ``WAIT_S``."""
        for each in busy:
            each.leaving = True
        try:
            async with asyncio.timeout(WAIT_S):
                for each in busy:
                    await each.idle.wait()
        except TimeoutError:
            names = ", ".join(each.id for each in busy if each.leases)
            raise RequestError(
                f"there is no room for {wanted} while {names} is in use", f"Try again in {RETRY_S} s.", status=503,
                param="model", code="models_in_use", retry_after_s=RETRY_S,
            ) from None  # fmt: skip
        finally:
            for each in busy:
                each.leaving = False
        await self._let_go(busy, f"{wanted} needs it")

    async def _let_go(self, idle: Sequence[Resident], why: str) -> None:
        """Evict models; they can't be found from here on."""
        for each in idle:
            self._note(f"{each.id} leaves memory: {why}")
            self._hide(each)
            del self._residents[each.id]
        await _finished(asyncio.gather(*(each.engine.close() for each in idle)))

    @staticmethod
    def _hide(resident: Resident) -> None:
        if resident.card is not None:
            resident.card.remove()

    def _share(self) -> None:
        taken = {each.id: each.nbytes for each in self._residents.values()}
        share = shares(taken, self._budget) if len(taken) > 1 else dict.fromkeys(taken, self._offer.load.memory)
        for each in self._residents.values():
            each.engine.limit_memory(share[each.id])


async def _finished(work: Awaitable[Any]) -> None:
    """Wait for ``work`` even if this task is cancelled: a process holds its log and socket to its end."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
