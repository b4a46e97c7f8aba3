"""The picker's speeds name the context they are for, and the inspection's table says why rows are alike or unknown."""

from dataclasses import replace

from tokamac.app.backend.protocol import Figures, ModelLine
from tokamac.app.chat.models import ModelRow
from tokamac.app.commands.inspect import cases_report
from tokamac.app.tui.screens.model import detail
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.machine import elsewhere
from tokamac.engine.perf.what_if import UNMEASURED_KV, WhatIfCase, WhatIfOutcome

FIGURES = Figures(ceiling_tps=3751.0, expected_tps=106.0, ttft_s=1.09, reason="needs 51.8 MB of 22.9 GB")
LINE = ModelLine("guide", None, 5_770_496, 5_770_496, "runs well", FIGURES, 4.5, 4096)


def test_the_speeds_of_a_model_are_said_with_the_context_that_they_are_for() -> None:
    said = detail(ModelRow("guide", "embedded", 3_270_000, "embedded", on_disk=True, line=LINE), "").plain
    assert said.endswith("at 4,096 tokens: expected 106 tok/s, ceiling 3,751 tok/s, first token 1.1 s")
    assert "needs 51.8 MB of 22.9 GB · at" in said


def test_what_is_to_be_known_of_all_cases_stands_once_below_their_table() -> None:
    place = elsewhere("M4 Max", 40, 64)
    base = WhatIfOutcome(WhatIfCase(), place, ceiling_tps=3751.0, expected_tps=106.0, ttft_s=0.4)
    packed = [WhatIfOutcome(WhatIfCase(kv=KVSpec(8, bits)), place, reason=UNMEASURED_KV) for bits in (8, 4)]
    *_, bits, kv = cases_report([base, *packed], "unpacked").splitlines()
    assert "unpacks weights to 32 bits" in bits
    assert kv == f"unknown: {UNMEASURED_KV}"
    assert len(cases_report([base], "stored").splitlines()) == 2


def test_a_model_that_could_see_is_said_to_be_text_only() -> None:
    row = ModelRow("guide", "embedded", 3_270_000, "embedded", on_disk=True, line=replace(LINE, text_only=True))
    assert "text only" in detail(row, "").plain
    assert "text only" not in detail(replace(row, line=LINE), "").plain
