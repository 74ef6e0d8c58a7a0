"""Stored responses: references, storing, `GET` and `DELETE`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from agentcache.errors import AgentCacheError, EngineStopped, InvalidRequest, NotFound
from agentcache.server.completion import CompletionWriter
from agentcache.server.context import Call, engine_of
from agentcache.server.engine import Engine
from agentcache.server.reply import Completion
from agentcache.server.response_items import is_reference
from agentcache.server.responses_reply import ResponseReply, ResponseWriter
from agentcache.server.validate import Reader
from agentcache.store.response_files import Continued, Item, StoredResponse

log = logging.getLogger("agentcache.server")

_NOT_STORED = ("agentcache", "token_ids", "prompt_token_ids")


@dataclass(frozen=True)
class References:
    """Ids in a request.

    Args:
        previous: id of the continued response.
        items: place in the input by item id.
    """

    previous: str | None
    items: Mapping[str, str]

    def __bool__(self) -> bool:
        return self.previous is not None or bool(self.items)


def read_references(body: Reader) -> References:
    given = body.get("input")
    items = filter(is_reference, body.objects("input") if isinstance(given, list) else ())
    return References(
        body.string("previous_response_id"), {item.required_string("id"): item.param("id") for item in items}
    )


async def find_continued(engine: Engine, references: References) -> Continued:
    """Look up references.

    Raises:
        InvalidRequest: the response, or one before it, is not stored.
        NotFound: an item is not stored.
    """
    previous, items = references.previous, tuple(references.items)
    found = await engine.use_responses(lambda files: files.continued(previous, items))
    for missing in found.missing:
        if (param := references.items.get(missing)) is not None:
            message = f"Item with id {missing!r:.100} not found: only those of responses with store: true are kept."
            raise NotFound(f"{message} Send the item itself.", param=param, code="item_not_found")
        message = f"Previous response with id {missing!r:.100} not found: only responses with store: true are kept."
        if missing != previous:
            message = f"The response {missing!r:.100}, which the previous one continues, is not stored any more."
        raise InvalidRequest(message, param="previous_response_id", code="previous_response_not_found")
    return found


def own_items(call: Call) -> tuple[Item, ...]:
    given = call.body.get("input")
    if isinstance(given, str):
        return ({"type": "message", "role": "user", "content": given},)
    items = call.body.objects("input")
    return tuple(call.continued.items[item.value["id"]] if is_reference(item) else item.value for item in items)


@dataclass(frozen=True)
class Keep:
    """Stores an answer before its end is sent.

    Args:
        input: items of the request.
    """

    agent: str
    reply: ResponseReply
    input: tuple[Item, ...]

    async def __call__(
        self, engine: Engine, completions: Sequence[Completion], writer: CompletionWriter | None
    ) -> None:
        """Set the answer's `store`. A failure adds a note; the answer is sent."""
        assert writer is None or isinstance(writer, ResponseWriter)
        answer = self.reply.close(completions) if writer is None else writer.close(completions)
        body = {name: value for name, value in answer.items() if name not in _NOT_STORED} | {"store": True}
        response = StoredResponse(body, self.reply.echo.fields, self.input)
        try:
            await engine.use_responses(lambda files: files.add(self.agent, response))
        except EngineStopped:
            raise
        except AgentCacheError as error:
            log.error("response %s of agent %s is not stored: %s", response.id, self.agent, error)
            answer["agentcache"]["notes"].append("store: the response could not be stored; the server's log says why")
        else:
            answer["store"] = True


async def show_response(request: HttpRequest) -> Response:
    if request.query_params.get("stream", "").lower() in ("true", "1"):
        raise InvalidRequest("stream is not supported here: a stored response is whole.", param="stream")
    stored = await _find(request)
    return JSONResponse({**stored.body, **stored.echo})


async def list_input_items(request: HttpRequest) -> Response:
    """Return the items of one request, without the conversation before it."""
    data = (await _find(request)).input
    first, last = (data[0].get("id"), data[-1].get("id")) if data else (None, None)
    return JSONResponse({"object": "list", "data": data, "has_more": False, "first_id": first, "last_id": last})


async def delete_response(request: HttpRequest) -> Response:
    response_id = request.path_params["id"]
    if not await engine_of(request).use_responses(lambda files: files.delete(response_id)):
        raise _not_found(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def _find(request: HttpRequest) -> StoredResponse:
    response_id = request.path_params["id"]
    found = await engine_of(request).use_responses(lambda files: files.find(response_id))
    if found is None:
        raise _not_found(response_id)
    return found[1]


def _not_found(response_id: str) -> NotFound:
    message = f"Response with id {response_id!r:.100} not found: only responses with store: true are kept."
    return NotFound(message, param="{id}", code="response_not_found")
