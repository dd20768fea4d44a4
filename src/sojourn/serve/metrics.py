"""Counters and histograms in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping

from sojourn.serve.engines.base import EngineStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536)
_ENGINE = {
    "running": ("gauge", "Sequences that the engine runs."),
    "waiting": ("gauge", "Sequences that wait in the engine."),
    "kv_used": ("gauge", "KV blocks in use."),
    "kv_total": ("gauge", "KV blocks."),
    "prefix_hit_tokens": ("counter", "Prompt tokens found in the prefix cache."),
    "preemptions": ("counter", "Sequences that had to give up their KV blocks."),
}


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum:g}"
        yield f"{name}_count {total}"


class Metrics:
    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = defaultdict(int)  # by route and status
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.histograms = {
            "time_to_first_token_seconds": Histogram(_SECONDS),
            "inter_token_latency_seconds": Histogram(_SECONDS),
            "request_seconds": Histogram(_SECONDS),
            "request_prompt_tokens": Histogram(_TOKENS),
            "request_completion_tokens": Histogram(_TOKENS),
        }

    def text(self, stats: Mapping[str, EngineStats], taken: int, ready: bool) -> str:
        """`stats`: of the models that are ready, by name."""
        return "\n".join(self._lines(stats, taken, ready)) + "\n"

    def _lines(self, stats: Mapping[str, EngineStats], taken: int, ready: bool) -> Iterator[str]:
        yield from _head("requests_total", "counter", "Answered requests, by route and status.")
        for (route, status), count in sorted(self.requests.items()):
            yield f'sojourn_requests_total{{route="{_escape(route)}",status="{status}"}} {count}'
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            yield from _head(f"{name}_total", "counter", name.replace("_", " ").capitalize() + ".")
            yield f"sojourn_{name}_total {getattr(self, name)}"
        yield from _head("sequences", "gauge", "Sequences that the gateway has taken and not finished.")
        yield f"sojourn_sequences {taken}"
        yield from _head("ready", "gauge", "Whether requests are answered.")
        yield f"sojourn_ready {int(ready)}"
        for name, histogram in self.histograms.items():
            yield from _head(name, "histogram", name.replace("_", " ").capitalize() + ".")
            yield from histogram.lines(f"sojourn_{name}")
        for name, (kind, help) in _ENGINE.items():
            full = f"engine_{name}_total" if kind == "counter" else f"engine_{name}"
            values = {model: getattr(one, name) for model, one in stats.items() if getattr(one, name) is not None}
            if values:
                yield from _head(full, kind, help)
            for model, value in values.items():
                yield f'sojourn_{full}{{model="{_escape(model)}"}} {value}'


def _head(name: str, kind: str, help: str) -> Iterator[str]:
    yield f"# HELP sojourn_{name} {help}"
    yield f"# TYPE sojourn_{name} {kind}"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
