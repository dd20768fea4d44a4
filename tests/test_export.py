"""`sojourn export` and `merge`: what they write is what plain peft computes, complete or absent, whatever happens."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from conftest import called
from mounts import mounted_tmpfs
from sojourn.export import hf
from sojourn.export.card import model_card
from sojourn.export.formats import FORMATS, Format
from sojourn.export.open_source import open_weights
from sojourn.export.progress import NoProgress
from sojourn.export.stage import MANIFEST, ExportStage
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json_object, sha256, write_json
from tiny import LORA, Tiny

IDS = torch.tensor([[5, 17, 3, 99, 42, 42, 8]])


@pytest.fixture(autouse=True)
def many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "SHARD_BYTES", 60_000)


@pytest.fixture
def run(tiny: Tiny) -> RunFolder:
    return tiny.whole(*LORA, "save.every_steps=6")


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits


def peft_logits(base: Path, adapter: Path) -> torch.Tensor:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(adapter))
    with torch.no_grad():
        return model.eval()(IDS).logits


def write_only(name: str, target: Path, **options: Any) -> Path:
    """An export without the gate, for what happens to files."""
    source = open_weights(name, **options)
    with ExportStage(target, source.fingerprint) as stage:
        hf.write(source, stage, "auto", NoProgress())
        return stage.finish({"format": "hf", "quantization": "auto"})


def wider(base: Path, folder: Path) -> Path:
    """The same model with 6 MB of weights."""
    config = AutoConfig.from_pretrained(base, hidden_size=256, head_dim=64, intermediate_size=384)
    shutil.copytree(base, folder)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in folder.iterdir() if path.name != MANIFEST}


def test_a_merged_run_is_what_plain_peft_computes_and_says_where_it_comes_from(tiny: Tiny, run: RunFolder) -> None:
    out = tiny.home / "merged"
    done = called("merge", run.path.name, "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)
    assert manifest["path"] == str(out) and manifest["new"] and manifest["gate"]["passed"]
    torch.testing.assert_close(logits(out), peft_logits(tiny.base, run.final), rtol=1e-5, atol=1e-5)
    index = read_json_object(out / "model.safetensors.index.json")
    assert len(set(index["weight_map"].values())) > 3
    listed = {name: facts["sha256"] for name, facts in read_json_object(out / MANIFEST)["files"].items()}
    assert listed == contents(out)
    ids, text = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(run.final)
    assert ids.chat_template == text.chat_template and ids("house 7")["input_ids"] == text("house 7")["input_ids"]
    stops = read_json_object(out / "generation_config.json")["eos_token_id"]
    assert text.convert_tokens_to_ids("<|im_end|>") in stops
    lineage, card = manifest["lineage"], (out / "README.md").read_text(encoding="utf-8")
    data = Path(read_json_object(run.environment)["data"]).name
    assert lineage["base"] == "llama" and lineage["step"] == 12 and lineage["data"] == data
    assert lineage["figures"]["train_loss"] and lineage["cost"]["seconds"] and lineage["config"]["method"]["rank"] == 4
    assert data in card and "training time" in card and "train loss" in card and str(tiny.home) not in card
    again = called("merge", run.path.name, "--out", str(out))
    assert again.returncode == 0 and "was there already" in again.stdout


def test_a_checkpoint_is_exported_as_its_run_would_have_ended(tiny: Tiny, run: RunFolder, tmp_path: Path) -> None:
    last = write_only(run.path.name, tmp_path / "last", checkpoint="12")
    final = write_only(run.path.name, tmp_path / "final", checkpoint="final")
    shards = [name for name in contents(final) if name.endswith(".safetensors")]
    assert {name: contents(last)[name] for name in shards} == {name: contents(final)[name] for name in shards}
    middle = write_only(run.path.name, tmp_path / "middle", checkpoint="6")
    assert any(contents(middle)[name] != contents(final)[name] for name in shards)


def test_a_checkpoint_of_a_run_that_trained_all_weights(tiny: Tiny, tmp_path: Path) -> None:
    whole = tiny.whole()
    step = max(int(path.name[5:]) for path in whole.checkpoints.glob("step-*"))
    out = write_only(whole.path.name, tmp_path / "out", checkpoint=str(step))
    torch.testing.assert_close(logits(out), logits(whole.final))
    config, final = (read_json_object(folder / "config.json") for folder in (out, whole.final))
    assert {key: config[key] for key in final if key != "transformers_version"} == {
        key: value for key, value in final.items() if key != "transformers_version"
    }
    assert read_json_object(out / "generation_config.json")["eos_token_id"]


def test_16_bits_are_written_where_asked_for(tiny: Tiny, tmp_path: Path) -> None:
    source = open_weights(str(tiny.base))
    with ExportStage(tmp_path / "out", source.fingerprint) as stage:
        hf.write(source, stage, "bf16", NoProgress())
        out = stage.finish({})
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert read_json_object(out / "config.json")["dtype"] == "bfloat16"


def test_an_export_that_differs_is_not_written(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors of the same shape, swapped on their way."""
    real, swap = hf._piece, {"layers.0.mlp.gate_proj": "layers.0.mlp.up_proj"}

    def piece(weights: Any, name: str, *rest: Any) -> Any:
        for one, other in swap.items():
            name = name.replace(one, other)
        return real(weights, name, *rest)

    monkeypatch.setattr(hf, "_piece", piece)
    out = tiny.home / "swapped"
    done = called("export", str(tiny.base), "--out", str(out))
    assert done.returncode == 1 and "the export differs from its source: " in done.stderr
    assert not out.exists() and not list(tiny.home.glob(".partial-*"))
    kept = called("export", str(tiny.base), "--out", str(out), "--keep-rejected")
    assert kept.returncode == 1 and (tiny.home / "swapped.rejected" / "config.json").is_file() and not out.exists()


def test_nothing_that_is_there_is_replaced_unasked(tiny: Tiny, tmp_path: Path) -> None:
    out = write_only(str(tiny.base), tmp_path / "out")
    other = called("export", str(tiny.whole().final), "--out", str(out))
    assert other.returncode == 2
    assert other.stderr == (
        f"sojourn: {out} exists already; choose another folder: --out DIR, or replace it: --overwrite\n"
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    refused = called("export", str(tiny.base), "--out", str(tmp_path / "mine"), "--overwrite")
    assert refused.returncode == 2 and "is no export, so --overwrite does not replace it" in refused.stderr
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"


def test_an_export_is_replaced_when_asked(tiny: Tiny, tmp_path: Path) -> None:
    out = write_only(str(tiny.base), tmp_path / "out")
    source = open_weights(str(tiny.whole().final))
    with ExportStage(out, source.fingerprint, overwrite=True) as stage:
        hf.write(source, stage, "auto", NoProgress())
        assert contents(out) != contents(stage.path)
        stage.finish({})
    torch.testing.assert_close(logits(out), logits(tiny.whole().final))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_exports_at_once_to_one_folder(tiny: Tiny, tmp_path: Path) -> None:
    source = open_weights(str(tiny.base))
    with ExportStage(tmp_path / "out", source.fingerprint) as stage:
        second = called("export", str(tiny.base), "--out", str(tmp_path / "out"))
        assert second.returncode == 2
        assert second.stderr == (
            f"sojourn: {tmp_path / 'out'}: another export writes it at this moment; wait for it, or choose another "
            "folder: --out DIR\n"
        )
        hf.write(source, stage, "auto", NoProgress())
        stage.finish({})
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_full_disk_says_so_and_the_same_command_goes_on(tiny: Tiny, tmp_path: Path, monkeypatch: Any) -> None:
    base = wider(tiny.base, tmp_path / "wider")
    with mounted_tmpfs(tmp_path / "disk", "size=4m") as disk:
        done = called("export", str(base), "--out", str(disk / "out"))
        assert done.returncode == 1 and "MiB free, but the export takes " in done.stderr, done.stderr
        monkeypatch.setattr(ExportStage, "check_space", lambda self, total: None)  # another program is quicker
        done = called("export", str(base), "--out", str(disk / "out"))
        assert done.returncode == 1 and done.stderr.splitlines()[-1] == (
            f"sojourn: {disk}: no space left on this disk; free some, then run the same command: it goes on where it "
            "was; or choose another disk: --out DIR"
        )
        assert not (disk / "out").exists()
        assert read_json_object(disk / ".partial-out" / MANIFEST)["files"]
        subprocess.run(["mount", "-o", "remount,size=24m", str(disk)], check=True)
        again = called("export", str(base), "--out", str(disk / "out"))
        assert again.returncode == 0 and "going on in" in again.stderr
        torch.testing.assert_close(logits(disk / "out"), logits(base))


def test_a_read_only_disk(tiny: Tiny, tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", "size=1m,ro") as disk:
        done = called("export", str(tiny.base), "--out", str(disk / "out"))
        assert (done.returncode, done.stderr) == (
            1,
            f"sojourn: {disk / 'out'}: cannot be written: Read-only file system; choose another folder: --out DIR\n",
        )


def test_an_adapter_whose_base_is_gone_says_how_to_name_it(tiny: Tiny, run: RunFolder, tmp_path: Path) -> None:
    adapter = Path(shutil.copytree(run.final, tmp_path / "adapter"))
    settings = read_json_object(adapter / "adapter_config.json")
    write_json(adapter / "adapter_config.json", {**settings, "base_model_name_or_path": "/gone/llama"})
    done = called("merge", str(adapter), "--out", str(tmp_path / "out"))
    assert (done.returncode, done.stderr) == (
        2,
        f"sojourn: {adapter}: its base /gone/llama is not on this machine; say where it is: --base DIR\n",
    )
    moved = Path(shutil.copytree(tiny.base, tmp_path / "llama"))
    out = write_only(str(adapter), tmp_path / "out", base=str(moved))
    torch.testing.assert_close(logits(out), peft_logits(tiny.base, run.final), rtol=1e-5, atol=1e-5)


def test_an_adapter_of_another_base(tiny: Tiny, run: RunFolder, tmp_path: Path) -> None:
    other = tiny.whole().final  # the same names, other sizes
    done = called("merge", run.path.name, "--base", str(other), "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and done.stderr.count("\n") == 2  # a note, and the error
    assert "an adapter of another base" in done.stderr and "name its own base: --base DIR" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_quantized_base_is_refused(tiny: Tiny, run: RunFolder, tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny.base, tmp_path / "nf4"))
    config = read_json_object(base / "config.json")
    write_json(base / "config.json", {**config, "quantization_config": {"quant_method": "bitsandbytes"}})
    done = called("merge", run.path.name, "--base", str(base), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "quantized (bitsandbytes)" in done.stderr and "name the 16-bit model: --base DIR" in done.stderr


def test_a_renamed_run_is_exported_by_its_new_name(tiny: Tiny, run: RunFolder, tmp_path: Path) -> None:
    new = run.path.with_name("renamed")
    old = run.path.name
    run.path.rename(new)
    try:
        done = called("merge", old, "--out", str(tmp_path / "out"))
        assert done.returncode == 2 and "no run is called" in done.stderr and "renamed" in done.stderr
        source = open_weights("renamed", checkpoint="latest")
        assert source.name == "renamed" and source.lineage["step"] == 12
    finally:
        new.rename(run.path)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--to", "ggufff"], "--to: no format is called “ggufff”; did you mean gguf"),
        (["--quantize", "q4_0"], "--quantize: hf has no “q4_0”"),
        (["--adapter", "x=y"], "x=y: the weight of an adapter is a number, such as x=0.5"),
        (["--adapter", "nowhere"], "no run is called “nowhere”"),
        (["--base", "elsewhere"], "is a whole model, not an adapter; leave out --base"),
    ],
)
def test_what_is_typed_wrong_is_one_line(tiny: Tiny, args: list[str], line: str) -> None:
    done = called("export", str(tiny.base), *args)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and line in done.stderr


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda one: one.name)
def test_every_format_has_a_writer_and_a_card_that_says_how_to_run_it(format: Format) -> None:
    assert callable(format.writer())
    lineage = {"base": "ORG/base", "adapters": [{"name": "one|two", "weight": 0.5}]}
    found, files = {"gate": {"notes": ["said"]}}, {"a": {"size": 1}}
    card = model_card("mine", format, format.quantizations[0], lineage, found, files)
    assert "## Run it" in card and "- said" in card and 'base_model: "ORG/base"' in card
    assert "| adapters | one\\|two × 0.5 |" in card and "Not replayed" in card
