"""The output of a run on a box: read by byte offset, so that a lost connection repeats and skips nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sojourn.remote.box_client import Box
from sojourn.remote.follow import Follower, describe_end, is_terminal, read_report
from sojourn.remote.hosts import get_host
from sojourn.remote.job import find_job, get_job
from sojourn.remote.platforms.kaggle import find_kaggle_run
from sojourn.remote.without_ssh import show_kaggle_logs


def show_logs(
    run: str, follow: bool, tail: int | None, say: Callable[[str], None], show: Callable[[bytes], None]
) -> dict[str, Any]:
    """The last report. `tail`: only so many of the lines so far."""
    if find_job(run) is None and find_kaggle_run(run) is not None:
        return show_kaggle_logs(run, follow, show)
    job = get_job(run)
    host = get_host(job.host)
    held: list[bytes] = []
    with Box(host, say=say) as box:
        follower = Follower(box, host, run, held.append if tail is not None else show)
        report = read_report(box, host, run)
        follower.show_new(str(report["phase"]))
        if tail is not None:
            lines = b"".join(held).splitlines(keepends=True)
            show(b"".join(lines[len(lines) - tail :] if tail else ()))
            follower.show = show
        if follow and not is_terminal(report):
            report = follower.until(is_terminal)
        job.seen(report)
        if follow:
            say(describe_end(run, host.name, report))
        return report
