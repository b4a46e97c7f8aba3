"""Conversations on disk: one SQLite file of chats, each a tree of messages in which nothing finished is ever overwritten.

``store`` is the front: everything the chat and the command line ask for; ``values`` is what they get, ``export`` one conversation
as Markdown or JSON and back. Behind the front stand the file with its tables and versions (``database``), rows (``messages``) and
full-text ``search``. No MLX, no Textual, no asyncio: a store belongs to the one thread that opened it.
"""
