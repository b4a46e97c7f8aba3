"""``python -m tests.clients.install``: the newest of each client, into a folder outside the repository."""

import shutil
import subprocess
import sys
from collections.abc import Sequence

from tests.clients.clients import CLIENTS, folder


def run(command: Sequence[str]) -> bool:
    return subprocess.run(command).returncode == 0


def main() -> int:
    """Install; return 1 if a client could not be."""
    python, js = folder() / "py/bin/python", folder() / "js"
    js.mkdir(parents=True, exist_ok=True)
    if not python.exists():
        run([sys.executable, "-m", "venv", str(folder() / "py")])
        run([str(python), "-m", "pip", "install", "--quiet", "uv"])  # pip takes an hour to choose among their versions
    npm = shutil.which("npm")
    for kind in (False, True):
        packages = list(dict.fromkeys(package for each in CLIENTS if each.is_js is kind for package in each.packages))
        if not kind:
            run([str(python), "-m", "uv", "pip", "install", "--quiet", "--upgrade", "--python", str(python), *packages])
        elif npm is not None:
            run([npm, "install", "--no-fund", "--no-audit", "--silent", "--prefix", str(js), *packages])
        else:
            print("npm is not here: the clients in JavaScript are left out")
    absent = [each.name for each in CLIENTS if not each.is_there]
    print(
        f"{len(CLIENTS) - len(absent)} of {len(CLIENTS)} clients are in {folder()}"
        + (f"; not {', '.join(absent)}" if absent else "")
    )
    return 1 if absent else 0


if __name__ == "__main__":
    sys.exit(main())
