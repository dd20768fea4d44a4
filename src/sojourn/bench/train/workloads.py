"""What is measured: models of real shapes with random weights, the rows that they read, and how large a step is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from sojourn.config.messages import did_you_mean, printable
from sojourn.errors import UserError

Method = Literal["pretrain", "full", "lora", "qlora"]
Documents = Literal["short", "long", "chats"]
Family = Literal["llama", "qwen2"]

_GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """A model's dimensions. Of the two families, qwen2 has biases on q, k and v."""

    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool
    theta: float = 10_000.0
    dtype: str = "float32"

    @property
    def parameters(self) -> int:
        head = self.hidden // self.heads
        layer = self.hidden * (2 * self.hidden + 2 * head * self.kv_heads + 3 * self.ffn)
        return self.layers * layer + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def size(self) -> int:
        """Bytes of its weights on disk."""
        return self.parameters * (2 if self.dtype == "bfloat16" else 4)

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of transformers' config."""
        return {
            "hidden_size": self.hidden, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "intermediate_size": self.ffn, "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied, "rope_theta": self.theta, "initializer_range": 0.02,
        }  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """`documents`: short texts packed into rows, one long text that fills all rows, or chats.

    `memory`: GiB that the row with the least memory needs; the default selection skips the workload on smaller GPUs.
    """

    name: str
    title: str
    shape: Shape
    method: Method
    documents: Documents
    row_length: int
    rows: int
    micro_batch: int
    lr: float
    memory: float = 0.0
    weight_dtype: str = "float32"  # of a peer's trained weights; adapters are always float32
    activation_checkpointing: bool = False  # for peers, too large to train without
    rank: int = 16

    @property
    def has_adapters(self) -> bool:
        return self.method in ("lora", "qlora")

    @property
    def weight_decay(self) -> float:
        """0 for fine-tuning: peers' trainers disagree about which weights are decayed."""
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
    Workload("tiny-lora", "LoRA on a small model", _TINY_QWEN, method="lora", documents="chats",
             row_length=512, rows=4, micro_batch=2, lr=1e-3, weight_dtype="bfloat16"),
    Workload("pretrain-110m", "110M from scratch, whole rows", _110M, method="pretrain", documents="long",
             row_length=1024, rows=32, micro_batch=32, lr=6e-4, memory=18),
    Workload("pretrain-110m-packed", "the same, short texts packed", _110M, method="pretrain", documents="short",
             row_length=1024, rows=32, micro_batch=32, lr=6e-4, memory=18),
    Workload("pretrain-875m", "875M from scratch, whole rows", _875M, method="pretrain", documents="long",
             row_length=2048, rows=16, micro_batch=16, lr=3e-4, memory=60),
    Workload("full-1.5b", "all weights of Qwen2.5-1.5B's shape", _QWEN_1_5B, method="full", documents="chats",
             row_length=4096, rows=4, micro_batch=1, lr=1e-5, memory=32),
    Workload("lora-7b", "LoRA on Qwen2.5-7B's shape", _QWEN_7B, method="lora", documents="chats",
             row_length=8192, rows=1, micro_batch=1, lr=2e-4, memory=20, weight_dtype="bfloat16",
             activation_checkpointing=True),
    Workload("qlora-7b", "LoRA on the same in NF4", _QWEN_7B, method="qlora", documents="chats",
             row_length=8192, rows=1, micro_batch=1, lr=2e-4, memory=11, weight_dtype="bfloat16",
             activation_checkpointing=True),
    Workload("full-7b", "all weights of Qwen2.5-7B's shape", _QWEN_7B, method="full", documents="chats",
             row_length=8192, rows=1, micro_batch=1, lr=1e-5, memory=70, weight_dtype="bfloat16",
             activation_checkpointing=True),
)  # fmt: skip
WORKLOADS = {one.name: one for one in _ALL}


def default_workloads(gpu_memory: int | None) -> list[Workload]:
    """Without --workload: on a CPU the smallest; on a GPU those that fit its memory."""
    if gpu_memory is None:
        return [WORKLOADS["tiny"]]
    return [one for one in WORKLOADS.values() if one.memory and one.memory * _GIB <= gpu_memory] or [WORKLOADS["tiny"]]


def find_workloads(values: Iterable[str]) -> list[Workload]:
    """Workloads by name; each value may be several names, with commas."""
    names = [name.strip() for value in values for name in value.split(",") if name.strip()]
    for name in names:
        if name not in WORKLOADS:
            hint = did_you_mean(name, WORKLOADS)
            raise UserError(
                f"--workload: “{printable(name)}”: no such workload{hint}; there are: {', '.join(WORKLOADS)}"
            )
    return [WORKLOADS[name] for name in dict.fromkeys(names)]
