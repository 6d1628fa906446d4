"""The commands as a user runs them: whole processes over a small model with random weights."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tests.unit.small_tokenizers import byte_level

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
DUMMY = ("--load-format", "dummy", "--dtype", "float32", "--kv-cache-memory", "16MiB")
GREEDY = ("--temperature", "0", "--max-tokens", "12", "--ignore-eos")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 6 query and 3 KV heads, all of it but the weights."""
    folder = tmp_path_factory.mktemp("small-llama")
    core = byte_level()
    core.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "vocab_size": core.get_vocab_size(),
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "eos_token_id": core.token_to_id("<|im_end|>"),
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": TEMPLATE})
    )
    return folder


def peg(*arguments: str | Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command, after some Python that may break something first."""
    code = f"{before}\nfrom peg.__main__ import main\nmain()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_generate_writes_the_answer_alone(model: Path) -> None:
    """Standard output holds the ids, or their text, and nothing else; three ranks make the same ids as one."""
    ids = peg("generate", model, "the cat", *DUMMY, *GREEDY, "--token-ids")
    assert ids.returncode == 0, ids.stderr
    assert len(ids.stdout.split()) == 12
    three = peg("generate", model, "the cat", *DUMMY, *GREEDY, "--token-ids", "--tensor-parallel-size", "3")
    assert three.stdout == ids.stdout, three.stderr
    text = peg("generate", model, "the cat", *DUMMY, *GREEDY)
    core = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert text.stdout == core.decode(list(map(int, ids.stdout.split()))) + "\n"


def test_chat_renders_the_template(model: Path) -> None:
    """With --chat the prompt goes through the model's own template, and the continuation is another."""
    plain = peg("generate", model, "<|im_start|>the cat<|im_end|>", *DUMMY, *GREEDY, "--token-ids")
    chat = peg("generate", model, "the cat", "--chat", *DUMMY, *GREEDY, "--token-ids")
    assert (chat.returncode, chat.stdout) == (0, plain.stdout), chat.stderr


def test_prompt_that_does_not_fit(model: Path) -> None:
    """A prompt beyond the context is the user's to mend: code 2, both numbers, nothing on standard output."""
    done = peg("generate", model, "the cat" * 100, *DUMMY)
    assert (done.returncode, done.stdout) == (2, "")
    assert "128" in done.stderr.splitlines()[-1]


def test_rank_that_fails_ends_with_70(model: Path) -> None:
    """When a rank raises, the cause stands on standard error and the exit code is 70."""
    before = """
from peg.ranks.runner import Runner
def finish(self, launched, finish=Runner.finish):
    if launched.plan.epoch == 0:
        raise ValueError("the rank broke")
    return finish(self, launched)
Runner.finish = finish
"""
    done = peg("generate", model, "the cat", *DUMMY, "--tensor-parallel-size", "3", before=before)
    assert done.returncode == 70
    assert "the engine failed: " in done.stderr
    assert "the rank broke" in done.stderr.splitlines()[-1]


def test_check_tells_the_plan(model: Path) -> None:
    """`peg check --json` gives parameters and pools with their arithmetic; heads that do not divide are refused."""
    plan = json.loads(peg("check", model, *DUMMY, "--tensor-parallel-size", "3", "--json").stdout)
    group = plan["kv_groups"][0]
    assert (group["kind"], group["kv_heads"], group["head_dim"]) == ("Full", 1, 8)
    assert group["bytes_per_block"] == 2 * 2 * 8 * 4 * 16
    assert plan["kv_bytes"] == 3 * group["num_blocks"] * group["bytes_per_block"] <= 3 * 16 << 20
    refused = peg("check", model, *DUMMY, "--tensor-parallel-size", "4")
    assert refused.returncode == 2
    assert "6 query heads" in refused.stderr


def test_check_lists_every_fault(model: Path, tmp_path: Path) -> None:
    """Beside weights that are not the config's every missing tensor is named, and the code is 2."""
    save_file({"model.norm.weight": torch.ones(48)}, tmp_path / "model.safetensors")
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    done = peg("check", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "model.layers.0.input_layernorm.weight: missing" in done.stderr
    assert "model.layers.1.mlp.down_proj.weight: missing" in done.stderr


def test_serve_until_sigterm(model: Path) -> None:
    """`peg serve` says in its ready line where it listens, answers there, and SIGTERM ends it with code 0."""
    command = [sys.executable, "-m", "peg", "serve", str(model), "--port", "0", *DUMMY]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = (json.loads(line) for line in process.stderr)
            ready = next(line for line in lines if line["event"] == "ready")
            host, port = ready["url"].removeprefix("http://").split(":")
            connection = http.client.HTTPConnection(host, int(port), timeout=20)
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
            connection.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
