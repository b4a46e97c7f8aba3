"""Mirrors rank 0's operations: recorded for followers, then done here; and their replay."""

#     handle     a number for a sequence's caches, a slice or frozen states, from rank 0, kept by all
#     record     {"do": "forward", "lanes": [3], "ids": [[…]]}          sent first, so that others begin as early
#
# All ranks launch each pass with the same outputs, so MLX's collectives meet in order. A decode step's ids,
# unknown to the host, use a collective inside the pass: only rank 0 chooses tokens, so differing last bits
# can't diverge ranks. Dropped objects are released with the next record.

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize

import mlx.core as mx

from ..errors import OptionError
from ..kv.attention import AttendingCache, forced, forcing_fused
from ..kv.costs import AttentionDevice
from ..kv.plan import CachePlan
from ..kv.snapshot import LOCAL, BeforePass, KVSlice, States, TakesBack
from ..model.head import are_asked_for, asking_for_logits
from .team import Record, Team

AHEAD = 2  # passes that a follower launches before it waits for the first of them
POOL_CLEAR_PASSES = 256


class HeldSlice(tuple[Any, ...]):
    handle: int
    dropped: deque[int]

    def __del__(self) -> None:
        self.dropped.append(self.handle)


class HeldStates(tuple[Any, ...]):
    handle: int
    dropped: deque[int]

    def __del__(self) -> None:
        self.dropped.append(self.handle)


class Mirror:
    def __init__(self, team: Team, group: Any, vocabulary: int) -> None:
        self._team, self.group, self.vocabulary = team, group, vocabulary
        self._count = 0
        self._dropped: deque[int] = deque()  # any thread may add to it
        self._caches: dict[int, int] = {}  # by the id of the first of them

    def tell(self, **record: Any) -> None:
        dropped = []
        while self._dropped:
            dropped.append(self._dropped.popleft())
        self._team.tell({**record, "drop": dropped} if dropped else record)

    def new_handle(self) -> int:
        self._count += 1
        return self._count

    def know(self, caches: list[Any], handle: int) -> None:
        key = id(caches[0])
        self._caches[key] = handle
        finalize(caches[0], self._forget, key, handle).atexit = False

    def _forget(self, key: int, handle: int) -> None:
        if self._caches.get(key) == handle:
            del self._caches[key]
        self._dropped.append(handle)

    def handle(self, caches: list[Any]) -> int | None:
        return self._caches.get(id(caches[0]))

    def known_handle(self, caches: list[Any]) -> int:
        found = self.handle(caches)
        if found is None:
            raise OptionError(
                "these caches are on one machine alone", "Load the model without nodes for what you asked for."
            )
        return found

    def slice(self, piece: KVSlice) -> HeldSlice:
        held = HeldSlice(piece)
        held.handle, held.dropped = self.new_handle(), self._dropped
        return held

    def states(self, states: States) -> HeldStates:
        held = HeldStates(states)
        held.handle, held.dropped = self.new_handle(), self._dropped
        return held

    def fail(self, error: BaseException) -> None:
        self._team.fail(f"computing failed on this machine ({' '.join(str(error).split())[:200]})")


class SharedModel:
    def __init__(self, module: Any, mirror: Mirror) -> None:
        self._module, self._mirror = module, mirror

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        """ids (1, N) → logits (1, N, V), launched; unusable if not requested."""
        return self.forward(ids, [cache])

    @property
    def layers(self) -> Any:
        raise OptionError(
            "several nodes hold this model, with the keys and values that it was loaded for",
            "Load it with these settings, or without nodes.",
        )

    def forward(self, ids: mx.array, lanes: Sequence[list[Any]]) -> mx.array:
        """ids (B, N) → logits (B, N, V)."""
        mirror, step = self._mirror, ids.shape[1] == 1
        logits, fused = step or are_asked_for(), forced()
        mirror.tell(
            do="forward",
            lanes=[mirror.known_handle(lane) for lane in lanes],
            ids=None if step else ids.tolist(),
            logits=logits,
            fused=fused is not None,
        )
        try:
            if step:
                ids = share_ids(ids, mirror.group, mirror.vocabulary)
            out = run(self._module, ids, lanes, logits=logits, fused=fused)
            return out if logits else mx.zeros((ids.shape[0], 0, 0))  # to compute them now, the others would have to
        except BaseException as error:
            mirror.fail(error)
            raise


def share_ids(ids: mx.array, group: Any, vocabulary: int) -> mx.array:
    """Return rank 0's ids (B, 1) on all ranks; others pass zeros."""
    # Clamped to ``vocabulary``: if a node is gone, MLX computes on with garbage, and lookups have no bounds.
    # Launched immediately: a later pipeline rank doesn't look at them, and would leave the others waiting.
    summed = mx.distributed.all_sum(ids.astype(mx.uint32), group=group)
    shared = mx.minimum(summed, mx.array(vocabulary - 1, mx.uint32))
    mx.async_eval(shared)  # type: ignore[no-untyped-call]
    return shared


def run(
    module: Any, ids: mx.array, lanes: Sequence[list[Any]], *, logits: bool, fused: AttentionDevice | None
) -> mx.array:
    with forcing_fused(fused):
        if logits:
            with asking_for_logits():
                out = LOCAL.forward(module, ids, lanes)
        else:
            out = LOCAL.forward(module, ids, lanes)
    wanted: list[Any] = [cache.state for lane in lanes for cache in lane]
    wanted += [lane[-1].sent for lane in lanes if isinstance(lane[-1], AttendingCache) and lane[-1].sent is not None]
    mx.async_eval([out, wanted] if logits else wanted)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, slots=True)
class SharedPlan(CachePlan):
    mirror: Mirror = field(repr=False, compare=False, kw_only=True)

    def make(self, keep: int | None = None) -> list[Any]:
        made, handle = CachePlan.make(self, keep), self.mirror.new_handle()
        self.mirror.tell(do="make", keep=keep, handle=handle)
        self.mirror.know(made, handle)
        return made


class SharedTakeBack:
    def __init__(self, caches: list[Any], mirror: Mirror) -> None:
        self._before, self._mirror, self._of = BeforePass(caches), mirror, mirror.known_handle(caches)
        mirror.tell(do="before", caches=self._of)

    def take_back(self, wrong: int, read: int) -> int:
        self._mirror.tell(do="back", caches=self._of, wrong=wrong, read=read)
        return self._before.take_back(wrong, read)


class SharedOperations:
    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    def forward(self, model: SharedModel, ids: mx.array, lanes: Sequence[list[Any]]) -> mx.array:
        return model.forward(ids, lanes) if isinstance(model, SharedModel) else LOCAL.forward(model, ids, lanes)

    def before_pass(self, caches: list[Any]) -> TakesBack:
        known = self._mirror.handle(caches) is not None
        return SharedTakeBack(caches, self._mirror) if known else LOCAL.before_pass(caches)

    def cut(self, caches: list[Any], start: int, stop: int) -> KVSlice:
        made = self._mirror.slice(LOCAL.cut(caches, start, stop))
        self._tell("cut", caches=[caches], numbers=[start, stop], makes=[made])
        return made

    def cut_off(self, caches: list[Any], bounds: Sequence[int]) -> list[KVSlice]:
        made = [self._mirror.slice(piece) for piece in LOCAL.cut_off(caches, bounds)]
        self._tell("cut_off", caches=[caches], numbers=list(bounds), makes=made)
        return list[KVSlice](made)

    def extend(
        self, caches: list[Any], piece: KVSlice, start: int = 0, stop: int | None = None, *, reserve: int = 0
    ) -> None:
        LOCAL.extend(caches, piece, start, stop, reserve=reserve)
        self._tell("extend", caches=[caches], slices=[piece], numbers=[start, stop, reserve])

    def share(self, held: list[Any], empty: list[Any], tokens: int) -> int:
        found = LOCAL.share(held, empty, tokens)
        self._tell("share", caches=[held, empty], numbers=[tokens])
        return found

    def own_prefixes(self, caches: list[Any]) -> None:
        LOCAL.own_prefixes(caches)
        self._tell("own_prefixes", caches=[caches])

    def split(self, piece: KVSlice, at: int) -> tuple[KVSlice, KVSlice]:
        first, second = (self._mirror.slice(each) for each in LOCAL.split(piece, at))
        self._tell("split", slices=[piece], numbers=[at], makes=[first, second])
        return first, second

    def part(self, piece: KVSlice, start: int | None, stop: int | None) -> KVSlice:
        made = self._mirror.slice(LOCAL.part(piece, start, stop))
        self._tell("part", slices=[piece], numbers=[start, stop], makes=[made])
        return made

    def join(self, pieces: Sequence[KVSlice]) -> KVSlice:
        made = self._mirror.slice(LOCAL.join(pieces))
        self._tell("join", slices=pieces, makes=[made])
        return made

    def freeze(self, caches: list[Any]) -> States:
        made = self._mirror.states(LOCAL.freeze(caches))
        self._tell("freeze", caches=[caches], makes=[made])
        return made

    def thaw(self, caches: list[Any], states: States) -> None:
        assert isinstance(states, HeldStates)
        LOCAL.thaw(caches, states)
        self._tell("thaw", caches=[caches], states=states.handle)

    def rewind(self, caches: list[Any], n: int) -> None:
        LOCAL.rewind(caches, n)
        self._tell("rewind", caches=[caches], numbers=[n])

    def _tell(
        self,
        do: str,
        *,
        caches: Sequence[list[Any]] = (),
        slices: Sequence[KVSlice] = (),
        numbers: Sequence[int | None] = (),
        makes: "Sequence[HeldSlice | HeldStates]" = (),
        states: int | None = None,
    ) -> None:
        self._mirror.tell(
            do=do,
            caches=[self._mirror.known_handle(each) for each in caches],
            slices=[each.handle for each in slices if isinstance(each, HeldSlice)],
            numbers=list(numbers),
            makes=[each.handle for each in makes],
            states=states,
        )


class PassReplay:
    """Replays rank 0's records on a follower. fused: this machine's fused attention."""

    def __init__(self, module: Any, plan: CachePlan, group: Any, *, fused: AttentionDevice, vocabulary: int) -> None:
        self._module, self._plan, self._group = module, plan, group
        self._fused, self._vocabulary = fused, vocabulary
        self._held: dict[int, Any] = {}
        self._before: dict[int, BeforePass] = {}
        self._launched: deque[mx.array] = deque()
        self._passes = 0

    def do(self, record: Record) -> None:
        """Replay a record. Raises MLX's errors: then this rank is out of step."""
        match record["do"]:
            case "forward":
                self._forward(record)
            case "make":
                self._held[record["handle"]] = self._plan.make(record["keep"])
            case "before":
                self._before[record["caches"]] = BeforePass(self._held[record["caches"]])
            case "back":
                self._before.pop(record["caches"]).take_back(record["wrong"], record["read"])
            case _:
                self._operate(record)
        for handle in record.get("drop", ()):
            self._held.pop(handle, None)
            self._before.pop(handle, None)

    def _forward(self, record: Record) -> None:
        lanes, given = [self._held[handle] for handle in record["lanes"]], record["ids"]
        unknown = mx.zeros((len(lanes), 1), mx.uint32)
        ids = share_ids(unknown, self._group, self._vocabulary) if given is None else mx.array(given, mx.uint32)
        fused = self._fused if record["fused"] else None
        out = run(self._module, ids, lanes, logits=record["logits"], fused=fused)
        self._passes += 1
        if not record["logits"]:
            mx.eval([cache.state for lane in lanes for cache in lane])
            mx.clear_cache()
            return
        self._launched.append(out)
        if len(self._launched) > AHEAD:
            mx.eval(self._launched.popleft())
        if self._passes % POOL_CLEAR_PASSES == 0:
            mx.clear_cache()

    def _operate(self, record: Record) -> None:
        do, numbers = record["do"], record["numbers"]
        caches = [self._held[handle] for handle in record["caches"]]
        slices = [self._held[handle] for handle in record["slices"]]
        made: Sequence[Any] = ()
        match do:
            case "extend":
                start, stop, reserve = numbers
                LOCAL.extend(caches[0], slices[0], start, stop, reserve=reserve)
            case "cut_off":
                made = LOCAL.cut_off(caches[0], numbers)
            case "join":
                made = [LOCAL.join(slices)]
            case "split":
                made = LOCAL.split(slices[0], numbers[0])
            case "freeze":
                made = [LOCAL.freeze(caches[0])]
            case "thaw":
                LOCAL.thaw(caches[0], self._held[record["states"]])
            case "cut" | "part":
                act: Callable[..., Any] = LOCAL.cut if do == "cut" else LOCAL.part
                made = [act(*caches, *slices, *numbers)]
            case "share":
                LOCAL.share(*caches, *numbers)
            case "rewind":
                LOCAL.rewind(caches[0], *numbers)
            case "own_prefixes":
                LOCAL.own_prefixes(caches[0])
        self._held.update(zip(record["makes"], made, strict=True))
