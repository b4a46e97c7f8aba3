"""Every message survives the wire; nothing else gets through it."""

import dataclasses
import json
import typing
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from tokamac.app.backend import protocol
from tokamac.app.backend.protocol import (
    Answer,
    Asker,
    CaseLine,
    Change,
    ChipLine,
    CurvePoint,
    Figures,
    Generate,
    ModelLine,
    Question,
    Roof,
    Spot,
    Wanted,
    Where,
)
from tokamac.engine.events import (
    Alternative,
    Event,
    Finished,
    Live,
    LoadProgress,
    MemoryPressure,
    Message,
    PrefillProgress,
    Price,
    TextChunk,
    TokenLogprob,
    Truncated,
)
from tokamac.engine.metrics import Cause, Gaps, Metrics, Outlier, Throttle
from tokamac.engine.options import STAGES, KVSpec, Sampling
from tokamac.engine.perf.diagnosis import Concern, Diagnosis, Remedy, RemedyName, Term, TimePart, Unit, Waits

NUMBERS = st.integers(0, 2**60)
FLOATS = st.floats(0, 1e12, allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=()), max_size=30)
GAPS = st.builds(Gaps, FLOATS, FLOATS, FLOATS, FLOATS)


def _field(hint: Any) -> st.SearchStrategy[Any]:
    optional = st.none() if type(None) in typing.get_args(hint) else st.nothing()
    if Gaps in (hint, *typing.get_args(hint)):
        return optional | GAPS
    return optional | (FLOATS if float in (hint, *typing.get_args(hint)) else NUMBERS)


HINTS = typing.get_type_hints(Metrics)
METRICS = st.builds(Metrics, **{field.name: _field(HINTS[field.name]) for field in dataclasses.fields(Metrics)})
OUTLIER = st.builds(Outlier, NUMBERS, FLOATS, st.lists(st.sampled_from(typing.get_args(Cause)), max_size=3).map(tuple))
OUTLIERS = st.lists(OUTLIER, max_size=3).map(tuple)
LIVE = st.builds(
    Live,
    METRICS,
    NUMBERS,
    st.lists(FLOATS, max_size=5).map(tuple),
    st.none() | NUMBERS,
    st.none() | FLOATS,
    OUTLIERS,
)
MESSAGE = st.builds(Message, st.sampled_from(["system", "user", "assistant"]), TEXT, TEXT)
SAMPLING = st.builds(
    Sampling,
    temperature=st.floats(0, 10),
    seed=st.none() | NUMBERS,
    stop=st.lists(TEXT.filter(bool), max_size=3).map(tuple),
    stop_token_ids=st.lists(NUMBERS, max_size=3).map(tuple),
    logit_bias=st.dictionaries(NUMBERS, st.floats(-100, 100), max_size=3),
    presence_penalty=st.floats(-2, 2),
    dry_multiplier=st.floats(0, 5),
    dry_sequence_breakers=st.lists(TEXT.filter(bool), max_size=3).map(tuple),
    order=st.permutations(STAGES),
    logprobs=st.none() | st.integers(0, 9),
)
KV = st.builds(
    KVSpec,
    key_bits=st.sampled_from([16, 8, 4]),
    keep=st.just("system") | st.integers(0, 9),
    window=st.none() | st.just(99),
)
WHERE = st.builds(Where, TEXT, st.none() | NUMBERS, st.none() | FLOATS)
QUESTION = st.builds(
    Question,
    st.sampled_from(typing.get_args(Wanted)),
    TEXT,
    st.none() | st.just(4),
    KV,
    NUMBERS,
    NUMBERS,
    WHERE,
)
FIGURES = st.builds(
    Figures, st.none() | NUMBERS, st.none() | NUMBERS, st.none() | st.booleans(), *[st.none() | FLOATS] * 3, TEXT
)
SPOT = st.builds(
    Spot, st.sampled_from(["decode", "prefill"]), FLOATS, st.sampled_from([None, "memory"]), FLOATS, st.none()
)
ANSWER = st.builds(
    Answer,
    TEXT,
    TEXT,
    TEXT,
    st.none() | NUMBERS,
    st.lists(
        st.builds(CaseLine, st.sampled_from(typing.get_args(Change)), st.none(), NUMBERS, NUMBERS, NUMBERS, FIGURES),
        max_size=2,
    ).map(tuple),
    st.lists(st.builds(CurvePoint, NUMBERS, FLOATS, st.none()), max_size=2).map(tuple),
    st.none() | st.builds(Roof, FLOATS, FLOATS, FLOATS, st.lists(SPOT, max_size=2).map(tuple)),
    st.lists(st.builds(ChipLine, TEXT, st.none() | NUMBERS, FLOATS, FIGURES), max_size=2).map(tuple),
    st.lists(st.builds(ModelLine, TEXT, NUMBERS, st.none(), NUMBERS, TEXT, FIGURES), max_size=2).map(tuple),
)
PARTS = st.tuples(
    st.builds(TimePart, st.just("wait"), FLOATS),
    st.builds(
        TimePart, st.just("prefill"), FLOATS, st.sampled_from([None, *typing.get_args(Waits)]), FLOATS, st.none()
    ),
)
REMEDY = st.builds(Remedy, st.sampled_from(typing.get_args(RemedyName)), FLOATS, st.none() | NUMBERS, FLOATS, st.none())
TERM = st.builds(
    Term,
    TEXT,
    st.sampled_from(typing.get_args(Concern)),
    TEXT,
    TEXT,
    st.none() | FLOATS,
    st.sampled_from(typing.get_args(Unit)),
)
DIAGNOSIS = st.builds(
    Diagnosis,
    PARTS,
    st.lists(REMEDY, max_size=3).map(tuple),
    st.lists(TERM, max_size=3).map(tuple),
    st.lists(st.sampled_from(typing.get_args(Throttle)), max_size=2).map(tuple),
)
ASKER = st.sampled_from(typing.get_args(Asker))
REQUESTS = st.one_of(
    st.builds(protocol.Load, TEXT, KV, st.booleans()),
    st.builds(protocol.Generate, NUMBERS, st.lists(MESSAGE, max_size=4).map(tuple), SAMPLING),
    st.builds(protocol.Cancel, NUMBERS),
    st.builds(protocol.Warm, NUMBERS, st.lists(MESSAGE, max_size=4).map(tuple)),
    st.builds(protocol.AskPrice, ASKER, NUMBERS, st.lists(MESSAGE, max_size=4).map(tuple)),
    st.builds(protocol.AskCount, NUMBERS, TEXT),
    st.builds(protocol.AskWhatIf, NUMBERS, QUESTION),
    st.just(protocol.Unload()),
    st.just(protocol.Quit()),
)
PRICE = st.builds(Price, NUMBERS, NUMBERS, NUMBERS, st.none() | FLOATS)
LOGPROB = st.builds(
    TokenLogprob, NUMBERS, TEXT, FLOATS, st.lists(st.builds(Alternative, NUMBERS, TEXT, FLOATS), max_size=2).map(tuple)
)
EVENTS = st.one_of(
    st.builds(Truncated, NUMBERS, NUMBERS),
    st.builds(MemoryPressure, NUMBERS, st.none() | NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.builds(PrefillProgress, NUMBERS, NUMBERS, NUMBERS),
    st.builds(
        TextChunk,
        TEXT,
        st.sampled_from(["answer", "thinking"]),
        st.lists(NUMBERS, max_size=3).map(tuple),
        st.lists(LOGPROB, max_size=2).map(tuple),
    ),
    LIVE,
    st.builds(
        Finished,
        st.sampled_from(["stop", "length", "cancelled"]),
        TEXT,
        METRICS,
        TEXT,
        outliers=OUTLIERS,
        diagnosis=st.none() | DIAGNOSIS,
        stopped_by=st.none() | TEXT | NUMBERS,
    ),
)
REPLIES = st.one_of(
    st.builds(LoadProgress, st.sampled_from(["download", "weights"]), NUMBERS, st.none() | NUMBERS),
    st.builds(protocol.Loaded, st.builds(protocol.ModelInfo, TEXT), st.none() | FLOATS),
    st.just(protocol.Unloaded()),
    st.builds(protocol.ReplyEvent, NUMBERS, EVENTS),
    st.builds(protocol.MemoryUse, NUMBERS, st.none() | NUMBERS, NUMBERS, st.none() | NUMBERS, TEXT),
    st.builds(protocol.Warmed, NUMBERS, st.none() | PRICE),
    st.builds(protocol.Counted, NUMBERS, st.none() | NUMBERS),
    st.builds(protocol.Priced, ASKER, NUMBERS, st.none() | PRICE),
    st.builds(protocol.WhatIf, NUMBERS, st.none() | ANSWER, TEXT, NUMBERS, NUMBERS),
    st.builds(protocol.EngineNotice, TEXT),
    st.just(protocol.Heartbeat()),
    st.builds(protocol.Failed, st.none() | NUMBERS, TEXT, TEXT),
)


@settings(max_examples=60, deadline=None)
@given(REQUESTS)
def test_requests_round_trip(request: protocol.Request) -> None:
    line = protocol.encode(request)
    assert line.count(b"\n") == 1
    assert protocol.decode_request(line) == request


@settings(max_examples=100, deadline=None)
@given(REPLIES)
def test_replies_round_trip(reply: protocol.Reply) -> None:
    assert protocol.decode_reply(protocol.encode(reply)) == reply


@pytest.mark.parametrize("kind", [*typing.get_args(Event), Live])
def test_every_event_of_the_engine_crosses_as_it_is(kind: type) -> None:
    event = find(
        EVENTS, lambda event: isinstance(event, kind), settings=settings(phases=(Phase.generate,), deadline=None)
    )
    line = protocol.encode(protocol.ReplyEvent(7, event))
    assert json.loads(line)["event"]["type"] == kind.__name__.lower()
    assert protocol.decode_reply(line) == protocol.ReplyEvent(7, event)


@pytest.mark.parametrize("event", ["null", "7", "{}", '{"type":"heartbeat"}', '{"type":["live"]}', '{"type":"truncated"}',
    '{"type":"truncated","messages":1,"tokens":2,"more":3}'])  # fmt: skip
def test_what_is_no_event_of_the_engine_is_refused(event: str) -> None:
    with pytest.raises(protocol.WireError):
        protocol.decode_reply(b'{"type":"replyevent","id":1,"event":%s}' % event.encode())


@pytest.mark.parametrize("kind", typing.get_args(protocol.Request) + typing.get_args(protocol.Reply))
def test_every_kind_is_among_what_is_tried_above(kind: type) -> None:
    tried = REQUESTS if kind in typing.get_args(protocol.Request) else REPLIES
    first = settings(max_examples=5000, phases=(Phase.generate,), deadline=None)  # any will do: it is not made smaller
    assert isinstance(find(tried, lambda message: isinstance(message, kind), settings=first), kind)


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | TEXT | NUMBERS, lambda x: st.lists(x) | st.dictionaries(TEXT, x), max_leaves=5).map(
        lambda v: json.dumps(v).encode()
    )
)
def test_garbage_is_a_wire_error(line: bytes) -> None:
    with pytest.raises(protocol.WireError):
        protocol.decode_reply(line)


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"prefill","id":1,"done":1,"total":2}',
        b'{"type":"prefill","id":1,"done":1,"total":2,"cached":0,"extra":1}',
        b'{"type":"prefill","id":true,"done":1,"total":2,"cached":0}',
        b'{"type":"prefill","id":1.5,"done":1,"total":2,"cached":0}',
        b'{"type":"text","id":1,"text":"a","kind_":"x"}',
        b'{"type":"text","id":1,"text":null}',
        b'{"type":"priced","asker":"draft","id":1,"price":{"prompt_tokens":1,"tokens":1,"disk_bytes":0}}',
        b'{"type":"priced","asker":"someone","id":1,"price":null}',
        b'{"type":"notice"}',
        b'{"type":"loading","stage":"else","done":0,"total":1}',
        b'{"type":"loaded","info":{"name":"x"},"ceiling_tps":NaN}',
        b'{"type":"send","id":1,"messages":[]}',
        b'{"type":["text"]}',
        b"[" * 100_000,
        b'{"type":"loaded","info":{"name":"x"},"ceiling_tps":1e999}',
    ],
)
def test_almost_messages_are_wire_errors(line: bytes) -> None:
    with pytest.raises(protocol.WireError):
        protocol.decode_reply(line)


def test_options_out_of_range_are_wire_errors() -> None:
    line = protocol.encode(Generate(1, (), Sampling(temperature=0.7))).replace(
        b'"temperature":0.7', b'"temperature":-1'
    )
    with pytest.raises(protocol.WireError, match="temperature"):
        protocol.decode_request(line)


@pytest.mark.parametrize("bias", ["[[1]]", "[[1,2,3]]", "[[1.5,2]]", '[["1",2]]', "[1,2]", '{"1":2}'])
def test_a_bias_that_is_no_pairs_is_a_wire_error(bias: str) -> None:
    line = protocol.encode(Generate(1, (), Sampling(logit_bias={7: 0.5}))).replace(b"[[7,0.5]]", bias.encode())
    with pytest.raises(protocol.WireError, match="bias"):
        protocol.decode_request(line)


def test_a_line_over_the_limit_is_a_wire_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LONGEST_LINE", 100)
    with pytest.raises(protocol.WireError, match="too long"):
        protocol.decode_reply(b" " * 101)
