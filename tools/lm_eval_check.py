#!/usr/bin/env python3
"""Scores a small local task with lm-eval twice: over a running server, and with lm-eval's own model. Compares the two.

    .venv/bin/peg serve smollm2-135m --dtype float32 &
    python -m venv /somewhere && /somewhere/bin/pip install "lm-eval[hf,api]"
    /somewhere/bin/python tools/lm_eval_check.py DIRECTORY --model smollm2-135m

DIRECTORY is the model's Hugging Face directory (of a packaged model: what `peg check` names). Logprobs must agree to
1e-3, greedy answers and generated text exactly, and so must both runs over the server. lm-eval has an environment of
its own because it brings versions of its own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

QUESTIONS = (
    ("The capital of France is", " Paris", (" London", " Rome", " a big city in the north of Europe")),
    ("Water freezes at", " 0 degrees", (" the", " 100 degrees Celsius", " noon")),
    ("2 + 2 =", " 4", (" 5", " 22", " four hundred")),
    ("Ein Satz über Käse: Käse schmeckt", " gut", (" 你好", " 😀😀", " schlecht, sagt die Frau")),
    ("Once upon a time there was a little girl who lived in a village near the forest. Whenever she went out,",
     " she wore a red riding cloak", (" the", " it rained", " so everyone in the village called her by her name")),
)  # fmt: skip
STARTS = ("The capital of France is", "1, 2, 3, 4,", "def add(a, b):\n    return", "Once upon a time", "Käse")
SCORED, WRITTEN = "peg_scored", "peg_written"


def write_tasks(folder: Path) -> None:
    """One task of continuations that are scored, of very unequal lengths, and one of continuations that are written."""
    scored = [{"question": q, "choices": [right, *wrong], "answer": 0} for q, right, wrong in QUESTIONS]
    written = [{"question": start, "answer": ""} for start in STARTS]
    common = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}", "metadata": {"version": 1}}
    tasks: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        SCORED: (
            scored,
            {
                "output_type": "multiple_choice",
                "doc_to_choice": "{{choices}}",
                "doc_to_target": "{{answer}}",
                "target_delimiter": "",
                "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
            },
        ),
        WRITTEN: (
            written,
            {
                "output_type": "generate_until",
                "doc_to_target": "{{answer}}",
                "generation_kwargs": {"until": ["\n\n", "."], "max_gen_toks": 24, "do_sample": False, "temperature": 0},
                "metric_list": [{"metric": "exact_match"}],
            },
        ),
    }
    for name, (rows, fields) in tasks.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {"task": name, "dataset_kwargs": {"data_files": {"test": str(data)}}, **common, **fields}
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def responses(model: str, arguments: dict[str, Any], folder: Path, batch_size: int) -> tuple[dict[str, Any], Any]:
    """What a model answered to each request of each task, and the metrics."""
    import lm_eval  # noqa: PLC0415  in an environment of its own
    from lm_eval.tasks import TaskManager  # noqa: PLC0415

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=[SCORED, WRITTEN], task_manager=manager, batch_size=batch_size
    )
    answers = {name: [sample["resps"] for sample in samples] for name, samples in found["samples"].items()}
    return answers, found["results"]


def furthest(theirs: dict[str, Any], ours: dict[str, Any]) -> float:
    """The largest difference of two logprobs. Raises where greedy answers or written texts differ."""
    if theirs[WRITTEN] != ours[WRITTEN]:
        raise click.ClickException(f"texts differ: {theirs[WRITTEN]} and {ours[WRITTEN]}")
    worst = 0.0
    for one, other in zip(theirs[SCORED], ours[SCORED], strict=True):
        for ((logprob, greedy),), ((seen, seen_greedy),) in zip(one, other, strict=True):
            if bool(greedy) != bool(seen_greedy):
                raise click.ClickException(f"greedy or not: {one} and {other}")
            worst = max(worst, abs(float(logprob) - float(seen)))
    return worst


@click.command(help=__doc__)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--model", required=True, help="Its name on the server.")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True)
@click.option("--batch-size", default=8, show_default=True, help="Prompts in one request.")
def main(directory: Path, model: str, url: str, batch_size: int) -> None:
    served = {"model": model, "base_url": f"{url}/v1/completions", "tokenizer": str(directory), "num_concurrent": 1}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder)
        own = {"pretrained": str(directory), "dtype": "float32", "device": "cpu"}
        theirs, metrics = responses("hf", own, folder, 1)
        ours, our_metrics = responses("local-completions", served, folder, batch_size)
        again, _ = responses("local-completions", served, folder, batch_size)
    worst = furthest(theirs, ours)
    print(f"hf:                {metrics}")
    print(f"local-completions: {our_metrics}")
    print(f"{sum(map(len, ours[SCORED]))} logprobs, the furthest apart {worst:.2e}; {len(STARTS)} texts are the same")
    if worst > 1e-3 or furthest(ours, again) > 0:
        raise click.ClickException(f"logprobs differ by {worst}, and by {furthest(ours, again)} when repeated")


if __name__ == "__main__":
    sys.exit(main())
