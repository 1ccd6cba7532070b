"""What the agent may do: rules, protected paths, the sandbox, and the redaction of API keys.

Promises: a command that is not plainly understood never runs without a yes; nothing in the workspace loosens a
permission; a confined command writes only in the workspace and a temporary folder, and what git or coder would run
later by themselves is put back; a key is not shown, stored or sent to a model.

Every part is a hook and can be left out. Read permissions.py first, then rules.py and shell.py; sandbox.py stands alone.
"""
