"""Conversations on disk: one SQLite file of chats, each a tree of messages; finished ones never change."""

# ``store`` is the API, ``values`` its results, ``export`` Markdown and JSON; behind it are ``database`` and
# ``messages``. No MLX, Textual or asyncio: a store belongs to the thread that opened it.
