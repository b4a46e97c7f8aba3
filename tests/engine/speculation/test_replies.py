"""Whole replies say the same with guesses and without: any sampling, wherever they end, whoever guesses, and on any caches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.inside import idle_of, runner_of, runtime_of, speculating, speculation_of, store_of
from tests.engine.speculation.scripted import Clock, Eager, always_right, always_wrong, at_random
from tests.families import crossed, walked
from tokamac.engine import (
    Engine,
    Finished,
    KVSpec,
    OptionError,
    PromptCacheSpec,
    Sampling,
    Speculation,
    TemplateOptions,
    TextChunk,
)
from tokamac.engine.events import Message
from tokamac.engine.metrics import Speculated
from tokamac.engine.speculation.drafters import Drafter, Lookup, TokenDraft
from tokamac.engine.speculation.ledger import TUNING, PassCosts
from tokamac.engine.speculation.speculator import (
    ALL_LOST,
    AT_FIRST,
    LOOKING,
    MOST_RESTED,
    NOTHING_ALIKE,
    SHARED,
    TOO_SELDOM,
    Speculator,
)

PROMPT = [5 + i * i % 250 for i in range(40)]
VOCABULARY = 272
NEW = 60
GREEDY = Sampling(temperature=0, max_tokens=NEW)
SEEDED = Sampling(temperature=1, seed=3, max_tokens=NEW)
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "filtered": replace(SEEDED, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": replace(SEEDED, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3),
    "greedy with penalties": replace(GREEDY, repetition_penalty=1.5, frequency_penalty=0.4),
    "DRY": replace(SEEDED, dry_multiplier=0.8, dry_base=1.75),
    "XTC": replace(SEEDED, xtc_probability=0.5, xtc_threshold=0.02),
    "biased": replace(SEEDED, logit_bias=((65, 5.0), (66, 4.0))),
    "at least": replace(SEEDED, min_tokens=30),
    "scored": replace(SEEDED, logprobs=3),
}
DRAFTERS = {"right": always_right, "wrong": always_wrong, "at random": at_random}
KV = {"16 bits": KVSpec(), "packed": KVSpec(key_bits=8, value_bits=4), "window": KVSpec(window=48, keep=4)}


class EagerSpeculation:
    """In place of ``SharedSpeculation``: drafts whatever it pays."""

    computes = True

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def begin(self, _: Any, ids: Sequence[int], made: Sequence[int], *__: Any, **___: Any) -> Speculator:
        """Return the speculation of a reply."""
        return Eager(self._drafter, [*ids, *made])

    def ended(self, ids: Sequence[int]) -> None:
        """Keep nothing."""


@pytest.fixture(scope="module", params=KV)
def engine(tiny: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine that drafts only where a test says so."""
    with Engine.load(tiny, kv=KV[request.param], prompt_cache=PromptCacheSpec(disk=False), speculation=None) as loaded:
        loaded.tokenizer.eos_ids = frozenset()
        yield loaded


def both(
    engine: Engine, sampling: Sampling, make: Callable[[list[int], int], Drafter], prompt: list[int] = PROMPT
) -> tuple[Finished, Finished]:
    """Return a reply, and the same with drafts of what the longest one would say."""
    longest = engine.ask(prompt, replace(sampling, max_tokens=NEW, stop=(), stop_token_ids=(), logprobs=None))
    plain = engine.ask(prompt, sampling)
    with speculating(engine, EagerSpeculation(make([*prompt, *longest.ids], VOCABULARY))):
        return plain, engine.ask(prompt, sampling)


@pytest.mark.parametrize(("sampling", "drafter"), crossed(SAMPLINGS, DRAFTERS, "at random"))
def test_any_sampling_chooses_the_same(engine: Engine, sampling: str, drafter: str) -> None:
    plain, drafted = both(engine, SAMPLINGS[sampling], DRAFTERS[drafter])
    assert drafted.ids == plain.ids
    assert (drafted.text, drafted.reason) == (plain.text, plain.reason)
    for ours, theirs in zip(drafted.logprobs, plain.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=0.05)
    metrics = drafted.metrics
    assert metrics.generated_tokens == NEW
    assert metrics.drafted_tokens
    assert plain.metrics.drafted_tokens is plain.metrics.accepted_tokens is plain.metrics.saved_s is None
    if drafter == "right":
        assert metrics.accepted_tokens == metrics.drafted_tokens >= NEW // 2
    if drafter == "wrong":
        assert metrics.accepted_tokens == 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_text_says_which_of_it_was_guessed_and_that_is_what_came_true(engine: Engine, drafter: str) -> None:
    longest = engine.ask(PROMPT, GREEDY)
    make = DRAFTERS[drafter]
    with speculating(engine, EagerSpeculation(make([*PROMPT, *longest.ids], VOCABULARY))):
        events = list(engine.generate(PROMPT, GREEDY))
    chunks = [event for event in events if isinstance(event, TextChunk)]
    assert all(chunk.guessed in ((), ((0, len(chunk.text)),)) for chunk in chunks)
    guessed = [chunk for chunk in chunks if chunk.guessed]
    (end,) = (event for event in events if isinstance(event, Finished))
    tokens, accepted = sum(len(chunk.ids) for chunk in guessed), end.metrics.accepted_tokens
    assert tokens <= accepted  # a character of several tokens is guessed where all of them are
    assert bool(guessed) is bool(accepted) is (drafter != "wrong")
    plain = [event for event in engine.generate(PROMPT, GREEDY) if isinstance(event, TextChunk)]
    assert not any(chunk.guessed for chunk in plain)
    assert "".join(chunk.text for chunk in plain) == "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize("most", walked(range(1, 20, 3), frozenset({1, 4, 19})))
def test_no_more_tokens_come_than_were_asked_for(engine: Engine, most: int) -> None:
    plain, drafted = both(engine, replace(GREEDY, max_tokens=most), always_right)
    assert len(drafted.ids) == most
    assert (drafted.ids, drafted.reason) == (plain.ids, "length")
    held = held_ids(engine)
    assert held == [*PROMPT, *plain.ids][: len(held)]


@pytest.mark.parametrize("place", walked(range(2, 40, 5), frozenset({2, 17, 32})))
def test_a_token_that_ends_a_reply_ends_it_inside_a_draft(engine: Engine, place: int) -> None:
    whole = engine.ask(PROMPT, SEEDED)
    end = whole.ids[place]
    plain, drafted = both(engine, replace(SEEDED, stop_token_ids=(end,)), always_right)
    assert (drafted.ids, drafted.reason, drafted.stopped_by) == (plain.ids, "stop", end)
    held = held_ids(engine)
    assert held == [*PROMPT, *plain.ids][: len(held)]  # nothing beyond the end is in the caches


@pytest.mark.parametrize("place", walked(range(5, 40, 7), frozenset({5, 26})))
def test_a_stop_text_ends_it_inside_a_draft(engine: Engine, place: int) -> None:
    whole = engine.ask(PROMPT, SEEDED)
    stop = engine.tokenizer.decode(list(whole.ids[place : place + 3]))
    plain, drafted = both(engine, replace(SEEDED, stop=(stop,)), always_right)
    assert (drafted.text, drafted.ids, drafted.reason) == (plain.text, plain.ids, plain.reason)


def held_ids(engine: Engine) -> list[int]:
    """Return the ids that the live caches hold."""
    held = idle_of(store_of(engine))  # type: ignore[attr-defined]
    return list(held.lease.ids)


@pytest.mark.parametrize("after", [1, 3, 10, 25])
def test_a_cancelled_reply_leaves_caches_that_go_on_the_same(engine: Engine, after: int) -> None:
    whole = engine.ask(PROMPT, GREEDY)
    with speculating(engine, EagerSpeculation(always_right([*PROMPT, *whole.ids], VOCABULARY))):
        came, events = 0, engine.generate(PROMPT, GREEDY)
        for event in events:  # to its very end, which comes after Finished: then the caches are given back
            if isinstance(event, TextChunk):
                came += len(event.ids)
            if came >= after:
                events.cancel()
    held = held_ids(engine)
    assert held == [*PROMPT, *whole.ids][: len(held)]
    goes_on = engine.ask([*PROMPT, *whole.ids[:30]], replace(GREEDY, max_tokens=20))
    if runtime_of(engine).kv == KVSpec():
        assert goes_on.ids == whole.ids[30:50]


def test_thinking_ends_after_its_budget_whatever_is_drafted(tmp_path: Path) -> None:
    from tests.engine.helpers import write_model

    folder = write_model(tmp_path / "thinks", thinking=True)
    with Engine.load(folder, prompt_cache=None, speculation=None) as engine:
        engine.tokenizer.eos_ids = frozenset()
        asked = [Message("user", "hello")]
        for budget in (3, 8):
            template = TemplateOptions(thinking_budget=budget)
            plain = engine.ask(asked, GREEDY, template=template)
            prompt = runner_of(engine).prompting(template).request(asked, GREEDY, None).ids  # type: ignore[arg-type]
            with speculating(engine, EagerSpeculation(always_right([*prompt, *plain.ids], VOCABULARY))):
                drafted = engine.ask(asked, GREEDY, template=template)
            assert (drafted.ids, drafted.thinking_ended_at) == (plain.ids, plain.thinking_ended_at)
            assert drafted.metrics.accepted_tokens


def test_as_it_is_loaded_a_reply_made_again_is_drafted_and_the_same(tiny: Path) -> None:
    with Engine.load(tiny, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        engine.tokenizer.eos_ids = frozenset()
        shared = speculation_of(engine)
        costs = PassCosts(lambda rows, _: 1 + 0.05 * (rows - 1))
        runtime = runtime_of(engine)
        shared._costs[runtime.kv.key_bits, runtime.kv.value_bits] = costs
        first = engine.ask(PROMPT, SEEDED)
        again = engine.ask(PROMPT, SEEDED)
        assert again.ids == first.ids
        assert again.metrics.drafted_tokens
        others = list(engine.generate_many([PROMPT, PROMPT[:20]], GREEDY))
        ends = {prompt: event for prompt, _, event in others if isinstance(event, Finished)}
        assert ends[0].ids == tuple(engine.ask(PROMPT, GREEDY).ids) or ends[0].text == engine.ask(PROMPT, GREEDY).text
    with Engine.load(tiny, prompt_cache=None, speculation=Speculation(lookup=False)) as engine:
        assert engine.ask(PROMPT, GREEDY).metrics.undrafted is None  # nothing guesses, and nothing is kept


def test_what_can_not_be_done_is_refused() -> None:
    with pytest.raises(OptionError, match="lookup"):
        Speculation(lookup="yes")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="speculation"):
        Engine.load("guide", speculation="auto")  # type: ignore[arg-type]


# The speculator, by a clock of its own.


class Machine:
    """Decodes a text in steps of a second, and passes that take what they take; a speculator decides."""

    def __init__(self, text: Sequence[int], begin: int, cost: Callable[[int], float], drafter: Drafter) -> None:
        self.text, self.at, self._cost = text, begin, cost
        self._clock = Clock()
        self.speculator = Speculator([drafter], PassCosts(lambda rows, _: cost(rows)), text[:begin], self._clock)
        self.rounds = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self._clock.now_s

    def run(self) -> None:
        """Decode to the end of the text, one step ahead where nothing is drafted."""
        ahead = False
        while self.at < len(self.text):
            if self.speculator.rests:
                self._clock.now_s += 1
                self._step(steady=True)
                continue
            if ahead and self.speculator.pays_soon(lambda: 40):
                self._clock.now_s += 1
                self._step(steady=False)
                ahead = False
                continue
            draft = None if ahead else self.speculator.draft(lambda: 40)
            if draft is None:
                self._clock.now_s += 1
                self._step(steady=True)
                ahead = True
                continue
            right = 0
            coming = self.text[self.at :]
            while right < min(len(draft.tokens), len(coming) - 1) and draft.tokens[right] == coming[right]:
                right += 1
            self._clock.now_s += self._cost(1 + len(draft.tokens))
            self.rounds += 1
            self.speculator.verified(draft, list(coming[: right + 1]), 1 + len(draft.tokens))
            self.at += right + 1

    def _step(self, *, steady: bool) -> None:
        self.speculator.observe(self.text[self.at], steady=steady)
        self.at += 1


def cheap(rows: int) -> float:
    """A pass over several rows takes little longer than over one."""
    return 1 + 0.1 * (rows - 1)


def test_a_file_that_is_quoted_comes_several_times_as_fast_and_the_seconds_are_those_saved() -> None:
    file = [i * i % 997 for i in range(300)]
    machine = Machine([*file, 1, 2, 3, *file], 303, cheap, Lookup())
    machine.run()
    assert machine.seconds < 300 / 3
    done = machine.speculator.done()
    assert done.accepted + machine.rounds <= 300
    assert done.saved_s == pytest.approx(300 - machine.seconds, abs=5)
    assert done.rests == ""


def test_guesses_that_are_always_wrong_cost_what_they_may_and_it_is_said_why_they_rest() -> None:
    text = [i * i % 997 for i in range(2000)]
    machine = Machine(text, 10, cheap, always_wrong(text, 997))
    machine.run()
    assert machine.seconds - 1990 <= TUNING.credit + TUNING.share * 1990
    dear = Machine(text, 10, lambda rows: float(rows), always_wrong(text, 997))
    dear.run()
    assert (dear.seconds, dear.rounds) == (1990, 0)
    assert dear.speculator.done() == Speculated(rests=TOO_SELDOM)


def test_a_text_without_repetition_is_not_drafted() -> None:
    machine = Machine(range(500), 10, cheap, Lookup())
    machine.run()
    assert (machine.seconds, machine.speculator.done()) == (490, Speculated(rests=NOTHING_ALIKE))


class Dear:
    """A drafter that takes time: a twentieth of a step."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.clock, self.asked = drafter, Clock(), 0

    def propose(self, ids: Sequence[int], k: int) -> TokenDraft | None:
        self.asked += 1
        self.clock.now_s += 0.05
        return self._drafter.propose(ids, k)


def dear_machine(text: Sequence[int], begin: int, drafter: Drafter) -> tuple[Machine, Dear]:
    dear = Dear(drafter)
    machine = Machine(text, begin, cheap, dear)
    dear.clock = machine._clock
    return machine, dear


def test_where_looking_takes_long_it_is_done_seldom_and_what_it_costs_is_bounded() -> None:
    prose, dear = dear_machine(range(2000), 10, Lookup())
    prose.run()
    looks = AT_FIRST + 1990 / 40  # a twentieth of a step, an eight-hundredth of forty
    assert dear.asked == pytest.approx(looks, rel=0.05)
    assert prose.seconds - 1990 <= 2 * LOOKING * 1990
    assert prose.speculator.done().rests == NOTHING_ALIKE
    text = [i * i % 997 for i in range(2000)]
    wrong, dear = dear_machine(text, 10, always_wrong(text, 997))
    wrong.run()
    assert dear.asked < 500
    assert wrong.seconds - 1990 <= TUNING.credit + (TUNING.share + 3 * LOOKING) * 1990


def test_what_repeats_after_a_rest_is_noticed_within_some_tokens_and_no_token_of_it_is_forgotten() -> None:
    file = [i * i % 997 for i in range(300)]
    apart = list(range(1000, 1400))
    machine, dear = dear_machine([*file, *apart, *file], 300, Lookup())
    machine.run()
    assert machine.speculator._ids == [*file, *apart, *file]
    assert machine.seconds < 400 * 1.02 + 300 / 3 + MOST_RESTED
    assert dear.asked < 60 + machine.rounds * 2
    assert machine.speculator.ledger.tokens == 700


def test_what_is_shared_is_no_step_and_is_said() -> None:
    speculator = Speculator([Lookup()], PassCosts(lambda rows, _: 1.0), [1, 2, 3], Clock())
    for token in range(10):
        speculator.observe_shared(token)
    assert speculator.done().rests == SHARED
    assert speculator.ledger.costs.plain_s(10) is None


def test_passes_that_take_other_than_they_should_have_plain_steps_timed_again() -> None:
    """The machine becomes five times slower in the middle of a reply: drafts go on, and count against what a step takes now."""
    file = [i * i % 997 for i in range(400)]
    machine = Machine([*file, *file, *file], 400, cheap, Lookup())
    usual = machine._cost
    slow = {"by": 1.0}
    machine._cost = lambda rows: usual(rows) * slow["by"]
    step = machine._step

    def slower(*, steady: bool) -> None:
        slow["by"] = 5.0 if machine.at > 700 else 1.0
        machine._clock.now_s += slow["by"] - 1
        step(steady=steady)

    machine._step = slower  # type: ignore[method-assign]
    machine.run()
    assert machine.speculator.ledger.balance > 0
    assert ALL_LOST not in machine.speculator.done().rests
