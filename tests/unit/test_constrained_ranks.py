"""Structured output through real ranks, over a model whose logits never change: what is sampled is exactly known."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from peg.config import EngineConfig
from peg.engine import Engine
from peg.plan import FinishReason, SamplingParams, SequenceRequest
from peg.text.grammar import GrammarCompiler, json_schema
from peg.text.tokenizer import Tokenizer
from peg.token_stream import Output, TokenStream
from tools.fixed_logits import fixed_logits, write_fixed_logits

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yz", None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SEEDS = range(4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "fixed"
    write_fixed_logits(path)
    return path


def request(name: str, prompt: tuple[int, ...], seed: int, logprobs: int | None = None) -> SequenceRequest:
    sampling = SamplingParams(temperature=1.0, seed=seed, logprobs=logprobs)
    most = 30 if logprobs is None else 300  # whoever is constrained comes to an end
    return SequenceRequest(request_id=name, prompt_ids=prompt, sampling=sampling, max_tokens=most)


async def collect(stream: TokenStream) -> list[Output]:
    return [output async for output in stream]


async def run(model: Path, world_size: int) -> dict[str, tuple[list[Output], FinishReason]]:
    """Constrained sequences, and neighbours with the same seeds that are not."""
    engine = Engine(EngineConfig(model="fixed", model_dir=model, tensor_parallel_size=world_size, max_num_seqs=8))
    await engine.start()
    try:
        tokenizer, info = Tokenizer.load(model), engine.info
        compiler = GrammarCompiler(
            tokenizer,
            vocab_size=info.vocab_size,
            end_ids=info.eos_token_ids,
            forbidden_ids=info.forbidden_token_ids,
        )
        grammar = compiler.compile(json_schema(SCHEMA, "p"), "p")
        prompt = tuple(tokenizer.encode("the word"))
        streams = {}
        for seed in SEEDS:
            streams[f"fits {seed}"] = engine.submit(request(f"fits {seed}", prompt, seed, 2), None, grammar.copy())
            streams[f"free {seed}"] = engine.submit(request(f"free {seed}", prompt, seed))
        outputs = await asyncio.gather(*map(collect, streams.values()))
        terminals = [stream.terminal for stream in streams.values()]
        assert all(terminals)
        return {
            name: (output, terminal.reason)
            for name, output, terminal in zip(streams, outputs, terminals, strict=True)
            if terminal is not None
        }
    finally:
        await engine.close()


async def test_constrained_tokens_are_the_same_at_every_world_size(model: Path) -> None:
    """One rank and two sample the same tokens under the same masks; each text fits; logprobs are the model's own."""
    one, two = await run(model, 1), await run(model, 2)
    tokenizer = Tokenizer.load(model)
    scores = fixed_logits(model).double().log_softmax(0)
    texts = set()
    for name, (outputs, reason) in one.items():
        ids = [token for output in outputs for token in output.token_ids]
        assert ids == [token for output in two[name][0] for token in output.token_ids]
        assert reason is two[name][1]
        if name.startswith("free"):
            continue
        assert reason is FinishReason.STOP
        texts.add(tokenizer.decode(ids, skipped=tokenizer.special_ids))
        told = [score for output in outputs for score in output.logprobs]
        for token, score in zip(ids, told, strict=True):
            assert score is not None
            assert score.logprob == pytest.approx(float(scores[token]), abs=1e-4), "taken before the mask"
            assert score.top[0][0] == int(scores.argmax())
    assert len(texts) > 1
    for text in texts:
        value = json.loads(text)
        assert value.keys() == {"a", "b"}
        assert 0 <= value["a"] <= 99
        assert value["b"] in ("x", "yz", None)


async def test_a_constrained_neighbour_changes_nobodys_tokens(model: Path) -> None:
    """Sequences beside constrained ones sample what they sample alone."""
    beside = await run(model, 1)
    engine = Engine(EngineConfig(model="fixed", model_dir=model, max_num_seqs=8))
    await engine.start()
    try:
        prompt = tuple(Tokenizer.load(model).encode("the word"))
        for seed in SEEDS:
            alone = await collect(engine.submit(request("alone", prompt, seed)))
            ids = [token for output in alone for token in output.token_ids]
            assert ids == [token for output in beside[f"free {seed}"][0] for token in output.token_ids]
    finally:
        await engine.close()


def test_the_models_logits_are_known(model: Path) -> None:
    """What the tests of this file, and those over HTTP, take the model to say."""
    logits = fixed_logits(model)
    assert torch.isfinite(logits).all()
    assert int(logits.argmax()) == Tokenizer.load(model).encode(" the")[0]
