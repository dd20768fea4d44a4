"""Vast.ai: a market of other people's machines. An offer is one machine; renting it accepts the "ask" with its id."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn
from urllib.parse import quote

from sojourn.errors import UserError
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

_IMAGE = "vastai/pytorch:@vastai-automatic-tag"  # the tag that fits the machine's driver
_SMALLEST_DISK_GB = 8
_MOST_OFFERS = 100
_STATES: dict[str, State] = {
    "created": "creating",
    "loading": "creating",
    "rebooting": "creating",
    "running": "running",
    "stopped": "stopped",
    "frozen": "stopped",
    "exited": "failed",
    "offline": "failed",
}


class Vast:
    name, title, currency, can_stop = "vast", "Vast", "USD", True
    deletes = (
        "stop keeps the disk, which goes on costing money, and the GPU may be gone when it starts again; "
        "release deletes everything; 48 h after the end of its contract the host may delete it too"
    )
    base_url = "https://console.vast.ai"

    def __init__(self, token: str, base_url: str | None = None, *, sleep: Sleep | None = None,
                 timeout: float = 30.0) -> None:  # fmt: skip
        headers = {"Authorization": f"Bearer {token}"}
        self._api = HttpApi(self.title, base_url or self.base_url, headers, token, sleep=sleep, timeout=timeout)

    def offers(self, gpu: str | None = None, count: int = 1, spot: bool = False) -> list[Offer]:
        """The cheapest machines of verified hosts that have a port for SSH of their own."""
        wanted: dict[str, Any] = {
            "verified": {"eq": True},
            "rentable": {"eq": True},
            "rented": {"eq": False},
            "num_gpus": {"eq": count},
            "direct_port_count": {"gte": 1},
            "order": [["dph_total", "asc"]],
            "limit": _MOST_OFFERS,
            **({"type": "bid"} if spot else {}),
            **_memory_of(gpu),
        }
        answer = self._call(self._api.query, "/api/v0/bundles/", wanted)
        found = [_offer(row, spot) for row in as_dicts(as_dict(answer).get("offers"))]
        return [offer for offer in found if offer and is_named(offer.gpu, gpu)]

    def create(
        self, offer: Offer, name: str, disk_gb: int, image: str | None = None, public_key: str | None = None
    ) -> Instance:
        body = {
            "image": image or _IMAGE,
            "label": name,
            "disk": max(_SMALLEST_DISK_GB, disk_gb),
            "runtype": "ssh_direct",
            "target_state": "running",
            "cancel_unavail": True,
            **({"price": offer.price_per_hour} if offer.spot else {}),
        }

        def order() -> str:
            made = self._call(self._api.order, "PUT", f"/api/v0/asks/{quote(offer.id, safe='')}/", body)
            if not (contract := as_text(as_dict(made).get("new_contract"))):
                raise OutcomeUnknown(f"{self.title}: the answer to create has no instance id")
            return contract

        made = create_once(self._api, name, order, self.list_instances)
        if public_key:
            self._attach(made, public_key)
        return Instance(self.name, made, name, "creating", price_per_hour=offer.price_per_hour, currency=self.currency,
                        gpu=offer.gpu, count=offer.count)  # fmt: skip

    def start(self, instance_id: str) -> None:
        self._call(self._api.change, "PUT", _path(instance_id), {"state": "running"})

    def stop(self, instance_id: str) -> None:
        self._call(self._api.change, "PUT", _path(instance_id), {"state": "stopped"})

    def release(self, instance_id: str) -> None:
        with suppress(NotFound):
            self._call(self._api.change, "DELETE", _path(instance_id))

    def status(self, instance_id: str) -> Instance:
        found = as_dict(as_dict(self._call(self._api.get, _path(instance_id))).get("instances"))
        if not found:
            raise NotFound(f"{self.title}: no instance {instance_id}; see sojourn cloud status vast")
        return self._instance({"id": instance_id, **found})

    def balance(self) -> Balance:
        found = as_dict(self._call(self._api.get, "/api/v0/users/current/"))
        paid = found.get("credit", found.get("balance"))
        return Balance(None if paid is None else as_number(paid), self.currency)

    def list_instances(self) -> list[Instance]:
        found: list[Instance] = []
        after: str | None = None
        for _ in range(100):
            asked = {"after_token": after} if after else None
            answer = as_dict(self._call(self._api.get, "/api/v1/instances/", asked))
            found += [self._instance(row) for row in as_dicts(answer.get("instances"))]
            after = as_text(answer.get("next_token"))
            if not after:
                break
        return found

    def _attach(self, instance_id: str, public_key: str) -> None:
        try:
            self._call(self._api.change, "POST", f"{_path(instance_id)}ssh/", {"ssh_key": public_key})
        except (ApiError, NotFound) as error:
            if "already" in str(error).lower():
                return
            release = f"sojourn cloud release {self.name} {instance_id}"
            raise UserError(f"{error}; {instance_id} exists, but your key is not on it; to end it: {release}") from None

    def _instance(self, row: dict[str, Any]) -> Instance:
        """Its own port 22 where it is mapped, else Vast's proxy. Without a status it is being set up."""
        word = as_text(row.get("actual_status"))
        state = _STATES.get(word, "unknown") if word else "creating"
        if state == "creating" and row.get("intended_status") == "stopped":
            state = "stopped"
        ports = as_dicts(as_dict(row.get("ports")).get("22/tcp"))
        own = as_text(ports[0].get("HostPort")) if ports else ""
        address, port = (row.get("public_ipaddr"), own) if own else (row.get("ssh_host"), row.get("ssh_port"))
        said = f": {as_text(row.get('status_msg'))}" if state == "failed" else ""
        return Instance(
            self.name, as_text(row.get("id")), as_text(row.get("label")), state,
            address=as_text(address).strip() or None, port=as_port(port), currency=self.currency,
            price_per_hour=as_number(row.get("dph_total")) or None, gpu=_card(row),
            count=int(as_number(row.get("num_gpus"))), message=self._api.clean((word or "being set up") + said),
        )  # fmt: skip

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Some refusals come as HTTP 200 with success = false."""
        try:
            answer = call(*arguments)
        except ApiError as error:
            self._refuse(error)
        if isinstance(answer, dict) and answer.get("success") is False:
            self._refuse(ApiError(f"{self.title}: {self._api.clean(said_by(answer) or 'refused')}", 400, answer))
        return answer

    def _refuse(self, error: ApiError) -> NoReturn:
        if isinstance(error, (OutcomeUnknown, Unreachable)):
            raise error
        said = self._api.clean(said_by(error.values)) or str(error)
        text = f"{as_dict(error.values).get('error', '')} {said}".lower()
        if error.status == 401 or "auth_error" in text:
            raise wrong_token(self.title, "https://cloud.vast.ai/manage-keys", "VAST_API_KEY") from None
        if "no_such_ask" in text or error.status == 410:
            raise OutOfStock(f"{self.title}: the offer is gone: {said}; see sojourn cloud offers vast") from None
        if any(word in text for word in ("credit", "billing", "balance", "missing_billing")):
            raise AccountBlocked(f"{self.title}: not enough money in the account: {said}") from None
        if any(word in text for word in ("verify", "verified", "email", "quota", "limit")) and error.status in (
            400,
            403,
        ):
            raise AccountBlocked(f"{self.title}: the account may not rent this: {said}") from None
        if error.status == 404 or "no_such_instance" in text:
            raise NotFound(f"{self.title}: no such instance: {said}; see sojourn cloud status vast") from None
        raise error


def _card(row: dict[str, Any]) -> str | None:
    memory = as_number(row.get("gpu_ram")) / 1024
    name = as_text(row.get("gpu_name")).replace("_", " ")
    return catalogue_name(name, memory or None) if name else None


def _memory_of(gpu: str | None) -> dict[str, Any]:
    """A filter by memory keeps the many offers of other cards away; Vast's names of cards are not the catalogue's."""
    from sojourn.catalog.gpus import find_gpu

    if gpu is None:
        return {}
    with suppress(UserError):
        megabytes = find_gpu(gpu).memory_gib * 1024
        return {"gpu_ram": {"gte": round(0.85 * megabytes), "lte": round(1.1 * megabytes)}}
    return {}


def _offer(row: dict[str, Any], spot: bool) -> Offer | None:
    price, card = as_number(row.get("dph_total")), _card(row)
    ask, count = as_text(row.get("id")), int(as_number(row.get("num_gpus"))) or 1
    if not ask or price <= 0 or card is None:
        return None
    hours = as_number(row.get("duration")) / 3600
    notes = [f"reliability {as_number(row.get('reliability2', row.get('reliability'))):.3f}"]
    notes += [f"for at most {hours / 24:.0f} days"] if hours else []
    region = as_text(row.get("geolocation"))
    return Offer("vast", ask, card, count, round(price, 4), "USD", region, spot, True, "; ".join(notes))


def _path(instance_id: str) -> str:
    return f"/api/v0/instances/{quote(instance_id, safe='')}/"
