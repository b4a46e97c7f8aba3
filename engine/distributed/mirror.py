"""Rank 0's model, caches and operations on them: each is told to the followers, then done here; and what does it there.

    handle     a number for the caches of one sequence, for a slice, for frozen states: rank 0 gives it, all ranks keep it
    record     {"do": "forward", "lanes": [3], "ids": [[…]]}          told before it is done, so that the others begin as early

Every pass is launched when it is told, with the same results asked for on all ranks: so they meet at MLX's collectives in the same
order. The ids of a decode step are not known to the host yet; they go through a collective of their own, inside the pass. That is
why only rank 0 chooses tokens: logits that differ in a last bit can't make ranks go different ways.

What was dropped here is dropped there with the next record.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize

import mlx.core as mx

from ..errors import OptionError
from ..kv.attention import AttendingCache, forced, forcing_fused
from ..kv.attention_kernel import AttentionDevice
from ..kv.operations import LOCAL, TakesBack
from ..kv.plan import CachePlan
from ..kv.rewind import BeforePass
from ..kv.snapshot import KVSlice, States
from ..model.head import are_asked_for, asking_for_logits
from .channel import Record
from .team import Team

AHEAD = 2
"""Passes that a follower launches before it waits for the first of them."""
POOL_CLEAR_PASSES = 256


class HeldSlice(tuple[Any, ...]):
    """A slice of rank 0's caches, of which the others have theirs."""

    handle: int
    dropped: deque[int]

    def __del__(self) -> None:
        self.dropped.append(self.handle)


class HeldStates(tuple[Any, ...]):
    """The same of frozen states."""

    handle: int
    dropped: deque[int]

    def __del__(self) -> None:
        self.dropped.append(self.handle)


class Mirror:
    """Tells the followers what rank 0 does. group: MLX's. vocabulary: how many tokens there are."""

    def __init__(self, team: Team, group: Any, vocabulary: int) -> None:
        self._team, self.group, self.vocabulary = team, group, vocabulary
        self._count = 0
        self._dropped: deque[int] = deque()  # any thread may add to it
        self._caches: dict[int, int] = {}  # by the id of the first of them

    def tell(self, **record: Any) -> None:
        """Have the followers do it."""
        dropped = []
        while self._dropped:
            dropped.append(self._dropped.popleft())
        self._team.tell({**record, "drop": dropped} if dropped else record)

    def new_handle(self) -> int:
        """Return a number that nothing has."""
        self._count += 1
        return self._count

    def know(self, caches: list[Any], handle: int) -> None:
        """Take note of which caches a handle means."""
        key = id(caches[0])
        self._caches[key] = handle
        finalize(caches[0], self._forget, key, handle).atexit = False

    def _forget(self, key: int, handle: int) -> None:
        if self._caches.get(key) == handle:
            del self._caches[key]
        self._dropped.append(handle)

    def handle(self, caches: list[Any]) -> int | None:
        """Return which caches these are; None where the followers have none of them."""
        return self._caches.get(id(caches[0]))

    def of(self, caches: list[Any]) -> int:
        """Return which caches these are."""
        found = self.handle(caches)
        if found is None:
            raise OptionError(
                "these caches are on one machine alone", "Load the model without nodes for what you asked for."
            )
        return found

    def slice(self, piece: KVSlice) -> HeldSlice:
        """Return a slice as held by all; the caller tells its handle."""
        held = HeldSlice(piece)
        held.handle, held.dropped = self.new_handle(), self._dropped
        return held

    def states(self, states: States) -> HeldStates:
        """Return states as held by all."""
        held = HeldStates(states)
        held.handle, held.dropped = self.new_handle(), self._dropped
        return held

    def fail(self, error: BaseException) -> None:
        """What was told was not done here, so the group is out of step."""
        self._team.fail(f"computing failed on this machine ({' '.join(str(error).split())[:200]})")


class SharedModel:
    """Stands for mlx-lm's module on rank 0: a pass is told, then launched."""

    def __init__(self, module: Any, mirror: Mirror) -> None:
        self._module, self._mirror = module, mirror

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        """ids (1, N) → logits (1, N, V), launched; where none are asked for, nobody may use them."""
        return self.forward(ids, [cache])

    @property
    def layers(self) -> Any:
        """None of them can be had: what looks at a model to plan for it comes too late."""
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
            lanes=[mirror.of(lane) for lane in lanes],
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
    """Return rank 0's ids (B, 1) on all ranks, which is given zeros on the others.

    Where another node is gone, MLX computes on with what memory held, and a lookup has no bounds: no id is beyond ``vocabulary``.
    Launched at once: a rank whose layers come later in a pipeline does not look at them, and would leave the others waiting.
    """
    summed = mx.distributed.all_sum(ids.astype(mx.uint32), group=group)
    shared = mx.minimum(summed, mx.array(vocabulary - 1, mx.uint32))
    mx.async_eval(shared)  # type: ignore[no-untyped-call]
    return shared


def run(
    module: Any, ids: mx.array, lanes: Sequence[list[Any]], *, logits: bool, fused: AttentionDevice | None
) -> mx.array:
    """Launch a pass: the same on all ranks."""
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
    """Makes caches here and there."""

    mirror: Mirror = field(repr=False, compare=False, kw_only=True)

    def make(self, keep: int | None = None) -> list[Any]:
        """Make the caches of one conversation."""
        made, handle = CachePlan.make(self, keep), self.mirror.new_handle()
        self.mirror.tell(do="make", keep=keep, handle=handle)
        self.mirror.know(made, handle)
        return made


class SharedTakeBack:
    """Takes a pass back here and there."""

    def __init__(self, caches: list[Any], mirror: Mirror) -> None:
        self._before, self._mirror, self._of = BeforePass(caches), mirror, mirror.of(caches)
        mirror.tell(do="before", caches=self._of)

    def take_back(self, wrong: int, read: int) -> int:
        """Take back the last ``wrong`` tokens of a pass that read so many."""
        self._mirror.tell(do="back", caches=self._of, wrong=wrong, read=read)
        return self._before.take_back(wrong, read)


class SharedOperations:
    """What is done to caches and slices, here and there."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    def forward(self, model: SharedModel, ids: mx.array, lanes: Sequence[list[Any]]) -> mx.array:
        """Run the next tokens of several sequences. A draft model's are this machine's alone."""
        return model.forward(ids, lanes) if isinstance(model, SharedModel) else LOCAL.forward(model, ids, lanes)

    def before_pass(self, caches: list[Any]) -> TakesBack:
        """Remember what caches hold before a pass that may be taken back."""
        known = self._mirror.handle(caches) is not None
        return SharedTakeBack(caches, self._mirror) if known else LOCAL.before_pass(caches)

    def cut(self, caches: list[Any], start: int, stop: int) -> KVSlice:
        """Return copies of tokens."""
        made = self._mirror.slice(LOCAL.cut(caches, start, stop))
        self._tell("cut", caches=[caches], numbers=[start, stop], makes=[made])
        return made

    def cut_off(self, caches: list[Any], bounds: Sequence[int]) -> list[KVSlice]:
        """Move the last tokens out."""
        made = [self._mirror.slice(piece) for piece in LOCAL.cut_off(caches, bounds)]
        self._tell("cut_off", caches=[caches], numbers=list(bounds), makes=made)
        return list[KVSlice](made)

    def extend(
        self, caches: list[Any], piece: KVSlice, start: int = 0, stop: int | None = None, *, reserve: int = 0
    ) -> None:
        """Append tokens."""
        LOCAL.extend(caches, piece, start, stop, reserve=reserve)
        self._tell("extend", caches=[caches], slices=[piece], numbers=[start, stop, reserve])

    def share(self, held: list[Any], empty: list[Any], tokens: int) -> int:
        """Have empty caches begin with what others hold."""
        found = LOCAL.share(held, empty, tokens)
        self._tell("share", caches=[held, empty], numbers=[tokens])
        return found

    def own_prefixes(self, caches: list[Any]) -> None:
        """Copy what caches share."""
        LOCAL.own_prefixes(caches)
        self._tell("own_prefixes", caches=[caches])

    def split(self, piece: KVSlice, at: int) -> tuple[KVSlice, KVSlice]:
        """Divide a slice."""
        first, second = (self._mirror.slice(each) for each in LOCAL.split(piece, at))
        self._tell("split", slices=[piece], numbers=[at], makes=[first, second])
        return first, second

    def part(self, piece: KVSlice, start: int | None, stop: int | None) -> KVSlice:
        """Return a part of a slice."""
        made = self._mirror.slice(LOCAL.part(piece, start, stop))
        self._tell("part", slices=[piece], numbers=[start, stop], makes=[made])
        return made

    def join(self, pieces: Sequence[KVSlice]) -> KVSlice:
        """Return consecutive slices as one."""
        made = self._mirror.slice(LOCAL.join(pieces))
        self._tell("join", slices=pieces, makes=[made])
        return made

    def freeze(self, caches: list[Any]) -> States:
        """Return the states of what does not grow."""
        made = self._mirror.states(LOCAL.freeze(caches))
        self._tell("freeze", caches=[caches], makes=[made])
        return made

    def thaw(self, caches: list[Any], states: States) -> None:
        """Put states back."""
        assert isinstance(states, HeldStates)
        LOCAL.thaw(caches, states)
        self._tell("thaw", caches=[caches], states=states.handle)

    def rewind(self, caches: list[Any], n: int) -> None:
        """Trim what does not grow."""
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
            caches=[self._mirror.of(each) for each in caches],
            slices=[each.handle for each in slices if isinstance(each, HeldSlice)],
            numbers=list(numbers),
            makes=[each.handle for each in makes],
            states=states,
        )


class PassReplay:
    """Does on a follower what rank 0 told.

    fused: what this machine's attention is, where it is to be fused. vocabulary: how many tokens there are.
    """

    def __init__(self, module: Any, plan: CachePlan, group: Any, *, fused: AttentionDevice, vocabulary: int) -> None:
        self._module, self._plan, self._group = module, plan, group
        self._fused, self._vocabulary = fused, vocabulary
        self._held: dict[int, Any] = {}
        self._before: dict[int, BeforePass] = {}
        self._launched: deque[mx.array] = deque()
        self._passes = 0

    def do(self, record: Record) -> None:
        """Do it. Raises whatever MLX raises: this rank is out of step then."""
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
