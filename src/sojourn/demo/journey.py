"""The demo: doctor, plan, prepare, train, SIGKILL half-way, resume, and five held-out questions."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sojourn.config.load import load_run
from sojourn.config.schema import RunConfig
from sojourn.demo.child import Child
from sojourn.errors import UserError
from sojourn.run.folder import RunFolder
from sojourn.run.home import home, prepared_folder, run_folder

if TYPE_CHECKING:
    from sojourn.data.artefact import Artefact
    from sojourn.demo.screen import Screen
    from sojourn.evals.held_out import Answer
    from sojourn.infer.load import LoadedModel

SIMPLEST = "echo_number"  # the simplest task family whose answer depends on the prompt
QUESTIONS = 100


@dataclass(frozen=True)
class Outcome:
    """Exact match on held-out questions of the simplest family before and after training."""

    before: float
    after: float
    killed_at: int
    continued_from: int
    steps: int
    seconds: float


def run_demo(fast: bool, screen: Screen) -> Outcome:
    began = time.monotonic()
    args = ["demo-fast", "name=demo"] if fast else ["demo"]
    config = load_run(args).config
    run = run_folder("demo")
    _remove_earlier_run(run)

    screen.stage("1 doctor", "what is this machine?")
    _doctor(screen)
    screen.stage("2 plan", "how much memory and how many steps?")
    _plan(config, screen)
    screen.stage("3 prepare", "tokenize the built-in questions and answers")
    artefact = _prepare(config, screen)
    before = _exact(_untrained(config, artefact))
    screen.print(f"before training: {before:.0%} of {QUESTIONS} held-out questions ({SIMPLEST}) answered exactly")
    screen.stage("4 train", "with a SIGKILL of the training process half-way")
    killed_at, continued_from, steps = _train(args, run, screen)
    screen.stage("5 ask", "questions that are not in the training data")
    after = _ask(config, run, screen)
    outcome = Outcome(before, after, killed_at, continued_from, steps, time.monotonic() - began)
    screen.result(f"held-out exact match, {SIMPLEST}: {before:.0%} before, {after:.0%} after training",
                  f"{QUESTIONS} questions; the demo took {outcome.seconds:.0f} s")  # fmt: skip
    command = _command_name()
    screen.commands(
        (f"{command} chat demo", "chat with the model you just trained"),
        (f"{command} train small --train_file FILE", "train on your own texts, chats or tables"),
        (f"{command} plan medium", "memory, time and cost of a larger model on a rented GPU"),
        (f"{command} presets list", "presets to start from"),
    )
    return outcome


def _command_name() -> str:
    """How to type this command in the user's shell: its name, or its path while that is not on PATH."""
    beside = Path(sys.executable).with_name("sojourn")
    found = shutil.which("sojourn")
    if found or not beside.exists():
        return "sojourn" if found else "python -m sojourn"
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)


def _remove_earlier_run(run: RunFolder) -> None:
    """The demo starts from scratch each time; it removes only its own earlier run."""
    if not run.path.exists():
        return
    status = run.status()
    if status and status.state in ("starting", "running"):
        raise UserError(f"{run.path}: a demo is running there (process {status.pid}); wait for it or stop it")
    shutil.rmtree(run.path)


def _doctor(screen: Screen) -> None:
    from sojourn.machine.doctor import examine

    findings = examine(home())
    for finding in findings:
        if (
            finding.name in ("platform", "cpu", "precision")
            or finding.name.startswith("gpu")
            or finding.level == "fail"
        ):
            screen.finding(finding.level, f"{finding.name}: {finding.message}")
    good = sum(finding.level == "ok" for finding in findings)
    screen.print(f"{good} of {len(findings)} checks ok (all of them: sojourn doctor)")
    for finding in findings:
        if finding.level == "fail" and finding.name in ("torch", "libraries", "disk"):
            raise UserError(f"{finding.name}: {finding.message}" + (f"; {finding.fix}" if finding.fix else ""))


def _plan(config: RunConfig, screen: Screen) -> None:
    from sojourn.estimate.memory import memory
    from sojourn.plan.run_length import run_length
    from sojourn.plan.run_time import checkpoint_bytes
    from sojourn.resolve.device_spec import DeviceSpec
    from sojourn.resolve.model_spec import model_spec_of
    from sojourn.resolve.resolve import resolve

    model, mib = model_spec_of(config), 2**20
    length = run_length(config, model.vocab)
    workload = resolve(config, model, DeviceSpec("cpu", "cpu", "fp32")).workload
    size, needed = model.parameters / 1e6, memory(workload).allocated / mib
    screen.print(
        f"a new model of {size:.2f}M parameters, {length.steps} steps, up to {length.tokens / 1e6:.2f}M tokens"
    )
    screen.print(f"about {needed:.0f} MiB of memory; {checkpoint_bytes(workload) / mib:.0f} MiB a checkpoint")


def _prepare(config: RunConfig, screen: Screen) -> Artefact:
    from sojourn.data.prepare import prepare_run

    artefact = prepare_run(config, prepared_folder())
    facts = artefact.report["train"]
    screen.print(f"{facts['documents']:,} documents, {facts['tokens']:,} tokens, vocabulary {artefact.vocab_size:,}, "
               f"in {facts['rows']:,} rows ({facts['fill']:.1%} full)")  # fmt: skip
    return artefact


def _untrained(config: RunConfig, artefact: Artefact) -> LoadedModel:
    """The model that training starts from."""
    from transformers import AutoTokenizer

    from sojourn.infer.load import LoadedModel
    from sojourn.model.scratch import build_model

    length, pad, stops = artefact.max_length, artefact.pad_id, artefact.stop_ids
    network = build_model(config.model, artefact.vocab_size, length, pad, stops, config.train.seed)
    return LoadedModel(artefact.path, network.eval(), AutoTokenizer.from_pretrained(artefact.tokenizer), "cpu")


def _exact(model: LoadedModel) -> float:
    from sojourn.evals.held_out import answer_held_out_questions, exact_match
    from sojourn.infer.generate import Generator

    return exact_match(answer_held_out_questions(Generator(model), QUESTIONS, (SIMPLEST,))[SIMPLEST])


def _train(args: list[str], run: RunFolder, screen: Screen) -> tuple[int, int, int]:
    """Trains in a child process, kills it half-way, runs the same command again. Returns the steps: killed at, resumed
    from, and in all."""
    with screen.progress() as show:
        killed_at = Child(args, run).kill_half_way(show)
        child = Child(args, run)
        steps = child.wait(show)
    continued_from = child.resumed_from()
    screen.print(f"killed at step {killed_at}; the same command resumed from the checkpoint of step {continued_from} "
               f"and finished all {steps} steps")  # fmt: skip
    return killed_at, continued_from, steps


def _ask(config: RunConfig, run: RunFolder, screen: Screen) -> float:
    from sojourn.evals.held_out import answer_held_out_questions, exact_match
    from sojourn.infer.generate import Generator
    from sojourn.infer.load import load_model

    model = Generator(load_model(str(run.final)))
    simplest = answer_held_out_questions(model, QUESTIONS, (SIMPLEST,))[SIMPLEST]
    families = tuple(source.path.partition("/")[2] for source in config.data.sources)
    answers = {**answer_held_out_questions(model, 50, families), SIMPLEST: simplest}
    for answer in _choose_five(answers):
        screen.answer(answer.task.prompt, answer.reply, answer.task.answer, answer.is_correct)
    screen.print(
        "by family: " + ", ".join(f"{family} {exact_match(replies):.0%}" for family, replies in answers.items())
    )
    return exact_match(simplest)


def _choose_five(answers: dict[str, list[Answer]]) -> list[Answer]:
    """The first answer of every family, then the second of every family…: chosen by position, not by success."""
    return [replies[index] for index in range(5) for replies in answers.values()][:5]
