"""Each client has a whole turn with the server, calls of tools in it, and none of its requests is refused."""

import subprocess
from pathlib import Path

import pytest

from tests.app.serve.serving import serving
from tests.clients.clients import CLIENTS, Client
from tests.scripted_engine import ANSWER, SCRIPTED

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


@pytest.mark.parametrize("client", CLIENTS, ids=[each.name for each in CLIENTS])
def test_a_turn_is_had_to_its_end(client: Client, tmp_path: Path) -> None:
    if not client.is_there:
        pytest.skip(f"{client.name} is not installed: make clients")
    (tmp_path / "notes.md").write_text("# notes\n")
    with serving(client.model, tmp_path / "log", command=SCRIPTED) as served:
        command, environment = client.command(served.url), client.environment(served.url, tmp_path)
        ran = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=500,
        )
    asked = [line for line in served.lines if " POST " in line]
    assert ran.returncode == 0, (ran.stdout, ran.stderr)
    assert all(" 200 " in line for line in asked), asked
    assert len(asked) >= client.requests, asked
    assert ("notes.md" if client.name == "instructor" else ANSWER[:30]) in ran.stdout
