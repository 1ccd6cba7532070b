"""What is shown of a session in the form of opencode's API, so that its clients are ours.

A View follows the events of a session and answers each with events in that form: messages whose
parts (text, reasoning, tool calls) grow. It is made anew for each client, of what the session
shows; ids are places in the list of messages. Questions have the fields of both versions of the
API.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from coder.doors.serve_sessions import Live
from coder.history import calls_of, text_of
from coder.sessions.store import SessionInfo
from coder.types import Message

Json = dict[str, Any]

PROVIDER = "coder"
TAIL = 4_000  # characters of the output of a tool at work
SHARE = 50  # a growing text, which is sent as a whole, is sent once it has grown by 1/SHARE


def session_of(info: SessionInfo) -> Json:
    return {
        "id": info.id,
        "projectID": info.directory,
        "directory": info.directory,
        "title": info.title or info.first,
        "version": "1",
        "time": {"created": info.created, "updated": info.updated},
    } | ({"parentID": info.parent} if info.parent else {})


def view_of(live: Live) -> View:
    """All that is shown of a session now."""
    view = View(live)
    for entry in live.entries:
        view.follow(entry.event, entry.time)
    return view


class View:
    """`messages` and the open `permissions` and `questions`, by their ids."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.messages: list[Json] = []
        self.permissions: dict[str, Json] = {}
        self.questions: dict[str, Json] = {}
        self._calls: dict[str, Json] = {}  # the parts of tool calls
        self._unsent = ""  # the end of the text that grows
        self._status = "idle"
        self.show(live.base)

    def show(self, messages: list[Message]) -> list[Json]:
        """Show these messages in place of all before."""
        changes = []
        for each in self.messages:
            removed = {"sessionID": self.live.info.id, "messageID": each["info"]["id"]}
            changes.append(_event("message.removed", **removed))
        for kept in (self.messages, self.permissions, self.questions, self._calls):
            kept.clear()
        for message in messages:
            changes += self.follow({"type": "message_end", "message": message}, 0)
        return changes

    def follow(self, event: Json, time: int) -> list[Json]:
        """What an event changes; to be sent before the next one changes it further."""
        while event["type"] == "nested":
            event = event["event"]
            if event["type"] not in ASKING:  # what a sub-agent does is seen at its call
                return []
        handler = HANDLERS.get(event["type"])
        return handler(self, event, time) if handler else []

    # -- messages

    def _begin(self, role: str, time: int, **more: Any) -> list[Json]:
        session_id = self.live.info.id
        message_id = f"msg_{len(self.messages):08d}"
        info = {"id": message_id, "sessionID": session_id, "role": role, "time": {"created": time}}
        self.messages.append({"info": info | more, "parts": []})
        return [self._changed()]

    def _begin_answer(self, event: Json, time: int) -> list[Json]:
        if event["message"]["role"] != "assistant":
            return []
        if self._is_answering():  # an attempt that failed: its text is void
            parts = self.messages[-1]["parts"]
            self.messages[-1]["parts"] = []
            return [
                _event("message.part.removed", partID=part["id"], **_place_of(part))
                for part in parts
            ]
        parents = [each["info"]["id"] for each in self.messages if each["info"]["role"] == "user"]
        info = self.live.info
        return self._begin(
            "assistant",
            time,
            parentID=parents[-1] if parents else "",
            modelID=event["message"].get("meta", {}).get("model") or info.model,
            providerID=PROVIDER,
            mode=info.agent or "build",
            path={"cwd": info.directory, "root": info.directory},
            **_tokens({}),
        )

    def _is_answering(self) -> bool:
        if not self.messages:
            return False
        info = self.messages[-1]["info"]
        return info["role"] == "assistant" and "completed" not in info["time"]

    def _end_message(self, event: Json, time: int) -> list[Json]:
        message = event["message"]
        meta = message.get("meta", {})
        time = meta.get("timestamp") or time
        if message["role"] == "user":
            return self._add_prompt(message, time)
        if message["role"] == "assistant":
            return self._end_answer(message, meta, time)
        if message["role"] == "tool":
            return self._end_call(
                message["tool_call_id"], message, bool(meta.get("is_error")), time
            )
        return []

    def _add_prompt(self, message: Message, time: int) -> list[Json]:
        info = self.live.info
        model = {"providerID": PROVIDER, "modelID": info.model}
        changes = self._begin("user", time, agent=info.agent or "build", model=model)
        part = self._part("text", time)
        part["text"] = text_of(message)
        return [*changes, _updated(part)]

    def _end_answer(self, message: Message, meta: Json, time: int) -> list[Json]:
        changes = []
        if not self._is_answering():
            changes += self._begin_answer({"message": message}, time)
        info = self.messages[-1]["info"]
        info["time"]["completed"] = time
        info |= _tokens(meta.get("usage") or {})
        if meta.get("aborted"):
            info["error"] = {"name": "MessageAbortedError", "data": {"message": "aborted"}}
        if text_of(message):
            part = self._part("text", time)
            part["text"] = text_of(message)
            self._unsent = ""
            changes.append(_updated(part))
        for call in calls_of(message):
            changes.append(_updated(self._add_call(call)))
        return [*changes, self._changed()]

    def _end_step(self, event: Json, time: int) -> list[Json]:
        if not event["message"]:
            return []
        info = self.messages[-1]["info"]
        info |= _tokens(event["usage"])
        info["finish"] = event["finish_reason"]
        return [self._changed()]

    def _changed(self) -> Json:
        """The newest message has changed."""
        return _event("message.updated", info=self.messages[-1]["info"])

    # -- texts

    def _part(self, kind: str, time: int) -> Json:
        """The part of this kind of the newest message."""
        message = self.messages[-1]
        for part in message["parts"]:
            if part["type"] == kind:
                found: Json = part
                return found
        return self._add_part(kind, text="", time={"start": time})

    def _add_part(self, kind: str, **more: Any) -> Json:
        message = self.messages[-1]
        message_id = message["info"]["id"]
        part_id = f"prt_{message_id[4:]}_{len(message['parts'])}"
        place = {"id": part_id, "sessionID": self.live.info.id, "messageID": message_id}
        part = place | {"type": kind} | more
        message["parts"].append(part)
        return part

    def _grow(self, event: Json, time: int) -> list[Json]:
        if not self._is_answering():
            return []
        kind = event["type"].removesuffix("_delta")
        part = self._part(kind, time)
        part["text"] += event["text"]
        self._unsent += event["text"]
        if len(self._unsent) * SHARE < len(part["text"]):
            return []
        delta = self._unsent
        self._unsent = ""
        return [_updated(part, delta=delta)]

    # -- tools

    def _add_call(self, call: Json) -> Json:
        function = call["function"]
        raw = function["arguments"]
        arguments: Json = {}
        with suppress(ValueError):  # as the model has written it
            arguments = json.loads(raw)
        state = {"status": "pending", "input": arguments, "raw": raw}
        part = self._add_part("tool", callID=call["id"], tool=function["name"], state=state)
        self._calls[call["id"]] = part
        return part

    def _start_call(self, event: Json, time: int) -> list[Json]:
        part = self._calls.get(event["id"])
        if part is None:
            return []
        part["state"] = {
            "status": "running",
            "input": event["arguments"],
            "title": event["title"],
            "metadata": {"output": ""},
            "time": {"start": time},
        }
        return [_updated(part)]

    def _update_call(self, event: Json, time: int) -> list[Json]:
        part = self._calls.get(event["id"])
        if part is None or part["state"]["status"] != "running":
            return []
        metadata = part["state"]["metadata"]
        metadata["output"] = (metadata["output"] + event["text"])[-TAIL:]
        return [_updated(part)]

    def _end_tool(self, event: Json, time: int) -> list[Json]:
        result = event["result"]
        return self._end_call(event["id"], result, event["is_error"], time)

    def _end_call(self, call_id: str, result: Json, is_error: bool, time: int) -> list[Json]:
        """`result` has the content, and what the tool has for programs."""
        part = self._calls.get(call_id)
        if part is None or part["state"]["status"] in ("completed", "error"):
            return []
        before = part["state"]
        text = text_of(result)
        state = {
            "input": before["input"],
            "metadata": result.get("details") or {},
            "time": before.get("time", {"start": time}) | {"end": time},
        }
        if is_error:
            part["state"] = state | {"status": "error", "error": text}
        else:
            title = before.get("title", part["tool"])
            part["state"] = state | {"status": "completed", "output": text, "title": title}
        return [_updated(part)]

    # -- questions

    def _ask_permission(self, event: Json, time: int) -> list[Json]:
        if event["type"] == "doom_loop":
            kind = "doom_loop"
            pattern = event["name"]
            remember = ""
        else:
            kind = event["permission"]
            pattern = event["pattern"]
            remember = event["remember"]
        message_id = self.messages[-1]["info"]["id"]
        asked = {
            "id": event["id"],
            "sessionID": self.live.info.id,
            "metadata": {"diff": event.get("detail", ""), "why": event.get("why", "")},
            # Of the first version
            "messageID": message_id,
            "callID": event["call_id"],
            "type": kind,
            "pattern": remember or pattern,
            "title": pattern,
            "time": {"created": time},
            # Of the second
            "permission": kind,
            "patterns": [pattern],
            "always": [remember] if remember else [],
            "tool": {"messageID": message_id, "callID": event["call_id"]},
        }
        self.permissions[event["id"]] = asked
        return [_event("permission.updated", **asked), _event("permission.asked", **asked)]

    def _ask_question(self, event: Json, time: int) -> list[Json]:
        options = [{"label": option, "description": ""} for option in event["options"]]
        question = {"question": event["question"], "header": "", "options": options}
        asked = {
            "id": event["id"],
            "sessionID": self.live.info.id,
            "questions": [question | {"custom": True}],
            "tool": {"messageID": self.messages[-1]["info"]["id"], "callID": event["call_id"]},
        }
        self.questions[event["id"]] = asked
        return [_event("question.asked", **asked)]

    def _close_question(self, event: Json, time: int) -> list[Json]:
        question_id = event["id"]
        answer = event["answer"]
        place = {"sessionID": self.live.info.id, "requestID": question_id}
        if self.questions.pop(question_id, None):
            return [_event("question.replied", answers=[[answer]], **place)]
        self.permissions.pop(question_id, None)
        word = "reject" if answer == "no" else answer
        more = {"permissionID": question_id, "response": word, "reply": word}
        return [_event("permission.replied", **place, **more)]

    # -- the state of the run

    def _set_status(self, event: Json, time: int) -> list[Json]:
        word = event["status"]
        if word == self._status or word == "retry":  # `_retry` says more
            return []
        return self._new_status(word)

    def _new_status(self, word: str, **more: Any) -> list[Json]:
        self._status = word
        status = {"type": word} | more
        return [_event("session.status", sessionID=self.live.info.id, status=status)]

    def _retry(self, event: Json, time: int) -> list[Json]:
        wait = int(event["delay"] * 1000)
        message = event["error"]["message"]
        return self._new_status(
            "retry", attempt=event["attempt"], message=message, next=time + wait
        )

    def _compacted(self, event: Json, time: int) -> list[Json]:
        return [_event("session.compacted", sessionID=self.live.info.id)]

    def _end_run(self, event: Json, time: int) -> list[Json]:
        self.permissions.clear()
        self.questions.clear()
        session_id = self.live.info.id
        changes = self._new_status("idle")
        reason = event.get("stop_reason", "error")  # `failed` has none
        if reason in ("aborted", "error"):
            name = "MessageAbortedError" if reason == "aborted" else "UnknownError"
            error = {"name": name, "data": {"message": event["text"]}}
            changes.append(_event("session.error", sessionID=session_id, error=error))
            if self.messages and self.messages[-1]["info"]["role"] == "assistant":
                self.messages[-1]["info"]["error"] = error
                changes.append(self._changed())
        return [*changes, _event("session.idle", sessionID=session_id)]


HANDLERS: dict[str, Callable[[View, Json, int], list[Json]]] = {
    "message_start": View._begin_answer,
    "message_end": View._end_message,
    "text_delta": View._grow,
    "reasoning_delta": View._grow,
    "step_end": View._end_step,
    "tool_start": View._start_call,
    "tool_update": View._update_call,
    "tool_end": View._end_tool,
    "permission_asked": View._ask_permission,
    "doom_loop": View._ask_permission,
    "question_asked": View._ask_question,
    "answered": View._close_question,
    "status": View._set_status,
    "retry": View._retry,
    "compacted": View._compacted,
    "run_end": View._end_run,
    "failed": View._end_run,
}
ASKING = {"nested", "permission_asked", "doom_loop", "question_asked"}


def _event(kind: str, /, **properties: Any) -> Json:
    return {"type": kind, "properties": properties}


def _updated(part: Json, **more: Any) -> Json:
    return _event("message.part.updated", part=part, **more)


def _place_of(part: Json) -> Json:
    return {name: part[name] for name in ("sessionID", "messageID")}


def _tokens(usage: Json) -> Json:
    """Of a `usage` of ours; all 0 if it is not known yet."""
    tokens = {
        "input": usage.get("input", 0),
        "output": usage.get("output", 0),
        "reasoning": usage.get("reasoning", 0),
        "cache": {"read": usage.get("cached", 0), "write": 0},
    }
    return {"tokens": tokens, "cost": usage.get("cost") or 0}
