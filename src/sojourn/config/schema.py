"""RunConfig: all settings of a run. Field types define what is allowed; `validation_errors.py` formats errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from sojourn.config.attention_backends import ATTENTION_BACKENDS
from sojourn.config.data import DataConfig
from sojourn.config.fields import (
    ActivationCheckpointing,
    Auto,
    Bool,
    CommaList,
    Description,
    Fraction,
    Gpus,
    Heads,
    Name,
    OnOff,
    PositiveCount,
    Price,
    Prompts,
    Rows,
    Section,
    Steps,
    Switch,
    Text,
    TextList,
    WholeNumber,
    conflict,
)
from sojourn.config.quantities import Count, Duration, Money, Size

OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "muon"]
if TYPE_CHECKING:
    Attention = str
else:
    _VALUES = ("auto", *(name for name, backend in ATTENTION_BACKENDS.items() if not backend.fused_qkv))
    Attention = Literal[_VALUES]
Tracker = Literal["wandb", "swanlab", "mlflow", "trackio"]
Precision = Literal["bf16", "fp16", "fp32"]
MasterWeights = Literal["fp32", "bf16", "bf16_kahan"]
MethodKind = Literal["pretrain", "full", "lora", "qlora"]


def default_head_size(width: int) -> int:
    """The head size for `num_heads: auto`: one that every inference engine supports."""
    return 64 if width < 2048 else 128


class ModelConfig(Section):
    """`base`, an existing model; or the size of a new one, by one number (`params` or `depth`) or in full."""

    base: Text | None = None
    revision: Text | None = None
    trust_remote_code: Bool = False
    params: Annotated[Count, Field(ge=100_000, le=10**12)] | None = None
    depth: Annotated[int, WholeNumber, Field(ge=1, le=512)] | None = None
    d_model: Annotated[int, WholeNumber, Field(ge=32, le=65536)] | None = None
    num_layers: Annotated[int, WholeNumber, Field(ge=1, le=1024)] | None = None
    num_heads: Heads | Auto = "auto"
    num_kv_heads: Heads | Auto = "auto"
    ffn_size: Annotated[int, WholeNumber, Field(ge=32, le=1_000_000)] | Auto = "auto"
    tie_embeddings: Bool | Auto = "auto"
    rope_theta: Annotated[float, Field(gt=0, le=1e12)] = 10_000.0

    @model_validator(mode="after")
    def _check_consistency(self) -> ModelConfig:
        dials = [key for key in ("params", "depth") if getattr(self, key) is not None]
        sizes = ("d_model", "num_layers", "num_heads", "num_kv_heads", "ffn_size")
        sized = [*dials, *(key for key in sizes if getattr(self, key) not in (None, "auto"))]
        if self.base is not None:
            if sized:
                tail = "remove one, or start from a preset for existing models such as lora-20k"
                raise conflict(sized[0], f"sizes a new model, but model.base names an existing one; {tail}", "base")
        elif dials and len(sized) > 1:
            raise conflict(sized[1], f"model.{dials[0]} already sets the size; remove one of the two", dials[0])
        elif self.revision is not None:
            raise conflict("revision", "belongs to model.base, which is not set; set it or remove this")
        elif self.d_model is not None:
            self._check_heads(self.d_model)
        return self

    def _check_heads(self, width: int) -> None:
        heads, kv = self.num_heads, self.num_kv_heads
        if heads == "auto":
            size = default_head_size(width)
            if width % 2 or (width > 64 and width % size):
                near = [str(w) for w in (width // size * size, width // size * size + size) if w]
                message = f"{width} is not a multiple of {size}, the head size; use {' or '.join(near)}"
                raise conflict("d_model", f"{message}, or set model.num_heads too")
            heads = max(1, width // size)
        elif width % heads or (width // heads) % 2:
            fitting = [(abs(n - heads), n) for n in range(1, 1025) if width % n == 0 and (width // n) % 2 == 0]
            use = min(fitting)[1] if fitting else "an even d_model"
            raise conflict(
                "num_heads", f"{heads} heads do not divide d_model {width} into even head sizes; use {use}", "d_model"
            )
        if kv != "auto" and heads % kv:
            use = max(n for n in range(1, kv + 1) if heads % n == 0)
            message = f"{kv} key/value heads do not divide {heads} heads; use {use}"
            raise conflict("num_kv_heads", message, "num_heads", "d_model")


ADAPTER = ("rank", "alpha", "dropout", "targets", "rslora", "dora", "loraplus_lr_ratio", "modules_to_save", "adapter")
QUANTISED = ("bits", "double_quant")


class MethodConfig(Section):
    """What is trained: a new model, all weights of a base, adapters, or adapters on a quantised base."""

    kind: MethodKind = "pretrain"
    rank: Annotated[int, WholeNumber, Field(ge=1, le=4096)] = 16
    alpha: Annotated[float, Field(gt=0, le=65536)] | Auto = "auto"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: Annotated[TextList, Field(min_length=1)] = Field(default=["all-linear"])
    rslora: Bool = False
    dora: Bool = False
    loraplus_lr_ratio: Annotated[float, Field(gt=0, le=1000)] = 1.0
    modules_to_save: TextList = Field(default=[])
    adapter: Text | None = None
    bits: Literal[4, 8] = 4
    double_quant: Bool = True

    @model_validator(mode="after")
    def _check_consistency(self) -> MethodConfig:
        foreign = {"lora": QUANTISED, "qlora": ()}.get(self.kind, (*ADAPTER, *QUANTISED))
        for key in foreign:
            if getattr(self, key) != type(self).model_fields[key].default:
                owner = "qlora" if key in QUANTISED else "lora and qlora"
                raise conflict(
                    key, f"belongs to {owner}, but method.kind is {self.kind}; remove it or set another kind", "kind"
                )
        return self


class TrainConfig(Section):
    """Training: length, batch, optimizer, precision, memory, evaluation, fault tolerance."""

    epochs: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    steps: Steps | None = None
    tokens: PositiveCount | None = None
    global_batch: Rows = 32
    micro_batch: Rows | Auto = "auto"
    optimizer: OptimizerName = "adamw"
    optimizer_in_backward: OnOff = "off"
    master_weights: MasterWeights = "fp32"
    lr: Annotated[float, Field(gt=0, le=10)] | Auto = "auto"
    min_lr: Fraction = 0.1
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup: Annotated[float, Field(ge=0, le=1_000_000_000)] = 0.03
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    clip: Annotated[float, Field(ge=0, le=1_000_000)] = 1.0
    router_aux_loss_coef: Annotated[float, Field(ge=0, le=1000)] | None = None
    neftune_noise_alpha: Annotated[float, Field(ge=0, le=1000)] = 0.0
    seed: Annotated[int, WholeNumber, Field(ge=0, le=2**63 - 1)] = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Precision | Auto = "auto"
    attention: Attention = "auto"
    activation_checkpointing: ActivationCheckpointing = "auto"
    fp8: Literal["off", "backward", "except_last_layer", "on"] = "off"
    compile: Switch = "auto"
    cuda_graphs: Switch = "auto"
    offload: Literal["off", "optimizer", "all"] = "off"
    eval_every: Steps | None = None
    eval_rows: Rows = 64
    samples: Prompts = Field(default=[])
    sample_tokens: Rows = 64
    patience: Steps | None = None
    rehearse: OnOff = "on"
    deterministic: OnOff = "off"
    on_nan: Literal["skip", "rollback", "stop"] = "skip"
    on_spike: Literal["keep", "skip", "rollback"] = "keep"
    max_bad_steps: Annotated[int, WholeNumber, Field(ge=0, le=1_000_000)] = 10

    @model_validator(mode="after")
    def _check_consistency(self) -> TrainConfig:
        lengths = [key for key in ("epochs", "steps", "tokens") if getattr(self, key) is not None]
        if len(lengths) > 1:
            message = f"train.{lengths[0]} already sets the length; keep one of them"
            raise conflict(lengths[1], message, lengths[0])
        micro, batch = self.micro_batch, self.global_batch
        if isinstance(micro, int) and batch % micro:
            best = max(rows for rows in range(1, min(micro, batch) + 1) if batch % rows == 0)
            message = f"{micro} does not divide the global batch of {batch} rows; use {best} or auto"
            raise conflict("micro_batch", message, "global_batch")
        if self.patience is not None and self.eval_every is None:
            message = "needs evaluations; set train.eval_every too, such as 100"
            raise conflict("patience", message, "eval_every")
        if self.offload != "off" and self.optimizer != "adamw":
            message = f"{self.offload} needs adamw, but train.optimizer is {self.optimizer}; change one"
            raise conflict("offload", message, "optimizer")
        self._check_low_memory()
        if self.warmup > 1 and self.warmup != int(self.warmup):
            message = f"{self.warmup} given; allowed: a share of the run up to 1, or a whole number of steps"
            raise conflict("warmup", message)
        return self

    def _check_low_memory(self) -> None:
        """What bf16 weights, and updates in the backward, cannot be combined with."""
        if self.master_weights != "fp32":
            if self.optimizer == "muon":
                message = f"{self.master_weights} needs adamw or adamw_8bit, but train.optimizer is muon; change one"
                raise conflict("master_weights", message, "optimizer")
            if self.precision not in ("auto", "bf16"):
                message = f"{self.master_weights} needs train.precision=bf16, but it is {self.precision}; change one"
                raise conflict("master_weights", message, "precision")
        if self.optimizer_in_backward == "off":
            return
        clashes = {
            "optimizer": (self.optimizer == "muon", "muon updates several matrices at once; use adamw or adamw_8bit"),
            "clip": (self.clip > 0, "clipping needs all gradients at once; set train.clip=0"),
            "micro_batch": (
                self.micro_batch not in ("auto", self.global_batch),
                f"gradients cannot be accumulated; set train.micro_batch={self.global_batch}, the global batch",
            ),
            "precision": (self.precision == "fp16", "fp16 scales gradients by all of them; use bf16"),
            "cuda_graphs": (self.cuda_graphs == "on", "a CUDA graph has no optimizer in it; set train.cuda_graphs=off"),
        }
        for key, (clash, message) in clashes.items():
            if clash:
                raise conflict("optimizer_in_backward", f"on, but train.{key} is {getattr(self, key)}: {message}", key)


class ParallelConfig(Section):
    """Which GPUs and machines, and which engine distributes the run over them."""

    engine: Literal["auto", "single", "ddp", "fsdp", "deepspeed"] = "auto"
    gpus: Gpus = "auto"
    deepspeed: Text | None = None
    nodes: Annotated[int, WholeNumber, Field(ge=1, le=10_000)] = 1
    node: Annotated[int, WholeNumber, Field(ge=0, le=9_999)] | Literal["auto"] = "auto"
    master: Annotated[Text, Description("the first machine's name or address")] | None = None
    port: Annotated[int, WholeNumber, Field(ge=1, le=65535)] = 29500
    restarts: Annotated[int, WholeNumber, Field(ge=0, le=1000)] = 3
    timeout: Annotated[Duration, Field(gt=0)] = Duration(600)

    @model_validator(mode="after")
    def _check_consistency(self) -> ParallelConfig:
        if isinstance(self.gpus, list):
            if not self.gpus:
                raise conflict("gpus", "no GPU named; allowed: numbers such as 0 or 0,1, or all, or auto")
            if len(set(self.gpus)) < len(self.gpus):
                raise conflict("gpus", f"{','.join(map(str, self.gpus))} given; name each GPU once")
            if self.engine == "single" and len(self.gpus) > 1:
                raise conflict(
                    "engine", f"single uses one GPU, but {len(self.gpus)} are named; use ddp or auto", "gpus"
                )
        if self.deepspeed is not None and self.engine not in ("auto", "deepspeed"):
            message = f"a DeepSpeed file is given, but parallel.engine is {self.engine}; remove one"
            raise conflict("deepspeed", message, "engine")
        if self.nodes > 1 and self.master is None:
            raise conflict(
                "nodes", f"{self.nodes} machines need parallel.master=HOST, the first machine's name or address"
            )
        if self.node != "auto" and self.node >= self.nodes:
            raise conflict("node", f"{self.node} given, but {self.nodes} machines are counted from 0", "nodes")
        return self


class SaveConfig(Section):
    """When and where checkpoints are saved."""

    folder: Text | None = None
    every: Duration = Duration(600)
    every_steps: Steps | Literal["epoch"] | None = None
    keep: Annotated[int, WholeNumber, Field(ge=1, le=1000)] = 2
    milestones: Steps | None = None
    mirror: Annotated[Text, Description("a folder such as /root/autodl-fs, or hub:USER/REPOSITORY")] | None = None
    at_risk: Annotated[Duration, Field(gt=0)] = Duration(3600)
    min_free: Size = Size(256 * 2**20)
    resume: Text = "auto"


class LimitsConfig(Section):
    """When the run stops by itself, saved and resumable."""

    time: Annotated[Duration, Field(gt=0)] | None = None
    session: Annotated[Duration, Field(gt=0)] | Literal["auto", "off"] = "auto"
    grace: Annotated[Duration, Field(gt=0)] = Duration(30)
    budget: Money | None = None
    price_per_hour: Price | None = None

    @model_validator(mode="after")
    def _check_consistency(self) -> LimitsConfig:
        budget, price = self.budget, self.price_per_hour
        if budget is None:
            return self
        if price is None:
            return self  # the catalogue may have a price for this machine
        if price.amount == 0:
            raise conflict("price_per_hour", "0 given; with a budget the price must be above 0", "budget")
        if budget.currency and price.currency and budget.currency != price.currency:
            message = f"in {budget.currency}, but the price per hour in {price.currency}; give both in one currency"
            raise conflict("budget", message, "price_per_hour")
        return self


class LogConfig(Section):
    """Logging and trackers."""

    every_steps: Steps = 10
    tensorboard: Switch = "auto"
    trackers: Annotated[list[Tracker], CommaList] = Field(default=[])
    project: Name = "sojourn"


class AdvancedConfig(Section):
    """Switches for measurements and debugging. The defaults suit every run."""

    async_step: OnOff = "on"
    fused_forwards: Switch = "auto"
    chunked_loss: Switch = "auto"
    hopper_kernels: Switch = "auto"
    cpu_kernels: Switch = "auto"
    compile_cache: Text | None = None
    split_digits: Bool = True
    reshard_after_forward: Bool = True


class RunConfig(Section):
    """All settings of a run."""

    name: Name | None = None
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    save: SaveConfig = SaveConfig()
    limits: LimitsConfig = LimitsConfig()
    log: LogConfig = LogConfig()
    advanced: AdvancedConfig = AdvancedConfig()

    @model_validator(mode="after")
    def _check_consistency(self) -> RunConfig:
        kind, device = self.method.kind, self.train.device
        if self.model.base is None:
            if kind != "pretrain":
                example = "set model.base, such as Qwen/Qwen2.5-7B-Instruct"
                raise conflict(
                    "model.base", f"not set, but method.kind {kind} trains an existing model; {example}", "method.kind"
                )
            sized_by_dial = self.model.params is not None or self.model.depth is not None
            for key in () if sized_by_dial else ("d_model", "num_layers"):
                if getattr(self.model, key) is None:
                    tail = "set it, or model.depth, or model.base, or start from a preset (extends: small)"
                    raise conflict(f"model.{key}", f"not set, but a new model needs it; {tail}")
        self._check_low_memory()
        if self.train.precision == "fp16" and device == "cpu":
            raise conflict(
                "train.precision", "fp16 needs a GPU, but train.device is cpu; use fp32 or auto", "train.device"
            )
        if device == "mps" and kind == "qlora":
            raise conflict("train.device", "mps cannot run qlora; set method.kind to lora, or use cuda", "method.kind")
        return self

    def _check_low_memory(self) -> None:
        train, kind, engine = self.train, self.method.kind, self.parallel.engine
        masters = train.master_weights
        if masters != "fp32" and kind != "full":
            message = f"{masters} is for method.kind=full, but it is {kind}; remove it or set another kind"
            raise conflict("train.master_weights", message, "method.kind")
        sharded = engine in ("fsdp", "deepspeed") or self.parallel.deepspeed is not None or train.offload == "all"
        if masters != "fp32" and sharded:
            message = f"{masters} needs whole weights on a GPU; use parallel.engine=single or ddp, and not offload=all"
            raise conflict("train.master_weights", message, "parallel.engine", "train.offload")
        if train.optimizer_in_backward == "on" and (sharded or engine == "ddp" or self.parallel.nodes > 1):
            message = "on is for one GPU; use parallel.engine=single, or set it off"
            raise conflict("train.optimizer_in_backward", message, "parallel.engine", "parallel.nodes")
