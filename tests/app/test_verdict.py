"""The sentence under a reply, the figures of the panel, and how numbers are written."""

from dataclasses import replace

import pytest

from tokamac.app.backend.wire import Load, Loaded, ModelInfo, Prefill, Stats
from tokamac.app.tui import measures, units
from tokamac.app.tui.conversation import Turn, messages
from tokamac.app.tui.session import Session
from tokamac.app.tui.verdict import share_of_ceiling, verdict
from tokamac.app.tui.widgets.charts import bar, sparkline
from tokamac.engine.events import Live, Message
from tokamac.engine.limits.metrics import Gaps, Metrics
from tokamac.engine.options import Sampling

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


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        (
            METRICS,
            "3.1 s in all, of which 2.4 s reading 1,200 new prompt tokens (prefill, bound by arithmetic); "
            "decode ran at 74% of what this machine's memory allows.",
        ),
        (
            replace(METRICS, ceiling_tps=None),
            "3.1 s in all, of which 2.4 s reading 1,200 new prompt tokens (prefill, bound by arithmetic).",
        ),
        (
            replace(METRICS, ceiling_tps=None, prefill_tokens=12),
            "3.1 s in all, of which 2.4 s reading 12 new prompt tokens (prefill, so few that it is bound by memory, like decode).",
        ),
        (
            replace(METRICS, ttft_s=0.1, prefill_s=0.1),
            "3.1 s in all, of which 3.0 s writing 50 tokens (decode, bound by memory bandwidth: 74% of what this machine "
            "allows); 300 of 1,500 prompt tokens were still cached.",
        ),
        (
            replace(METRICS, ttft_s=0.1, prefill_s=0.1, decode_tps=20.0, cached_tokens=0),
            "3.1 s in all, of which 3.0 s writing 50 tokens (decode, at 20% of what this machine's memory allows, "
            "so memory was not the limit).",
        ),
        (
            replace(METRICS, ttft_s=2.5, prefill_s=0.1, decode_tps=None),
            "3.1 s in all, of which 2.5 s before the first token, little of it reading the prompt.",
        ),
        (replace(METRICS, ttft_s=None, total_s=None), "No token was made."),
    ],
)
def test_the_verdict_names_the_phase_and_the_reason(metrics: Metrics, sentence: str) -> None:
    assert verdict(metrics) == sentence


def test_the_share_is_unknown_where_a_part_is() -> None:
    assert share_of_ceiling(METRICS) == pytest.approx(0.74)
    assert share_of_ceiling(replace(METRICS, decode_tps=None)) is None


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
    assert measures.decode_now(session) is None
    session.on_event(Stats(1, Live(METRICS, 77, (500.0,) * 10 + (50.0,) * 16)))
    assert measures.decode_now(session) is None  # still reading the prompt
    session.phase = session.phase.DECODING
    assert measures.decode_now(session) == pytest.approx(20.0)
    assert measures.context_used(session) == 77


def test_the_time_left_follows_the_rate_so_far() -> None:
    session = replying()
    session.on_event(Prefill(1, 100, 1100, 100))
    assert measures.prefill_eta_s(session, 12.0) is None
    session.on_event(Prefill(1, 350, 1100, 100))
    assert measures.prefill_eta_s(session, 12.0) == pytest.approx(6.0)


def test_charts() -> None:
    assert bar(None, 10).plain == "━" * 10
    assert bar(1.5, 4).plain == "━━━━"
    assert sparkline([1, 2, 4, 8], 3) == "▃▅█"
    assert sparkline([], 5) == ""


def test_a_blank_system_prompt_is_none() -> None:
    assert messages("  ", [Turn("hi")]) == (Message("user", "hi"),)
