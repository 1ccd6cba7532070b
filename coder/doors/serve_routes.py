"""The routes of the server: those of opencode's API by which its clients work, and the events of a
session as they are.

Each route is a function; the first line of its docstring is in the OpenAPI file.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from operator import itemgetter
from typing import Any
from urllib.parse import unquote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from coder.doors.serve_opencode import Json, View, view_of
from coder.doors.serve_sessions import History, Live, Prompt, Sessions, real_folder
from coder.session import Session
from coder.sessions.store import SessionInfo

MAX_BODY = 10_000_000  # bytes: images are in it
PROMPT = {"parts", "agent", "model"}  # members of a prompt
WORDS = {"once": "once", "always": "always", "reject": "no"}  # opencode's, and ours
EVENTS = "text/event-stream"
ALIVE = ": alive\n\n"  # a comment, which clients ignore

Frame = tuple[int, str]  # an event as a stream has it, with its number


def sessions_of(request: Request) -> Sessions:
    sessions: Sessions = request.app.state.sessions
    return sessions


def live_of(request: Request) -> Live:
    """The session of a path. Raises HTTPException."""
    return sessions_of(request).find(request.path_params["id"])


async def body_of(request: Request) -> Json:
    """The JSON object of a request; {} without a body. Raises HTTPException."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY:
            raise HTTPException(413, f"a body has at most {MAX_BODY:,} bytes")
    try:
        body = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is no JSON") from None
    if not isinstance(body, dict):
        raise HTTPException(400, "the body has to be a JSON object")
    return body


# ---- sessions ------------------------------------------------------------------------------------


def session_of(info: SessionInfo) -> Json:
    shown: Json = {
        "id": info.id,
        "projectID": info.directory,
        "directory": info.directory,
        "title": info.title or info.first,
        "version": "1",
        "time": {"created": info.created, "updated": info.updated},
    }
    if info.parent:
        shown["parentID"] = info.parent
    return shown


async def create_session(request: Request) -> Response:
    """Begin a session in a folder."""
    sessions = sessions_of(request)
    await body_of(request)
    named = request.headers.get("x-opencode-directory", "")
    directory = request.query_params.get("directory") or unquote(named)
    folder = real_folder(directory)
    live = await sessions.create(folder)
    return JSONResponse(session_of(live.info))


async def list_sessions(request: Request) -> Response:
    """List the sessions of a folder, the newest first."""
    folder = real_folder(request.query_params.get("directory", ""))
    infos = sessions_of(request).infos(folder)
    return JSONResponse([session_of(info) for info in infos])


async def get_session(request: Request) -> Response:
    """Get a session."""
    return JSONResponse(session_of(live_of(request).info))


async def list_status(request: Request) -> Response:
    """List the sessions that are at work."""
    busy = {}
    for live in sessions_of(request).at_work():
        busy[live.info.id] = {"type": "busy"}
    return JSONResponse(busy)


async def list_messages(request: Request) -> Response:
    """List the messages of a session, also those of the present run."""
    return JSONResponse(view_of(live_of(request)).messages)


# ---- runs ----------------------------------------------------------------------------------------


async def prompt(request: Request) -> Response:
    """Begin a run, and answer with its last message at its end."""
    live = await begin_run(request)
    assert live.run
    await live.run
    return JSONResponse(view_of(live).messages[-1])


async def prompt_async(request: Request) -> Response:
    """Begin a run."""
    await begin_run(request)
    return Response(status_code=204)


async def begin_run(request: Request) -> Live:
    """Raises HTTPException and CoderError."""
    live = live_of(request)
    body = await body_of(request)
    unknown = sorted(body.keys() - PROMPT)
    if unknown:
        raise HTTPException(400, f"{unknown[0]!r} is not supported; known: {sorted(PROMPT)}")
    wanted = Prompt(agent=str(body.get("agent") or ""))
    try:
        for part in body["parts"]:
            add_part(part, wanted)
        model = body.get("model") or {}
        wanted.model = str(model.get("modelID", ""))
    except (LookupError, TypeError, AttributeError):
        form = '{"parts": [{"type": "text", "text": "..."}]}'
        raise HTTPException(400, f"a prompt has the form {form}") from None
    if not wanted.text.strip() and not wanted.images:
        raise HTTPException(400, "the prompt is empty")
    await sessions_of(request).prompt(live, wanted)
    return live


def add_part(part: Json, prompt: Prompt) -> None:
    """Add a text or an image. Raises HTTPException for another part."""
    kind = part["type"]
    if kind == "text":
        prompt.text += str(part["text"]) + "\n"
    elif kind == "file" and part["url"].startswith("data:image/"):
        url = {"url": part["url"]}
        prompt.images.append({"type": "image_url", "image_url": url})
    else:
        raise HTTPException(400, "a part is a text, or a file with a data:image/ URL")


async def abort(request: Request) -> Response:
    """End the run of a session."""
    await sessions_of(request).abort(live_of(request))
    return JSONResponse(True)


async def revert(request: Request) -> Response:
    """Undo the last run: its file changes and its messages."""
    live = live_of(request)
    body = await body_of(request)
    newest = view_of(live).newest_prompt
    if body.get("messageID", newest) != newest:
        raise HTTPException(400, "only the last run can be undone: that of the newest prompt")
    text = await sessions_of(request).travel(live, Session.undo)
    shown = session_of(live.info)
    shown["revert"] = {"messageID": newest, "prompt": text}
    return JSONResponse(shown)


async def unrevert(request: Request) -> Response:
    """Redo what was undone last."""
    live = live_of(request)
    await sessions_of(request).travel(live, Session.redo)
    return JSONResponse(session_of(live.info))


# ---- questions -----------------------------------------------------------------------------------


async def list_permissions(request: Request) -> Response:
    """List the permissions that are waited for, of all sessions."""
    asked: list[Json] = []
    for live in sessions_of(request).at_work():
        asked += view_of(live).permissions.values()
    return JSONResponse(asked)


async def list_questions(request: Request) -> Response:
    """List the model's questions that wait for an answer, of all sessions."""
    asked: list[Json] = []
    for live in sessions_of(request).at_work():
        asked += view_of(live).questions.values()
    return JSONResponse(asked)


async def reply_of_session(request: Request) -> Response:
    """Answer a permission: once, always or reject."""
    live = live_of(request)
    body = await body_of(request)
    question_id = request.path_params["permissionID"]
    word = word_of(body, "response")
    sessions_of(request).answer(question_id, word, of=live)
    return JSONResponse(True)


async def reply_permission(request: Request) -> Response:
    """Answer a permission: once, always or reject; with reject a message for the model."""
    body = await body_of(request)
    question_id = request.path_params["requestID"]
    reason = str(body.get("message", ""))
    word = word_of(body, "reply")
    sessions_of(request).answer(question_id, word, reason)
    return JSONResponse(True)


def word_of(body: Json, member: str) -> str:
    """Our word for an answer. Raises HTTPException."""
    word = WORDS.get(str(body.get(member)))
    if word is None:
        raise HTTPException(400, f"{member} is one of {', '.join(WORDS)}")
    return word


async def reply_question(request: Request) -> Response:
    """Answer a question of the model."""
    body = await body_of(request)
    question_id = request.path_params["requestID"]
    answers = body.get("answers")
    try:
        texts = [", ".join(answer) for answer in answers or ()]
    except TypeError:
        raise HTTPException(400, 'the answers have the form [["..."]]') from None
    sessions_of(request).answer(question_id, "\n".join(texts), is_text=True)
    return JSONResponse(True)


# ---- streams -------------------------------------------------------------------------------------


async def follow_all(request: Request) -> Response:
    """Follow all sessions, in opencode's form; Last-Event-ID brings what was missed."""
    sessions = sessions_of(request)
    number = last_number(request)
    if number is None:
        number = sessions.number
    stream = all_events(sessions, number)
    return StreamingResponse(stream, media_type=EVENTS)


async def follow_session(request: Request) -> Response:
    """Follow one session: its history and then its events; Last-Event-ID brings what was missed."""
    sessions = sessions_of(request)
    live = live_of(request)
    stream = own_events(sessions, live, last_number(request))
    return StreamingResponse(stream, media_type=EVENTS)


def last_number(request: Request) -> int | None:
    """The number of the last event that the client has; None if this server has sent none."""
    last = request.headers.get("last-event-id", "")
    return sessions_of(request).number_of(last)


async def own_events(
    sessions: Sessions,
    live: Live,
    number: int | None,
) -> AsyncIterator[str]:
    """The events of a session after this number. If they are no longer there: the history."""
    is_open = True
    while is_open:
        seen = sessions.number
        if number is None or number < live.start:
            number = live.start
            history = History(live.base)
            yield frame(history.to_dict(), sessions.id_of(number))
        for entry in live.since(number):
            number = entry.number
            yield frame(entry.event, sessions.id_of(number))
        is_open = await sessions.wait(seen)
        if sessions.number == seen:
            yield ALIVE


async def all_events(sessions: Sessions, number: int) -> AsyncIterator[str]:
    """What changes in all sessions after this number."""
    views: dict[str, View] = {}
    yield frame({"type": "server.connected", "properties": {}})
    is_open = True
    while is_open:
        seen = sessions.number
        frames: list[Frame] = []
        for session_id, live in sessions.live.items():
            if session_id not in views:
                views[session_id] = view_of(live, number)
            frames += frames_of(sessions, views[session_id], number)
        frames.sort(key=itemgetter(0))
        for _, text in frames:
            yield text
        number = seen
        is_open = await sessions.wait(seen)
        if sessions.number == seen:
            yield ALIVE


def frames_of(sessions: Sessions, view: View, number: int) -> list[Frame]:
    """What changes in a session after this number."""
    live = view.live
    frames = []
    if view.start != live.start:
        for change in view.show_again():
            frames.append((live.start, frame(change)))
    for entry in live.since(number):
        changes = view.follow(entry.event, entry.time)
        for change in changes:
            # The last one has the id: a client that comes back gets none of them, or all again
            is_last = change is changes[-1]
            event_id = sessions.id_of(entry.number) if is_last else ""
            text = frame(change, event_id)
            frames.append((entry.number, text))
    return frames


def frame(event: Mapping[str, Any], event_id: str = "") -> str:
    """An event as a stream has it."""
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}data: {json.dumps(event)}\n\n"


GET = {
    "/session": list_sessions,
    "/session/status": list_status,
    "/session/{id}": get_session,
    "/session/{id}/message": list_messages,
    "/session/{id}/event": follow_session,
    "/permission": list_permissions,
    "/question": list_questions,
    "/event": follow_all,
}
POST = {
    "/session": create_session,
    "/session/{id}/message": prompt,
    "/session/{id}/prompt_async": prompt_async,
    "/session/{id}/abort": abort,
    "/session/{id}/revert": revert,
    "/session/{id}/unrevert": unrevert,
    "/session/{id}/permissions/{permissionID}": reply_of_session,
    "/permission/{requestID}/reply": reply_permission,
    "/question/{requestID}/reply": reply_question,
}
ROUTES: list[Route] = []
for table, method in ((GET, "GET"), (POST, "POST")):
    for path, endpoint in table.items():
        ROUTES.append(Route(path, endpoint, methods=[method]))
