"""Every command on a tiny model, against the public contract."""

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import Run
from tests.engine.seeded import write_model
from tests.tiny import make_tiny, write_safetensors
from tokamac.assets import asset_path
from tokamac.engine.metrics import Metrics

METRICS = {field.name for field in fields(Metrics)}
GUIDE = asset_path("guide", "model")


def lines(text: str) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_ask_streams_an_answer_and_nothing_else(tokamac: Run, tiny: Path) -> None:
    first = tokamac("ask", "Hello", "-m", tiny, "--max-tokens", "24", "--temp", "1", "--seed", "3")
    assert (first.status, first.err) == (0, "")
    assert len(first.out) > 4
    assert first.out.endswith("\n")
    assert not any(char < " " and char not in "\n\t" for char in first.out)
    again = tokamac("ask", "-m", tiny, "--max-tokens", "24", "--temp", "1", "--seed", "3", stdin=b"Hello\n")
    assert again == first  # the same seed, and a pipe is as good as an argument
    other = tokamac("ask", "Hello", "-m", tiny, "--max-tokens", "24", "--temp", "1", "--seed", "4")
    assert other.out != first.out


def test_a_doubtful_model_is_asked_with_a_flag_and_doubted_each_time(tokamac: Run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "doubtful", logits_scaling=2.0)
    refused = tokamac("ask", "Hello", "-m", model)
    assert refused.status == 1
    assert "--unchecked" in refused.err
    done = tokamac("ask", "Hello", "-m", model, "--unchecked", "--max-tokens", "2")
    assert done.status == 0
    assert "unchecked: config.json sets logits_scaling to 2.0" in done.err
    told = tokamac("ask", "Hello", "-m", model, "--unchecked", "--max-tokens", "2", "--json")
    assert "logits_scaling" in json.loads(told.out.splitlines()[-1])["doubts"][0]


def test_ask_json_is_the_contracts_events(tokamac: Run, tiny: Path) -> None:
    done = tokamac("ask", "Hello", "-m", tiny, "--max-tokens", "12", "--temp", "0", "--json", "--system", "Be brief.")
    events = lines(done.out)
    assert (done.status, done.err) == (0, "")
    assert events[0].keys() == {"event", "done", "total", "cached"}
    assert [event["event"] for event in events[:1]] == ["prefill"]
    texts = [event for event in events if event["event"] == "text"]
    assert all(event.keys() == {"event", "text", "kind"} and event["kind"] == "answer" for event in texts)
    last = events[-1]
    assert last.keys() == {"event", "reason", "text", "metrics", "outliers", "diagnosis", "stopped_by"}
    assert (last["event"], last["reason"]) == ("finished", "length")
    assert last["text"] == "".join(event["text"] for event in texts)
    assert last["metrics"].keys() == METRICS
    assert last["metrics"]["generated_tokens"] == 12
    assert last["metrics"]["itl_ms"].keys() == {"p50", "p95", "p99", "max"}
    assert last["metrics"]["expected_tps"] is None


def test_ask_json_has_the_tokens_with_their_log_probabilities(tokamac: Run, tiny: Path) -> None:
    asked = ("ask", "Hello", "-m", tiny, "--max-tokens", "9", "--temp", "0", "--json", "--logprobs")
    events = lines(tokamac(*asked, "2").out)
    tokens = [token for event in events for token in event.get("tokens", ())]
    assert len(tokens) == 9
    for token in tokens:
        assert token.keys() == {"id", "text", "logprob", "top"}
        assert [each.keys() for each in token["top"]] == [{"id", "text", "logprob"}] * 2
        assert token["top"][0]["id"] == token["id"]  # the likeliest was taken
        assert token["top"][0]["logprob"] == token["logprob"] <= 0
    alone = [token for event in lines(tokamac(*asked).out) for token in event.get("tokens", ())]
    assert [{**token, "top": []} for token in tokens] == alone


def test_ask_json_says_what_stopped_it(tokamac: Run, tiny: Path) -> None:
    asked = ("ask", "Hello", "-m", tiny, "--max-tokens", "30", "--temp", "0", "--json")
    whole = lines(tokamac(*asked, "--logprobs").out)
    assert whole[-1]["stopped_by"] is None
    tokens = [token["id"] for event in whole for token in event.get("tokens", ())]
    stop = whole[-1]["text"][4:6]
    assert lines(tokamac(*asked, "--stop", stop).out)[-1]["stopped_by"] == stop
    assert lines(tokamac(*asked, "--stop-token-id", tokens[7]).out)[-1]["stopped_by"] == tokens[7]


def test_a_token_that_the_model_has_not_is_an_error(tokamac: Run, tiny: Path) -> None:
    done = tokamac("ask", "Hello", "-m", tiny, "--logit-bias", "99999999=1")
    assert done.status == 1
    assert "token id 99999999 is not in the vocabulary" in done.err
    assert done.err.count("\n") == 1


def test_ask_of_one_token_has_no_decode_rate(tokamac: Run, tiny: Path) -> None:
    done = tokamac("ask", "Hello", "-m", tiny, "--max-tokens", "1", "--json")
    metrics = lines(done.out)[-1]["metrics"]
    assert (metrics["decode_tps"], metrics["itl_ms"]) == (None, None)


def test_ask_verbose_measures_on_stderr(tokamac: Run, tiny: Path) -> None:
    done = tokamac("ask", "Hello", "-m", tiny, "--max-tokens", "8", "-v")
    assert "TTFT" in done.err
    assert done.err.strip().splitlines()[-1].endswith(".")
    assert "TTFT" not in done.out


def test_a_prompt_longer_than_the_context_says_by_how_much(tokamac: Run, tiny: Path) -> None:
    for flags in ([], ["--json"]):
        done = tokamac("ask", "x" * 2000, "-m", tiny, *flags)
        assert done.status == 1
        assert "512" in done.err
        assert "2,0" in done.err
        assert done.err.count("\n") == 1
    (error,) = lines(done.out)
    assert error.keys() == {"event", "error", "hint"}
    assert error["event"] == "error"


def test_a_prompt_that_does_not_fit_may_lose_its_middle(tokamac: Run, tiny: Path) -> None:
    flags = ("-m", tiny, "--max-tokens", "8", "--on-full", "truncate-middle")
    done = tokamac("ask", "x" * 2000, *flags)
    assert done.status == 0
    assert "of its middle were left out" in done.err
    first, *_, last = lines(tokamac("ask", "x" * 2000, *flags, "--json").out)
    assert first["event"] == "truncated"
    assert first["tokens"] > 1400
    assert last["event"] == "finished"


def test_a_reply_that_the_context_cuts_off_may_be_an_error(tokamac: Run, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "short", context=64)
    done = tokamac("ask", "Hello", "-m", model, "--on-full", "error", "--json", "--temp", "0")
    *_, before, last = lines(done.out)
    assert (done.status, before["event"], last["event"]) == (1, "finished", "error")
    assert "--on-full" in last["hint"]


def broken(tiny: Path, folder: Path) -> Path:
    return Path(shutil.copytree(tiny, folder))


def test_broken_models_are_one_line_and_exit_1(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    without = broken(tiny, tmp_path / "without")
    (without / "tokenizer.json").unlink()
    nan = make_tiny(tmp_path / "nan")
    write_safetensors(nan / "model.safetensors", {"lm_head.weight": np.full((260, 128), np.nan, np.float32)})
    cut = broken(tiny, tmp_path / "cut")
    with (cut / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    template = broken(tiny, tmp_path / "template")
    config = json.loads((template / "tokenizer_config.json").read_text())
    (template / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": "{{ raise_exception('no') }}"})
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    foreign = broken(tiny, tmp_path / "foreign")
    (foreign / "config.json").write_text('{"model_type": "unheard_of"}')
    for folder in (without, nan, cut, template, empty, foreign):
        done = tokamac("ask", "Hello", "-m", folder)
        assert done.status == 1, folder.name
        assert done.err.startswith("tokamac: "), folder.name
        assert done.err.count("\n") == 1, folder.name
        assert "this should not happen" not in done.err, done.err
        assert done.out == "", folder.name


def test_a_flag_that_can_not_be_honoured_is_an_error(tokamac: Run, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "odd", head_size=48)
    done = tokamac("ask", "Hello", "-m", folder, "--kv-bits", "8")
    assert done.status == 1
    assert "48" in done.err


def test_kv_flags_are_honoured(tokamac: Run, tiny: Path) -> None:
    def kv_bytes(*flags: str) -> int:
        done = tokamac("ask", "Hello", "-m", tiny, "--max-tokens", "300", "--json", *flags)
        assert done.status == 0, done.err
        result: int = lines(done.out)[-1]["metrics"]["kv_bytes_per_step"]
        return result

    plain = kv_bytes()
    assert kv_bytes("--kv-bits", "4") < plain
    assert kv_bytes("--kv-bits", "8,4", "--no-prompt-cache") < plain
    assert kv_bytes("--kv-window", "16", "--kv-keep", "2") < plain


def test_inspect_json_is_the_contracts_object(tokamac: Run, tiny: Path) -> None:
    done = tokamac("inspect", tiny, "--json", "--context", "256")
    (found,) = lines(done.out)
    assert (done.status, done.err) == (0, "")
    assert list(found) == [
        *(
            "model",
            "architecture",
            "parameters",
            "weight_bytes",
            "bits_per_weight",
            "kv_bytes_per_token",
            "bytes_per_step",
        ),
        *("chip", "ceiling_tps", "expected_tps", "prefill_tps", "ttft_s", "memory"),
    ]
    assert found["chip"].keys() == {"name", "gpu_cores", "bandwidth_gbs", "fp16_tflops"}
    assert found["memory"].keys() == {"weights", "kv", "working", "total", "budget", "fits", "from_others"}
    assert found["kv_bytes_per_token"] == 2 * 2 * 128 * 4  # keys and values × layers × width × float32
    assert found["memory"]["kv"] == 256 * found["kv_bytes_per_token"]
    smaller = lines(tokamac("inspect", tiny, "--json", "--context", "256", "--kv-bits", "8", "--kv-window", "64").out)[
        0
    ]
    assert smaller["memory"]["kv"] < found["memory"]["kv"] / 4


def test_inspect_for_people(tokamac: Run, tiny: Path) -> None:
    shown = tokamac("inspect", tiny)
    assert shown.status == 0
    assert all(part in shown.out for part in ("embedding", "attention", "32.00", "KV cache", "ceiling", "fits"))
    assert "512 tokens of context" in shown.err


def test_convert_then_everything_with_the_result(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    planned = tokamac("convert", tiny, "-o", out, "--dry-run")
    assert planned.status == 0
    assert not out.exists()
    done = tokamac("convert", tiny, "-o", out)
    assert done.status == 0
    assert f"next: tokamac chat {out}" in done.out
    assert "converting 100 %" in done.err
    assert tokamac("ask", "Hello", "-m", out, "--max-tokens", "3").status == 0
    assert lines(tokamac("inspect", out, "--json").out)[0]["bits_per_weight"] < 6
    again = tokamac("convert", tiny, "-o", out)  # the very same is done already
    assert (again.status, "finished before" in again.err) == (0, True)
    other = tokamac("convert", tiny, "-o", out, "--bits", "8")
    assert other.status == 1
    assert "--overwrite" in other.err
    assert tokamac("convert", tiny, "-o", out, "--overwrite", "--bits", "8").status == 0


def test_convert_json_is_the_contracts_lines(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    done = tokamac("convert", tiny, "-o", tmp_path / "small", "--json")
    *before, last = lines(done.out)
    steps = [line for line in before if line["event"] == "tensor"]
    assert done.status == 0
    assert all(
        line.startswith("warning: ") for line in done.err.splitlines()
    )  # seeded weights at 4 bits say other things
    assert all(step.keys() == {"event", "name", "done", "total"} for step in steps)
    assert [step["done"] for step in steps] == list(range(1, len(steps) + 1))
    assert last.keys() == {
        *("event", "path", "weight_bytes", "bits_per_weight", "source_bytes", "seconds", "peak_memory_bytes", "quality")
    }
    assert last["event"] == "converted"
    assert {"relative_error", "kl", "perplexity_ratio"} <= last["quality"].keys()
    (plan,) = lines(tokamac("convert", tiny, "-o", tmp_path / "other", "--json", "--dry-run").out)
    assert plan["event"] == "plan"
    assert plan["weight_bytes"] == last["weight_bytes"]


def test_the_model_picked_last_is_the_default(
    tokamac: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokamac.app import settings

    settings.save(settings.default_path(), settings.Settings(model=str(tiny)))
    assert tokamac("ask", "Hello", "--max-tokens", "2").status == 0


@pytest.mark.skipif(not GUIDE.is_dir(), reason="the embedded model is not built yet")
def test_the_embedded_model_answers(tokamac: Run) -> None:
    done = tokamac("ask", "What is Tokamac?", "--temp", "0")
    assert done.status == 0
    assert "Tokamac" in done.out
