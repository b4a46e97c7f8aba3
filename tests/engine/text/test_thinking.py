"""What a chat template is told beside the messages: found from the template, refused where it reads none; a budget of thinking."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.helpers import finish, write_model, write_tokenizer
from tests.engine.inside import runtime_of
from tests.waiting import PATIENCE_S
from tokamac.engine import (
    Engine,
    Finished,
    KVSpec,
    Message,
    OptionError,
    PromptCacheSpec,
    Sampling,
    Send,
    TemplateError,
    TemplateOptions,
    TextChunk,
)
from tokamac.engine.generation import Generation
from tokamac.engine.prompt_cache.memory import common_prefix
from tokamac.engine.sampling import Sampler
from tokamac.engine.schedule.decoding import Lane, decode_alone
from tokamac.engine.text.stream import ReplyText, ThinkingBudget
from tokamac.engine.text.tokenizer import HARMONY, Tokenizer, load_tokenizer

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
OPENED = "{% if add_generation_prompt %}<assistant>{% endif %}"
EMPTY = "<think>\n\n</think>\n\n"

# In the manner of published families, each of which says it in another way.
FAMILIES: dict[str, tuple[str, dict[str, str]]] = {
    "a flag, on unless it is false": (
        TURNS + OPENED + "{% if enable_thinking is defined and enable_thinking is false %}" + EMPTY + "{% endif %}",
        {"": "", "on": "", "off": EMPTY},
    ),
    "a flag with a default, off unless it is true": (
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
        + TURNS + OPENED + "{{ '<think>' if thinking else '</think>' }}",
        {"": "</think>", "on": "<think>", "off": "</think>"},
    ),
    "a flag that a filter reads": (
        "{% set enable_thinking = enable_thinking | default(true) %}" + TURNS + OPENED
        + "{% if not enable_thinking %}/nothink{% endif %}",
        {"": "", "on": "", "off": "/nothink"},
    ),
    "a level that is printed": (
        "<system>Reasoning: {{ reasoning_effort if reasoning_effort is defined else 'medium' }}<end>" + TURNS + OPENED,
        {"": "medium", "on": "medium", "low": "low", "medium": "medium", "high": "high"},
    ),
    "levels, of which it refuses some": (
        "{% set effort = reasoning_effort or 'none' %}{% if effort not in ['none', 'high'] %}{{ raise_exception('no') }}{% endif %}"
        "<system>{{ effort }}<end>" + TURNS + OPENED,
        {"": "none", "on": "high", "off": "none", "high": "high"},
    ),
    "a flag and a level": (
        TURNS + OPENED + "{% if enable_thinking %}<think>{{ reasoning_effort or 'some' }}{% endif %}",
        {"": "", "on": "<think>some", "off": "", "low": "<think>low", "medium": "<think>medium", "high": "<think>high"},
    ),
    "one of two words": (
        TURNS + OPENED + "{% if thinking_mode == 'chat' %}</think>{% else %}<think>{% endif %}",
        {"": "<think>", "on": "<think>", "off": "</think>"},
    ),
    "a number of tokens": (
        "{% if thinking_budget is defined and thinking_budget == 0 %}<system>Answer at once.<end>{% endif %}" + TURNS + OPENED,
        {"": "", "on": "", "off": "Answer at once."},
    ),
    "a word in the system message": (
        "{% set ns = namespace(on=true) %}{% for m in messages %}{% if '/no_think' in m.content %}{% set ns.on = false %}"
        "{% elif '/think' in m.content %}{% set ns.on = true %}{% endif %}"
        "<{{ m.role }}>{{ m.content.replace('/no_think', '').replace('/think', '') }}<end>{% endfor %}" + OPENED
        + "{{ '<think>' if ns.on else '<think></think>' }}",
        {"": "<think>", "on": "<think>", "off": "<think></think>"},
    ),
}  # fmt: skip
NO_SWITCH = {
    "none": TURNS + OPENED,
    "a name without effect": "{% if enable_thinking %}{% endif %}" + TURNS + OPENED,
    "a name of its own": "{% set thinking = true %}{% if thinking %}" + TURNS + "{% endif %}" + OPENED,
    "a field of messages": "{% for m in messages %}{{ m.thinking }}{{ m.content }}{% endfor %}",
    "it always thinks": TURNS + OPENED + "<think>",
}
ASKED = [Message("system", "Be brief."), Message("user", "What is prefill?")]


def tokenizer(folder: Path, template: str | None, *, thinking: bool = True, marks: tuple[str, ...] = ()) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder, template=template, thinking=thinking, marks=marks)
    return load_tokenizer(folder, {}, "tiny")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_is_told_what_it_knows_of_thinking(tmp_path: Path, family: str) -> None:
    template, expected = FAMILIES[family]
    found = tokenizer(tmp_path, template)
    assert set(found.thinking_modes) == set(expected) - {""}
    without = found.render(ASKED)
    for mode, text in expected.items():
        told = found.using(TemplateOptions(thinking=mode or None))  # type: ignore[arg-type]
        rendered = told.render(ASKED)
        words = {word for word in expected.values() if word and word not in text}
        assert text in rendered
        assert not any(word in rendered.replace(text, "") for word in words)
        assert "/think" not in rendered.replace("</think>", "")
    assert found.render(ASKED) == without  # the tokenizer itself stays as it was


@pytest.mark.parametrize("name", NO_SWITCH)
def test_no_switch_is_an_error_that_says_what_the_template_reads(tmp_path: Path, name: str) -> None:
    found = tokenizer(tmp_path, NO_SWITCH[name])
    assert found.thinking_modes == ()
    with pytest.raises(OptionError, match="the chat template of tiny has no switch for thinking") as refused:
        found.using(TemplateOptions(thinking="off"))
    reads = "Beside the messages it reads: enable_thinking." if name == "a name without effect" else "It reads nothing"
    assert reads in refused.value.hint


def test_a_mode_that_a_template_does_not_know_is_an_error_that_names_those_it_knows(tmp_path: Path) -> None:
    found = tokenizer(tmp_path, FAMILIES["a flag, on unless it is false"][0])
    with pytest.raises(OptionError, match="has no thinking mode low") as refused:
        found.using(TemplateOptions(thinking="low"))
    assert refused.value.hint == "It knows: on, off."
    always = tokenizer(tmp_path / "always", FAMILIES["a level that is printed"][0])
    with pytest.raises(OptionError, match="has no thinking mode off"):
        always.using(TemplateOptions(thinking="off"))


def test_any_other_keyword_reaches_the_template_and_one_that_it_does_not_read_is_refused(tmp_path: Path) -> None:
    found = tokenizer(tmp_path, TURNS + "{{ style }}{% for d in documents or [] %}[{{ d.text }}]{% endfor %}" + OPENED)
    told = found.using(TemplateOptions(keywords=["style=brief", 'documents=[{"text": "a <end> b"}]']))
    text = told.render(ASKED)
    assert "brief[a " in text
    ids = told.encode(text)
    assert ids.count(found.encode("<end>")[0]) == 2  # contents never become control tokens
    assert found.template_names == ("documents", "style")
    with pytest.raises(OptionError, match="does not read enable_thinking") as refused:
        found.using(TemplateOptions(keywords={"enable_thinking": False}))
    assert refused.value.hint == "Beside the messages it reads: documents, style."
    flagged = tokenizer(tmp_path / "flag", FAMILIES["a flag, on unless it is false"][0])
    assert flagged.using(TemplateOptions(keywords={"enable_thinking": False})).render(ASKED).endswith(EMPTY)
    with pytest.raises(OptionError, match="sets enable_thinking, which is given"):
        flagged.using(TemplateOptions(thinking="on", keywords={"enable_thinking": False}))


def test_what_a_template_sets_for_itself_is_not_among_what_it_may_be_told(tmp_path: Path) -> None:
    source = (
        "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}{% endif %}{{ first }}"
        "{% set style = style | default('plain') %}{% if tone is not defined %}{% set tone = 'calm' %}{% endif %}"
        "{{ tone }}{{ style }}"
        "{% set depth = depth or 3 %}{% macro shout(tools) %}{{ tools }}{% endmacro %}{{ shout(tools) }}"
    )
    assert tokenizer(tmp_path, source).template_names == ("depth", "style", "tone", "tools")


def test_thinking_is_open_where_other_marks_follow_its_own(tmp_path: Path) -> None:
    found = tokenizer(tmp_path, TURNS, marks=("<reflect>",))
    assert found.opens_thinking("<assistant><think>\n")
    assert found.opens_thinking("<assistant><think><reflect>\n<end>")
    for closed in ("<assistant>", "<assistant><think>\n</think>\n", "<think> is a mark<end><assistant>", ""):
        assert not found.opens_thinking(closed)


def test_a_template_that_never_ends_is_not_tried_for_long(tmp_path: Path) -> None:
    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    found = tokenizer(
        tmp_path, "{% if enable_thinking is defined or thinking is defined %}" + slow + "{% endif %}" + TURNS
    )
    assert found.thinking_modes == ()


def test_a_model_whose_template_is_none_loads_and_says_so_when_it_is_used(tmp_path: Path) -> None:
    with Engine.load(write_model(tmp_path, template="{% if %}", thinking=True), prompt_cache=None) as engine:
        assert (engine.spec.thinking_modes, engine.spec.template_names) == ((), ())
        assert list(engine.generate([5, 6, 7], Sampling(max_tokens=2)))
        with pytest.raises(TemplateError):
            list(engine.generate([Message("user", "x")]))
        with pytest.raises(OptionError, match="has no switch for thinking"):
            list(engine.generate([Message("user", "x")], template=TemplateOptions("off")))


def test_a_template_that_takes_no_system_message_is_tried_without(tmp_path: Path) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    found = tokenizer(tmp_path, refuses + FAMILIES["a flag, on unless it is false"][0])
    assert found.thinking_modes == ("on", "off")


def test_a_word_for_the_system_message_makes_one_where_there_is_none(tmp_path: Path) -> None:
    found = tokenizer(tmp_path, FAMILIES["a word in the system message"][0])
    told = found.using(TemplateOptions(thinking="off"))
    assert told.render(ASKED[1:]).startswith("<system><end><user>")
    assert told.render(ASKED).startswith("<system>Be brief.\n<end><user>")


@pytest.mark.parametrize("bad", [
    {"thinking": "loud"}, {"thinking_budget": -1}, {"thinking_budget": 1.5}, {"keywords": ["a"]}, {"keywords": ["a=True"]},
    {"keywords": ["a=1", "a=2"]}, {"keywords": ["_a=1"]}, {"keywords": ["messages=[]"]}, {"keywords": ["a={1"]},
    {"keywords": {"a": {1}}}, {"keywords": {"a": float("nan")}}, {"keywords": 7},
])  # fmt: skip
def test_what_no_template_can_be_told_is_refused_when_it_is_made(bad: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        TemplateOptions(**bad)


@settings(deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True).filter(lambda n: n != "messages"), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda each: st.lists(each) | st.dictionaries(st.text(), each)
), max_size=4))  # fmt: skip
def test_keywords_are_the_same_from_a_dict_and_from_texts(values: dict[str, Any]) -> None:
    options = TemplateOptions(keywords=values)
    assert options.values == values
    assert TemplateOptions(keywords=options.keywords) == options


# How thinking ends ---------------------------------------------------------------------------------------------------------

WRITES = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}END{% endif %}"
    "{{ m.content }}<end>{% endfor %}" + OPENED
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (WRITES.replace("END", "\n</think>\n\n"), "\n</think>\n\n"),
        (WRITES.replace("END", "</think>"), "</think>"),
        (WRITES.replace("END", " so be it</think>\n"), " so be it</think>\n"),
        (TURNS + OPENED, "\n</think>\n\n"),  # it drops what was thought
        (None, "\n</think>\n\n"),
    ],
)
def test_thinking_is_ended_as_the_template_writes_it(tmp_path: Path, template: str | None, expected: str) -> None:
    found = tokenizer(tmp_path, template)
    assert found.thinking_end("hm") == found.encode(expected)
    assert found.thinking_end("hm\n\n") == found.encode(expected.lstrip("\n"))


def fed(text: ReplyText, budget: ThinkingBudget, ids: list[int]) -> list[int]:
    """Feed a reply as the decoder does; return what came, the forced ids in their place."""
    queue, came, forced = list(ids), [], budget.ending()
    while queue or forced:
        token = forced.pop(0) if forced else queue.pop(0)
        came.append(token)
        list(text.add(token))
        forced += budget.ending()
    list(text.finish())
    return came


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ab é中\n", max_size=30), st.integers(0, 40), st.booleans())
def test_the_budget_ends_it(tmp_path_factory: pytest.TempPathFactory, thought: str, most: int, opened: bool) -> None:
    found = tokenizer(tmp_path_factory.mktemp("budget"), TURNS)
    text = ReplyText(found, in_thinking=opened)
    budget = ThinkingBudget(most, text, found)
    ids = found.encode(("" if opened else "<think>") + thought + "</think>yes")
    came = fed(text, budget, ids)
    inside = len(found.encode(thought))
    if inside < most:
        assert came == ids
        assert budget.ended_at is None
        return
    assert budget.ended_at == most
    end = came.index(found.encode("</think>")[0])
    ours = end - (0 if opened else 1)
    assert most <= ours <= most + 3 + 1  # the rest of a character, and the line's end before the mark
    assert "\ufffd" not in text.thinking
    assert text.thinking.strip("\n") == found.decode(came[:end] if opened else came[1:end]).strip("\n")


def test_a_channel_of_analysis_is_ended_by_the_header_of_the_answer(tmp_path: Path) -> None:
    marks = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|return|>")
    found = tokenizer(tmp_path, TURNS, thinking=False, marks=marks)
    assert found.thinking == HARMONY
    text = ReplyText(found)
    budget = ThinkingBudget(3, text, found)
    came = fed(text, budget, found.encode("<|channel|>analysis<|message|>so it isand more"))
    assert (text.thinking, text.answer) == ("so ", "it isand more")
    assert (
        found.encode(HARMONY[1])
        == came[-len(found.encode(HARMONY[1] + "it isand more")) :][: len(found.encode(HARMONY[1]))]
    )


# The engine -----------------------------------------------------------------------------------------------------------------

OPENS = (
    TURNS
    + "{% if add_generation_prompt %}<assistant>"
    + "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}" + EMPTY + "{% endif %}{% endif %}"
)  # fmt: skip
SAMPLED = Sampling(temperature=0.8, seed=3, max_tokens=40, repetition_penalty=1.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("thinks"), template=OPENS, thinking=True, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.load(folder) as loaded:
        yield loaded


def held_after(events: Iterator[object], monkeypatch: pytest.MonkeyPatch) -> tuple[Finished, list[int], list[Any]]:
    """Read a reply to its end; return it with the tokens that are in the caches by the run's own list, and the caches."""
    lanes: list[Lane] = []

    def noted(*args: Any, **more: Any) -> Lane:
        lanes.append(Lane(*args, **more))
        return lanes[-1]

    monkeypatch.setattr("tokamac.engine.reply.Lane", noted)
    finished = finish(events)
    return finished, lanes[-1].cached_ids, lanes[-1].caches


@pytest.mark.parametrize("most", [0, 1, 7])
def test_after_the_budget_caches_and_counts_agree(engine: Engine, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    asked = [Message("user", f"What is prefill? {most}")]
    options = TemplateOptions(thinking="on", thinking_budget=most)
    events = list(engine.generate(asked, SAMPLED, template=options))
    finished = finish(iter(events))
    again, held, caches = held_after(engine.generate(asked, SAMPLED, template=options), monkeypatch)
    assert finished.thinking_ended_at == again.thinking_ended_at == most
    assert (finished.text, finished.thinking) == (again.text, again.thinking)
    assert finished.text
    tokenizer = engine.tokenizer
    prompt = tokenizer.encode(tokenizer.using(options).render(asked))
    assert held[: len(prompt)] == prompt
    made = held[len(prompt) :]
    end = tokenizer.encode("</think>")[0]
    assert made.count(end) >= 1
    assert most <= made.index(end) <= most + 1 + 8  # the rest of a character of several bytes at most, and a line's end
    assert finished.metrics.generated_tokens == 40 == len(made) + 1  # the last is made and not fed
    assert all(cache.offset == len(held) for cache in caches)
    shown = {
        kind: "".join(e.text for e in events if isinstance(e, TextChunk) and e.kind == kind)
        for kind in ("answer", "thinking")
    }
    assert (shown["answer"], shown["thinking"]) == (finished.text, finished.thinking)


def test_what_follows_is_what_the_model_says_after_that_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, greedy = [Message("user", "What is decode?")], Sampling(temperature=0, max_tokens=30)
    with Engine.load(folder, prompt_cache=None) as engine:
        options = TemplateOptions(thinking="on", thinking_budget=5)
        _, held, _ = held_after(engine.generate(asked, greedy, template=options), monkeypatch)
        prompt = engine.tokenizer.encode(engine.tokenizer.render(asked))
        forced = held.index(engine.tokenizer.encode("</think>")[0], len(prompt)) + 3  # with the two line ends after it
        fresh, same, _ = held_after(engine.generate(held[:forced], greedy), monkeypatch)
        assert same[: len(held)] == held
        assert fresh.metrics.prompt_tokens == forced


@pytest.mark.parametrize("kv", [KVSpec(), KVSpec(key_bits=8, value_bits=4), KVSpec(window=64, keep=8)])
def test_the_next_turn_goes_on_warm_as_it_does_cold(folder: Path, kv: KVSpec) -> None:
    options = TemplateOptions(thinking="on", thinking_budget=4)
    greedy = Sampling(temperature=0, max_tokens=12)

    def second(*, warm: bool) -> Finished:
        with Engine.load(folder, kv=kv, prompt_cache=PromptCacheSpec(disk=False) if warm else None) as engine:
            chat = engine.chat(template=options)
            finish(chat.send("One?", greedy))
            return finish(chat.send("Two?", greedy))

    warm, cold = second(warm=True), second(warm=False)
    assert (warm.text, warm.thinking, warm.thinking_ended_at) == (cold.text, cold.thinking, cold.thinking_ended_at)
    assert warm.thinking_ended_at == 4


def test_a_budget_that_was_used_up_ends_a_reply_that_goes_on_thinking(engine: Engine) -> None:
    chat = engine.chat(template=TemplateOptions(thinking="on"))
    cut = finish(chat.send("What is prefill?", Sampling(temperature=0.8, seed=1, max_tokens=6)))
    assert cut.thinking
    assert not cut.text
    chat.template = TemplateOptions(thinking="on", thinking_budget=2)
    went_on = finish(chat.continue_reply(Sampling(temperature=0.8, seed=1, max_tokens=12)))
    assert went_on.thinking_ended_at == 2
    assert went_on.thinking.rstrip("\n").startswith(cut.thinking.rstrip("\ufffd\n"))
    assert went_on.text


def test_the_prompt_is_rendered_with_the_options_and_the_cache_keeps_both_apart(engine: Engine) -> None:
    said = [Message("user", "Off or on?")]
    one = Sampling(temperature=0, max_tokens=1)
    on = finish(engine.generate(said, one, template=TemplateOptions(thinking="on"))).metrics
    off = finish(engine.generate(said, one, template=TemplateOptions(thinking="off"))).metrics
    prompts = {
        mode: engine.tokenizer.encode(engine.tokenizer.using(TemplateOptions(thinking=mode)).render(said))
        for mode in ("on", "off")
    }
    assert (on.prompt_tokens, off.prompt_tokens) == (len(prompts["on"]), len(prompts["off"]))
    shared = common_prefix(prompts["on"], prompts["off"])
    assert off.cached_tokens == shared  # what is the same, and nothing more
    price = engine.price(said, template=TemplateOptions(thinking="off"))
    assert price.prompt_tokens == off.prompt_tokens
    assert price.tokens <= 2


def test_a_chat_keeps_its_options_and_so_do_its_branches(engine: Engine) -> None:
    chat = engine.chat(template=TemplateOptions(thinking="off"))
    first = finish(chat.send("What is prefill?", Sampling(temperature=0, max_tokens=8)))
    assert not first.thinking
    assert chat.branch(0).template == TemplateOptions(thinking="off")
    begun = finish(chat.send("And decode?", Sampling(temperature=0, max_tokens=8))).metrics
    turns = [Message("user", "What is prefill?"), Message("assistant", first.text), Message("user", "And decode?")]
    off = engine.tokenizer.using(TemplateOptions(thinking="off"))
    assert begun.prompt_tokens == len(off.encode(off.render(turns)))
    assert off.render(turns).startswith(off.render(turns[:2], reply=False))  # earlier turns stay as they were


def test_an_answer_without_thinking_is_read_again_as_the_next_turn_writes_it(folder: Path) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        chat = engine.chat(template=TemplateOptions(thinking="off"))
        made = finish(chat.send("What is prefill?", Sampling(temperature=0, max_tokens=90))).metrics.generated_tokens
        assert made == 90
        deadline = time.monotonic() + PATIENCE_S
        while chat.price(Send("And decode?")).tokens > 50:  # the answer stands behind an empty thought no more
            assert time.monotonic() < deadline, "never"
            time.sleep(0.02)


def test_what_can_not_be_honoured_is_refused_before_anything_is_computed(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="token ids are a prompt that is rendered already"):
        list(engine.generate([5, 6, 7], template=TemplateOptions(thinking="off")))
    with pytest.raises(OptionError, match="does not read colour"):
        engine.price([Message("user", "x")], template=TemplateOptions(keywords={"colour": "red"}))
    with pytest.raises(OptionError, match="template is a dict"):
        engine.generate([Message("user", "x")], template={"thinking": "off"}).send(None)  # type: ignore[arg-type]
    assert engine.spec.thinking_modes == ("on", "off")
    assert engine.spec.template_names == ("enable_thinking",)
    plain = tokenizer(tmp_path, TURNS + OPENED, thinking=False)
    with pytest.raises(OptionError, match="tiny does not mark its thinking, so a thinking budget has nothing to end"):
        plain.using(TemplateOptions(thinking_budget=5))


def decoded(engine: Engine, *, ahead: bool) -> tuple[list[int], list[int], set[int]]:
    """Decode with three forced tokens after the fifth; return the tokens, those in the caches, and the caches' offsets."""

    def work() -> tuple[list[int], list[int], set[int]]:
        runtime = runtime_of(engine)
        caches = runtime.new_caches(None)
        run, prompt = Generation(runtime.model, caches, []), list(range(10, 30))
        for _ in run.prefill(prompt[:-1], 8):
            pass
        made: list[int] = []
        lane = Lane(caches, run.cached_ids, prompt[-1], Sampler(SAMPLED.resolved(Sampling()), prompt), 16)
        for token in decode_alone(runtime.model, lane, ahead=ahead):
            made.append(token)
            if len(made) == 5:
                assert run.cached_ids in (prompt + made, prompt + made[:-1])
                lane.force([7, 8, 9])
        return made, run.cached_ids[len(prompt) :], {cache.offset - len(prompt) for cache in caches}

    return engine.between(work)


def test_forced_tokens_come_next_whether_or_not_a_step_is_computed_ahead(engine: Engine) -> None:
    made, held, offsets = decoded(engine, ahead=True)
    assert made[5:8] == [7, 8, 9]
    assert held == made[:-1]
    assert offsets == {len(held)}
    assert decoded(engine, ahead=False) == (made, held, offsets)


def test_forced_tokens_are_scored_as_what_they_are(engine: Engine) -> None:
    options = TemplateOptions("on", 4)
    asked = [Message("user", "What is prefill?")]
    how = Sampling(temperature=0.8, seed=5, max_tokens=16, logprobs=0, presence_penalty=0.5, dry_multiplier=0.8)
    end = engine.ask(asked, how, template=options)
    assert end.thinking_ended_at == 4
    tokenizer = engine.tokenizer.using(options)
    prompt = tokenizer.encode(tokenizer.render(asked))
    assert engine.tokenizer.encode("</think>")[0] in end.ids
    rows = engine.logprobs([*prompt, *end.ids])
    expected = engine.between(lambda: [rows[len(prompt) - 1 + i, token].item() for i, token in enumerate(end.ids)])
    assert [each.id for each in end.logprobs] == list(end.ids)
    assert [each.logprob for each in end.logprobs] == pytest.approx(expected, abs=1e-3)
