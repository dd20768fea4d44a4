"""`export --to vllm`: what vLLM refuses is said before anything is written; what it gets, old versions read too. vLLM
itself serves such folders in tests/export/test_vllm.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conftest import called
from sojourn.export.vllm_preflight import config_for_vllm
from sojourn.infer.runtimes.registry import available
from sojourn.infer.runtimes.server_process import telling_line
from sojourn.infer.runtimes.vllm import serve_arguments

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def without_vllm(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("SOJOURN_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture(scope="module")
def base(shared, tmp_path_factory) -> Path:
    return shared.copy_base(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    return save_adapter(base, tmp_path_factory.mktemp("adapter"), r=32, target_modules=["q_proj", "v_proj"])


def save_adapter(base: Path, folder: Path, **settings: object) -> Path:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    config = LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    for file in base.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def edit(file: Path, changed: Callable[[dict], object]) -> None:
    value = json.loads(file.read_text())
    changed(value)
    file.write_text(json.dumps(value))


def refused(*arguments: str) -> str:
    said = called("export", *arguments)
    assert said.returncode == 2 and not Path(arguments[-1]).exists(), said.stderr
    return next(line for line in said.stderr.splitlines() if line.startswith("sojourn: "))


def test_a_merged_folder_is_written_as_every_vllm_reads_it_and_its_command_is_printed(base, tmp_path):
    said = called("export", str(base), "--to", "vllm", "--out", str(tmp_path / "out"))
    assert said.returncode == 0, said.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] and config["torch_dtype"] == config["dtype"]
    assert f"vllm serve {tmp_path / 'out'} --served-model-name llama" in said.stderr
    assert "head_dim is 16, so vLLM serves it on a GPU only" in said.stderr
    assert "not replayed in vllm: vLLM has no environment here; make one (" in said.stderr


def test_an_adapter_folder_is_what_peft_opens_on_its_base(adapter, tmp_path):
    said = called("export", str(adapter), "--to", "vllm-adapter", "--out", str(tmp_path / "out"))
    assert said.returncode == 0, said.stderr
    assert f"--max-lora-rank 32 --tokenizer {tmp_path / 'out'} --generation-config {tmp_path / 'out'}" in said.stderr
    gate = json.loads((tmp_path / "out" / "sojourn_export.json").read_text())["gate"]
    assert gate["replay"]["figures"]["same greedy text"] == 1 and gate["replay"]["figures"]["relative error"] < 1e-5


def test_a_rank_up_to_16_needs_no_flag(adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    edit(folder / "adapter_config.json", lambda c: c.update(r=16))
    assert "--max-lora-rank" not in serve_arguments(folder, "x")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "trained biases (bias=all)"),
        ({"r": 1024}, "at most 512"),
        ({"rank_pattern": {"q_proj": 4096}}, "at most 512"),
        ({"lora_bias": True}, "biases in its LoRA layers"),
    ],
    ids=str,
)
def test_adapters_that_vllm_refuses_are_refused_with_the_way_out(adapter, tmp_path, setting, reason):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    edit(folder / "adapter_config.json", lambda c: c.update(setting))
    line = refused(str(folder), "--to", "vllm-adapter", "--out", str(tmp_path / "out"))
    assert reason in line and "merge it instead: --to vllm" in line


@pytest.mark.parametrize("setting", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "embed_tokens"]}])
def test_adapters_with_a_head_or_an_embedding_are_refused(base, tmp_path, setting):
    folder = save_adapter(base, tmp_path / "adapter", **{"r": 4, "target_modules": ["q_proj"], **setting})
    line = refused(str(folder), "--to", "vllm-adapter", "--out", str(tmp_path / "out"))
    assert "lm_head" in line or "embed_tokens" in line


def test_a_whole_model_is_no_adapter(base, tmp_path):
    line = refused(str(base), "--to", "vllm-adapter", "--out", str(tmp_path / "out"))
    assert "has no adapter; for a merged model: --to vllm" in line


@pytest.mark.parametrize(
    ("file", "changed", "reason"),
    [
        ("config.json", lambda c: c.update(vocab_size=398), "config.json says vocab_size 398"),
        ("config.json", lambda c: c.update(head_dim=12), "head_dim is 12"),
        ("tokenizer.json", lambda t: t["added_tokens"].append({**t["added_tokens"][0], "id": 9999, "content": "<x>"}),
         "ids up to 9,999"),
    ],
    ids=["vocabulary", "head_dim", "new tokens"],
)  # fmt: skip
def test_models_that_vllm_refuses(base, tmp_path, file, changed, reason):
    folder = shutil.copytree(base, tmp_path / "model")
    edit(folder / file, changed)
    said = called("export", str(folder), "--to", "vllm", "--out", str(tmp_path / "out"))
    assert said.returncode == 2 and reason in said.stderr and not (tmp_path / "out").exists(), said.stderr


def test_ropes_older_spellings():
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert config_for_vllm(plain)["rope_theta"] == 5e5 and config_for_vllm(plain)["rope_scaling"] is None
    scaled = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}}
    assert config_for_vllm(scaled)["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0}
    both = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}
    gemma = config_for_vllm({"text_config": {"rope_parameters": both}})["text_config"]
    assert gemma["rope_theta"] == 1e6 and gemma["rope_local_base_freq"] == 1e4


def test_a_python_without_vllm_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("SOJOURN_VLLM_PYTHON", "/usr/bin/true")
    assert available("vllm") == ""  # it says that it has vllm; the server then fails to start
    monkeypatch.setenv("SOJOURN_VLLM_PYTHON", "/usr/bin/false")
    assert "has no vLLM; run: /usr/bin/false -m pip install " in available("vllm")
    monkeypatch.setenv("SOJOURN_VLLM_PYTHON", str(tmp_path / "none"))
    assert "no such file" in available("vllm")


def test_a_server_that_ends_is_reported_with_its_log(monkeypatch, tmp_path, base, capsys):
    from sojourn.errors import RunFailed
    from sojourn.infer.runtimes.registry import open_runtime

    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho 'Traceback (most recent call last):'; echo 'ValueError: no such model'; exit 3\n"
    )
    python.chmod(0o755)
    monkeypatch.setenv("SOJOURN_VLLM_PYTHON", str(python))
    with pytest.raises(RunFailed, match=r"exit code 3\): ValueError: no such model"):
        open_runtime("vllm", base)
    assert "  vLLM: ValueError: no such model" in capsys.readouterr().err


def test_the_telling_line_of_a_log_is_its_first_error():
    log = [
        "(EngineCore pid=7) ERROR 11-18 05:22:56 [core.py:9] Traceback (most recent call last):",
        '(EngineCore pid=7) ERROR 11-18 05:22:56 [core.py:9]   File "x.py", line 1, in f',
        "(EngineCore pid=7) ERROR 11-18 05:22:56 [core.py:9] ValueError: Head size 16 is not supported",
        "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    assert telling_line(log) == "ValueError: Head size 16 is not supported"
