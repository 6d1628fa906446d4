"""What the routes share: the engine, the texts of its model, and the requests that run. One per process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
from aiohttp import web

from peg.config import EngineConfig, ServerConfig
from peg.engine import Engine, EngineStats
from peg.errors import EngineUnavailable, RequestError
from peg.failure import EngineState
from peg.plan import EngineInfo
from peg.server.errors import ApiError
from peg.server.live import LiveRequests
from peg.server.metrics import Metrics
from peg.server.sampling import SamplingDefaults
from peg.text.chat import ChatTemplate
from peg.text.grammar import GrammarCompiler
from peg.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelTexts:
    """What a model directory says about text and sampling."""

    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: SamplingDefaults

    @classmethod
    def load(cls, model_dir: Path, generation_config: str) -> ModelTexts:
        """Any thread. Raises CheckpointError."""
        defaults = SamplingDefaults.load(model_dir) if generation_config == "auto" else SamplingDefaults()
        return cls(Tokenizer.load(model_dir), ChatTemplate.load(model_dir), defaults)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is loaded: under which names, with which texts, on which engine."""

    names: tuple[str, ...]
    texts: ModelTexts
    grammars: GrammarCompiler
    info: EngineInfo
    created_s: int

    def check_name(self, asked: str | None) -> str:
        """The name for the answer; 404 for a model that is not served."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            served = ", ".join(self.names)
            raise ApiError(404, "model_not_found", f"model {asked!r} is not served; there is: {served}", "model")
        return asked


class Service:
    """The one object behind the routes. Owned by the loop.

    `address` is host and port of the listening socket, as it tells them itself.
    """

    def __init__(
        self, engine: Engine, engine_config: EngineConfig, config: ServerConfig, address: tuple[str, int]
    ) -> None:
        self.engine = engine
        self.config = config
        self.address = address
        self.stop = asyncio.Event()  # set once somebody wants the server to drain and end
        self.fault_injection = engine_config.enable_fault_injection
        self.waits_for_rebuild = engine_config.rebuild_admission == "wait"
        self.names = config.served_model_names or (engine_config.model,)
        self.metrics = Metrics(self.read_engine, engine.vitals, self.names[0])
        self.live = LiveRequests(self.metrics)
        self._model_dir = engine_config.model_dir
        self._model: ServedModel | None = None
        self._random = Random(engine_config.seed)

    async def start(self) -> None:
        """Load texts and engine side by side. Raises UsageError or EngineUnavailable."""
        loading = asyncio.to_thread(ModelTexts.load, self._model_dir, self.config.generation_config)
        texts, started = await asyncio.gather(loading, self.engine.start(), return_exceptions=True)
        for outcome in (texts, started):
            if isinstance(outcome, BaseException):
                raise outcome
        assert isinstance(texts, ModelTexts)
        grammars = await asyncio.to_thread(_grammars, texts.tokenizer, self.engine.info)
        self._model = ServedModel(self.names, texts, grammars, self.engine.info, int(time.time()))

    @property
    def url(self) -> str:
        """Where the server listens."""
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def state(self) -> EngineState:
        """The engine's state, READY only once the texts are there too."""
        state = self.engine.state
        return EngineState.STARTING if state is EngineState.READY and self._model is None else state

    def model(self) -> ServedModel:
        """The loaded model. Raises EngineUnavailable unless the service is READY."""
        if self.state is not EngineState.READY or self._model is None:
            cause = f": {self.engine.cause}" if self.engine.cause else ""
            raise EngineUnavailable(f"the engine is {self.state}{cause}")
        return self._model

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Whatever the engine refuses in the body is counted, once."""
        try:
            yield
        except RequestError:
            self.metrics.rejected()
            raise

    def read_engine(self) -> tuple[EngineState, EngineStats | None]:
        """The state, and a reading of the engine once it has started."""
        return self.state, None if self._model is None else self.engine.stats()

    def sampling_defaults(self) -> dict[str, object]:
        """What applies where a request says nothing, and where that comes from. Only once it is loaded."""
        assert self._model is not None, "the model is not loaded"
        found = msgspec.to_builtins(self._model.texts.defaults)
        source = "generation_config.json; --generation-config none leaves it out"
        return {**found, "source": source if self.config.generation_config == "auto" else "--generation-config none"}

    def new_seed(self) -> int:
        """A seed for a request that brings none: int64, not negative."""
        return self._random.getrandbits(63)


def _grammars(tokenizer: Tokenizer, info: EngineInfo) -> GrammarCompiler:
    return GrammarCompiler(
        tokenizer,
        vocab_size=info.vocab_size,
        end_ids=info.eos_token_ids,
        forbidden_ids=info.forbidden_token_ids,
    )


SERVICE = web.AppKey("service", Service)
