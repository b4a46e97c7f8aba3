"""Each client has a whole turn with the server, calls of tools in it; a plain one with a real model, which refuses agents."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.app.serve.serving import Served, serving
from tests.clients.clients import AGENTS, CALLING, CLIENTS, Client
from tests.real.models import SMOLLM2
from tests.scripted_engine import ANSWER, SCRIPTED
from tokamac.engine.options import Sampling

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]
PLAIN = [replace(each, model="smollm2", is_plain=True) for each in CLIENTS if each.name not in (*AGENTS, *CALLING)]
LARGE = [replace(each, model="smollm2") for each in CLIENTS if each.name in AGENTS]


def run(client: Client, served: Served, home: Path) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    if not client.is_there:
        pytest.skip(f"{client.name} is not installed: make clients")
    (home / "notes.md").write_text("# notes\n")
    before = len(served.lines)
    command, environment = client.command(served.url), client.environment(served.url, home)
    ran = subprocess.run(
        command, cwd=home, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500
    )
    return ran, [line for line in served.lines[before:] if " POST " in line]


@pytest.mark.parametrize("client", CLIENTS, ids=str)
def test_a_turn_is_had_to_its_end(client: Client, tmp_path: Path) -> None:
    with serving(client.model, tmp_path / "log", command=SCRIPTED) as served:
        ran, asked = run(client, served, tmp_path)
    assert ran.returncode == 0, (ran.stdout, ran.stderr)
    assert all(" 200 " in line for line in asked), asked
    assert len(asked) >= client.requests, asked
    assert ("notes.md" if client.name == "instructor" else ANSWER[:30]) in ran.stdout


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if not SMOLLM2.converted.is_dir():
        pytest.skip(f"{SMOLLM2.converted} is not there: make models")
    log, greedy = tmp_path_factory.mktemp("log") / "log", Sampling(temperature=0)
    with serving(str(SMOLLM2.converted), log, aliases=("smollm2",), sampling=greedy) as served:
        yield served


@pytest.mark.parametrize("client", PLAIN, ids=str)
def test_a_plain_turn_with_a_real_model(client: Client, smollm2: Served, tmp_path: Path) -> None:
    ran, asked = run(client, smollm2, tmp_path)
    assert ran.returncode == 0, (ran.stdout, ran.stderr)
    assert asked
    assert all(" 200 " in line for line in asked), asked
    assert json.loads(ran.stdout.splitlines()[-1])["text"].strip()


@pytest.mark.parametrize("client", LARGE, ids=str)
def test_a_model_too_small_refuses_an_agent_in_a_line(client: Client, smollm2: Served, tmp_path: Path) -> None:
    ran, asked = run(client, smollm2, tmp_path)
    assert ran.returncode != 0
    assert asked
    assert all(" 400 " in line for line in asked), asked
    said = {  # Codex prints it twice
        line
        for line in (ran.stdout + ran.stderr).splitlines()
        if "can't call any; its chat template has no place" in line
    }
    assert len(said) == 1, (ran.stdout, ran.stderr)
