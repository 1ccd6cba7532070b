"""The tools that the agent works with: read, write, edit, apply_patch, ls, grep, glob, bash.

Promises: what a tool cannot do becomes a result that the model can act on; a file is written whole
or not at all; output is bounded while it is read; no process outlives the program. A tool declares
its permission, asks for it with `ctx.ask` and decides nothing itself; without permissions
everything is allowed.

built_in.py has the list of them; this module imports none. Read files.py first, then workspace.py,
edit.py, text.py and indentation.py; bash.py runs all commands, and processes.py ends what they
leave.
"""
