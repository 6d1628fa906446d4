"""From a decoded body to a `Generation`: what completions and chat completions check alike."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from peg.server.answer import Delivery
from peg.server.errors import invalid
from peg.server.generation import Generation
from peg.server.live import checked_request_id
from peg.server.sampling import refuse_unsupported, sampling_params
from peg.server.service import SERVICE, ServedModel, Service
from peg.server.trace import REQUEST_ID
from peg.server.types import GenerationRequest
from peg.text.stops import OutputRules


def admit_body(request: web.Request, body: GenerationRequest) -> ServedModel:
    """Refuse what needs no prompt to be refused, before anything is tokenised. Settles the request's id."""
    model = request.app[SERVICE].model()
    refuse_unsupported(body)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: only with stream", "stream_options")
    if body.request_id is not None:
        request[REQUEST_ID] = checked_request_id(body.request_id, "request_id")
    return model


def check_choices(service: Service, body: GenerationRequest, prompts: int) -> None:
    """Refuse more choices than the server takes in one request."""
    n, limit = body.n or 1, service.config.max_choices
    if n * prompts > limit:
        raise invalid(f"n {n} × {prompts} prompts: at most {limit} choices a request", "n")


def generation_of(
    request: web.Request, body: GenerationRequest, prompts: Sequence[tuple[int, ...]], max_tokens: int | None
) -> Generation:
    """What the engine is asked for. Everything that the engine checks itself is left to it."""
    service = request.app[SERVICE]
    model = service.model()
    texts = model.texts
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    stop_token_ids = frozenset(body.stop_token_ids or ())
    skips_special = body.skip_special_tokens is not False
    eos_ids = frozenset() if body.ignore_eos else frozenset(model.info.eos_token_ids)
    return Generation(
        request_id=request[REQUEST_ID],
        prompts=prompts,
        n=body.n or 1,
        sampling=sampling_params(body, texts.defaults, service.new_seed() if body.seed is None else body.seed),
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        rules=OutputRules(
            texts.tokenizer,
            stops=tuple(stops),
            include_stop=bool(body.include_stop_str_in_output),
            skipped=texts.tokenizer.skipped_ids() if skips_special else frozenset(),
        ),
        hidden_ids=frozenset() if body.include_stop_str_in_output else eos_ids | stop_token_ids,
    )


def delivery_of(body: GenerationRequest) -> Delivery:
    """How the answer goes out."""
    options = body.stream_options
    return Delivery(
        streams=bool(body.stream),
        usage_event=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
    )
