"""Speculation: of one reply, and what the replies of a model share for it."""

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from ..metrics import DraftCount, Speculated
from ..prompt_cache.memory import common_prefix
from .draft_model import LoadedDraft, ModelDrafter
from .drafters import Branches, ComputingDrafter, Drafter, Lookup, TokenDraft
from .head_drafters import HiddenStates, LoadedHeads
from .ledger import TUNING, DraftLedger, DraftPlan, PassCosts, draft_step, pass_steps

if TYPE_CHECKING:
    from ..options import Speculation
    from ..runtime import Runtime
    from ..sampling import Sampler

SOON = 0.5  # how likely the token under way must be the guessed one, for the next to wait for it
# So many times longer or shorter than believed, so many passes one after another: then plain steps are timed again.
DOUBTFUL, DOUBTS = 1.5, 2
TIMED_AGAIN = 3  # plain steps for that
# Plain steps that must be left for a first draft, where a draft model has to read what it does not know yet.
DRAFTS_AFTER = 0.5
# Plain steps after one that was no worse than to compute a guess, before that is reckoned again: reckoning takes time,
# too. Each time that it is no worse still, twice as many, and at most so many.
ASKS_AGAIN, ASKS_SELDOM = 8, 64
GUESSES = TUNING.long + 1  # tokens asked of a drafter: one may be under way
# Of a plain step, which looking for guesses may take a token, where none came true lately. It costs twice what a clock
# says of it: what it reads takes the place of what the next step would find in the processor's caches.
LOOKING = 0.00125
# Plain steps between two looks at most: so many tokens of what repeats may be written before they are noticed.
MOST_RESTED = 64
# Tokens without a guess that came true, and of a reply before any did, until not every one is looked after.
RESTS_AFTER, AT_FIRST = 12, 3

NOTHING_ALIKE = "nothing like what it writes was written before"
TOO_SELDOM = "what was guessed came true too seldom for what verifying costs here"
ALL_LOST = "it has lost all that a reply may lose"
SHARED = "other replies share the passes"
TOO_DEAR = "its draft model takes longer than it gains"
HEADS_TOO_DEAR = "its own heads for further tokens take longer than they gain"


class Speculator:
    """Decides after each token whether to draft, and learns from the outcome."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        costs: PassCosts,
        ids: Sequence[int],
        clock: Callable[[], float] = time.perf_counter,
        computing: Sequence[ComputingDrafter] = (),
        *,
        hidden: HiddenStates | None = None,
    ) -> None:
        self.ledger = DraftLedger(costs)
        self.rests = False
        self.hidden = hidden
        self._drafters, self._clock = drafters, clock
        self._computing = list(computing)
        self._ids = list(ids)
        self._guesses: list[TokenDraft] | None = None  # after the last token; None: not asked for yet
        self._at_s: float | None = None  # when the last token became known
        self._steady = False  # whether the time since then is a plain step's, once the next is
        self._counts: dict[str, DraftCount] = {}
        self._saved_s = 0.0
        self._drafting_s: float | None = None  # of the draft under way, where it was computed
        self._doubts = 0
        self._timing: list[float] | None = None  # of plain steps that are timed again, before anything is drafted
        self._guessed = self._shared = 0  # plain steps of which there was a guess; those with others
        self._unworthy = 0  # plain steps that were no worse than to compute a guess
        self._resting = 0  # plain steps from one look to the next
        self._looking_s = 0.0  # what the last token took here until guesses were looked for
        self._unseen: list[int] = []  # tokens since the last look, while it rests
        self._useful_at = AT_FIRST - RESTS_AFTER  # tokens when a guess came true the last time
        # By source, tokens from which on it is reckoned whether to compute a guess, and plain steps from then until the next time.
        self._ask_at: dict[str, tuple[int, int]] = {}

    def done(self) -> Speculated:
        counts = tuple(self._counts.values())
        return Speculated(counts, self._saved_s if counts else None, self._why())

    def _why(self) -> str:
        rests = next((each.rests for each in self._computing if each.rests), "")
        if self._shared > self._guessed + self._unworthy:
            return SHARED
        if not self._guessed and not self._computing:
            return "" if self._counts else NOTHING_ALIKE
        if (self._guessed or self._unworthy) and self.ledger.spare < 0.5:
            return ALL_LOST
        if self._unworthy > self.ledger.tokens // 2 and not rests:
            return TOO_DEAR if any(each.source == "draft" for each in self._computing) else HEADS_TOO_DEAR
        return rests or (TOO_SELDOM if self._guessed and not self._counts else "")

    def interrupted(self) -> None:
        self._at_s, self._steady = None, False

    def observe_shared(self, token: int) -> None:
        self.interrupted()
        self._wake()
        self._shared += 1
        self._add([token])
        self.ledger.stepped()

    def observe(self, token: int, *, steady: bool) -> None:
        if self.rests:
            self._skip(token, steady=steady)
            return
        now = self._clock()
        self._took_plain([token])
        if self._at_s is None:
            self.ledger.stepped()
        elif self._steady:
            self._time(now - self._at_s)
            self.ledger.stepped()
        else:
            self._enter(1, now - self._at_s, 1)
        self._at_s, self._steady = now, steady
        self._add([token])
        self._looking_s = self._clock() - now

    def _skip(self, token: int, *, steady: bool) -> None:
        self._unseen.append(token)
        if len(self._unseen) >= self._resting:
            now = self._clock()
            self._wake()
            self._at_s, self._steady = self._clock(), steady
            self._looking_s = self._at_s - now

    def _wake(self) -> None:
        self.rests, tokens = False, self._unseen
        if tokens:
            self._unseen = []
            self._took_plain(tokens)
            self.ledger.stepped(len(tokens))
            self._add(tokens)

    def _rest_if_dear(self, took_s: float) -> None:
        if self.ledger.tokens - self._useful_at < RESTS_AFTER:
            return
        plain_s, took_s = self.ledger.costs.plain_s(len(self._ids)), took_s + self._looking_s
        if plain_s is not None and took_s > LOOKING * plain_s:
            self._resting, self.rests = min(MOST_RESTED, math.ceil(took_s / (LOOKING * plain_s))), True

    def _took_plain(self, tokens: Sequence[int]) -> None:
        if self._guesses:
            self._guessed += len(tokens)
            for guess in self._guesses:
                self._learn(guess, tokens)
        for _ in tokens if self._computing else ():
            self.ledger.acceptance.passed()
            for each in self._computing:
                each.rested()

    def pays_soon(self, room: Callable[[], int]) -> bool:
        if self._at_s is None or self._timing is not None:
            return False
        began_s = self._clock()
        pays = self._pays_soon(room)
        if not pays:
            self._rest_if_dear(self._clock() - began_s)
        return pays

    def _pays_soon(self, room: Callable[[], int]) -> bool:
        for guess in self._after_last():
            if len(guess.tokens) > 1 and self.ledger.acceptance.rate(guess.source, guess.match) >= SOON:
                plan = self.ledger.choose(guess.source, guess.match + 1, len(guess.tokens) - 1, len(self._ids) + 1)
                if plan.width:
                    return self._is_timed and room() > 1
        if not self._computing or not self._is_timed:
            return False
        most = room() - 1
        return any(self._to_compute(each, most).width for each in self._computing)

    def draft(self, room: Callable[[], int]) -> TokenDraft | None:
        if self._at_s is None or self._timing is not None:
            return None
        began_s = self._clock()
        draft = self._draft(room)
        if draft is None:
            self._rest_if_dear(self._clock() - began_s)
        return draft

    def _draft(self, room: Callable[[], int]) -> TokenDraft | None:
        best, found = DraftPlan(0, 0.0), None
        may_pay, context = self.ledger.may_pay, len(self._ids)
        guesses = [guess for guess in self._after_last() if may_pay(guess.source, guess.match, context)]
        if not self._is_timed:
            return None
        most = room() if guesses or self._computing else 0
        for guess in guesses:
            plan = self.ledger.choose(guess.source, guess.match, min(len(guess.tokens), most), len(self._ids))
            if plan.worth > best.worth:
                best, found = plan, guess
        plans = [(self._to_compute(each, most), each) for each in self._computing]
        for plan, each in sorted(plans, key=lambda planned: -planned[0].worth):
            if plan.worth > best.worth and (computed := self._computed(each, plan.width)) is not None:
                return computed
        return TokenDraft(found.tokens[: best.width], found.source, found.match) if found else None

    def _to_compute(self, drafter: ComputingDrafter, most: int) -> DraftPlan:
        width, ledger, ids = min(drafter.most, most), self.ledger, self._ids
        ask_at, wait = self._ask_at.get(drafter.source, (0, ASKS_AGAIN))
        if width < 1 or ledger.tokens < ask_at:
            return DraftPlan(0, 0.0)
        bearable, plan = max(0.0, ledger.spare - DRAFTS_AFTER), DraftPlan(0, 0.0)
        if (reading := drafter.reading(ids, bearable)) is not None:
            plan = ledger.choose(drafter.source, 0, width, len(ids), drafting=drafter.drafting, reading=reading)
        if plan.width:
            self._ask_at.pop(drafter.source, None)
        else:
            self._unworthy += wait // len(self._computing)
            self._ask_at[drafter.source] = ledger.tokens + wait, min(2 * wait, ASKS_SELDOM)
        return plan

    def _computed(self, drafter: ComputingDrafter, width: int) -> TokenDraft | None:
        began_s = self._clock()
        tokens = drafter.draft(self._ids, width)
        if not tokens:
            return None
        self._drafting_s = self._clock() - began_s
        if (plain_s := self.ledger.costs.plain_s(len(self._ids))) is not None:
            drafter.took(len(tokens), self._drafting_s / plain_s)
        return TokenDraft(tokens, drafter.source, 0)

    @property
    def _is_timed(self) -> bool:
        return self.ledger.costs.plain_s(len(self._ids)) is not None

    def verified(self, draft: TokenDraft, tokens: Sequence[int], rows: int) -> None:
        now, accepted = self._clock(), len(tokens) - 1
        for guess in self._after_last():
            if guess.source != draft.source:
                self._learn(guess, tokens[:1])
        for place in range(min(accepted + 1, len(draft.tokens))):
            self.ledger.acceptance.observe(draft.source, draft.match + place, true=tokens[place] == draft.tokens[place])
        before = self._counts.get(draft.source, DraftCount(draft.source, 0, 0))
        right = sum(own == other for own, other in zip(tokens, draft.tokens, strict=False))
        self._counts[draft.source] = replace(
            before, drafted=before.drafted + len(draft.tokens), accepted=before.accepted + right
        )
        drafting_s, self._drafting_s = self._drafting_s or 0.0, None
        if accepted:
            self._useful_at = self.ledger.tokens
        if self._at_s is not None:
            self._enter(len(tokens), now - self._at_s - drafting_s, rows, drafting_s)
        self._at_s, self._steady = now, False
        self._add(tokens)

    def _time(self, seconds: float) -> None:
        costs, context = self.ledger.costs, len(self._ids)
        if self._timing is None:
            costs.observe_plain(context, seconds)
            return
        self._timing.append(seconds)
        if len(self._timing) == TIMED_AGAIN:
            costs.measured_again(context, median(self._timing))
            self._timing = None

    def _enter(self, committed: int, taken_s: float, rows: int, drafting_s: float = 0.0) -> None:
        costs, context = self.ledger.costs, len(self._ids)
        plain_s = costs.plain_s(context)
        if plain_s is None:
            self.ledger.stepped()
            return
        believed, steps = costs.steps(rows, context), taken_s / plain_s
        if rows > 1:
            self._doubts = 0 if 1 / DOUBTFUL < steps / believed < DOUBTFUL else self._doubts + 1
            if self._doubts >= DOUBTS:
                self._doubts, self._timing = 0, []
        steps = min(steps, TUNING.outlier * believed)  # a hold-up has other causes
        costs.observe_pass(rows, context, steps)
        steps += drafting_s / plain_s
        self._saved_s += (committed - steps) * plain_s
        self.ledger.spent(committed, steps)

    def _after_last(self) -> list[TokenDraft]:
        if self._guesses is None:
            found = (each.propose(self._ids, GUESSES) for each in self._drafters)
            self._guesses = [guess for guess in found if guess is not None]
        return self._guesses

    def _learn(self, guess: TokenDraft, tokens: Sequence[int]) -> None:
        for place, (guessed, token) in enumerate(zip(guess.tokens, tokens, strict=False)):
            self.ledger.acceptance.observe(guess.source, guess.match + place, true=guessed == token)
            if guessed != token:
                return

    def _add(self, tokens: Sequence[int]) -> None:
        self._ids.extend(tokens)
        self._guesses = None


KEPT_TOKENS = 1 << 18  # of conversations that are kept, 4 bytes each
TEXTS = 4  # other versions that a reply is compared with
LONGEST = 1 << 14  # tokens of each
BEFORE = 32  # tokens before the place where a version goes its own way that are kept to find the place by
LEAST = 8  # tokens that a version must have beyond that


class Conversations:
    """Token ids of recent conversations, in memory only."""

    def __init__(self) -> None:
        self._kept: deque[array[int]] = deque()

    def keep(self, ids: Sequence[int]) -> None:
        new = array("i", ids)
        self._kept = deque(each for each in self._kept if common_prefix(each, new) < len(each))
        self._kept.append(new)
        while sum(map(len, self._kept)) > KEPT_TOKENS:
            self._kept.popleft()

    def versions(self, ids: Sequence[int]) -> list[Sequence[int]]:
        new = array("i", ids)
        found = [(common_prefix(each, new), each) for each in self._kept]
        found = [(shared, each) for shared, each in found if len(each) - shared >= LEAST]
        found.sort(key=lambda pair: pair[0])  # of two alike, the latest is last
        return [each[max(0, shared - BEFORE) :][:LONGEST] for shared, each in found[-TEXTS:]]


class SharedSpeculation:
    """Begins the speculation of each reply. remembers: whether conversations are kept."""

    def __init__(
        self,
        options: "Speculation",
        *,
        remembers: bool,
        draft: "LoadedDraft | None" = None,
        heads: Sequence[LoadedHeads] = (),
    ) -> None:
        self._options = options
        self._draft, self._remembers = draft, remembers
        self._heads = heads
        self._costs: dict[tuple[int, int], PassCosts] = {}
        self._conversations = Conversations() if options.branches and remembers else None
        self.more: Callable[[], Sequence[Drafter]] = tuple

    @property
    def computes(self) -> bool:
        return self._draft is not None or bool(self._heads)

    def begin(
        self,
        runtime: "Runtime",
        ids: Sequence[int],
        made: Sequence[int],
        sampler: "Sampler",
        *,
        background: bool = False,
    ) -> Speculator | None:
        """Return the speculation of a reply of which ``made`` is written; None without drafters."""
        drafters: list[Drafter] = [*self.more()]
        if self._options.lookup:
            drafters.append(Lookup())
        if self._conversations is not None and (versions := self._conversations.versions(ids)):
            drafters.append(Branches(versions))
        draft, heads = (None, ()) if background else (self._draft, self._heads)
        if not drafters and draft is None and not heads:
            return None
        machine, bits = runtime.machine, (runtime.kv.key_bits, runtime.kv.value_bits)
        if bits not in self._costs:
            self._costs[bits] = PassCosts(
                lambda rows, context: pass_steps(
                    runtime.work, machine.latency, machine.chip, context, rows, device=runtime.device
                )
            )
        computing: list[ComputingDrafter] = []
        hidden = HiddenStates() if heads else None
        for each in heads:
            assert hidden is not None
            each.costs.step = max(
                TUNING.least_step, each.step_bytes / (runtime.work.step_bytes(len(ids)) or each.step_bytes)
            )
            computing.append(each.drafter(hidden, sampler))
        if draft is not None:
            both = (draft.work, draft.latency or machine.latency), (runtime.work, machine.latency)
            draft.model.costs.step = draft_step(*both, machine.chip, len(ids))
            computing.append(ModelDrafter(draft.model, sampler))
        return Speculator(drafters, self._costs[bits], [*ids, *made], computing=computing, hidden=hidden)

    def forget(self) -> None:
        self._forget_computed()
        if self._conversations is not None:
            self._conversations = Conversations()

    def ended(self, ids: Sequence[int]) -> None:
        if not self._remembers:
            self._forget_computed()
        if self._conversations is not None:
            self._conversations.keep(ids)

    def _forget_computed(self) -> None:
        if self._draft is not None:
            self._draft.model.forget()
        for each in self._heads:
            each.forget()
