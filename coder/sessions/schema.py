"""The tables of the sessions, and the queries on them."""

from __future__ import annotations

from dataclasses import fields

from coder.types import Usage

APPLICATION = 0x636F6472  # application_id, which marks the file as this program's
VERSION = 3  # user_version
USAGE = tuple(column.name for column in fields(Usage))
COLUMNS = ("id", "title", "directory", "agent", "model", "parent", "forked", "created", "updated")

SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS session (
  id TEXT PRIMARY KEY, title TEXT NOT NULL DEFAULT '', directory TEXT NOT NULL,
  agent TEXT NOT NULL DEFAULT '', model TEXT NOT NULL DEFAULT '',
  parent TEXT REFERENCES session(id) ON DELETE SET NULL, forked INTEGER NOT NULL DEFAULT 0,
  created INTEGER NOT NULL, updated INTEGER NOT NULL,
  input INTEGER NOT NULL DEFAULT 0, output INTEGER NOT NULL DEFAULT 0,
  cached INTEGER NOT NULL DEFAULT 0, reasoning INTEGER NOT NULL DEFAULT 0,
  estimated INTEGER NOT NULL DEFAULT 0, cost REAL);
CREATE TABLE IF NOT EXISTS message (
  id INTEGER PRIMARY KEY, session TEXT NOT NULL REFERENCES session(id) ON DELETE CASCADE,
  position INTEGER NOT NULL, active INTEGER NOT NULL DEFAULT 1, role TEXT NOT NULL,
  finish TEXT, error TEXT, tokens TEXT, completed INTEGER, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS part (
  id INTEGER PRIMARY KEY, session TEXT NOT NULL REFERENCES session(id) ON DELETE CASCADE,
  message INTEGER REFERENCES message(id) ON DELETE CASCADE, type TEXT NOT NULL, call_id TEXT,
  state TEXT, title TEXT, start INTEGER, "end" INTEGER, data TEXT NOT NULL DEFAULT '{{}}');
CREATE TABLE IF NOT EXISTS todo (
  session TEXT NOT NULL REFERENCES session(id) ON DELETE CASCADE, position INTEGER NOT NULL,
  text TEXT NOT NULL, status TEXT NOT NULL, PRIMARY KEY (session, position));
CREATE INDEX IF NOT EXISTS session_by_parent ON session(parent);
CREATE INDEX IF NOT EXISTS message_by_place ON message(session, position, active);
CREATE INDEX IF NOT EXISTS part_by_message ON part(message);
CREATE INDEX IF NOT EXISTS part_by_session ON part(session);
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
COMMIT;
"""

# A damaged file may hold values of other types: each is cast to the one of its column
TYPES = dict.fromkeys(COLUMNS, "TEXT")
TYPES |= dict.fromkeys(("forked", "created", "updated", *USAGE), "INTEGER")
INFO = f"""SELECT {", ".join(f"CAST({name} AS {kind}) AS {name}" for name, kind in TYPES.items())},
  (SELECT count(*) FROM message WHERE session = session.id AND active = 1) AS messages,
  (SELECT CAST(data AS TEXT) FROM message WHERE session = session.id
   ORDER BY position LIMIT 1) AS first
  FROM session """
DATA = "CAST(data AS TEXT) AS data"
ACTIVE = "FROM message WHERE session = ? AND active = 1"
# What is searched, to be followed by a condition. Two queries, since the newest messages end the
# first one early
TEXTS = (
    """SELECT session, data FROM
    (SELECT id, session, role, CAST(data AS TEXT) AS data FROM message)
    WHERE role IN ('user', 'assistant') AND""",
    """SELECT id AS session, data FROM
    (SELECT id, json_object('role', 'user', 'content', CAST(title AS TEXT)) AS data FROM session)
    WHERE""",
)
NAMES = "SELECT CAST(id AS TEXT), CAST(title AS TEXT) FROM session ORDER BY id"
# Makes the row of a session that cannot be read of its messages
COMPLETION = """INSERT OR IGNORE INTO session (id, directory, created, updated)
  SELECT session, '', coalesce(min(completed), 0), coalesce(max(completed), 0)
  FROM message GROUP BY session;"""
LISTED = """(parent IS NULL OR forked)
  AND EXISTS (SELECT 1 FROM message WHERE session = session.id AND active = 1)"""
