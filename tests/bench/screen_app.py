"""The real chat, which notes how replies ended: run by screen.py in a pseudo-terminal.

python -m bench.screen_app ENGINE MODEL TOKENS FOLDER [CHAT] writes FOLDER/replies, one line of the wire's protocol a
reply.
ENGINE is the engine's process, a name in ENGINES.
"""

import sys
from pathlib import Path

from tests.bench import long_child
from tests.scripted_engine import SCRIPTED
from tokamac.app.backend.client import BackendEvent, Died
from tokamac.app.backend.protocol import ReplyEvent, RequestFailed, encode
from tokamac.app.chat.start import ChatOptions
from tokamac.app.tui.run import build, look_for_garbage_rarely
from tokamac.engine.events import Finished
from tokamac.engine.options import Sampling

# A model that recites, and an engine without one, whose model is a scenario.
ENGINES = {"long": long_child.COMMAND, "scripted": SCRIPTED}


def main(engine: str, model: str, tokens: int, folder: Path, chat: str | None = None) -> int:
    """Run until Ctrl+Q."""
    app, bridge = build(
        ChatOptions(
            model=model,
            sampling=Sampling(temperature=0, max_tokens=tokens),
            settings_path=folder / "settings.toml",
            log_path=folder / "engine.log",
            store_path=folder / "chats" / "chats.db",
            chat=chat,
        )
    )
    bridge._command = ENGINES[engine]
    post = bridge.post

    def noting(said: BackendEvent, process: int) -> object:
        event = said
        if isinstance(event, Died):
            event = RequestFailed(None, event.why, event.last_line)
        if isinstance(event, RequestFailed) or (isinstance(event, ReplyEvent) and isinstance(event.event, Finished)):
            with (folder / "replies").open("ab") as file:
                file.write(encode(event))
        return post(said, process)

    bridge.post = noting
    look_for_garbage_rarely()
    try:
        return app.run() or 0
    finally:
        bridge.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), *sys.argv[5:6]))
