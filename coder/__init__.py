"""coder: a coding agent for the terminal and a library, small enough to be read.

    from coder import ChatModel, run_loop

    for event in run_loop([], ChatModel("gpt-5"), prompts="Say hello."):
        print(event)

The core is in this folder: types, events, abort, loop, model_call, tool_calls, run, toolset, arguments,
hooks, history, ai, in the reading order of docs/reading-guide.md. Everything else is in a folder of its own
that begins with an __init__.

Importing the package does nothing: no folder, no output, no network, no .env. A public name is loaded when
it is first used.
"""

TYPE_CHECKING = False  # nothing is imported here: under plain `python -m coder` this runs before the folder we stand in is off the path

if TYPE_CHECKING:
    from coder.abort import Abort
    from coder.agent.agent import Agent
    from coder.agent.parallel import ParallelTools
    from coder.ai import ChatModel, Model
    from coder.devtools.replay import ScriptedModel
    from coder.devtools.scripted import Reply, ScriptedServer
    from coder.events import (
        BaseEvent,
        Compacted,
        DoomLoop,
        Event,
        Events,
        HookFailed,
        MessageEnd,
        MessageStart,
        Nested,
        Notice,
        PermissionAsked,
        PermissionReplied,
        QuestionAsked,
        ReasoningDelta,
        Retry,
        Returning,
        RunEnd,
        RunStart,
        Status,
        StepEnd,
        StepStart,
        TextDelta,
        ToolCallDelta,
        ToolEnd,
        ToolStart,
        ToolUpdate,
    )
    from coder.history import convert_to_llm, repair
    from coder.hooks import FunctionHooks, HookChain, Hooks
    from coder.loop import run_loop
    from coder.permissions.permissions import Permissions
    from coder.providers.errors import RetryPolicy
    from coder.providers.usage import Price
    from coder.sessions.recorder import SessionStore
    from coder.tools.bash import bash
    from coder.tools.edit import edit
    from coder.tools.files import ls, read, write
    from coder.tools.patch import apply_patch
    from coder.tools.search import glob, grep
    from coder.toolset import Tool, ToolContext, Toolset, tool
    from coder.types import (
        Aborted,
        Budget,
        CoderError,
        Completion,
        DeniedError,
        Limits,
        Message,
        ModelError,
        Request,
        RunResult,
        ToolCall,
        ToolError,
        ToolResult,
        Usage,
    )

__version__ = "0.1.0"

__all__ = [
    "Abort",
    "Aborted",
    "Agent",
    "BaseEvent",
    "Budget",
    "ChatModel",
    "CoderError",
    "Compacted",
    "Completion",
    "DeniedError",
    "DoomLoop",
    "Event",
    "Events",
    "FunctionHooks",
    "HookChain",
    "HookFailed",
    "Hooks",
    "Limits",
    "Message",
    "MessageEnd",
    "MessageStart",
    "Model",
    "ModelError",
    "Nested",
    "Notice",
    "ParallelTools",
    "PermissionAsked",
    "PermissionReplied",
    "Permissions",
    "Price",
    "QuestionAsked",
    "ReasoningDelta",
    "Reply",
    "Request",
    "Retry",
    "RetryPolicy",
    "Returning",
    "RunEnd",
    "RunResult",
    "RunStart",
    "ScriptedModel",
    "ScriptedServer",
    "SessionStore",
    "Status",
    "StepEnd",
    "StepStart",
    "TextDelta",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolContext",
    "ToolEnd",
    "ToolError",
    "ToolResult",
    "ToolStart",
    "ToolUpdate",
    "Toolset",
    "Usage",
    "apply_patch",
    "bash",
    "convert_to_llm",
    "edit",
    "glob",
    "grep",
    "ls",
    "read",
    "repair",
    "run_loop",
    "tool",
    "write",
]

# Where a public name is looked for, in this order: what comes first is what everything else needs, too.
HOMES = """types events abort toolset hooks history providers.errors providers.usage ai loop
    tools.files tools.edit tools.patch tools.search tools.bash permissions.permissions
    agent.parallel agent.agent sessions.recorder devtools.scripted devtools.replay"""


def __getattr__(name: str) -> object:
    """Load a public name when it is used."""
    if name in __all__:
        for home in HOMES.split():
            module = __import__(f"coder.{home}", fromlist=[name])
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'coder' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
