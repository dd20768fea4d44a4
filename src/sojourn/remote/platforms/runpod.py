"""RunPod's REST API, version 2 (version 1 is retired at the end of 2026). It rents on-demand pods only, no spot ones;
the balance alone is asked of its GraphQL API."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn
from urllib.parse import quote

from sojourn.remote.platforms.base import (
    AccountBlocked,
    Balance,
    Instance,
    NotFound,
    Offer,
    OutOfStock,
    State,
    as_dict,
    as_dicts,
    as_number,
    as_port,
    as_text,
    catalogue_name,
    is_named,
    wrong_token,
)
from sojourn.remote.platforms.http_api import ApiError, HttpApi, OutcomeUnknown, Sleep, Unreachable, said_by
from sojourn.remote.platforms.renting import create_once

_IMAGE = "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404"  # starts an SSH server with the key in PUBLIC_KEY
_CONTAINER_GB = 30  # wiped at every stop; ours is the volume at /workspace
_SMALLEST_VOLUME_GB = 10
_CLOUDS = ("secure", "community")
_STATES: dict[str, State] = {
    "PROVISIONING": "creating",
    "STARTING": "creating",
    "RUNNING": "running",
    "EXITED": "stopped",
    "ERROR": "failed",
    "TERMINATED": "released",
}
_NO_PLACE = (
    "no longer any instances",
    "no instances",
    "capacity",
    "not available",
    "unavailable",
    "could not be placed",
)


class RunPod:
    name, title, currency, can_stop = "runpod", "RunPod", "USD", True
    deletes = "stop deletes all but /workspace; release deletes that too; at a balance of $0 RunPod releases the pod"
    base_url = "https://api.runpod.io"

    def __init__(self, token: str, base_url: str | None = None, *, sleep: Sleep | None = None,
                 timeout: float = 30.0) -> None:  # fmt: skip
        headers = {"Authorization": f"Bearer {token}"}
        self._api = HttpApi(self.title, base_url or self.base_url, headers, token, sleep=sleep, timeout=timeout)

    def offers(self, gpu: str | None = None, count: int = 1, spot: bool = False) -> list[Offer]:
        if spot:
            return []
        found = []
        for cloud in _CLOUDS:
            asked = {"include": "AVAILABILITY", "product": "POD", "count": str(count), "cloud": cloud.upper()}
            answer = self._call(self._api.get, "/v2/catalog/gpus", asked)
            rows = [row for row in as_dicts(as_dict(answer).get("gpus")) if row.get(cloud)]
            found += [offer for row in rows if (offer := _offer(row, cloud, count)) and is_named(offer.gpu, gpu)]
        return found

    def create(
        self, offer: Offer, name: str, disk_gb: int, image: str | None = None, public_key: str | None = None
    ) -> Instance:
        cloud, _, gpu = offer.id.partition(":")
        body = {
            "name": name,
            "image": image or _IMAGE,
            "cloud": cloud.upper(),
            "gpu": {"id": gpu, "count": offer.count},
            "disk": _CONTAINER_GB,
            "mounts": {"persistent": {"size": max(_SMALLEST_VOLUME_GB, disk_gb), "path": "/workspace"}},
            "ports": ["22/tcp"],
            "startSsh": True,
            "env": {"PUBLIC_KEY": public_key} if public_key else {},
        }

        def order() -> str:
            made = self._call(self._api.order, "POST", "/v2/pods", body)
            if not (pod := as_text(as_dict(made).get("id"))):
                raise OutcomeUnknown(f"{self.title}: the answer to create has no pod id")
            return pod

        made = create_once(self._api, name, order, self.list_instances)
        return Instance(self.name, made, name, "creating", currency=self.currency, gpu=offer.gpu, count=offer.count)

    def start(self, instance_id: str) -> None:
        self._call(self._api.change, "POST", f"{_pod(instance_id)}/action", {"action": "start"})

    def stop(self, instance_id: str) -> None:
        self._call(self._api.change, "POST", f"{_pod(instance_id)}/action", {"action": "stop"})

    def release(self, instance_id: str) -> None:
        with suppress(NotFound):
            self._call(self._api.change, "DELETE", _pod(instance_id))

    def status(self, instance_id: str) -> Instance:
        return self._instance(as_dict(self._call(self._api.get, _pod(instance_id))))

    def balance(self) -> Balance:
        """Version 2 has no word on it."""
        try:
            answer = self._call(self._api.query, "/graphql", {"query": "query { myself { clientBalance } }"})
            amount = answer["data"]["myself"]["clientBalance"]
        except (ApiError, KeyError, TypeError):
            return Balance(
                None, self.currency, "its API does not tell the balance: https://console.runpod.io/user/billing"
            )
        return Balance(as_number(amount), self.currency)

    def list_instances(self) -> list[Instance]:
        answer = self._call(self._api.get, "/v2/pods")
        return [self._instance(row) for row in as_dicts(as_dict(answer).get("pods"))]

    def _instance(self, pod: dict[str, Any]) -> Instance:
        """`ssh.direct` is the pod's own SSH server; the proxy of RunPod carries a terminal and no files."""
        word, gpu = as_text(pod.get("status")), as_dict(pod.get("gpu"))
        direct = as_dict(as_dict(pod.get("ssh")).get("direct"))
        return Instance(
            self.name, as_text(pod.get("id")), as_text(pod.get("name")), _STATES.get(word, "unknown"),
            user=as_text(direct.get("username")) or "root", address=as_text(direct.get("host")) or None,
            port=as_port(direct.get("port")), price_per_hour=as_number(pod.get("cost")) or None, currency=self.currency,
            gpu=catalogue_name(as_text(gpu["id"])) if gpu.get("id") else None, count=int(as_number(gpu.get("count"))),
            message=self._api.clean(word.lower()),
        )  # fmt: skip

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except ApiError as error:
            self._refuse(error)

    def _refuse(self, error: ApiError) -> NoReturn:
        if isinstance(error, (OutcomeUnknown, Unreachable)):
            raise error
        said = self._api.clean(said_by(error.values)) or str(error)
        if error.status == 401:
            raise wrong_token(self.title, "https://console.runpod.io/user/settings", "RUNPOD_API_KEY") from None
        if error.status == 402:
            raise AccountBlocked(f"{self.title}: not enough money in the account: {said}") from None
        if error.status == 403:
            raise AccountBlocked(f"{self.title}: this key or account may not do that: {said}") from None
        if error.status == 404:
            raise NotFound(f"{self.title}: {said}; see sojourn cloud status runpod") from None
        if error.status == 400 and any(word in said.lower() for word in ("quota", "spend limit", "exceed")):
            raise AccountBlocked(f"{self.title}: the account's quota is used up: {said}") from None
        if error.status == 400 and any(word in said.lower() for word in _NO_PLACE):
            raise OutOfStock(f"{self.title}: out of stock: {said}; see sojourn cloud offers runpod") from None
        raise error


def _offer(row: dict[str, Any], cloud: str, count: int) -> Offer | None:
    most = int(as_number(as_dict(row.get("maxCount")).get(cloud)))
    price, kind = as_number(as_dict(row.get("price")).get(cloud)), as_text(row.get("id"))
    if not kind or price <= 0 or (most and count > most):
        return None
    card = catalogue_name(as_text(row.get("name")) or kind, as_number(row.get("memory")) or None)
    stock = as_text(row.get("availability"))
    note = f"stock: {stock.lower()}" if stock else ""
    return Offer("runpod", f"{cloud}:{kind}", card, count, round(price * count, 4), "USD", region=f"{cloud} cloud",
                 available=None if not stock else stock != "NONE", note=note)  # fmt: skip


def _pod(instance_id: str) -> str:
    return f"/v2/pods/{quote(instance_id, safe='')}"
