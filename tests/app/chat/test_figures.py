"""Every figure explains itself; the sentence under a reply, and how numbers are written."""

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.app.chat.test_session import LOADED, Clock, loaded_session
from tests.scripted_engine import CHIP, LATENCY, SITUATION, WORK, model_spec
from tokamac.app.backend.protocol import Load, Loaded, MemoryUse, ReplyEvent
from tokamac.app.chat import figures
from tokamac.app.chat.conversation import Reply, Tree, Turn, messages
from tokamac.app.chat.figures import DRAFTERS, FIGURES, Explained, Figure, explain
from tokamac.app.chat.reply_steps import CAUSE_WORDS, held_up_by
from tokamac.app.chat.session import Session
from tokamac.app.reports import verdict
from tokamac.app.reports.verdict import REMEDIES, figures_text, headline, is_held_up, remark, remedy_text, sentence
from tokamac.app.text import units
from tokamac.app.tui.markdown.turns import FIGURES as FIGURES_FRAME
from tokamac.app.tui.markdown.turns import ReplyMessage
from tokamac.app.tui.screens.explain import explanation, figure_text
from tokamac.app.tui.theme import bar, sparkline
from tokamac.app.tui.widgets.status import NONE_YET, VERDICT_ROWS, WIDTH, Layout, rows
from tokamac.engine.events import Finished, Live, Message, ModelSpec, PrefillProgress, TextChunk, Truncated
from tokamac.engine.lab.passes import ModelPass
from tokamac.engine.metrics import Gaps, Metrics, Outlier, PromptBeside
from tokamac.engine.options import Sampling
from tokamac.engine.perf.diagnosis import Diagnosis, PartName, Remedy, RemedyName, Term, TimePart, Waits, diagnose
from tokamac.engine.speculation.drafters import Branches, Lookup
from tokamac.engine.speculation.ledger import TUNING

# Every figure of the side panel explains itself: formula, inputs, source, meaning; what is unknown says why.

METRICS = Metrics(
    prompt_tokens=150, cached_tokens=100, prefill_tokens=49, generated_tokens=21, ttft_s=2.5, prefill_s=2.0, total_s=3.5,
    prefill_tps=24.5, decode_tps=20.0, itl_ms=Gaps(50.0, 51.0, 52.0, 90.0), kv_bytes=20_000_000,
    weight_bytes_per_token=2_000_000_000, kv_bytes_per_step=20_000_000, achieved_gbs=40.4, ceiling_tps=40.0,
    expected_tps=25.0, peak_memory_bytes=3_000_000_000,
)  # fmt: skip
INFO = model_spec(
    "org/model",
    parameters=4_000_000_000,
    weight_bytes=2_000_000_000,
    bits_per_weight=4.5,
    context_length=160,
    capacity=160,
)
MEMORY = MemoryUse(2_100_000_000, None, 12_000_000_000)


def session(info: ModelSpec = INFO) -> Session:
    made = Session(Load("org/model"), Sampling(), "", Clock())
    made.start()
    made.on_event(Loaded(info, 40.0, 80.8, MEMORY))
    return made


def ended(info: ModelSpec = INFO, metrics: Metrics = METRICS, outliers: tuple[Outlier, ...] = ()) -> Session:
    made = session(info)
    made.submit("one")
    verdict = diagnose(metrics, WORK, CHIP, LATENCY, SITUATION)
    made.on_event(replace(MEMORY, predicted_peak_bytes=2_900_000_000))
    made.on_event(ReplyEvent(1, Finished("stop", "text", metrics, outliers=outliers, diagnosis=verdict)))
    return made


def value(figure: Figure, of: Session) -> str:
    return explain(figure, of).value


def inputs(figure: Figure, of: Session) -> dict[str, str]:
    return {each.name: each.value for each in explain(figure, of).inputs}


def whole(explained: Explained) -> str:
    return figure_text(explained, 76).plain


@pytest.mark.parametrize("figure", FIGURES)
def test_each_says_how_from_what_from_where_and_what_it_means(figure: Figure) -> None:
    for at in (session(), ended()):
        explained = explain(figure, at)
        assert all((explained.name, explained.value, explained.formula, explained.source, explained.meaning))
        assert explained.meaning.rstrip().endswith(".")
        assert all(each.value and each.source for each in explained.inputs)
        text = whole(explained)
        assert explained.formula.partition(" ")[0] in text
        assert max(len(line) for line in text.splitlines()) <= 76


@pytest.mark.parametrize("figure", FIGURES)
def test_what_is_unknown_says_why_and_is_never_nothing(figure: Figure) -> None:
    bare = Session(Load("org/model"), Sampling(), "", Clock())
    explained = explain(figure, bare)
    assert explained.value == units.UNKNOWN
    assert explained.why
    assert f"unknown: {explained.why}" in " ".join(whole(explained).split())


@pytest.mark.parametrize("figure", FIGURES)
def test_what_a_reply_told_is_known(figure: Figure) -> None:
    at = ended(outliers=(Outlier(7, 90.0, ("pool cleared",)),))
    explained = explain(figure, at)
    if figure == "now":
        assert (explained.value, explained.why) == (units.UNKNOWN, "no reply is running")
    else:
        assert units.UNKNOWN not in explained.value
        assert not explained.why


def test_the_numbers_are_those_of_the_reply_with_their_units() -> None:
    at = ended()
    assert (value("ttft", at), value("prefill", at), value("mean", at)) == ("2.5 s", "24.5 tok/s", "20.0 tok/s")
    assert inputs("ttft", at) == {"waiting": "0.5 s", "reading the prompt": "2.0 s"}
    assert inputs("mean", at) == {"generated tokens": "21", "last − first token": "1.0 s"}
    assert (value("ceiling", at), value("expected", at)) == ("50%", "80%")
    assert inputs("ceiling", at)["ceiling"] == "40.0 tok/s"
    assert inputs("gaps", at) == {
        "gaps": "20",
        "p50": "50.0 ms",
        "p95": "51.0 ms",
        "p99": "52.0 ms",
        "longest": "90.0 ms",
    }
    assert (value("peak", at), value("predicted", at), value("kv", at)) == ("3.00 GB", "2.90 GB", "20.0 MB")


def test_the_bandwidth_says_who_says_so() -> None:
    assert any(each.name == "bandwidth" and CHIP.name in each.source for each in explain("ceiling", ended()).inputs)
    assert inputs("ceiling", session())["bandwidth"] == "80.8 GB/s"


def test_a_gap_that_stands_out_is_told_with_its_cause() -> None:
    at = ended(outliers=(Outlier(7, 90.0, ("pool cleared",)), Outlier(9, 80.0, ())))
    found = explain("slowest", at)
    assert found.value == "90.0 ms"
    assert [(each.name, each.source) for each in found.inputs] == [
        ("token 7", "pool cleared"),
        ("token 9", "cause unknown"),
    ]
    assert explain("slowest", ended()).why == "there are no outliers"


def test_an_unknown_latency_is_no_expectation() -> None:
    at = ended(metrics=replace(METRICS, expected_tps=None))
    assert value("expected", at) == units.UNKNOWN
    assert "is not measured yet" in explain("expected", at).why


def test_the_context_is_what_was_cached_computed_and_written() -> None:
    context = figures.context_of(ended(replace(INFO, capacity=1000)))
    assert context == figures.Context(cached=100, computed=50, written=21, free=829, out_of_sight=0)
    assert context.held == 171


def test_what_rolls_out_is_the_oldest_and_no_token_is_counted_twice() -> None:
    context = figures.context_of(ended(replace(INFO, rolls=True)))
    assert context == figures.Context(cached=89, computed=50, written=21, free=0, out_of_sight=11)
    short = figures.context_of(ended(replace(INFO, capacity=40, rolls=True)))
    assert short == figures.Context(cached=0, computed=19, written=21, free=0, out_of_sight=131)


def test_what_was_left_out_of_the_prompt_is_out_of_sight_too() -> None:
    at = session()
    at.submit("one")
    at.on_event(ReplyEvent(1, Truncated(1, 30)))
    at.on_event(ReplyEvent(1, PrefillProgress(60, 90, 20)))
    assert figures.context_of(at) == figures.Context(20, 40, 0, 100, 30)
    assert inputs("out of sight", at) == {"left out": "30", "dropped": "0"}


def test_while_a_reply_is_written_the_figures_are_of_now() -> None:
    at = session()
    at.submit("one")
    at.on_event(ReplyEvent(1, PrefillProgress(150, 150, 100)))
    at.on_event(ReplyEvent(1, TextChunk("a")))
    at.on_event(ReplyEvent(1, Live(METRICS, 171, (50.0, 40.0, 35.0), 2_020_000_000, 48.5, now_tps=24.0)))
    assert value("now", at) == "24.0 tok/s"
    assert value("achieved", at) == "48.5 GB/s"
    assert inputs("achieved", at)["bytes a step"] == "2.02 GB"
    assert explain("diagnosis", at).why == "a reply is running"


FEW, EVERY = Layout(33), Layout(33, every=True)


@pytest.mark.parametrize("layout", [FEW, EVERY, Layout(0), Layout(99, every=True)])
def test_while_a_reply_is_made_there_are_as_many_rows_and_none_is_ever_too_wide(layout: Layout) -> None:
    wide = replace(METRICS, itl_ms=Gaps(10_000.0, 12_000.0, 13_000.0, 13_000.0), prompt_tokens=1_000_000)
    bare = Session(Load("a/very-long-name-of-a-model-that-goes-on"), Sampling(), "", Clock())
    reading, writing = session(), session()
    for at in (reading, writing):
        at.submit("one")
    writing.on_event(ReplyEvent(1, PrefillProgress(150, 150, 100)))
    writing.on_event(ReplyEvent(1, TextChunk("a")))
    writing.on_event(ReplyEvent(1, Live(METRICS, 171, (50.0, 40.0, 35.0), 2_020_000_000, 48.5)))
    assert len(rows(reading, layout)) == len(rows(writing, layout))
    slow = ended(outliers=(Outlier(7, 90.0, ("kv growth", "pool cleared")),))
    for at in (bare, session(), ended(), ended(metrics=wide), slow, reading, writing):
        assert max(row.content.cell_length for row in rows(at, layout)) <= WIDTH


def test_the_verdict_takes_as_many_rows_as_before_while_the_next_reply_is_made() -> None:
    at = ended()
    before = len(rows(at, FEW))
    told = sum(row.figure == "diagnosis" for row in rows(at, FEW)) - 1
    at.submit("two")
    assert len(rows(at, replace(FEW, verdict=told))) == before


def test_the_panel_leads_with_the_verdict_and_three_figures_and_says_how_to_see_more() -> None:
    shown = [row.content.plain for row in rows(ended(), FEW)]
    named = [row.figure for row in rows(ended(), FEW) if row.figure is not None]
    assert list(dict.fromkeys(named)) == ["model", "diagnosis", "mean", "ttft", "context"]
    assert [line.split("  ")[0] for line in shown if line.startswith(("speed", "first token", "context"))] == [
        "speed",
        "first token",
        "context",
    ]
    assert shown[-2:] == ["Tab or click · Enter explains", "F5 all figures"]
    assert len(shown) <= 33  # what a window of 36 rows leaves
    assert shown.index("LAST REPLY") < shown.index("Faster than most people read.")


def test_every_figure_has_a_row_and_the_rows_are_in_its_order() -> None:
    for at in (session(), ended()):
        shown = [row.figure for row in rows(at, EVERY) if row.figure is not None]
        assert list(dict.fromkeys(shown)) == list(FIGURES)


@given(st.lists(st.sampled_from([*get_args(Waits)]), min_size=1, max_size=1), st.floats(0.0005, 2), st.floats(0.001, 1))
def test_no_sentence_of_the_verdict_is_cut(bounds: list[Waits], of_expected: float, of_ceiling: float) -> None:
    diagnosis = found("decode", 3.0, PACKED, bound=bounds[0], of_expected=of_expected, of_ceiling=of_ceiling)
    at = ended()
    at.conversation.progress.diagnosis = replace(diagnosis, throttles=("thermal", "low power"))
    text = " ".join(row.content.plain for row in rows(at, FEW) if row.figure == "diagnosis").partition("LAST REPLY ")[2]
    said = figures.verdict(at)
    assert text in [" ".join(said[:many]) for many in range(1, len(said) + 1)]
    assert sum(row.figure == "diagnosis" for row in rows(at, FEW)) <= VERDICT_ROWS + 1


def test_before_a_reply_the_rows_say_that_there_is_none_and_no_zero() -> None:
    at = session()
    at.on_event(LOADED)
    text = {row.figure: row.content.plain for row in reversed(rows(at, EVERY)) if row.figure is not None}
    assert text["ttft"].endswith(NONE_YET)
    assert text["kv"].endswith(NONE_YET)
    assert not any(word.startswith("0") for word in " ".join(text.values()).split())


def test_a_models_name_is_foreign_text() -> None:
    at = session(replace(INFO, name="a\x1b[2Jb"))
    assert "\x1b" not in "".join(row.content.plain for row in rows(at, FEW))
    assert all("\x1b" not in each.value for each in explain("model", at).inputs)


COUNTS = st.one_of(st.integers(0, 2000), st.integers(0, 2_000_000))


@given(COUNTS, COUNTS, COUNTS, st.one_of(st.none(), st.integers(100, 2_000_000)))  # into which the prompt fits
def test_the_legend_shows_every_count_with_its_unit(
    cached: int, computed: int, written: int, capacity: int | None
) -> None:
    counted = replace(
        METRICS,
        prompt_tokens=cached + computed,
        cached_tokens=cached,
        generated_tokens=max(written, 1),
        prefill_tokens=computed,
    )
    at = ended(replace(INFO, capacity=capacity, rolls=True), counted)
    context = figures.context_of(at)
    legend = " ".join(row.content.plain for row in rows(at, EVERY) if row.figure == "context")
    assert max(row.content.cell_length for row in rows(at, EVERY)) <= WIDTH
    assert f"written {units.short(context.written)}" in legend
    if (
        context.out_of_sight
    ):  # which part of the prompt they were of is not told: no "cached 0" below "cached tokens 192"
        assert f"prompt {units.short(context.cached + context.computed)}" in legend
        assert "cached" not in legend
    else:
        assert f"cached {units.short(context.cached)} " in legend
        assert f"read {units.short(context.computed)} " in f"{legend} "


def test_the_guide_is_not_judged_like_a_model() -> None:
    at = ended(replace(INFO, name="guide"))
    at.engine.load = Load("guide")
    assert figures.verdict(at) == (
        "Faster than most people read.",
        "The built-in guide is tiny. Ctrl+O gets a model for real chats.",
    )


def test_while_a_reply_is_made_the_verdict_says_what_is_being_done() -> None:
    at = session()
    assert figures.verdict(at) == ("Nothing measured yet.",)
    at.submit("one")
    assert (at.which, figures.verdict(at)) == ("this reply", ("Reading the prompt …",))
    at.on_event(ReplyEvent(1, TextChunk("a")))
    assert figures.verdict(at) == ("Writing …",)


# Replies of earlier days: the panel shows what was stored with them, beside the ceiling that is believed now.


def saved(*replies: Reply) -> Tree:
    """A conversation as it is read from the store."""
    tree = Tree()
    for reply in replies:
        prompt = tree.ask("why?", tree.head)
        tree.end(tree.answer(prompt.key).key, reply)
    return tree


OLD = Reply(
    "old",
    model="org/model",
    metrics=METRICS,
    outliers=(Outlier(7, 90.0),),
    diagnosis=diagnose(METRICS, WORK, CHIP, LATENCY, SITUATION),
)


def test_a_chat_that_is_opened_shows_what_was_stored_with_its_last_reply() -> None:
    at = session()
    at.open(saved(OLD))
    assert (at.progress.metrics, at.progress.outliers, at.which) == (METRICS, OLD.outliers, "last reply")
    assert value("mean", at) == "20.0 tok/s"
    assert explain("diagnosis", at).value.startswith("Took 3.5 s")
    assert NONE_YET not in " ".join(row.content.plain for row in rows(at, FEW))
    at.submit("and now?")
    assert (at.progress.metrics, at.which) == (None, "this reply")
    at.new_chat()
    assert (at.progress.metrics, at.which) == (None, "speed")


def test_the_reply_of_another_model_is_said_to_be_one() -> None:
    at = session()
    at.open(saved(replace(OLD, model="other/model")))
    assert at.which == "last reply, other model"


def test_the_path_that_is_shown_is_the_one_whose_figures_are() -> None:
    at = session()
    slow = replace(METRICS, decode_tps=5.0)
    tree = saved(OLD)
    first = tree.head
    assert first is not None
    prompt = tree.nodes[first].parent
    assert prompt is not None
    tree.end(tree.answer(prompt).key, replace(OLD, metrics=slow))
    at.open(tree)
    assert value("mean", at) == "5.00 tok/s"
    at.show_path(first)
    assert value("mean", at) == "20.0 tok/s"


def test_a_message_that_is_selected_has_its_reply_shown_with_a_mark() -> None:
    at = session()
    slow = replace(METRICS, decode_tps=5.0, total_s=4.5)
    at.open(saved(replace(OLD, metrics=slow, diagnosis=None), OLD))
    first, second = at.turns
    for key in (first.key, first.reply_key):
        earlier = figures.pointed_at(at, key)
        assert earlier.which == "earlier reply · 1 of 2"
        assert explain("mean", earlier).value == "5.00 tok/s"
        assert "EARLIER REPLY · 1 OF 2" in [row.content.plain for row in rows(earlier, FEW)]
        for figure in FIGURES:
            assert explain(figure, earlier).value
    assert figures.pointed_at(at, second.reply_key) is at
    assert figures.pointed_at(at, None) is at


def test_while_a_reply_is_written_an_earlier_one_can_be_looked_at() -> None:
    at = session()
    at.open(saved(OLD))
    key = at.turns[0].reply_key
    at.submit("and now?")
    earlier = figures.pointed_at(at, key)
    assert (earlier.which, earlier.replying) == ("earlier reply · 1 of 2", False)
    assert explain("mean", earlier).value == "20.0 tok/s"
    assert figures.pointed_at(at, at.turns[-1].key) is at


def test_all_views_have_one_ceiling() -> None:
    at = session()
    at.open(saved(OLD, OLD))
    better = replace(METRICS, ceiling_tps=60.0)
    at.submit("and now?")
    at.on_event(
        ReplyEvent(1, Finished("stop", "text", better, diagnosis=diagnose(better, WORK, CHIP, LATENCY, SITUATION)))
    )
    assert at.engine.bandwidth_gbs == pytest.approx(121.2)
    for turn in at.turns:
        shown = figures.pointed_at(at, turn.reply_key)
        assert turn.reply is not None
        told = at.engine.with_ceiling(turn.reply)  # what F2 shows
        terms = {term.key: term.value for term in told.diagnosis.terms}
        assert shown.progress.metrics.ceiling_tps == told.metrics.ceiling_tps == terms["ceiling"] == pytest.approx(60.0)
        assert told.diagnosis.part("decode").of_ceiling == pytest.approx(20 / 60)
        assert inputs("ceiling", at)["ceiling"] == "60.0 tok/s"


def test_a_bandwidth_that_was_disproved_leaves_no_old_ceiling() -> None:
    at = session()
    at.open(saved(OLD))
    at.submit("and now?")
    at.on_event(ReplyEvent(1, Finished("stop", "text", replace(METRICS, ceiling_tps=None, achieved_gbs=99.0))))
    earlier = figures.pointed_at(at, at.turns[0].reply_key)
    assert (earlier.progress.metrics.ceiling_tps, at.engine.ceiling_tps, at.engine.bandwidth_gbs) == (None, None, None)


def test_the_ceiling_of_another_model_stays_as_it_was_measured() -> None:
    at = session()
    other = replace(OLD, model="other/model", metrics=replace(METRICS, ceiling_tps=7.0))
    assert at.engine.with_ceiling(other) is other


def test_what_loading_took_is_explained() -> None:
    at = session()
    at.on_event(MemoryUse(310_000_000, 1_240_000_000, 12_000_000_000))
    assert "took 1.24 GB for a moment" in explain("peak", at).meaning
    assert "for a moment" not in explain("peak", ended()).meaning


# The sentence under a reply, the figures of the panel, and how numbers are written.

VERDICT_METRICS = Metrics(
    prompt_tokens=1500, cached_tokens=300, prefill_tokens=1200, generated_tokens=79, ttft_s=2.45, prefill_s=2.4,
    total_s=3.504, prefill_tps=500.0, decode_tps=74.0, itl_ms=Gaps(13.0, 15.0, 16.0, 20.0), kv_bytes=1,
    weight_bytes_per_token=1, kv_bytes_per_step=1, achieved_gbs=1.0, ceiling_tps=100.0, expected_tps=None,
    peak_memory_bytes=None,
)  # fmt: skip


def found(name: PartName, seconds: float, *remedies: Remedy, **more: Any) -> Diagnosis:
    """A diagnosis in which one part took so long, and the others next to nothing."""
    names: tuple[PartName, ...] = ("wait", "prefill", "decode")
    parts = (TimePart(name, seconds, **more) if each == name else TimePart(each, 0.01) for each in names)
    return Diagnosis(tuple(parts), remedies, ())


PACKED = Remedy("packed keys and values", 2.1, 8, 31.0, 38.0)


TOOK = "Took 2.4 s: 2.4 s reading 1,200 prompt tokens (prefill"
WROTE = "Took 3.0 s: 3.0 s writing 79 tokens (decode"


@pytest.mark.parametrize(
    ("diagnosis", "said"),
    [
        (
            found("prefill", 2.4, bound="compute", of_ceiling=0.61, of_expected=0.92),
            f"{TOOK}, limited by arithmetic; 61% of what this processor can do and 92% of the expected speed).",
        ),
        (found("prefill", 2.4, bound="not memory"), f"{TOOK}, not limited by memory)."),
        (found("prefill", 2.4), f"{TOOK})."),
        (
            found("decode", 3.0, PACKED, bound="memory", of_ceiling=0.74),
            f"{WROTE}, limited by memory bandwidth; 74% of the hardware limit). What would help: "
            "8-bit keys and values: decode from 31.0 to 38.0 tok/s at this context, saves 2.1 s.",
        ),
        (
            found("decode", 3.0, Remedy("quiet machine", 1.2, None, 20.0, 31.0), bound="overhead", of_expected=0.6),
            f"{WROTE}, limited by the overhead of each step, not by memory or arithmetic; only 60% of the expected speed). "
            "Something else was using the machine; alone it would have taken 1.8 s.",
        ),
        (found("decode", 3.0), f"{WROTE}). 300 of 1,500 prompt tokens came from the prompt cache."),
        (found("wait", 2.5), "Took 2.5 s: 2.5 s went by before the prompt was read."),
        (None, "Took 3.5 s, 2.5 s of it before the first token."),
    ],
)
def test_the_sentence_names_the_part_the_reason_and_what_would_help(diagnosis: Diagnosis | None, said: str) -> None:
    assert sentence(VERDICT_METRICS, diagnosis) == said


def test_a_reply_beside_others_says_how_many_and_what_it_would_do_alone() -> None:
    beside = replace(VERDICT_METRICS, batch_width=3.8)
    alone = Term("alone", "decode", "expected alone", "as below, for one reply", 31.0, "tok/s")
    told = replace(found("decode", 3.0, PACKED), terms=(alone,))
    assert "4 replies were written at once; alone, about 31.0 tok/s would be expected." in sentence(beside, told)
    assert "4 replies were written at once; alone, about 31.0 tok/s would be expected." in headline(beside, told)
    assert "4 replies were written at once." in sentence(beside, found("decode", 3.0))
    assert "at once" not in sentence(replace(beside, batch_width=1.2), told)


@pytest.mark.parametrize(
    ("saved_s", "said"),
    [
        (0.5, "8 of 10 guessed tokens came true, which saved 0.5 s."),
        (-0.1, "came true, which took 0.1 s longer."),
        (None, "came true."),
    ],
)
def test_guesses_that_came_true_are_in_the_verdict_with_what_they_saved(saved_s: float | None, said: str) -> None:
    guessed = replace(VERDICT_METRICS, drafted_tokens=10, accepted_tokens=8, saved_s=saved_s)
    assert said in sentence(guessed, found("decode", 3.0))
    assert "guessed" not in sentence(VERDICT_METRICS, found("decode", 3.0))


def test_whoever_guesses_has_a_name_that_people_read() -> None:
    assert {Lookup.source, Branches.source, *TUNING.computed} <= set(DRAFTERS)


def test_without_a_token_every_form_says_so() -> None:
    nothing = replace(VERDICT_METRICS, ttft_s=None, total_s=None, decode_tps=None, generated_tokens=0)
    assert sentence(nothing, None) == "No token was made."
    assert headline(nothing, None) == ("No token was made.",)
    assert (figures_text(nothing), remark(nothing, None)) == ("no token was made", "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "74.0 tok/s · 79 tokens · first token 2.5 s"),
        ({"ttft_s": 0.06}, "74.0 tok/s · 79 tokens · first token 0.06 s"),
        ({"ttft_s": 0.0004}, "74.0 tok/s · 79 tokens · first token under 0.01 s"),
        ({"ttft_s": 0.998, "decode_tps": 1234.0}, "1,234 tok/s · 79 tokens · first token 1.0 s"),
        ({"decode_tps": None, "generated_tokens": 1}, "1 token · first token 2.5 s"),
    ],
)
def test_the_line_below_a_reply_has_its_speed_its_tokens_and_the_wait(change: dict[str, Any], said: str) -> None:
    assert figures_text(replace(VERDICT_METRICS, **change)) == said


@pytest.mark.parametrize(
    ("diagnosis", "said"),
    [
        (found("prefill", 2.4, bound="compute", of_expected=0.92), "reading the prompt took 2.4 of 2.4 s"),
        (found("decode", 3.0, PACKED, bound="overhead", of_expected=0.6), "60% of the expected speed"),
        (found("decode", 3.0, bound="memory", of_expected=0.95), ""),
        (found("decode", 0.05, bound="overhead", of_expected=0.5), ""),
        (found("prefill", 0.9), ""),
        (found("wait", 2.5), "waited 2.5 s before the prompt was read"),
        (None, ""),
    ],
)
def test_a_remark_is_made_only_where_it_says_something(diagnosis: Diagnosis | None, said: str) -> None:
    assert remark(VERDICT_METRICS, diagnosis) == said


@pytest.mark.parametrize("bound", get_args(Waits))
@pytest.mark.parametrize("total_s", [0.0004, 4.1, 125.0, 7000.0])
def test_the_line_below_a_reply_is_short_whatever_it_says(total_s: float, bound: Waits) -> None:
    metrics = replace(VERDICT_METRICS, total_s=total_s, ttft_s=total_s, generated_tokens=10_000)
    for name in get_args(PartName):
        line = (
            f"{figures_text(metrics)} · {remark(metrics, found(name, total_s, PACKED, bound=bound, of_expected=0.002))}"
        )
        assert len(line) <= 110, line


@pytest.mark.parametrize(
    ("diagnosis", "said"),
    [
        (
            found("decode", 3.0, PACKED, bound="memory", of_ceiling=0.74),
            "Limited by memory speed: 74% of the hardware limit.",
        ),
        (
            found("decode", 3.0, bound="overhead", of_ceiling=0.04),
            "Limited by the overhead of each step: 4% of the hardware limit.",
        ),
        (found("decode", 3.0, bound="memory", of_expected=0.92), "92% of the speed expected here."),
        (found("decode", 3.0, bound="memory", of_expected=1.4), "Faster than expected here."),
        (
            found("decode", 3.0, bound="overhead", of_expected=0.6),
            "60% of the expected speed: something else was using the machine.",
        ),
        (found("decode", 3.0, bound="host", of_expected=0.05), "Limited by the processor that prepares each step."),
        (found("prefill", 2.4), "Reading the prompt took most of the time: 2.4 of 2.4 s."),
        (found("wait", 2.5), "It waited 2.5 s before it read the prompt."),
    ],
)
def test_the_verdict_says_how_fast_that_feels_what_set_it_and_what_helps(diagnosis: Diagnosis, said: str) -> None:
    told = headline(VERDICT_METRICS, diagnosis)
    assert told[:2] == ("Faster than most people read.", said)
    assert told[2:] == (("8-bit keys and values would save 2.1 s.",) if diagnosis.remedies else ())


def test_the_pace_is_that_of_a_reader() -> None:
    paces = [headline(replace(VERDICT_METRICS, decode_tps=tps), None)[0] for tps in (0.9, 5.0, 8.0)]
    assert paces == ["Slower than most people read.", "About as fast as people read.", "Faster than most people read."]
    assert headline(replace(VERDICT_METRICS, decode_tps=None), None) == ("Took 3.5 s.",)


def test_what_costs_milliseconds_is_no_warning() -> None:
    part = TimePart("prefill", 0.046, "overhead", 0.01, 0.2)
    assert part.behind
    assert not is_held_up(part, 3.0)
    assert is_held_up(replace(part, seconds=2.0), 3.0)


def test_a_share_that_is_not_nothing_is_not_written_as_nothing() -> None:
    assert [units.percent(share) for share in (0.0, 0.0004, 0.0099, 0.01, 0.126, 1.0)] == [
        "0%", "under 1%", "under 1%", "1%", "13%", "100%",
    ]  # fmt: skip
    assert units.percent(None) == "unknown"
    slow = found("prefill", 2.4, bound="overhead", of_ceiling=0.003, of_expected=0.004)
    assert "under 1% of the hardware limit and under 1% of the expected speed" in sentence(VERDICT_METRICS, slow)


@pytest.mark.parametrize(
    ("remedy", "said"),
    [
        (Remedy("packed weights", 8.1, 4, 12.0, 31.0), "4-bit weights: decode from 12.0 to 31.0 tok/s, saves 8.1 s"),
        (
            Remedy("prompt cache", 1.9),
            "the prompt cache, once it has read this prompt: saves 1.9 s before the first token",
        ),
        (
            Remedy("shorter context", 2.0, 2048, 30.0, 33.0, 3.6, 1.8),
            "half the prompt (2,048 tokens): prefill from 3.6 s to 1.8 s, decode from 30.0 to 33.0 tok/s, saves 2.0 s",
        ),
        (
            Remedy("quiet machine", 3.7, None, 172.0, 264.0, 3.6, 0.007),
            "nothing else running: prefill from 3.6 s to 7 ms, decode from 172 to 264 tok/s, saves 3.7 s",
        ),
        (
            Remedy("prompt cache", 1.9, before_s=2.0, after_s=0.05),
            "the prompt cache, once it has read this prompt: prefill from 2.0 s to 50 ms, saves 1.9 s before the first token",
        ),
        (Remedy("packed keys and values", 0.4, 8), "8-bit keys and values: saves 0.4 s"),
    ],
)
def test_a_remedy_says_what_it_brings(remedy: Remedy, said: str) -> None:
    assert remedy_text(remedy) == said


SLOWED = replace(
    found("decode", 3.0, Remedy("full power", 1.2, None, 20.0, 31.0), bound="overhead", of_expected=0.6),
    throttles=("thermal", "low power"),
)


def test_what_slowed_the_machine_down_is_in_the_verdict_in_the_line_and_in_the_whole() -> None:
    assert sentence(VERDICT_METRICS, SLOWED) == (
        f"{WROTE}, limited by the overhead of each step, not by memory or arithmetic; only 60% of the expected speed). "
        "macOS slowed the chip down because it was hot. Low Power Mode was on, which slows the chip down. "
        "At full speed it would have taken 1.8 s."
    )
    assert remark(VERDICT_METRICS, SLOWED) == "slowed down: hot chip, Low Power Mode"
    assert headline(VERDICT_METRICS, SLOWED)[1].startswith("macOS slowed the chip down because it was hot.")
    whole = list(verdict.lines(SLOWED))
    assert (
        "machine   macOS slowed the chip down because it was hot (let the machine cool down, and close other busy programs)"
        in whole
    )
    assert whole[-2].endswith("(System Settings > Battery (Energy on a desktop Mac))")


def test_every_remedy_has_words_and_a_way() -> None:
    for name in get_args(RemedyName):
        assert "saves 1.0 s" in remedy_text(Remedy(name, 1.0, 4))
        assert REMEDIES[name].how


def test_the_whole_puts_the_numbers_in() -> None:
    terms = (
        Term("bandwidth", "machine", "bandwidth", "Test \x1b[2J, its maker's figure", 400.0, "GB/s"),
        Term("step", "decode", "bytes a step", "all", 4e9, "bytes"),
        Term("ceiling", "decode", "ceiling", "{bandwidth} ÷ {step}", 100.0, "tok/s"),
        Term("peak", "machine", "peak", "its maker's", None, "TFLOP/s"),
        Term("ridge", "machine", "ridge", "{peak} ÷ {bandwidth}", None, "FLOP/byte"),
        Term("operations", "prefill", "operations", "2 × 3", 3.2e12, "FLOP"),
    )
    lines = list(verdict.lines(Diagnosis((TimePart("decode", 3.0, "memory", 0.74),), (PACKED,), terms)))
    assert lines[0] == "decode    3.0 s: writing the reply; limited by memory bandwidth; 74% of the hardware limit"
    assert "decode    bytes a step = 4.00 GB (all)" in lines
    assert "decode    ceiling = bandwidth ÷ bytes a step = 400 GB/s ÷ 4.00 GB = 100 tok/s" in lines
    assert "unknown" not in "".join(lines), "what is unknown is left out"
    assert "prefill   operations = 3.2 TFLOP (2 × 3)" in lines
    assert lines[-1].startswith("remedy    8-bit keys and values:")


def test_the_share_is_unknown_where_a_part_is() -> None:
    assert VERDICT_METRICS.share_of_ceiling == pytest.approx(0.74)
    assert replace(VERDICT_METRICS, decode_tps=None).share_of_ceiling is None
    assert VERDICT_METRICS.share_of_expected is None
    assert replace(VERDICT_METRICS, expected_tps=80.0).share_of_expected == pytest.approx(0.925)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (units.count(None), "unknown"), (units.short(32768), "32.8k"), (units.short(4_022_468_096), "4.02B"),
        (units.size(2_263_000_000), "2.26 GB"), (units.rate(1234.5), "1,234 tok/s"), (units.rate(9.996), "10.0 tok/s"),
        (units.rate(None), "unknown"), (units.bandwidth(4.986), "4.99 GB/s"), (units.bandwidth(None), "unknown"),
        (units.milliseconds(16.26), "16.3 ms"), (units.seconds(0.0994), "99 ms"), (units.seconds(125), "2 min 05 s"),
        (units.seconds(3599.6), "1 h 00 min"), (units.seconds(107_667), "29 h 54 min"),
        (units.minutes(20), "under a minute"), (units.minutes(59.6 * 60), "1 h 00 min"), (units.minutes(None), "unknown"),
    ],
)  # fmt: skip
def test_numbers_as_written(written: str, expected: str) -> None:
    assert written == expected


def replying() -> Session:
    session = loaded_session(lambda: 10.0)
    session.submit("hi")
    return session


def test_the_rate_now_is_told_once_the_prompt_is_read() -> None:
    session = replying()
    assert figures.decode_now(session) is None
    session.on_event(ReplyEvent(1, Live(VERDICT_METRICS, 77, (50.0,) * 16, now_tps=20.0)))
    assert figures.decode_now(session) is None  # still reading the prompt
    session.engine.phase = session.engine.phase.DECODING
    assert figures.decode_now(session) == pytest.approx(20.0)
    assert figures.context_used(session) == 77


def test_the_time_left_follows_the_rate_so_far() -> None:
    session = replying()
    session.on_event(ReplyEvent(1, PrefillProgress(100, 1100, 100)))
    assert figures.prefill_eta_s(session, 12.0) is None
    session.on_event(ReplyEvent(1, PrefillProgress(350, 1100, 100)))
    assert figures.prefill_eta_s(session, 12.0) == pytest.approx(6.0)


def test_charts() -> None:
    assert bar(None, 10).plain == "─" * 10
    assert bar(0.5, 4).plain == "━━──"
    assert bar(1.5, 4).plain == "━━━━"
    assert sparkline([1, 2, 4, 8], 3) == "▃▅█"
    assert sparkline([], 5) == ""


def test_a_blank_system_prompt_is_none() -> None:
    assert messages("  ", [Turn("hi")]) == (Message("user", "hi"),)


def test_a_gap_that_stands_out_is_told_with_its_cause_below_the_reply() -> None:
    assert figures.gap_and_cause(Outlier(257, 41.2, ("pool cleared",))) == "41.2 ms at token 257: pool cleared"
    assert figures.gap_and_cause(Outlier(1300, 2.5)) == "2.50 ms at token 1,300: cause unknown"
    beside = Outlier(9, 50.0, ("another prompt", "swap"), PromptBeside(2013))
    assert figures.gap_and_cause(beside) == "50.0 ms at token 9: another prompt of 2,013 tokens, swap"
    behind = Outlier(9, 50.0, ("another prompt",), PromptBeside(80, background=True))
    assert figures.causes(behind) == "another prompt of 80 tokens in the background"
    at = ModelPass(12, "step", 40, 1, 8, 50.0, None, held_up=True, causes=beside.causes, prompt=beside.prompt)
    read = "the engine read a part of another reply's prompt, of 2,013 tokens"
    assert held_up_by(at) == f"memory had to be read back from the disk; {read}"
    assert held_up_by(replace(at, causes=("another prompt",), prompt=None)) == CAUSE_WORDS["another prompt"]
    assert held_up_by(replace(at, causes=())) == "cause unknown"
    both = Outlier(2, 1234.0, ("kv growth", "swap"))
    assert figures.gap_and_cause(both) == "1,234 ms at token 2: kv growth, swap"


def test_the_bandwidth_is_that_of_now_while_a_reply_is_written_and_then_its_mean() -> None:
    session = replying()
    assert figures.achieved_gbs(session) is None
    session.on_event(ReplyEvent(1, Live(VERDICT_METRICS, 77, (50.0,), 5, 9.0)))
    assert figures.achieved_gbs(session) == VERDICT_METRICS.achieved_gbs  # still reading the prompt
    session.on_event(ReplyEvent(1, TextChunk("a")))
    assert figures.achieved_gbs(session) == 9.0
    session.on_event(ReplyEvent(1, Finished("stop", "a", VERDICT_METRICS)))
    assert figures.achieved_gbs(session) == VERDICT_METRICS.achieved_gbs


def test_outliers_are_those_of_the_running_reply_and_at_last_the_ends() -> None:
    session = replying()
    session.on_event(ReplyEvent(1, Live(VERDICT_METRICS, 77, (50.0,), outliers=(Outlier(3, 9.0),))))
    assert session.progress.outliers == (Outlier(3, 9.0),)
    session.on_event(ReplyEvent(1, Finished("stop", "a", VERDICT_METRICS, outliers=(Outlier(5, 11.0, ("swap",)),))))
    assert session.progress.outliers == (Outlier(5, 11.0, ("swap",)),)
    session.submit("again")
    assert session.progress.outliers == ()


# What stands below a reply in the transcript: a row, two where the window is narrow, and not the paragraph that
# explains it.

SLOW = found("prefill", 2.4, PACKED, bound="overhead", of_ceiling=0.003, of_expected=0.004)
REPLY = Reply("Yes.", metrics=VERDICT_METRICS, diagnosis=SLOW)


def below(reply: Reply, cells: int = 100) -> list[str]:
    message = ReplyMessage("guide")
    message.end(reply)
    return [row.row.content.plain.strip() for row in message.rows(cells) if row.frame is FIGURES_FRAME]


@pytest.mark.parametrize(("cells", "rows"), [(100, 1), (88, 1), (39, 3)])
def test_the_answer_is_not_outweighed_by_what_it_cost(cells: int, rows: int) -> None:
    shown = below(REPLY, cells)
    assert len(shown) == rows
    assert " ".join(shown) == "74.0 tok/s · 79 tokens · first token 2.5 s · under 1% of the expected speed"


def test_a_reply_that_did_not_end_by_itself_says_why_and_what_continues_it() -> None:
    told = "74.0 tok/s · 79 tokens · first token 2.5 s"
    plain = Reply("Yes", metrics=VERDICT_METRICS)
    assert below(plain) == [told]
    assert below(replace(plain, ending="length")) == [f"stopped: the token limit · /continue · {told}"]
    helps = "/undo drops it · /shorter rewrites it · /compact · /set on_full roll"
    assert " ".join(below(replace(plain, ending="full"))) == f"stopped: the context is full · {helps} · {told}"
    assert below(replace(plain, ending="loop")) == [f"stopped: it repeats itself · /continue · {told}"]
    assert below(replace(plain, ending="cancelled")) == [f"stopped · {told}"]
    assert below(Reply("Ye", ending="lost")) == ["engine crashed here · /continue"]
    assert below(Reply("", ending="lost")) == ["engine crashed here"]
    assert below(Reply("", ending="failed", reason="Out of memory.")) == ["failed · Out of memory."]
    assert below(Reply("Yes")) == []


def test_the_whole_is_in_the_explanation() -> None:
    said = " ".join(explanation(REPLY, 60).plain.split())
    assert said.startswith(sentence(VERDICT_METRICS, SLOW))
    assert "prefill 2.4 s (99%)" in said
    assert "0%" not in said
    assert "wait 10 ms (under 1%)" in said
