"""One truth: whatever shows a reply's figures shows the same ones, and no share is more than its parts allow.

The recorded replies are real ones of the guide and of SmolLM2-135M at 4 bits, on two cores of a busy x86 machine: short, long,
cached, cancelled while they were written and before, with and without guesses.
"""

import itertools
import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.app.chat.test_session import Clock
from tests.scripted_engine import CHIP, LATENCY, SITUATION, WORK, model_spec
from tokamac.app.backend.protocol import Load, Loaded, MemoryUse, ReplyEvent
from tokamac.app.chat.conversation import Reply
from tokamac.app.chat.recording import measured, measured_of
from tokamac.app.chat.session import Session
from tokamac.app.commands import ask, loading
from tokamac.app.export import to_html
from tokamac.app.reports import cache_use, verdict
from tokamac.app.store.export import figures_line
from tokamac.app.store.values import Archive, StoredChat, StoredMessage
from tokamac.app.text import units
from tokamac.app.text.strict_json import build
from tokamac.app.tui.screens.explain import explanation
from tokamac.app.tui.widgets.status import Layout, doing, essentials_of, rows
from tokamac.engine.events import CacheUse, Finished, FinishReason, Live, PrefillProgress, TextChunk
from tokamac.engine.metrics import DraftCount, Metrics, Outlier, Recorder, Speculated, StepCost
from tokamac.engine.options import Sampling
from tokamac.engine.perf.diagnosis import Diagnosis, at_bandwidth, diagnose


@dataclass(frozen=True, slots=True)
class Recorded:
    """A reply of tests/fixtures/replies.jsonl."""

    name: str
    reason: FinishReason
    metrics: Metrics
    outliers: tuple[Outlier, ...]
    diagnosis: Diagnosis | None


FILE = Path(__file__).parents[1] / "fixtures" / "replies.jsonl"
RECORDED: list[Recorded] = [build(Recorded, json.loads(line), "reply") for line in FILE.read_text().splitlines()]


def ended(recorded: Recorded, gbs: float | None = None) -> Finished:
    """The end of a recorded reply; gbs: the bandwidth that is believed."""
    metrics, diagnosis = at_bandwidth(recorded.metrics, recorded.diagnosis, gbs)
    return Finished(recorded.reason, "text", metrics, outliers=recorded.outliers, diagnosis=diagnosis)


def shown(end: Finished) -> dict[str, str]:
    """What each place shows of a reply, as text: what is live of it, too."""
    m = end.metrics
    session = Session(Load("org/model"), Sampling(), "", Clock())
    session.start()
    session.on_event(Loaded(model_spec("org/model", capacity=100_000), m.ceiling_tps, None, MemoryUse()))
    session.submit("one")
    session.on_event(ReplyEvent(1, PrefillProgress(m.prompt_tokens, m.prompt_tokens, m.cached_tokens)))
    session.on_event(ReplyEvent(1, TextChunk("a")))
    session.on_event(ReplyEvent(1, Live(m, 9, ())))
    live = {"live line": doing(session, 0.0, 100).plain, "live bar": " ".join(essentials_of(session))}
    session.on_event(ReplyEvent(1, end))
    reply = session.turns[-1].reply
    assert reply.metrics is not None
    kept = json.loads(json.dumps(measured(reply)))
    message = StoredMessage(1, "", None, "assistant", "text", "", "complete", 0.0, "m", {}, kept)
    archive = Archive(StoredChat("", "t", "user", 0.0, 0.0, "", head=1), (message,))
    return {
        **live,
        "line": verdict.figures_text(m),
        "bar": " ".join(essentials_of(session)),
        "panel": "\n".join(row.content.plain for row in rows(session, Layout(99, every=True))),
        "F2": explanation(reply, 100).plain,
        "ask -vv": "\n".join(ask.report(end, whole=True)),
        "Markdown": figures_line(message),
        "HTML": to_html(archive),
    }


RATE = re.compile(r"[\d,.]+ tok/s")


def allowed(end: Finished) -> set[str]:
    """All rates that may be shown of a reply: those measured long enough, the limits, and what is predicted."""
    m = end.metrics
    rates = [m.shown_decode_tps, m.shown_prefill_tps, m.ceiling_tps, m.expected_tps]
    if end.diagnosis is not None:
        rates += [rate for each in end.diagnosis.remedies for rate in (each.before_tps, each.after_tps)]
        rates += [term.value for term in end.diagnosis.terms if term.key == "alone"]
    return {units.rate(each) for each in rates if each is not None}


def check(end: Finished) -> None:
    m, places = end.metrics, shown(end)
    assert json.loads(json.dumps(asdict(m)))["decode_tps"] == m.decode_tps
    for place, text in places.items():
        assert set(RATE.findall(text)) <= allowed(end), (place, text)
        assert "unknown at most" not in text, place
        for share, limit in re.findall(r"(\d+)% of (the hardware limit|the expected speed)", text):
            assert int(share) <= 100 or limit == "the expected speed", (place, text)
    if m.shown_decode_tps is not None:
        rate = units.rate(m.shown_decode_tps)
        for place in ("live line", "live bar", "line", "bar", "panel", "ask -vv", "Markdown", "HTML"):
            assert rate in places[place], (place, places[place])
        if end.diagnosis is not None:
            assert rate in places["F2"]
    elif end.diagnosis is not None:
        decode = end.diagnosis.part("decode")
        assert (decode.of_ceiling, decode.of_expected) == (None, None), "a share is of a rate that is worth showing"
    if m.drafted_tokens:
        assert m.share_of_expected is None
        assert "expected speed" not in places["F2"].partition("PREFILL")[0].partition("DECODE")[2]
    if m.accepted_tokens:
        assert m.share_of_ceiling is None
    elif m.share_of_ceiling is not None:
        assert m.share_of_ceiling == (m.shown_decode_tps or 0) / (m.ceiling_tps or 0)
        assert units.percent(m.share_of_ceiling) in places["panel"]


@pytest.mark.parametrize("gbs", [None, 40.0])
@pytest.mark.parametrize("recorded", RECORDED, ids=[each.name for each in RECORDED])
def test_a_recorded_reply_has_the_same_figures_everywhere(recorded: Recorded, gbs: float | None) -> None:
    check(ended(recorded, gbs))


def test_the_recorded_replies_are_of_every_kind() -> None:
    kinds = [
        (bool(each.metrics.accepted_tokens), each.reason, each.metrics.shown_decode_tps is not None)
        for each in RECORDED
    ]
    for kind in itertools.product((False, True), ("stop", "length", "cancelled"), (False, True)):
        if kind not in {
            (False, "stop", True),
            (True, "stop", True),
            (True, "length", False),
            (True, "cancelled", True),
        }:
            assert kind in kinds, kind
    assert any(each.metrics.generated_tokens == 0 for each in RECORDED)
    assert any(each.metrics.cached_tokens for each in RECORDED)


@st.composite
def replies(draw: st.DrawFn) -> Finished:
    """Replies as the recorder tells them of any time stamps: tokens come one by one or several in a pass."""
    gaps = draw(st.lists(st.one_of(st.just(0.0), st.floats(0.0002, 0.5)), max_size=90))
    repeats = draw(st.integers(1, 20))
    start_s, wait_s = draw(st.floats(0, 9)), draw(st.floats(0, 2))
    prefill_s = draw(st.floats(0.001, 3))
    prompt = draw(st.integers(1, 3000))
    times = [*itertools.accumulate(gaps * repeats, initial=start_s + wait_s + prefill_s)] if draw(st.booleans()) else []
    many = len(times)
    drafted = draw(st.integers(0, many))
    accepted = draw(st.integers(0, min(drafted, max(many - 1, 0))))
    told = Speculated((DraftCount("lookup", drafted, accepted),), draw(st.floats(-2, 2))) if drafted else Speculated()
    recorder = Recorder(
        accepted_s=start_s, began_s=start_s + wait_s / 2, prefill_began_s=start_s + wait_s, prompt_tokens=prompt,
        cached_tokens=draw(st.integers(0, prompt - 1)), token_times=times, speculated=[lambda: told],
    )  # fmt: skip
    gbs = draw(st.one_of(st.none(), st.floats(20, 900)))
    expected = draw(st.one_of(st.none(), st.floats(1, 300)))
    cost = StepCost(WORK.weight_bytes(), WORK.kv_bytes(prompt + many // 2), gbs, expected)
    metrics = recorder.metrics(cost, kv_bytes=10, peak_memory_bytes=10)
    if (metrics.steps_tps or 0.0) > (metrics.ceiling_tps or 1e9):  # as the engine has it (MachineSpeed.bounded)
        metrics = replace(metrics, ceiling_tps=None)
    reason = draw(st.sampled_from(["stop", "length", "cancelled"]))
    found = diagnose(metrics, WORK, CHIP, draw(st.sampled_from([LATENCY, None])), SITUATION)
    return Finished(reason, "text", metrics, diagnosis=found)


@given(replies())
def test_any_reply_has_the_same_figures_everywhere(end: Finished) -> None:
    check(end)


@given(replies(), st.floats(0, 100), st.floats(0, 30), st.floats(0, 30))
def test_the_parts_add_up_to_all_of_the_time(end: Finished, after_s: float, start_s: float, load_s: float) -> None:
    if end.diagnosis is None:
        return
    whole_s = start_s + load_s + after_s + end.diagnosis.total_s
    timed = end.diagnosis.since(whole_s, start_s=start_s, load_s=load_s)
    assert timed.total_s == pytest.approx(whole_s)
    assert [part.name for part in timed.parts if part.name in ("prefill", "decode")] == ["prefill", "decode"]
    assert timed.since(0.0).part("wait") == timed.part("wait"), "nothing that was measured is taken back"
    assert verdict.time_text(timed).endswith(f" = {units.seconds(timed.total_s)}")
    assert verdict.sentence(end.metrics, timed).startswith(f"Took {units.seconds(timed.total_s)}")


def test_a_command_accounts_for_all_seconds_since_its_process_began() -> None:
    at = iter([2.0, 5.0, 6.0, 8.0])  # loading begins; it has ended; a reply ends; the reply to its call's result ends
    time = loading.CommandTime(lambda: next(at))
    time.loaded()
    end = next(ended(each) for each in RECORDED if each.diagnosis is not None and each.diagnosis.total_s < 0.5)
    first, second = (time.counted(replace(end, tool_calls=calls)) for calls in (("a call",), ()))
    spent = {part.name: part.seconds for part in first.diagnosis.parts}
    assert (spent["start"], spent["load"], first.diagnosis.total_s) == (2.0, 3.0, pytest.approx(6.0))
    assert second.diagnosis.total_s == pytest.approx(2.0)
    assert second.diagnosis.parts[0].name == "wait"
    assert 0 < loading.process_age_s() < loading.process_age_s() + 1e-9


def test_what_a_user_waits_for_a_model_is_in_the_replys_time() -> None:
    clock = Clock()
    session = Session(Load("org/model"), Sampling(), "", clock)
    session.start()
    clock.now += 1.0
    session.submit("one")
    clock.now += 4.0
    session.on_event(Loaded(model_spec("org/model"), None, None, MemoryUse()))
    clock.now += 9.0
    session.on_event(ReplyEvent(1, ended(next(each for each in RECORDED if each.name == "SmolLM2, long"))))
    (turn,) = session.turns
    assert turn.reply.diagnosis.part("load").seconds == pytest.approx(4.0)
    assert turn.reply.diagnosis.total_s == pytest.approx(13.0)
    assert "load 4.0 s (31%)" in " ".join(explanation(turn.reply, 100).plain.split())


@pytest.mark.parametrize(
    ("ending", "saved_s", "said"),
    [
        ("stop", None, True), ("tool_calls", 0.2, True), ("stop", -0.01, False), ("stop", 0.0, False),
        *((ending, None, False) for ending in ("loop", "length", "cancelled", "failed", "lost")),
    ],
)  # fmt: skip
def test_nobody_says_that_nothing_helps_where_that_is_not_known(ending: str, saved_s: float | None, said: bool) -> None:
    metrics = replace(RECORDED[0].metrics, saved_s=saved_s)
    assert (verdict.help_text(metrics, ending) == verdict.NOTHING_HELPS) == said


def test_guesses_that_did_not_pay_are_what_would_help() -> None:
    slow = replace(
        next(each for each in RECORDED if each.name == "SmolLM2, long").metrics,
        drafted_tokens=50,
        accepted_tokens=1,
        saved_s=-1.5,
    )
    found = diagnose(slow, WORK, CHIP, None, SITUATION)
    text = explanation(Reply("text", metrics=slow, diagnosis=found), 100).plain
    assert "no guesses, too few of which came true: saves 1.5 s" in text
    assert "--speculation off" in text


# What was read again.


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_what_was_read_again_is_told_in_safe_text_and_in_the_log_without_any(before: str, held: str, now: str) -> None:
    use = CacheUse("changed", 900, 22, 335, 0.33, "system prompt", "date", f"{before}secret", f"{held}\x1b[2J", now)
    safe = [cache_use.why(use), *cache_use.as_json(use).values()]
    assert not any(isinstance(each, str) and re.search(r"[\x00-\x1f\x7f-\x9f\u202e]", each) for each in safe)
    assert cache_use.counts(use) == "again 335 (date from 22 system prompt, 0.3 s)"


def test_f2_and_ask_say_what_was_read_again_and_a_kept_reply_remembers_it() -> None:
    use = CacheUse("changed", 900, 22, 335, 0.33, "system prompt", "date", "Today is ", "Monday", "Tuesday")
    end = replace(ended(next(each for each in RECORDED if each.diagnosis is not None)), cache=use)
    again = "335 tokens read again (0.3 s), because a date or time changed at token 22, in the system prompt"
    for place in ("F2", "ask -vv"):
        told = " ".join(shown(end)[place].split())
        assert f"{again}: 'Monday' → 'Tuesday'. Put it at the end" in told
        assert "read again" not in shown(replace(end, cache=replace(use, again_tokens=0)))[place]
    message = StoredMessage(
        1, "", None, "assistant", "text", "", "complete", 0.0, "m", {}, measured(Reply("", cache=use))
    )
    assert measured_of(message).cache == use
