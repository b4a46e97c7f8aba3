"""What can be asked of the store without changing it. Each answer is of one moment."""

from pathlib import Path
from typing import Self

from tokamac.app.store import chats, search, tree
from tokamac.app.store.database import Database
from tokamac.app.store.query import parse
from tokamac.app.store.values import Archive, Branch, Chat, Hit, Message


class Questions:
    """The reading half of ``Store``. Every method may raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open_to_read(cls, path: Path) -> Self:
        """Open a file that may not be written, or whose folder may not. Raises StoreError."""
        return cls(Database(path, read_only=True))

    def close(self) -> None:
        """Close the file. May be called again."""
        self._database.close()

    @property
    def file(self) -> Path:
        """The file of the store."""
        return self._database.path

    def chats(self, words: str = "", *, limit: int = 50, offset: int = 0, deleted: bool = False) -> list[Chat]:
        """Return chats, last used first, whose titles hold all the words, whatever their case and accents.

        Chats with neither message nor draft are left out. deleted: those that were deleted, instead of the others.
        """
        with self._database.reading() as connection:
            return chats.listed(connection, words, limit, offset, deleted=deleted)

    def chat(self, name: str) -> Chat:
        """Return the chat of this id, or the only one whose id begins so; a deleted one too."""
        with self._database.reading() as connection:
            return chats.find(connection, name)

    def known(self, chat: str) -> Chat | None:
        """Return the chat of exactly this id, a deleted one too; None where there is none, or none any more."""
        rows = self._database.read("SELECT * FROM chats WHERE id = ?", (chat,))
        return chats.chat_of(rows[0]) if rows else None

    def latest(self) -> Chat | None:
        """Return the chat that was used last; None where there is none."""
        return next(iter(self.chats(limit=1)), None)

    def message(self, name: int) -> Message:
        """Return one message."""
        with self._database.reading() as connection:
            return tree.message(connection, name)

    def path(self, chat: str, head: int | None = None) -> list[Message]:
        """Return the messages from the chat's beginning to ``head``, or to where the chat stands."""
        with self._database.reading() as connection:
            end = head or chats.get(connection, chat).head
            if end is None:
                return []
            tree.require_within(connection, chat, end)
            return tree.path(connection, end)

    def siblings(self, message: int) -> list[Message]:
        """Return the messages with the same parent, and this one among them, oldest first."""
        with self._database.reading() as connection:
            return tree.siblings(connection, message)

    def children(self, chat: str, parent: int | None) -> list[Message]:
        """Return what continues ``parent``, or with None, what the chat begins with; oldest first."""
        with self._database.reading() as connection:
            chats.get(connection, chat)
            return tree.children(connection, chat, parent)

    def tip(self, message: int) -> int:
        """Return the newest message at or below this one: where to go on when its branch is chosen."""
        with self._database.reading() as connection:
            return tree.tip(connection, message)

    def tree(self, chat: str) -> list[Branch]:
        """Return every message of a chat without its text, parents first."""
        with self._database.reading() as connection:
            chats.get(connection, chat)
            return tree.branches(connection, chat)

    def archive(self, chat: str) -> Archive:
        """Return a chat with all of its messages, for export."""
        with self._database.reading() as connection:
            return Archive(chats.get(connection, chat), tuple(tree.all_of(connection, chat)))

    def search(self, typed: str, limit: int = 50) -> list[Hit]:
        """Return the newest finished messages that hold all the words typed, the last of which may be a beginning.

        Whatever is typed is looked for, never obeyed: there are no operators. Messages of deleted chats are left out.
        """
        with self._database.reading() as connection:
            return search.search(connection, parse(typed), limit)

    def searchable(self) -> int:
        """Return how many messages a search looks through, those of deleted chats among them."""
        return int(self._database.read(f"SELECT count(*) FROM messages m WHERE {search.SEARCHED}")[0][0])

    def history(self, limit: int = 100, chat: str | None = None) -> list[str]:
        """Return what the user sent, newest first, each text once; with ``chat``, in that chat alone."""
        with self._database.reading() as connection:
            return tree.history(connection, limit, chat)

    def check(self) -> None:
        """Read the whole file and raise StoreDamagedError if it is not whole: half a second for a hundred thousand messages."""
        self._database.check()
