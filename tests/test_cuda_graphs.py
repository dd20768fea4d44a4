"""CUDA graphs: the same losses and gradients as eager passes, whatever happens between replays."""

import math
import random
import weakref
from dataclasses import replace

import pytest
import torch

from shared import FUSED_CHANGES, make_base
from sojourn.catalog.fused_families import FUSED_FAMILIES
from sojourn.config.attention_backends import ATTENTION_BACKENDS, AttentionBackend
from sojourn.config.load import load_run
from sojourn.errors import Stopped, UserError
from sojourn.model import attention
from sojourn.model.layout import Layout, dense_mask
from sojourn.resolve import kernels
from sojourn.run.home import run_folder
from sojourn.train import step as step_module
from sojourn.train.batcher import DeviceBatch, Prefetcher
from sojourn.train.cuda_graphs import CudaGraphs, GpuCapture, graph_shape, pad_to_shape
from sojourn.train.distributed import open as engines
from sojourn.train.faults.memory_pressure import MemoryPressure
from sojourn.train.optim.optimizers import Optimizer
from sojourn.train.ranks import Ranks
from sojourn.train.rehearse import rehearse
from tiny import LORA, events, run_train, same_weights, stop_after

GRAPHS = "train.cuda_graphs=on"
OFFLOAD = ("train.activation_checkpointing=offload",)


def curve(run):
    """Gradient norms show gradients that were added twice; losses do not, since AdamW ignores their scale."""
    lines = [line for line in run.read_metrics() if line["kind"] == "train"]
    return [line[name] for line in lines for name in ("loss", "grad_norm")]


class FakeGraphs:
    """Replays what was captured, into the same tensors, as a CUDA graph does. A capture computes nothing."""

    def __init__(self, parameters):
        self.parameters, self.captures, self.replays, self.spoiled = parameters, [], [], False

    def machine(self):
        """As on a GPU: when all graphs of a memory pool are freed, no other can be captured into it."""
        mine = []

        def capture(work):
            if mine and not any(graph() for graph in mine):
                raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
            again, part = self(work)
            mine.append(weakref.ref(again))
            return again, part

        return capture

    def __call__(self, work):
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        first = before[0] is None
        part, grads = work(), [p.grad for p in self.parameters]
        for grad, kept in zip(grads, before, strict=True):
            grad.fill_(math.nan) if kept is None else grad.copy_(kept)
        part.fill_(math.nan)
        self.captures.append(first)

        def replay():
            self.replays.append(first)
            for parameter, grad in zip(self.parameters, grads, strict=True):
                parameter.grad = None if first else grad
            part.copy_(work())
            for parameter, grad in zip(self.parameters, grads, strict=True):
                grad.copy_(parameter.grad)

        return replay, part


@pytest.fixture(scope="module")
def rows(tiny):
    """One long text: every row of it is whole."""
    draw, path = random.Random(0), tiny.home / "long.txt"
    path.write_text(" ".join(draw.choice(["red", "green", "blue", "house", "tree"]) for _ in range(30_000)))
    return (f"data.sources={path}", "data.eval_fraction=0.02")


@pytest.fixture
def fake_graphs(tiny, rows, monkeypatch):
    """The fake graphs of the run to come, on a device that pretends to be asynchronous."""
    tiny.whole(*rows)
    kept = []

    def make(loss, parameters):
        kept.append(FakeGraphs(parameters))
        return CudaGraphs(loss, parameters, kept[-1].machine)

    monkeypatch.setattr(step_module, "CudaGraphs", make)
    monkeypatch.setattr(kernels, "cuda_graphs_unsupported_reason", lambda device: None)
    monkeypatch.setattr(engines, "has_cpu_kernels", lambda model: False)  # as on a GPU: torch's fused AdamW
    monkeypatch.setattr(Optimizer, "fuses_clipping", property(lambda self: bool(self.torch.defaults.get("fused"))))
    monkeypatch.setattr(Prefetcher, "has", lambda self, step: self._next is not None and self._next[0] == step)
    return kept


@pytest.mark.parametrize(
    "extra",
    [(), ("train.micro_batch=2",), ("advanced.async_step=off",), ("train.neftune_noise_alpha=20",)],
    ids=["one", "four", "waiting", "neftune"],
)
def test_cuda_graphs_have_the_losses_and_gradient_norms_of_eager_steps(tiny, rows, fake_graphs, extra):
    run = run_train(tiny.words(*rows, GRAPHS, *extra))
    assert curve(run) == pytest.approx(curve(tiny.whole(*rows, *extra)), rel=1e-5)
    several = "train.micro_batch=2" in extra
    assert fake_graphs[0].captures == ([True, False] if several else [True])
    assert len(fake_graphs[0].replays) == (44 if several else 9)


def test_evaluations_and_saves_between_steps_change_nothing(tiny, rows, fake_graphs):
    run = run_train(tiny.words(*rows, GRAPHS, "train.eval_every=3", "save.every_steps=4"))
    assert curve(run) == pytest.approx(curve(tiny.whole(*rows)), rel=1e-5) and len(fake_graphs[0].replays) > 9


def test_a_run_that_was_stopped_ends_with_the_same_weights(tiny, rows, fake_graphs, monkeypatch):
    whole, words = run_train(tiny.words(*rows, GRAPHS)), tiny.words(*rows, GRAPHS, "save.every_steps=4")
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 6)
        run_train(words)
    run = run_train(words)
    assert curve(run) == pytest.approx(curve(whole), rel=1e-5) and same_weights(run, whole)


def test_a_wrong_loss_changes_no_weight_and_the_step_is_replayed(tiny, rows, fake_graphs, monkeypatch):
    real = CudaGraphs._replay

    def spoiled(self, *given):
        part = real(self, *given)
        if len(fake_graphs[0].replays) == 5 and not fake_graphs[0].spoiled:
            fake_graphs[0].spoiled = True
            part.fill_(math.nan)
        return part

    monkeypatch.setattr(CudaGraphs, "_replay", spoiled)
    run = run_train(tiny.words(*rows, GRAPHS))
    assert [event["step"] for event in events(run, "suspect_hardware")] == [8] and not events(run, "bad_step")
    assert curve(run) == pytest.approx(curve(tiny.whole(*rows)), rel=1e-5)


def test_running_out_of_memory_in_a_capture_costs_only_the_graph(tiny, rows, fake_graphs, monkeypatch, capfd):
    def full(self, work):
        work()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(FakeGraphs, "__call__", full)
    run = run_train(tiny.words(*rows, GRAPHS))
    assert curve(run) == pytest.approx(curve(tiny.whole(*rows)), rel=1e-5)
    assert capfd.readouterr().out.count("note: train.cuda_graphs: cannot capture a CUDA graph (CUDA out of memory") == 1


def test_running_out_of_memory_later_releases_the_graphs(tiny, rows, fake_graphs, monkeypatch):
    real = CudaGraphs.run

    def tight(self, batch, *given):
        if len(fake_graphs[0].replays) >= 3 and len(batch.ids_BT) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, batch, *given)

    monkeypatch.setattr(CudaGraphs, "run", tight)
    run = run_train(tiny.words(*rows, GRAPHS))
    assert [event["now"] for event in events(run, "out_of_memory")] == [{"train.cuda_graphs": "off"}]
    assert curve(run) == pytest.approx(curve(tiny.whole(*rows)), rel=1e-4) and len(fake_graphs) == 1


def test_memory_pressure_releases_the_graphs_first(tiny, rows, fake_graphs, monkeypatch):
    eased = []

    def look(self, careful, saver):
        if len(fake_graphs[0].replays) >= 3 and not eased:
            eased.append(careful)
            careful.relieve_memory_pressure("12 allocations had to be tried again")

    monkeypatch.setattr(MemoryPressure, "check", look)
    run = run_train(tiny.words(*rows, GRAPHS, "log.every_steps=1"))
    assert [event["now"] for event in events(run, "out_of_memory")] == [{"train.cuda_graphs": "off"}] and len(
        fake_graphs
    ) == 1
    assert curve(run) == pytest.approx(curve(tiny.whole(*rows, "log.every_steps=1")), rel=1e-4)


def test_a_rehearsal_runs_until_graphs_are_replayed(tiny, rows, fake_graphs):
    """The time of its last step is the estimate of the run, and is recorded as calibration."""
    config = load_run(tiny.words(*rows, GRAPHS)).config
    assert rehearse(config, run_folder(config.name), Ranks()).refused is None
    assert fake_graphs[0].captures == [True] and len(fake_graphs[0].replays) >= 2


def test_rows_of_several_documents_are_not_captured_and_a_note_says_so(tiny, fake_graphs, capfd):
    run = run_train(tiny.words(GRAPHS))
    assert not fake_graphs[0].captures and curve(run) == curve(tiny.whole())
    assert capfd.readouterr().out.count("note: train.cuda_graphs: rows with several documents") == 1


@pytest.fixture
def varlen(monkeypatch):
    """Varlen attention, which reads cu_seqlens as a tensor, on a CPU."""

    def attend(query, key, value, layout, how):
        if layout.one_document_per_row:
            return attention.sdpa(query, key, value, layout, how)
        assert int(layout.cu_seqlens.diff().max()) <= layout.max_seqlen
        places = torch.arange(query.shape[0] * query.shape[1])
        documents = torch.bucketize(places, layout.cu_seqlens, right=True).view(query.shape[:2])
        masked = replace(layout, masks={None: dense_mask(documents, None)})
        return attention.math(query, key, value, masked, how)

    monkeypatch.setitem(attention._IMPLEMENTATIONS, "varlen", attend)
    monkeypatch.setattr(kernels, "attention_unsupported_reason", lambda *given: None)
    return "train.attention=varlen"


@pytest.mark.parametrize("extra", [(), ("train.micro_batch=2",), LORA, OFFLOAD], ids=["one", "four", "lora", "offload"])
def test_packed_rows_are_captured_with_padded_documents_and_targets(tiny, fake_graphs, varlen, extra, capfd):
    plain = run_train(tiny.words(varlen, *extra))
    run = run_train(tiny.words(varlen, *extra, GRAPHS))
    assert curve(run) == pytest.approx(curve(plain), rel=1e-5)
    several = "train.micro_batch=2" in extra
    assert fake_graphs[0].captures[-1] is (not several) and len(fake_graphs[0].replays) >= (40 if several else 6)
    assert "note: train.cuda_graphs" not in capfd.readouterr().out


def test_a_graph_shape_grows_for_larger_batches_and_pads_smaller_ones():
    """Targets by eighths, cu_seqlens by 16, max_seqlen by powers of two."""
    seen, parts = [], []
    weight = torch.nn.Parameter(torch.ones(()))

    def loss(ready):
        counted = ready.labels_N >= 0
        seen.append((len(ready.target_indices_N), len(ready.layout.cu_seqlens), ready.layout.max_seqlen))
        return weight * ready.target_indices_N[counted].sum()

    hand = FakeGraphs([weight])
    cuda_graphs = CudaGraphs(loss, [weight], hand.machine)

    def run_batch(targets, starts, longest, plain=False):
        weight.grad = None
        layout = Layout("varlen", None, torch.tensor([0] * (starts - 1) + [128]), longest, one_document_per_row=plain)
        places = torch.arange(targets)
        ready = DeviceBatch(torch.zeros(2, 64, dtype=torch.int64), torch.zeros(2, 64), places, places.clone(), layout)
        part, ready = cuda_graphs.run(ready, 1, is_only=True)
        parts.append((float((loss(ready) if part is None else part).detach()), sum(range(targets))))
        return part is not None

    assert [run_batch(33, 3, 20) for _ in range(5)] == [False] * 3 + [True] * 2 and seen[-1] == (48, 16, 32)
    assert (
        run_batch(48, 2, 32) and run_batch(1, 3, 5) and run_batch(40, 3, 64, plain=True) is False
    )  # which has a longer document
    assert [run_batch(33, 3, 20) for _ in range(4)] == [False, False, True, True] and seen[-1] == (48, 16, 64)
    assert run_batch(33, 16, 20) and [run_batch(128, 17, 64) for _ in range(4)] == [False] * 3 + [True]
    assert seen[-1] == (128, 32, 64)
    assert run_batch(3, 2, 5) and all(mine == wanted for mine, wanted in parts) and hand.captures == [True] * 3


def test_padded_targets_are_valid_indices_without_labels():
    layout, ids = Layout("varlen", None, torch.tensor([0, 20, 33]), 33, one_document_per_row=False), torch.zeros(3, 11)
    all_of_it, one = (DeviceBatch(ids, ids, *(torch.arange(count),) * 2, layout) for count in (33, 1))
    room = graph_shape(one).grow(graph_shape(all_of_it))
    filled = pad_to_shape(one, room)
    assert room.targets == len(filled.target_indices_N) == 33 and int(filled.target_indices_N.max()) < 33
    assert filled.labels_N.tolist() == [0] + [-100] * 32


def test_no_graph_is_captured_that_would_replay_the_documents_of_its_first_batch(monkeypatch):
    reads_documents = AttentionBackend("made_up", "")
    monkeypatch.setitem(ATTENTION_BACKENDS, "made_up", reads_documents)
    ids = torch.zeros(2, 16)

    def shape(backend, **changes):
        layout = Layout(backend, None, torch.tensor([0, 9, 16, 20, 32]), 16, one_document_per_row=True)
        return graph_shape(DeviceBatch(ids, ids, torch.arange(4), torch.arange(4), replace(layout, **changes)))

    assert shape("made_up") is None and shape("made_up", one_document_per_row=False) is None
    assert shape("sdpa").is_unpacked and shape("varlen").is_unpacked and shape("sdpa", has_window=True) is None
    for read in (shape("flash_attention_2"), shape("varlen", has_window=True)):  # cu_seqlens, even of whole rows
        assert not read.is_unpacked and read.cu_seqlens == 16
    monkeypatch.setitem(ATTENTION_BACKENDS, "made_up", replace(reads_documents, causal=True))
    assert shape("made_up").is_unpacked and shape("made_up", one_document_per_row=False) is None


def test_the_end_of_a_text_now_and_then_does_not_make_rows_packed():
    weight = torch.nn.Parameter(torch.ones(()))
    cuda_graphs = CudaGraphs(
        lambda ready: weight * ready.labels_N.clamp(min=0).sum(), [weight], FakeGraphs([weight]).machine
    )

    def run_batch(plain):
        weight.grad = None
        layout, some = (
            Layout("varlen", None, torch.tensor([0, 40, 64]), 64, one_document_per_row=plain),
            torch.ones(64).long(),
        )
        return cuda_graphs.run(DeviceBatch(some.view(1, 64), some, some, some, layout), 1, is_only=True)[0] is not None

    assert [run_batch(True) for _ in range(4)] == [False] * 3 + [True]
    assert not run_batch(False) and cuda_graphs._shape.is_unpacked and not cuda_graphs._graphs
    assert [run_batch(True) for _ in range(40)] == [False] * 3 + [True] * 37
    assert not run_batch(False) and cuda_graphs._shape.is_unpacked  # two of 46
    assert not run_batch(False) and not cuda_graphs._shape.is_unpacked  # three of 47
    assert [run_batch(bool(i % 2)) for i in range(4)] == [False, False, True, True]


@pytest.fixture
def small():
    """A weight, its fake graphs, the CudaGraphs, and a function that runs a batch."""
    weight = torch.nn.Parameter(torch.ones(3))
    fake_graphs = FakeGraphs([weight])
    cuda_graphs = CudaGraphs(lambda ready: (weight * ready.ids_BT.float()).sum(), [weight], fake_graphs.machine)

    def run_batch(*numbers, rows=1, plain=True):
        weight.grad = None
        layout = Layout("sdpa", None, None, 3, one_document_per_row=plain)
        return cuda_graphs.run(
            DeviceBatch(torch.tensor([numbers] * rows), *(torch.arange(3),) * 3, layout), 2, is_only=True
        )[0]

    return weight, fake_graphs, cuda_graphs, run_batch


def test_an_eager_pass_releases_graphs_that_hold_as_much_memory(small):
    """Rows of several documents, such as the end of a text, come now and then; smaller ones may in every step."""
    _, fake_graphs, cuda_graphs, run_batch = small
    assert [run_batch(1, 2, 3, rows=2) is None for _ in range(4)] == [True, True, True, False]
    held = weakref.ref(cuda_graphs._graphs[True][0])
    assert run_batch(1, 2, 3) is None and run_batch(1, 2, 3, plain=False) is None and held() is not None
    assert run_batch(1, 2, 3, rows=2, plain=False) is None and held() is None
    assert [run_batch(1, 2, 3, rows=2) is None for _ in range(4)] == [True, True, True, False]
    assert run_batch(1, 2, 3, rows=3) is None and not cuda_graphs._graphs
    assert fake_graphs.captures == [True, True]


def test_weights_that_moved_are_captured_again(small):
    weight, fake_graphs, _, run_batch = small
    assert [run_batch(1, 2, 3) for _ in range(3)] == [None] * 3
    assert float(run_batch(1, 2, 3)) == 3.0 and weight.grad.tolist() == [0.5, 1.0, 1.5]
    weight.data = torch.full((3,), 2.0)
    assert float(run_batch(3, 3, 3)) == 9.0 and fake_graphs.captures == [True, True]


def test_a_cpu_has_no_graphs(tiny):
    with pytest.raises(UserError, match=r"train\.cuda_graphs: needs a CUDA GPU, but this run is on cpu"):
        run_train(tiny.words(GRAPHS))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("passes", [1, 3])
def test_a_gpu_replays_what_it_captured(passes):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).cuda()
    layout = Layout("sdpa", None, None, 16, one_document_per_row=True)

    def loss(ready):
        return model(ready.ids_BT).pow(2).sum()

    def step(run_batch):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        for _ in range(passes):
            ready = DeviceBatch(torch.randn(8, 16, device="cuda"), *(torch.arange(3, device="cuda"),) * 3, layout)
            part = run_batch(ready)
            if part is None or part.requires_grad:
                (loss(ready) / targets if part is None else part).backward()
        return [weight.grad.clone() for weight in model.parameters()]

    cuda_graphs, targets = CudaGraphs(loss, list(model.parameters())), 3 * passes
    wanted = step(lambda ready: None)
    for _ in range(6):
        for mine, theirs in zip(
            step(lambda ready: cuda_graphs.run(ready, targets, passes == 1)[0]), wanted, strict=True
        ):
            torch.testing.assert_close(mine, theirs)
    assert len(cuda_graphs._graphs) == min(passes, 2)
    kept = cuda_graphs._graphs[True][1]  # a loss that somebody still holds
    cuda_graphs.release()
    step(lambda ready: cuda_graphs.run(ready, targets, passes == 1)[0])
    assert len(cuda_graphs._graphs) == min(passes, 2) and math.isfinite(float(kept))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize(
    "extra",
    [(), LORA, (*LORA, "method.dropout=0.1"), ("train.micro_batch=2",), ("train.activation_checkpointing=full",),
     ("train.compile=on",), OFFLOAD, (*OFFLOAD, *LORA, "train.micro_batch=2")],
    ids=str,
)  # fmt: skip
def test_a_gpu_replays_packed_rows(tiny, monkeypatch, extra, capfd):
    """Only a GPU shows whether real kernels can be captured; the rest is tested with fake graphs, on any machine."""
    words = ("train.device=cuda", "train.precision=bf16", "train.attention=varlen", "train.steps=24", *extra)
    made, real = [], GpuCapture.__call__
    monkeypatch.setattr(GpuCapture, "__call__", lambda self, work: (made.append(work), real(self, work))[1])
    plain = curve(run_train(tiny.words(*words, "train.cuda_graphs=off")))
    assert not made
    replayed = curve(run_train(tiny.words(*words, GRAPHS)))
    assert replayed == pytest.approx(plain, rel=0.02)
    assert made and "note: train.cuda_graphs" not in capfd.readouterr().out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("method", [("method.kind=full",), LORA], ids=["full", "lora"])
@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_a_gpu_replays_every_kind_of_layer(tiny, family, method, capfd):
    base = make_base(tiny.chats, tiny.home, family, **FUSED_CHANGES.get(family, {}))
    words = (*method, f"model.base={base}", "train.device=cuda", "train.precision=bf16", "train.attention=varlen")
    plain, replayed = (curve(run_train(tiny.words(*words, graphs))) for graphs in ("train.cuda_graphs=off", GRAPHS))
    assert replayed == pytest.approx(plain, rel=0.02)
    assert "note: train.cuda_graphs" not in capfd.readouterr().out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_gpu_draws_the_same_dropout_masks_as_without_graphs():
    """Only where there is a GPU: no CPU has its generator, nor graphs that carry it on."""
    weight = torch.nn.Parameter(torch.linspace(1, 2, 1000, device="cuda"))
    ready = DeviceBatch(torch.zeros(1, 8, device="cuda"), *(torch.arange(3, device="cuda"),) * 3,
                  Layout("sdpa", None, None, 8, one_document_per_row=True))  # fmt: skip

    def loss(ready):
        return torch.nn.functional.dropout(weight * weight).sum()

    def drawn(run_batch):
        torch.manual_seed(1)
        found = []
        for _ in range(8):
            weight.grad = None
            part = run_batch(ready)
            found.append(float(part if part is not None else loss(ready) / 3))
        return found

    cuda_graphs = CudaGraphs(loss, [weight])
    wanted = drawn(lambda ready: None)
    assert drawn(lambda ready: cuda_graphs.run(ready, 3, is_only=True)[0]) == pytest.approx(wanted, rel=1e-6)
    assert cuda_graphs.has_graphs and len(set(wanted)) == 8
