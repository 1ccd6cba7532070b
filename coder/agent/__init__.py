"""An agent with a memory: the Agent class, and the hooks and tools that make a coding agent of the
loop.

Promises: one owner of messages, queues, subscribers and abort (agent.py); sub-agents never have
more permissions than their caller (subagent.py); a conversation that fills the context window is
shortened and continues (compaction.py).

All but agent.py, state.py and profiles.py may be deleted. Read agent.py first, then profiles.py
(the agents and their prompts).
"""
