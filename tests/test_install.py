"""What `make` and .ci/install do before and around pip, with a machine's commands replaced where they would say another one."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent


@pytest.fixture
def mac(tmp_path: Path) -> Path:
    """A folder of commands, first on PATH: ``uname`` says Darwin, and an environment's pip and python note what they are given."""
    commands = tmp_path / "commands"
    commands.mkdir()
    noted = 'echo "$(basename "$0") $SYSTEM_VERSION_COMPAT $*" >>"$(dirname "$0")/noted"'
    for name, body in {"uname": "echo Darwin", "pip": noted, "python": noted}.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (commands / name).chmod(0o755)
    return commands


def install(mac: Path, backend: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{mac}:{os.environ['PATH']}"}
    environment.pop("SYSTEM_VERSION_COMPAT", None)
    command = [ROOT / ".ci" / "install", mac, backend, "-e", "."]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_cuda_on_a_mac_is_refused_before_pip_runs(mac: Path) -> None:
    done = install(mac, "cuda")
    assert done.returncode == 2
    assert "NVIDIA" in done.stderr
    assert not (mac / "noted").exists()


def test_pip_is_told_the_true_version_of_macos(mac: Path) -> None:
    """Else a Python built for an older one would take MLX's wheel for macOS 15 on macOS 26."""
    done = install(mac, "cpu")
    assert done.returncode == 0, done.stderr
    assert "pip 0 install --quiet -e .\n" in (mac / "noted").read_text()


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_what_finder_leaves_installs_nothing_again(tmp_path: Path) -> None:
    for folder in ("app", "engine", "quant", "assets"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "show.mk").write_text("include Makefile\nshow:\n\t@echo $(FILES)\n")

    def stamp() -> str:
        command = ["make", "-s", "-f", "show.mk", "show"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    before = stamp()
    (tmp_path / "app" / ".DS_Store").touch()
    assert stamp() == before
    (tmp_path / "app" / "new.py").touch()
    assert stamp() != before


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize(("newer", "chosen"), [("python3.12", "python3.12"), (None, "python3"), ("python3", "python3")])
def test_a_python_that_is_new_enough_is_found(tmp_path: Path, newer: str | None, chosen: str) -> None:
    """As on a Mac, whose own python3 is 3.9; where there is no other, the check says what to install."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("python3", "python3.14", "python3.13", "python3.12", "python3.11"):
        (commands / name).write_text(f"#!/bin/sh\nexit {int(name != newer)}\n")
        (commands / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    command = ["make", "-n", "--no-print-directory", ".venv/bin/python"]  # a make around this one asks for the names
    asked = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert asked.splitlines() == [f"{chosen} -I engine/requirements.py", f"{chosen} -m venv .venv"]


def test_the_workflow_runs_what_there_is() -> None:
    """GitHub's own checks can't run here: that it is YAML, has bounds, and asks for targets and scripts that exist, can."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 120
        for step in job["steps"]:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/none@v0"))
            assert set(re.findall(r"make (\w+)", step.get("run", ""))) <= targets
            assert all((ROOT / script).exists() for script in re.findall(r"\.ci/[\w-]+", step.get("run", "")))
