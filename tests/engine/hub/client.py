"""Runs the hub's functions as a program of its own, because the client reads its environment when it is imported.

    python client.py resolve|pull|list|remove [MODEL] [--cancel-at BYTES] [--file-limit BYTES]

Prints one JSON object: what came back, or the error's class and text; and what the progress said.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import LoadProgress
from tokamac.engine.hub import download


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action")
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--cancel-at", type=int)
    parser.add_argument("--file-limit", type=int)
    options = parser.parse_args()
    if options.file_limit:
        import resource
        import signal

        # Python would put a module's bytecode in place even where only its beginning could be written.
        sys.dont_write_bytecode = True
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (options.file_limit, options.file_limit))
    before = set(sys.modules)
    steps: list[LoadProgress] = []
    outcome: dict[str, Any] = {"imported_early": "huggingface_hub" in before}
    try:
        outcome["result"] = _act(options, steps)
    except TokamacError as error:
        outcome |= {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    outcome["progress"] = [(step.done, step.total) for step in steps]
    print(json.dumps(outcome, default=str))


def _act(options: argparse.Namespace, steps: list[LoadProgress]) -> object:
    def cancelled() -> bool:
        if options.cancel_at is None:
            return False
        arriving = Path(os.environ["HF_HOME"]).rglob("*.incomplete")
        return sum(path.stat().st_size for path in arriving) >= options.cancel_at

    if options.action == "list":
        return [(m.id, m.nbytes, m.whole) for m in download.list_models()]
    if options.action == "remove":
        return download.remove_model(options.model)
    act = {"resolve": download.resolve, "resolve_adapter": download.resolve_adapter, "pull": download.pull}[
        options.action
    ]
    return act(options.model, progress=steps.append, cancelled=cancelled)


main()
