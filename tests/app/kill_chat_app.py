"""The real chat with a scripted engine, which notes what its store has acknowledged: run by test_end_to_end.py, and
killed.

python -m tests.app.kill_chat_app FOLDER writes FOLDER/notes, a line of JSON each, by one write: a process that is killed has
written all of a line or, of the last one, nothing or a part.
"""

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from tokamac.app.backend.client import EngineProcess
from tokamac.app.chat import recording
from tokamac.app.chat.start import ChatOptions
from tokamac.app.store.store import Store
from tokamac.app.tui.run import run_chat

NOTED = (
    "add_message", "begin_reply", "checkpoint", "finish_reply", "set_draft", "delete", "undelete", "set_head", "fork",
)  # fmt: skip
CHECKPOINT_S = 0.1  # an hour's checkpoints in a minute


def note_all(file: Path) -> None:
    """Have every write of a store, and every engine's process, noted."""
    out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(**said: Any) -> None:
        os.write(out, (json.dumps(said, default=str) + "\n").encode())

    def noting(name: str) -> Any:
        write = getattr(Store, name)

        @functools.wraps(write)
        def noted(self: Store, *given: Any, **named: Any) -> Any:
            note(op=name, done=False, given=given, named=named)
            made = write(self, *given, **named)
            note(op=name, done=True, given=given, named=named, made=getattr(made, "id", None))
            return made

        return noted

    for name in NOTED:
        setattr(Store, name, noting(name))
    begin = EngineProcess.__init__

    def begun(self: EngineProcess, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        note(op="engine", done=True, given=(), named={}, made=self.pid)

    EngineProcess.__init__ = begun  # type: ignore[method-assign]


def main(folder: Path) -> int:
    """Run until it is killed."""
    note_all(folder / "notes")
    recording.CHECKPOINT_S = CHECKPOINT_S
    return run_chat(
        ChatOptions(
            model="guide",
            engine=(sys.executable, str(Path(__file__).parents[1] / "scripted_engine.py")),
            resume=True,
            store_path=folder / "chats" / "chats.db",
            settings_path=folder / "settings.toml",
            log_path=folder / "engine.log",
        )
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
