"""coder: a coding agent for the terminal and a library, small enough to be read.

    from coder import ChatModel, run_loop

    for event in run_loop([], ChatModel("gpt-5"), prompt="Say hello."):
        print(event)

The core is in this folder: types, events, abort, loop, model_call, tool_calls, run, toolset,
arguments, hooks, history, ai, in the reading order of docs/reading-guide.md. Everything else is in
a folder of its own that begins with an __init__.

Importing the package does nothing: no folder, no output, no network, no .env. A public name is
loaded when it is first used.
"""

__version__ = "0.1.0"

# Where each public name is; `__all__` has them all, and __init__.pyi the same for type checkers.
HOMES = {
    "abort": "Abort",
    "agent.agent": "Agent",
    "agent.compaction": "Compaction",
    "agent.parallel": "ParallelTools",
    "agent.profiles": "AgentSpec",
    "agent.subagent": "Equipment Subagents",
    "ai": "ChatModel Model",
    "doors": "batch",
    "devtools.relay": "Relay",
    "devtools.scripted": "Reply ScriptedModel ScriptedServer",
    "devtools.step": "Stepper",
    "devtools.trace": "Trace",
    "events": (
        "BaseEvent Compacted DoomLoop Event Events MessageEnd MessageStart "
        "Nested Notice PermissionAsked PermissionReplied Question QuestionAsked ReasoningDelta "
        "Retry Returning RunEnd RunStart Status StepEnd StepStart TextDelta ToolCallDelta "
        "ToolEnd ToolStart ToolUpdate"
    ),
    "history": "repair wire_messages",
    "hooks": "FunctionHooks HookChain Hooks",
    "loop": "run_loop",
    "permissions.permissions": "Permissions",
    "permissions.redact": "Redaction Redactor",
    "permissions.rules": "Rule rules_of",
    "permissions.sandbox": "Sandbox",
    "providers.errors": "RetryPolicy",
    "providers.profiles": "Price",
    "session": "Session",
    "sessions.database": "StoreError",
    "sessions.session_store": "SessionStore",
    "sessions.snapshots": "Snapshots UndoResult",
    "sessions.store": "SessionInfo",
    "tools.bash": "bash",
    "tools.edit": "edit",
    "tools.files": "ls read write",
    "tools.patch": "apply_patch",
    "tools.search": "glob grep",
    "toolset": "Tool ToolContext Toolset tool",
    "types": (
        "Aborted Budget CoderError Completion DeniedError Final Limits Message ModelError "
        "Request RunResult ToolCall ToolError ToolResult Usage"
    ),
}
_HOME_OF = {name: home for home, names in HOMES.items() for name in names.split()}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    """Load a public name when it is used."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'coder' has no attribute {name!r}")
    return getattr(__import__(f"coder.{_HOME_OF[name]}", fromlist=[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
