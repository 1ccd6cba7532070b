"""The tools that the agent has. A new one is added here, to both lists."""

from __future__ import annotations

from dataclasses import replace

from coder.tools.bash import bash
from coder.tools.edit import edit
from coder.tools.files import ls, read, write
from coder.tools.patch import apply_patch
from coder.tools.search import glob, grep

TOOLS = (read, write, replace(edit, twin=apply_patch), bash, grep, glob, ls)
# For the GPT-5 family, which is trained on apply_patch
PATCHING = (read, replace(apply_patch, twin=edit), bash, grep, glob, ls)
