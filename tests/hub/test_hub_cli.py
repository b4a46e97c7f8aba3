"""``tokamac models`` on the small local hub, as a program of its own."""

import signal
import subprocess
import sys
from pathlib import Path

from tests.hub.hub_server import Hub

COMMAND = [sys.executable, "-m", "tokamac.app.cli", "models"]


def models(environment: dict[str, str], *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_pull_list_remove(hub: Hub, environment: dict[str, str]) -> None:
    status, out, err = models(environment, "pull", "org/tiny")
    assert status == 0
    assert (Path(out.strip()) / "config.json").read_bytes() == hub.files["config.json"]
    assert err.splitlines()[-1].startswith("downloading 100 %")
    assert "org/tiny" in models(environment, "list")[1]
    assert models(environment, "remove", "org/tiny")[:2][0] == 0
    assert "no models" in models(environment)[1]


def test_ctrl_c_keeps_what_has_arrived(hub: Hub, environment: dict[str, str], tmp_path: Path) -> None:
    hub.stall_at = 200_000
    process = subprocess.Popen(
        [*COMMAND, "pull", "org/tiny"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert hub.stalled.wait(30)
    partial = tmp_path / "hf" / "hub"
    while not any(path.stat().st_size for path in partial.rglob("*.incomplete")):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert any(path.stat().st_size for path in partial.rglob("*.incomplete"))
    hub.stall_at = None
    hub.resume.set()
    assert models(environment, "pull", "org/tiny")[0] == 0


def test_what_fails_is_one_line(hub: Hub, environment: dict[str, str]) -> None:
    hub.gated = True
    status, out, err = models(environment, "pull", "org/tiny")
    assert (status, out) == (1, "")
    assert "HF_TOKEN" in err.splitlines()[-1]
    assert "Traceback" not in err
