"""What is kept: conversations in SQLite, and the states of files for undo.

Promises: a kill loses at most the answer in flight; one writer per session; undo never overwrites a
file that the user has changed; an export has no keys.

Only the events of a run are needed. Read recorder.py first, then store.py; snapshots.py is undo.
"""
