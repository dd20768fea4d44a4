"""vLLM itself, in its own environment, serves what `export --to vllm` and `--to vllm-adapter` write.

SOJOURN_VLLM_PYTHON names its Python, SOJOURN_REAL_MODEL a small chat model such as SmolLM2-135M-Instruct."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from real_lora import PROMPTS, TOKENS, RealLora, needs_model
from sojourn.export.vllm_preflight import KNOWN_ARCHITECTURES
from sojourn.infer.runtimes.managed_environment import VLLM, clean_environment
from sojourn.infer.runtimes.registry import available, open_runtime

pytestmark = pytest.mark.skipif(bool(available("vllm")), reason=available("vllm"))


@needs_model
@pytest.mark.parametrize("kind", ["vllm", "vllm-adapter"])
def test_vllm_says_what_we_say(lora: RealLora, kind: str, tmp_path: Path) -> None:
    """The gate replays the export in vLLM; then longer answers to more prompts."""
    out = tmp_path / "out"
    replay = lora.export("export", lora.name, out, "--to", kind)["replay"]
    assert replay["runtime"] == "vllm" and replay["figures"]["same greedy text"] == 1, replay
    print(kind, replay["figures"], replay["compared"])
    with open_runtime("transformers", lora.final) as ours, open_runtime("vllm", out) as theirs:
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
