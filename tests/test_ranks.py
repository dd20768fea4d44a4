"""Several processes train one run together, move between machines with more or fewer of them, and stop as one."""

import json
from pathlib import Path

import numpy as np
import pytest

from fork_server import needs_fork
from sojourn.errors import Stopped, UserError
from sojourn.storage.files import read_json, read_json_lines
from sojourn.train.ranks import Ranks
from sojourn.train.session import Session
from tiny import events, losses, run_of, run_train, saved_steps, stop_after, weights

_NOTES = '''
"""What one of several processes does is written down, and a part of it may go wrong."""
import json, os, signal, sys, time
from pathlib import Path

rank, notes = int(os.environ["RANK"]), Path(os.environ["NOTES"])

def note(**facts):
    with (notes / f"{rank}.jsonl").open("a") as file:
        file.write(json.dumps(facts) + "\\n")

import torch
from sojourn.train.checkpoint.saving import Saver
from sojourn.train.session import Session
from sojourn.train.step import Stepper
from sojourn.train.faults import oom_fallback as ladder
from sojourn.train import loop

batches = Session.batches
def written(self, step):
    rows = self.stepper.ranks.shard(__import__("numpy").array(self.rows(step)))
    note(step=step, rows=[int(row) for row in rows])
    return batches(self, step)
Session.batches = written

opened = loop.open_session
def open_session(*arguments):
    made = opened(*arguments)
    train = made.config.train
    note(micro_batch=train.micro_batch, checkpointing=train.activation_checkpointing)
    return made
loop.open_session = open_session

def left(other, most):
    """Waits for what should not happen."""
    until = time.monotonic() + most
    while time.monotonic() < until:
        if (notes / f"{other}.left").exists():
            note(alone=True)
            return
        time.sleep(0.01)

leave = os._exit
def left_with(code):
    (notes / f"{rank}.left").touch()
    note(code=code)
    leave(code)
os._exit = left_with

'''

# One of two: memory runs out in the midst of a step, so that all are built anew; later it gets a SIGTERM. Meanwhile the
# first process is slow to write the ladder and to save.
_IN_ONE_OF_TWO = """
loss_sum, parts = Stepper._loss_sum, []
def tight(*arguments):
    parts.append(1)
    if rank == 1 and len(parts) == 8:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return loss_sum(*arguments)
Stepper._loss_sum = tight

write_json = ladder.write_json
def late(*arguments):
    time.sleep(0.3)
    write_json(*arguments)
ladder.write_json = late

update = Stepper.update
made = []
def struck(self):
    made.append(1)
    update(self)
    if rank == 1 and len(made) == 4:
        os.kill(os.getpid(), signal.SIGTERM)
Stepper.update = struck

save = Saver.save
def slow(self, must=False):
    if must and rank == 0 and len(made) == 4:
        left(1, 1.5)
    save(self, must)
Saver.save = slow
"""

# One of four: memory runs out in its update, when the others have made theirs; at the end another's weights go bad.
_IN_ONE_OF_FOUR = """
update, updates = Stepper.update, []
def flipped(self):
    update(self)
    updates.append(1)
    if rank == 3 and len(updates) == 5:
        with torch.no_grad():
            self.optimizer.parameters[0].fill_(float("nan"))
Stepper.update = flipped

step, made = torch.amp.GradScaler.step, []
def full(self, optimizer):
    made.append(1)
    if rank == 2 and len(made) == 2:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return step(self, optimizer)
torch.amp.GradScaler.step = full
"""


def _notes(processes: int, folder: Path) -> list[list[dict]]:
    """What each process wrote down."""
    return [read_json_lines(folder / f"{rank}.jsonl") for rank in range(processes)]


def _rows(notes: list[list[dict]]) -> dict[int, list[int]]:
    """The global batch of each step, put together of what the processes read."""
    found = [{line["step"]: line["rows"] for line in lines if "rows" in line} for lines in notes]
    return {step: [row for one in found for row in one[step]] for step in found[0] if all(step in one for one in found)}


@needs_fork
def test_a_run_moves_from_one_process_to_two_to_four_and_ends_the_same(tiny, fork_server, monkeypatch, tmp_path):
    """A third of the run each; in one of them memory runs out, and one gets a signal."""
    held_out = ("data.eval_fraction=0.2", "train.eval_every=6", "train.micro_batch=1")
    words, wanted = tiny.words(*held_out), {}
    run = run_of(words)
    with monkeypatch.context() as patch:
        real = Session.batches

        def written(self, step):
            wanted[step] = self.rows(step)
            return real(self, step)

        patch.setattr(Session, "batches", written)
        whole = tiny.whole(*held_out)
        stop_after(patch, 4)
        with pytest.raises(Stopped):
            run_train(words)
    assert run.status().step == 4

    two, four = tmp_path / "two", tmp_path / "four"
    two.mkdir()
    four.mkdir()
    done, notes = fork_server.run_ranks(2, words, _NOTES + _IN_ONE_OF_TWO, NOTES=str(two)), _notes(2, two)
    assert done.codes == [3, 3] and [lines[-1:] for lines in notes] == [[{"code": 3}], [{"code": 3}]], done
    assert run.status().state == "stopped" and run.status().step == 8 and saved_steps(run)[-1] == 8
    assert not any("alone" in line for line in notes[0]), "a process left while the first was still saving"
    for lines in notes:
        assert [line["checkpointing"] for line in lines if "checkpointing" in line] == ["off", "selective"]
    found = _rows(notes)
    assert {step: found[step] for step in range(4, 8)} == {step: wanted[step] for step in range(4, 8)}

    done, notes = fork_server.run_ranks(4, words, _NOTES + _IN_ONE_OF_FOUR, NOTES=str(four)), _notes(4, four)
    assert done.codes == [0] * 4 and [lines[-1:] for lines in notes] == [[{"code": 0}]] * 4, done
    found = _rows(notes)
    assert {step: found[step] for step in range(8, 12)} == {step: wanted[step] for step in range(8, 12)}
    assert all(len(line["rows"]) == 2 for line in notes[3] if "rows" in line)

    assert [event["now"] for event in events(run, "out_of_memory")] == [
        {"train.activation_checkpointing": "selective"}, {"train.offload": "optimizer"}
    ]  # fmt: skip
    assert read_json(run.ladder) == {
        "device": "cpu",
        "train.activation_checkpointing": "selective",
        "train.offload": "optimizer",
    }
    assert [event["step"] for event in events(run, "bad_weights")] == [12]
    started = [(event["processes"], event["step"]) for event in events(run, "start")]
    assert started[0] == (1, 0) and started[1] == (2, 4) and started[-2:] == [(4, 8), (4, 8)]
    assert run.status().state == "done" and len(losses(run)) == 12
    for kind in ("train", "eval"):
        ours, theirs = ([line["loss"] for line in one.read_metrics() if line["kind"] == kind] for one in (run, whole))
        assert ours == pytest.approx(theirs, rel=1e-5)
    mine, others = weights(run), weights(whole)
    assert all(np.allclose(mine[key], others[key], rtol=1e-3, atol=1e-5) for key in others)


def test_a_batch_smaller_than_the_number_of_processes_is_refused_in_one_line(tiny, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        UserError, match=r"train\.global_batch: 8 rows are fewer than the 16 ranks; use at least 16"
    ) as told:
        run_train(tiny.words())
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_every_row_of_a_batch_goes_to_one_process(size):
    rows = np.array([5, 3, 9, 1, 0, 7, 2, 8])
    shares = [Ranks(rank, size).shard(rows) for rank in range(size)]
    assert np.concatenate(shares).tolist() == rows.tolist() and min(map(len, shares)) >= 1


def test_a_single_rank_needs_no_process_group():
    single = Ranks()
    assert single.is_main and single.sum(1.0, 2.0) == [1.0, 2.0] and single.any(True) and not single.any(False)
    assert single.broadcast(3.0) == 3.0
    single.barrier()
    with single.raise_oom_on_all_ranks():
        pass
    assert json.dumps(single.shard(np.arange(3)).tolist()) == "[0, 1, 2]"
