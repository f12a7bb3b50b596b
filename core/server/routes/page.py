"""The page at / and the events that feed it."""

import base64
import functools
import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from ..http import EventStream
from ..step_feed import Listener
from .text import event

if TYPE_CHECKING:
    from ..server import Server

_PAGE = Path(__file__).parent.parent / "page.html"


async def page(request: Request) -> Response:
    """A page to chat on and to watch the engine; one file that loads nothing from elsewhere."""
    content, headers = _page()
    return Response(content, headers=headers)


async def steps(request: Request) -> Response:
    """Events about the engine's steps, its KV blocks and the server's figures, for as long as one listens."""
    server: Server = request.app.state.server
    config = server.config.server
    listener = server.feed.listen()
    return EventStream(
        _events(server, listener),
        on_gone=lambda: server.feed.remove(listener),
        ping_interval_s=config.ping_interval_s,
        send_timeout_s=config.send_timeout_s,
        headers={},
    )


async def _events(server: "Server", listener: Listener) -> AsyncIterator[bytes]:
    try:
        async for found in listener.events():
            yield event(found)
    finally:
        server.feed.remove(listener)


@functools.cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers. Only the script and the style that stand in it may run, told by their hashes."""
    content = _PAGE.read_bytes()
    sources = {}
    for tag in ("script", "style"):
        found = re.findall(rb"<%s>(.*?)</%s>" % (tag.encode(), tag.encode()), content, re.DOTALL)
        assert len(found) == 1, f"the page has one <{tag}>"
        digest = base64.b64encode(hashlib.sha256(found[0]).digest()).decode()
        sources[tag] = f"'sha256-{digest}'"
    policy = (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return content, {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
