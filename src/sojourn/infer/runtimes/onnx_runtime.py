"""onnxruntime as a runtime, on the CPU: a folder with a decoder's graph and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import RunFailed, UserError
from sojourn.infer.runtimes.onnx_weights import read_weights
from sojourn.infer.runtimes.transformers_tokenizer import TokenizerRuntime, as_ids, open_tokenizer
from sojourn.storage.files import read_json_object

if TYPE_CHECKING:
    import numpy as np

GRAPH_FILE = "model.onnx"
_CHUNK = 256  # tokens of a prompt at a time: logits of a large vocabulary would fill the memory
_QUIET = 3  # errors only


class OnnxRuntime(TokenizerRuntime):
    """`session`: of a graph with KV cache; its inputs are named as Optimum and onnxruntime-genai name them."""

    def __init__(self, session: Any, file: Path, tokenizer: Any, stop_ids: set[int], context: int) -> None:
        super().__init__("onnxruntime", tokenizer, stop_ids)
        self._session, self._file, self._context = session, file, context
        inputs = {one.name: one for one in session.get_inputs()}
        self._takes_positions = "position_ids" in inputs
        self._past = [one for name, one in inputs.items() if name.startswith("past_key_values.")]
        self._outputs = ["logits", *(one.name.replace("past_key_values.", "present.") for one in self._past)]

    def logits(self, ids: list[int]) -> np.ndarray | None:
        """In pieces that go through the KV cache, as prompts do in use."""
        import numpy as np

        self._check_length(len(ids))
        rows, cache = [], self.empty_cache(1)
        for start in range(0, len(ids), _CHUNK):
            stop = min(len(ids), start + _CHUNK)
            found, cache = self.step(np.array([ids[start:stop]]), np.ones((1, stop)), cache)
            rows.append(found[0])
        return np.concatenate(rows)

    def greedy(self, ids: list[int], count: int) -> list[int] | None:
        import numpy as np

        self._check_length(len(ids))
        tokens: list[int] = []
        cache = self.empty_cache(1)
        for start in range(0, len(ids), _CHUNK):
            stop = min(len(ids), start + _CHUNK)
            rows, cache = self.step(np.array([ids[start:stop]]), np.ones((1, stop)), cache)
        while len(tokens) < min(count, self._context - len(ids)):
            tokens.append(int(rows[0, -1].argmax()))
            if self.stops_at(tokens[-1]) or len(tokens) == count:
                break
            rows, cache = self.step(np.array([tokens[-1:]]), np.ones((1, len(ids) + len(tokens))), cache)
        return tokens

    def weights(self) -> Iterable[tuple[str, Any]] | None:
        return read_weights(self._file) if find_spec("onnx") is not None else None

    def step(self, ids: np.ndarray, mask: np.ndarray, cache: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Logits [batch, new, vocabulary] in fp32 of `ids` [batch, new] after what `cache` holds, and the new cache.
        `mask` [batch, past + new]: 0 for padding."""
        import numpy as np

        feeds = {"input_ids": ids.astype(np.int64), "attention_mask": mask.astype(np.int64)}
        if self._takes_positions:
            counted = np.maximum(np.cumsum(feeds["attention_mask"], 1) - 1, 0)
            feeds["position_ids"] = counted[:, -ids.shape[1] :]
        feeds.update({one.name: value for one, value in zip(self._past, cache, strict=True)})
        logits, *present = self._session.run(self._outputs, feeds)
        return logits.astype(np.float32, copy=False), present

    def empty_cache(self, batch: int) -> list[np.ndarray]:
        import numpy as np

        return [
            np.zeros((batch, one.shape[1], 0, one.shape[3]), "float16" if "float16" in one.type else "float32")
            for one in self._past
        ]

    def close(self) -> None:
        self._session = None

    def _check_length(self, length: int) -> None:
        if length > self._context:
            raise RunFailed(f"a text of {length:,} tokens is longer than the model's context of {self._context:,}")


def unavailable() -> str:
    if find_spec("onnxruntime") is None:
        return "onnxruntime is not installed: pip install 'sojourn[export]'"
    return ""


def open_model(path: Path) -> OnnxRuntime:
    import onnxruntime
    import torch

    folder = path if path.is_dir() else path.parent
    file = folder / GRAPH_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path}: no {GRAPH_FILE} there")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _QUIET
    options.intra_op_num_threads = torch.get_num_threads()  # OMP_NUM_THREADS, which onnxruntime does not read
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # others use this machine too
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common class
        reason = " ".join(str(error).split())[:300]
        raise RunFailed(f"{path}: onnxruntime cannot open it: {reason}") from None
    names = {one.name for one in session.get_inputs()}
    if not {"input_ids", "attention_mask"} <= names or not any(one.startswith("past_key_values.") for one in names):
        raise UserError(f"{path}: not a decoder with KV cache (its inputs: {', '.join(sorted(names)[:6])})")
    config = read_json_object(folder / "config.json")
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    stops = read_json_object(folder / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    context = int((text or {}).get("max_position_embeddings") or 2**20)
    return OnnxRuntime(session, file, open_tokenizer(folder), as_ids(stops), context)
