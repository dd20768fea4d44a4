"""Model folders, adapters and GGUF files that are damaged or made to harm. Each case changes a sound folder; `canary`
is a file that only executed code would create."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[Path, Path], None]


class Touch:
    """Unpickled, it creates the canary."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def edit(name: str, **changes: Any) -> Change:
    """Sets keys of a JSON file; None removes one."""

    def change(folder: Path, canary: Path) -> None:
        path = folder / name
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        found |= changes
        path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}), encoding="utf-8")

    return change


def write(name: str, data: bytes | str) -> Change:
    def change(folder: Path, canary: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)

    return change


def template(source: str) -> Change:
    def change(folder: Path, canary: Path) -> None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        edit("tokenizer_config.json", chat_template=source.replace("CANARY", str(canary)))(folder, canary)

    return change


def header(
    change_header: Callable[[dict[str, Any]], Any], data: bytes | None = None, length: int | None = None
) -> Change:
    """Another header for model.safetensors, and other data."""

    def change(folder: Path, canary: Path) -> None:
        path = folder / "model.safetensors"
        whole = path.read_bytes()
        size = int.from_bytes(whole[:8], "little")
        found = json.loads(whole[8 : 8 + size])
        text = change_header(found)
        text = json.dumps(found if text is None else text).encode() if not isinstance(text, bytes) else text
        rest = whole[8 + size :] if data is None else data
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + rest)

    return change


def entry(**changes: Any) -> Change:
    """Changes the entry of the first tensor."""

    def change(found: dict[str, Any]) -> None:
        name = min((name for name in found if name != "__metadata__"), key=lambda name: found[name]["data_offsets"])
        found[name] |= changes

    return header(change)


def truncate(name: str, share: float) -> Change:
    def change(folder: Path, canary: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share)])

    return change


def instead(name: str, make: Callable[[Path], object]) -> Change:
    """Something else in place of a file."""

    def change(folder: Path, canary: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def pickled(name: str, remove: str = "model.safetensors") -> Change:
    def change(folder: Path, canary: Path) -> None:
        (folder / remove).unlink(missing_ok=True)
        (folder / name).write_bytes(pickle.dumps(Touch(canary)))

    return change


def shard(name: str) -> Change:
    """An index that names this file."""
    return write("model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}}))


def own_code(name: str, **settings: Any) -> Change:
    """Python code in the folder, and settings that ask for it."""

    def change(folder: Path, canary: Path) -> None:
        code = f"from pathlib import Path\nPath({str(canary)!r}).touch()\nclass Evil: pass\nclass EvilConfig: pass\n"
        (folder / "evil.py").write_text(code)
        edit(name, **settings)(folder, canary)

    return change


def nan_weights(folder: Path, canary: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def fast(change_tokenizer: Callable[[dict[str, Any]], object]) -> Change:
    """Changes tokenizer.json."""

    def change(folder: Path, canary: Path) -> None:
        path = folder / "tokenizer.json"
        found = json.loads(path.read_text(encoding="utf-8"))
        change_tokenizer(found)
        path.write_text(json.dumps(found), encoding="utf-8")

    return change


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


_LONG = 10**12
_DEEP = "[" * 200_000
_ENDLESS = "1" * 5000 + "}"

# What is refused, and a part of the line that says so
FOLDERS: dict[str, tuple[Change, str]] = {
    "weights pickled as .bin": (pickled("pytorch_model.bin"), "can run code"),
    "weights pickled as .pt": (pickled("model.pt"), "can run code"),
    "a pickle renamed to .safetensors": (pickled("model.safetensors", "none"), "a pickle"),
    "a torch archive renamed to .safetensors": (write("model.safetensors", b"PK\x03\x04" + b"\0" * 400), "a pickle"),
    "model code of its own": (
        own_code("config.json", model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig",
                                                             "AutoModelForCausalLM": "evil.Evil"}),
        "its own Python code",
    ),
    "a kernel to download": (edit("config.json", _attn_implementation="evil/kernel:run"), "names code to download"),
    "tokenizer code of its own": (
        own_code("tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", None]}),
        "",
    ),
    "a shard of the parent folders": (shard("../../etc/passwd"), "names '../../etc/passwd'"),
    "an absolute path as a shard": (shard("/etc/passwd"), "names '/etc/passwd'"),
    "a shard with a drive letter": (shard("C:\\weights.safetensors"), "names 'C:"),
    "a pickle as a shard": (shard("pytorch_model.bin"), "names 'pytorch_model.bin'"),
    "a shard that is not there": (shard("model-00009.safetensors"), "no such file"),
    "an index of numbers": (write("model.safetensors.index.json", '{"weight_map": {"a": 5}}'), "names"),
    "an index without files": (write("model.safetensors.index.json", "{}"), "not an index"),
    "an index that lists what no file has": (
        lambda folder, canary: shard("model.safetensors")(folder, canary)
        or write("model.safetensors.index.json", '{"weight_map": {"no.such": "model.safetensors"}}')(folder, canary),
        "no.such is not in its file",
    ),
    "a config that links elsewhere": (
        instead("config.json", lambda path: path.symlink_to("/etc/passwd")), "a link to a file outside",
    ),
    "a tokenizer that links elsewhere": (
        instead("tokenizer.json", lambda path: path.symlink_to("/etc/hostname")), "a link to a file outside",
    ),
    "weights that link to a text": (
        instead("model.safetensors", lambda path: path.symlink_to("/etc/passwd")), "not a whole safetensors file",
    ),
    "weights that link to a device": (
        instead("model.safetensors", lambda path: path.symlink_to("/dev/zero")), "a device",
    ),
    "a link to itself": (instead("model.safetensors", lambda path: path.symlink_to(path.name)), "model.safetensors"),
    "a fifo as weights": (instead("model.safetensors", os.mkfifo), "a fifo"),
    "a fifo as a template": (instead("chat_template.jinja", os.mkfifo), "a fifo"),
    "a fifo as a tokenizer": (instead("tokenizer.json", os.mkfifo), "a fifo"),
    "a folder as weights": (instead("model.safetensors", os.mkdir), "a folder"),
    "a folder as an index": (instead("model.safetensors.index.json", os.mkdir), "a folder"),
    "weights of no bytes": (write("model.safetensors", b""), "header of 0 bytes"),
    "weights cut in half": (truncate("model.safetensors", 0.5), "does not lie within the file"),
    "weights without their last byte": (truncate("model.safetensors", 0.99999), "does not lie within the file"),
    "a header of 2^63 bytes": (write("model.safetensors", struct.pack("<Q", 2**63) + b"{}"), "header of 9,223"),
    "a header longer than the file": (header(lambda found: None, length=10**9), "header of 1,000,000,000"),
    "a header that is a list": (header(lambda found: []), "not a mapping"),
    "a header nested for ever": (header(lambda found: _DEEP.encode()), "nested too deeply"),
    "a header that is not UTF-8": (header(lambda found: b"\xff\xfe{}"), "not UTF-8"),
    "a tensor twice in the header": (
        header(lambda found: b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": 3}', b"\0" * 4),
        "twice",
    ),
    "a header of many keys": (
        write("model.safetensors", struct.pack("<Q", 40 << 20) + b" " * (40 << 20)),
        "header of 41,943,040",
    ),
    "offsets below zero": (entry(data_offsets=[-4, 4]), "does not lie within"),
    "offsets behind the file": (entry(data_offsets=[2**62, 2**62 + 8]), "does not lie within"),
    "offsets that overlap": (
        header(lambda found: {"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
                              "b": {"dtype": "U8", "shape": [8], "data_offsets": [4, 12]}}, b"\0" * 12), "overlaps",
    ),
    "a hole between tensors": (
        header(lambda found: {"a": {"dtype": "U8", "shape": [4], "data_offsets": [8, 12]}}, b"\0" * 12), "a hole",
    ),
    "bytes after the last tensor": (
        header(lambda found: {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, b"\0" * 12),
        "after its last",
    ),
    "an unknown dtype": (entry(dtype="F3"), "unknown dtype"),
    "a dtype that is a list": (entry(dtype=[]), "unknown dtype"),
    "a shape that overflows": (entry(shape=[2**40, 2**40]), "another size than its shape"),
    "a shape below zero": (entry(shape=[-1, -1]), "does not lie within"),
    "a shape of texts": (entry(shape=["a"]), "does not lie within"),
    "no weights at all": (instead("model.safetensors", lambda path: None), "no weights"),
    "weights with a NaN": (nan_weights, "has a NaN"),
    "no config": (instead("config.json", lambda path: None), ""),
    "a config that is a list": (write("config.json", "[]"), "not a mapping"),
    "an empty config": (write("config.json", ""), "not valid JSON"),
    "a config nested for ever": (write("config.json", _DEEP), "nested too deeply"),
    "a config with a byte order mark": (write("config.json", b"\xef\xbb\xbf{}"), "byte order mark"),
    "a config that is not UTF-8": (write("config.json", b'{"model_type": "\xff"}'), "not UTF-8"),
    "a config with a key twice": (write("config.json", '{"model_type": "llama", "model_type": "gpt2"}'), "twice"),
    "a config with a NaN": (write("config.json", '{"model_type": "llama", "rms_norm_eps": NaN}'), "NaN"),
    "a config with an endless number": (write("config.json", '{"model_type": "llama", "a": ' + _ENDLESS), "digits"),
    "no model_type": (edit("config.json", model_type=None), "no model_type"),
    "an unknown model_type": (edit("config.json", model_type="none-such"), "does not know its architecture"),
    "layers without number": (edit("config.json", num_hidden_layers=10**9), "which no model has"),
    "layers below zero": (edit("config.json", num_hidden_layers=-2), "which no model has"),
    "layers as a text": (edit("config.json", num_hidden_layers="many"), "which no model has"),
    "more layers than the file has": (edit("config.json", num_hidden_layers=9_000), "describes 9,000 layers"),
    "a vocabulary that fills the memory": (edit("config.json", vocab_size=10**8), "config.json describes"),
    "heads as a list": (edit("config.json", num_attention_heads=[4]), "which no model has"),
    "an activation that is none": (edit("config.json", hidden_act="os.system"), ""),
    "another hidden size": (edit("config.json", hidden_size=48), ""),
    "an end of text that is no id": (edit("config.json", **{"eos_token_id": "x"}), "not a token's id"),
    "a generation config of wrong types": (write("generation_config.json", '{"temperature": "hot"}'), "temperature"),
    "a generation config that is a list": (write("generation_config.json", "[1]"), "not a mapping"),
    "a generation config with odd ids": (write("generation_config.json", '{"eos_token_id": [1, "x"]}'), "eos_token_id"),
    "a million beams": (write("generation_config.json", '{"num_beams": 1000000}'), "num_beams"),
    "a tokenizer cut in half": (truncate("tokenizer.json", 0.5), "not valid JSON"),
    "a tokenizer of no bytes": (write("tokenizer.json", b""), "not valid JSON"),
    "a tokenizer without a model": (write("tokenizer.json", "{}"), "no model"),
    "ids without end": (fast(lambda t: t["model"]["vocab"].update(huge=2**32 - 1)), "the id 4294967295"),
    "ids below zero": (fast(lambda t: t["model"]["vocab"].update(minus=-1)), "the id -1"),
    "an added token without end": (fast(lambda t: t["added_tokens"][0].update(id=2**31)), "the id 2147483648"),
    "no merges": (fast(lambda t: t["model"].pop("merges")), "tokenizer"),
    "a pattern that backtracks": (fast(lambda t: t.update(pre_tokenizer=_split("(a+)+$"))), "exponential time"),
    "a pattern of equal ways": (fast(lambda t: t.update(pre_tokenizer=_split("(?:a|a)*b"))), "exponential time"),
    "a normalizer that doubles": (
        fast(lambda t: t.update(normalizer={"type": "Sequence", "normalizers": [_replace("a", "aa")] * 40})), "as long",
    ),
    "padding without end": (
        fast(lambda t: t.update(padding={"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None,
                                         "pad_id": 0, "pad_type_id": 0, "pad_token": "a"})), "pads every text",
    ),
    "settings of the tokenizer cut": (truncate("tokenizer_config.json", 0.5), "not valid JSON"),
    "settings of the tokenizer as a list": (write("tokenizer_config.json", "[]"), "not a mapping"),
    "a template that is a number": (edit("tokenizer_config.json", chat_template=5), "not a text"),
    "an added token with an odd id": (edit("tokenizer_config.json", added_tokens_decoder={"-5": {}}), "the id -5"),
    "a template that loops": (
        template("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"), "s of CPU time",
    ),
    "a template that writes for ever": (
        template("{% for a in range(90000) %}" + "y" * 5000 + "{% endfor %}"), "writes more than",
    ),
    "a template that grows": (
        template("{% set s = 'x' * 1000000 %}{{ s.replace('x', s) }}"), "of memory",
    ),
    "a template with a long range": (template(f"{{{{ range({_LONG})|list }}}}"), "number over"),
    "a template that includes a file": (template("{% include '/etc/passwd' %}"), "chat template"),
    "a template that looks at classes": (template("{{ ''.__class__.__mro__[1].__subclasses__() }}"), "unsafe"),
    "a template that calls the system": (
        template("{{ cycler.__init__.__globals__.os.system('touch CANARY') }}"), "unsafe",
    ),
    "a template that is not Jinja": (template("{% for %}"), "not a valid Jinja template"),
    "a template that calls itself": (template("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"), "recursion"),
    "a template that raises": (template("{{ raise_exception('no') }}"), "no"),
}  # fmt: skip

# Of an adapter's folder
ADAPTERS: dict[str, tuple[Change, str]] = {
    "pickled weights": (pickled("adapter_model.bin", "adapter_model.safetensors"), "can run code"),
    "a base by its address": (
        edit("adapter_config.json", base_model_name_or_path="https://example.com/evil"), "neither a folder nor",
    ),
    "a base in the parent folders": (
        edit("adapter_config.json", base_model_name_or_path="../../../../etc"), "",
    ),
    "a base that is a list": (edit("adapter_config.json", base_model_name_or_path=["a"]), "neither a folder nor"),
    "a module to import": (
        edit("adapter_config.json", auto_mapping={"base_model_class": "system", "parent_library": "os"}),
        "auto_mapping",
    ),
    "megatron code to import": (
        edit("adapter_config.json", megatron_config={"a": 1}, megatron_core="evil"), "megatron_config",
    ),
    "a pattern that backtracks": (edit("adapter_config.json", target_modules="(.*a)*$"), "can take years"),
    "a pattern of many stars": (edit("adapter_config.json", target_modules=".*" * 20 + "!"), "can take years"),
    "a pattern of ranks": (edit("adapter_config.json", rank_pattern={"(q+)+x": 4}), "can take years"),
    "targets of numbers": (edit("adapter_config.json", target_modules=[1, 2]), "neither a pattern nor"),
    "layers without number": (edit("adapter_config.json", layer_replication=[[0, 2]] * 9000), "layer_replication"),
    "a rank without end": (edit("adapter_config.json", r=10**9), "which no adapter has"),
    "another rank than its weights": (edit("adapter_config.json", r=64), "does not fit"),
    "an unknown kind": (edit("adapter_config.json", peft_type="EVIL"), "EVIL"),
    "settings cut": (truncate("adapter_config.json", 0.5), "not valid JSON"),
    "weights cut": (truncate("adapter_model.safetensors", 0.5), "not a whole safetensors file"),
    "no weights": (instead("adapter_model.safetensors", lambda path: None), "no adapter_model.safetensors"),
}  # fmt: skip


def gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf(
    values: bytes = b"", count: int = 1, tensors: bytes = b"", tensor_count: int = 0, version: int = 3,
    magic: bytes = b"GGUF", rest: bytes = b"\0" * 4096,
) -> bytes:  # fmt: skip
    """A file with the architecture and these values and tensors."""
    architecture = gguf_text(b"general.architecture") + struct.pack("<I", 8) + gguf_text(b"llama")
    return magic + struct.pack("<IQQ", version, tensor_count, count) + architecture + values + tensors + rest


def gguf_tensor(name: bytes, shape: list[int], kind: int, offset: int) -> bytes:
    return gguf_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def _array(key: bytes, kind: int, count: int, data: bytes = b"") -> bytes:
    return gguf_text(key) + struct.pack("<IIQ", 9, kind, count) + data


GGUF: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "more than 0 bytes"),
    "another magic": (gguf(magic=b"GGML"), "does not begin"),
    "version 99": (gguf(version=99), "version 99"),
    "2^60 values": (gguf(count=2**60), "announces"),
    "2^60 tensors": (gguf(tensor_count=2**60), "announces"),
    "a text of 2^60 bytes": (gguf(gguf_text(b"k") + struct.pack("<IQ", 8, 2**60), 2), "1,152,921"),
    "a key of 2^60 bytes": (gguf(struct.pack("<Q", 2**60), 2), "1,152,921"),
    "an array of 2^60 texts": (gguf(_array(b"k", 8, 2**60), 2), "texts"),
    "an array of 2^60 numbers": (gguf(_array(b"k", 4, 2**60), 2), "bytes"),
    "an array of arrays": (gguf(_array(b"k", 9, 1, struct.pack("<IQ", 9, 1) * 50), 2), "array of arrays"),
    "texts that end behind the file": (gguf(_array(b"k", 8, 2, struct.pack("<Q", 2**63)), 2), "does not lie within"),
    "an unknown type of value": (gguf(gguf_text(b"k") + struct.pack("<I", 77), 2), "unknown type 77"),
    "a key twice": (gguf(gguf_text(b"general.architecture") + struct.pack("<IB", 0, 1), 2), "twice"),
    "a key that is not UTF-8": (gguf(gguf_text(b"\xff\xfe") + struct.pack("<IB", 0, 1), 2), "UTF-8"),
    "a tensor behind the file": (
        gguf(tensors=gguf_tensor(b"a", [32], 0, 2**40), tensor_count=1), "does not lie within",
    ),
    "a tensor larger than the file": (
        gguf(tensors=gguf_tensor(b"a", [2**30, 2**30], 0, 0), tensor_count=1), "does not lie within",
    ),
    "tensors that overlap": (
        gguf(tensors=gguf_tensor(b"a", [32], 0, 0) + gguf_tensor(b"b", [32], 0, 64), tensor_count=2), "overlaps",
    ),
    "a tensor of 99 dimensions": (
        gguf(tensors=gguf_text(b"a") + struct.pack("<I", 99), tensor_count=1), "99 dimensions",
    ),
    "a tensor of an unknown type": (
        gguf(tensors=gguf_tensor(b"a", [32], 200, 0), tensor_count=1), "unknown type 200",
    ),
    "rows that are no blocks": (gguf(tensors=gguf_tensor(b"a", [33], 8, 0), tensor_count=1), "in blocks of 32"),
    "an alignment of nothing": (
        gguf(gguf_text(b"general.alignment") + struct.pack("<II", 4, 0), 2, gguf_tensor(b"a", [32], 0, 0), 1),
        "alignment",
    ),
    "no tensors": (gguf(), "no tensors"),
    "a million blocks": (
        gguf(gguf_text(b"llama.block_count") + struct.pack("<II", 4, 10**6), 2, gguf_tensor(b"a", [32], 0, 0), 1),
        "block_count",
    ),
    "a file cut in its header": (gguf()[:40], "bytes"),
}  # fmt: skip
