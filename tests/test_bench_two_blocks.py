"""The benchmark of plans compiles two blocks where memory for all is not there yet: nothing may be left to compile."""

from sojourn.bench.plan import child
from sojourn.bench.plan.cases import NEW, Case
from sojourn.bench.plan.ground import lay, settings_of
from sojourn.plan.shape import Shape
from sojourn.run.folder import RunFolder


def test_two_blocks_compile_what_all_blocks_need(tmp_path, monkeypatch):
    from torch._dynamo.utils import counters
    from torch.nn import Module

    from sojourn.train.ranks import Ranks
    from sojourn.train.session import open_session

    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(NEW, "four blocks", Shape(32, 4, 2, 1, 96, 300, True))
    real = Module.compile
    monkeypatch.setattr(Module, "compile", lambda self: real(self, backend="aot_eager"))
    case = Case("x", "pretrain", "four blocks", 64, 2, True, document=20)
    config = settings_of(case, "cpu", tmp_path)
    lay(case, config, tmp_path)
    run = RunFolder(tmp_path / "home/runs/x")
    run.path.mkdir(parents=True)
    session = open_session(config, run, Ranks(device="cpu"))
    counters.clear()
    batches = [session.batches(step) for step in range(2)]
    child._compile(session, batches)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0 and session.stepper.network.body.config.num_hidden_layers == 4
    assert all(parameter.grad is None for parameter in session.stepper.network.model.parameters())
    child._two(session, batches)
    assert counters["stats"]["unique_graphs"] == graphs
