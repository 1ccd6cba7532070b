"""The terminal: one task, or a session at the prompt.

Promises: the prompt comes before anything slow is loaded; Ctrl+C brings it back within a second; nothing that a
model, a tool or a server writes drives the terminal; stdout of one task holds the answer alone.

Read main.py first, then app.py, one_shot.py and repl.py.
"""
