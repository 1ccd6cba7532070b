"""The tools that the agent works with: read, write, edit, apply_patch, ls, grep, glob, bash.

Promises: what a tool cannot do becomes a result that the model can act on; a file is written whole or not at
all; output is bounded while it is read; no process outlives the program. A tool declares its permission,
asks for it with `ctx.ask` and decides nothing itself; without permissions everything is allowed.

Read files.py first, then workspace.py, edit.py and indentation.py; bash.py runs every command, and
processes.py ends what it leaves.
"""
