"""The models of a server by name: which are in memory, which may come, and who leaves for them.

    request ─ name ─▶ lease ─▶ in memory: at once
                              else, one at a time: weigh it ─▶ who is idle leaves ─▶ who is busy ends and leaves ─▶ load

Each model has an engine's process of its own, so a model that leaves gives back all that it held, and one that dies takes no other
with it. A model that is leased never leaves. While a load waits for a busy one, further requests for that one stand in the same
line, or two models that have room for one would never take turns. Requests for a model that is on its way wait for the same load,
which ends when the last of them has left.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokamac.engine.hub.cache import list_models
from tokamac.engine.hub.names import nearest
from tokamac.engine.options import Sampling, TemplateOptions

from .. import units
from ..backend.protocol import Load
from ..backend.sharing import EngineCard
from .engine import ServedEngine
from .errors import RequestError, stopping
from .request import ServedModel
from .room import InMemory, eviction, shares

CONTEXT = 8192
"""Tokens of keys and values that a model is given room for, beside its weights, when it is asked whether it fits."""
WAIT_S = 120.0
"""How long a request may wait for models that are in use to end their replies; then it is refused."""
RETRY_S = 10
LISTED_S = 5.0
"""How long the list of models on the disk is believed."""

Loads = Callable[[str], Load]
EngineMaker = Callable[[Load, Path, Path | None], ServedEngine]
CardMaker = Callable[[int, Load], EngineCard]


@dataclass(frozen=True, slots=True)
class Offer:
    """What may be asked for by name.

    load, id, aliases: the model that a request means which names none, how it is loaded, what else it is called. allowed: other
    models. any_downloaded: whatever is whole in the Hugging Face cache, too. load_of: how another one is loaded.
    """

    load: Load
    id: str
    aliases: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    any_downloaded: bool = False
    load_of: Loads | None = None

    @property
    def several(self) -> bool:
        """Whether another model than the one may be asked for."""
        return bool(self.allowed) or self.any_downloaded

    def loaded_as(self, id: str) -> Load:
        """Return how a model is loaded."""
        if id == self.id:
            return self.load
        return self.load.of(id, None, None) if self.load_of is None else self.load_of(id)


@dataclass(slots=True)
class Resident:
    """A model in memory, or on its way there.

    nbytes: what it takes with a context; None is unknown. leases: requests, and guests of its engine, that use it. leaving: it is
    to leave once none does. card: where other programs of the user find its engine.
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
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def served(self) -> ServedModel:
        """What is served of it, once it is loaded."""
        assert self.model is not None
        return self.model


@dataclass(slots=True)
class PendingLoad:
    """A model that waits for its turn to be loaded, or is being loaded. waiting: requests, each of which gets a lease."""

    id: str
    waiting: int = 0
    task: "asyncio.Task[Resident]" = field(init=False)


class ModelPool:
    """The models of a server. Used in the event loop's thread alone.

    Args:
        offer: what may be asked for.
        make_engine: makes an engine from how its model is loaded, its log, and where it is shared.
        card: makes what is said of an engine that other programs of the user may use, of its socket; None: they may not.
        log: the log of the first engine's process; those of others stand beside it.
        note: told what a person at the terminal should know.
        sampling, template: what holds where a request says nothing.
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
    ) -> None:
        self._offer, self._make_engine, self._log, self._note = offer, make_engine, log, note
        self._sampling, self._template = sampling, template
        self._card = card
        self._residents: dict[str, Resident] = {}
        self._loads: dict[str, PendingLoad] = {}
        self._turn = asyncio.Lock()
        self._uses = itertools.count(1)
        self._budget = offer.load.memory
        self._weighed: dict[str, int] = {}
        self._downloaded: tuple[float, tuple[str, ...]] = (float("-inf"), ())
        self._closing = False
        self._first = self._admit(offer.id)

    # Its life -------------------------------------------------------------------------------------------------------------

    @property
    def first_engine(self) -> ServedEngine:
        """The engine of the model that the server was started with."""
        return self._first.engine

    async def start(self) -> ServedModel:
        """Load the first model and return it. Raises RequestError."""
        async with self._turn:
            self._first.engine.start()
            await self._first.engine.ready()
            self._is_loaded(self._first)
        return self.default

    async def close(self) -> None:
        """End the processes."""
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
        """The model that a request means which names none, as it was last loaded."""
        assert self._first.model is not None
        return self._first.model

    @property
    def loaded(self) -> list[Resident]:
        """Those in memory, the one used last first."""
        return sorted((each for each in self._residents.values() if each.model), key=lambda each: -each.used)

    @property
    def busy(self) -> tuple[int, int]:
        """How many replies are being made, and how many wait."""
        admissions = [each.engine.admission for each in self.loaded]
        return sum(min(each.open, each.places) for each in admissions), sum(each.waiting for each in admissions)

    async def offered(self) -> list[str]:
        """Return the ids of models that may be asked for and are not loaded."""
        here = {each.id for each in self.loaded}
        return [
            id
            for id in dict.fromkeys((self._offer.id, *self._offer.allowed, *await self._on_disk()))
            if id and id not in here
        ]

    # Leases ---------------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, name: str | None) -> AsyncIterator[Resident]:
        """Hold the model of this name in memory, loaded first if need be. Raises RequestError where it can't be had."""
        resident = await self._leased(await self.meant(name))
        try:
            yield resident
        finally:
            self._give_back(resident)

    def _give_back(self, resident: Resident) -> None:
        resident.leases -= 1
        resident.used = next(self._uses)
        if not resident.leases:
            resident.idle.set()

    def _count_guests(self, resident: Resident, count: int) -> None:
        """Each guest of a model's engine holds it, as a request does."""
        while resident.guests < count:
            resident.guests += 1
            self._take(resident)
        while resident.guests > count:
            resident.guests -= 1
            self._give_back(resident)

    async def meant(self, name: str | None) -> str:
        """Return the id of the model that a name means. Raises RequestError."""
        offer = self._offer
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
            why = f"the model {name!r:.200} is not loaded"
            hint = f"This server has {self._offer.id}. Ask for that, or start it with --allow {name:.200}."
        else:
            near = nearest(name, known)
            why = f"the model {name!r:.200} may not be asked for"
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
        """Return the model of this id with one lease more."""
        resident = self._residents.get(id)
        if resident is not None and resident.model is not None and not resident.leaving:
            return self._take(resident)
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
        """Return a model with a lease for each request that waits for it, loaded in its turn if need be."""
        try:
            async with self._turn:  # a lock of asyncio lets in who asked first
                resident = self._residents.get(load.id) or await self._loaded(load.id)
                for _ in range(load.waiting):
                    self._take(resident)
                return resident
        finally:
            self._forget(load)

    def _leave(self, load: PendingLoad) -> None:
        """A request waits no more: its lease is given back, and what nobody waits for is not loaded."""
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

    def _take(self, resident: Resident) -> Resident:
        resident.leases += 1
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
        """Load a model, once who has to leave for it has left. Raises RequestError, leaving none behind."""
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
        """What an engine has is served from here on: a chat whose engine this is may have loaded another model."""
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
        """Have other programs find a model's engine; who looked while it was started again has removed its card."""
        if resident.card is None or self._closing or self._residents.get(resident.id) is not resident:
            return
        try:
            resident.card.write()
        except OSError as error:
            self._note(f"other programs will not find this engine: {error.strerror or error}")

    def _is_loaded(self, resident: Resident) -> None:
        engine, offer = resident.engine, self._offer
        if resident.id == offer.id:
            self._first = resident
        if self._budget is None and len(self._residents) == 1:
            self._budget = engine.memory.budget_bytes  # the system's, while no other model takes of it
        known = [each for each in (resident.nbytes, engine.memory.active_bytes) if each is not None]
        resident.nbytes = None if resident.nbytes is None else max(known)

    async def _weigh(self, wanted: Resident) -> None:
        """Find what models take that nobody has weighed: the one that is wanted, and the first."""
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
        """Have models leave until there is room. Raises RequestError where there is none, or not in time."""
        while True:  # who is idle may be in use once another one has left
            beside = [each for each in self._residents.values() if each is not wanted]
            held = [InMemory(each.id, each.nbytes, bool(each.leases), each.used) for each in beside]
            leave = eviction(wanted.nbytes, held, self._budget)
            if not leave.fits:
                raise self._too_large(wanted)
            if leave.idle:
                await self._let_go([self._residents[leave.idle[0]]], wanted.id)
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
        """Wait until models are idle, and let them go. Raises RequestError after ``WAIT_S``."""
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
        await self._let_go(busy, wanted)

    async def _let_go(self, idle: Sequence[Resident], wanted: str) -> None:
        """Have models leave memory; from here on nobody finds them."""
        for each in idle:
            self._note(f"{each.id} leaves memory for {wanted}")
            self._hide(each)
            del self._residents[each.id]
        await _finished(asyncio.gather(*(each.engine.close() for each in idle)))

    @staticmethod
    def _hide(resident: Resident) -> None:
        if resident.card is not None:
            resident.card.remove()

    def _share(self) -> None:
        """Let each model take its share of the memory."""
        taken = {each.id: each.nbytes for each in self._residents.values()}
        share = shares(taken, self._budget) if len(taken) > 1 else dict.fromkeys(taken, self._offer.load.memory)
        for each in self._residents.values():
            each.engine.limit_memory(share[each.id])


async def _finished(work: Awaitable[Any]) -> None:
    """Wait for the end of ``work``, though this task is cancelled meanwhile: a process has its log and socket until it ends."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
