"""Every command on a tiny model, against the public contract; with few open files and little address space."""

import ctypes
import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.app.commands.conftest import Run
from tests.engine.helpers import write_model
from tests.quant.models import make_source
from tests.tiny import make_tiny, write_safetensors
from tokamac.engine.errors import MemoryLimitError
from tokamac.engine.files import WANTED, raise_open_files
from tokamac.engine.metrics import Metrics
from tokamac.engine.perf import memory
from tokamac.engine.perf.diagnosis import Diagnosis

METRICS = {field.name for field in fields(Metrics)}


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
    assert last.keys() == {"event", "reason", "text", "metrics", "outliers", "diagnosis", "stopped_by", "cache"}
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


def test_ask_follows_a_schema(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3}))
    asked = ("ask", "Hello", "-m", tiny, "--temp", "1", "--seed", "1", "--schema", file)
    assert 2 <= len(json.loads(tokamac(*asked).out)) <= 3
    for text, why in (("[]", "not a JSON object"), ('{"type": "no"}', "can't be followed"), (None, "there is no file")):
        file.unlink() if text is None else file.write_text(text)
        refused = tokamac(*asked)
        assert refused.status in (1, 2)
        assert why in refused.err


def test_ask_json_says_what_stopped_it(tokamac: Run, tiny: Path) -> None:
    asked = ("ask", "Hello", "-m", tiny, "--max-tokens", "30", "--temp", "0", "--json")
    whole = lines(tokamac(*asked, "--logprobs").out)
    assert whole[-1]["stopped_by"] is None
    tokens = [token["id"] for event in whole for token in event.get("tokens", ())]
    stop = whole[-1]["text"][4:6]
    assert lines(tokamac(*asked, "--stop", stop).out)[-1]["stopped_by"] == stop
    assert lines(tokamac(*asked, "--stop-token-id", tokens[7]).out)[-1]["stopped_by"] == tokens[7]


def test_ask_verbose_measures_on_stderr(tokamac: Run, tiny: Path) -> None:
    done = tokamac("ask", "Hello", "-m", tiny, "--max-tokens", "8", "-v")
    assert "first token" in done.err
    assert done.err.strip().splitlines()[-1].endswith(".")
    assert "first token" not in done.out


def test_a_prompt_that_does_not_fit_may_lose_its_middle(tokamac: Run, tiny: Path) -> None:
    flags = ("-m", tiny, "--max-tokens", "8", "--on-full", "truncate-middle")
    done = tokamac("ask", "x" * 2000, *flags)
    assert done.status == 0
    assert "of its middle were left out" in done.err
    first, *_, last = lines(tokamac("ask", "x" * 2000, *flags, "--json").out)
    assert first["event"] == "truncated"
    assert first["tokens"] > 1400
    assert last["event"] == "finished"


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
    assert (again.status, "already complete" in again.err) == (0, True)
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


def test_the_last_model_is_the_default(
    tokamac: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokamac.app import settings

    settings.save(settings.default_path(), settings.Settings(model=str(tiny)))
    assert tokamac("ask", "Hello", "--max-tokens", "2").status == 0


# `ask -v` and `-vv`: what a reply cost, why, and the arithmetic, on stderr; with the model that ships.

ExplainRun = Callable[..., Any]
ASK = ("ask", "Why is decode memory-bound?", "--max-tokens", "24", "--temp", "0")


def test_v_says_in_one_sentence_where_the_time_went(tokamac: ExplainRun) -> None:
    done = tokamac(*ASK, "-v")
    assert done.status == 0
    *figures, sentence = done.err.strip().splitlines()
    assert sentence.startswith("Took ")
    assert sentence.endswith(".")
    assert figures[0].startswith("prompt")
    assert "Took " not in done.out


def test_vv_adds_the_whole_with_the_numbers_put_in(tokamac: ExplainRun) -> None:
    done = tokamac(*ASK, "-vv")
    lines = done.err.strip().splitlines()
    assert sum(line.endswith(".") and line.startswith("Took ") for line in lines) == 1
    for begin in ("wait ", "prefill ", "decode ", "machine "):
        assert any(line.startswith(begin) for line in lines), begin
    (ceiling,) = (line for line in lines if line.startswith("decode    ceiling"))
    assert "bandwidth ÷ bytes a step" in ceiling
    assert not any("None" in line or "{" in line for line in lines)


def test_json_carries_the_diagnosis_beside_the_metrics(tokamac: ExplainRun) -> None:
    last = json.loads(tokamac(*ASK, "--json").out.splitlines()[-1])
    assert last["diagnosis"].keys() == set(Diagnosis.__dataclass_fields__)
    parts = {part["name"]: part["seconds"] for part in last["diagnosis"]["parts"]}
    assert list(parts) == ["start", "load", "wait", "prefill", "decode"]
    of_reply = sum(parts.values()) - parts["start"] - parts["load"]
    assert of_reply >= last["metrics"]["total_s"] - 1e-6, "what passed between loading and the prompt counts as waiting"


# Few open files allowed: the soft limit is raised as far as the hard one lets it, and a low hard one stops nothing
# that fits.

CAP_SYS_RESOURCE = PR_CAPBSET_DROP = 24


def limited(soft: int, hard: int, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a command that may have so many files open, and can't raise the hard limit even where it is root."""

    def before() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_RESOURCE, 0, 0, 0)

    given = [sys.executable, *map(str, command)]
    return subprocess.run(given, preexec_fn=before, capture_output=True, text=True, check=False, timeout=200)


def tokamac(soft: int, hard: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    return limited(soft, hard, "-m", "tokamac.app.cli", *arguments)


@pytest.fixture(scope="module")
def many_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a hundred shards: a lazy load holds each of them open."""
    return make_source(tmp_path_factory.mktemp("many"), "llama", shards=100, num_hidden_layers=12)


def test_a_checkpoint_of_many_shards_is_converted_at_a_low_soft_limit(many_shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = tokamac(64, 4000, "convert", many_shards, "-o", out)
    assert done.returncode == 0, done.stderr
    assert (out / "config.json").is_file()


def test_a_hard_limit_that_is_too_low_for_the_shards_is_said(many_shards: Path, tmp_path: Path) -> None:
    done = tokamac(64, 64, "convert", many_shards, "-o", tmp_path / "out")
    assert done.returncode == 1
    assert "this should not happen" not in done.stderr
    assert "64 files" in done.stderr
    assert "100 shards" in done.stderr
    assert "ulimit -n" in done.stderr


def test_everything_works_with_a_low_hard_limit(tmp_path: Path) -> None:
    """mlx-lm asks for 4,096 when it is imported, and would fail."""
    asked = [
        ["ask", "--json", "--max-tokens", "3", "Hello"],
        ["inspect", "guide"],
        ["convert", "guide", "-o", str(tmp_path / "out"), "--dequantize", "--no-verify"],
    ]
    done = limited(256, 512, "-c", f"from tokamac.app import cli; print([cli.main(each) for each in {asked}])")
    assert done.stdout.splitlines()[-1] == "[0, 0, 0]", done.stderr
    assert '"event": "finished"' in done.stdout


def test_mlx_lm_lowers_no_limit() -> None:
    """Of (soft, hard) limits: what the process may have once mlx-lm is imported."""
    code = (
        "import resource; from tokamac.engine.mlx_lm_package import import_mlx_lm\n"
        "before = resource.setrlimit; import_mlx_lm(); import mlx_lm\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE), resource.setrlimit is before)"
    )
    assert limited(3000, 4000, "-c", code).stdout.split() == ["3000", "4000", "True"]
    assert limited(100, 4000, "-c", code).stdout.split() == ["2048", "4000", "True"]
    assert limited(100, 300, "-c", code).stdout.split() == ["300", "300", "True"]


def test_the_chats_engine_raises_its_own_limit() -> None:
    code = (
        "import os, resource, sys; from tokamac.app.backend import child\n"
        "child.Child.run = lambda *_: os.write(2, str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]).encode())\n"
        "child.serve()"
    )
    assert limited(100, 4000, "-c", code).stderr == "4000"


def test_a_higher_limit_stays_and_one_that_cannot_be_raised_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def refused(_: int, limits: tuple[int, int]) -> None:
        asked.append(limits)
        raise ValueError("not allowed")

    found = (0, 0)
    monkeypatch.setattr(resource, "setrlimit", refused)
    monkeypatch.setattr(resource, "getrlimit", lambda _: found)
    for found in ((WANTED + 1, 2 * WANTED), (resource.RLIM_INFINITY, resource.RLIM_INFINITY), (256, 256)):  # noqa: B007
        raise_open_files()
    assert asked == []
    for found in ((256, 4096), (256, resource.RLIM_INFINITY)):  # noqa: B007
        raise_open_files()
    assert asked == [(4096, 4096), (WANTED, resource.RLIM_INFINITY)]


# A process that may take little address space (`ulimit -v`): one line says so, whatever it was that did not fit.

linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS does not enforce a bound of address space")


def bounded(megabytes: int, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokamac.app.cli", *command],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (megabytes * 1000_000,) * 2),
    )


@linux
@pytest.mark.parametrize("command", [["ask", "hi", "-m"], ["inspect"], ["convert", "--dry-run"]], ids=lambda c: c[0])
def test_too_little_is_said_in_a_line(tmp_path: Path, command: list[str]) -> None:
    folder = make_tiny(tmp_path)
    done = bounded(150, *command, str(folder))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"tokamac: this process may take \d+ MB more of address space, .*ulimit -v.*\n", done.stderr)


@linux
def test_what_it_may_take_bounds_the_memory_for_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = 10**15
    with monkeypatch.context() as patched:
        patched.setattr(resource, "getrlimit", lambda _: (bound, bound))
        space = memory.space_left()
        assert 0 < space < bound
        bound = resource.RLIM_INFINITY
        assert memory.space_left() is None
    monkeypatch.setattr(memory, "space_left", lambda: 123 << 20)
    assert memory.system_limit() == memory.Limit(
        max((123 << 20) + memory.held(), memory.held() + memory.ALLOWANCE), "address space"
    )


def test_the_check_is_for_what_is_not_loaded_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "space_left", lambda: 5_000_000)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    with pytest.raises(MemoryLimitError, match="5 MB more of address space"):
        memory.check_address_space()
    monkeypatch.setitem(sys.modules, "mlx.core", sys)
    memory.check_address_space()
