"""`completion` in the shells themselves, and `doctor`."""

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from tests.app.commands.conftest import Run
from tests.app.commands.test_usage import options_of
from tests.waiting import PATIENCE_S
from tokamac.app import help as texts
from tokamac.app import settings
from tokamac.app.cli import COMMANDS
from tokamac.app.commands import doctor
from tokamac.app.commands.completion import FILES, SCRIPTS, completions
from tokamac.app.commands.doctor import Finding, folder_finding, private, private_path, terminal_findings

# What may follow, made from the parsers


def words(*written: str) -> list[str]:
    return [each.word for each in completions(written)]


def test_commands_topics_and_the_flags_of_the_chat_that_needs_no_name() -> None:
    assert set(COMMANDS) <= set(words(""))
    assert words("mod") == ["models"]
    assert set(words("help", "")) == {*COMMANDS, *texts.topics()}
    assert "--plain" in words("--pl")
    assert words("nonsense", "") == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_every_command_is_completed(command: str) -> None:
    flags = set(options_of(import_module(f"tokamac.app.commands.{command}").parser()))
    assert flags <= set(words(command, "-"))


def test_values_are_the_parsers_choices() -> None:
    assert words("ask", "--thinking", "") == ["on", "off", "low", "medium", "high"]
    assert words("ask", "hello", "--thinking", "o") == ["on", "off"]
    assert words("inspect", "guide", "--bits", "1") == ["16"]
    assert words("convert", "--method", "g") == ["gptq"]
    assert words("completion", "") == list(SCRIPTS)
    assert "Apple M4 Max" in words("inspect", "--chip", "Apple M4")
    assert words("ask", "--temp", "") == []  # any number
    assert words("bench", "--parallel", "") == ["1", "2", "4", "8"]
    assert words("ask", "--each", "") == words("ask", "--resume", "") == [FILES]


def test_a_value_behind_the_sign_is_completed_as_each_shell_has_it() -> None:
    assert words("ask", "--thinking=o") == ["--thinking=on", "--thinking=off"]  # zsh, fish
    assert words("ask", "--thinking", "=", "o") == ["on", "off"]  # bash
    assert "on" in words("ask", "--thinking", "=")


def test_actions_and_only_the_flags_that_go_with_them() -> None:
    assert words("models", "s") == ["search", "suggest"]
    assert "--chip" in words("models", "suggest", "--")
    assert "--chip" not in words("models", "pull", "--")
    assert words("models", "list", "") == []
    assert "--json" not in words("models", "--json", "list", "--")  # written already
    assert "--stop" in words("ask", "--stop", "x", "--st")  # may be repeated


def test_models_on_disk_chats_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "a"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").touch()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert words("chat", "") == ["guide", "org/tiny", FILES]
    assert words("ask", "-m", "or") == ["org/tiny", FILES]
    assert words("models", "remove", "or") == ["org/tiny"]
    assert words("ask", "-f", "") == [FILES]
    assert words("chats", "show", "") == [FILES]


# In the shells


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tokamac` is this one."""
    program = tmp_path / "bin" / "tokamac"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tokamac.app.cli "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def typed_in(shell: list[str], setup: str, line: str, until: str) -> str:
    """Type a line with tabs in a shell's own terminal, have it echoed as it is by then, and return what was shown."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        shell, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env={**os.environ, "TERM": "vt100"}
    )
    os.close(theirs)
    shown, end = "", time.monotonic() + PATIENCE_S
    try:
        for text, wanted in ((f"{setup}; echo rea''dy\n", "ready"), (f"{line}\x01echo \n", until)):
            os.write(ours, text.encode())
            while wanted not in shown and time.monotonic() < end:
                if select.select([ours], [], [], 0.5)[0]:
                    shown += os.read(ours, 4096).decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return shown


def needs(shell: str) -> str:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"needs {shell}")
    return found


@pytest.mark.usefixtures("on_path")
def test_bash_completes_at_the_tab_key(tmp_path: Path) -> None:
    bash, script = needs("bash"), tmp_path / "script"
    script.write_text(SCRIPTS["bash"])
    wanted = "tokamac inspect --memory 64 --chip Apple M4 Max"
    shell = [bash, "--norc", "--noprofile", "-i"]
    assert wanted in typed_in(shell, f". {script}", "tokamac insp\t--mem\t64 --chip Apple\\ M4\\ M\t", wanted)


@pytest.mark.usefixtures("on_path")
def test_zsh_completes_at_the_tab_key(tmp_path: Path) -> None:
    zsh, script = needs("zsh"), tmp_path / "script"
    script.write_text(SCRIPTS["zsh"])
    setup = f"autoload -Uz compinit && compinit -u -D; . {script}"
    wanted = "tokamac inspect --memory 64 --group-size 128"
    assert wanted in typed_in([zsh, "-f", "-i"], setup, "tokamac insp\t--mem\t64 --group-size 1\t", wanted)


@pytest.mark.usefixtures("on_path")
def test_fish_completes_what_is_typed(tmp_path: Path) -> None:
    fish, script = needs("fish"), tmp_path / "script"
    script.write_text(SCRIPTS["fish"])
    asked = f". {script}; complete -C 'tokamac ask --thinking '; complete -C 'tokamac mod'"
    done = subprocess.run([fish, "--no-config", "-c", asked], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert {"on", "off", "low"} <= set(lines)
    assert any(line.startswith("models\t") for line in lines)


def test_a_script_is_printed_and_no_other(tokamac: Run) -> None:
    for shell, script in SCRIPTS.items():
        assert tokamac("completion", shell).out == f"{script}\n"
    assert tokamac("completion", "tcsh").status == 2
    assert tokamac("completion", "words", "--", "mod").out.startswith("models\t")


# `tokamac doctor`


def test_the_doctor_looks_at_all_there_is_and_finds_nothing_broken(tokamac: Run) -> None:
    done = tokamac("doctor", "--json")
    lines = [json.loads(line) for line in done.out.splitlines()]
    found = {(line["section"], line["name"]): line for line in lines[:-1]}
    assert (done.status, lines[-1]["event"], lines[-1]["ok"], lines[-1]["broken"]) == (0, "checked", True, [])
    assert {section for section, _ in found} == set(doctor.CHECKS)
    assert " ms with guide" in found["Engine", "decode step"]["value"]
    assert found["Program", "mlx"]["value"]
    assert str(Path.home()) not in done.out or str(Path.home()) == "/"


def test_what_is_broken_says_what_to_do_and_ends_no_other_check(tokamac: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> list[Finding]:
        raise PermissionError(13, "Permission denied", f"{Path.home()}/secret")

    monkeypatch.setattr(doctor, "CHECKS", {"Machine": fails, "Terminal": doctor._terminal})
    done = tokamac("doctor")
    assert done.status == 1
    assert "✗ machine" in done.out
    assert "→ Please report it" in done.out
    assert "TERM" in done.out
    assert "broken: machine" in done.err


def test_settings_that_can_not_be_used_are_named(tokamac: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.default_path().parent.mkdir(parents=True, exist_ok=True)
    settings.default_path().write_text("unload_after_min = 'soon'\n")
    monkeypatch.setattr(doctor, "CHECKS", {"Settings": doctor._settings})
    done = tokamac("doctor")
    assert done.status == 0
    assert "! problem" in done.out
    assert "unload_after_min" in done.out


def test_folders(tmp_path: Path) -> None:
    assert folder_finding("chats", tmp_path).state == "ok"
    assert "made when needed" in folder_finding("chats", tmp_path / "a" / "b").value
    (tmp_path / "file").touch()
    broken = folder_finding("chats", tmp_path / "file" / "chats")
    assert (broken.state, bool(broken.fix)) == ("broken", True)


def test_no_private_path_is_told() -> None:
    assert private("/home/ada/models/x", "/home/ada") == "~/models/x"
    assert private("a\x1b[31mb", "/home/ada") == "a�[31mb" or "\x1b" not in private("a\x1b[31mb", "/home/ada")
    assert private_path(Path.home() / "x") == "~/x"
    assert private_path(Path("/srv/ada/hub")) == "…/hub (outside of ~)"


@pytest.mark.parametrize(
    ("environment", "said", "states"),
    [
        ({"TERM": "xterm-256color"}, "256", ["ok", "ok", "ok"]),
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor"}, "16.7 million", ["ok", "ok", "ok"]),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "NO_COLOR", ["ok", "ok", "ok"]),
        ({"TERM": "dumb"}, "none", ["note", "ok", "ok"]),
    ],
)
def test_terminals(environment: dict[str, str], said: str, states: list[str]) -> None:
    found = list(terminal_findings(environment, os.terminal_size((80, 24)), is_terminal=True))
    assert [each.state for each in found[:3]] == states
    assert said in found[1].value
    small = list(terminal_findings(environment, os.terminal_size((20, 5)), is_terminal=True))
    assert small[2].state == "note"


def test_after_an_update_the_same_prompts_are_answered_again_and_what_differs_is_told(
    tokamac: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path))
    asked = ("doctor", "--answers", "-m", tiny)
    kept = tokamac(*asked[:2], "renew", *asked[2:])
    assert (kept.status, kept.out[:5]) == (0, "Kept ")
    (file,) = tmp_path.rglob("answers/*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    again = tokamac(*asked)
    assert again.status == 0
    assert re.match(
        r"Same answers as on \d{4}-\d\d-\d\d to your 8 prompts\.\nLargest change of .*: 0 nats\.$", again.out
    )
    record = json.loads(file.read_text())
    first, second = record["answers"][:2]
    first["ids"][3], second["logprobs"][0] = (first["ids"][3] + 1) % 256, second["logprobs"][0] - 0.25
    first["text"], record["versions"][0][1] = "before\x1b[2J", "0.1"
    file.write_text(json.dumps(record))
    differs = tokamac(*asked)
    assert differs.status == 1
    assert re.search(
        r"^1 of 8 answers differ from .* \(mlx 0\.1 → \S+\)\.\nLargest change .*: 0\.25 nats\.$", differs.out, re.M
    )
    assert f"\n{first['prompt']}\n  before: before" in differs.out
    assert "\x1b" not in differs.out
    assert "renew" in differs.err
    found = json.loads(tokamac(*asked, "--json").out)
    assert ([each["before"] for each in found["differ"]], found["updates"][0][:10]) == (["before\x1b[2J"], "mlx 0.1 → ")
    file.write_text("{}")
    assert "can't be read" in tokamac(*asked).err


@pytest.mark.parametrize(
    ("prefix", "source", "command"),
    [
        ("/Users/a/.local/share/uv/tools/tokamac", None, "uv tool upgrade tokamac"),
        ("/Users/a/.local/pipx/venvs/tokamac", None, "pipx upgrade tokamac"),
        ("/opt/homebrew/Cellar/tokamac/0.3.0/libexec", None, "brew upgrade tokamac"),
        ("/Users/a/env", None, f"{sys.executable} -m pip install --upgrade tokamac"),
        ("/Users/a/env", "file:///a%20b/tokamac", f"{sys.executable} -m pip install --upgrade '/a b/tokamac'"),
        ("/Users/a/env", "https://example.org/t.whl", f"{sys.executable} -m pip install --upgrade tokamac"),
    ],
)
def test_a_copy_is_updated_by_what_installed_it(prefix: str, source: str | None, command: str) -> None:
    assert doctor.update_command(Path(prefix), source) == command


def test_a_clone_is_pulled(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    assert (
        doctor.update_command(Path("/env"), tmp_path.as_uri()) == f"git -C {tmp_path} pull && make -C {tmp_path} chat"
    )


@pytest.mark.parametrize(
    ("answer", "name", "value", "state"),
    [
        ('{"info": {"version": "99.0.1"}}', "newest", "99.0.1", "note"),
        ('{"info": {"version": "0.0.1"}}', "newest", "0.0.1", "ok"),
        ('{"info": {}}', "registry", "no answer: 'version'", "note"),
        ("<html>", "registry", "no answer: Expecting value: line 1 column 1 (char 0)", "note"),
    ],
)
def test_the_registry_is_asked_and_what_it_says_is_one_line(
    tmp_path: Path, answer: str, name: str, value: str, state: str
) -> None:
    (tmp_path / "json").write_text(answer)
    _, last = doctor.findings({"Updates": lambda: doctor.updates((tmp_path / "json").as_uri())})
    assert (last.name, last.value, last.state) == (name, value, state)
    assert ("install" in last.fix or "pull" in last.fix) is (state == "note")


def test_without_a_network_the_question_is_one_line_and_nothing_fails() -> None:
    _, last = doctor.updates("http://127.0.0.1:1/")
    assert (last.name, last.state) == ("registry", "note")
    assert "refused" in last.value
    assert doctor.release("0.10.0rc1") == (0, 10, 0) > doctor.release("0.9")
