"""`sojourn report RUN`: a run as one HTML file that opens anywhere: curves, settings, samples, events, no script."""

from __future__ import annotations

import functools
import re
import time
from html import escape
from pathlib import Path
from typing import Any

from sojourn.board import details
from sojourn.board.chinese import localized
from sojourn.board.series import RunSeries
from sojourn.plot.lines import legend, lines_svg
from sojourn.run.folder import RunFolder
from sojourn.run.listing import summarize

_POINTS = 600
_MOST_SAMPLES, _MOST_EVENTS = 20, 200
_CHARTS = (
    ("loss", ("loss", "eval/loss")), ("lr", ("lr",)), ("grad_norm", ("grad_norm",)), ("speed", ("tokens_per_second",)),
    ("mfu", ("mfu",)), ("memory", ("memory", "memory_reserved")), ("cost", ("spent", "projected")),
)  # fmt: skip
_TEXTS = {
    "en": {
        "state": "state", "step": "step", "loss": "Loss", "time": "time", "cost": "Cost", "lr": "Learning rate",
        "grad_norm": "Gradient norm", "speed": "Tokens per second", "mfu": "Model FLOPs utilization",
        "memory": "Memory, GiB", "settings": "Settings", "auto": "What auto became", "environment": "Environment",
        "samples": "Samples", "events": "Events", "command": "Command", "made": "made by Sojourn",
        "training": "training", "held_out": "held-out", "last_loss": "last loss", "best_loss": "best held-out loss",
    },
    "zh": {
        "state": "状态", "step": "步数", "loss": "损失", "time": "用时", "cost": "费用", "lr": "学习率",
        "grad_norm": "梯度范数", "speed": "每秒 token 数", "mfu": "算力利用率 (MFU)", "memory": "显存（GiB）",
        "settings": "设置", "auto": "自动选择的结果", "environment": "环境", "samples": "生成样例", "events": "事件",
        "command": "命令", "made": "由 Sojourn 生成", "training": "训练", "held_out": "验证",
        "last_loss": "最新损失", "best_loss": "最佳验证损失", "state_starting": "启动中", "state_running": "运行中",
        "state_stopped": "已停止", "state_done": "已完成", "state_failed": "失败", "state_unknown": "未知",
    },
}  # fmt: skip
LANGUAGES = tuple(_TEXTS)
_MORE_NAMES = {
    "fact_step": "步数",
    "fact_message": "说明",
    "fact_why": "原因",
    "fact_now": "改为",
    "fact_error": "错误",
}
_STYLE = """
:root { color-scheme: light dark; --text: light-dark(#1f2423, #e4e7e5); --faint: light-dark(#5d6763, #98a29e);
  --line: light-dark(#e2e5e1, #323838); --ground: light-dark(#fdfdfc, #17191a); }
body { font: 15px/1.6 system-ui, "Noto Sans", "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC", sans-serif;
  color: var(--text); background: var(--ground); max-width: 76rem; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-weight: 600; font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 2.2rem 0 0.6rem; }
dl.facts { display: flex; flex-wrap: wrap; gap: 0.5rem 2rem; margin: 1rem 0; } dl.facts div { min-width: 6rem; }
dt { color: var(--faint); font-size: 0.82rem; } dd { margin: 0; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem 2rem; }
figure { margin: 0; } figcaption { font-weight: 600; font-size: 0.92rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--faint); font-size: 14px; } .grid { stroke: var(--line); }
.legend { margin: 0; display: flex; gap: 1rem; color: var(--faint); font-size: 0.82rem; }
.legend i { display: inline-block; width: 0.8rem; height: 0.2rem; margin-right: 0.35rem; vertical-align: middle; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; }
td { border-top: 1px solid var(--line); padding: 0.25rem 0.75rem 0.25rem 0; vertical-align: top;
  overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.85rem; border-left: 3px solid var(--line);
  padding-left: 1rem; margin: 0.4rem 0 1rem; }
details > summary { cursor: pointer; font-weight: 600; margin: 1.6rem 0 0.4rem; }
footer { color: var(--faint); font-size: 0.82rem; margin: 3rem 0 1rem; }
"""


def report_html(run: RunFolder, language: str = "en") -> str:
    texts = _TEXTS[language]
    series = RunSeries(run.metrics)
    series.update()
    known = details.details(run)
    name = escape(run.path.name)
    parts = [
        f"<h1>{name}</h1>",
        _facts(run, series, texts),
        f'<div class="charts">{"".join(_chart(series, title, keys, texts) for title, keys in _CHARTS)}</div>',
        f"<h2>{texts['command']}</h2><pre>{escape(known['command'])}</pre>",
        _samples(run, texts),
        _table(texts["auto"], [_choice(key, one, language) for key, one in known["auto"].items()], opened=True),
        _table(texts["settings"], [(key, value) for key, value in _flat(known["config"])]),
        _table(texts["environment"], [(key, value) for key, value in _flat(known["environment"])]),
        _table(texts["events"], [_event(one, language) for one in details.events(run)[-_MOST_EVENTS:]]),
    ]
    lang = "zh-CN" if language == "zh" else "en"
    return (
        f'<!doctype html>\n<html lang="{lang}"><head><meta charset="utf-8"><title>{name}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}"
        f"<footer>{texts['made']} · {time.strftime('%Y-%m-%d %H:%M')}</footer></body></html>\n"
    )


def _facts(run: RunFolder, series: RunSeries, texts: dict[str, str]) -> str:
    from sojourn.config.quantities import Duration

    summary = summarize(run)
    held_out = series.chart("eval/loss", "step", _POINTS)[1]
    facts = [
        (texts["state"], texts.get(f"state_{summary.state}", summary.state)),
        (texts["step"], f"{summary.step:,} / {summary.total_steps:,}"),
        (texts["last_loss"], "" if summary.loss is None else f"{summary.loss:.4f}"),
        (texts["best_loss"], f"{min(held_out):.4f}" if held_out else ""),
        (texts["time"], str(Duration(round(summary.seconds)))),
        (texts["cost"], f"{summary.money:.2f} {summary.currency}" if summary.money else ""),
    ]
    cells = (f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts if value)
    return f'<dl class="facts">{"".join(cells)}</dl>'


def _chart(series: RunSeries, title: str, keys: tuple[str, ...], texts: dict[str, str]) -> str:
    names = {"loss": texts["training"], "eval/loss": texts["held_out"]} if title == "loss" else {}
    lines = []
    for key in keys:
        xs, ys = series.chart(key, "step", _POINTS)
        if xs:
            values = [y / 2**30 for y in ys] if title == "memory" else ys
            lines.append((names.get(key, key), list(zip(xs, values, strict=True))))
    if not lines:
        return ""
    marks = legend([name for name, _ in lines]) if len(lines) > 1 else ""
    return f"<figure><figcaption>{texts[title]}</figcaption>{lines_svg(texts[title], lines)}{marks}</figure>"


def _samples(run: RunFolder, texts: dict[str, str]) -> str:
    found = details.samples(run)[-_MOST_SAMPLES:]
    if not found:
        return ""
    blocks = []
    for one in found:
        prompt, text = escape(str(one["prompt"])), escape(str(one["text"]))
        blocks.append(f"<p>{texts['step']} {escape(str(one['step']))}</p><pre>{prompt}\n→ {text}</pre>")
    return f"<h2>{texts['samples']}</h2>{''.join(blocks)}"


def _choice(key: str, one: dict[str, str], language: str) -> tuple[str, ...]:
    return key, one["value"], localized(one["reason"], language)


def _event(one: dict[str, Any], language: str) -> tuple[str, ...]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["time"])) if isinstance(one.get("time"), float) else ""
    names, kind = _names(language), str(one.get("kind", ""))
    facts = {names.get(f"fact_{key}", key): value for key, value in one.items() if key not in ("time", "kind")}
    rest = " · ".join(f"{key} {localized(str(value), language)}" for key, value in facts.items())
    return when, names.get(f"event_{kind}", kind), rest


@functools.cache
def _names(language: str) -> dict[str, str]:
    """Of events and what is known of them, as the page has them; in English those of the files."""
    if language == "en":
        return {}
    text = Path(__file__).with_name("page").joinpath(f"{language}.js").read_text(encoding="utf-8")
    return {**dict(re.findall(r'\b((?:event|fact)_\w+): "([^"]*)"', text)), **_MORE_NAMES}


def _table(title: str, rows: list[tuple[Any, ...]], opened: bool = False) -> str:
    if not rows:
        return ""
    cells = ("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<details{' open' if opened else ''}><summary>{title}</summary><table>{''.join(cells)}</table></details>"


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{key}.")
        elif value not in (None, [], ""):
            found.append((f"{prefix}{key}", value))
    return found
