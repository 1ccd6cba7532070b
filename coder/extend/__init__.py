"""What users add: hooks that may fail, commands as hooks, plugins, MCP servers, commands and skills
as files.

Promises: a hook that fails or hangs is reported and the run goes on (guard.py); nothing in a
project's folder adds anything but prompt files that the user has seen and allowed.

Read guard.py first; plugins.py shows all that a plugin can do.
"""
