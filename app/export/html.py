"""One conversation as one page: no scripts, nothing fetched, every text escaped.

A content policy says so to the browser too: it allows this style sheet, by its hash, and nothing else.
"""

from base64 import b64encode
from datetime import UTC, datetime
from hashlib import sha256
from html import escape

from tokamac.app.export import prose
from tokamac.app.export.entries import Entry, File, entries, title_of
from tokamac.app.export.style import CSS
from tokamac.app.store.values import Archive


def to_html(archive: Archive) -> str:
    """Return the branch on which the conversation stands as a page."""
    title = escape(title_of(archive))
    began = datetime.fromtimestamp(archive.chat.created_at, UTC)
    articles = "\n".join(_article(entry) for entry in entries(archive))
    policy = f"default-src 'none'; style-src 'sha256-{b64encode(sha256(CSS.encode()).digest()).decode()}'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{CSS}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p><time datetime="{began.isoformat(timespec="seconds")}">{began:%Y-%m-%d %H:%M} UTC</time></p>
</header>
<main>
{articles}
</main>
<footer>Exported by tokamac</footer>
</body>
</html>
"""


def _article(entry: Entry) -> str:
    text = prose.to_html(entry.text) if entry.role == "assistant" else escape(entry.text)
    parts = [
        f'<article class="{entry.role}">',
        f"<h2>{escape(entry.who)}</h2>",
        _folded(entry.thought, entry.thinking) if entry.thinking else "",
        f'<div class="text">{text}</div>' if entry.text else "",
        *(_file(each) for each in entry.files),
        f'<p class="ending">{escape(entry.ending)}</p>' if entry.ending else "",
        *(f'<p class="figures">{escape(line)}</p>' for line in entry.figures),
        "</article>",
    ]
    return "\n".join(part for part in parts if part)


def _file(file: File) -> str:
    return _folded(file.name, file.text)


def _folded(summary: str, text: str) -> str:
    # A newline right after <pre> is not shown, so one is given.
    return f'<details><summary>{escape(summary)}</summary><pre class="plain">\n{escape(text)}</pre></details>'
