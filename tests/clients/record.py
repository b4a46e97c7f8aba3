"""``python -m tests.clients.record [NAME …]``: write the first messages of the clients to tests/app/serve/fixtures."""

import http.client
import json
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.app.serve.serving import HOST, serving
from tests.clients.clients import CLIENTS, Client
from tests.clients.shapes import FIXTURES, without_words
from tests.scripted_engine import SCRIPTED

MOST = 2  # of a path: the first message, and the one with what the tools said


def forwarder(port: int, bodies: list[tuple[str, Any]]) -> ThreadingHTTPServer:
    """Return a server that hands requests on, and keeps them."""

    class Forwarding(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"] or 0))
            bodies.append((self.path.partition("?")[0], json.loads(body)))
            connection = http.client.HTTPConnection(HOST, port)
            connection.request("POST", self.path, body)
            answer = connection.getresponse()
            self.send_response(answer.status)
            self.send_header("content-type", answer.headers["content-type"])
            self.end_headers()
            self.wfile.write(answer.read())

        def log_message(self, *_: object) -> None: ...

    return ThreadingHTTPServer((HOST, 0), Forwarding)


def goes_on(body: Any) -> bool:
    """Whether a request needs what its server keeps, so that nobody can play it again."""
    return bool(body.get("previous_response_id")) or '"item_reference"' in json.dumps(body)


def first_messages(client: Client, home: Path) -> list[dict[str, Any]]:
    bodies: list[tuple[str, Any]] = []
    (home / "notes.md").write_text("# notes\n")
    with serving(client.model, home / "log", command=SCRIPTED) as served, forwarder(served.port, bodies) as between:
        threading.Thread(target=between.serve_forever, daemon=True).start()
        url = f"http://{HOST}:{between.server_port}"
        subprocess.run(
            client.command(url), cwd=home, env=client.environment(url, home), stdin=subprocess.DEVNULL, check=True
        )
        between.shutdown()
    count: Counter[str] = Counter()
    found = []
    for path, body in bodies:
        if count[path] < MOST and not goes_on(body):
            count[path] += 1
            found.append({"client": client.name, "path": path, "model": client.model, "body": without_words(body)})
    return found


def main() -> None:
    """Record the clients that are there."""
    wanted = sys.argv[1:] or [each.name for each in CLIENTS]
    FIXTURES.mkdir(exist_ok=True)
    for client in CLIENTS:
        if client.name in wanted and client.is_there:
            with TemporaryDirectory() as home:
                found = first_messages(client, Path(home))
            text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
            (FIXTURES / f"{client.name}.json").write_text(text + "\n", encoding="utf-8")
            print(f"{client.name}: {len(found)} requests, {len(text):,} characters")


if __name__ == "__main__":
    main()
