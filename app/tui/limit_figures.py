"""The figures that set a reply beside what the machine allows, explained."""

from tokamac.app.tui import measures, units
from tokamac.app.tui.explained import CLOCK, MEASURED, NO_REPLY, Explained, Input, bandwidth, step, terms
from tokamac.app.tui.session import Session
from tokamac.app.verdict import BOUND, sentence


def ceiling(session: Session) -> Explained:
    """How near decode came to what the bandwidth allows."""
    m = session.metrics
    reached = None if m is None else measures.share_of_ceiling(m)
    ceiling = session.ceiling_tps if m is None else m.ceiling_tps
    return Explained(
        "share of the ceiling",
        units.percent(reached),
        "decode rate ÷ (bandwidth ÷ bytes a step)",
        (
            Input("decode rate", units.rate(None if m is None else m.decode_tps), MEASURED),
            Input("ceiling", units.rate(ceiling), "bandwidth ÷ bytes a step"),
            *bandwidth(session),
            *step(session),
        ),
        "computed from the above",
        "How near the reply came to what the memory's bandwidth allows: no program can be faster than all of it.",
    )


def expected(session: Session) -> Explained:
    """How near it came to what is expected here."""
    m = session.metrics
    share = None if m is None else measures.share_of_expected(m)
    how = next((term.source for term in terms(session, "expected")), "what good kernels reach")
    return Explained(
        "share of the expected",
        units.percent(share),
        "decode rate ÷ expected rate",
        (
            Input("decode rate", units.rate(None if m is None else m.decode_tps), MEASURED),
            Input("expected rate", units.rate(None if m is None else m.expected_tps), how),
            *terms(session, "weights", "kv", "launching", "host"),
        ),
        "fitted to published speeds of this chip, and no faster than the host builds a step; or timed in parts on this machine",
        "Whether this machine does as well as it should: far below means that something else takes its time.",
        ""
        if m is None or m.expected_tps is not None
        else "this machine's pace has not been measured yet; idle time does it",
    )


def achieved(session: Session) -> Explained:
    """What it drew from memory."""
    achieved = measures.achieved_gbs(session)
    m = session.metrics
    return Explained(
        "achieved bandwidth",
        units.bandwidth(achieved),
        "bytes a step × decode rate",
        (
            *step(session),
            Input("decode rate", units.rate(None if m is None else m.decode_tps), MEASURED),
            *bandwidth(session),
        ),
        "computed from what was measured; while a reply is written, of the last gaps",
        "What decoding really draws from memory each second.",
    )


def diagnosis(session: Session) -> Explained:
    """What the reply waited for."""
    m, diagnosis = session.metrics, session.diagnosis
    done = m is not None and not session.replying
    parts = () if diagnosis is None else diagnosis.parts
    return Explained(
        "diagnosis",
        sentence(m, diagnosis) if m is not None and done else units.UNKNOWN,
        "the longest of waiting, reading and writing; the roof of the roofline that it met first",
        tuple(
            Input(part.name, units.seconds(part.seconds), BOUND[part.bound] if part.bound is not None else CLOCK)
            for part in parts
        ),
        "computed from the reply's metrics and what this machine allows",
        f"Why the reply took as long as it did; {session.keymap.key('explain')} shows all of it, and what would help.",
        "" if done else "a reply is being made" if session.replying else NO_REPLY,
    )
