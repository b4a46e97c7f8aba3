"""The tables, as the list of steps that lead to them. A step that has been released is never changed: a new one is added.

    chats ──head──▶ messages ──parent──▶ messages        search: an index of the words of every message that is not partial
                        ▲── attachments

That a parent is older than its child makes a ring impossible; that keys hold the chat too keeps every tree within its chat.
"""

Step = tuple[str, ...]
"""SQL statements that lead from one version to the next."""

APPLICATION_ID = 0x546B4D63
"""Says in the file's header that it is ours: "TkMc"."""

_CHATS = """
CREATE TABLE chats (
    id           TEXT PRIMARY KEY,
    title        TEXT NOT NULL,
    title_origin TEXT NOT NULL CHECK (title_origin IN ('words', 'model', 'user')),
    created_at   REAL NOT NULL,
    updated_at   REAL NOT NULL,
    deleted_at   REAL,
    head         INTEGER,
    model        TEXT NOT NULL,
    settings     TEXT NOT NULL CHECK (json_valid(settings)),
    draft        TEXT NOT NULL,
    FOREIGN KEY (id, head) REFERENCES messages (chat, id) DEFERRABLE INITIALLY DEFERRED
) STRICT"""

_MESSAGES = """
CREATE TABLE messages (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    chat       TEXT NOT NULL REFERENCES chats (id) DEFERRABLE INITIALLY DEFERRED,
    parent     INTEGER CHECK (parent < id),
    role       TEXT NOT NULL CHECK (role IN ('system', 'user', 'assistant')),
    state      TEXT NOT NULL CHECK (state IN ('complete', 'partial', 'stopped', 'failed')),
    owner      TEXT CHECK ((owner IS NOT NULL) = (state = 'partial')),
    created_at REAL NOT NULL,
    model      TEXT NOT NULL,
    settings   TEXT NOT NULL CHECK (json_valid(settings)),
    metrics    TEXT CHECK (metrics IS NULL OR json_valid(metrics)),
    text       TEXT NOT NULL,
    thinking   TEXT NOT NULL,
    UNIQUE (chat, id),
    FOREIGN KEY (chat, parent) REFERENCES messages (chat, id) DEFERRABLE INITIALLY DEFERRED
) STRICT"""

_ATTACHMENTS = """
CREATE TABLE attachments (
    message  INTEGER NOT NULL REFERENCES messages (id) DEFERRABLE INITIALLY DEFERRED,
    position INTEGER NOT NULL,
    kind     TEXT NOT NULL,
    name     TEXT NOT NULL,
    text     TEXT NOT NULL,
    PRIMARY KEY (message, position)
) STRICT"""

# A finished text never changes, so its words are indexed once, when it is finished, and not at each checkpoint of a reply.
_SEARCH = (
    "CREATE VIEW finished AS SELECT id, text FROM messages WHERE state <> 'partial'",
    """
CREATE VIRTUAL TABLE search USING fts5 (
    text, content = 'finished', content_rowid = 'id', tokenize = "unicode61 remove_diacritics 2", prefix = '1 2'
)""",
    """
CREATE TRIGGER message_added AFTER INSERT ON messages WHEN new.state <> 'partial' BEGIN
    INSERT INTO search (rowid, text) VALUES (new.id, new.text);
END""",
    """
CREATE TRIGGER message_finished AFTER UPDATE ON messages WHEN old.state = 'partial' AND new.state <> 'partial' BEGIN
    INSERT INTO search (rowid, text) VALUES (new.id, new.text);
END""",
    """
CREATE TRIGGER message_removed AFTER DELETE ON messages WHEN old.state <> 'partial' BEGIN
    INSERT INTO search (search, rowid, text) VALUES ('delete', old.id, old.text);
END""",
    """
CREATE TRIGGER finished_stays BEFORE UPDATE ON messages WHEN old.state <> 'partial' BEGIN
    SELECT RAISE(ABORT, 'a finished message is never changed');
END""",
)

EMPTY_INDEX = "REPLACE INTO search_data (id, block) VALUES (1, x''), (10, x'00000000000000')"
"""FTS5's own rows of totals and of structure, as in an index of nothing: with broken ones SQLite opens none, even to mend it."""

STEPS: tuple[Step, ...] = (
    (
        _CHATS,
        _MESSAGES,
        _ATTACHMENTS,
        "CREATE INDEX chats_by_age ON chats (updated_at)",
        "CREATE INDEX messages_by_parent ON messages (chat, parent)",
        "CREATE INDEX messages_being_written ON messages (owner) WHERE owner IS NOT NULL",
        *_SEARCH,
    ),
)
"""What leads to each version, from 1; the program's version is their number."""
