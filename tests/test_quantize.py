"""`sojourn quantize`: what this machine cannot do is said at once; llm-compressor runs in an environment of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import called
from sojourn.data.artefact import Split
from sojourn.errors import RunFailed
from sojourn.export.quantize import llm_compressor
from sojourn.export.quantize.calibration import ROW_LENGTH, choose_rows
from sojourn.infer.runtimes.managed_environment import LLM_COMPRESSOR, VLLM, error_line
from sojourn.infer.runtimes.vllm import refuses
from tiny import Tiny


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path))
    monkeypatch.delenv(LLM_COMPRESSOR.variable, raising=False)
    monkeypatch.delenv(VLLM.variable, raising=False)
    return tmp_path


def fake_python(path: Path, script: str) -> Path:
    """A program that has every package and does `script` when it is given a file."""
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\n{script}\n')
    path.chmod(0o755)
    return path


def test_what_cannot_run_here_is_said_before_anything_is_loaded(tiny: Tiny) -> None:
    wrong = called("quantize", str(tiny.base), "--to", "int9")
    assert wrong.returncode == 2 and "did you mean" in wrong.stderr and wrong.stderr.count("\n") == 1
    for kind in ("fp8", "int4"):
        if torch.cuda.is_available():
            continue
        done = called("quantize", "no-such-model", "--to", kind)
        assert done.returncode == 2 and "needs a GPU of compute capability" in done.stderr
        assert "works here: " in done.stderr and "nf4" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", ["gptq", "awq", "fp8-vllm"])
def test_llm_compressor_that_is_not_here_is_one_line_with_what_to_type(no_environment: Path, kind: str) -> None:
    done = called("quantize", "no-such-model", "--to", kind)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "sojourn install llmcompressor" in done.stderr and f"{LLM_COMPRESSOR.variable}=PATH" in done.stderr


def test_a_named_python_is_used_and_one_without_the_package_is_refused(
    no_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LLM_COMPRESSOR.variable, str(no_environment / "nowhere"))
    assert "no such file" in LLM_COMPRESSOR.why_unavailable()
    empty = no_environment / "empty"
    empty.write_text("#!/bin/sh\nexit 1\n")
    empty.chmod(0o755)
    monkeypatch.setenv(LLM_COMPRESSOR.variable, str(empty))
    assert f"{empty} -m pip install" in LLM_COMPRESSOR.why_unavailable()
    monkeypatch.setenv(LLM_COMPRESSOR.variable, str(fake_python(no_environment / "python", "")))
    assert LLM_COMPRESSOR.why_unavailable() == ""


def test_a_child_that_fails_is_one_line_that_names_its_log(
    no_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'echo "Traceback (most recent call last):"; echo "ValueError: no such layer"; exit 1'
    monkeypatch.setenv(LLM_COMPRESSOR.variable, str(fake_python(no_environment / "python", script)))
    log = no_environment / "log.txt"
    with pytest.raises(RunFailed, match=rf"failed: ValueError: no such layer; its log: {log}"):
        llm_compressor.run_child({"kind": "gptq"}, log)
    fake_python(no_environment / "python", "kill -9 $$")
    with pytest.raises(RunFailed, match="killed by signal 9"):
        llm_compressor.run_child({"kind": "gptq"}, log)
    fake_python(no_environment / "python", f'cp "$2" {no_environment}/job.json')
    llm_compressor.run_child({"kind": "gptq", "rows": [[1, 2]]}, log)
    assert json.loads((no_environment / "job.json").read_text())["rows"] == [[1, 2]]


def test_calibration_rows_come_from_all_over_the_data_within_a_budget() -> None:
    lengths = [10] * 50 + [3000] + [10] * 49
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.repeat(np.arange(100), lengths).astype("<u2")
    split = Split(tokens, np.ones(len(tokens), np.uint8), starts[:-1], starts)
    found = choose_rows(SimpleNamespace(train=split), 10**9)  # type: ignore[arg-type]
    assert [row[0] for row in found] == list(range(100)) and max(map(len, found)) == ROW_LENGTH
    few = choose_rows(SimpleNamespace(train=split), 400)  # type: ignore[arg-type]
    assert few[0][0] == 0 and few[-1][0] == 99 and 5 < len(few) < 20
    assert few == choose_rows(SimpleNamespace(train=split), 400)  # type: ignore[arg-type]


def test_install_asks_first_and_knows_its_programs(no_environment: Path) -> None:
    wrong = called("install", "vlm")
    assert wrong.returncode == 2 and "did you mean vllm?" in wrong.stderr and wrong.stderr.count("\n") == 1
    asked = called("install", "llmcompressor")
    assert asked.returncode == 2 and "GB" in asked.stderr and "--yes" in asked.stderr
    assert str(no_environment / "environments" / "llmcompressor") in asked.stderr and asked.stderr.count("\n") == 1
    assert not (no_environment / "environments").exists()


@pytest.mark.slow
def test_a_failed_installation_names_its_log_and_is_not_taken_for_a_whole_one(no_environment: Path) -> None:
    broken = replace(LLM_COMPRESSOR, packages=("./no-such-package",) * 2, gigabytes=(0, 0))
    with pytest.raises(RunFailed, match=r"llm-compressor could not be installed: ERROR: .*llmcompressor\.log"):
        broken.install(lambda line: None)
    assert "run: sojourn install llmcompressor" in broken.why_unavailable()


def test_the_line_of_a_log_that_says_what_went_wrong(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("INFO: fine\nERROR: no matching distribution\n[notice] a new release\n")
    assert error_line(log) == "ERROR: no matching distribution"
    log.write_text("")
    assert error_line(log) == "no line in its log"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_quantized_weights_are_not_replayed_in_vllm_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"head_dim": 64, "quantization_config": {}}')
    assert "GPU only" in refuses(tmp_path)
    (tmp_path / "config.json").write_text('{"head_dim": 64}')
    assert refuses(tmp_path) == ""


def test_weights_that_have_no_dequantize_are_read_through_their_matmul() -> None:
    """torchao's int4 on a GPU: its matmul is all that it implements."""
    from sojourn.infer.runtimes.quantized_weights import dequantized

    class Int4(torch.Tensor):
        def dequantize(self) -> torch.Tensor:
            raise NotImplementedError

    Int4.__module__ = "torchao.quantization"
    weight = torch.randn(3, 8)
    layer = SimpleNamespace(named_parameters=lambda: [("weight", weight.as_subclass(Int4)), ("bias", torch.ones(3))])
    found = dict(dequantized(layer) or ())
    assert torch.equal(torch.Tensor(found["weight"]), weight) and torch.equal(found["bias"], torch.ones(3))
