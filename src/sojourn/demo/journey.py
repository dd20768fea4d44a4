"""The demo: doctor, plan, prepare, train, a real kill half-way, resume, and five questions the model never saw."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sojourn.config.load import load_run
from sojourn.config.schema import RunConfig
from sojourn.demo.child import Child
from sojourn.errors import UserError
from sojourn.run.folder import RunFolder
from sojourn.run.home import home, prepared_folder, run_folder

if TYPE_CHECKING:
    from rich.console import Console

    from sojourn.data.artefact import Artefact
    from sojourn.infer.evaluate import Answered
    from sojourn.infer.load import Model

SIMPLEST = "echo"
QUESTIONS = 100


@dataclass(frozen=True)
class Outcome:
    """What the demo showed: exact match on held-out questions of the simplest family before and after training."""

    before: float
    after: float
    killed_at: int
    continued_from: int
    steps: int
    seconds: float


def run_demo(fast: bool, console: Console) -> Outcome:
    began = time.monotonic()
    words = ["demo", *(["train.steps=100", "save.every_steps=20"] if fast else [])]
    config = load_run(words).config
    run = run_folder("demo")
    _make_room(run)

    console.print("[bold]1 doctor[/bold]   what is this machine?")
    _doctor(console)
    console.print("[bold]2 plan[/bold]     what will it take?")
    _plan(config, console)
    console.print("[bold]3 prepare[/bold]  our own questions and answers → tokens")
    artefact = _prepare(config, console)
    before = _exact(_untrained(config, artefact))
    console.print(
        f"           before training: {before:.0%} of {QUESTIONS} held-out questions ({SIMPLEST}) answered exactly"
    )
    console.print("[bold]4 train[/bold]    and, half-way, a real SIGKILL of the training process")
    killed_at, continued_from, steps = _train(words, run, console)
    console.print("[bold]5 ask[/bold]      questions that were in no training row")
    after = _ask(run, console)
    outcome = Outcome(before, after, killed_at, continued_from, steps, time.monotonic() - began)
    console.print(
        f"[bold]held-out exact match, {SIMPLEST}: {outcome.before:.0%} before → [green]{outcome.after:.0%}[/green] after[/bold] "
        f"({QUESTIONS} questions; {outcome.seconds:.0f} s in all)"
    )
    _next(run, console)
    return outcome


def _make_room(run: RunFolder) -> None:
    """The demo begins anew each time; only its own earlier run is removed."""
    if not run.path.exists():
        return
    status = run.status()
    if status and status.state in ("starting", "running"):
        raise UserError(f"{run.path}: a demo is running there (process {status.pid}); wait for it or stop it")
    shutil.rmtree(run.path)


def _doctor(console: Console) -> None:
    from sojourn.machine.doctor import examine

    findings = examine(home())
    for finding in findings:
        if finding.name in ("platform", "cpu", "gpu", "precision") or finding.level == "fail":
            mark = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.level]
            console.print(
                f"           [{mark}]{finding.level:<4}[/{mark}] {finding.name}: {finding.says}",
                overflow="ellipsis",
                no_wrap=True,
            )
    good = sum(finding.level == "ok" for finding in findings)
    console.print(f"           {good} of {len(findings)} checks ok (all of them: sojourn doctor)")
    failed = [finding for finding in findings if finding.level == "fail"]
    if any(finding.name in ("torch", "libraries", "disk") for finding in failed):
        raise UserError(f"{failed[0].name}: {failed[0].says}" + (f"; {failed[0].mend}" if failed[0].mend else ""))


def _plan(config: RunConfig, console: Console) -> None:
    from sojourn.plan.estimate import make_plan

    plan = make_plan(config)
    console.print(
        f"           {plan.shape.parameters / 1e6:.1f}M parameters, {plan.steps} steps, at most {plan.tokens / 1e6:.1f}M tokens; "
        f"{plan.memory.total / 2**20:.0f} MiB of memory, {plan.checkpoint_bytes / 2**20:.0f} MiB a checkpoint"
    )


def _prepare(config: RunConfig, console: Console) -> Artefact:
    from sojourn.data.prepare import prepare

    artefact = prepare(config.data, prepared_folder())
    facts = artefact.report["train"]
    console.print(
        f"           {facts['documents']:,} documents, {facts['tokens']:,} tokens, {facts['rows']:,} rows, {facts['fill']:.1%} full; "
        f"a tokenizer of {artefact.vocab_size:,} tokens"
    )
    return artefact


def _untrained(config: RunConfig, artefact: Artefact) -> Model:
    """The very model that training will start from."""
    from transformers import AutoTokenizer

    from sojourn.infer.load import Model
    from sojourn.model.scratch import build_model
    from sojourn.train.final import stop_ids

    stops = stop_ids(artefact)
    network = build_model(
        config.model, artefact.vocab_size, artefact.max_length, artefact.pad_id, stops, config.train.seed
    )
    return Model(artefact.path, network.eval(), AutoTokenizer.from_pretrained(artefact.tokenizer), "cpu")


def _exact(model: Model) -> float:
    from sojourn.infer.evaluate import accuracy, ask_held_out

    return accuracy(ask_held_out(model, QUESTIONS, (SIMPLEST,))[SIMPLEST])


def _train(words: list[str], run: RunFolder, console: Console) -> tuple[int, int, int]:
    """Trains in a child process, kills it half-way, runs the same command again. Returns where each happened."""
    from sojourn.demo.progress import bar

    with bar(console) as show:
        child = Child(words, run)
        killed_at = child.kill_half_way(show)
        child = Child(words, run)
        steps = child.wait(show)
    continued_from = child.continued_from()
    console.print(
        f"           killed at step {killed_at}; the same command continued from the checkpoint of step {continued_from}, "
        f"and finished {steps}"
    )
    return killed_at, continued_from, steps


def _ask(run: RunFolder, console: Console) -> float:
    from sojourn.infer.evaluate import accuracy, ask_held_out
    from sojourn.infer.load import open_model

    model = open_model(str(run.final))
    answers = ask_held_out(model, QUESTIONS, (SIMPLEST,))
    others = ask_held_out(model, 25)
    for one in _five(answers[SIMPLEST], others):
        mark = "[green]✓[/green]" if one.right else "[red]✗[/red]"
        said = one.reply.strip().replace("\n", " ") or "(nothing)"
        console.print(
            f"           {mark} {one.task.prompt}  →  [cyan]{said}[/cyan]"
            + ("" if one.right else f"  (right: {one.task.answer})")
        )
    console.print(
        "           by family: " + ", ".join(f"{family} {accuracy(found):.0%}" for family, found in others.items())
    )
    return accuracy(answers[SIMPLEST])


def _five(simplest: list[Answered], others: dict[str, list[Answered]]) -> list[Answered]:
    """Two of the simplest family and three of the others, chosen by position, not by success."""
    families = [family for family in others if family != SIMPLEST]
    return [*simplest[:1], *simplest[-1:], *(others[family][0] for family in families[:3])]


def _next(run: RunFolder, console: Console) -> None:
    console.print("\n[bold]next[/bold]")
    for command, why in (
        (f"sojourn chat {run.path.name}", "talk to what you just trained"),
        ("sojourn train small --train_file FILE", "train on your own .txt, .jsonl or .json"),
        ("sojourn plan medium", "what a bigger model takes and costs on a rented GPU"),
        ("sojourn presets list", "where to start from"),
    ):
        console.print(f"  {command:<40} {why}")
