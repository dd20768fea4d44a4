"""Killed at random moments and at chosen disk calls, a run loses nothing; `make test-kill` does the same at length."""

from __future__ import annotations

from random import Random

import pytest

from fork_server import ForkServer, needs_fork
from kill.fault_plans import kill_at_calls, kill_at_random_moments
from kill.killed_run import KilledRun, Reference, make_reference

pytestmark = needs_fork


def _of(method: str, others: str) -> pytest.MarkDecorator:
    """The run that a test kills; that of `others` in make test-long."""
    return pytest.mark.parametrize("reference", [method, pytest.param(others, marks=pytest.mark.slow)], indirect=True)


@pytest.fixture(scope="module")
def reference(
    request: pytest.FixtureRequest, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    return make_reference(fork_server, tmp_path_factory.mktemp("kill") / request.param, request.param)


@_of("pretrain", "lora")
def test_random_kills_change_neither_the_weights_nor_what_was_read(reference):
    rng, kills = Random(reference.method), 0
    while kills < 2:
        kills += kill_at_random_moments(KilledRun(reference, f"random-{kills}"), rng, most=3)


@_of("lora", "pretrain")
def test_a_kill_during_a_save_keeps_the_last_good_checkpoint(reference):
    writing = "write checkpoints/.stage-PID-{0}/model.safetensors 2 of {0}"
    placing = "rename checkpoints/.stage-PID-{0} 1 of {0}"
    removing = "unlink checkpoints/.removing-step-OLD/model.safetensors 1 of {0}"
    chain = [(writing, "half"), (placing, "before"), (placing, "after"), (removing, "before")]
    saves = ("step-00000004", "step-00000006", "step-00000008", "step-00000012")
    kill_at_calls(
        KilledRun(reference, "save"), [(name.format(at), how) for at, (name, how) in zip(saves, chain, strict=True)]
    )


@_of("lora", "pretrain")
def test_a_kill_while_a_model_is_put_in_place_leaves_none_or_all_of_it(reference):
    chain = [("rename best 1 of best", "after"), ("rename .stage-PID-final 1 of final", "before")]
    kill_at_calls(KilledRun(reference, "final"), chain)
