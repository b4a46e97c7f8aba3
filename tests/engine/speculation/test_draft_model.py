"""A draft model changes no text, whatever it is; its caches follow the reply; it is asked only where that pays."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from tests.engine.helpers import write_model
from tests.engine.inside import runtime_of, speculating, speculation_of
from tests.engine.kv.models import VOCABULARY, WINDOW, config_of, seeded
from tests.engine.speculation.scripted import Clock, EagerDrafting, Knowing
from tests.engine.speculation.test_verify import model_of, prompt_of
from tests.tiny import make_tiny
from tokamac.engine import (
    Engine,
    Finished,
    KVSpec,
    MemoryLimitError,
    OptionError,
    PromptCacheSpec,
    Sampling,
    Speculation,
)
from tokamac.engine.kv.attention import leaves
from tokamac.engine.kv.plan import plan_caches
from tokamac.engine.metrics import DraftCount
from tokamac.engine.perf.footprint import LEAST_CHUNK
from tokamac.engine.perf.peak_memory import predict_peak
from tokamac.engine.sampling import Sampler
from tokamac.engine.schedule.decoding import Decoder, Lane
from tokamac.engine.speculation.draft_model import LEAST_READ, NO_MEMORY, DraftModel, ModelDrafter
from tokamac.engine.speculation.ledger import TUNING, DraftingCosts, PassCosts
from tokamac.engine.speculation.speculator import TOO_DEAR, Speculator
from tokamac.engine.text.tokenizer import load_tokenizer

# Caches that follow: any architecture as a draft, right always, now and then, and never.

NEW = 60
FAMILIES = ("llama", "gemma3_text", "qwen3_next", "deepseek_v3", "falcon_h1", "gpt_oss")
SAMPLINGS = {"greedy": Sampling(temperature=0), "seeded": Sampling(temperature=1, seed=5)}


def itself(model: Any, _: str) -> Any:
    """Return the model."""
    return model


def nearly(model: Any, name: str) -> Any:
    """Return one like it, its weights a little off."""
    other = model_of(name)
    mx.random.seed(11)
    other.update(
        tree_map(
            lambda a: a + mx.random.normal(a.shape) * 0.01 if mx.issubdtype(a.dtype, mx.floating) else a,
            model.parameters(),
        )
    )
    return other


def another(_: Any, name: str) -> Any:
    """Return a model of other weights."""
    return seeded(model_of(name), seed=8)


DRAFTS = {"itself": itself, "nearly itself": nearly, "another": another}


def draft_of(model: Any, name: str, kv: KVSpec = KVSpec(), longest: int | None = None) -> DraftModel:  # noqa: B008
    """Return a draft model of a vocabulary of its own size, which costs nothing."""
    plan = plan_caches(model, config_of(name), kv)
    costs = DraftingCosts(lambda _: 0.01)
    return DraftModel(model, plan, vocabulary=VOCABULARY, longest=longest, costs=costs)


class Drafted:
    """One sequence, decoded with a draft model that is asked whenever it can be."""

    def __init__(self, model: Any, caches: list[Any], draft: DraftModel | None, sampling: Sampling, prompt: list[int]):
        model(mx.array([prompt[:-1]]), cache=caches)
        sampler = Sampler(sampling.resolved(Sampling()), prompt)
        self.draft, self.prompt, self.tokens = draft, prompt, list[int]()
        self.speculator = None if draft is None else EagerDrafting(ModelDrafter(draft, sampler), prompt)
        self.lane = Lane(caches, list(prompt[:-1]), prompt[-1], sampler, NEW, speculator=self.speculator)
        self.decoder = Decoder(model, ahead=True)

    def run(self) -> list[int]:
        """Decode to the end; return all tokens."""
        while not self.lane.ended:
            self.tokens += [each.token for each in self.decoder.step([self.lane]) if each.token is not None]
            if self.draft is not None:
                self.check(self.draft)
        return self.tokens

    def check(self, draft: DraftModel) -> None:
        """Raise unless the draft model's caches hold what it says."""
        known = [*self.prompt, *self.tokens, *self.lane.ready][draft.start :]
        held = list(draft.held)
        assert held[: draft.sure] == known[: draft.sure]
        offsets = {each.offset for _, each in leaves(draft.caches) if isinstance(getattr(each, "offset", None), int)}
        assert offsets <= {len(held)}, (offsets, len(held))

    @property
    def accepted(self) -> tuple[int, int]:
        """Tokens that came true, and all that were drafted."""
        done = self.speculator.done()
        return done.accepted, done.drafted


@pytest.mark.parametrize(
    ("name", "kind", "sampling"),
    [
        *((name, kind, "seeded") for name in FAMILIES[:4] for kind in DRAFTS),
        *((name, "nearly itself", "greedy") for name in FAMILIES[4:]),
    ],
)
def test_any_class_drafts_for_any_and_the_text_is_the_same(name: str, kind: str, sampling: str) -> None:
    model, how, prompt = model_of(name), SAMPLINGS[sampling], prompt_of(9)
    plan = plan_caches(model, config_of(name), KVSpec())
    plain = Drafted(model, plan.make(0), None, how, prompt).run()
    found = Drafted(model, plan.make(0), draft_of(DRAFTS[kind](model, name), name), how, prompt)
    assert found.run() == plain
    accepted, drafted = found.accepted
    assert drafted > NEW // 3
    if kind == "itself":
        assert accepted == drafted
    elif kind == "another":
        assert accepted < drafted // 4
    else:
        assert NEW // 6 <= accepted < drafted


@pytest.mark.parametrize("spec", [KVSpec(key_bits=8, value_bits=4, group_size=32), KVSpec(window=WINDOW, keep=2)])
def test_the_layout_and_bits_of_both_are_their_own(spec: KVSpec) -> None:
    model, prompt = model_of("llama"), prompt_of(9)
    plan = plan_caches(model, config_of("llama"), spec)
    plain = Drafted(model, plan.make(0), None, SAMPLINGS["seeded"], prompt).run()
    for own in (KVSpec(), spec):
        draft = draft_of(nearly(model, "llama"), "llama", own)
        found = Drafted(model, plan.make(0), draft, SAMPLINGS["seeded"], prompt)
        assert found.run() == plain
        assert found.accepted[1] > NEW // 3


@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_was_taken_back_it_guesses_as_if_it_had_never_gone_there(name: str) -> None:
    model = model_of(name)
    draft, sampler = draft_of(model, name), chosen_first()
    text = prompt_of(40)
    followed = ModelDrafter(draft, sampler)
    for end in (12, 14, 15, 21, 22, 30, 38):
        assert followed.reading(text[:end], math.inf) is not None
        found = followed.draft(text[:end], 5)
        fresh = ModelDrafter(draft_of(model, name), sampler)
        assert fresh.reading(text[:end], math.inf) is not None
        assert found == fresh.draft(text[:end], 5)
    edited = [*text[:10], 3, *text[11:30]]  # another conversation, which begins as this one
    other = ModelDrafter(draft, sampler)
    assert other.reading(edited, math.inf) is not None
    fresh = ModelDrafter(draft_of(model, name), sampler)
    fresh.reading(edited, math.inf)
    assert other.draft(edited, 5) == fresh.draft(edited, 5)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_a_conversation_that_parts_as_far_back_as_a_window_can_be_rewound_is_followed(name: str) -> None:
    model, text = model_of(name), prompt_of(120)
    draft, sampler = draft_of(model, name), chosen_first()
    for back in (56, 60, 64, 70):  # with what was guessed, more than the spare slots from 58 on
        followed = ModelDrafter(draft, sampler)
        followed.reading(text, math.inf)
        followed.draft(text, 7)
        edited = [*text[:-back], (text[-back] + 1) % VOCABULARY, 5]
        other, fresh = ModelDrafter(draft, sampler), ModelDrafter(draft_of(model, name), sampler)
        for drafter in (other, fresh):
            assert drafter.reading(edited, math.inf) is not None
        assert other.draft(edited, 5) == fresh.draft(edited, 5)


def test_after_a_failure_nothing_is_believed_of_its_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = model_of("llama"), prompt_of(40)
    draft, sampler = draft_of(model, "llama"), chosen_first()
    drafter, passes = ModelDrafter(draft, sampler), 0

    def failing(ids: mx.array, cache: list[Any]) -> mx.array:
        nonlocal passes
        passes += 1
        if passes == 4:
            raise RuntimeError("no memory")
        return model(ids, cache=cache)  # type: ignore[no-any-return]

    monkeypatch.setattr(draft, "_model", failing)
    drafter.reading(text[:20], math.inf)
    with pytest.raises(RuntimeError, match="no memory"):
        drafter.draft(text[:20], 5)
    fresh = ModelDrafter(draft_of(model, "llama"), sampler)
    for each in (drafter, fresh):
        each.reading(text, math.inf)
    assert drafter.draft(text, 5) == fresh.draft(text, 5)


def chosen_first() -> Sampler:
    """Return a greedy sampler that has chosen a token."""
    sampler = Sampler(Sampling(temperature=0).resolved(Sampling()), [1])
    sampler(mx.zeros((1, VOCABULARY)))
    return sampler


def test_of_a_long_prompt_it_reads_the_end_that_a_reply_can_bear_and_of_a_short_one_all() -> None:
    model, text = model_of("llama"), prompt_of(300)
    draft = draft_of(model, "llama")
    draft.costs = DraftingCosts(lambda rows: rows / 50)
    draft.costs.step = 0.5
    drafter = ModelDrafter(draft, chosen_first())
    steps = drafter.reading(text, 1.0)
    assert 0 < steps <= 1.0
    drafter.draft(text, 3)
    assert draft.start == 300 - 75  # the longest half of a half that takes a step at most
    assert list(draft.held[:75]) == text[-75:]
    assert drafter.reading([*text, 1], 1.0) == 0.0  # from now on it follows
    assert ModelDrafter(draft_of(model, "llama"), chosen_first()).reading(text, 0.0) is not None
    dear = draft_of(model, "llama")
    dear.costs = DraftingCosts(lambda rows: float(rows))
    assert ModelDrafter(dear, chosen_first()).reading(text, LEAST_READ / 2) is None
    assert ModelDrafter(dear, chosen_first()).reading(text[:9], 8.0) == 7.0


def test_a_full_context_begins_anew_with_the_end_and_ids_that_it_lacks_are_others() -> None:
    model, text = model_of("llama"), [VOCABULARY + 5, *prompt_of(60)]
    draft = draft_of(model, "llama", longest=64)
    drafter = ModelDrafter(draft, chosen_first())
    drafter.reading(text[:50], math.inf)
    assert len(drafter.draft(text[:50], 4)) == 4
    assert draft.start == 0
    assert drafter.reading(text, math.inf) is not None
    assert len(drafter.draft(text, 4)) == 4
    assert draft.start == len(text) - 32
    assert len(draft.held) <= 64


def test_without_memory_it_guesses_no_more_and_says_so() -> None:
    draft = draft_of(model_of("llama"), "llama")
    draft.fits = lambda _: False
    drafter = ModelDrafter(draft, chosen_first())
    drafter.reading(prompt_of(9), math.inf)
    assert drafter.draft(prompt_of(9), 3) == ()
    assert (drafter.most, drafter.rests) == (0, NO_MEMORY)
    assert not draft.held


def test_what_is_supposed_is_forgotten() -> None:
    asked = Sampling(
        temperature=1, seed=2, repetition_penalty=1.4, frequency_penalty=0.5, dry_multiplier=0.8, logprobs=2
    )
    logits = [mx.random.normal((1, VOCABULARY), key=mx.random.key(number)) for number in range(12)]

    def texts(suppose: bool) -> list[Any]:
        sampler, found = Sampler(asked.resolved(Sampling()), [1, 2, 3]), []
        for number, row in enumerate(logits):
            found.append((int(sampler(row).item()), sampler.take_score()))
            if suppose:
                with sampler.supposing():
                    for other in logits[number : number + 3]:
                        sampler(other)
        return found

    assert texts(False) == texts(True)


# Whole replies.

PROMPT = [5 + i * i % 250 for i in range(40)]
GREEDY = Sampling(temperature=0, max_tokens=NEW)
SEEDED = Sampling(temperature=1, seed=3, max_tokens=NEW)
REPLIES = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "filtered": replace(SEEDED, top_k=20, top_p=0.9),
    "penalties": replace(SEEDED, repetition_penalty=1.3, frequency_penalty=0.3),
    "DRY": replace(SEEDED, dry_multiplier=0.8),
    "scored": replace(SEEDED, logprobs=3),
}
KV = {"16 bits": KVSpec(), "packed": KVSpec(key_bits=8, value_bits=4), "window": KVSpec(window=48, keep=4)}


class EagerModelSpeculation:
    """In place of ``SharedSpeculation``: has the draft model asked whenever it can be."""

    computes = True

    def __init__(self, draft: DraftModel) -> None:
        self._draft = draft

    def begin(
        self, _: Any, ids: Sequence[int], made: Sequence[int], sampler: Sampler, *, background: bool
    ) -> Speculator:
        """Return the speculation of a reply."""
        assert not background
        return EagerDrafting(ModelDrafter(self._draft, sampler), [*ids, *made])

    def ended(self, ids: Sequence[int]) -> None:
        """Keep nothing."""


@pytest.fixture(scope="module", params=KV)
def engine(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine with a draft model as good as itself."""
    folder = make_tiny(tmp_path_factory.mktemp("tiny"))
    speculation = Speculation(lookup=False, branches=False, draft=folder)
    kv = KV[request.param]
    with Engine.load(folder, kv=kv, prompt_cache=PromptCacheSpec(disk=False), speculation=speculation) as loaded:
        loaded.tokenizer.eos_ids = frozenset()
        yield loaded


def both(engine: Engine, sampling: Sampling, prompt: str | list[int] = PROMPT) -> tuple[Finished, Finished]:
    """Return a reply without guesses, and with those of the draft model."""
    draft = speculation_of(engine)._draft
    with speculating(engine, None):
        plain = engine.ask(prompt, sampling)
    with speculating(engine, EagerModelSpeculation(draft.model)):
        return plain, engine.ask(prompt, sampling)


@pytest.mark.parametrize("sampling", REPLIES)
def test_any_sampling_chooses_the_same_and_two_equal_models_always_agree(engine: Engine, sampling: str) -> None:
    plain, drafted = both(engine, REPLIES[sampling])
    assert (drafted.ids, drafted.text, drafted.reason) == (plain.ids, plain.text, plain.reason)
    counts = drafted.metrics.drafts
    assert counts is not None
    (count,) = counts
    assert (count.source, count.drafted) == ("draft", drafted.metrics.drafted_tokens)
    if runtime_of(engine).kv == KVSpec():
        assert count.accepted == count.drafted > NEW // 2


def test_as_it_is_loaded_it_is_said_planned_and_decided_by_the_ledger(engine: Engine) -> None:
    spec = engine.spec
    assert spec.draft is not None
    assert spec.draft_bytes == spec.weight_bytes
    assert any(note.startswith(f"draft model {spec.draft}: ") for note in spec.notes)
    assert runtime_of(engine).shape.weights >= 2 * spec.weight_bytes
    plain, _ = both(engine, SEEDED)
    assert engine.ask(PROMPT, SEEDED).ids == plain.ids
    many = [event for _, _, event in engine.generate_many([PROMPT, PROMPT[:20]], SEEDED) if isinstance(event, Finished)]
    assert [len(each.ids) for each in many] == [0, 0] or all(each.metrics.generated_tokens == NEW for each in many)


@pytest.mark.parametrize(
    ("draft", "true"),
    [("guide", 1 / 2), ("guide-draft", 1 / 3)],  # the model itself, but for rows that are read together; and its own
)
def test_a_packed_one_changes_no_text_and_a_cpu_rounds_rows_of_its_steps(draft: str, true: float) -> None:
    guesses = Speculation(lookup=False, branches=False, draft=draft)
    with Engine.load("guide", prompt_cache=None, speculation=guesses) as guide:
        shared = speculation_of(guide)
        if guide.spec.device == "cpu":
            from tokamac.engine.cpu.layers import rounds_rows
            from tokamac.engine.cpu.stepping import steps_of

            module = shared._draft.model._model
            assert steps_of(module) is not None
            assert rounds_rows(module)
        drafted = accepted = 0
        for sampling in (Sampling(temperature=0), Sampling(temperature=0.8, seed=3)):
            plain, guessed = both(guide, sampling, "What is a KV cache?")
            assert (guessed.ids, guessed.text) == (plain.ids, plain.text)
            drafted += guessed.metrics.drafted_tokens or 0
            accepted += guessed.metrics.accepted_tokens or 0
        assert accepted > drafted * true


def test_a_model_of_another_tokenizer_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    other = write_model(tmp_path / "other")
    (other / "model.safetensors").unlink()
    with pytest.raises(OptionError, match=r"whose tokenizer is another: its token 0 is '<pad>', the other's"):
        Engine.load(folder, prompt_cache=None, speculation=Speculation(draft=str(other)))


def test_one_token_more_is_another_tokenizer(tmp_path: Path) -> None:
    one, two = write_model(tmp_path / "one"), write_model(tmp_path / "two", thinking=True)
    first, second = (load_tokenizer(each, {}, each.name) for each in (one, two))
    assert first.fingerprint == load_tokenizer(one, {}, "again").fingerprint != second.fingerprint
    assert first.difference(first) == ""
    assert second.difference(first).startswith("its token 5 is '<think>', the other's ")


def test_one_that_does_not_fit_beside_the_model_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    with Engine.load(folder, prompt_cache=None, speculation=None) as engine:
        shape = runtime_of(engine).shape
    alone = predict_peak(shape, held=0, new=LEAST_CHUNK, chunk=LEAST_CHUNK).total
    with pytest.raises(MemoryLimitError, match=r"not beside the .* of its draft model"):
        Engine.load(folder, prompt_cache=None, memory=alone + 1000, speculation=Speculation(draft=folder))
    with pytest.raises(MemoryLimitError, match=f"with {LEAST_CHUNK} tokens"):
        Engine.load(folder, prompt_cache=None, memory=alone - 1000, speculation=Speculation(draft=folder))


@pytest.mark.parametrize("draft", ["", "  ", 5])
def test_what_names_no_model_is_refused(draft: Any) -> None:
    with pytest.raises(OptionError, match="names no draft model"):
        Speculation(draft=draft)


# The decision, by a clock of its own.


class Scripted:
    """A computing drafter that knows a text, takes what it takes, and is right for ``right`` tokens of each draft."""

    source, most, rests = "draft", 7, ""

    def __init__(self, text: Sequence[int], clock: Clock, step: float, right: int, *, believed: float | None = None):
        self._text, self._clock, self.step, self.right = text, clock, step, right
        self._costs = DraftingCosts(lambda rows: 1.0)
        self._costs.step = step if believed is None else believed
        self.asked = 0

    def reading(self, ids: Sequence[int], most: float) -> float | None:
        """It has read all."""
        return 0.0

    def drafting(self, width: int) -> float:
        """As measured."""
        return self._costs.drafting(width)

    def draft(self, ids: Sequence[int], k: int) -> tuple[int, ...]:
        """Return what follows, as far as it is right."""
        self.asked += 1
        self._clock.now_s += self.step * k
        found = Knowing(self._text, lambda: self.right, 997, width=k).propose(ids, k)
        return () if found is None else found.tokens

    def took(self, width: int, steps: float) -> None:
        """Learn."""
        self._costs.observe(1, width, steps)

    def rested(self) -> None:
        """Forget."""
        self._costs.rested()


def decode(
    step: float, right: int, *, tokens: int = 2000, rows: float = 0.1, believed: float | None = None
) -> tuple[float, Scripted, Speculator]:
    """Decode so many tokens; return the steps that they took."""
    text, clock = [i * i % 997 for i in range(tokens + 10)], Clock()
    drafter = Scripted(text, clock, step, right, believed=believed)
    costs = PassCosts(lambda n, _: 1 + rows * (n - 1))
    speculator = Speculator([], costs, text[:10], clock, [drafter])
    at, ahead = 10, False
    while at < len(text):
        if ahead and speculator.pays_soon(lambda: 40):
            ahead = False
        elif ahead or (draft := speculator.draft(lambda: 40)) is None:
            ahead = True
        else:
            coming, found = text[at:], 0
            while found < min(len(draft.tokens), len(coming) - 1) and draft.tokens[found] == coming[found]:
                found += 1
            clock.now_s += 1 + rows * len(draft.tokens)
            speculator.verified(draft, list(coming[: found + 1]), 1 + len(draft.tokens))
            at += found + 1
            continue
        clock.now_s += 1
        speculator.observe(text[at], steady=ahead)
        at += 1
    return clock.now_s, drafter, speculator


def test_a_quick_draft_model_that_is_right_gains_and_its_tokens_are_counted_as_its_own() -> None:
    steps, _, speculator = decode(0.05, 7)
    assert steps < 2000 / 3
    done = speculator.done()
    assert done.drafts == (DraftCount("draft", done.drafted, done.accepted),)
    assert done.accepted > 0.95 * done.drafted
    assert done.saved_s == pytest.approx(2000 - steps, rel=0.05)


@pytest.mark.parametrize("step", [0.02, 0.2, 0.5])
def test_one_that_is_always_wrong_costs_no_more_than_a_reply_may_lose(step: float) -> None:
    steps, drafter, speculator = decode(step, 0)
    assert steps - 2000 <= TUNING.credit + TUNING.share * 2000
    assert drafter.asked
    assert speculator.done().rests


def test_one_that_is_slower_than_it_gains_is_never_asked() -> None:
    steps, drafter, speculator = decode(1.0, 7)
    assert (steps, drafter.asked) == (2000, 0)
    assert speculator.done().rests == TOO_DEAR


def test_one_that_is_slower_than_was_thought_is_parked_once_that_is_measured() -> None:
    steps, drafter, _ = decode(1.5, 7, believed=0.1)
    assert drafter.asked < 20
    assert steps < 2000 * 1.02


def test_a_text_that_becomes_easier_is_drafted_again() -> None:
    text, clock = [i * i % 997 for i in range(6000)], Clock()
    drafter = Scripted(text, clock, 0.05, 0)
    speculator = Speculator([], PassCosts(lambda n, _: 1 + 0.05 * (n - 1)), text[:10], clock, [drafter])
    for at in range(10, 1500):
        if (draft := speculator.draft(lambda: 40)) is not None:
            clock.now_s += 1 + 0.05 * len(draft.tokens)
            speculator.verified(draft, [text[at]], 1 + len(draft.tokens))
            continue
        clock.now_s += 1
        speculator.observe(text[at], steady=True)
    drafter.right, at, began_s = 7, 1500, clock.now_s
    while at < 3000:
        if (draft := speculator.draft(lambda: 40)) is not None:
            right = len(draft.tokens)
            clock.now_s += 1 + 0.05 * right
            speculator.verified(draft, text[at : at + right + 1], 1 + right)
            at += right + 1
            continue
        clock.now_s += 1
        speculator.observe(text[at], steady=True)
        at += 1
    assert clock.now_s - began_s < 1500 / 2
