"""What the agent may do: rules, sandbox, redaction of API keys; what a terminal may be sent.

Promises: a command that is not plainly understood never runs without permission; nothing in the
workspace loosens a rule; a confined command writes only in the workspace and in temporary folders,
and its changes to what git or coder would run later are put back; a key is not shown, stored or
sent to a model. Every part is a hook and can be left out.

Read policy.py first, then permissions.py, rules.py, shell.py and read_only.py; sandbox.py, with
landlock.py below it, and sanitize.py need none of them.
"""
