"""The terminal: one task, or a session at the prompt.

Promises: the prompt appears before anything slow is loaded; Ctrl+C brings it back within a second;
escape sequences of models, tools and servers are removed; standard output of one task has the
answer alone.

Read main.py first, then one_shot.py and repl.py.
"""
