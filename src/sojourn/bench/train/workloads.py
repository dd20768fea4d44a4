"""What is measured: models of real shapes with random weights, the rows that they read, and how large a step is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from sojourn.config.words import closest, shown
from sojourn.errors import UserError

Method = Literal["pretrain", "full", "lora", "qlora"]
Documents = Literal["short", "long", "chats"]
Family = Literal["llama", "qwen2"]

_GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """A model's size. Of the two families, qwen2 has biases on queries, keys and values."""

    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool
    theta: float = 10_000.0
    written_in: str = "float32"

    @property
    def parameters(self) -> int:
        head = self.hidden // self.heads
        layer = self.hidden * (2 * self.hidden + 2 * head * self.kv_heads + 3 * self.ffn)
        return self.layers * layer + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def size(self) -> int:
        """Bytes of its weights as they are written."""
        return self.parameters * (2 if self.written_in == "bfloat16" else 4)

    @property
    def settings(self) -> dict[str, Any]:
        """As transformers calls them."""
        return {
            "hidden_size": self.hidden, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "intermediate_size": self.ffn, "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied, "rope_theta": self.theta, "initializer_range": 0.02,
        }  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """`documents`: several short texts to a row, one text over whole rows, or chats.

    `memory` is what the leanest row needs, in GiB: smaller GPUs are spared the workload.
    """

    name: str
    says: str
    shape: Shape
    method: Method
    documents: Documents
    row_length: int
    rows: int
    micro_batch: int
    lr: float
    memory: float = 0.0
    weights: str = "float32"  # what is trained; adapters always are float32
    checkpointed: bool = False  # too large to train otherwise
    rank: int = 16

    @property
    def adapters(self) -> bool:
        return self.method in ("lora", "qlora")

    @property
    def weight_decay(self) -> float:
        """None for fine-tuning: peers' trainers disagree about which weights it is for."""
        return 0.1 if self.method == "pretrain" else 0.0


_TINY = Shape("llama", 128, 2, 4, 2, 352, 2048, False)
_TINY_QWEN = Shape("qwen2", 128, 2, 4, 2, 352, 2048, True)
_110M = Shape("llama", 768, 12, 12, 12, 2048, 32_000, True)
_875M = Shape("llama", 2048, 16, 16, 16, 5504, 32_000, True)
_QWEN_1_5B = Shape("qwen2", 1536, 28, 12, 2, 8960, 151_936, True, 1e6, "bfloat16")
_QWEN_7B = Shape("qwen2", 3584, 28, 28, 4, 18_944, 152_064, False, 1e6, "bfloat16")
_ALL: tuple[Workload, ...] = (
    Workload("tiny", "a small model from scratch, short texts packed", _TINY, method="pretrain", documents="short",
             row_length=256, rows=8, micro_batch=4, lr=1e-3),
    Workload("tiny-lora", "adapters on a small model", _TINY_QWEN, method="lora", documents="chats",
             row_length=512, rows=4, micro_batch=2, lr=1e-3, weights="bfloat16"),
    Workload("pretrain-110m", "110M from scratch, whole rows", _110M, method="pretrain", documents="long",
             row_length=1024, rows=32, micro_batch=32, lr=6e-4, memory=18),
    Workload("pretrain-110m-packed", "the same, short texts packed", _110M, method="pretrain", documents="short",
             row_length=1024, rows=32, micro_batch=32, lr=6e-4, memory=18),
    Workload("pretrain-875m", "875M from scratch, whole rows", _875M, method="pretrain", documents="long",
             row_length=2048, rows=16, micro_batch=16, lr=3e-4, memory=60),
    Workload("full-1.5b", "all weights of Qwen2.5-1.5B's shape", _QWEN_1_5B, method="full", documents="chats",
             row_length=4096, rows=4, micro_batch=1, lr=1e-5, memory=32),
    Workload("lora-7b", "adapters on Qwen2.5-7B's shape", _QWEN_7B, method="lora", documents="chats",
             row_length=8192, rows=1, micro_batch=1, lr=2e-4, memory=20, weights="bfloat16", checkpointed=True),
    Workload("qlora-7b", "adapters on the same in 4 bits", _QWEN_7B, method="qlora", documents="chats",
             row_length=8192, rows=1, micro_batch=1, lr=2e-4, memory=11, weights="bfloat16", checkpointed=True),
    Workload("full-7b", "all weights of Qwen2.5-7B's shape", _QWEN_7B, method="full", documents="chats",
             row_length=8192, rows=1, micro_batch=1, lr=1e-5, memory=70, weights="bfloat16", checkpointed=True),
)  # fmt: skip
WORKLOADS = {one.name: one for one in _ALL}


def fitting(gpu_memory: int | None) -> list[Workload]:
    """What to measure where nobody says: on a CPU the smallest; on a GPU what it has the memory for."""
    if gpu_memory is None:
        return [WORKLOADS["tiny"]]
    return [one for one in WORKLOADS.values() if one.memory and one.memory * _GIB <= gpu_memory] or [WORKLOADS["tiny"]]


def chosen(words: Iterable[str]) -> list[Workload]:
    """Workloads by name; each word may be several, with commas."""
    names = [name.strip() for word in words for name in word.split(",") if name.strip()]
    for name in names:
        if name not in WORKLOADS:
            hint = closest(name, WORKLOADS)
            raise UserError(f"--workload: “{shown(name)}”: no such workload{hint}; there are: {', '.join(WORKLOADS)}")
    return [WORKLOADS[name] for name in dict.fromkeys(names)]
