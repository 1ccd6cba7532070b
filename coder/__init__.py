"""coder: a coding agent for the terminal and a library, small enough to be read.

    from coder import ChatModel, run_loop

    for event in run_loop([], ChatModel("gpt-5"), prompt="Say hello."):
        print(event)

The core is in this folder: types, events, abort, loop, model_call, tool_calls, run, toolset, arguments,
hooks, history, ai, in the reading order of docs/reading-guide.md. Everything else is in a folder of its own
that begins with an __init__.

Importing the package does nothing: no folder, no output, no network, no .env. A public name is loaded when
it is first used.
"""

TYPE_CHECKING = False  # nothing is imported here: under plain `python -m coder` this runs while the current folder is still on the path

if TYPE_CHECKING:
    from coder.abort import Abort as Abort
    from coder.agent.agent import Agent as Agent
    from coder.agent.parallel import ParallelTools as ParallelTools
    from coder.ai import ChatModel as ChatModel
    from coder.ai import Model as Model
    from coder.devtools.scripted import Reply as Reply
    from coder.devtools.scripted import ScriptedModel as ScriptedModel
    from coder.devtools.scripted import ScriptedServer as ScriptedServer
    from coder.devtools.trace import Trace as Trace
    from coder.events import BaseEvent as BaseEvent
    from coder.events import Compacted as Compacted
    from coder.events import DoomLoop as DoomLoop
    from coder.events import Event as Event
    from coder.events import Events as Events
    from coder.events import MessageEnd as MessageEnd
    from coder.events import MessageStart as MessageStart
    from coder.events import Nested as Nested
    from coder.events import Notice as Notice
    from coder.events import PermissionAsked as PermissionAsked
    from coder.events import PermissionReplied as PermissionReplied
    from coder.events import QuestionAsked as QuestionAsked
    from coder.events import ReasoningDelta as ReasoningDelta
    from coder.events import Retry as Retry
    from coder.events import Returning as Returning
    from coder.events import RunEnd as RunEnd
    from coder.events import RunStart as RunStart
    from coder.events import Status as Status
    from coder.events import StepEnd as StepEnd
    from coder.events import StepStart as StepStart
    from coder.events import TextDelta as TextDelta
    from coder.events import ToolCallDelta as ToolCallDelta
    from coder.events import ToolEnd as ToolEnd
    from coder.events import ToolStart as ToolStart
    from coder.events import ToolUpdate as ToolUpdate
    from coder.history import convert_to_llm as convert_to_llm
    from coder.history import repair as repair
    from coder.hooks import FunctionHooks as FunctionHooks
    from coder.hooks import HookChain as HookChain
    from coder.hooks import Hooks as Hooks
    from coder.loop import run_loop as run_loop
    from coder.permissions.permissions import Permissions as Permissions
    from coder.permissions.rules import rules_of as rules_of
    from coder.providers.errors import RetryPolicy as RetryPolicy
    from coder.providers.profiles import Price as Price
    from coder.sessions.recorder import SessionStore as SessionStore
    from coder.tools.bash import bash as bash
    from coder.tools.edit import edit as edit
    from coder.tools.files import ls as ls
    from coder.tools.files import read as read
    from coder.tools.files import write as write
    from coder.tools.patch import apply_patch as apply_patch
    from coder.tools.search import glob as glob
    from coder.tools.search import grep as grep
    from coder.toolset import Tool as Tool
    from coder.toolset import ToolContext as ToolContext
    from coder.toolset import Toolset as Toolset
    from coder.toolset import tool as tool
    from coder.types import Aborted as Aborted
    from coder.types import Budget as Budget
    from coder.types import CoderError as CoderError
    from coder.types import Completion as Completion
    from coder.types import DeniedError as DeniedError
    from coder.types import Limits as Limits
    from coder.types import Message as Message
    from coder.types import ModelError as ModelError
    from coder.types import Request as Request
    from coder.types import RunResult as RunResult
    from coder.types import ToolCall as ToolCall
    from coder.types import ToolError as ToolError
    from coder.types import ToolResult as ToolResult
    from coder.types import Usage as Usage

__version__ = "0.1.0"

# Where each public name is; `__all__` has them all.
HOMES = {
    "abort": "Abort",
    "agent.agent": "Agent",
    "agent.parallel": "ParallelTools",
    "ai": "ChatModel Model",
    "devtools.scripted": "Reply ScriptedModel ScriptedServer",
    "devtools.trace": "Trace",
    "events": (
        "BaseEvent Compacted DoomLoop Event Events MessageEnd MessageStart "
        "Nested Notice PermissionAsked PermissionReplied QuestionAsked ReasoningDelta "
        "Retry Returning RunEnd RunStart Status StepEnd StepStart TextDelta ToolCallDelta "
        "ToolEnd ToolStart ToolUpdate"
    ),
    "history": "convert_to_llm repair",
    "hooks": "FunctionHooks HookChain Hooks",
    "loop": "run_loop",
    "permissions.permissions": "Permissions",
    "permissions.rules": "rules_of",
    "providers.errors": "RetryPolicy",
    "providers.profiles": "Price",
    "sessions.recorder": "SessionStore",
    "tools.bash": "bash",
    "tools.edit": "edit",
    "tools.files": "ls read write",
    "tools.patch": "apply_patch",
    "tools.search": "glob grep",
    "toolset": "Tool ToolContext Toolset tool",
    "types": (
        "Aborted Budget CoderError Completion DeniedError Limits Message ModelError "
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
