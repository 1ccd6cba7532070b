"""What users add: hooks that may fail, commands of theirs as hooks, plugins.

Promises: what fails or hangs is reported and the run goes on (hooks.py); nothing in a project's folder adds any.

Read hooks.py first; plugins.py shows all that a plugin can do.
"""
