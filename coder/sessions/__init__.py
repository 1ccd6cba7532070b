"""What is kept: conversations in SQLite, and the states of files for undo.

Promises: a kill costs at most the answer in flight; one writer for each session; files that the user changed are
never overwritten by undo; an export holds no keys.

Only the events of a run are needed. Read recorder.py first, then store.py; snapshots.py is undo.
"""
