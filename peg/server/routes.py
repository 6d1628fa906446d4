"""Every route: where the application and the OpenAPI document get them from."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from aiohttp.typedefs import Handler

from peg.server import admin, chat, completions, probes, tokens
from peg.server.types import ChatRequest, CompletionRequest


@dataclass(frozen=True, slots=True)
class Route:
    """One route. `body` is what its JSON body is decoded as; `answers` are the content types of a good answer.

    `disrupts` marks what may end, drain, break or rebuild the engine, which nobody should try at random.
    """

    method: str
    path: str
    handler: Handler
    body: type[msgspec.Struct] | None = None
    answers: tuple[str, ...] = ("application/json",)
    disrupts: bool = False


_STREAMED = ("application/json", "text/event-stream")

ROUTES = (
    Route("GET", "/health", probes.health),
    Route("GET", "/version", probes.show_version),
    Route("GET", "/metrics", probes.show_metrics, answers=("text/plain",)),
    Route("GET", "/v1/models", probes.list_models),
    Route("GET", "/v1/models/{id:.+}", probes.show_model),
    Route("POST", "/v1/completions", completions.create_completion, CompletionRequest, _STREAMED),
    Route("POST", "/v1/chat/completions", chat.create_chat_completion, ChatRequest, _STREAMED),
    Route("POST", "/v1/requests/{id}/cancel", probes.cancel_request),
    Route("DELETE", "/v1/requests/{id}", probes.cancel_request),
    Route("POST", "/tokenize", tokens.tokenize, tokens.TokenizeRequest),
    Route("POST", "/detokenize", tokens.detokenize, tokens.DetokenizeRequest),
    Route("GET", "/admin/health", admin.admin_health),
    Route("POST", "/admin/abort", admin.abort, admin.AbortRequest, disrupts=True),
    Route("POST", "/admin/drain", admin.drain, admin.NothingRequest, disrupts=True),
    Route("POST", "/admin/fail", admin.fail, admin.ReasonRequest, disrupts=True),
    Route("POST", "/admin/rebuild", admin.rebuild, admin.ReasonRequest, disrupts=True),
    Route("GET", "/admin/fault", admin.list_faults),
    Route("POST", "/admin/fault", admin.inject_fault, admin.FaultRequest, disrupts=True),
)
