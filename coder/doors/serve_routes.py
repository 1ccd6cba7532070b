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

from coder.doors.serve_opencode import Json, View, session_of, view_of
from coder.doors.serve_sessions import History, Live, Sessions, real_folder

MAX_BODY = 10_000_000  # bytes: images are in it
PROMPT = {"parts", "agent", "model"}  # members of a prompt
WORDS = {"once": "once", "always": "always", "reject": "no"}  # opencode's, and ours
EVENTS = "text/event-stream"


def sessions_of(request: Request) -> Sessions:
    sessions: Sessions = request.app.state.sessions
    return sessions


def live_of(request: Request) -> Live:
    """The session of a path. Raises UnknownError."""
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


async def create_session(request: Request) -> Response:
    """Begin a session in a folder."""
    sessions = sessions_of(request)
    await body_of(request)
    named = request.headers.get("x-opencode-directory", "")
    directory = request.query_params.get("directory") or unquote(named)
    live = await sessions.create(real_folder(directory, sessions.cwd))
    return JSONResponse(session_of(live.info))


async def list_sessions(request: Request) -> Response:
    """List the sessions of a folder, the newest first."""
    sessions = sessions_of(request)
    directory = real_folder(request.query_params.get("directory", ""), sessions.cwd)
    return JSONResponse([session_of(info) for info in sessions.infos(directory)])


async def get_session(request: Request) -> Response:
    """Get a session."""
    return JSONResponse(session_of(live_of(request).info))


async def list_status(request: Request) -> Response:
    """List the sessions that are at work."""
    busy = [live for live in sessions_of(request).live.values() if live.is_busy]
    return JSONResponse({live.info.id: {"type": "busy"} for live in busy})


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
    """Raises HTTPException, UnknownError, ConflictError and CoderError."""
    live = live_of(request)
    body = await body_of(request)
    unknown = sorted(body.keys() - PROMPT)
    if unknown:
        raise HTTPException(400, f"{unknown[0]!r} is not supported; known: {sorted(PROMPT)}")
    try:
        model = str((body.get("model") or {}).get("modelID", ""))
        texts, images = parts_of(body["parts"])
    except (LookupError, TypeError, AttributeError):
        form = '{"parts": [{"type": "text", "text": "..."}]}'
        raise HTTPException(400, f"a prompt has the form {form}") from None
    text = "\n".join(texts)
    if not text.strip() and not images:
        raise HTTPException(400, "the prompt is empty")
    agent = str(body.get("agent") or "")
    await sessions_of(request).prompt(live, text, images, agent, model)
    return live


def parts_of(parts: list[Json]) -> tuple[list[str], list[Json]]:
    """The texts and the images of a prompt. Raises HTTPException."""
    texts: list[str] = []
    images: list[Json] = []
    for part in parts:
        kind = part["type"]
        if kind == "text":
            texts.append(str(part["text"]))
        elif kind == "file" and part["url"].startswith("data:image/"):
            images.append({"type": "image_url", "image_url": {"url": part["url"]}})
        else:
            raise HTTPException(400, "a part is a text, or a file with a data:image/ URL")
    return texts, images


async def abort(request: Request) -> Response:
    """End the run of a session."""
    await sessions_of(request).abort(live_of(request))
    return JSONResponse(True)


async def revert(request: Request) -> Response:
    """Undo the last run: its file changes and its messages."""
    live = live_of(request)
    body = await body_of(request)
    wanted = body.get("messageID")
    prompts = [
        each["info"]["id"] for each in view_of(live).messages if each["info"]["role"] == "user"
    ]
    if wanted and wanted not in prompts[-1:]:
        raise HTTPException(400, "only the last run can be undone: that of the newest prompt")
    text = await sessions_of(request).take_back(live)
    undone = {"messageID": prompts[-1] if prompts else "", "prompt": text}
    return JSONResponse(session_of(live.info) | {"revert": undone})


async def unrevert(request: Request) -> Response:
    """Redo what was undone last."""
    live = live_of(request)
    await sessions_of(request).take_back(live, again=True)
    return JSONResponse(session_of(live.info))


# ---- questions -----------------------------------------------------------------------------------


def views_at_work(request: Request) -> list[View]:
    return [view_of(live) for live in sessions_of(request).live.values() if live.is_busy]


async def list_permissions(request: Request) -> Response:
    """List the permissions that are waited for, of all sessions."""
    views = views_at_work(request)
    return JSONResponse([asked for view in views for asked in view.permissions.values()])


async def list_questions(request: Request) -> Response:
    """List the model's questions that wait for an answer, of all sessions."""
    views = views_at_work(request)
    return JSONResponse([asked for view in views for asked in view.questions.values()])


def reply_to_permission(
    request: Request, question_id: str, word: Any, reason: Any = ""
) -> Response:
    """Raises HTTPException, and UnknownError if it does not wait."""
    answer = WORDS.get(str(word))
    if answer is None:
        raise HTTPException(400, f"the answer is one of {', '.join(WORDS)}")
    sessions_of(request).answer(question_id, answer, str(reason))
    return JSONResponse(True)


async def reply_of_session(request: Request) -> Response:
    """Answer a permission: once, always or reject."""
    live_of(request)  # an unknown session is an error
    body = await body_of(request)
    return reply_to_permission(request, request.path_params["permissionID"], body.get("response"))


async def reply_permission(request: Request) -> Response:
    """Answer a permission: once, always or reject; with reject a message for the model."""
    body = await body_of(request)
    question_id = request.path_params["requestID"]
    return reply_to_permission(request, question_id, body.get("reply"), body.get("message", ""))


async def reply_question(request: Request) -> Response:
    """Answer a question of the model."""
    answers = (await body_of(request)).get("answers")
    try:
        text = "\n".join(", ".join(answer) for answer in answers)  # type: ignore[union-attr]
    except TypeError:
        raise HTTPException(400, 'the answers have the form [["..."]]') from None
    sessions_of(request).answer(request.path_params["requestID"], text)
    return JSONResponse(True)


# ---- streams -------------------------------------------------------------------------------------


async def follow_all(request: Request) -> Response:
    """Follow all sessions, in opencode's form; Last-Event-ID brings what was missed."""
    sessions = sessions_of(request)
    number = sessions.number_of(request.headers.get("last-event-id", ""))
    since = sessions.number if number is None else number
    return StreamingResponse(all_events(sessions, since), media_type=EVENTS)


async def follow_session(request: Request) -> Response:
    """Follow one session: its history and then its events; Last-Event-ID brings what was missed."""
    sessions = sessions_of(request)
    number = sessions.number_of(request.headers.get("last-event-id", ""))
    since = -1 if number is None else number
    return StreamingResponse(own_events(sessions, live_of(request), since), media_type=EVENTS)


async def own_events(sessions: Sessions, live: Live, number: int) -> AsyncIterator[str]:
    """The events of a session after this number. If they are no longer there: the history."""
    is_open = True
    while is_open:
        seen = sessions.number
        if number < live.start or number < 0:
            number = live.start
            yield frame(History(live.base).to_dict(), sessions.id_of(number))
        for entry in live.since(number):
            number = entry.number
            yield frame(entry.event, sessions.id_of(number))
        is_open = await sessions.wait(seen)
        if sessions.number == seen:
            yield ": alive\n\n"


async def all_events(sessions: Sessions, number: int) -> AsyncIterator[str]:
    """What changes in all sessions after this number."""
    views: dict[str, View] = {}
    yield frame({"type": "server.connected", "properties": {}})
    is_open = True
    while is_open:
        seen = sessions.number
        frames: list[tuple[int, str]] = []
        for live in sessions.live.values():
            session_id = live.info.id
            if session_id not in views:
                views[session_id] = view_of(live, number)
            frames += frames_of(sessions, views[session_id], number)
        for _, text in sorted(frames, key=itemgetter(0)):
            yield text
        number = seen
        is_open = await sessions.wait(seen)
        if sessions.number == seen:
            yield ": alive\n\n"


def frames_of(sessions: Sessions, view: View, number: int) -> list[tuple[int, str]]:
    """What changes in a session after this number; each with its number."""
    frames = []
    if view.start != view.live.start:
        frames += [(view.live.start, frame(change)) for change in view.show_again()]
    for entry in view.live.since(number):
        changes = view.follow(entry.event, entry.time)
        for change in changes:
            # The last one has the id: a client that comes back gets none of them, or all again
            is_last = change is changes[-1]
            event_id = sessions.id_of(entry.number) if is_last else ""
            frames.append((entry.number, frame(change, event_id)))
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
ROUTES = [
    *(Route(path, endpoint, methods=["GET"]) for path, endpoint in GET.items()),
    *(Route(path, endpoint, methods=["POST"]) for path, endpoint in POST.items()),
]
