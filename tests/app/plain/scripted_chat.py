"""``tokamac`` as a program, with the scripted engine behind the chat: MODEL is the name of a scenario.

TEST_SETTINGS is the file of its settings. TEST_HASTE is how many times as fast time passes in which nobody does anything. Where
TEST_CTRL_C is set, Ctrl-C comes once when a prompt was sent and just before the reply is waited for.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tokamac.app import cli, settings
from tokamac.app.backend import client
from tokamac.app.chat.connection import Idle
from tokamac.app.models import local
from tokamac.app.plain import view

ENGINE = Path(__file__).parents[2] / "scripted_engine.py"


def scripted(replace: Callable[[object, str, object], None]) -> None:
    """Put the scripted engine behind the chat, by ``replace(where, name, value)``."""
    replace(client, "CHILD_COMMAND", (sys.executable, str(ENGINE)))
    replace(local, "resolve", lambda written: written)  # scenarios are in no catalogue
    if path := os.environ.get("TEST_SETTINGS"):
        replace(settings, "default_path", lambda: Path(path))


if __name__ == "__main__":
    scripted(setattr)
    if haste := float(os.environ.get("TEST_HASTE", "0")):
        quiet_s = Idle.quiet_s
        Idle.quiet_s = lambda self, since_s: haste * quiet_s(self, since_s)  # type: ignore[method-assign]
        view.LOOK_S = 0.1
    if "TEST_GATE" in os.environ:
        view.RARELY_S = 0.0  # what goes on is said at once: that it does is what a test waits for
    if "TEST_CTRL_C" in os.environ:
        settle, sent = view.PlainView.settle, []

        def settle_interrupted(self: view.PlainView, *, loaded: bool = False) -> None:
            if self.chat.session.engine.replying and not sent:
                sent.append(True)
                signal.raise_signal(signal.SIGINT)
            settle(self, loaded=loaded)

        view.PlainView.settle = settle_interrupted  # type: ignore[method-assign]
    sys.exit(cli.main())
