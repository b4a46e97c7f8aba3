"""Flags that say what the chat template is told: of ask, bench and the chat; what they can't do is an error that says why."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.plain_chat import piped
from tests.engine.seeded import write_model
from tokamac.app.commands.bench_runs import message_ids
from tokamac.engine import Engine, Message, OptionError, TemplateOptions

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ style }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
GREEDY = ("--temp", "0", "--max-tokens", "12", "--json")


@pytest.fixture(scope="module")
def thinks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("thinks") / "thinks", template=TEMPLATE, thinking=True)


def asked(tokamac: Run, model: Path, *flags: str) -> list[dict[str, object]]:
    said = tokamac("ask", "Hello", "-m", model, *GREEDY, *flags)
    assert said.status == 0, said.err
    return [json.loads(line) for line in said.out.splitlines()]


def kinds(events: list[dict[str, object]]) -> set[object]:
    return {event["kind"] for event in events if event["event"] == "text"}


def test_thinking_is_turned_off_and_on(tokamac: Run, thinks: Path) -> None:
    assert kinds(asked(tokamac, thinks)) == {"thinking"}
    assert kinds(asked(tokamac, thinks, "--thinking", "on")) == {"thinking"}
    assert kinds(asked(tokamac, thinks, "--thinking", "off")) == {"answer"}
    assert kinds(asked(tokamac, thinks, "--template-option", "enable_thinking=false")) == {"answer"}


def test_other_keywords_reach_the_template(tokamac: Run, thinks: Path) -> None:
    def read(*flags: str) -> int:
        metrics = asked(tokamac, thinks, *flags)[-1]["metrics"]
        assert isinstance(metrics, dict)
        return int(metrics["prompt_tokens"])

    assert read("--template-option", "style=brief") == read() + len("brief")
    assert read("--template-option", 'style="a b"', "--template-option", "enable_thinking=true") == read() + 3


def test_a_budget_ends_thinking_and_is_said(tokamac: Run, thinks: Path) -> None:
    events = asked(tokamac, thinks, "--thinking-budget", "3")
    assert kinds(events) == {"thinking", "answer"}
    assert events[-1]["thinking_ended_at"] == 3
    assert "thinking_ended_at" not in asked(tokamac, thinks)[-1]
    plain = tokamac("ask", "Hello", "-m", thinks, *GREEDY[:-1], "--thinking-budget", "3")
    assert "note: thinking ended at its budget of 3 tokens" in plain.err


@pytest.mark.parametrize(
    ("flags", "status", "why"),
    [
        (("--thinking", "low"), 1, "has no thinking mode low"),
        (("--template-option", "colour=red"), 1, "does not read colour"),
        (("--template-option", "colour"), 2, "--template-option: template option 'colour' has no value"),
        (("--template-option", "a=1", "--template-option", "a=2"), 2, "given twice"),
        (("--thinking", "loud"), 2, "invalid choice"),
        (("--thinking-budget", "-1"), 2, "--thinking-budget: a thinking budget of -1 tokens is negative"),
        (("--thinking", "off", "--thinking-budget", "5"), 2, "--thinking-budget has no effect with --thinking off"),
    ],
)
def test_what_can_not_be_had_is_an_error(
    tokamac: Run, thinks: Path, flags: tuple[str, ...], status: int, why: str
) -> None:
    refused = tokamac("ask", "Hello", "-m", thinks, *flags)
    assert refused.status == status
    assert why in refused.err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--thinking", "off"), "has no switch for thinking: the model does not mark thinking"),
        (("--thinking-budget", "5"), "does not mark its thinking, so a thinking budget has nothing to end"),
    ],
)
def test_a_model_that_does_not_think_says_so(tokamac: Run, tiny: Path, flags: tuple[str, ...], why: str) -> None:
    refused = tokamac("ask", "Hello", "-m", tiny, *flags)
    assert refused.status == 1
    assert why in refused.err


def test_bench_reads_prompts_as_the_template_writes_them(tokamac: Run, thinks: Path) -> None:
    run = tokamac("bench", thinks, "--prompt", "40", "--max-tokens", "4", "--runs", "1", "--json", "--thinking", "off")
    assert run.status == 0, run.err
    assert json.loads(run.out)["runs"][0]["prompt_tokens"] == 40
    assert tokamac("bench", thinks, "--thinking", "low").status == 1
    short = tokamac("bench", thinks, "--prompt", "8", "--runs", "1", "--thinking", "off")
    assert "has no room for a message" in short.err
    for flags in (("--machine",), ("--kv-quality",)):
        refused = tokamac("bench", thinks, *flags, "--thinking", "off")
        assert (refused.status, f"--thinking has no effect with {flags[0]}" in refused.err) == (2, True)
    assert "so --compare can't be fair" in tokamac("bench", thinks, "--compare", "mlx-lm", "--thinking-budget", "4").err


def test_a_benchs_prompt_is_a_message_of_that_many_tokens(thinks: Path) -> None:
    with Engine.load(thinks, prompt_cache=None) as engine:
        for mode in ("on", "off"):
            told = TemplateOptions(mode)
            ids = message_ids(engine, 60, 1, told)
            empty = engine.tokenizer.using(told).render([Message("user", "")])
            begin, _, end = empty.partition("<end>")
            assert len(ids) == 60
            assert ids[: len(engine.tokenizer.encode(begin))] == engine.tokenizer.encode(begin)
            assert ids[-len(engine.tokenizer.encode(f"<end>{end}")) :] == engine.tokenizer.encode(f"<end>{end}")
            assert ids != message_ids(engine, 60, 2, told)
        with pytest.raises(OptionError, match="no room for a message"):
            message_ids(engine, 5, 1, TemplateOptions("off"))


def test_token_ids_that_open_thinking_begin_with_thinking(thinks: Path) -> None:
    with Engine.load(thinks, prompt_cache=None) as engine:
        told = engine.tokenizer.using(TemplateOptions("on"))
        ids = told.encode(told.render([Message("user", "Hello")]))
        *_, finished = engine.generate(ids, template=TemplateOptions(thinking_budget=0))
        assert finished.thinking_ended_at == 0  # type: ignore[union-attr]


@pytest.mark.usefixtures("data")
def test_the_plain_chat_is_told_by_flag_command_and_setting() -> None:
    _, out, err = piped("/thinking\n/thinking off\none\n/thinking low\n/thinking 3\ntwo\n/thinking\n", "thinking")
    assert "Thinking: as the chat template has it. Budget: none. thinking knows: on, off." in out
    assert "Thinking: off. Budget: none. This applies to this chat, from the next message on." in err
    assert "the chat template of thinking knows on, off alone. It supports: on, off." in err
    assert "Budget: 3 tokens." in out
    _, out, err = piped("/thinking\n", "thinking", "--continue")
    assert "Budget: 3 tokens." in out  # kept with the chat
    _, out, err = piped("hello\n", "fast", "--thinking", "off")
    assert "Thinking off can't be had: the chat template of fast has no switch for it." in err
    _, out, err = piped("/settings thinking off\n/thinking\n", "thinking")
    assert "Thinking: off." in out
    _, out, _ = piped("/thinking\n", "thinking")
    assert "Thinking: off." in out
