"""`sojourn prepare`: turn sources into tokens once, on any machine, and show what the model will see."""

from __future__ import annotations

import typer


def prepare(
    words: list[str] = typer.Argument(
        metavar="RUN [key=value]... [--flag value]...", help="A preset or a YAML file, then overrides."
    ),
    json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Read, render, mask, tokenise and pack a run's data; trains the tokenizer if the run has none."""
    from rich.console import Console
    from rich.text import Text

    from sojourn.config.load import load_run
    from sojourn.data.prepare import prepare as prepare_data
    from sojourn.data.tokenizer import load_tokenizer
    from sojourn.run.home import prepared_folder

    loaded = load_run(words)
    artefact = prepare_data(loaded.config.data, prepared_folder(), (lambda line: None) if json else print)
    report = artefact.report
    if json:
        from json import dumps

        print(dumps({"path": str(artefact.path), **artefact.facts, **report}, ensure_ascii=False))
        return
    console = Console(highlight=False, soft_wrap=True)
    tokenizer = load_tokenizer(artefact.tokenizer)
    console.print("the model will see (what it learns to say is [green]green[/green] and marked ‹…›):")
    for example in report["examples"]:
        shown, trained = Text(f"  {example['where']}  ", style="dim"), False
        for part, mask in _runs(example["ids"][:120], example["mask"]):
            trained = bool(mask)
            words_shown = tokenizer.decode(part, skip_special_tokens=False).replace("\n", "⏎")
            shown.append(f"‹{words_shown}›" if trained else words_shown, style="green" if trained else "")
        console.print(shown)
    for split in ("train", "eval"):
        facts = report[split]
        if facts["documents"]:
            console.print(
                f"{split}: {facts['documents']:,} documents, {facts['tokens']:,} tokens "
                f"({facts['trained_tokens']:,} trained on), "
                f"{facts['rows']:,} rows of {artefact.max_length} ({facts['fill']:.1%} full), "
                f"{facts['bytes'] / facts['tokens']:.2f} bytes a token"
            )
    cut = report["train"]
    if cut["truncated_chats"] or cut["dropped_chats"] or cut["split_documents"]:
        console.print(
            f"longer than {artefact.max_length} tokens: {cut['split_documents']} texts split, "
            f"{cut['truncated_chats']} chats cut, "
            f"{cut['dropped_chats']} chats left out (raise data.max_length to keep them whole)"
        )
    console.print(f"in {artefact.path}")


def _runs(ids: list[int], mask: list[int]) -> list[tuple[list[int], int]]:
    """Neighbouring tokens with the same mask, together."""
    found: list[tuple[list[int], int]] = []
    for token, trained in zip(ids, mask, strict=False):
        if not found or found[-1][1] != trained:
            found.append(([], trained))
        found[-1][0].append(token)
    return found
