"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec
from aiohttp import web

from peg.plan import TokenLogprobs
from peg.server.answer import answer
from peg.server.body import read_body
from peg.server.errors import invalid
from peg.server.form import Collected, Envelope, Frames, Usage, encode
from peg.server.generation import Choice, Finish, Prompt
from peg.server.intake import admit_body, check_choices, delivery_of, details_of, generation_of
from peg.server.logprobs import Details, chat_logprobs, prompt_logprobs
from peg.server.message_parts import MessageReader
from peg.server.service import SERVICE, ServedModel
from peg.server.structured import compile_grammar
from peg.server.tools import Reading
from peg.server.types import ChatRequest, Message, chat_decoder
from peg.text.chat import ChatTemplate
from peg.text.output_parser import OutputParser
from peg.token_stream import Output


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    body = await read_body(request, chat_decoder)
    model = _with_template(request, body, admit_body(request, body))
    name = model.check_name(body.model)
    check_choices(request.app[SERVICE], body, 1)
    max_tokens = _max_tokens(body)
    details = replace(details_of(request, body, _logprobs(body), "top_logprobs"), echo=False)
    reading = Reading.of(body, model)
    text = _render(body, model, reading)
    prompt = await _prompt(body, model, text)
    generation = generation_of(request, body, [prompt], max_tokens, details, reading.kept_tokens)
    grammar = await compile_grammar(body, model, reading.source(body, model, text))
    form = ChatForm(f"chatcmpl-{generation.request_id}", name, details, lambda: reading.read(text))
    generation = replace(generation, grammar=grammar)
    return await answer(request, generation, form, delivery_of(body))


def _with_template(request: web.Request, body: ChatRequest, model: ServedModel) -> ServedModel:
    """The model, with the request's own template where it brings one and may."""
    if body.chat_template is None:
        return model
    if not request.app[SERVICE].config.trust_request_chat_template:
        raise invalid("chat_template: only with --trust-request-chat-template", "chat_template", "unsupported_value")
    template = ChatTemplate.from_source(body.chat_template, model.texts.tokenizer.special_tokens)
    return replace(model, texts=replace(model.texts, template=template))


def template_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """The messages as templates read them. Parts that a model of text cannot honour are refused."""
    for index, message in enumerate(messages):
        for name in ("audio", "function_call", "annotations"):
            if getattr(message, name):
                param = f"messages.{index}.{name}"
                raise invalid(f"{param}: not supported, only null", param, "unsupported_value")
    return [msgspec.to_builtins(message) for message in messages]


def _render(body: ChatRequest, model: ServedModel, reading: Reading) -> str:
    """The conversation as text."""
    template = model.texts.template
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        if not template.reads("reasoning_effort"):
            raise invalid("reasoning_effort: the model's chat template does not read it", "reasoning_effort")
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    continues = bool(body.continue_final_message)
    return template.render(
        reading.messages(template_messages(body.messages)),
        tools=reading.template_tools(),
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        variables=variables,
    )


async def _prompt(body: ChatRequest, model: ServedModel, text: str) -> Prompt:
    """The conversation as ids. The template writes BOS itself, so the tokenizer adds nothing unless told to."""
    ids = await model.texts.tokenizer.encode_async(
        text,
        context_tokens=model.info.max_model_len,
        add_special_tokens=bool(body.add_special_tokens),
        param="messages",
    )
    return Prompt(tuple(ids), _echo(body) if body.echo else "")


def _echo(body: ChatRequest) -> str:
    """The text that the answer continues, where it begins with it."""
    if not body.continue_final_message:
        raise invalid("echo: only with continue_final_message", "echo")
    content = body.messages[-1].content or ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _logprobs(body: ChatRequest) -> int | None:
    """How many top logprobs are wanted, None for no logprobs."""
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs: only with logprobs true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _max_tokens(body: ChatRequest) -> int | None:
    """The limit that was asked for, `max_completion_tokens` first; None is up to the context."""
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked: int | None = getattr(body, name)
    if asked == 0:
        raise invalid(f"{name} 0: must be at least 1", name)
    return asked


class ChatForm:
    """How a chat completion is written."""

    def __init__(self, answer_id: str, model: str, details: Details, parser: Callable[[], OutputParser | None]) -> None:
        """`parser` makes what reads one choice's text; None where it is told as it is."""
        self.envelope = Envelope(answer_id, "chat.completion.chunk", model)
        self._details = details
        self._parser = parser
        ending = b'},"index":%d,"logprobs":null,"finish_reason":null'
        self._frames = Frames(self.envelope, b'"delta":{"content":', ending)
        self._readers: dict[int, MessageReader | None] = {}

    def opening(self, choice: Choice) -> bytes:
        """The role; the text that the answer continues, where it is repeated; the prompt's ids, where they are told."""
        delta = b'"delta":{"role":"assistant","content":""},"index":%d,"logprobs":null,"finish_reason":null'
        told = b',"prompt_token_ids":' + encode(choice.prompt.ids) if self._details.token_ids else b""
        events = self.envelope.event(delta % choice.index, None, told)
        if choice.prompt.echo:
            events += self.envelope.event(_content(choice.index, choice.prompt.echo), None)
        return events

    def piece(self, choice: Choice, text: str, output: Output, usage: Usage | None) -> bytes:
        reader = self._reader(choice)
        if reader is None and usage is None and not self._details.tells_tokens:
            before, after = self._frames[choice.index]
            return before + encode(text) + after
        deltas = [{"content": text}] if reader is None else reader.feed(text)
        if not self._details.tells_tokens:
            return b"".join(self.envelope.event(_piece(choice.index, delta), usage) for delta in deltas)
        *others, last = deltas or [{}]  # the tokens go with the last of what they brought
        events = [self.envelope.event(_piece(choice.index, delta), None) for delta in others]
        piece: dict[str, object] = {"delta": last, "index": choice.index, "logprobs": None, "finish_reason": None}
        told = encode(self._tell(piece, output.token_ids, output.logprobs))[1:-1]
        return b"".join([*events, self.envelope.event(told, usage)])

    def closing(self, choice: Choice, text: str, finish: Finish, usage: Usage | None) -> bytes:
        reader = self._reader(choice)
        if reader is None:
            last = _choice(choice.index, "delta", {"content": text} if text else {}, finish)
            return self.envelope.event(encode(last)[1:-1], usage)
        events = [self.envelope.event(_piece(choice.index, delta), None) for delta in reader.finish(text)]
        last = _choice(choice.index, "delta", {}, reader.ending(finish))
        return b"".join([*events, self.envelope.event(encode(last)[1:-1], usage)])

    def _reader(self, choice: Choice) -> MessageReader | None:
        """What reads the choice's text, the same one from its first piece to its last."""
        if choice.index not in self._readers:
            parser = self._parser()
            self._readers[choice.index] = None if parser is None else MessageReader(parser)
        return self._readers[choice.index]

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        details, first = self._details, choices[0].choice
        beside: dict[str, object] = {}
        if details.prompt_logprobs is not None:
            beside["prompt_logprobs"] = prompt_logprobs(details.names, first.prompt_scores, details.prompt_logprobs)
        if details.token_ids:
            beside["prompt_token_ids"] = first.prompt.ids
        answers = [self._whole(collected) for collected in choices]
        return self.envelope.document("chat.completion", answers, usage, beside)

    def _whole(self, collected: Collected) -> dict[str, object]:
        choice, reader, finish = collected.choice, self._reader(collected.choice), collected.ending
        text = choice.prompt.echo + collected.text
        message: Mapping[str, object] = {"role": "assistant", "content": text, "refusal": None}
        if reader is not None:
            message = reader.message(text)
            finish = reader.ending(finish)
        document = _choice(choice.index, "message", message, finish)
        return self._tell(document, collected.token_ids, collected.scores)

    def _tell(
        self, document: dict[str, object], token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None]
    ) -> dict[str, object]:
        """Add what is to be told of tokens to a choice, or to one piece of it."""
        if self._details.logprobs is not None:
            document["logprobs"] = chat_logprobs(self._details.names, scores)
        if self._details.token_ids:
            document["token_ids"] = token_ids
        return document


def _piece(index: int, delta: Mapping[str, object]) -> bytes:
    return b'"delta":' + encode(delta) + b',"index":%d,"logprobs":null,"finish_reason":null' % index


def _content(index: int, text: str) -> bytes:
    ending = b'},"index":%d,"logprobs":null,"finish_reason":null' % index
    return b'"delta":{"content":' + encode(text) + ending


def _choice(index: int, kind: str, message: Mapping[str, object], finish: Finish) -> dict[str, object]:
    return {
        "index": index,
        kind: message,
        "logprobs": None,
        "finish_reason": finish.reason,
        "stop_reason": finish.stop_reason,
    }
