"""Fine-tuning a real model on 200 built-in questions. SOJOURN_REAL_MODEL names it: a folder or a GGUF file."""

import json
import os

import pytest

from conftest import sojourn

MODEL = os.environ.get("SOJOURN_REAL_MODEL")


@pytest.mark.skipif(MODEL is None, reason="SOJOURN_REAL_MODEL names no model")
@pytest.mark.parametrize(
    "method", [["method.kind=lora", "train.lr=1e-3"], ["method.kind=full", "train.lr=1e-4"]], ids=str
)
def test_a_real_model_learns_to_answer_held_out_questions(home, method):
    """200 examples, 3 times over: the answers to questions that it has never seen become right."""

    def right(model: str) -> float:
        said = sojourn("eval", model, "--tasks", "8", "--json")
        assert said.returncode == 0, said.stderr
        found = [row["value"] for row in json.loads(said.stdout)["results"] if row["metric"] == "exact_match"]
        return sum(found) / len(found)

    trained = sojourn(
        "train", f"model.base={MODEL}", "data.sources=builtin:instructions", "data.take=200", "data.eval_fraction=0",
        "data.max_length=256", "train.epochs=3", "train.global_batch=4", "train.schedule=linear", "train.min_lr=0",
        "train.weight_decay=0", "name=real", *method,
        timeout=1800,
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    before, after = right(str(MODEL)), right("real")
    print(f"exact match over 12 families: {before:.1%} before, {after:.1%} after ({method})")
    assert after > before + 0.2
