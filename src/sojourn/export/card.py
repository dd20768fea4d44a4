"""The model card, README.md: what the model is, where it comes from, what it cost, how it was checked."""

from __future__ import annotations

import json
from typing import Any

from sojourn.export.formats import Format
from sojourn.export.quantize.table import markdown

_LIBRARIES = {
    "hf": "transformers",
    "gguf": "gguf",
    "gguf-adapter": "gguf",
    "onnx": "onnx",
    "mlx": "mlx",
    "vllm": "vllm",
    "vllm-adapter": "peft",
    "quantized": "transformers",
    "compressed-tensors": "vllm",
}
_RUN: dict[str, str] = {
    "hf": """from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")
""",
    "quantized": """from transformers import AutoModelForCausalLM, AutoTokenizer  # with torchao or bitsandbytes

model = AutoModelForCausalLM.from_pretrained(".", dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained(".")
""",
    "compressed-tensors": "vllm serve . --served-model-name {name}\n",
    "gguf": "llama-cli -m *.gguf -p \"Hello\"\nollama create {name} -f Modelfile && ollama run {name}\n",
    "gguf-adapter": "llama-cli -m BASE.gguf --lora *.gguf -p \"Hello\"\n",
    "onnx": "python -c 'import onnxruntime_genai as og; model = og.Model(\".\")'\n",
    "mlx": "mlx_lm.generate --model . --prompt \"Hello\"\n",
    "vllm": "vllm serve . --served-model-name {name}\n",
    "vllm-adapter": "vllm serve BASE --enable-lora --lora-modules {name}=. --max-lora-rank RANK --tokenizer .\n",
}  # fmt: skip
_MEASURED_WHOLLY = 0.95  # of the training time: the GPUs are not read before torch is imported


def model_card(
    name: str, format: Format, quantization: str, lineage: dict[str, Any], found: dict[str, Any], files: dict[str, Any]
) -> str:
    """`found`: of the gate (what was replayed, and what it found), and what was measured, if anything."""
    sections = [
        _front_matter(format, lineage),
        f"# {name}\n",
        _intro(format, quantization, lineage, files),
        _run(name, format, any(file.endswith(".py") for file in files)),
        _table("Lineage", _lineage_rows(lineage)),
        _table("Figures", [(key.replace("_", " "), f"{value:.4f}") for key, value in _of(lineage, "figures").items()]),
        _table("Cost", _cost_rows(_of(lineage, "cost"))),
        markdown(found["measured"], quantization) if "measured" in found else "",
        _parity(found["gate"]),
        _settings(lineage),
    ]
    return "\n".join(section for section in sections if section)


def _of(lineage: dict[str, Any], key: str) -> dict[str, Any]:
    found = lineage.get(key)
    return found if isinstance(found, dict) else {}


def _front_matter(format: Format, lineage: dict[str, Any]) -> str:
    """What the hub reads. A base of this machine has no page there."""
    base = lineage.get("base")
    lines = ["---", f"library_name: {_LIBRARIES[format.name]}", "pipeline_tag: text-generation"]
    if isinstance(base, str) and base.count("/") == 1:
        lines += [f"base_model: {json.dumps(base)}"]
    return "\n".join([*lines, "---", ""])


def _intro(format: Format, quantization: str, lineage: dict[str, Any], files: dict[str, Any]) -> str:
    size = sum(facts["size"] for facts in files.values()) / 2**30
    what = {"hf": "Hugging Face", "gguf": "GGUF", "gguf-adapter": "GGUF adapter", "onnx": "ONNX", "mlx": "MLX"}
    kind = "" if quantization == "auto" else f", {quantization}"
    run = f" of the run {lineage['run']}" if lineage.get("run") else ""
    step = f" at step {lineage['step']:,}" if isinstance(lineage.get("step"), int) else ""
    base = f", from {lineage['base']}" if lineage.get("base") else ""
    return f"{what.get(format.name, format.name)} export{kind}{run}{step}{base}. {size:.2f} GiB.\n"


def _run(name: str, format: Format, runs_code: bool) -> str:
    """`runs_code`: the model's own."""
    language = "python" if format.name in ("hf", "quantized") else "bash"
    line = _RUN[format.name].format(name=name)
    if runs_code:
        line = line.replace('LM.from_pretrained(".")', 'LM.from_pretrained(".", trust_remote_code=True)')
    before = "This runs the Python files in this folder: read them first.\n\n" if runs_code else ""
    return f"## Run it\n\n{before}```{language}\n{line}```\n"


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    body = "\n".join(f"| {_cell(key)} | {_cell(value)} |" for key, value in rows)
    return f"## {title}\n\n| | |\n|---|---|\n{body}\n"


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def _lineage_rows(lineage: dict[str, Any]) -> list[tuple[str, str]]:
    adapters = ", ".join(f"{one['name']} × {one['weight']:g}" for one in lineage.get("adapters", []))
    names = {
        "base": lineage.get("base"), "adapters": adapters, "combined by": lineage.get("combine"),
        "run": lineage.get("run"), "run id": lineage.get("run_id"), "step": lineage.get("step"),
        "data (hash)": lineage.get("data"), "trained on": lineage.get("trained_on"),
        "versions": ", ".join(f"{key} {value}" for key, value in _of(lineage, "versions").items() if value),
    }  # fmt: skip
    return [(key, str(value)) for key, value in names.items() if value]


def _cost_rows(cost: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if "seconds" in cost:
        rows.append(("training time", f"{cost['seconds'] / 3600:.2f} h"))
    if "money" in cost:
        rows.append(("price", f"{cost['money']:.2f} {cost.get('currency', '')}".strip()))
    return [*rows, ("energy of the GPUs", _energy(cost))] if rows else []


def _energy(cost: dict[str, Any]) -> str:
    """A run that was continued on another machine may have been measured in part."""
    measured, seconds = cost.get("energy_seconds", 0.0), cost.get("seconds", 0.0)
    if not measured:
        return "not measured"
    hours = cost.get("energy_joules", 0.0) / 3600
    amount = f"{hours / 1000:.2f} kWh" if hours >= 1000 else f"{hours:.3g} Wh"
    if measured >= _MEASURED_WHOLLY * seconds:
        return amount
    return f"at least {amount} (measured for {measured / 3600:.2f} h)"


def _parity(gate: dict[str, Any]) -> str:
    replay = gate.get("replay")
    lines = [f"- {note}" for note in gate.get("notes", [])]
    if isinstance(replay, dict):
        shown = {key: value for key, value in (replay.get("figures") or {}).items() if isinstance(value, (int, float))}
        figures = ", ".join(f"{key} {value:.3g}" for key, value in shown.items())
        lines.insert(
            0, f"- Replayed in {replay.get('runtime')} beside its source, before it was put in place: {figures}."
        )
    else:
        lines.insert(0, "- Not replayed: no program that runs this format was at hand.")
    lines.append("- Check it again at any time: `sojourn verify DIR`.")
    return "## Parity\n\n" + "\n".join(lines) + "\n"


def _settings(lineage: dict[str, Any]) -> str:
    config = lineage.get("config")
    if not config:
        return ""
    return f"## Settings\n\n```json\n{json.dumps(config, indent=2, ensure_ascii=False)}\n```\n"
