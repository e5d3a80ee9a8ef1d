"""An OpenAI-compatible chat endpoint: one request, one reply, and three kinds of failure."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import httpx

BODY_SHOWN = 200  # characters of an error's body
TIMED_OUT, RATE_LIMITED = 408, 429

logging.getLogger("httpx").setLevel(logging.WARNING)  # it reports every request at INFO


class EndpointError(Exception):
    """A request without a usable reply; the text says why."""


class Refused(EndpointError):
    """The request itself is at fault (4xx): sending it again would change nothing."""


class Transient(EndpointError):
    """Another try may succeed, not before `retry_after` seconds where the server says so.

    `outage` tells a server that is down or failing from one that only asks for patience.
    """

    def __init__(self, text: str, retry_after: float | None = None, outage: bool = True) -> None:
        super().__init__(text)
        self.retry_after, self.outage = retry_after, outage


class Reply(NamedTuple):
    """The assistant's text; `complete` is False when the token limit cut it."""

    text: str
    complete: bool


class Endpoint:
    """`timeout_s` bounds a whole request. Create and use it inside one event loop; errors never show the key."""

    def __init__(self, api_base: str, api_key: str | None, timeout_s: float, max_connections: int) -> None:
        self.api_base, self._key, self._timeout_s = api_base.rstrip("/"), api_key, timeout_s
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=None,  # its limits are per read: a server that drips would never hit them
            limits=httpx.Limits(max_connections=max_connections),
        )

    async def models(self) -> list[str]:
        """Names the endpoint serves. EndpointError."""
        try:
            return [model["id"] for model in (await self._request("GET", "/models"))["data"]]
        except (KeyError, TypeError) as error:
            raise Transient("the answer of /models is no model list") from error

    async def chat(self, model: str, messages: Sequence[dict[str, str]], **sampling: Any) -> Reply:
        """EndpointError when there is no reply."""
        body = await self._request("POST", "/chat/completions", {"model": model, "messages": messages, **sampling})
        try:
            choice = body["choices"][0]
            return Reply(choice["message"]["content"] or "", choice.get("finish_reason") != "length")
        except (KeyError, IndexError, TypeError) as error:
            raise Transient("the answer of /chat/completions is no chat completion") from error

    async def close(self) -> None:
        await self._client.aclose()

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.request(method, self.api_base + path, json=body)
        except TimeoutError:
            raise Transient(f"no answer within {self._timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Transient(f"{type(error).__name__}: {error}") from error
        if response.is_success:
            try:
                return response.json()
            except ValueError as error:
                raise Transient(f"the answer of {path} is no JSON") from error
        text = f"status {response.status_code}: {self._shown(response.text)}"
        if response.is_server_error or response.status_code in (TIMED_OUT, RATE_LIMITED):
            wait = seconds_to_wait(response.headers.get("retry-after"))
            raise Transient(text, wait, outage=response.status_code != RATE_LIMITED)
        raise Refused(text)

    def _shown(self, body: str) -> str:
        return (body.replace(self._key, "***") if self._key else body)[:BODY_SHOWN]


def seconds_to_wait(header: str | None) -> float | None:
    """A `Retry-After` header, in seconds or as a date; None when it is absent or neither."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return None
