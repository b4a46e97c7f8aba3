"""Exit codes, help, wrong usage: no model is needed."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.cli.conftest import Run
from tokamac.app import cli

HEAVY = "{'mlx', 'mlx_lm', 'textual', 'transformers', 'huggingface_hub', 'numpy', 'rich', 'tomlkit'}"


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["ask", "--help"], ["chat", "--help"], ["convert", "--help"]]
)
def test_what_needs_no_model_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys; from tokamac.app import cli; status = cli.main({arguments}); loaded = {HEAVY} & set(sys.modules)"
    )
    code += "; print(loaded, status, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "set() 0\n"
    assert done.stdout


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_help_has_an_example(tokamac: Run, command: str) -> None:
    shown = tokamac(command, "--help")
    assert shown.status == 0
    assert f"  tokamac {command}" in shown.out.split("examples:")[1]
    assert shown.err == ""


def test_the_general_help_lists_every_command(tokamac: Run) -> None:
    shown = tokamac("--help")
    assert shown.status == 0
    assert all(f"  {command}" in shown.out for command in cli.COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frobnicate"], "no command 'frobnicate'"),
        (["ask", "hi", "--frobnicate"], "--frobnicate"),
        (["ask", "hi", "--temp", "hot"], "--temp"),
        (["ask", "hi", "--temp", "-1"], "--temp"),
        (["ask", "hi", "--temp", "nan"], "--temp"),
        (["ask", "hi", "--top-p", "0"], "--top-p"),
        (["ask", "hi", "--top-k", "-1"], "--top-k"),
        (["ask", "hi", "--min-p", "1"], "--min-p"),
        (["ask", "hi", "--repetition-penalty", "9"], "--repetition-penalty"),
        (["ask", "hi", "--seed", "-3"], "--seed"),
        (["ask", "hi", "--max-tokens", "0"], "--max-tokens"),
        (["ask", "hi", "--stop", ""], "--stop"),
        (["ask", "hi", "--kv-bits", "7"], "--kv-bits"),
        (["ask", "hi", "--kv-bits", "8,4,2"], "--kv-bits"),
        (["ask", "hi", "--kv-bits", ""], "--kv-bits"),
        (["ask", "hi", "--kv-group-size", "48", "--kv-bits", "8"], "--kv-group-size"),
        (["ask", "hi", "--kv-group-size", "32"], "without --kv-bits"),
        (["ask", "hi", "--kv-window", "1"], "--kv-window"),
        (["ask", "hi", "--kv-keep", "8"], "without --kv-window"),
        (["ask", "hi", "--kv-keep", "some", "--kv-window", "64"], "--kv-keep"),
        (["ask", "hi", "--kv-keep", "64", "--kv-window", "64"], "--kv-keep"),
        (["ask", "hi", "--logprobs"], "without --json"),
        (["ask", "hi", "--json", "--logprobs", "-1"], "--logprobs"),
        (["ask", "--json", "--logprobs", "hi"], "PROMPT stands before --logprobs"),
        (["ask", "hi", "--logit-bias", "5"], "'5' is not a token id with a bias"),
        (["ask", "hi", "--logit-bias", "5=900"], "--logit-bias"),
        (["ask", "hi", "--min-tokens", "9", "--max-tokens", "4"], "--min-tokens"),
        (["ask", "hi", "--presence-penalty", "3"], "--presence-penalty"),
        (["ask", "hi", "--xtc-threshold", "0.2"], "without --xtc-probability"),
        (["ask", "hi", "--temp", "0", "--xtc-probability", "0.2"], "temperature 0"),
        (["ask", "hi", "--dry-base", "2"], "without --dry-multiplier"),
        (["ask", "hi", "--sampler-order", "top_k,top_p"], "leaves out penalties"),
        (["bench", "--dry-multiplier", "1", "--compare", "mlx-lm"], "--dry-multiplier has no effect with --compare"),
        (["ask"], "prompt is empty"),
        (["ask", "  "], "prompt is empty"),
        (["ask", "-"], "prompt is empty"),
        (["convert"], "SOURCE"),
        (["convert", "x", "--bits", "7"], "--bits"),
        (["convert", "x", "--group-size", "8"], "--group-size"),
        (["convert", "x", "--dtype", "int8"], "--dtype"),
        (["inspect"], "MODEL"),
        (["inspect", "guide", "--context", "0"], "--context"),
        (["bench", "--runs", "0"], "--runs"),
        (["bench", "--machine", "--temp", "0"], "--temp has no effect with --machine"),
        (["bench", "--kv-quality", "--plot", "a.svg"], "--plot has no effect with --kv-quality"),
        (["bench", "--prompt", "many"], "--prompt"),
        (["models", "eat"], "'eat'"),
        (["models", "pull"], "needs an ID"),
        (["models", "list", "org/name"], "takes no ID"),
        (["chat", "--continue", "--chat", "k3v7q2ab"], "--chat"),
        (["chat", "--temp", "99"], "--temp"),
        (["--temp", "-1"], "--temp"),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_mistake(tokamac: Run, arguments: list[str], said: str) -> None:
    result = tokamac(*arguments)
    assert result.status == 2
    assert said in result.err
    assert result.err.count("\n") == 1
    assert result.out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ask", "hi", "-m", "./nothing"], "no folder"),
        (["ask", "hi", "-m", "gpt2"], "org/name"),
        (["ask", "hi", "-f", "missing.txt"], "no file missing.txt"),
        (["ask", "hi", "-f", "."], "is a folder"),
        (["inspect", "./nothing"], "no folder"),
        (["inspect", "org/name"], "models pull"),
        (["convert", "./nothing"], "no folder"),
        (["bench", "./nothing"], "no folder"),
        (["models", "remove", "org/name"], "not on this disk"),
        (["models", "pull", "nonsense"], "org/name"),
    ],
)
def test_a_failure_is_one_line_and_exit_1(tokamac: Run, arguments: list[str], said: str) -> None:
    result = tokamac(*arguments)
    assert result.status == 1
    assert result.err.startswith("tokamac: ")
    assert said in result.err
    assert result.err.count("\n") == 1
    assert result.out == ""


def test_binary_files_and_input_are_refused(tokamac: Run, tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\xff")
    (tmp_path / "nul").write_bytes(b"a\0b")
    for result in (
        tokamac("ask", "hi", "-f", tmp_path / "picture"),
        tokamac("ask", "hi", "-f", tmp_path / "nul"),
        tokamac("ask", "hi", stdin=b"\xff\xfe\xfa"),
    ):
        assert result.status == 1
        assert "text" in result.err


def test_a_model_of_no_name_in_a_hostile_path(tokamac: Run) -> None:
    result = tokamac("ask", "hi", "-m", "./\x1b]0;owned\x07")
    assert result.status == 1
    assert "\x1b" not in result.err


def _command(raises: BaseException) -> ModuleType:
    module = ModuleType("tokamac.app.commands.ask")

    def run(parser: object, options: object) -> int:
        raise raises

    class Anything:
        def parse_args(self, arguments: list[str]) -> None:
            pass

    module.parser = Anything  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    return module


def test_the_unexpected_is_one_line_and_a_traceback_only_on_request(
    tokamac: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokamac.app.commands.ask", _command(ZeroDivisionError("by zero")))
    result = tokamac("ask")
    assert result.status == 1
    assert "ZeroDivisionError: by zero" in result.err
    assert "TOKAMAC_DEBUG=1" in result.err
    assert result.err.count("\n") == 1
    monkeypatch.setenv("TOKAMAC_DEBUG", "1")
    assert "Traceback" in tokamac("ask").err


@pytest.mark.parametrize(("raises", "status"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141)])
def test_how_others_end_it(tokamac: Run, monkeypatch: pytest.MonkeyPatch, raises: BaseException, status: int) -> None:
    monkeypatch.setitem(sys.modules, "tokamac.app.commands.ask", _command(raises))
    result = tokamac("ask")
    assert (result.status, result.err) == (status, "")
