"""RunConfig: everything a run is. The field types say what is allowed; `explain.py` turns a breach into one line."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from sojourn.config.quantities import Count, Duration, Money, Size

Auto = Literal["auto"]
OptimizerName = Literal["adamw", "muon"]
Precision = Literal["bf16", "fp16", "fp32"]
MethodKind = Literal["pretrain", "full", "lora", "qlora"]


def _whole(value: Any) -> Any:
    """`1e3` and `8.0` are whole numbers to a person."""
    return int(value) if isinstance(value, float) and abs(value) < 1e15 and value == int(value) else value


def _yes(value: Any) -> Any:
    words = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


def _switch(value: Any) -> Any:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _listed(value: Any) -> Any:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


def _sources(value: Any) -> Any:
    value = [value] if isinstance(value, (str, dict)) else value
    return [{"path": v} if isinstance(v, str) else v for v in value] if isinstance(value, list) else value


Bool = Annotated[bool, BeforeValidator(_yes)]
Rows = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1_000_000)]
Steps = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1_000_000_000)]
Share = Annotated[float, Field(ge=0, le=1)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[\w][\w.\-]*$")]
Text = Annotated[str, Field(min_length=1, max_length=4096)]


def clash(key: str, message: str) -> PydanticCustomError:
    """Two settings that cannot both hold; `key` (relative to the section) is the one to change."""
    return PydanticCustomError("clash", "{message}", {"key": key, "message": message})


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """Either `base`, an existing model, or the size of a new one."""

    base: Text | None = None
    revision: Text | None = None
    trust_remote_code: Bool = False
    d_model: Annotated[int, BeforeValidator(_whole), Field(ge=32, le=65536)] | None = None
    num_layers: Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1024)] | None = None
    num_heads: Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1024)] | Auto = "auto"
    num_kv_heads: Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1024)] | Auto = "auto"
    ffn_size: Annotated[int, BeforeValidator(_whole), Field(ge=32, le=1_000_000)] | Auto = "auto"
    tie_embeddings: Bool | Auto = "auto"
    rope_theta: Annotated[float, Field(gt=0, le=1e12)] = 10_000.0

    @model_validator(mode="after")
    def _fits_together(self) -> ModelConfig:
        sizes = ("d_model", "num_layers", "num_heads", "num_kv_heads", "ffn_size")
        sized = [key for key in sizes if getattr(self, key) not in (None, "auto")]
        if self.base is not None:
            if sized:
                raise clash(sized[0], f"{sized[0]} sizes a new model, but model.base names an existing one; remove one")
            return self
        if self.revision is not None:
            raise clash("revision", "a revision belongs to model.base, which is not set")
        if self.d_model is None:
            return self
        heads = self.num_heads
        if heads == "auto" and self.d_model % 64 and self.d_model > 64:
            raise clash("d_model", f"{self.d_model} is not a multiple of 64 (the head size); "
                        f"use {self.d_model // 64 * 64 or 64} or {self.d_model // 64 * 64 + 64}, or set num_heads")
        if heads != "auto":
            if self.d_model % heads:
                near = [h for h in range(1, 1025) if self.d_model % h == 0 and (self.d_model // h) % 2 == 0]
                best = min(near, key=lambda h: abs(h - heads), default=1)
                raise clash("num_heads", f"{heads} heads do not divide d_model {self.d_model}; use {best}")
            if (self.d_model // heads) % 2:
                raise clash("num_heads", f"d_model {self.d_model} over {heads} heads gives an odd head size; "
                            "rotary positions need an even one")
            kv = self.num_kv_heads
            if kv != "auto" and heads % kv:
                raise clash("num_kv_heads", f"{kv} key/value heads do not divide {heads} heads")
        return self


_ADAPTER_ONLY = ("rank", "alpha", "dropout", "targets", "rslora", "dora", "modules_to_save")


class MethodConfig(Section):
    """How the weights change: all of them from noise, all of them, adapters, adapters on a quantised base."""

    kind: MethodKind = "pretrain"
    rank: Annotated[int, BeforeValidator(_whole), Field(ge=1, le=4096)] = 16
    alpha: Annotated[float, Field(gt=0, le=65536)] | Auto = "auto"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: Annotated[list[Text], BeforeValidator(_listed), Field(min_length=1)] = ["all-linear"]
    rslora: Bool = False
    dora: Bool = False
    modules_to_save: Annotated[list[Text], BeforeValidator(_listed)] = []
    bits: Literal[4, 8] = 4
    double_quant: Bool = True

    @model_validator(mode="after")
    def _fits_together(self) -> MethodConfig:
        changed = {key for key, field in type(self).model_fields.items() if getattr(self, key) != field.default}
        if self.kind in ("pretrain", "full"):
            for key in _ADAPTER_ONLY:
                if key in changed:
                    raise clash(key, f"{key} belongs to lora and qlora, but method.kind is {self.kind}")
        if self.kind != "qlora":
            for key in ("bits", "double_quant"):
                if key in changed:
                    raise clash(key, f"{key} belongs to qlora, but method.kind is {self.kind}")
        return self


class Source(Section):
    """One place to read from: a file, or `builtin:NAME`."""

    path: Text
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    take: Count | None = None
    size: Size | None = None


class DataConfig(Section):
    """What the model reads."""

    sources: Annotated[list[Source], BeforeValidator(_sources)] = []
    eval_sources: Annotated[list[Source], BeforeValidator(_sources)] = []
    eval_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.01
    take: Count | None = None
    tokenizer: Text = "auto"
    vocab_size: Count = Count(8192)
    template: Literal["auto", "chatml"] = "auto"
    train_on: Literal["assistant", "all"] = "assistant"
    max_length: Annotated[int, BeforeValidator(_whole), Field(ge=8, le=10_000_000)] = 512

    @model_validator(mode="after")
    def _fits_together(self) -> DataConfig:
        if not 300 <= self.vocab_size <= 1_000_000:
            raise clash("vocab_size", f"{self.vocab_size} given; allowed: 300 to 1M")
        if self.take == 0:
            raise clash("take", "0 given; allowed: a count of at least 1")
        return self


class TrainConfig(Section):
    """How long, how large a step, and with what numbers."""

    epochs: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    steps: Steps | None = None
    tokens: Count | None = None
    global_batch: Rows = 32
    micro_batch: Rows | Auto = "auto"
    optimizer: OptimizerName = "adamw"
    lr: Annotated[float, Field(gt=0, le=10)] | Auto = "auto"
    min_lr: Share = 0.1
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup: Annotated[float, Field(ge=0, le=1_000_000_000)] = 0.03
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    clip: Annotated[float, Field(ge=0, le=1_000_000)] = 1.0
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Precision | Auto = "auto"
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    checkpointing: Annotated[Literal["auto", "off", "full"], BeforeValidator(lambda v: "off" if v is False else v)] = "auto"
    compile: Switch = "auto"
    eval_every: Steps | None = None
    eval_rows: Rows = 64

    @model_validator(mode="after")
    def _fits_together(self) -> TrainConfig:
        given = [key for key in ("epochs", "steps", "tokens") if getattr(self, key) is not None]
        if len(given) > 1:
            raise clash(given[1], f"both {given[0]} and {given[1]} say how long to train; keep one (set the other to null)")
        if self.tokens == 0:
            raise clash("tokens", "0 given; allowed: a count of at least 1")
        if isinstance(self.micro_batch, int) and self.global_batch % self.micro_batch:
            raise clash("micro_batch", f"{self.micro_batch} does not divide the global batch of {self.global_batch} rows")
        if self.warmup > 1 and self.warmup != int(self.warmup):
            raise clash("warmup", f"{self.warmup} given; allowed: a share of the run up to 1, or a whole number of steps")
        return self


class ParallelConfig(Section):
    """Which GPUs, and which engine spreads the run over them."""

    engine: Literal["auto", "single", "ddp", "fsdp", "deepspeed"] = "auto"
    gpus: Annotated[list[Annotated[int, Field(ge=0, le=1023)]], BeforeValidator(_listed)] | Literal["auto", "all"] = "auto"
    deepspeed: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _gpu_words(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("gpus"), str) and data["gpus"] not in ("auto", "all"):
            parts = [part.strip() for part in data["gpus"].split(",")]
            return {**data, "gpus": [int(p) if p.isascii() and p.isdigit() and len(p) < 6 else p for p in parts]}
        return data

    @model_validator(mode="after")
    def _fits_together(self) -> ParallelConfig:
        if isinstance(self.gpus, list):
            if not self.gpus:
                raise clash("gpus", "no GPU named; allowed: numbers such as 0,1, or all, or auto")
            if len(set(self.gpus)) < len(self.gpus):
                raise clash("gpus", f"{','.join(map(str, self.gpus))} names a GPU twice")
            if self.engine == "single" and len(self.gpus) > 1:
                raise clash("engine", "single uses one GPU, but several are named; use ddp or auto")
        if self.deepspeed is not None and self.engine not in ("auto", "deepspeed"):
            raise clash("deepspeed", f"a DeepSpeed file is given, but parallel.engine is {self.engine}")
        return self


class SaveConfig(Section):
    """When and where the run is kept safe."""

    folder: Text | None = None
    every: Duration = Duration(600)
    every_steps: Steps | Literal["epoch"] | None = None
    keep: Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1000)] = 2
    min_free: Size = Size(256 * 2**20)
    resume: Text = "auto"


class LimitsConfig(Section):
    """Where the run must stop by itself, saved and resumable."""

    time: Duration | None = None
    budget: Money | None = None
    price_per_hour: Money | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> LimitsConfig:
        if self.budget is None:
            return self
        if self.price_per_hour is None:
            raise clash("budget", "a budget needs the price: add limits.price_per_hour, such as 2.19 CNY")
        if self.price_per_hour.amount == 0:
            raise clash("price_per_hour", "0 given; with a budget the price must be above 0")
        if self.budget.currency and self.price_per_hour.currency and self.budget.currency != self.price_per_hour.currency:
            raise clash("budget", f"the budget is in {self.budget.currency} but the price per hour "
                        f"in {self.price_per_hour.currency}; give both in one currency")
        return self


class LogConfig(Section):
    """What is written while training."""

    every_steps: Steps = 10
    tensorboard: Switch = "auto"


class RunConfig(Section):
    """A run, whole."""

    name: Name | None = None
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    save: SaveConfig = SaveConfig()
    limits: LimitsConfig = LimitsConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        if self.model.base is None:
            if self.method.kind != "pretrain":
                raise clash("model.base", f"method.kind {self.method.kind} trains an existing model; "
                            "set model.base, such as Qwen/Qwen2.5-7B-Instruct")
            missing = [key for key in ("d_model", "num_layers") if getattr(self.model, key) is None]
            if missing:
                raise clash(f"model.{missing[0]}", f"a new model needs model.{missing[0]} (or set model.base); "
                            "start from a preset: extends: small")
        if self.train.precision == "fp16" and self.train.device == "cpu":
            raise clash("train.precision", "fp16 needs a GPU, but train.device is cpu; use fp32 or auto")
        if self.train.device == "cpu" and isinstance(self.parallel.gpus, list):
            raise clash("train.device", "cpu is asked for, but parallel.gpus names GPUs; remove one")
        if self.method.kind == "qlora" and self.train.device in ("mps",):
            raise clash("train.device", "qlora needs CUDA or a CPU with bitsandbytes; use lora on mps")
        return self
