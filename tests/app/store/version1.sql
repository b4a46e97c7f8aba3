-- Version 1 of the store, as it was released. Never edit this file.

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
) STRICT;

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
) STRICT;

CREATE TABLE attachments (
    message  INTEGER NOT NULL REFERENCES messages (id) DEFERRABLE INITIALLY DEFERRED,
    position INTEGER NOT NULL,
    kind     TEXT NOT NULL,
    name     TEXT NOT NULL,
    text     TEXT NOT NULL,
    PRIMARY KEY (message, position)
) STRICT;

CREATE INDEX chats_by_age ON chats (updated_at);

CREATE INDEX messages_by_parent ON messages (chat, parent);

CREATE INDEX messages_being_written ON messages (owner) WHERE owner IS NOT NULL;

CREATE VIEW finished AS SELECT id, text FROM messages WHERE state <> 'partial';

CREATE VIRTUAL TABLE search USING fts5 (
    text, content = 'finished', content_rowid = 'id', tokenize = "unicode61 remove_diacritics 2", prefix = '1 2'
);

CREATE TRIGGER message_added AFTER INSERT ON messages WHEN new.state <> 'partial' BEGIN
    INSERT INTO search (rowid, text) VALUES (new.id, new.text);
END;

CREATE TRIGGER message_finished AFTER UPDATE ON messages WHEN old.state = 'partial' AND new.state <> 'partial' BEGIN
    INSERT INTO search (rowid, text) VALUES (new.id, new.text);
END;

CREATE TRIGGER message_removed AFTER DELETE ON messages WHEN old.state <> 'partial' BEGIN
    INSERT INTO search (search, rowid, text) VALUES ('delete', old.id, old.text);
END;

CREATE TRIGGER finished_stays BEFORE UPDATE ON messages WHEN old.state <> 'partial' BEGIN
    SELECT RAISE(ABORT, 'a finished message is never changed');
END;

PRAGMA application_id = 1416318307;
PRAGMA user_version = 1;

INSERT INTO chats VALUES ('aaaabbbb', 'What is a token?', 'words', 1000.5, 1002.25, NULL, NULL, 'guide', '{"sampling": {"top_p": 0.9}}', '');
INSERT INTO messages VALUES (1, 'aaaabbbb', NULL, 'user', 'complete', NULL, 1000.5, '', '{}', NULL, 'What is a token?', '');
INSERT INTO messages VALUES
    (2, 'aaaabbbb', 1, 'assistant', 'partial', '0123456789abcdef0123456789abcdef', 1002.25, 'guide', '{}', NULL, 'A piece of', '');
INSERT INTO attachments VALUES (1, 0, 'text', 'a.txt', 'attached');
UPDATE chats SET head = 2;
