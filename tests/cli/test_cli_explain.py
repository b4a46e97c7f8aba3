"""``ask -v`` and ``-vv``: what a reply cost, why, and the arithmetic, on stderr; with the model that ships."""

import json
from collections.abc import Callable
from typing import Any

from tokamac.engine.perf.diagnosis import Diagnosis

Run = Callable[..., Any]
ASK = ("ask", "Why is decode memory-bound?", "--max-tokens", "24", "--temp", "0")


def test_v_says_in_one_sentence_where_the_time_went(tokamac: Run) -> None:
    done = tokamac(*ASK, "-v")
    assert done.status == 0
    *figures, sentence = done.err.strip().splitlines()
    assert " in all, of which " in sentence
    assert sentence.endswith(".")
    assert figures[0].startswith("prompt")
    assert "in all, of which" not in done.out


def test_vv_adds_the_whole_with_the_numbers_put_in(tokamac: Run) -> None:
    done = tokamac(*ASK, "-vv")
    lines = done.err.strip().splitlines()
    assert sum(line.endswith(".") and " in all, of which " in line for line in lines) == 1
    for begin in ("wait ", "prefill ", "decode ", "machine "):
        assert any(line.startswith(begin) for line in lines), begin
    (ceiling,) = (line for line in lines if line.startswith("decode    ceiling"))
    assert "bandwidth ÷ bytes a step" in ceiling
    assert not any("None" in line or "{" in line for line in lines)


def test_json_carries_the_diagnosis_beside_the_metrics(tokamac: Run) -> None:
    last = json.loads(tokamac(*ASK, "--json").out.splitlines()[-1])
    assert last["diagnosis"].keys() == set(Diagnosis.__dataclass_fields__)
    parts = {part["name"]: part["seconds"] for part in last["diagnosis"]["parts"]}
    assert abs(sum(parts.values()) - last["metrics"]["total_s"]) < 1e-6
