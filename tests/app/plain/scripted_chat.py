"""``tokamac`` as a program, with the scripted engine behind the chat: MODEL is the name of a scenario.

TEST_SETTINGS is the file of its settings. TEST_HASTE is how many times as fast time passes in which nobody does anything.
"""

import os
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
sys.exit(cli.main())
