"""Every message survives the wire; nothing else gets through it."""

import dataclasses
import json
import typing
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from tokamac.app.backend import wire
from tokamac.app.backend.requests import Asker
from tokamac.app.backend.whatif import (
    Answer,
    CaseLine,
    Change,
    ChipLine,
    CurvePoint,
    Figures,
    ModelLine,
    Question,
    Roof,
    Spot,
    Wanted,
    Where,
)
from tokamac.engine.events import Live, Message, Squeezed
from tokamac.engine.limits.diagnosis import Diagnosis, Part, Waits
from tokamac.engine.limits.gaps import Cause, Outlier, Throttle
from tokamac.engine.limits.metrics import Gaps, Metrics
from tokamac.engine.limits.remedies import Remedy, RemedyName
from tokamac.engine.limits.terms import Concern, Term, Unit
from tokamac.engine.options import STAGES, KVSpec, Sampling
from tokamac.engine.price import Price

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
    st.builds(Part, st.just("wait"), FLOATS),
    st.builds(Part, st.just("prefill"), FLOATS, st.sampled_from([None, *typing.get_args(Waits)]), FLOATS, st.none()),
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
    st.builds(wire.Load, TEXT, KV, st.booleans()),
    st.builds(wire.Send, NUMBERS, st.lists(MESSAGE, max_size=4).map(tuple), SAMPLING),
    st.builds(wire.Cancel, NUMBERS),
    st.builds(wire.Warm, st.lists(MESSAGE, max_size=4).map(tuple)),
    st.builds(wire.AskPrice, ASKER, NUMBERS, st.lists(MESSAGE, max_size=4).map(tuple)),
    st.builds(wire.AskCount, NUMBERS, TEXT),
    st.builds(wire.AskWhatIf, NUMBERS, QUESTION),
    st.just(wire.Unload()),
    st.just(wire.Quit()),
)
REPLIES = st.one_of(
    st.builds(wire.Loading, st.sampled_from(["download", "weights"]), NUMBERS, st.none() | NUMBERS),
    st.builds(wire.Loaded, st.builds(wire.ModelInfo, TEXT), st.none() | FLOATS),
    st.just(wire.Unloaded()),
    st.builds(wire.LeftOut, NUMBERS, NUMBERS),
    st.builds(
        wire.ShortOfMemory, NUMBERS, st.builds(Squeezed, NUMBERS, st.none() | NUMBERS, NUMBERS, NUMBERS, NUMBERS)
    ),
    st.builds(wire.Prefill, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.builds(wire.Text, NUMBERS, TEXT, st.sampled_from(["answer", "thinking"])),
    st.builds(wire.Stats, NUMBERS, LIVE),
    st.builds(
        wire.Done,
        NUMBERS,
        st.sampled_from(["stop", "length", "cancelled"]),
        TEXT,
        TEXT,
        METRICS,
        outliers=OUTLIERS,
        diagnosis=st.none() | DIAGNOSIS,
    ),
    st.builds(wire.Counted, NUMBERS, st.none() | NUMBERS),
    st.builds(wire.Priced, ASKER, NUMBERS, st.none() | st.builds(Price, NUMBERS, NUMBERS, NUMBERS, st.none() | FLOATS)),
    st.builds(wire.WhatIf, NUMBERS, st.none() | ANSWER, TEXT, NUMBERS, NUMBERS),
    st.builds(wire.Notice, TEXT),
    st.just(wire.Heartbeat()),
    st.builds(wire.Failed, st.none() | NUMBERS, TEXT, TEXT),
)


@settings(max_examples=60, deadline=None)
@given(REQUESTS)
def test_requests_round_trip(request: wire.Request) -> None:
    line = wire.encode(request)
    assert line.count(b"\n") == 1
    assert wire.decode_request(line) == request


@settings(max_examples=100, deadline=None)
@given(REPLIES)
def test_replies_round_trip(reply: wire.Reply) -> None:
    assert wire.decode_reply(wire.encode(reply)) == reply


@pytest.mark.parametrize("kind", typing.get_args(wire.Request) + typing.get_args(wire.Reply))
def test_every_kind_is_among_what_is_tried_above(kind: type) -> None:
    tried = REQUESTS if kind in typing.get_args(wire.Request) else REPLIES
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
    with pytest.raises(wire.WireError):
        wire.decode_reply(line)


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
    with pytest.raises(wire.WireError):
        wire.decode_reply(line)


def test_options_out_of_range_are_wire_errors() -> None:
    line = wire.encode(wire.Send(1, (), Sampling(temperature=0.7))).replace(b'"temperature":0.7', b'"temperature":-1')
    with pytest.raises(wire.WireError, match="temperature"):
        wire.decode_request(line)


@pytest.mark.parametrize("bias", ["[[1]]", "[[1,2,3]]", "[[1.5,2]]", '[["1",2]]', "[1,2]", '{"1":2}'])
def test_a_bias_that_is_no_pairs_is_a_wire_error(bias: str) -> None:
    line = wire.encode(wire.Send(1, (), Sampling(logit_bias={7: 0.5}))).replace(b"[[7,0.5]]", bias.encode())
    with pytest.raises(wire.WireError, match="bias"):
        wire.decode_request(line)


def test_a_line_over_the_limit_is_a_wire_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LONGEST_LINE", 100)
    with pytest.raises(wire.WireError, match="too long"):
        wire.decode_reply(b" " * 101)
