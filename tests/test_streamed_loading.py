"""Weights are read tensor by tensor: the memory of a process does not grow by the files, and the model is the same."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from fork_server import ForkServer, needs_fork
from sojourn.errors import UserError
from sojourn.model.base import BaseModelSource, load_base_model
from sojourn.model.safetensors_reader import SafetensorsFile
from sojourn.model.streamed_loading import StagedReads, streamed_loading

_LOAD = """
import ctypes, json, sys
import torch
from sojourn.model.base import BaseModelSource, load_base_model

def peak():
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines["VmHWM"].split()[0]) << 10

M_MMAP_THRESHOLD = -3  # so that what is freed goes back at once; else free pieces between tensors count, or do not
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)
peaks = []
for folder in sys.argv[1:]:  # a tiny one first, so that what Python imports does not count
    model = load_base_model(BaseModelSource(folder, quant_bits=8), torch.bfloat16, "cpu")
    peaks.append(peak())
print(json.dumps(peaks[1] - peaks[0]))
"""


def _write(folder, shard="40MB", dtype=torch.bfloat16, **changed):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
             "num_attention_heads": 4, "num_key_value_heads": 2, **changed}  # fmt: skip
    config = AutoConfig.for_model(sizes.pop("family", "llama"), **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


@needs_fork
def test_memory_does_not_grow_by_the_files_while_a_model_is_quantized(tmp_path, fork_server: ForkServer):
    large = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    folder = _write(tmp_path / "large", "20MB", **large)
    shards = [file.stat().st_size for file in folder.glob("*.safetensors")]
    done = fork_server.run(str(_write(tmp_path / "tiny")), str(folder), code=_LOAD)
    assert done.returncode == 0, done.stderr
    files, quantized = sum(shards), sum(shards) / 2
    assert len(shards) >= 4 and json.loads(done.stdout) < quantized + 0.75 * files


@pytest.mark.parametrize(
    ("family", "bits", "double", "dtype"),
    [
        *((family, 4, True, "bfloat16") for family in ("llama", "qwen2")),
        *((family, 4, False, "float32") for family in ("llama", "qwen2")),
        *((family, 8, True, "float16") for family in ("llama", "qwen2", "qwen2_moe")),
    ],  # NF4 experts, which transformers does not quantize: test_experts.py
)
def test_quantized_weights_are_those_of_transformers(tmp_path, family, bits, double, dtype):
    dtype = getattr(torch, dtype)
    moe = {"num_experts": 4, "moe_intermediate_size": 64} if family == "qwen2_moe" else {}
    folder = _write(tmp_path, "50KB", family=family, tie_word_embeddings=family == "qwen2", **moe)
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double, "bnb_4bit_compute_dtype": dtype}
    how = BitsAndBytesConfig(load_in_4bit=True, **nf4) if bits == 4 else BitsAndBytesConfig(load_in_8bit=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=how, device_map={"": "cpu"})
    ours = load_base_model(BaseModelSource(str(folder), quant_bits=bits, double_quant=double), dtype, "cpu")
    _assert_equal(ours, theirs)


def _assert_equal(ours, theirs):
    expected = theirs.state_dict()  # has the quantization states of NF4 and int8, too
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
    for (name, module), other in zip(ours.named_modules(), theirs.modules(), strict=True):
        assert type(module) is type(other), name
    for (name, buffer), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert torch.equal(buffer, other), name
    tied = (model.get_input_embeddings().weight is model.get_output_embeddings().weight for model in (ours, theirs))
    assert len(set(tied)) == 1
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()


def test_evaluation_leaves_nf4_weights_as_they_are(tmp_path, monkeypatch):
    """On CPUs with AVX512_BF16, bitsandbytes would repack them and round their scales."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    model = load_base_model(BaseModelSource(str(_write(tmp_path)), quant_bits=4), torch.float32, "cpu").eval()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with torch.no_grad():
        model(torch.arange(8)[None])
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_nan_is_found_before_it_is_quantized(tmp_path, bits):
    folder = _write(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    model.save_pretrained(folder)
    with pytest.raises(UserError, match=r"^model\.base: .*: model\.layers\.1\.mlp\.up_proj\.weight has a NaN"):
        load_base_model(BaseModelSource(str(folder), quant_bits=bits), torch.float32, "cpu")


def test_a_missing_weight_is_an_error(tmp_path):
    folder = _write(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(UserError, match=r"lacks 9 of the weights of a LlamaForCausalLM, such as model\.layers\.2\."):
        load_base_model(BaseModelSource(str(folder), quant_bits=4), torch.float32, "cpu")


def test_pieces_that_are_read_through_two_buffers_make_the_tensor(tmp_path, monkeypatch):
    folder = _write(tmp_path)
    monkeypatch.setattr("sojourn.model.streamed_loading._PIECE", 1000)  # no multiple of a row
    file, staged = SafetensorsFile(folder / "model.safetensors"), StagedReads("cpu")
    assert all(torch.equal(staged.load(file, name), file.load(name)) for name in file.entries)


def test_transformers_reads_its_own_way_afterwards(tmp_path, monkeypatch):
    import transformers.modeling_utils as loading

    monkeypatch.delenv("HF_DEACTIVATE_ASYNC_LOAD", raising=False)
    before = loading.safe_open
    with pytest.raises(KeyError), streamed_loading("cpu", check_finite=True):
        assert loading.safe_open is not before
        raise KeyError
    assert loading.safe_open is before
