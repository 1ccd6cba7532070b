"""coder: a coding agent for the terminal and a library, small enough to read.

    from coder import ChatModel, run_loop

    for event in run_loop([], ChatModel("gpt-5"), prompts="Say hello."):
        print(event)

Read in this order: types, abort, errors, wire, calls, reasoning, history, profile, shaping, connection, endpoint, ai, decision,
states, tools, executor, loop; then what interests you of features and terminal.

Importing the package does nothing: no folder, no print, no network, no .env; a name is loaded when it is used.
"""

TYPE_CHECKING = False  # nothing is imported here: under plain `python -m coder` this runs before the folder we stand in is off the path

if TYPE_CHECKING:
    from coder.abort import Abort
    from coder.ai import ChatModel
    from coder.errors import RetryPolicy
    from coder.features.agent import Agent
    from coder.history import convert_to_llm, repair
    from coder.loop import run_loop
    from coder.tools import Tool, ToolContext, Toolset, tool
    from coder.types import DeniedError, Event, Hooks, Limits, Message, ModelError, RunResult, ToolCall, ToolError, ToolResult, Usage
    from coder.usage import Price

__version__ = "0.1.0"

__all__ = ["Abort", "Agent", "ChatModel", "DeniedError", "Event", "Hooks", "Limits", "Message", "ModelError", "Price", "RetryPolicy",
           "RunResult", "Tool", "ToolCall", "ToolContext", "ToolError", "ToolResult", "Toolset", "Usage", "convert_to_llm", "repair",
           "run_loop", "tool"]

_HOMES = {"abort": ("Abort",), "ai": ("ChatModel",), "errors": ("RetryPolicy",), "features.agent": ("Agent",),
          "history": ("convert_to_llm", "repair"), "loop": ("run_loop",), "tools": ("Tool", "ToolContext", "Toolset", "tool"),
          "types": ("DeniedError", "Event", "Hooks", "Limits", "Message", "ModelError", "RunResult", "ToolCall", "ToolError", "ToolResult",
                    "Usage"),
          "usage": ("Price",)}


def __getattr__(name: str) -> object:
    """Load a public name from the module it lives in."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(__import__(f"coder.{home}", fromlist=[name]), name)
    raise AttributeError(f"module 'coder' has no attribute {name!r}")
