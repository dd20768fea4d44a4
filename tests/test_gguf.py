"""A GGUF file as the base: its weights and its tokenizer, trained further and talked to."""

import json
from pathlib import Path

import gguf
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import called
from sojourn.config.load import load_run
from sojourn.errors import UserError
from sojourn.run.home import run_folder
from sojourn.train.loop import train


def write_gguf(folder: Path, file: Path) -> Path:
    """A tiny Llama of transformers as llama.cpp would write it, unquantised."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    config, state = model.config, model.state_dict()
    words = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    special = {token["content"]: token["id"] for token in words["added_tokens"]}
    by_id = {number: token for token, number in {**words["model"]["vocab"], **special}.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([by_id[i] for i in range(config.vocab_size)])
    writer.add_token_types([3 if by_id[i] in special else 1 for i in range(config.vocab_size)])
    writer.add_token_merges([" ".join(pair) for pair in words["model"]["merges"]])
    writer.add_eos_token_id(special[settings["eos_token"]])
    writer.add_pad_token_id(special[settings["pad_token"]])
    writer.add_chat_template(settings["chat_template"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in state.items():
        tensor = weight
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        kind = next((part for part in heads if part in name), None)
        if kind:  # llama.cpp interleaves the two halves of each head
            rows, columns = tensor.shape
            tensor = (
                tensor.view(heads[kind], 2, rows // heads[kind] // 2, columns).transpose(1, 2).reshape(rows, columns)
            )
        writer.add_tensor(names.get_name(name.removesuffix(".weight")) + ".weight", tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def file(base, home, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    return write_gguf(base, home / "tiny.gguf")


def test_a_gguf_file_is_trained_and_generates(file, base, chats, fork_server):
    words = [
        f"model.base={file}", f"data.sources={chats}", "method.kind=lora", "data.max_length=64", "train.steps=4",
        "train.global_batch=4", "train.device=cpu", "train.precision=fp32", "log.every_steps=1", "log.tensorboard=off",
    ]  # fmt: skip
    losses = {}
    for name, given in (("file", file), ("folder", base)):
        run = run_folder(name)
        train(load_run([*words, f"model.base={given}", f"name={name}"]).config, run)
        losses[name] = [line["loss"] for line in run.read_metrics() if line["kind"] == "train"]
    assert losses["file"] == pytest.approx(losses["folder"], rel=1e-5)
    said = fork_server.run("generate", "file", "--prompt", "What colour is the cat?", "--max-tokens", "4")
    assert said.returncode == 0 and "Converting" not in said.stderr, said.stderr
    asked = called("generate", str(file), "--prompt", "What colour is the cat?", "--max-tokens", "4")
    assert asked.returncode == 0, asked.stderr


def test_all_its_weights_are_trained_and_saved_as_a_plain_model(file, chats):
    run = run_folder("full")
    words = [f"model.base={file}", f"data.sources={chats}", "method.kind=full", "data.max_length=64", "train.steps=2"]
    train(load_run([*words, "train.device=cpu", "log.tensorboard=off", "name=full"]).config, run)
    assert "quantization_config" not in json.loads((run.final / "config.json").read_text())
    assert AutoModelForCausalLM.from_pretrained(run.final).num_parameters() > 0
    with pytest.raises(UserError, match="use lora"):
        train(load_run([*words, "method.kind=qlora", "name=q"]).config, run_folder("q"))


def test_its_tokenizer_gives_the_same_tokens(file, base):
    from sojourn.data.tokenize.tokenizer import open_tokenizer

    plain = AutoTokenizer.from_pretrained(base)
    text = "What colour is the lamp of house 27?\n<|im_start|>user 你好 naïve"
    assert open_tokenizer(file).tokenizer.encode(text, add_special_tokens=False).ids == plain.encode(
        text, add_special_tokens=False
    )


def test_a_file_that_is_not_gguf_is_refused_in_one_line(home, chats):
    (home / "bad.gguf").write_bytes(b"not a model")
    with pytest.raises(UserError, match=r"bad\.gguf") as told:
        train(load_run([f"model.base={home / 'bad.gguf'}", f"data.sources={chats}"]).config, run_folder("x"))
    assert "\n" not in str(told.value)
