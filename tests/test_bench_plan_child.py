"""What a measured case does before it is timed: compiling with little memory, and steps under a cap."""

import time
from types import SimpleNamespace

import pytest
import torch
from benchmarks.planner import child
from benchmarks.planner.case_files import lay, settings_of
from benchmarks.planner.cases import NEW, Case

from sojourn.resolve.new_model import llama_spec
from sojourn.run.folder import RunFolder
from sojourn.train.distributed import open as engines
from sojourn.train.optim.optimizers import Optimizer


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Opens a session of a small new model, each time from the start."""
    from sojourn.train.ranks import Ranks
    from sojourn.train.session import open_session

    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path / "home"))

    def make(layers, compiled=False):
        monkeypatch.setitem(NEW, "small", llama_spec(32, layers, 2, 1, 96, 300, True))
        case = Case("x", "pretrain", "small", 64, 2, compiled, document=20)
        config = settings_of(case, "cpu", tmp_path)
        lay(case, config, tmp_path)
        run = RunFolder(tmp_path / f"home/runs/{layers}-{time.time_ns()}")
        run.path.mkdir(parents=True)
        session = open_session(config, run, Ranks(device="cpu"))
        session.stepper.engine.set_learning_rate(1e-2)
        return session

    return make


def test_steps_are_timed_as_the_loop_makes_them(opened, monkeypatch):
    """The next one speculative before the loss of this one is read, where the loop does so, with the same losses."""
    monkeypatch.setattr(engines, "has_cpu_kernels", lambda model: False)  # as on a GPU: torch's fused AdamW
    plain, ahead = opened(2), opened(2)
    batches = [plain.batches(step) for step in range(2)]
    wanted = [plain.stepper.step(batches[step % 2])[0] for step in range(5)]
    monkeypatch.setattr(Optimizer, "fuses_clipping", property(lambda self: bool(self.torch.defaults.get("fused"))))
    speculative = []
    found = [child._step(ahead, batches[step % 2], batches[(step + 1) % 2], speculative) for step in range(5)]
    assert found == pytest.approx(wanted, rel=1e-5) and len(speculative) == 1 and speculative[0].loss_share is not None


@pytest.mark.slow
def test_two_blocks_compile_what_all_blocks_need(opened, monkeypatch):
    from torch._dynamo.utils import counters
    from torch.nn import Module

    real = Module.compile
    monkeypatch.setattr(Module, "compile", lambda self: real(self, backend="aot_eager"))
    session = opened(4, compiled=True)
    counters.clear()
    batches = [session.batches(step) for step in range(2)]
    child._compile(session, batches)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0 and session.stepper.network.decoder.config.num_hidden_layers == 4
    assert all(parameter.grad is None for parameter in session.stepper.network.model.parameters())
    child._first(session, batches)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("wrong shape")])
def test_only_memory_is_an_answer_under_a_cap_which_never_stays(monkeypatch, error):
    caps, thrown = [], []

    def step(batches):
        raise error

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", caps.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=100))
    monkeypatch.setattr(child, "_begin_anew", lambda device: None)
    session = SimpleNamespace(stepper=SimpleNamespace(step=step, discard=lambda: thrown.append(1)))
    if isinstance(error, torch.OutOfMemoryError):
        found = child._capped(session, [[]], 50)
        assert found["cap"] == 50 and found["out_of_memory"] and thrown == [1]
    else:
        with pytest.raises(RuntimeError, match="wrong shape"):
            child._capped(session, [[]], 50)
    assert caps == [0.5, 1.0]
