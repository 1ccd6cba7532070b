"""Step mode: a stop before each request and before each tool, which shows what will happen.

    agent = Agent("gpt-5", tools=[bash], hooks=Stepper())    # asks on the terminal
    Stepper(permissions, ask=lambda question, keys: "")      # a program's answers

At a stop Enter goes on, `e` edits, `w` shows all, `c` goes on without stops, `q` stops the run,
with a list that can be sent. At a tool `s` skips it: the model gets the result that one types.

It is around the other hooks: a request is shown as they have changed it, and Enter at a tool also
answers what the permissions ask about it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

from coder.abort import Abort
from coder.devtools.request_changes import WIDTH, RequestChanges, answer_lines
from coder.events import Events, PermissionAsked, Returning, resolve
from coder.history import as_text
from coder.hooks import HookChain, Hooks
from coder.toolset import ToolContext
from coder.types import Completion, Message, Request, T, ToolCall, ToolResult

AT_REQUEST = "Enter sends it, [e]dit, [w]hole, [c] no more stops, [q]uit: "
AT_TOOL = "Enter runs it, [e]dit, [s]kip, [c] no more stops, [q]uit: "
SKIPPED = "the result that the model gets: "
NO_JSON = "This is no JSON of the same form; nothing was changed."
ROLES = {"user", "assistant", "tool"}  # of the messages that a request has
ROWS = 12  # of a result that are shown


def ask_in_terminal(question: str, keys: str) -> str:
    """The line that is typed after the question, the end of the input is `q`."""
    try:
        return input(question)
    except EOFError:
        return "q"


def edit_in_terminal(text: str) -> str:
    """The text as it is after the user's editor."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.NamedTemporaryFile("w+", suffix=".json") as file:
        file.write(text)
        file.flush()
        subprocess.run([*shlex.split(editor), file.name], check=False)
        with open(file.name) as changed:
            return changed.read()


class Stepper(HookChain):
    """`ask` gets a question and the keys that answer it, `show` a text, `edit` a text to be
    changed.

    `is_on`: it stops; `c` sets it off, until it is set on again.
    """

    def __init__(
        self,
        *hooks: Hooks,
        ask: Callable[[str, str], str] = ask_in_terminal,
        show: Callable[[str], object] = print,
        edit: Callable[[str], str] = edit_in_terminal,
    ) -> None:
        super().__init__(*hooks)
        self.ask = ask
        self.show = show
        self.edit = edit
        self.is_on = True
        self.changes = RequestChanges()
        self._history: list[Message] = []
        self._abort = Abort()

    def on_run_start(self, abort: Abort) -> Events[None]:
        self._abort = abort
        yield from super().on_run_start(abort)

    # -- a request

    def transform_context(self, messages: list[Message], abort: Abort) -> Events[list[Message]]:
        self._history = messages  # what is edited is changed here, too
        return (yield from super().transform_context(messages, abort))

    def before_llm_call(self, request: Request) -> Events[None]:
        yield from super().before_llm_call(request)
        changes = self.changes
        if self.is_on:
            same = changes.count_same(request.messages)
            for line in changes.lines(request.messages, request.system, len(request.tools)):
                self.show(line)
            self._stop_at_request(request, same)
        changes.keep(request.messages, request.system, len(request.tools))

    def _stop_at_request(self, request: Request, same: int) -> None:
        while True:
            answer = self._stop(AT_REQUEST, "ewcq")
            if answer == "w":
                whole = {"system": request.system, "messages": request.messages}
                self.show(as_json(whole | {"tools": request.tools, "options": request.options}))
            elif answer == "e":
                self._edit_messages(request, same)
            else:
                return

    def _edit_messages(self, request: Request, same: int) -> None:
        """Change the new messages, in the request and in the conversation."""
        new = request.messages[same:]
        changed = self._edited(new, list)
        if changed is None or len(changed) != len(new):
            self.show(NO_JSON)
            return
        request.messages[same:] = changed
        kept = [message for message in self._history if message.get("role") in ROLES]
        for message, edited in zip(kept[len(kept) - len(new) :], changed):
            message.update(edited)

    # -- a tool

    def after_llm_call(self, completion: Completion) -> Events[None]:
        yield from super().after_llm_call(completion)
        if self.is_on:
            answer = answer_lines(completion.message, completion.finish, completion.usage)
            self.show("\n".join(answer))

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> Events[ToolResult | None]:
        if not self.is_on:
            return (yield from super().before_tool_call(call, ctx))
        while True:
            self.show(f"== Tool {call.name} {json.dumps(call.arguments, ensure_ascii=False)}")
            answer = self._stop(AT_TOOL, "escq")
            if answer == "s":
                return ToolResult(self.ask(SKIPPED, ""))
            if answer != "e":
                break
            self._edit_arguments(call)
        # Enter is also the answer to what is asked about this call: one stop a tool
        result = yield from allowed(super().before_tool_call(call, ctx))
        authorize = ctx.authorize
        if authorize:
            ctx.authorize = lambda *asked: allowed(resolve(authorize(*asked)))
        return result

    def _edit_arguments(self, call: ToolCall) -> None:
        """Change the arguments, in the call and in the conversation."""
        changed = self._edited(call.arguments, dict)
        if changed is None:
            self.show(NO_JSON)
            return
        call.arguments = changed
        for message in reversed(self._history):
            for entry in message.get("tool_calls") or ():
                if entry["id"] == call.id:
                    entry["function"]["arguments"] = json.dumps(changed, ensure_ascii=False)
                    return

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> Events[ToolResult | None]:
        changed = yield from super().after_tool_call(call, result)
        result = changed or result
        if self.is_on:
            self._show_result(result)
        return result

    def _show_result(self, result: ToolResult) -> None:
        failed = " (an error)" if result.is_error else ""
        text = as_text(result.content)
        self.show(f"-- Result{failed}: {len(text):,} characters")
        lines = text.splitlines()
        for line in lines[:ROWS]:
            self.show(f"  | {line[:WIDTH]}")
        if len(lines) > ROWS:
            self.show(f"  | ... and {len(lines) - ROWS} more lines")

    # -- stops

    def _stop(self, question: str, keys: str) -> str:
        """The key that was pressed, "" for Enter. Raises Aborted for `q`."""
        answer = self.ask(question, keys).strip().lower()[:1]
        if answer == "c":
            self.is_on = False
        if answer == "q":
            self._abort.set()
        self._abort.check()
        return answer

    def _edited(self, value: Any, kind: type[Any]) -> Any:
        """The value after the user has edited its JSON; None if it is no JSON of this kind."""
        try:
            changed = json.loads(self.edit(as_json(value)))
        except ValueError:
            return None
        return changed if isinstance(changed, kind) else None


def allowed(asking: Events[T]) -> Events[T]:
    """The events without the questions of the permissions, which are answered with yes."""
    with Returning(asking) as work:
        for event in work:
            if isinstance(event, PermissionAsked):
                event.reply("once")
            else:
                yield event
    return work.value


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=repr)
