"""Conversations on disk: one SQLite file of chats, each a tree of messages in which nothing finished is ever overwritten.

store     the front: everything the chat and the command line ask for
values    what they get: frozen dataclasses
export    one conversation as Markdown or JSON, and back

Behind the front stand the connection (database), the file and its modes (files), its versions (schema, migrate), who writes which
reply (claims), and the questions in SQL (chats, messages, tree, search). No MLX, no Textual, no asyncio: a store belongs to the one
thread that opened it.
"""
