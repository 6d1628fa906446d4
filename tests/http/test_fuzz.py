"""Requests that a property-based tester makes of the OpenAPI document, against `peg serve` in a process of its own.

Whatever is sent, the server answers as the document says, never with a 5xx, and afterwards it is as it was before.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.parity.real_models import real_model
from tools.fixed_logits import LIKELIEST, write_fixed_logits

GENERATING = ("/v1/completions", "/v1/chat/completions")
ALWAYS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
AT_ONCE = 8  # requests that are out while the next ones are made
MOST_FIELDS = 5  # of a thinned request: one with all fields is refused for one of them nearly always

OBJECTS: tuple[dict[str, Any], ...] = (  # metadata, arguments, JSON schemas: a few that mean something
    {},
    {"a": None, "é": [1, {"b": "\U0001f600"}]},
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"enum": ["a", 1, None]},
    {"not": {}},
    {"$ref": "#"},
    {"type": "string", "pattern": "(", "minLength": -1},
)

# How many requests of each operation: those that fit its schema, and those that do not.
CASES: tuple[tuple[str, int, int], ...] = (
    ("POST /v1/completions", 2500, 200),
    ("POST /v1/chat/completions", 550, 50),
    ("POST /tokenize", 200, 30),
    ("POST /detokenize", 850, 80),
    ("POST /v1/requests/{id}/cancel", 300, 0),
    ("DELETE /v1/requests/{id}", 300, 0),
    ("GET /v1/models/{id}", 200, 0),
    ("GET /health", 1, 0),
    ("GET /version", 1, 0),
    ("GET /metrics", 1, 0),
    ("GET /v1/models", 1, 0),
    ("GET /admin/health", 1, 0),
    ("GET /admin/fault", 1, 0),
)


@dataclass
class Target:
    """A server, its document, and what has come back so far."""

    url: str
    schema: Any
    statuses: Counter[int] = field(default_factory=Counter)
    served: Counter[int] = field(default_factory=Counter)  # of the generating routes alone
    faults: list[str] = field(default_factory=list)

    @property
    def operations(self) -> dict[str, Any]:
        found = [result.ok() for result in self.schema.get_all_operations()]
        return {operation.label: operation for operation in found}


def seasoned(part: Any) -> Any:
    """The document with its free-form objects drawn from OBJECTS: nested noise costs ten times as much to make."""
    if isinstance(part, list):
        return [seasoned(each) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "object" and not part.keys() & {"properties", "additionalProperties"}:
        return {"enum": list(OBJECTS)}
    return {name: seasoned(value) for name, value in part.items()}


@contextmanager
def target(model: Path, *flags: str) -> Iterator[Target]:
    """`peg serve` with a context of 64 while the body runs; then it must end well within its time."""
    command = [sys.executable, "-m", "peg", "serve", str(model), "--port", "0", "--max-model-len", "64", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = (json.loads(line) for line in process.stderr)
            url = next(line["url"] for line in lines if line["event"] == "ready")
            reading = threading.Thread(target=process.stderr.read)  # a full pipe would stop the server
            reading.start()
            document = requests.get(f"{url}/openapi.json", timeout=10).json()
            schema = schemathesis.openapi.from_dict(seasoned(document))
            schema.config.base_url = url
            yield Target(url, schema)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            reading.join()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """The model whose logits never change."""
    model = tmp_path_factory.mktemp("model") / "fixed"
    write_fixed_logits(model)
    with target(model, "--served-model-name", "fixed", "--max-num-seqs", "32") as served:
        yield served


@st.composite
def thinned(draw: st.DrawFn, strategy: Any, most_tokens: int) -> Any:
    """A case as it comes, or one of few fields, of the served model and short, which gets further."""
    case = draw(strategy)
    if isinstance(case.body, dict) and draw(st.integers(0, 3)):
        kept = draw(st.lists(st.sampled_from(sorted(case.body) or [""]), max_size=MOST_FIELDS))
        needed = ("messages", "prompt", "tokens")
        case.body = {name: value for name, value in case.body.items() if name in kept or name in needed}
        case.body.pop("model", None)
        if case.path in GENERATING:
            case.body["max_tokens"] = draw(st.integers(1, most_tokens))
    return case


def fuzz(served: Target, label: str, mode: GenerationMode, count: int, most_tokens: int = 8) -> None:
    """Make `count` requests of an operation, several at once, and look at every answer."""
    operation = served.operations[label]
    strategy = operation.as_strategy(generation_mode=mode)
    if mode is GenerationMode.POSITIVE:
        strategy = thinned(strategy, most_tokens)
    session = requests.Session()
    session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=AT_ONCE))
    free = threading.Semaphore(AT_ONCE)
    checks = [*ALWAYS, negative_data_rejection] if mode is GenerationMode.NEGATIVE else list(ALWAYS)

    def answered(case: Any) -> Callable[[Future[Any]], None]:
        def look(answer: Future[Any]) -> None:
            free.release()
            try:
                served.statuses[answer.result().status_code] += 1
                if label.partition(" ")[2] in GENERATING:
                    served.served[answer.result().status_code] += 1
                case.validate_response(answer.result(), checks=checks)
            except (Exception, BaseExceptionGroup) as error:  # a group of failures is no Exception
                served.faults.append(f"{type(error).__name__}: {error}\n{label} {case.body!r}"[:3000])

        return look

    with ThreadPoolExecutor(AT_ONCE) as pool:

        @given(case=strategy)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: Any) -> None:
            if served.faults:
                return  # one is enough to read
            free.acquire()
            pool.submit(case.call, session=session, timeout=60).add_done_callback(answered(case))

        ask()
    assert not served.faults, f"{len(served.faults)} faults, the first:\n{served.faults[0]}"


def test_the_table_is_whole(fixed: Target) -> None:
    """Every operation of the document is tried, except those that it marks as disrupting the engine."""
    tried = {label for label, _, _ in CASES}
    disrupting = {label for label, operation in fixed.operations.items() if operation.definition.raw.get("x-disrupts")}
    assert tried | disrupting == set(fixed.operations)
    assert not tried & disrupting


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("label", "fitting", "broken"), CASES)
def test_no_answer_is_a_server_error(fixed: Target, label: str, fitting: int, broken: int) -> None:
    """Requests that fit the schema, and requests that do not and are refused; slow for their number."""
    fuzz(fixed, label, GenerationMode.POSITIVE, fitting)
    if broken:
        fuzz(fixed, label, GenerationMode.NEGATIVE, broken)


def test_afterwards_all_is_as_before(fixed: Target) -> None:
    """It was at least 5,000 requests, many of them served; a good one gets its exact answer, every gauge is zero."""
    print(f"{sum(fixed.statuses.values())} requests: {dict(fixed.statuses)}; generating: {dict(fixed.served)}")
    assert sum(fixed.statuses.values()) >= 5000
    assert fixed.served[200] >= 500
    answer = requests.post(
        f"{fixed.url}/v1/completions", json={"prompt": "the", "max_tokens": 5, "temperature": 0}, timeout=30
    )
    assert answer.json()["choices"][0]["text"] == LIKELIEST * 5
    wait_idle(fixed)


def wait_idle(served: Target, limit_s: float = 5.0) -> None:
    """Soon after the last answer, when the last step is back, nothing runs, nothing waits and no memory is taken."""
    until_s = time.monotonic() + limit_s
    while not idle(served):
        assert time.monotonic() < until_s, "the gauges are not at zero"
        time.sleep(0.05)


def idle(served: Target) -> bool:
    page = requests.get(f"{served.url}/metrics", timeout=10).text
    gauges = ("peg:num_requests_running", "peg:num_requests_waiting", "peg:kv_cache_usage_perc", "peg:kv_blocks_used")
    lines = [line for line in page.splitlines() if line.startswith(gauges)]
    assert len(lines) >= len(gauges)
    return all(float(line.rpartition(" ")[2]) == 0 for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_real_model_too() -> None:
    """200 requests against SmolLM2-135M, with a context of 64 as well; slow, for it computes."""
    with target(real_model("smollm2-135m"), "--max-num-seqs", "16") as served:
        for label in ("POST /v1/completions", "POST /v1/chat/completions"):
            fuzz(served, label, GenerationMode.POSITIVE, 80, most_tokens=3)
            fuzz(served, label, GenerationMode.NEGATIVE, 20)
        print(f"{sum(served.statuses.values())} requests: {dict(served.statuses)}")
        assert sum(served.statuses.values()) >= 200
        question: dict[str, Any] = {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
        }
        answer = requests.post(f"{served.url}/v1/chat/completions", json=question, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
        wait_idle(served)
