"""``ask --each``: lines in, results out in the same order, each line alone; resuming, interrupting. And ``ask -n``."""

import json
import os
import pty
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.app.commands.conftest import Run
from tests.waiting import PATIENCE_S
from tokamac.app.commands import prompts
from tokamac.app.commands.prompts import (
    EachOptions,
    EachRun,
    Earlier,
    InputError,
    PromptLine,
    left_out,
    prompt_lines,
    read_earlier,
)
from tokamac.app.text.terminal import Progress
from tokamac.engine import Engine, Message, Sampling, TextChunk
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import TemplateOptions

METRICS = {field.name for field in fields(Metrics)}
FLAGS = ("--max-tokens", "8", "--temp", "1", "--seed", "3")

Start = Callable[..., "subprocess.Popen[str]"]
Line = dict[str, Any]


def lines(text: str) -> list[Line]:
    return [json.loads(line) for line in text.splitlines()]


def written(path: Path, *given: Line | str) -> Path:
    path.write_text("".join(f"{prompts if isinstance(prompts, str) else json.dumps(prompts)}\n" for prompts in given))
    return path


def result(index: int, text: str = "done", name: str | int | None = None) -> Line:
    return {"id": name, "index": index, "text": text, "reason": "stop", "metrics": {}}


# Reading ------------------------------------------------------------------------------------------------------------------------


def parsed(data: bytes, name: str = "prompts", options: EachOptions = EachOptions()) -> list[PromptLine]:  # noqa: B008
    pieces = iter([data[i : i + 7] for i in range(0, len(data), 7)])
    return list(prompt_lines(prompts.split_lines(lambda _: next(pieces, b"")), name, options))


def test_plain_lines_are_prompts_and_blank_ones_are_none() -> None:
    found = parsed("\ufeffone\r\n\n  \nzwei ü\n{third}".encode())
    assert [line.messages for line in found] == [(Message("user", text),) for text in ("one", "zwei ü", "{third}")]
    assert [(line.index, line.id, line.error) for line in found] == [(i, None, None) for i in range(3)]


def test_json_lines_have_their_own_sampling_over_what_the_flags_say() -> None:
    options = EachOptions(before="File:", system="Brief.", sampling=Sampling(temperature=0.5, seed=9))
    first, second = parsed(
        b'{"id": 4, "prompt": "a", "temperature": 0, "top_p": null, "stop": "END", "logit_bias": {"65": -1}}\n'
        b'{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "b"}]}\n',
        options=options,
    )
    assert first.id == 4
    assert first.messages == (Message("system", "Brief."), Message("user", "File:\n\na"))
    assert first.sampling == Sampling(temperature=0, seed=9, stop=("END",), logit_bias={65: -1})
    assert second.messages == (Message("system", "S"), Message("user", "File:\n\nb"))
    assert second.sampling == options.sampling


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "it is not JSON"), ("[" * 100_000, "it is not JSON"), ("9" * 5000, "too many digits"),
        ("3", "JSON object"), ("{}", "neither prompt nor messages"), ('{"prompt": "a", "messages": []}', "both"),
        ('{"prompt": 3}', "its prompt is not a string"), ('{"prompt": "  "}', "its prompt is empty"),
        ('{"prompt": "a", "temp": 1}', "Did you mean temperature?"),
        ('{"prompt": "a", "max_token": 1}', "Did you mean max_tokens?"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature 'hot' is not a number"),
        ('{"prompt": "a", "top_p": 7}', "out of range"),
        ('{"prompt": "a", "seed": true}', "seed True is not an integer"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "token id 'x'"),
        ('{"prompt": "a", "id": [1]}', "its id is not a string"),
        ('{"messages": [{"role": 7, "content": "a"}]}', "the role of a message is a int"),
        ('{"messages": [{"role": "user"}]}', "a message has no content"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "not a text"),
        ('{"messages": [{"role": "user", "content": "a", "image": 1}]}', "no field 'image'"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "it has no message of the user"),
        ('{"messages": "a"}', "not a list"),
    ],
)  # fmt: skip
def test_a_line_that_can_not_be_used_says_why_and_stands_alone(line: str, said: str) -> None:
    before, bad, after = parsed(f'{{"prompt": "a"}}\n{line}\n{{"prompt": "b"}}\n'.encode())
    assert (before.error, after.error) == (None, None)
    assert said in bad.error.one_line()
    assert bad.error.message.startswith("line 2: ")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["user", "9" * 5000]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.just("9" * 5000), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(prompts.FIELDS), VALUES, max_size=4))
@example({"prompt": "a", "logit_bias": {"9" * 5000: 1}})
@example({"prompt": "a", "order": [["top_k"]]})
def test_whatever_a_line_holds_it_fails_alone_at_most(line: Line) -> None:
    (found,) = parsed(json.dumps(line).encode(), "p.jsonl")
    assert (found.error is None) == bool(found.messages)


def test_a_bad_field_does_not_hide_the_id() -> None:
    (bad,) = parsed(b'{"id": "x", "prompt": "a", "temp": 1}')
    assert (bad.id, bad.error is None) == ("x", False)


def test_a_name_says_that_lines_are_json() -> None:
    (bad,) = parsed(b"hello\n", "prompts.jsonl")
    assert bad.error is not None


def test_a_line_of_no_text_and_one_without_an_end_fail_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "LONGEST_INPUT", 20)
    found = parsed(b"good\n" + b"x" * 21 + b"\n\xff\xfe\n" + b"y" * 20)
    assert ["" if line.error is None else line.error.message[8:] for line in found] == [
        "", "it is longer than 0 MB", "it is not UTF-8 text", "",
    ]  # fmt: skip


@pytest.mark.parametrize("data", [b'[{"prompt": "a"}]', b'[\n{"prompt": "a"}\n]', "hello".encode("utf-16")])
def test_what_is_no_such_input_at_all(data: bytes) -> None:
    with pytest.raises(InputError):
        parsed(data)


# Earlier results ----------------------------------------------------------------------------------------------------------------


def test_what_has_a_result_is_left_out_and_what_failed_is_not(tmp_path: Path) -> None:
    out = written(
        tmp_path / "out", result(0), {"id": None, "index": 1, "error": "e", "hint": ""}, result(5, name="x"),
        result(6, name="x"), result(7, name=3),
    )  # fmt: skip
    earlier = read_earlier(out)
    assert (earlier.damaged, earlier.whole_bytes) == (0, out.stat().st_size)
    source = parsed(b'{"prompt":"0"}\n{"prompt":"1"}\n' + b'{"prompt":"x","id":"x"}\n' * 3 + b'{"prompt":"3","id":"3"}')
    kept = [line for line in left_out(iter(source), earlier) if line is not None]
    assert [(line.index, line.id) for line in kept] == [(1, None), (4, "x"), (5, "3")]


def test_a_line_that_was_cut_off_is_no_result(tmp_path: Path) -> None:
    whole = f"{json.dumps(result(0))}\n"
    cut = json.dumps(result(1))
    for length in range(1, len(cut)):
        (tmp_path / "out").write_text(whole + cut[:length])
        earlier = read_earlier(tmp_path / "out")
        assert earlier == Earlier(Counter({("index", 0): 1}), tmp_path / "out", 1, len(whole))
    (tmp_path / "out").write_text(whole + cut)  # only its end is missing
    assert read_earlier(tmp_path / "out") == Earlier(
        Counter({("index", 0): 1, ("index", 1): 1}), tmp_path / "out", 0, len(whole + cut), ends_line=False
    )


@pytest.mark.parametrize("text", ["hello\n", "hello", '{"prompt": "a"}\n'])
def test_another_file_is_no_file_of_results_and_stays_as_it_is(tokamac: Run, tmp_path: Path, text: str) -> None:
    other = tmp_path / "other"
    other.write_text(text)
    prompts = written(tmp_path / "prompts", "Hello")
    done = tokamac("ask", "--each", prompts, "--resume", other, "-m", tmp_path)
    assert (done.status, done.out) == (1, "")
    assert other.read_text() == text


# Running ------------------------------------------------------------------------------------------------------------------------


def test_results_are_those_of_each_prompt_alone_in_order(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    asked = [
        {"id": "a", "prompt": "Hello", "max_tokens": 20},
        {"prompt": "World", "seed": 5},
        "no json",
        {"id": 3, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0},
    ]
    done = tokamac("ask", "--each", written(tmp_path / "p.jsonl", *asked), "-m", tiny, *FLAGS, "--parallel", "3")
    found = lines(done.out)
    assert done.status == 1
    assert [(prompts["id"], prompts["index"]) for prompts in found] == [("a", 0), (None, 1), (None, 2), (3, 3)]
    assert found[2].keys() == {"id", "index", "error", "hint"}
    assert found[0].keys() == {"id", "index", "text", "reason", "metrics"}
    assert found[0]["metrics"].keys() == METRICS
    for index, prompt, flags in (
        (0, "Hello", ("--max-tokens", "20", "--temp", "1", "--seed", "3")),
        (1, "World", ("--max-tokens", "8", "--temp", "1", "--seed", "5")),
        (3, "Hello", ("--max-tokens", "8", "--temp", "0")),
    ):
        alone = lines(tokamac("ask", prompt, "-m", tiny, "--json", *flags).out)[-1]
        assert found[index]["text"] == alone["text"]
        assert found[index]["reason"] == alone["reason"] == "length"
    assert done.err == "tokamac: 1 of 4 prompts failed. Their results say why; --resume tries them again.\n"


def test_standard_input_files_and_a_system_prompt(tokamac: Run, tiny: Path, notes: Path) -> None:
    flags = ("-f", notes, "--system", "Be brief.", "-m", tiny, "--max-tokens", "4", "--temp", "0", "--logprobs", "1")
    done = tokamac("ask", "--each", "-", *flags, stdin=b"one\ntwo\n")
    assert (done.status, done.err) == (0, "")
    first, second = lines(done.out)
    assert (len(first["tokens"]), len(first["tokens"][0]["top"])) == (4, 1)
    alone = lines(tokamac("ask", "two", *flags, "--json").out)[-1]
    assert (second["text"], second["metrics"]["prompt_tokens"]) == (alone["text"], alone["metrics"]["prompt_tokens"])
    # What all have in common is computed once, by whichever came first.
    assert max(line["metrics"]["cached_tokens"] for line in (first, second)) > 30


def test_what_a_line_lost_of_its_prompt_is_in_its_result(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    turns = [{"role": role, "content": "x" * 150} for role in ("user", "assistant", "user", "assistant", "user")]
    prompts = written(tmp_path / "p.jsonl", {"messages": turns}, {"prompt": "short"})
    done = tokamac("ask", "--each", prompts, "-m", tiny, *FLAGS, "--on-full", "truncate-middle")
    long, short = lines(done.out)
    assert long["truncated"]["tokens"] > 200
    assert "truncated" not in short


def test_no_prompts_at_all_is_said(tokamac: Run, tiny: Path) -> None:
    done = tokamac("ask", "--each", "-", "-m", tiny, stdin=b"\n\n")
    assert (done.status, done.out, done.err) == (0, "", "note: standard input has no prompts\n")


def test_no_model_is_loaded_where_nothing_is_left(tokamac: Run, tmp_path: Path) -> None:
    prompts, out = written(tmp_path / "p", "one", "two"), written(tmp_path / "out", result(0), result(1))
    done = tokamac("ask", "--each", prompts, "--resume", out, "-m", "no/such-model")
    assert (done.status, done.out, done.err) == (0, "", f"note: every prompt of {prompts} is answered in {out}\n")
    empty = tokamac("ask", "--each", written(tmp_path / "empty", "", " "), "-m", "no/such-model")
    assert (empty.status, empty.err) == (0, f"note: {tmp_path / 'empty'} has no prompts\n")
    array = tokamac("ask", "--each", written(tmp_path / "array", '[{"prompt": "a"}]'), "-m", "no/such-model")
    assert (array.status, "is one JSON array" in array.err) == (1, True)


def test_resuming_computes_what_is_missing_alone(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    prompts, out = written(tmp_path / "p", "one", "two", "three"), tmp_path / "out"
    whole = tokamac("ask", "--each", prompts, "-m", tiny, *FLAGS).out
    first, _, third = whole.splitlines(keepends=True)
    out.write_text(first + third[:30])
    done = tokamac("ask", "--each", prompts, "-m", tiny, *FLAGS, "--resume", out)
    assert [(prompts["index"], prompts["text"]) for prompts in lines(done.out)] == [
        (prompts["index"], prompts["text"]) for prompts in lines(whole)[1:]
    ]
    assert done.err == f"note: a line of {out} can't be read; what is missing is answered again\n"
    assert out.read_text() == first + third[:30]  # results went to stdout
    missing = tokamac("ask", "--each", prompts, "-m", tiny, *FLAGS, "--resume", tmp_path / "none")
    assert "not there yet" in missing.err
    assert len(lines(missing.out)) == 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("Hello", "--each", "p"), "PROMPT has no effect with --each"),
        (("--each", "p", "-n", "2"), "-n has no effect with --each"),
        (("--each", "p", "--tools", "clock"), "--tools works with a single answer, not with --each"),
        (("--each", "p", "--steps", "s"), "--steps works with a single answer, not with --each"),
        (("Hello", "-n", "2", "--tools", "clock"), "--tools works with a single answer, not with -n"),
        (("Hello", "--resume", "o"), "--resume has no effect without --each"),
        (("Hello", "-n", "0"), "not a number of answers"),
        (("Hello", "--parallel", "0"), "not a number of parallel replies"),
    ],
)
def test_flags_that_do_not_go_together_are_wrong_usage(tokamac: Run, flags: tuple[str, ...], said: str) -> None:
    done = tokamac("ask", *flags)
    assert (done.status, done.out) == (2, "")
    assert said in done.err


@pytest.mark.parametrize(("name", "said"), [("", "is a folder"), ("none", "there is no file"), ("pipe", "Pipe it in")])
def test_an_unreadable_input_is_said_before_a_model_loads(tokamac: Run, tmp_path: Path, name: str, said: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = tokamac("ask", "--each", tmp_path / name, "-m", "no/such-model")
    assert (done.status, done.err.count("\n")) == (1, 1)
    assert said in done.err


def test_input_that_ends_with_an_error_fails_after_what_came_before(tiny: Path) -> None:
    def failing() -> Iterator[PromptLine]:
        yield PromptLine(0, None, (Message("user", "Hello"),), Sampling(max_tokens=2))
        raise InputError("broken", "Mend it.")

    with Engine.load(tiny) as engine:
        run = EachRun(engine, failing(), TemplateOptions(), 4)
        run.begin()
        found: list[Line] = []
        while not run.is_over:
            found += run.wait(0.1)
        with pytest.raises(InputError):
            run.wait(0)
        run.close()
    assert [prompts["index"] for prompts in found] == [0]


class Scripted:
    """Answers with the prompt, once it may; in place of an engine, whose replies end when they will."""

    def __init__(self) -> None:
        self.slow = threading.Event()
        self.begun = 0

    def generate(self, messages: tuple[Message, ...], *_: object, **__: object) -> Any:
        self.begun += 1

        def events() -> Iterator[TextChunk]:
            if messages[0].content == "slow":
                self.slow.wait(PATIENCE_S)
            raise prompts.PromptLineError(messages[0].content)
            yield TextChunk("")

        return events()

    def cancel(self) -> None:
        self.slow.set()


def test_a_slow_prompt_holds_back_a_bounded_number_and_the_order_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "LOOK_AHEAD", 20)
    taken = 0

    def source() -> Iterator[PromptLine]:
        nonlocal taken
        for index in range(500):
            taken += 1
            yield PromptLine(index, None, (Message("user", "slow" if index == 5 else str(index)),))

    engine, before = Scripted(), threading.active_count()
    run = EachRun(engine, source(), TemplateOptions(), 4)  # type: ignore[arg-type]
    run.begin()
    found: list[Line] = []
    while len(found) < 5:
        found += run.wait(5)
    while run.done < 5 + 19:
        time.sleep(0.001)
    assert (run.wait(0.05), taken) == ([], 25)  # those that were handed over, and twenty beyond
    engine.slow.set()
    while not run.is_over:
        found += run.wait(5)
    run.close()
    assert [prompts["index"] for prompts in found] == list(range(500))
    assert threading.active_count() == before


def test_on_a_terminal_there_is_a_bar_and_the_file_is_resumed(start: Start, tiny: Path, tmp_path: Path) -> None:
    prompts, out = written(tmp_path / "p", *map(str, range(30))), tmp_path / "out"
    out.write_text(json.dumps(result(0)) + '\n{"id": nu')
    leader, follower = pty.openpty()
    process = start(
        "ask", "--each", prompts, "-m", tiny, *FLAGS, "--resume", out,
        stdout=follower, stderr=follower, text=False, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(follower)
    read = b""
    try:
        while piece := os.read(leader, 4096):
            read += piece
    except OSError:
        pass  # the last writer has left
    os.close(leader)
    assert process.wait(PATIENCE_S) == 0
    shown = read.decode()
    assert " of 30 prompts" in shown
    assert "tok/s together" in shown
    assert "29 answered in " in shown.rpartition("\r\x1b[K")[2]
    assert f"the results are in {out}" in shown.replace("\r\n", "")
    assert '{"id"' not in shown
    assert [prompts["index"] for prompts in lines(out.read_text())] == list(range(30))


def test_what_the_bar_shows_of_a_pipe() -> None:
    run = EachRun(Scripted(), iter(()), TemplateOptions(), 1)  # type: ignore[arg-type]
    run.done, run.taken, run.failed, run.tokens = 3, 3, 1, 50
    run._busy_s = 10.0
    told: list[tuple[int, int | None, str]] = []
    bar = Progress("")
    bar.update = lambda *given: told.append(given)  # type: ignore[method-assign,assignment]
    prompts._draw(bar, run, None)
    run.ended = True
    prompts._draw(bar, run, None)
    assert told == [(3, None, "3 prompts  5.00 tok/s together, 1 failed"), (3, 3, "5.00 tok/s together, 1 failed")]


# Ending early -------------------------------------------------------------------------------------------------------------------


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    assert not any(sign in (err or "") for sign in ("Traceback", "Fatal", "Exception ignored"))
    return process.returncode, out, err


def test_ctrl_c_writes_what_is_finished_and_leaves_out_the_rest(start: Start, endless: Path, tmp_path: Path) -> None:
    prompts = written(
        tmp_path / "p.jsonl",
        {"prompt": "a", "max_tokens": 300},  # when it has ended, the third has long
        {"prompt": "b", "max_tokens": 900_000},
        {"prompt": "c", "max_tokens": 3},
    )
    process = start("ask", "--each", prompts, "-m", endless, "-v")
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    status, rest, err = ended(process)
    assert status == 130
    assert [prompts["index"] for prompts in lines(first + rest)] == [0, 2]
    assert err.startswith("2 answered")


def test_ctrl_c_while_a_pipe_gives_nothing(start: Start, tiny: Path) -> None:
    process = start("ask", "--each", "-", "-m", tiny, *FLAGS, stdin=subprocess.PIPE)
    process.stdin.write("one\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["index"] == 0  # it comes before the input ends
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    process.stdin.close()
    process.stdin = None
    assert ended(process)[2] == ""


def test_a_reader_that_leaves_ends_it_in_silence(start: Start, endless: Path, tmp_path: Path) -> None:
    prompts = written(tmp_path / "p", *map(str, range(200)))
    process = start("ask", "--each", prompts, "-m", endless, "--max-tokens", "5")
    process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(PATIENCE_S) == 141


def test_what_was_killed_is_resumed_to_the_same_results(start: Start, tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    prompts, out = written(tmp_path / "p", *map(str, range(40))), tmp_path / "out"
    command = ("ask", "--each", prompts, "-m", tiny, *FLAGS, "--resume", out)
    with out.open("a") as file:
        process = start(*command, stdout=file)
        while out.stat().st_size < 4000:
            time.sleep(0.005)
            assert process.poll() is None
        process.kill()
        ended(process)
        held = len(out.read_text().splitlines())
        with out.open("a") as cut:
            cut.write('{"id": null, "ind')
        assert ended(start(*command, stdout=file))[0] == 0
    found = lines(out.read_text())
    assert held < 40
    assert [prompts["index"] for prompts in found] == list(range(40))
    again = tokamac("ask", "--each", written(tmp_path / "again", "0", "39"), "-m", tiny, *FLAGS)
    assert [found[0]["text"], found[39]["text"]] == [prompts["text"] for prompts in lines(again.out)]


# Several answers to one prompt --------------------------------------------------------------------------------------------------


def test_samples_are_divided_by_a_line_and_each_has_its_seed(tokamac: Run, tiny: Path) -> None:
    done = tokamac("ask", "Hello", "-n", "3", "-m", tiny, *FLAGS)
    assert (done.status, done.err) == (0, "")
    alone = [
        tokamac("ask", "Hello", "-m", tiny, "--max-tokens", "8", "--temp", "1", "--seed", str(3 + i)).out
        for i in range(3)
    ]
    assert done.out == "---\n".join(alone)
    assert len(set(alone)) == 3


def test_samples_in_json_say_whose_each_event_is_and_the_prompt_is_read_once(tokamac: Run, tiny: Path) -> None:
    done = tokamac("ask", "Hello, how are you?", "-n", "3", "-m", tiny, *FLAGS, "--json", "--no-prompt-cache")
    events = lines(done.out)
    assert {event["sample"] for event in events} == {0, 1, 2}
    ends = {event["sample"]: event for event in events if event["event"] == "finished"}
    assert len(ends) == 3
    assert events[-1]["event"] == "finished"
    for sample, end in ends.items():
        texts = [event["text"] for event in events if event["event"] == "text" and event["sample"] == sample]
        assert "".join(texts) == end["text"]
    assert [ends[i]["metrics"]["prefill_tokens"] for i in (1, 2)] == [1, 1]
