"""One way to run the model, read from end to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from peg.config import EngineConfig
from peg.engine import Engine
from peg.errors import EngineUnavailable
from peg.parity.prompts import Prompts
from peg.parity.reading import TOP, Reading
from peg.plan import EngineInfo, FinishReason, SamplingParams, SequenceRequest, TokenLogprobs
from peg.token_stream import TokenStream


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmReading:
    """What was read: the first prompt alone; then all at once; then the front of a text, and the whole of it."""

    solo: Reading
    batch: tuple[Reading, ...]
    front: Reading
    whole: Reading

    @property
    def fronts(self) -> tuple[Reading, Reading]:
        """The front of the text, read alone and as the front of the whole."""
        return self.front, self.whole.front(len(self.front.prompt_ids))

    @property
    def every(self) -> tuple[Reading, ...]:
        return (self.solo, *self.batch, self.front, self.whole)


async def read_arm(
    config: EngineConfig, prompts: Prompts, new_tokens: int, passes: int = 1
) -> tuple[EngineInfo, list[ArmReading]]:
    """Start an engine, read everything so many times over, close it.

    Later passes find pools full of what the earlier ones left. Raises EngineUnavailable where a request or the engine
    failed, UsageError for what the engine refuses to start.
    """
    engine = Engine(config)
    try:
        await engine.start()
        return engine.info, [await _read_once(engine, prompts, new_tokens) for _ in range(passes)]
    finally:
        await engine.close()


async def _read_once(engine: Engine, prompts: Prompts, new_tokens: int) -> ArmReading:
    texts = {f"prompt {index}": text for index, text in enumerate(prompts.texts)}
    return ArmReading(
        solo=(await _read(engine, {"prompt 0 alone": prompts.texts[0]}, new_tokens))[0],
        batch=await _read(engine, texts, new_tokens),
        front=(await _read(engine, {"the text": prompts.front}, 0))[0],
        whole=(await _read(engine, {"its double": prompts.whole}, 0))[0],
    )


async def _read(engine: Engine, texts: Mapping[str, tuple[int, ...]], new_tokens: int) -> tuple[Reading, ...]:
    """All texts, submitted at once."""
    top = min(TOP, engine.info.vocab_size)
    streams = [
        engine.submit(
            SequenceRequest(
                request_id=name,
                prompt_ids=text,
                sampling=SamplingParams(temperature=0, logprobs=top),
                max_tokens=new_tokens,
                ignore_eos=True,
                prompt_logprobs=top,
            )
        )
        for name, text in texts.items()
    ]
    return tuple([await _collect(stream, text) for stream, text in zip(streams, texts.values(), strict=True)])


async def _collect(stream: TokenStream, prompt: tuple[int, ...]) -> Reading:
    greedy: list[TokenLogprobs] = []
    async for output in stream:
        greedy += (entry for entry in output.logprobs if entry is not None)
    end = stream.terminal
    assert end is not None
    if end.reason is FinishReason.FAILED:
        raise EngineUnavailable(str(end.message))
    return Reading(stream.request_id, prompt, stream.prompt_logprobs, tuple(greedy))
