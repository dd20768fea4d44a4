"""Every method against a reference written with plain transformers, peft and torch, on a CPU in 32 bits."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from budget import shared_cost
from conftest import called
from fork_server import needs_fork
from shared import FUSED_CHANGES, make_base
from sojourn.catalog.fused_families import FUSED_FAMILIES
from sojourn.config.load import load_run
from sojourn.data.artefact import Artefact, read_batch
from sojourn.data.order import step_rows
from sojourn.errors import Stopped, UserError
from sojourn.run.folder import RunFolder
from sojourn.run.home import run_folder
from sojourn.train.loop import train

STEPS, BATCH = 4, 8


@pytest.fixture
def words(chats, base):
    return [
        f"model.base={base}", f"data.sources={chats}", "data.max_length=64", f"train.global_batch={BATCH}",
        f"train.steps={STEPS}", "train.micro_batch=4", "train.device=cpu", "train.precision=fp32", "train.lr=1e-3",
        "log.every_steps=1", "log.tensorboard=off", "name=t",
    ]  # fmt: skip


def _train(words: list[str]) -> RunFolder:
    config = load_run(words).config
    run = run_folder(config.name)
    train(config, run)
    return run


def _losses(run: RunFolder) -> list[float]:
    return [line["loss"] for line in run.read_metrics() if line["kind"] == "train"]


def _artefact(run: RunFolder) -> Artefact:
    return Artefact(Path(json.loads(run.environment.read_text())["data"]))


def _documents(artefact: Artefact, step: int):
    """The documents of a global step one by one, as plain transformers is given them: ids and labels."""
    batch = read_batch(artefact.train, step_rows(step, len(artefact.train), BATCH, 0), 64, artefact.pad_id)
    for row in range(BATCH):
        for number in range(batch.documents[row].max() + 1):
            here = batch.documents[row] == number
            ids, trained = batch.ids[row][here], batch.labels[row][here]
            labels = np.full(len(ids), -100)
            labels[1:] = trained[:-1]
            yield torch.tensor(ids[None]), torch.tensor(labels[None])


def _reference(model, run: RunFolder, steps: int = STEPS) -> list[float]:
    """Each document by itself through the model's own forward, transformers' own loss, torch's own AdamW."""
    artefact, config = _artefact(run), load_run([str(run.config)]).config
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    words = ("embed", "lm_head", "wte", "wpe")
    bare = {n for n, p in named.items() if p.ndim < 2 or any(word in n for word in words)}
    groups = [
        {"params": [p for n, p in named.items() if n not in bare], "weight_decay": config.train.weight_decay},
        {"params": [p for n, p in named.items() if n in bare], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    rates = [line["lr"] for line in run.read_metrics() if line["kind"] == "train"]
    losses = []
    model.train()
    for step in range(steps):
        documents = list(_documents(artefact, step))
        targets = sum(int((labels >= 0).sum()) for _, labels in documents)
        total = 0.0
        for ids, labels in documents:
            loss = model(input_ids=ids, labels=labels, num_items_in_batch=targets).loss
            loss.backward()
            total += float(loss.detach())
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        torch.nn.utils.clip_grad_norm_(named.values(), config.train.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _plain(base: Path):
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def _with_peft(model, **changed):
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changed}
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(**settings))


@pytest.mark.parametrize("kind", ["pretrain", "full"])
def test_training_all_weights_equals_plain_transformers(words, base, kind):
    run = _train([*words, f"method.kind={kind}"])
    assert _losses(run) == pytest.approx(_reference(_plain(base), run), rel=1e-5)


def test_a_new_model_equals_plain_transformers(chats, home):
    words = [
        "smoke", f"data.sources={chats}", "model.d_model=64", "data.vocab_size=400", "data.max_length=64",
        f"train.global_batch={BATCH}", f"train.steps={STEPS}", "train.device=cpu", "train.precision=fp32",
        "log.every_steps=1", "log.tensorboard=off", "name=t",
    ]  # fmt: skip
    run = _train([*words, "train.steps=1", "name=one", "train.lr=1e-30", "train.weight_decay=0"])
    start = _plain(run.final)
    run = _train([*words, "train.lr=1e-3"])
    assert _losses(run) == pytest.approx(_reference(start, run), rel=1e-5)


_LORA = ["method.kind=lora", "method.rank=4"]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param([], {}, id="lora"),
        pytest.param(
            ["method.rslora=true", "method.targets=[q_proj,v_proj]", "method.alpha=3"],
            {"use_rslora": True, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 3},
            id="rslora, targets",
        ),
        pytest.param(
            ["method.dora=true", "method.modules_to_save=[lm_head]"],
            {"use_dora": True, "modules_to_save": ["lm_head"]},
            id="dora, modules_to_save",
        ),
        *(
            pytest.param([f"method.{ours}"], theirs, id=ours, marks=pytest.mark.slow)
            for ours, theirs in (
                ("rslora=true", {"use_rslora": True}),
                ("dora=true", {"use_dora": True}),
                ("targets=[q_proj,v_proj]", {"target_modules": ["q_proj", "v_proj"]}),
                ("modules_to_save=[lm_head]", {"modules_to_save": ["lm_head"]}),
            )
        ),
    ],
)
def test_lora_equals_plain_peft(words, base, ours, theirs):
    run = _train([*words, *_LORA, *ours])
    assert _losses(run) == pytest.approx(_reference(_with_peft(_plain(base), **theirs), run), rel=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_qlora_step_equals_pefts_own(words, base, bits):
    run = _train([*words, "method.kind=qlora", f"method.bits={bits}", "method.rank=4", "train.steps=3"])
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    how = BitsAndBytesConfig(load_in_4bit=True, **nf4) if bits == 4 else BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=how)
    reference = _reference(_with_peft(model.requires_grad_(False)), run, steps=3)
    # 8-bit activations are rounded together, so that packing itself changes them a little.
    assert _losses(run) == pytest.approx(reference, rel=1e-5 if bits == 4 else 1e-3)


@pytest.fixture(scope="module")
def baselines():
    """Losses by method, to compare with; the first test that needs them trains."""
    return {}


_CHANGES = ("train.micro_batch=8", "train.micro_batch=1", "advanced.chunked_loss=off", "advanced.fused_forwards=off",
            "train.attention=math", "train.activation_checkpointing=full", "train.activation_checkpointing=selective",
            "train.offload=optimizer")  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        pytest.param(kind, change, marks=pytest.mark.slow if number < 6 and (number + (kind == "lora")) % 2 else [])
        for number, change in enumerate(_CHANGES)
        for kind in ("full", "lora")
    ],
)
def test_how_it_is_computed_changes_nothing_but_rounding(words, baselines, kind, change):
    short = [*words, f"method.kind={kind}", "train.steps=3"]
    if kind not in baselines:
        with shared_cost():
            baselines[kind] = _losses(_train([*short, "name=one"]))
    assert baselines[kind] == pytest.approx(_losses(_train([*short, "name=other", change])), rel=1e-5)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(["method.kind=pretrain"], id="pretrain"),
        pytest.param([*_LORA, "method.modules_to_save=[lm_head]"], id="modules_to_save"),
        pytest.param(["method.kind=qlora", "method.rank=4"], id="qlora"),
        pytest.param(["method.kind=full"], id="full", marks=pytest.mark.slow),
        pytest.param(_LORA, id="lora", marks=pytest.mark.slow),
        pytest.param([*_LORA, "method.dora=true"], id="dora", marks=pytest.mark.slow),
    ],
)
def test_bf16_trains_as_fp32_does(words, how):
    """Layers compute in bf16; master weights are fp32, also in the checkpoint."""
    short = [*words, *how, "train.steps=3", "train.global_batch=2", "train.micro_batch=1"]
    wide, narrow = _train([*short, "name=wide"]), _train([*short, "name=narrow", "train.precision=bf16"])
    assert _losses(narrow) == pytest.approx(_losses(wide), rel=0.02) and _losses(narrow) != _losses(wide)
    from safetensors.torch import load_file

    [newest] = sorted(narrow.checkpoints.glob("step-*"))[-1:]
    assert all(tensor.dtype == torch.float32 for tensor in load_file(newest / "model.safetensors").values())


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++, which is not installed")
@pytest.mark.parametrize(
    ("kernels", "checkpointing"),
    [("one operation", "off"), pytest.param("all", "selective", marks=pytest.mark.slow)],
    ids=["one operation", "all"],
)
def test_compiled_layers_share_one_graph_change_nothing_but_rounding_and_are_cached(
    words, chats, home, monkeypatch, kernels, checkpointing
):
    """However many layers: one graph for the first, whose input needs no gradient, and one for all others. A run that
    finds those of another compiles nothing. g++ needs seconds for each kernel: of the graphs' operations, only
    `rsqrt` becomes one, the others call torch's own."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    deep = make_base(chats, home, "qwen2", num_hidden_layers=4)
    short = [
        *words, f"model.base={deep}", *_LORA, "method.targets=[v_proj]", "train.steps=3", "data.eval_fraction=0",
        f"train.activation_checkpointing={checkpointing}",
    ]  # fmt: skip

    def compiled(*more):
        torch._dynamo.reset()
        graphs, before = counters["stats"]["unique_graphs"], dict(counters["inductor"])
        run = _train([*short, "train.compile=on", *more])
        assert counters["stats"]["unique_graphs"] - graphs == 2
        made = (counters["inductor"][key] - before.get(key, 0) for key in ("fxgraph_cache_miss", "fxgraph_cache_hit"))
        return run, *made

    # Vector instructions are found by compiling and loading a library for each kind, in a Python of its own.
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    if kernels != "all":
        only = torch.ops.aten.rsqrt.default
        monkeypatch.setattr("torch._inductor.graph.should_fallback_by_default", lambda node: node.target is not only)
        monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    plain = _train([*short, "name=plain"])
    run, missed, _ = compiled("name=first")
    assert missed and any(run.compile_cache.rglob("*.so"))
    shutil.copytree(run.compile_cache, home / "elsewhere")
    again, missed, found = compiled("name=second", f"advanced.compile_cache={home / 'elsewhere'}")
    assert found and not missed and "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert _losses(run) == _losses(again) == pytest.approx(_losses(plain), rel=1e-5)


def test_packed_rows_give_the_losses_of_unpacked_ones(words):
    """The same documents a step, packed or one to a row: all of them in every step."""
    few = ["data.take=24", "data.eval_fraction=0", "method.kind=full", "train.steps=3", "train.micro_batch=1"]
    losses = {}
    for packing in ("packed", "off"):
        name = f"name={packing}"
        config = load_run([*words, *few, name, f"data.packing={packing}", "train.global_batch=1"]).config
        from sojourn.data.prepare import prepare_run
        from sojourn.run.home import prepared_folder

        rows = len(prepare_run(config, prepared_folder()).train)
        run = _train([*words, *few, name, f"data.packing={packing}", f"train.global_batch={rows}"])
        losses[packing] = _losses(run)
    assert losses["packed"] == pytest.approx(losses["off"], rel=1e-5)


def test_our_adapter_opens_in_plain_peft_with_the_same_logits(words, base):
    run = _train([*words, *_LORA])
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        p.name for p in run.final.iterdir()
    }
    theirs = PeftModel.from_pretrained(_plain(base), run.final).eval()
    from sojourn.infer.load import load_model

    ours = load_model("t", "cpu").model
    ids = torch.randint(0, 300, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)
        assert (ours(ids).logits - _plain(base)(ids).logits).abs().max() > 1e-3
    said = called("generate", "t", "--prompt", "What colour is the cat of house 3?", "--max-tokens", "8")
    assert said.returncode == 0, said.stderr


def test_an_adapter_written_by_peft_is_loaded_and_trained_further(words, base, home):
    first = _train([*words, *_LORA, "train.steps=1", "name=first"])
    theirs = _with_peft(_plain(base))
    for p in theirs.parameters():
        p.data = p.data + 0.01 * torch.randn_like(p) if p.requires_grad else p.data
    theirs.save_pretrained(home / "theirs")
    again = _train([*words, "method.kind=lora", f"method.adapter={home / 'theirs'}", "name=again"])
    assert _losses(again) == pytest.approx(_reference(theirs, again), rel=1e-5)
    assert _losses(again)[0] != pytest.approx(_losses(first)[0], rel=1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        ["qlora"], ["lora", "method.dropout=0.3"], ["full"], pytest.param(["lora"], marks=pytest.mark.slow),
        ["qlora", "method.targets=[q_proj,experts]"],
    ],
    ids=str,
)  # fmt: skip
def test_a_stopped_run_resumes_exactly(words, chats, home, kind, monkeypatch):
    if "experts" in kind[-1]:
        words = [*words, f"model.base={make_base(chats, home, 'qwen3_moe', **MIXTURES['qwen3_moe'])}"]
    chosen = [*words, f"method.kind={kind[0]}", *kind[1:], "save.every_steps=3", "train.steps=6"]
    whole = _train([*chosen, "name=whole"])
    from sojourn.train.faults.guard import Guard

    steps = iter(range(100))
    with monkeypatch.context() as patch:
        patch.setattr(Guard, "should_stop", lambda self: "a test" if next(steps) == 4 else None)
        with pytest.raises(Stopped):
            _train([*chosen, "name=cut"])
    cut = _train([*chosen, "name=cut"])
    assert _losses(cut) == _losses(whole)
    name = "model.safetensors" if kind[0] == "full" else "adapter_model.safetensors"
    one, other = load_file(whole.final / name), load_file(cut.final / name)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    checkpoint = load_file(next(cut.checkpoints.glob("step-*")) / "model.safetensors")
    assert all("lora" in key for key in checkpoint) == (kind[0] != "full")


OTHER_FAMILIES = {
    "gemma2": {"sliding_window": 7, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0},
    "gpt2": {"n_positions": 128, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "cohere": {"logit_scale": 0.5},
    "glm": {},
    "gemma": {},
    "phi": {},
    "granite": {"logits_scaling": 4.0},
}
# In `make test`: each fused forward, and each thing that a family computes in a way of its own: sliding windows, logit
# soft-capping and scaling, linear layers that are no nn.Linear (gpt2's, which matters to adapters).
IN_SHORT = {("llama", "lora"), ("qwen2", "lora"), ("qwen3", "full"), ("mistral", "lora"),
            ("gemma2", "full"), ("gpt2", "lora"), ("cohere", "full"), ("gemma3_text", "full"),
            ("phi3", "full"), ("glm4", "lora"), ("smollm3", "full")}  # fmt: skip


def _is_in_short(family, kind):
    """A family that just got fused forwards is, too."""
    is_new = family in FUSED_FAMILIES and family not in {name for name, _ in IN_SHORT}
    return (family, kind) in IN_SHORT or (is_new and kind == "full")


@pytest.mark.parametrize(
    ("family", "changed", "kind"),
    [
        pytest.param(family, changed, kind, marks=[] if _is_in_short(family, kind) else pytest.mark.slow)
        for family, changed in [*((f, FUSED_CHANGES.get(f, {})) for f in FUSED_FAMILIES), *OTHER_FAMILIES.items()]
        for kind in ("full", "lora")
    ],
)
def test_every_family_trains_as_plain_transformers_does(words, chats, home, family, changed, kind):
    base = make_base(chats, home, family, **changed)
    method = _LORA if kind == "lora" else ["method.kind=full"]
    run = _train([*words, f"model.base={base}", *method, "train.steps=2"])
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager" if family == "gemma2" else "sdpa"
    )
    reference = _reference(model if kind == "full" else _with_peft(model), run, steps=2)
    assert _losses(run) == pytest.approx(reference, rel=1e-5)


ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTURES = {  # of experts
    "qwen3_moe": {"num_experts": 8, **ROUTED},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "glm4_moe": {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, **ROUTED},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3_moe", "train.activation_checkpointing=full"),
        ("glm4_moe", "train.micro_batch=8"),
        ("gpt_oss", "data.packing=off"),
        pytest.param("mixtral", "train.activation_checkpointing=selective", marks=pytest.mark.slow),
    ],
)
def test_adapters_on_experts_train_as_plain_pefts_do(words, chats, home, family, change):
    base = make_base(chats, home, family, **MIXTURES[family])
    run = _train([*words, f"model.base={base}", *_LORA, "method.targets=[q_proj,experts]", "train.steps=3", change])
    targets = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "experts.gate_up_proj"]}
    reference = _reference(_with_peft(_plain(base), **targets), run, steps=3)
    assert _losses(run) == pytest.approx(reference, rel=1e-5)
    if family != "qwen3_moe":
        return
    [message] = [line for line in called("export", "t", "--to", "hf").stderr.splitlines() if line]
    assert "trained with target_parameters, which is not merged here" in message


@pytest.mark.slow
def test_adapters_beside_experts_are_merged_by_an_export(words, chats, home):
    base = make_base(chats, home, "qwen3_moe", **MIXTURES["qwen3_moe"])
    run = _train([*words, f"model.base={base}", "method.kind=qlora", "method.rank=4", "train.steps=2"])
    assert called("export", "t", "--to", "hf").returncode == 0
    merged, theirs = _plain(home / "exports" / "t-hf"), PeftModel.from_pretrained(_plain(base), run.final).eval()
    ids = torch.randint(0, 300, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, theirs(ids).logits, rtol=1e-3, atol=1e-4)


def test_a_model_that_cannot_keep_documents_apart_is_refused_but_trains_unpacked(words, chats, home):
    base = make_base(chats, home, "bloom")
    bloom = [*words, f"model.base={base}", "method.kind=full", "train.steps=3"]
    with pytest.raises(UserError, match=r"cannot keep packed documents apart; set data.packing=off"):
        _train(bloom)
    run = _train([*bloom, "data.packing=off", "name=apart"])
    assert _losses(run) == pytest.approx(_reference(_plain(base), run, steps=3), rel=1e-5)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            ["method.kind=lora", "method.targets=[q_prj]"],
            r"method.targets: this model has no “q_prj”; did you mean q_proj",
        ),
        (["method.kind=lora", "method.targets=[self_attn]"], "method.targets: this model has no “self_attn”"),
        (["method.kind=lora", "method.modules_to_save=[head]"], "method.modules_to_save: this model has no “head”"),
        (["method.kind=lora", "method.adapter=nowhere"], "method.adapter: nowhere: no adapter there"),
        (["method.kind=full", "data.max_length=4096"], "this model holds 128 tokens; use data.max_length=128"),
        (["method.kind=full", "model.base=./nowhere"], "model.base: ./nowhere: no such folder or file"),
        (["method.kind=full", "model.base=."], "no model there"),
        (
            ["method.kind=lora", "train.attention=flex"],
            "train.attention: flex needs a CUDA GPU, but this run is on cpu; use sdpa",
        ),
        (["method.kind=lora", "train.attention=varlen"], "train.attention: varlen needs a CUDA GPU"),
        (
            ["method.kind=lora", "train.attention=flash_attention_2"],
            "needs a CUDA GPU, but this run is on cpu; use sdpa",
        ),
    ],
)
def test_unsupported_settings_are_refused_in_one_line(words, extra, message):
    with pytest.raises(UserError, match=message) as told:
        _train([*words, *extra])
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_tied_layers_cannot_have_an_adapter(words, chats, home, target):
    tied = make_base(chats, home, "qwen2", tie_word_embeddings=True)
    with pytest.raises(UserError, match=rf"use method\.modules_to_save=\[{target}\]"):
        _train([*words, f"model.base={tied}", *_LORA, f"method.targets=[{target},q_proj]"])


def test_a_base_with_missing_weights_is_refused(words, base):
    from safetensors.torch import save_file

    state = load_file(base / "model.safetensors")
    del state["model.layers.1.mlp.down_proj.weight"]
    save_file(state, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 of the weights .* such as model\.layers\.1\.mlp\.down_proj\.weight"):
        _train([*words, "method.kind=full"])
    (base / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(UserError, match=r"model\.base") as told:
        _train([*words, "method.kind=full"])
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("sampling", [{"temperature": 0.6, "top_p": 0.9}, {"do_sample": False, "temperature": 0.6}])
def test_a_base_with_odd_sampling_settings_still_ends_in_a_model(words, base, sampling):
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, **sampling}))
    run = _train([*words, "method.kind=full", "train.steps=2"])
    kept = json.loads((run.final / "generation_config.json").read_text())
    assert kept["temperature"] == 0.6 and 7 in kept["eos_token_id"] and len(kept["eos_token_id"]) > 1


def test_an_adapter_whose_targets_are_a_pattern_stays_one(words, base, home):
    _with_peft(_plain(base), target_modules=r".*\.(q_proj|v_proj)").save_pretrained(home / "pattern")
    run = _train([*words, "method.kind=lora", f"method.adapter={home / 'pattern'}", "train.steps=2"])
    assert json.loads((run.final / "adapter_config.json").read_text())["target_modules"] == r".*\.(q_proj|v_proj)"
    assert PeftModel.from_pretrained(_plain(base), run.final)


def test_full_fine_tuning_of_a_quantized_base_is_refused(words, base, home):
    how = BitsAndBytesConfig(load_in_4bit=True)
    AutoModelForCausalLM.from_pretrained(base, quantization_config=how).save_pretrained(home / "quantised")
    for file in base.glob("tokenizer*"):
        shutil.copy(file, home / "quantised")
    with pytest.raises(UserError, match=r"those of model\.base are quantised; use qlora"):
        _train([*words, f"model.base={home / 'quantised'}", "method.kind=full"])


@needs_fork
def test_a_name_on_a_hub_that_cannot_be_reached_says_what_to_do_at_once(chats, home, fork_server):
    env = {**{k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}, "HF_ENDPOINT": "http://127.0.0.1:9"}
    as_if_new = (  # what the library reads of the environment when it is imported
        "import huggingface_hub.constants as read\nread.HF_HUB_OFFLINE, read.ENDPOINT = False, 'http://127.0.0.1:9'\n"
        f"read.HF_HUB_CACHE = {str(home / 'hf')!r}"
    )
    said = fork_server.run("train", "lora-20k", "--train_file", str(chats), env=env, preamble=as_if_new)
    assert said.returncode == 2 and len(said.stderr.splitlines()) == 1, said.stderr
    assert "model.base: Qwen/Qwen2.5-1.5B-Instruct is not in the local cache" in said.stderr


def test_an_adapter_named_as_a_base_says_what_to_set(words):
    run = _train([*words, *_LORA, "train.steps=1"])
    with pytest.raises(UserError, match=r"is an adapter; set model.base to its base model, and method.adapter="):
        _train([*words, *_LORA, f"model.base={run.final}", "name=u"])


def test_remote_code_runs_only_when_it_is_allowed(words, base, home):
    (base / "config.json").write_text(json.dumps({
        **json.loads((base / "config.json").read_text()), "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }))  # fmt: skip
    (base / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(home / 'ran')!r}).touch()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    with pytest.raises(UserError, match=r"runs its own Python code; .* model.trust_remote_code=true"):
        _train([*words, "method.kind=full"])
    assert not (home / "ran").exists()
    run = _train([*words, "method.kind=full", "model.trust_remote_code=true", "train.steps=2"])
    assert (home / "ran").exists() and len(_losses(run)) == 2


def test_peft_imports_no_bitsandbytes_for_a_base_without_quantized_layers(monkeypatch):
    from importlib.util import find_spec

    from peft.import_utils import is_bnb_available

    from sojourn.model import adapter

    installed = find_spec("bitsandbytes") is not None
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    is_bnb_available.cache_clear()
    with adapter._without_bitsandbytes():
        assert not is_bnb_available()
    assert is_bnb_available() == installed and "bitsandbytes" not in sys.modules
