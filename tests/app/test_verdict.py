"""The sentence under a reply, the figures of the panel, and how numbers are written."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from tokamac.app import units, verdict
from tokamac.app.backend.protocol import Load, Loaded, ModelInfo, ReplyEvent
from tokamac.app.chat import figures
from tokamac.app.chat.conversation import Turn, messages
from tokamac.app.chat.session import Session
from tokamac.app.tui.theme import bar, sparkline
from tokamac.app.verdict import HOW, WHOLE, brief, remedy_text, sentence
from tokamac.engine.events import Finished, Live, Message, PrefillProgress, TextChunk
from tokamac.engine.metrics import Gaps, Metrics, Outlier
from tokamac.engine.options import Sampling
from tokamac.engine.perf.diagnosis import Diagnosis, PartName, Remedy, RemedyName, Term, TimePart, Waits

METRICS = Metrics(
    prompt_tokens=1500,
    cached_tokens=300,
    prefill_tokens=1200,
    generated_tokens=50,
    ttft_s=2.45,
    prefill_s=2.4,
    total_s=3.1,
    prefill_tps=500.0,
    decode_tps=74.0,
    itl_ms=Gaps(13.0, 15.0, 16.0, 20.0),
    kv_bytes=1,
    weight_bytes_per_token=1,
    kv_bytes_per_step=1,
    achieved_gbs=1.0,
    ceiling_tps=100.0,
    expected_tps=None,
    peak_memory_bytes=None,
)


def found(name: PartName, seconds: float, *remedies: Remedy, **more: Any) -> Diagnosis:
    """A diagnosis in which one part took so long, and the others next to nothing."""
    names: tuple[PartName, ...] = ("wait", "prefill", "decode")
    parts = (TimePart(name, seconds, **more) if each == name else TimePart(each, 0.01) for each in names)
    return Diagnosis(tuple(parts), remedies, ())


PACKED = Remedy("packed keys and values", 2.1, 8, 31.0, 38.0)


@pytest.mark.parametrize(
    ("diagnosis", "said"),
    [
        (
            found("prefill", 2.4, bound="compute", of_ceiling=0.61, of_expected=0.92),
            "3.1 s in all, of which 2.4 s reading 1,200 prompt tokens (prefill, bound by arithmetic: 61% of what this machine "
            "allows and 92% of what is expected).",
        ),
        (
            found("prefill", 2.4, bound="not memory"),
            "3.1 s in all, of which 2.4 s reading 1,200 prompt tokens (prefill, not bound by memory).",
        ),
        (found("prefill", 2.4), "3.1 s in all, of which 2.4 s reading 1,200 prompt tokens (prefill)."),
        (
            found("decode", 3.0, PACKED, bound="memory", of_ceiling=0.74),
            "3.1 s in all, of which 3.0 s writing 50 tokens (decode, bound by memory: 74% of what this machine allows); "
            "8-bit keys and values: decode from 31.0 to 38.0 tok/s at this context, 2.1 s less.",
        ),
        (
            found("decode", 3.0, Remedy("quiet machine", 1.2, None, 20.0, 31.0), bound="overhead", of_expected=0.6),
            "3.1 s in all, of which 3.0 s writing 50 tokens (decode, bound by neither memory nor arithmetic: only 60% of what is "
            "expected); with this machine undisturbed: decode from 20.0 to 31.0 tok/s, 1.2 s less.",
        ),
        (
            found("decode", 3.0),
            "3.1 s in all, of which 3.0 s writing 50 tokens (decode); 300 of 1,500 prompt tokens were still cached.",
        ),
        (found("wait", 2.5), "3.1 s in all, of which 2.5 s went by before the prompt was read."),
        (None, "3.1 s in all, 2.5 s of it before the first token."),
    ],
)
def test_the_sentence_names_the_part_the_reason_and_what_would_help(diagnosis: Diagnosis | None, said: str) -> None:
    assert sentence(METRICS, diagnosis) == said


def test_without_a_token_the_sentence_says_so() -> None:
    assert sentence(replace(METRICS, ttft_s=None, total_s=None), None) == "No token was made."
    assert brief(replace(METRICS, ttft_s=None, total_s=None), None) == "No token was made."


@pytest.mark.parametrize(
    ("diagnosis", "said"),
    [
        (
            found("prefill", 2.4, bound="compute", of_ceiling=0.61, of_expected=0.92),
            "2.4 of 3.1 s in prefill, bound by arithmetic · /explain",
        ),
        (
            found("decode", 3.0, PACKED, bound="overhead", of_expected=0.6),
            "3.0 of 3.1 s in decode, bound by overhead, unusually slow · /explain",
        ),
        (found("decode", 0.05), "50 ms of 3.1 s in decode · /explain"),
        (found("wait", 2.5), "2.5 of 3.1 s before the prompt was read · /explain"),
        (None, "3.1 s in all, 2.5 s of it before the first token."),
    ],
)
def test_the_line_below_a_reply_names_the_slow_phase_and_where_the_rest_is(
    diagnosis: Diagnosis | None, said: str
) -> None:
    assert brief(METRICS, diagnosis) == said


@pytest.mark.parametrize("total_s", [0.0004, 0.05, 4.1, 45.0, 125.0, 7000.0])
def test_the_line_below_a_reply_is_short_whatever_it_says(total_s: float) -> None:
    phases = [
        (name, {"bound": bound, "of_expected": 0.002}) for name in ("prefill", "decode") for bound in get_args(Waits)
    ]
    parts: list[tuple[PartName, dict[str, Any]]] = [("wait", {}), *phases]
    for name, more in parts:
        line = brief(replace(METRICS, total_s=total_s), found(name, total_s, PACKED, **more))
        assert len(line) <= 100, line
        assert "%" not in line
        assert line.endswith(WHOLE)
        assert units.seconds(total_s) in line


def test_a_share_that_is_not_nothing_is_not_written_as_nothing() -> None:
    assert [units.percent(share) for share in (0.0, 0.0004, 0.0099, 0.01, 0.126, 1.0)] == [
        "0%", "under 1%", "under 1%", "1%", "13%", "100%",
    ]  # fmt: skip
    assert units.percent(None) == "unknown"
    slow = found("prefill", 2.4, bound="overhead", of_ceiling=0.003, of_expected=0.004)
    assert "under 1% of what this machine allows and under 1% of what is expected" in sentence(METRICS, slow)


@pytest.mark.parametrize(
    ("remedy", "said"),
    [
        (Remedy("packed weights", 8.1, 4, 12.0, 31.0), "4-bit weights: decode from 12.0 to 31.0 tok/s, 8.1 s less"),
        (Remedy("prompt cache", 1.9), "with the prompt cache, this prompt once read: 1.9 s less to the first token"),
        (
            Remedy("shorter context", 2.0, 2048, 30.0, 33.0, 3.6, 1.8),
            "half the prompt (2,048 tokens): prefill from 3.6 s to 1.8 s, decode from 30.0 to 33.0 tok/s, 2.0 s less",
        ),
        (
            Remedy("quiet machine", 3.7, None, 172.0, 264.0, 3.6, 0.007),
            "with this machine undisturbed: prefill from 3.6 s to 7 ms, decode from 172 to 264 tok/s, 3.7 s less",
        ),
        (
            Remedy("prompt cache", 1.9, before_s=2.0, after_s=0.05),
            "with the prompt cache, this prompt once read: prefill from 2.0 s to 50 ms, 1.9 s less to the first token",
        ),
        (Remedy("packed keys and values", 0.4, 8), "8-bit keys and values: 0.4 s less"),
    ],
)
def test_a_remedy_says_what_it_brings(remedy: Remedy, said: str) -> None:
    assert remedy_text(remedy) == said


SLOWED = replace(
    found("decode", 3.0, Remedy("full power", 1.2, None, 20.0, 31.0), bound="overhead", of_expected=0.6),
    throttles=("thermal", "low power"),
)


def test_what_slowed_the_machine_down_is_in_the_verdict_in_the_line_and_in_the_whole() -> None:
    assert sentence(METRICS, SLOWED) == (
        "3.1 s in all, of which 3.0 s writing 50 tokens (decode, bound by neither memory nor arithmetic: only 60% of what is "
        "expected); macOS slowed the chip down because of its heat; Low Power Mode was on, which slows the chip down; "
        "with Low Power Mode off and this machine undisturbed: decode from 20.0 to 31.0 tok/s, 1.2 s less."
    )
    assert brief(METRICS, SLOWED) == (
        "3.0 of 3.1 s in decode, bound by overhead, unusually slow, chip hot, Low Power Mode · /explain"
    )
    whole = list(verdict.lines(SLOWED))
    assert (
        "machine   macOS slowed the chip down because of its heat (let the machine cool, and close what else computes)"
        in whole
    )
    assert whole[-2].endswith("(System Settings > Battery, on a desktop Mac Energy)")


def test_every_remedy_has_words_and_a_way() -> None:
    for name in get_args(RemedyName):
        assert remedy_text(Remedy(name, 1.0, 4)).endswith(("less", "first token"))
        assert HOW[name]


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
    assert lines[0] == "decode    3.0 s: writing the reply; bound by memory; 74% of what this machine allows"
    assert "decode    bytes a step = 4.00 GB (all)" in lines
    assert "decode    ceiling = bandwidth ÷ bytes a step = 400 GB/s ÷ 4.00 GB = 100 tok/s" in lines
    assert "machine   ridge = peak ÷ bandwidth = unknown" in lines
    assert "prefill   operations = 3.2 TFLOP (2 × 3)" in lines
    assert lines[-1].startswith("remedy    8-bit keys and values:")


def test_the_share_is_unknown_where_a_part_is() -> None:
    assert figures.share_of_ceiling(METRICS) == pytest.approx(0.74)
    assert figures.share_of_ceiling(replace(METRICS, decode_tps=None)) is None


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (units.count(12345), "12,345"),
        (units.count(None), "unknown"),
        (units.short(32768), "32.8k"),
        (units.short(4_022_468_096), "4.02B"),
        (units.short(7), "7"),
        (units.size(2_263_000_000), "2.26 GB"),
        (units.size(0), "0 B"),
        (units.rate(1234.5), "1,234 tok/s"),
        (units.rate(9.99), "9.99 tok/s"),
        (units.rate(9.996), "10.0 tok/s"),
        (units.rate(None), "unknown"),
        (units.bandwidth(3350.4), "3,350 GB/s"),
        (units.bandwidth(4.986), "4.99 GB/s"),
        (units.bandwidth(None), "unknown"),
        (units.milliseconds(16.26), "16.3 ms"),
        (units.seconds(0.0994), "99 ms"),
        (units.seconds(0.4), "0.4 s"),
        (units.seconds(12.3), "12 s"),
        (units.seconds(125), "2 min 05 s"),
    ],
)
def test_numbers_as_written(written: str, expected: str) -> None:
    assert written == expected


def replying() -> Session:
    session = Session(Load("guide"), Sampling(), "", lambda: 10.0)
    session.start()
    session.on_event(Loaded(ModelInfo("guide")))
    session.submit("hi")
    return session


def test_the_rate_now_is_that_of_the_last_gaps() -> None:
    session = replying()
    assert figures.decode_now(session) is None
    session.on_event(ReplyEvent(1, Live(METRICS, 77, (500.0,) * 10 + (50.0,) * 16)))
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


def test_a_gap_that_stands_out_is_told_with_its_cause() -> None:
    assert figures.gap_and_cause(Outlier(257, 41.2, ("pool cleared",))) == "41.2 ms at token 257: pool cleared"
    assert figures.gap_and_cause(Outlier(1300, 2.5)) == "2.50 ms at token 1,300: cause unknown"
    both = Outlier(2, 1234.0, ("kv growth", "swap"))
    assert figures.gap_and_cause(both) == "1,234 ms at token 2: kv growth, swap"


def test_the_bandwidth_is_that_of_now_while_a_reply_is_written_and_then_its_mean() -> None:
    session = replying()
    assert figures.achieved_gbs(session) is None
    session.on_event(ReplyEvent(1, Live(METRICS, 77, (50.0,), 5, 9.0)))
    assert figures.achieved_gbs(session) == METRICS.achieved_gbs  # still reading the prompt
    session.on_event(ReplyEvent(1, TextChunk("a")))
    assert figures.achieved_gbs(session) == 9.0
    session.on_event(ReplyEvent(1, Finished("stop", "a", METRICS)))
    assert figures.achieved_gbs(session) == METRICS.achieved_gbs


def test_outliers_are_those_of_the_running_reply_and_at_last_the_ends() -> None:
    session = replying()
    session.on_event(ReplyEvent(1, Live(METRICS, 77, (50.0,), outliers=(Outlier(3, 9.0),))))
    assert session.outliers == (Outlier(3, 9.0),)
    session.on_event(ReplyEvent(1, Finished("stop", "a", METRICS, outliers=(Outlier(5, 11.0, ("swap",)),))))
    assert session.outliers == (Outlier(5, 11.0, ("swap",)),)
    session.submit("again")
    assert session.outliers == ()


def test_the_share_of_the_expected_is_unknown_where_a_part_is() -> None:
    assert figures.share_of_expected(METRICS) is None
    assert figures.share_of_expected(replace(METRICS, expected_tps=80.0)) == pytest.approx(0.925)
