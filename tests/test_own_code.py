"""Models that bring Python code: it runs, and is written beside the weights, only where the run allows it. Nothing that
is written names code that is not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import called
from sojourn.errors import UserError
from sojourn.evals.losses import document_losses
from sojourn.export import source_reference
from sojourn.infer.load import artefact_of, load_model
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json_object
from tiny import LORA, Tiny, run_train

IDS = torch.tensor([[5, 17, 3, 99, 42, 42, 8]])
ALLOWED = "model.trust_remote_code=true"
CODE = {"configuration_larkspur.py", "layers_larkspur.py", "modeling_larkspur.py"}
_CONFIGURATION = """from pathlib import Path
from transformers import LlamaConfig
Path({canary!r}).touch()
class LarkspurConfig(LlamaConfig):
    model_type = {kind!r}
"""
_LAYERS = "from torch.nn import GELU\n"
_MODELING = """from transformers import LlamaForCausalLM
from .configuration_larkspur import LarkspurConfig
from .layers_larkspur import GELU
class LarkspurForCausalLM(LlamaForCausalLM):
    config_class = LarkspurConfig
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.act_fn = GELU()
    def _init_weights(self, module):  # older code does not ask which weights are loaded
        for weight in module.parameters(recurse=False):
            weight.data.normal_()
"""
_CLASSES = """from torch import arange, nn, ones
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel, apply_rotary_pos_emb, repeat_kv
from .configuration_larkspur import LarkspurConfig
class LarkspurForCausalLM(LlamaForCausalLM):
    config_class = LarkspurConfig
    def __init__(self, config):
        super().__init__(config)
        self.use_own()
        self.post_init()
"""
# Llama's attention, called as older code does: the model has no setting for another.
_OWN_ATTENTION = """
    def use_own(self):
        for layer in self.model.layers:
            layer.self_attn = LarkspurAttention(layer.self_attn)
class LarkspurAttention(nn.Module):
    def __init__(self, llama):
        super().__init__()
        self.groups, self.size = llama.num_key_value_groups, llama.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = llama.q_proj, llama.k_proj, llama.v_proj, llama.o_proj
    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        rows, tokens, _ = hidden_states.shape
        q, k, v = (
            linear(hidden_states).view(rows, tokens, -1, self.size).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = repeat_kv(k, self.groups), repeat_kv(v, self.groups)
        out = scaled_dot_product_attention(q, k, v, attention_mask, is_causal=attention_mask is None)
        return self.o_proj(out.transpose(1, 2).reshape(rows, tokens, -1)), None
"""
# A decoder that takes no other keywords, and makes its mask itself.
_OWN_DECODER = """
    def use_own(self):
        self.model.__class__ = LarkspurModel
class LarkspurModel(LlamaModel):
    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
        use_cache=None,
    ):
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        tokens = x.shape[1]
        angles = self.rotary_emb(x, arange(tokens)[None] if position_ids is None else position_ids)
        mask = ones(tokens, tokens, device=x.device).tril().bool()[None, None]
        for layer in self.layers:
            x = layer(x, attention_mask=mask, position_embeddings=angles)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))
"""
_TOKENIZATION = """from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({canary!r}).touch()
class LarkspurTokenizer(PreTrainedTokenizerFast):
    pass
"""


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**read_json_object(file), **changes}))


def with_code(tiny: Tiny, kind: str, modeling: str = _MODELING) -> Path:
    """The tiny Llama with code of its own, which by default is another model: its MLP has GELU. The code creates
    `ran`."""
    folder = tiny.home / kind / "base"
    if not folder.exists():
        shutil.copytree(tiny.base, folder)
        classes = {
            "AutoConfig": "configuration_larkspur.LarkspurConfig",
            "AutoModelForCausalLM": "modeling_larkspur.LarkspurForCausalLM",
            "AutoModel": "elsewhere.LarkspurModel",
        }
        edit(folder / "config.json", model_type=kind, auto_map=classes)
        canary = str(folder.parent / "ran")
        (folder / "configuration_larkspur.py").write_text(_CONFIGURATION.format(canary=canary, kind=kind))
        (folder / "layers_larkspur.py").write_text(_LAYERS)
        (folder / "modeling_larkspur.py").write_text(modeling)
    return folder


def with_tokenizer_code(tiny: Tiny) -> Path:
    folder = tiny.home / "tokenizer" / "base"
    if not folder.exists():
        shutil.copytree(tiny.base, folder)
        named = {"AutoTokenizer": ["tokenization_larkspur.LarkspurTokenizer", None]}
        edit(folder / "tokenizer_config.json", tokenizer_class="LarkspurTokenizer", auto_map=named)
        (folder / "tokenization_larkspur.py").write_text(_TOKENIZATION.format(canary=str(folder.parent / "ran")))
    return folder


def ran(base: Path) -> bool:
    return (base.parent / "ran").exists()


def export(model: object, out: Path, *extra: str) -> Path:
    said = called("export", str(model), "--out", str(out), *extra)
    assert said.returncode == 0, said.stderr
    return out


def refused(*arguments: str, command: str = "export") -> str:
    """What is said in one line, without having computed anything."""
    said = called(command, *arguments)
    assert said.returncode == 2, said.stderr
    (line,) = said.stderr.splitlines()
    return line


def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    """By plain transformers and peft, which run the code that the folder names."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True)
    model = model if adapter is None else PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return model.eval()(IDS).logits


# -- A model that transformers knows --


@pytest.mark.parametrize("format", ["hf", "vllm"])
def test_a_merged_model_that_transformers_knows_names_no_code(tiny: Tiny, format: str, tmp_path: Path) -> None:
    base = with_code(tiny, "llama")
    run = tiny.whole(*LORA, f"model.base={base}")
    out = export(run.path.name, tmp_path / "out", "--to", format)
    assert "auto_map" not in read_json_object(out / "config.json") and not list(out.glob("*.py"))
    torch.testing.assert_close(logits(out), logits(tiny.base, run.final), rtol=1e-5, atol=1e-5)
    assert not ran(base)


def test_a_final_model_that_transformers_knows_names_no_code(tiny: Tiny) -> None:
    base = with_code(tiny, "llama")
    run = tiny.whole("method.kind=full", f"model.base={base}", "train.steps=2")
    assert "auto_map" not in read_json_object(run.final / "config.json") and not list(run.final.glob("*.py"))
    assert logits(run.final).isfinite().all() and not ran(base)


def test_an_adapter_for_vllm_on_a_base_that_names_code(tiny: Tiny, tmp_path: Path) -> None:
    run = tiny.whole(*LORA, f"model.base={with_code(tiny, 'llama')}")
    export(run.path.name, tmp_path / "out", "--to", "vllm-adapter")


def test_a_model_that_names_code_is_replayed_layer_by_layer(tiny: Tiny, tmp_path: Path, monkeypatch: Any) -> None:
    base = with_code(tiny, "llama")
    monkeypatch.setattr(source_reference, "fits_in_memory", lambda weights: False)
    export(base, tmp_path / "out")
    assert not ran(base)


def test_a_run_that_allows_code_is_compared_with_that_code(tiny: Tiny, tmp_path: Path) -> None:
    """Also where transformers has another model of that name, which vLLM would compute."""
    base = with_code(tiny, "llama")
    run = tiny.whole(*LORA, f"model.base={base}", ALLOWED, "train.steps=3")
    out = export(run.path.name, tmp_path / "out")
    assert {path.name for path in out.glob("*.py")} == CODE
    torch.testing.assert_close(logits(out), logits(base, run.final), rtol=1e-5, atol=1e-5)
    copy = shutil.copytree(out, tmp_path / "copy")
    (base.parent / "ran").unlink()
    called("verify", str(copy))
    assert not ran(base)
    said = called("export", run.path.name, "--to", "vllm", "--out", str(tmp_path / "vllm"))
    assert said.returncode == 1 and "the export differs from its source: logits" in said.stderr
    assert not (tmp_path / "vllm").exists()


# -- A model that only its own code opens --


def test_a_merged_model_has_the_code_that_its_run_allows(tiny: Tiny, tmp_path: Path) -> None:
    base = with_code(tiny, "larkspur")
    run = tiny.whole(*LORA, f"model.base={base}", ALLOWED, "save.every_steps=6")
    expected = logits(base, run.final)
    out = export(run.path.name, tmp_path / "out")
    assert {path.name for path in out.glob("*.py")} == CODE
    assert set(read_json_object(out / "config.json")["auto_map"]) == {"AutoConfig", "AutoModelForCausalLM"}
    torch.testing.assert_close(logits(out), expected, rtol=1e-5, atol=1e-5)
    card = (out / "README.md").read_text()
    assert 'LM.from_pretrained(".", trust_remote_code=True)' in card and "read them first" in card
    checkpoint = export(run.path.name, tmp_path / "at-12", "--checkpoint", "12")
    torch.testing.assert_close(logits(checkpoint), expected, rtol=1e-5, atol=1e-5)


def test_a_final_model_and_its_export_have_the_code_that_their_run_allows(tiny: Tiny, tmp_path: Path) -> None:
    run = tiny.whole("method.kind=full", f"model.base={with_code(tiny, 'larkspur')}", ALLOWED, "save.every_steps=6")
    assert {path.name for path in run.final.glob("*.py")} == CODE
    for number, checkpoint in enumerate(([], ["--checkpoint", "12"])):
        out = export(run.path.name, tmp_path / str(number), *checkpoint)
        assert {path.name for path in out.glob("*.py")} == CODE
        torch.testing.assert_close(logits(out), logits(run.final), rtol=0, atol=0)


@pytest.mark.parametrize("format", ["vllm", "vllm-adapter", "gguf", "onnx", "mlx", "nf4"])
def test_formats_without_the_code_say_what_to_type(tiny: Tiny, format: str, tmp_path: Path) -> None:
    run = tiny.whole(*LORA, f"model.base={with_code(tiny, 'larkspur')}", ALLOWED, "save.every_steps=6")
    name, command = run.path.name, "quantize" if format == "nf4" else "export"
    line = refused(name, "--to", format, "--out", str(tmp_path / "out"), command=command)
    assert line == (
        f"sojourn: --to {format}: {name} needs its own Python code, which goes with --to hf alone: "
        f"sojourn export {name} --to hf"
    )


def test_without_a_run_that_allows_it_no_code_runs(tiny: Tiny, tmp_path: Path) -> None:
    base = with_code(tiny, "larkspur")
    run = tiny.whole(*LORA, f"model.base={base}", ALLOWED, "save.every_steps=6")
    out = export(run.path.name, tmp_path / "out")
    adapter = shutil.copytree(run.final, tmp_path / "adapter")
    with (base / "configuration_larkspur.py").open("a") as file:
        file.write("# so that it would be imported again\n")
    assert "exists already" in refused(run.path.name, "--out", str(out))  # the code is a part of the export
    (base.parent / "ran").unlink()
    for model in (base, adapter, out):
        line = refused(str(model), "--out", str(tmp_path / "again"))
        assert "a model of type larkspur needs its own Python code, which runs only for a run with" in line
    allowed = run.config.read_text()
    run.config.write_text(allowed.replace("trust_remote_code: true", "trust_remote_code: false"))
    line = refused(run.path.name, "--out", str(tmp_path / "again"))
    run.config.write_text(allowed)
    assert "needs its own Python code" in line
    said = called("verify", str(out))
    assert said.returncode == 1 and "its files are as written, but nothing here can replay it" in said.stderr
    assert not ran(base)


def test_code_that_is_not_there_and_a_model_too_large_to_check(tiny: Tiny, tmp_path: Path, monkeypatch: Any) -> None:
    base = with_code(tiny, "larkspur")
    run = tiny.whole(*LORA, f"model.base={base}", ALLOWED, "save.every_steps=6")
    bare = shutil.copytree(base, tmp_path / "bare", ignore=shutil.ignore_patterns("*.py"))
    said = called("export", run.path.name, "--base", str(bare), "--out", str(tmp_path / "out"))
    assert said.returncode == 2 and f"{bare}: the .py files that its config.json names are not there" in said.stderr
    monkeypatch.setattr(source_reference, "fits_in_memory", lambda weights: False)
    said = called("export", run.path.name, "--out", str(tmp_path / "out"))
    assert said.returncode == 1 and "GiB of free memory: export it on a larger machine" in said.stderr


# -- Tokenizers --


@pytest.mark.parametrize("format", ["hf", "vllm"])
def test_a_tokenizers_code_is_neither_run_nor_named(tiny: Tiny, format: str, tmp_path: Path) -> None:
    base = with_tokenizer_code(tiny)
    run = tiny.whole(*LORA, f"model.base={base}", "data.max_length=48", "save.every_steps=6")
    out = export(run.path.name, tmp_path / "out", "--to", format)
    for folder in (run.final, out):
        settings = read_json_object(folder / "tokenizer_config.json")
        assert "auto_map" not in settings and settings["tokenizer_class"] == "PreTrainedTokenizerFast"
        ids = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("the cat of house 7")["input_ids"]
        assert ids == AutoTokenizer.from_pretrained(tiny.base)("the cat of house 7")["input_ids"]
    assert not ran(base)


def test_a_checkpoint_opens_whose_tokenizer_names_code(tiny: Tiny, tmp_path: Path) -> None:
    base = with_tokenizer_code(tiny)
    run = tiny.whole(*LORA, f"model.base={base}", "data.max_length=48", "save.every_steps=6")
    for format in ("hf", "vllm"):
        out = export(run.path.name, tmp_path / format, "--checkpoint", "6", "--to", format)
        assert "auto_map" not in read_json_object(out / "tokenizer_config.json")
    said = called("generate", f"{run.path.name}@6", "-p", "hello", "--max-tokens", "2")
    assert said.returncode == 0 and not ran(base), said.stderr


def test_a_run_that_allows_code_needs_none_of_its_tokenizer(tiny: Tiny) -> None:
    base = with_tokenizer_code(tiny)
    sampled = ("train.eval_every=2", "train.samples=hello", "train.sample_tokens=2")
    run = run_train(tiny.words(*LORA, f"model.base={base}", ALLOWED, "data.max_length=48", "train.steps=2", *sampled))
    assert '"prompt": "hello"' in run.metrics.read_text()
    said = called("generate", run.path.name, "-p", "hello", "--max-tokens", "2")
    assert said.returncode == 0 and not ran(base), said.stderr


# -- Models that do not call our attention --


def losses(run: RunFolder) -> list[float]:
    return [line["loss"] for line in run.read_metrics() if line["kind"] == "train"]


@pytest.mark.parametrize(
    ("kind", "modeling", "packing"),
    [
        ("larkspur_attention", _OWN_ATTENTION, "packed"),
        ("larkspur_attention", _OWN_ATTENTION, "off"),
        ("larkspur_decoder", _OWN_DECODER, "off"),
    ],
)
def test_a_model_with_its_own_attention_keeps_it_and_this_is_said(
    tiny: Tiny, kind: str, modeling: str, packing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base, settings = with_code(tiny, kind, _CLASSES + modeling), (f"data.packing={packing}", "train.steps=3")
    run = run_train(tiny.words("method.kind=full", f"model.base={base}", ALLOWED, *settings, "train.attention=math"))
    note = "LarkspurForCausalLM keeps its own attention (transformers' sdpa), since it cannot call ours"
    assert f"note: train.attention=math has no effect: {note}\n" in capsys.readouterr().out
    assert read_json_object(run.environment)["auto"]["train.attention"] == note
    plain = tiny.whole("method.kind=full", *settings)
    assert losses(run) == pytest.approx(losses(plain), abs=1e-5)
    assert "keeps its own attention" not in capsys.readouterr().out
    own, llama = (
        document_losses(load_model(one.path.name), artefact, "train", 4).loss
        for one in (run, plain)
        if (artefact := artefact_of(one)) is not None
    )
    assert own == pytest.approx(llama, abs=1e-5)


def test_a_model_with_its_own_mask_is_refused_packed_rows(tiny: Tiny) -> None:
    base = with_code(tiny, "larkspur_decoder", _CLASSES + _OWN_DECODER)
    with pytest.raises(UserError, match="cannot keep packed documents apart"):
        run_train(tiny.words("method.kind=full", f"model.base={base}", ALLOWED))


def test_a_decoder_that_takes_no_positions_is_refused_in_one_line(tiny: Tiny) -> None:
    modeling = _OWN_DECODER.replace("position_ids=None, past", "past").replace("position_ids is None", "True")
    base = with_code(tiny, "larkspur_positions", _CLASSES + modeling)
    with pytest.raises(UserError, match=r"LarkspurForCausalLM is not supported yet: .*'position_ids'"):
        run_train(tiny.words("method.kind=full", f"model.base={base}", ALLOWED, "data.packing=off"))
