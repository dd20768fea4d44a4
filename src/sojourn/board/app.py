"""The routes of the board. Each calls a function; those that read many files do so in a thread."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from anyio import to_thread
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from sojourn import __version__
from sojourn.board import actions, data_sets, details, forms
from sojourn.board.chinese import localized, localized_values
from sojourn.board.guard import Guard
from sojourn.board.live_runs import KnownRun, LiveRuns
from sojourn.board.remote_copies import RemoteCopies
from sojourn.board.report import report_html
from sojourn.board.schemas import Action, Form, Tags
from sojourn.board.series import X_AXES, RunSeries, SeriesCache, Sparklines
from sojourn.board.tasks import Tasks, command_line
from sojourn.board.uploads import receive_upload
from sojourn.errors import UserError
from sojourn.run.folder import RunFolder
from sojourn.web.static import add_page

_Answer = TypeVar("_Answer")
_MOST_POINTS, _MOST_KEYS, _MOST_IDS = 4000, 40, 50
_MOST_TAIL = 1 << 20
# What people wrote for people, in answers: the keys whose texts are translated.
_OF_RUNS = frozenset({"message", "error", "phase"})
_OF_DETAILS = _OF_RUNS | {"copy_error", "reason"}
_OF_EVENTS = frozenset({"message", "error", "why", "reason", "now"})
_OF_ACTIONS = frozenset({"damage"})
_OF_PLANS = frozenset({
    "errors", "notes", "data_notes", "assumed", "assumed_vocabulary", "changes", "reason_not", "range_reason",
    "description", "error", "formats", "title",
})  # fmt: skip
_OF_DATA = frozenset({"damaged_examples", "format"})
_THREADS = 8  # that answer requests; each keeps some memory


@dataclass(frozen=True)
class Board:
    """What the routes share. `home`: SOJOURN_HOME."""

    home: Path
    runs: LiveRuns
    tasks: Tasks
    token: str
    local: bool
    series: SeriesCache
    sparklines: Sparklines
    copies: RemoteCopies
    roots: list[Path]  # below which files are shown

    @property
    def prepared(self) -> Path:
        return self.home / "prepared"


def make_board(home: Path, folders: list[Path], token: str, local: bool, ask_hosts: bool = True) -> Board:
    runs = LiveRuns([home / "runs", *folders], home / "board" / "tags.json", ask_hosts)
    ours = home / "board"
    shared = (SeriesCache(), Sparklines(), RemoteCopies(ours / "remote"))
    roots = [home.absolute(), Path.cwd(), Path.home(), *folders]
    return Board(home, runs, Tasks(ours / "tasks"), token, local, *shared, roots)


def make_app(board: Board, hosts: tuple[str, ...] = ()) -> Any:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        to_thread.current_default_thread_limiter().total_tokens = _THREADS
        await to_thread.run_sync(board.runs.start)
        yield
        board.runs.stop()

    app = FastAPI(title="Sojourn board", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_exception_handler(UserError, _user_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(OSError, _disk_error)
    app.add_exception_handler(RequestValidationError, _wrong_request)
    _add_run_routes(app, board)
    _add_other_routes(app, board)
    _add_form_routes(app, board)
    add_page(app, Path(__file__).with_name("page"), lambda name: HTTPException(404, "no such file"), "'self' blob:")
    return Guard(app, board.token, board.local, hosts)


async def _user_error(request: Request, error: Exception) -> Response:
    return _refusal(request, str(error), 400)


async def _http_error(request: Request, error: Exception) -> Response:
    return _refusal(request, str(getattr(error, "detail", error)), getattr(error, "status_code", 500))


async def _disk_error(request: Request, error: Exception) -> Response:
    """The disk of SOJOURN_HOME is full, or read-only."""
    reason, file = getattr(error, "strerror", None) or str(error), getattr(error, "filename", None)
    return _refusal(request, f"{file}: {reason}" if file else reason, 503)


def _refusal(request: Request, message: str, status: int) -> Response:
    return JSONResponse({"error": localized(message, _language(request))}, status)


def _language(request: Request) -> str:
    return request.headers.get("accept-language", "")


def _localized(answer: _Answer, keys: frozenset[str], request: Request) -> _Answer:
    return localized_values(answer, keys, _language(request))


async def _wrong_request(request: Request, error: Exception) -> Response:
    """In one line: which field, and what is wrong with it."""
    found = error.errors()[0] if isinstance(error, RequestValidationError) else {}
    where = ".".join(str(part) for part in found.get("loc", ())[1:])
    message = f"{where}: {found.get('msg', 'not valid')}" if where else str(found.get("msg", "not valid"))
    return _refusal(request, message[:300].encode(errors="replace").decode(), 400)


def _run(board: Board, run_id: str) -> KnownRun:
    found = board.runs.get(run_id)
    if found is None:
        raise HTTPException(404, f"no run is called {run_id[:100]!r}")
    return found


def _folder(board: Board, run_id: str) -> RunFolder:
    """Of a run on this machine, or of the copy of its small files."""
    run = _run(board, run_id)
    return run.folder or board.copies.folder_of(str(run.values["host"]), str(run.values["name"]))


def _add_run_routes(app: FastAPI, board: Board) -> None:
    @app.get("/api/runs")
    def list_runs(request: Request) -> dict[str, Any]:
        return _localized(board.runs.snapshot(), _OF_RUNS, request)

    @app.get("/api/sparklines")
    def sparklines(id: Annotated[list[str], Query()] = []) -> dict[str, list[float]]:  # noqa: B006
        found = {one: board.runs.get(one) for one in id[:_MOST_IDS]}
        here = {one: run.folder for one, run in found.items() if run is not None and run.folder is not None}
        return {one: board.sparklines.of(folder.metrics) for one, folder in here.items()}

    @app.post("/api/runs/{run_id}/tags")
    def tags(run_id: str, body: Tags) -> dict[str, Any]:
        return {"tags": board.runs.set_tags(_run(board, run_id).id, body.tags)}

    @app.get("/api/runs/{run_id}")
    def one_run(run_id: str, request: Request) -> dict[str, Any]:
        run = _run(board, run_id)
        folder, host = _folder(board, run_id), run.values["host"]
        values = {**run.values, "tags": board.runs.tags(run_id)}
        values["copy_error"] = board.copies.error(host, str(run.values["name"])) if host else None
        with (series := board.series.open(folder.metrics)).lock:
            known = {"metrics": series.keys(), "last_step": series.last_step}
        return _localized({**values, **details.details(folder), **known}, _OF_DETAILS, request)

    @app.get("/api/runs/{run_id}/series")
    def series(
        run_id: str, keys: str = "loss", x: str = "step", points: int = 800, low: float | None = None,
        high: float | None = None, version: int = -1,
    ) -> dict[str, Any]:  # fmt: skip
        if x not in X_AXES:
            raise HTTPException(400, f"x: {', '.join(X_AXES)}")
        found = board.series.open(_folder(board, run_id).metrics)
        with found.lock:
            if version == found.version and not found.is_partial:
                return {"unchanged": True, "version": version}
            wanted = [key for key in keys.split(",")[:_MOST_KEYS] if key]
            return {"x": x, "series": _charts(found, wanted, x, points, low, high), "keys": found.keys(),
                    "last_step": found.last_step, "version": found.version, "partial": found.is_partial}  # fmt: skip

    @app.get("/api/runs/{run_id}/series.csv")
    def series_csv(run_id: str, keys: str = "loss", x: str = "step") -> Response:
        found = board.series.open(_folder(board, run_id).metrics)
        with found.lock:
            wanted = [key for key in keys.split(",")[:_MOST_KEYS] if key]
            text = _csv(_charts(found, wanted, x if x in X_AXES else "step", 1 << 30), x)
        name = f"{run_id}.csv".encode("ascii", "replace").decode().replace('"', "_")
        return Response(text, media_type="text/csv", headers={"content-disposition": f'attachment; filename="{name}"'})

    _add_text_routes(app, board)

    @app.post("/api/runs/{run_id}/{action}")
    def act(run_id: str, action: str, body: Action, request: Request) -> dict[str, Any]:
        return _localized(actions.act(_run(board, run_id), action, body, board.tasks), _OF_ACTIONS, request)


def _charts(
    found: RunSeries, keys: list[str], x: str, points: int, low: float | None = None, high: float | None = None
) -> dict[str, dict[str, list[Any]]]:
    most = points if points >= 1 << 30 else max(10, min(points, _MOST_POINTS))
    return {key: _chart(found, key, x, most, low, high) for key in keys}


def _chart(
    found: RunSeries, key: str, x: str, most: int, low: float | None, high: float | None
) -> dict[str, list[Any]]:
    """Null where the metric was NaN: a line has a gap there."""
    xs, ys = found.chart(key, x, most, low, high)
    points: list[tuple[float, float | None]] = list(zip(xs, ys, strict=True))
    if gaps := found.gaps(key, x, most, xs[0], xs[-1]) if xs else []:
        points = sorted([*points, *((place, None) for place in gaps)], key=lambda point: point[0])
    return {"x": [place for place, _ in points], "y": [value for _, value in points]}


def _csv(charts: dict[str, dict[str, list[Any]]], x: str) -> str:
    rows: dict[float, dict[str, Any]] = {}
    for key, chart in charts.items():
        for place, value in zip(chart["x"], chart["y"], strict=True):
            rows.setdefault(place, {})[key] = value
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([x, *charts])
    writer.writerows([place, *(values.get(key, "") for key in charts)] for place, values in sorted(rows.items()))
    return text.getvalue()


def _add_text_routes(app: FastAPI, board: Board) -> None:
    @app.get("/api/runs/{run_id}/events")
    def events(run_id: str, request: Request, x: str = "step") -> dict[str, Any]:
        """With their places on an axis of the charts."""
        folder = _folder(board, run_id)
        found = details.events(folder)
        if x not in X_AXES:
            raise HTTPException(400, f"x: {', '.join(X_AXES)}")
        with (series := board.series.open(folder.metrics)).lock:
            placed = [{**one, "x": series.place(x, one.get("step"), one.get("time"))} for one in found]
        return {"events": _localized(placed, _OF_EVENTS, request)}

    @app.get("/api/runs/{run_id}/samples")
    def samples(run_id: str) -> dict[str, Any]:
        return {"samples": details.samples(_folder(board, run_id))}

    @app.get("/api/runs/{run_id}/logs")
    def logs(run_id: str, file: str | None = None, tail: int = 20_000) -> dict[str, Any]:
        return details.logs(_folder(board, run_id), _outputs(board, run_id), file, max(0, min(tail, _MOST_TAIL)))

    @app.get("/api/runs/{run_id}/report.html")
    def report(run_id: str) -> Response:
        return HTMLResponse(report_html(_folder(board, run_id)), headers={"content-disposition": "attachment"})


def _outputs(board: Board, run_id: str) -> dict[str, Path]:
    """What the commands for this run printed that the board started."""
    tasks = [task for task in board.tasks.list_all() if task["run"] == run_id]
    return {f"{task['line']} ({task['id']})": board.tasks.output_file(task["id"]) for task in tasks}


def _add_other_routes(app: FastAPI, board: Board) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/api/session")
    async def session() -> dict[str, Any]:
        home = str(board.home.absolute())
        return {"token": board.token, "version": __version__, "home": home, "now": time.time()}

    @app.get("/api/tasks")
    def tasks() -> dict[str, Any]:
        return {"tasks": board.tasks.list_all()}

    @app.get("/api/tasks/{task_id}")
    def task(task_id: str, request: Request, start: int = 0) -> dict[str, Any]:
        found = board.tasks.get(task_id)
        if found is None:
            raise HTTPException(404, "no such task")
        text, following = board.tasks.output(task_id, max(0, start), whole_lines=found["state"] == "running")
        return {**found, "text": localized(text, _language(request)), "next": following}

    @app.post("/api/tasks/{task_id}/stop")
    def stop_task(task_id: str) -> dict[str, Any]:
        if board.tasks.get(task_id) is None:
            raise HTTPException(404, "no such task")
        board.tasks.stop(task_id)
        return {"task": board.tasks.get(task_id)}

    @app.get("/api/data")
    def data() -> dict[str, Any]:
        return {"artefacts": data_sets.list_artefacts(board.prepared)}

    @app.get("/api/data/{name}")
    def artefact(name: str, request: Request) -> dict[str, Any]:
        return _localized(data_sets.report(_artefact(board, name)), _OF_DATA, request)

    @app.get("/api/data/{name}/examples")
    def examples(name: str, start: int = 0, count: int = 20, search: str = "", split: str = "train") -> dict[str, Any]:
        return data_sets.examples(_artefact(board, name), split, start, count, search[:200])


def _add_form_routes(app: FastAPI, board: Board) -> None:
    """What the page for a new run asks."""

    @app.get("/api/catalog")
    def catalogue(request: Request) -> dict[str, Any]:
        return _localized(forms.catalogue(), _OF_PLANS, request)

    @app.post("/api/form")
    def form(body: Form, request: Request) -> dict[str, Any]:
        return _localized(forms.describe(body), _OF_PLANS, request)

    @app.post("/api/plan")
    def plan(body: Form, request: Request) -> dict[str, Any]:
        return _localized(forms.plan(body), _OF_PLANS, request)

    @app.post("/api/preview")
    def preview(body: Form, request: Request) -> dict[str, Any]:
        return _localized(forms.preview(body, board.roots), _OF_PLANS, request)

    @app.post("/api/start")
    def start(body: Form) -> dict[str, Any]:
        return _start(board, body)

    @app.post("/api/upload")
    async def upload(request: Request, name: str = "") -> dict[str, Any]:
        return {"path": str(await receive_upload(request, board.home / "uploads", name))}


def _start(board: Board, form: Form) -> dict[str, Any]:
    described = forms.describe(form)
    if described["errors"]:
        raise UserError(described["errors"][0])
    words, run = ["train", *described["words"]], str(described["name"])
    if form.host:
        words, run = ["launch", *described["words"], "--on", form.host, "--detach"], f"{form.host}:{run}"
        for option, value in (("--budget", form.budget), ("--deadline", form.deadline)):
            words += [option, value] if value else []
    return {"line": command_line(words)} if form.preview else {"task": board.tasks.start(words, run)}


def _artefact(board: Board, name: str) -> Path:
    found = data_sets.find_artefact(board.prepared, name)
    if found is None:
        raise HTTPException(404, f"no prepared data is called {name[:100]!r}")
    return found
