"""Every figure of the side panel explains itself: formula, inputs, source, meaning; what is unknown says why."""

from dataclasses import replace

import pytest

from tests.app.test_session import LOADED, Clock
from tests.scripted_engine import CHIP, PACE, SITUATION, WORK
from tokamac.app import units
from tokamac.app.backend.protocol import Load, Loaded, MemoryUse, ModelInfo, ReplyEvent
from tokamac.app.chat import figures
from tokamac.app.chat.figures import FIGURES, Explained, Figure, explain
from tokamac.app.chat.session import Session
from tokamac.app.tui.screens.figure import figure_text
from tokamac.app.tui.widgets.gauges import NONE_YET, WIDTH, rows
from tokamac.engine.events import Finished, Live, PrefillProgress, TextChunk, Truncated
from tokamac.engine.metrics import Gaps, Metrics, Outlier
from tokamac.engine.options import Sampling
from tokamac.engine.perf.diagnosis import diagnose

METRICS = Metrics(
    prompt_tokens=150,
    cached_tokens=100,
    prefill_tokens=49,
    generated_tokens=21,
    ttft_s=0.5,
    prefill_s=0.4,
    total_s=1.5,
    prefill_tps=122.5,
    decode_tps=20.0,
    itl_ms=Gaps(50.0, 51.0, 52.0, 90.0),
    kv_bytes=20_000_000,
    weight_bytes_per_token=2_000_000_000,
    kv_bytes_per_step=20_000_000,
    achieved_gbs=40.4,
    ceiling_tps=40.0,
    expected_tps=25.0,
    peak_memory_bytes=3_000_000_000,
)
INFO = ModelInfo(
    "org/model",
    parameters=4_000_000_000,
    weight_bytes=2_000_000_000,
    bits_per_weight=4.5,
    context_length=160,
    capacity=160,
)
MEMORY = MemoryUse(2_100_000_000, None, 12_000_000_000)


def session(info: ModelInfo = INFO) -> Session:
    made = Session(Load("org/model"), Sampling(), "", Clock())
    made.start()
    made.on_event(Loaded(info, 40.0, 80.8, MEMORY))
    return made


def ended(info: ModelInfo = INFO, metrics: Metrics = METRICS, outliers: tuple[Outlier, ...] = ()) -> Session:
    made = session(info)
    made.submit("one")
    verdict = diagnose(metrics, WORK, CHIP, PACE, SITUATION)
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
    assert (value("ttft", at), value("prefill", at), value("mean", at)) == ("0.5 s", "122 tok/s", "20.0 tok/s")
    assert inputs("ttft", at) == {"waiting": "0.1 s", "reading the prompt": "0.4 s"}
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


def test_an_unknown_pace_is_no_expectation() -> None:
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
    assert inputs("out of sight", at) == {"left out": "30", "rolled out": "0"}


def test_while_a_reply_is_written_the_figures_are_of_now() -> None:
    at = session()
    at.submit("one")
    at.on_event(ReplyEvent(1, PrefillProgress(150, 150, 100)))
    at.on_event(ReplyEvent(1, TextChunk("a")))
    at.on_event(ReplyEvent(1, Live(METRICS, 171, (50.0, 40.0, 35.0), 2_020_000_000, 48.5)))
    assert value("now", at) == "24.0 tok/s"
    assert inputs("now", at) == {"gaps": "3", "their time": "125 ms"}
    assert value("achieved", at) == "48.5 GB/s"
    assert inputs("achieved", at)["bytes a step"] == "2.02 GB"
    assert explain("diagnosis", at).why == "a reply is running"


def test_there_are_as_many_rows_whatever_is_known_and_none_is_too_wide() -> None:
    wide = replace(METRICS, itl_ms=Gaps(10_000.0, 12_000.0, 13_000.0, 13_000.0), prompt_tokens=1_000_000)
    bare = Session(Load("a/very-long-name-of-a-model-that-goes-on"), Sampling(), "", Clock())
    at = [
        bare,
        session(),
        ended(),
        ended(metrics=wide),
        ended(outliers=(Outlier(7, 90.0, ("kv growth", "pool cleared")),)),
    ]
    assert len({len(rows(each, 0)) for each in at}) == 1
    assert len({len(rows(each, 99)) for each in at}) == 1
    for each in at:
        assert max(row.content.cell_length for row in rows(each, 0)) <= WIDTH
    assert len(rows(bare, 99)) > len(rows(bare, 0))


def test_every_figure_has_a_row_and_the_rows_are_in_its_order() -> None:
    for at in (session(), ended()):
        shown = [row.figure for row in rows(at, 0) if row.figure is not None]
        assert list(dict.fromkeys(shown)) == list(FIGURES)


def test_before_a_reply_the_rows_say_that_there_is_none_and_no_zero() -> None:
    at = session()
    at.on_event(LOADED)
    text = {row.figure: row.content.plain for row in reversed(rows(at, 0)) if row.figure is not None}
    assert text["ttft"].endswith(NONE_YET)
    assert text["kv"].endswith(NONE_YET)
    assert not any(word.startswith("0") for word in " ".join(text.values()).split())


def test_the_diagnosis_is_a_sentence_in_the_panel() -> None:
    text = " ".join(row.content.plain for row in rows(ended(), 0) if row.figure == "diagnosis")
    assert text.startswith("1.5 s in all, of which")


def test_a_models_name_is_foreign_text() -> None:
    at = session(replace(INFO, name="a\x1b[2Jb"))
    assert "\x1b" not in "".join(row.content.plain for row in rows(at, 0))
    assert all("\x1b" not in each.value for each in explain("model", at).inputs)
