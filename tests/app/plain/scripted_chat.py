"""``tokamac`` as a program, with the scripted engine behind the chat: MODEL is the name of a scenario.

TEST_SETTINGS is the file of its settings. TEST_HASTE is how many times as fast time passes in which nobody does anything. Where
TEST_CTRL_C is set, Ctrl-C comes once when a prompt was sent and just before the reply is waited for.
"""

import os
import signal
import sys
from pathlib import Path

from tokamac.app import cli, settings
from tokamac.app.backend import client
from tokamac.app.chat.connection import Idle
from tokamac.app.plain import repl

client.CHILD_COMMAND = (sys.executable, str(Path(__file__).parents[2] / "scripted_engine.py"))
if path := os.environ.get("TEST_SETTINGS"):
    settings.default_path = lambda: Path(path)
if haste := float(os.environ.get("TEST_HASTE", "0")):
    quiet_s = Idle.quiet_s
    Idle.quiet_s = lambda self, since_s: haste * quiet_s(self, since_s)  # type: ignore[method-assign]
    repl.LOOK_S = 0.1
if "TEST_CTRL_C" in os.environ:
    settle, sent = repl.Driver.settle, []

    def settle_interrupted(self: repl.Driver, *, loaded: bool = False) -> None:
        if self.session.engine.replying and not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGINT)
        settle(self, loaded=loaded)

    repl.Driver.settle = settle_interrupted  # type: ignore[method-assign]
sys.exit(cli.main())
