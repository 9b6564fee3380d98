"""What the server and the proxy do with requests alike."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specdec.server.protocol import RequestError


async def read_body(request: Request, most: int) -> bytes:
    """Raises RequestError for a body of more than `most` bytes, before all of it is read."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise RequestError(f"The body is longer than the {most} bytes that this server takes.", status=413)
    return bytes(body)


async def wait_until_gone(request: Request) -> None:
    """Returns when the client has left. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse(error.to_json(), error.status, headers=error.headers)
