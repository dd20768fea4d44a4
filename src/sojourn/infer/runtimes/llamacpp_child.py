"""Answers questions about a GGUF file through llama.cpp: a request in JSON per line on standard input, an answer per
line on standard output.

Run by a Python that has the package llama_cpp, which need not be the one that has Sojourn; and in a process of its own,
since llama.cpp ends its process where a file or the CPU is not to its liking. Standard library, numpy and llama_cpp.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

_BATCH = 64  # tokens whose logits are in memory at once
_ALL_LAYERS = 999
_ROOM = 256  # llama.cpp rounds contexts up to this


class Model:
    def __init__(self, path: str, threads: int, lora: str | None = None) -> None:
        import llama_cpp as api

        self.api: Any = api
        self.context: Any = None
        self.threads, self.size = threads, 0
        self.model = load(api, path, gpu=False)
        self.vocab = api.llama_model_get_vocab(self.model)
        self.tokens = api.llama_vocab_n_tokens(self.vocab)
        self.lora = api.llama_adapter_lora_init(self.model, lora.encode()) if lora else None
        if lora and not self.lora:
            raise RuntimeError("the adapter does not load")

    def encode(self, text: str, add_special: bool) -> list[int]:
        data = text.encode()
        most = len(data) + 16
        ids = (self.api.llama_token * most)()
        count = self.api.llama_tokenize(self.vocab, data, len(data), ids, most, add_special, True)
        if count < 0:
            raise RuntimeError("a text cannot be tokenized")
        return list(ids[:count])

    def logits(self, ids: list[int], path: str) -> None:
        """Rows in fp32, to a file."""
        self.reset(len(ids))
        with Path(path).open("wb") as file:
            for start in range(0, len(ids), _BATCH):
                file.write(self.decode(ids[start : start + _BATCH], start, every=True).tobytes())

    def greedy(self, ids: list[int], count: int) -> list[int]:
        import numpy

        self.reset(len(ids) + count)
        rows: Any = None
        for start in range(0, len(ids), _BATCH):
            rows = self.decode(ids[start : start + _BATCH], start, every=False)
        found: list[int] = []
        while len(found) < count:
            found.append(int(numpy.argmax(rows[-1])))
            if self.api.llama_vocab_is_eog(self.vocab, found[-1]):
                break
            if len(found) < count:
                rows = self.decode(found[-1:], len(ids) + len(found) - 1, every=False)
        return found

    def decode(self, ids: list[int], start: int, every: bool) -> Any:
        """Logits of all tokens, or of the last one."""
        import numpy

        batch = self.api.llama_batch_init(len(ids), 0, 1)
        try:
            batch.n_tokens = len(ids)
            for index, token in enumerate(ids):
                batch.token[index], batch.pos[index] = token, start + index
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
                batch.logits[index] = every or index == len(ids) - 1
            if self.api.llama_decode(self.context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            rows = len(ids) if every else 1
            logits = numpy.ctypeslib.as_array(self.api.llama_get_logits(self.context), (rows, self.tokens))
            return numpy.array(logits, dtype=numpy.float32)
        finally:
            self.api.llama_batch_free(batch)

    def reset(self, length: int) -> None:
        """An empty context of at least this length. No longer than needed: LongRoPE goes by the context's size."""
        size = -(-max(length, 1) // _ROOM) * _ROOM
        if self.context is not None and self.size == size:
            self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
            return
        if self.context is not None:
            self.api.llama_free(self.context)
        parameters = self.api.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = size, _BATCH, _BATCH
        parameters.n_threads = parameters.n_threads_batch = self.threads
        parameters.type_k = parameters.type_v = 0  # fp32: the file is asked, not the cache
        if hasattr(parameters, "flash_attn_type"):
            parameters.flash_attn_type = 0
        self.context, self.size = self.api.llama_init_from_model(self.model, parameters), size
        if not self.context:
            raise RuntimeError(f"no context of {size} tokens")
        if self.lora:
            self.api.llama_set_adapter_lora(self.context, self.lora, 1.0)


def load(api: Any, path: str, gpu: bool) -> Any:
    parameters = api.llama_model_default_params()
    parameters.n_gpu_layers = _ALL_LAYERS if gpu else 0
    model = api.llama_model_load_from_file(path.encode(), parameters)
    if not model:
        raise RuntimeError("it does not load")
    return model


class Sequences:
    """Several texts at a time over one KV cache of `cells` tokens, which `sojourn serve` computes with. `batch`: most
    tokens of a step. `shared`: the cells belong to all, else each has its part. `logits`: a file for them."""

    def __init__(
        self, path: str, threads: int, rows: int, cells: int, batch: int, gpu: bool, shared: bool, logits: str
    ) -> None:
        import llama_cpp as api
        import numpy

        self.api: Any = api
        self.gpu = gpu and bool(api.llama_supports_gpu_offload())
        self.model = load(api, path, self.gpu)
        self.vocab = api.llama_model_get_vocab(self.model)
        self.tokens = int(api.llama_vocab_n_tokens(self.vocab))
        parameters = api.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = cells, rows
        parameters.n_batch = parameters.n_ubatch = batch
        parameters.n_threads = parameters.n_threads_batch = threads
        if hasattr(parameters, "kv_unified"):
            parameters.kv_unified = shared
        self.context = api.llama_init_from_model(self.model, parameters)
        if not self.context:
            raise RuntimeError(f"no KV cache of {cells} tokens")
        self.batch = api.llama_batch_init(batch, 0, 1)
        self.logits = numpy.memmap(logits, numpy.float32, "w+", shape=(batch, self.tokens))

    def describe(self) -> dict[str, Any]:
        """`rewinds`: whether the end of a text can be taken back, which recurrent models cannot."""
        api = self.api
        asked = [getattr(api, f"llama_model_is_{kind}", None) for kind in ("recurrent", "hybrid")]
        stops = [token for token in range(self.tokens) if api.llama_vocab_is_eog(self.vocab, token)]
        rewinds = not any(ask is not None and ask(self.model) for ask in asked)
        return {"vocabulary": self.tokens, "stops": stops, "rewinds": rewinds, "gpu": self.gpu}

    def forward(self, changes: list[Any], parts: list[Any]) -> int:
        """First `changes`, in order: ("keep", row, tokens to keep), ("copy", row, to which, tokens). Then `parts`:
        (row, position, tokens, how many of the last ones' logits). Returns llama_decode's code; 1: no room."""
        import numpy

        api, batch = self.api, self.batch
        memory = api.llama_get_memory(self.context)
        for kind, row, *rest in changes:
            if kind == "copy":
                api.llama_memory_seq_cp(memory, row, rest[0], 0, rest[1])
            elif not api.llama_memory_seq_rm(memory, row, rest[0], -1):
                raise RuntimeError("a text cannot be cut")
        at = outputs = 0
        for row, start, ids, wanted in parts:
            for index, token in enumerate(ids):
                batch.token[at], batch.pos[at] = token, start + index
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
                batch.logits[at] = index >= len(ids) - wanted
                at += 1
            outputs += wanted
        batch.n_tokens = at
        code = int(api.llama_decode(self.context, batch))
        if code == 0 and outputs:
            found = numpy.ctypeslib.as_array(api.llama_get_logits(self.context), (outputs, self.tokens))
            self.logits[:outputs] = found
        return code


def quantize(source: str, target: str, kind: int, threads: int, importance: dict[str, Any] | None = None) -> None:
    import llama_cpp as api

    parameters = api.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = kind, threads
    kept: list[Any] = []  # llama.cpp gets pointers to these
    if importance:
        if not hasattr(api, "llama_model_imatrix_data"):
            raise RuntimeError("this llama_cpp takes no importance matrix; update it: pip install -U llama-cpp-python")
        entries = (api.llama_model_imatrix_data * (len(importance["names"]) + 1))()
        with Path(importance["file"]).open("rb") as file:
            for number, (name, size) in enumerate(importance["names"]):
                entry = entries[number]
                values = (ctypes.c_float * size).from_buffer_copy(file.read(4 * size))
                kept += [values, name.encode()]
                entry.name, entry.size = kept[-1], size
                entry.data = ctypes.cast(values, ctypes.POINTER(ctypes.c_float))
        parameters.imatrix = ctypes.cast(entries, type(parameters.imatrix))
        kept.append(entries)
    if api.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(parameters)) != 0:
        raise RuntimeError("llama_model_quantize failed")


def answer(request: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    do = request.pop("do")
    if do == "open":
        state["model"] = Model(**request)
        return {"vocabulary": state["model"].tokens}
    if do == "encode":
        return {"ids": state["model"].encode(**request)}
    if do == "logits":
        state["model"].logits(**request)
        return {}
    if do == "greedy":
        return {"ids": state["model"].greedy(**request)}
    if do == "is_stop":
        model = state["model"]
        return {"stops": bool(model.api.llama_vocab_is_eog(model.vocab, request["token"]))}
    if do == "open_sequences":
        state["sequences"] = Sequences(**request)
        described: dict[str, Any] = state["sequences"].describe()
        return described
    if do == "forward":
        return {"code": state["sequences"].forward(**request)}
    if do == "quantize":
        quantize(**request)
        return {}
    raise ValueError(do)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever llama.cpp prints
    del sys.path[0]  # this folder: its modules are not for import here
    state: dict[str, Any] = {}
    for line in sys.stdin:
        try:
            found = answer(json.loads(line), state)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
