"""From a decoded body to a `Generation`: what completions and chat completions check alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aiohttp import web

from peg.server.answer import Delivery
from peg.server.errors import invalid
from peg.server.generation import Generation, Prompt
from peg.server.live import checked_request_id
from peg.server.logprobs import Details, TokenNames
from peg.server.sampling import refuse_unsupported, sampling_params
from peg.server.service import SERVICE, ServedModel, Service
from peg.server.token_fields import checked_ids, with_token_fields
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
    """Refuse more choices than the server takes in one request, and more than may wait now."""
    n, limit = body.n or 1, service.config.max_choices
    if n * prompts > limit:
        raise invalid(f"n {n} × {prompts} prompts: at most {limit} choices a request", "n")
    with service.counting_refusals():
        service.engine.check_room((1,) * (n * prompts))  # each has one token at least; nothing is tokenised in vain


def details_of(request: web.Request, body: GenerationRequest, logprobs: int | None, field: str) -> Details:
    """What the answer tells beside its text; `field` is where the request says how many logprobs it wants."""
    service = request.app[SERVICE]
    limit = service.config.max_logprobs
    for name, count in ((field, logprobs), ("prompt_logprobs", body.prompt_logprobs)):
        if count is not None and count > limit:
            raise invalid(f"{name} {count}: at most {limit} (--max-logprobs)", name)
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs: not with stream", "prompt_logprobs")
    return Details(
        names=TokenNames(service.model().texts.tokenizer, bool(body.return_tokens_as_token_ids)),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        echo=bool(body.echo),
        token_ids=bool(body.return_token_ids),
    )


def generation_of(
    request: web.Request,
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    max_tokens: int | None,
    details: Details,
    keep: Sequence[str] = (),
) -> Generation:
    """What the engine is asked for. Everything that the engine checks itself is left to it.

    The special tokens in `keep` stay in the text, for whoever parses it.
    """
    service = request.app[SERVICE]
    model = service.model()
    texts = model.texts
    stop_token_ids = frozenset(checked_ids(body.stop_token_ids or (), "stop_token_ids", texts.tokenizer))
    sampling = sampling_params(body, texts.defaults, service.new_seed() if body.seed is None else body.seed)
    return Generation(
        request_id=request[REQUEST_ID],
        prompts=prompts,
        n=body.n or 1,
        sampling=with_token_fields(replace(sampling, logprobs=details.logprobs), body, texts.tokenizer),
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        rules=_output_rules(body, model, stop_token_ids, keep),
        details=details,
        priority=body.priority or 0,
    )


def _output_rules(
    body: GenerationRequest, model: ServedModel, stop_token_ids: frozenset[int], keep: Sequence[str]
) -> OutputRules:
    """How the tokens become text. A token that ends a choice gives none, unless it is asked for."""
    skipped: frozenset[int] = frozenset()
    if body.skip_special_tokens is not False:
        skipped |= model.texts.tokenizer.skipped_ids(keep)
    if not body.include_stop_str_in_output:
        skipped |= stop_token_ids if body.ignore_eos else stop_token_ids.union(model.info.eos_token_ids)
    return OutputRules(
        model.texts.tokenizer,
        stops=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        include_stop=bool(body.include_stop_str_in_output),
        min_tokens=body.min_tokens or 0,
        skipped=skipped,
    )


def delivery_of(body: GenerationRequest) -> Delivery:
    """How the answer goes out."""
    options = body.stream_options
    return Delivery(
        streams=bool(body.stream),
        usage_event=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
    )
