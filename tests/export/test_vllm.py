"""vLLM itself, in its own environment, serves what `export --to vllm` and `--to vllm-adapter` write.

SOJOURN_VLLM_PYTHON names its Python, SOJOURN_REAL_MODEL a small chat model such as SmolLM2-135M-Instruct."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from conftest import sojourn
from sojourn.export.vllm_preflight import KNOWN_ARCHITECTURES
from sojourn.infer.runtimes.managed_environment import VLLM, clean_environment
from sojourn.infer.runtimes.registry import available, open_runtime
from sojourn.run.folder import RunFolder

MODEL = os.environ.get("SOJOURN_REAL_MODEL")
pytestmark = pytest.mark.skipif(bool(available("vllm")), reason=available("vllm"))
needs_model = pytest.mark.skipif(MODEL is None, reason="SOJOURN_REAL_MODEL names no model")

PROMPTS = [f"Tell me about the {thing}." for thing in ("sea", "moon", "Alps", "number 7", "letter é")] + [
    f"What is {number} plus {number + 3}?" for number in range(3, 8)
]
TOKENS = 64


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A LoRA of a few steps."""
    home = tmp_path_factory.mktemp("home")
    os.environ["SOJOURN_HOME"] = str(home)
    trained = sojourn(
        "train", f"model.base={MODEL}", "data.sources=builtin:instructions", "data.take=60", "data.eval_fraction=0",
        "data.max_length=128", "train.steps=15", "train.global_batch=4", "method.kind=lora", "train.lr=1e-3",
        "train.rehearse=off", "name=lora", timeout=3600,
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    return RunFolder(home / "runs" / "lora")


@needs_model
@pytest.mark.parametrize("kind", ["vllm", "vllm-adapter"])
def test_vllm_says_what_we_say(run: RunFolder, kind: str, tmp_path: Path) -> None:
    """The gate replays the export in vLLM; then longer answers to more prompts."""
    out = tmp_path / "out"
    done = sojourn("export", "lora", "--to", kind, "--out", str(out), "--json", timeout=3600)
    assert done.returncode == 0, done.stderr
    replay = json.loads(done.stdout)["gate"]["replay"]
    assert replay["runtime"] == "vllm" and replay["figures"]["same greedy text"] == 1, replay
    print(kind, replay["figures"], replay["compared"])
    with open_runtime("transformers", run.final) as ours, open_runtime("vllm", out) as theirs:
        for prompt in PROMPTS:
            text = ours.render([{"role": "user", "content": prompt}])
            assert text is not None
            ids = ours.encode(text)
            assert theirs.greedy(ids, TOKENS) == ours.greedy(ids, TOKENS), prompt


def test_the_architectures_we_know_are_those_of_vllm() -> None:
    found = subprocess.run(
        [str(VLLM.python()), "-c", "from vllm import ModelRegistry as r; print(*r.get_supported_archs())"],
        env=clean_environment(), capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    assert set(found.stdout.split()) >= KNOWN_ARCHITECTURES
