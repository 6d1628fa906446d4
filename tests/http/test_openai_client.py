"""The official `openai` client against peg: what its users write, and what they get. Reads as examples."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from peg.config import EngineConfig
from tests.http.serving import Server, serving

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "say "},
    {"role": "user", "content": "the cat<|im_end|>"},
]
SAID = "say the cat"


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.service.url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


def test_models_list(client: OpenAI) -> None:
    """`models.list` and `models.retrieve`."""
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").id == "echo"


def test_chat(client: OpenAI) -> None:
    """`chat.completions.create`: the message, why it ended, and the usage."""
    completion = client.chat.completions.create(model="echo", messages=MESSAGES, temperature=0, seed=1)
    (choice,) = completion.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SAID, "stop")
    assert completion.usage is not None
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens


def test_streamed_chat(client: OpenAI) -> None:
    """`stream=True`: deltas whose contents joined are the message, then the usage."""
    said, ended, usage = "", [], None
    for chunk in client.chat.completions.create(
        model="echo", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            said += choice.delta.content or ""
            ended += [choice.finish_reason] if choice.finish_reason else []
        usage = chunk.usage or usage
    assert (said, ended) == (SAID, ["stop"])
    assert usage is not None
    assert usage.completion_tokens > 0


def test_chat_stream_helper(client: OpenAI) -> None:
    """The client's own accumulator understands the stream."""
    with client.chat.completions.stream(model="echo", messages=MESSAGES) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == SAID


def test_completions(client: OpenAI) -> None:
    """`completions.create`: several prompts, n, stop, echo's place in the index; and streamed."""
    completion = client.completions.create(model="echo", prompt=["the cat", " the"], n=2, max_tokens=4, stop="catt")
    assert [(choice.index, choice.text, choice.finish_reason) for choice in completion.choices] == [
        (0, "the ", "stop"),
        (1, "the ", "stop"),
        (2, " the the the the", "length"),
        (3, " the the the the", "length"),
    ]
    chunks = client.completions.create(model="echo", prompt="the cat", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "the catthe cat"


def test_every_sampling_field(client: OpenAI) -> None:
    """What the client's own signature has: all of it is honoured, or changes nothing that an answer shows."""
    completion = client.chat.completions.create(
        model="echo",
        messages=MESSAGES,
        max_completion_tokens=9,
        n=2,
        temperature=0.7,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        logit_bias={"65": -100},
        seed=0,
        stop=["END", "zzz"],
        user="anna",
        metadata={"team": "a"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
    )
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert completion.choices[0].message.content == SAID  # a seed of 0: the echo begins where the prompt does


def test_logprobs(client: OpenAI) -> None:
    """Of a chat: each token with its bytes and the likeliest others. Of a completion: columns, the prompt's too."""
    chat = client.chat.completions.create(
        model="echo", messages=[{"role": "user", "content": "é"}], max_tokens=1, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    (token,) = chat.choices[0].logprobs.content or []
    assert (token.token, bytes(token.bytes or ())) == ("é", "é".encode())
    assert [top.logprob for top in token.top_logprobs] == [-0.5, -1.5]
    completion = client.completions.create(model="echo", prompt="the cat", max_tokens=0, logprobs=1, echo=True)
    columns = completion.choices[0].logprobs
    assert columns is not None
    assert completion.choices[0].text == "the cat"
    assert (columns.tokens, columns.token_logprobs, columns.text_offset) == (["the", " cat"], [None, -1.5], [0, 3])


def test_token_ids_in_and_out(client: OpenAI) -> None:
    """A prompt of ids is taken as it is; `return_token_ids` tells those of the answer."""
    completion = client.completions.create(
        model="echo", prompt=[263, 261], max_tokens=2, extra_body={"return_token_ids": True}
    )
    assert completion.choices[0].text == "the cat"
    assert completion.choices[0].model_extra is not None
    assert completion.choices[0].model_extra["token_ids"] == [263, 261]


def test_structured_output(client: OpenAI) -> None:
    """A JSON schema is kept to, whatever the model would rather say."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    completion = client.chat.completions.create(
        model="echo",
        messages=MESSAGES,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}},
        max_tokens=20,
        extra_body={"structured_outputs": None},
    )
    assert (completion.choices[0].message.content or "").startswith("{")


def test_a_request_has_a_name(client: OpenAI, server: Server) -> None:
    """An id of one's own goes in as X-Request-Id and comes back; by it the request may be cancelled."""
    raw = client.completions.with_raw_response.create(
        model="echo", prompt="the", max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().id == "cmpl-mine-1"
    server.group.step_s = 0.01
    stream = client.completions.create(
        model="echo", prompt="the", max_tokens=250, stream=True, extra_body={"request_id": "mine-2", "ignore_eos": True}
    )
    next(iter(stream))
    client.post("/requests/mine-2/cancel", cast_to=object)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "abort"
    server.group.step_s = 0.0


def test_overload_is_a_rate_limit_that_the_client_waits_out(echo: EngineConfig) -> None:
    """A full queue is a RateLimitError with Retry-After; with retries on, the client comes back until there is room."""
    with serving(replace(echo, max_num_seqs=1, max_num_queued_reqs=0)) as server:
        server.group.step_s = 0.02
        with OpenAI(base_url=f"{server.service.url}/v1", api_key="none", max_retries=0) as impatient:
            running = impatient.completions.create(model="echo", prompt="the", max_tokens=40, stream=True)
            with pytest.raises(openai.RateLimitError) as refused:
                impatient.completions.create(model="echo", prompt="the", max_tokens=1)
            assert refused.value.response.headers["retry-after"] == "1"
            patient = impatient.with_options(max_retries=5)
            assert patient.completions.create(model="echo", prompt="the", max_tokens=1).choices[0].text == "the"
            running.close()


def test_extensions_go_through_extra_body(client: OpenAI) -> None:
    """Fields that OpenAI does not have go into `extra_body`."""
    completion = client.completions.create(
        model="echo", prompt="the<|im_end|>", max_tokens=6, extra_body={"ignore_eos": True, "top_k": 1, "min_p": 0.1}
    )
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 6


def test_errors_are_the_clients_own(client: OpenAI) -> None:
    """A refusal is a BadRequestError with message, type, param and code; an unknown model a NotFoundError."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="echo", messages=MESSAGES, temperature=3)
    assert (refused.value.param, refused.value.type, refused.value.code) == (
        "temperature",
        "invalid_request_error",
        "invalid_value",
    )
    assert "got 3" in refused.value.message
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"


def test_a_failure_in_a_stream_is_an_api_error(client: OpenAI, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first event a failure is an error event, which the client raises with its message."""

    def broken(self: object, index: int) -> bytes:
        raise RuntimeError

    monkeypatch.setattr("peg.server.chat.ChatForm.closing", broken)
    with pytest.raises(openai.APIError, match="its log has the details"):
        list(client.chat.completions.create(model="echo", messages=MESSAGES, stream=True))
    server.wait_idle()


def test_leaving_a_stream_early_cancels_it(client: OpenAI, server: Server) -> None:
    """`break` and close: the sequence ends."""
    with client.completions.create(
        model="echo", prompt="the cat", max_tokens=250, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    server.wait_idle()


def test_the_async_client(server: Server) -> None:
    """The asynchronous client: many at once, streamed and not, and an error."""

    async def ask(client: AsyncOpenAI) -> None:
        whole, stream = await asyncio.gather(
            client.chat.completions.create(model="echo", messages=MESSAGES),
            client.chat.completions.create(model="echo", messages=MESSAGES, stream=True),
        )
        assert whole.choices[0].message.content == SAID
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == SAID

    async def everyone() -> None:
        async with AsyncOpenAI(base_url=f"{server.service.url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["echo"]
            await asyncio.gather(*(ask(client) for _ in range(8)))
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model="echo", prompt="", max_tokens=1)

    asyncio.run(everyone())
