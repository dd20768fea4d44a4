"""Lambda's cloud: virtual machines by type and region. They cannot be stopped, only released."""

from __future__ import annotations

import hashlib
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
    as_text,
    catalogue_name,
    is_named,
    wrong_token,
)
from sojourn.remote.platforms.http_api import ApiError, HttpApi, OutcomeUnknown, Sleep, Unreachable, said_by
from sojourn.remote.platforms.renting import create_once

_STATES: dict[str, State] = {
    "booting": "creating",
    "active": "running",
    "unhealthy": "failed",
    "preempted": "failed",
    "terminating": "released",
    "terminated": "released",
}
_BLOCKED = {
    "global/account-inactive": "the account is not active",
    "global/invalid-address": "the billing address is not valid",
    "global/quota-exceeded": "the account's quota is used up",
}


class LambdaCloud:
    name, title, currency, can_stop = "lambda", "Lambda", "USD", False
    deletes = "it cannot be stopped; release deletes everything but filesystems under /lambda/nfs"
    base_url = "https://cloud.lambda.ai"

    def __init__(self, token: str, base_url: str | None = None, *, sleep: Sleep | None = None,
                 timeout: float = 30.0) -> None:  # fmt: skip
        headers = {"Authorization": f"Bearer {token}"}
        self._api = HttpApi(self.title, base_url or self.base_url, headers, token, sleep=sleep, timeout=timeout)

    def offers(self, gpu: str | None = None, count: int = 1, spot: bool = False) -> list[Offer]:
        if spot:
            return []
        kinds = as_dict(self._call(self._api.get, "/api/v1/instance-types"))
        found = [offer for kind in as_dicts(list(kinds.values())) for offer in _offers(kind)]
        return [offer for offer in found if offer.count == count and is_named(offer.gpu, gpu)]

    def create(
        self, offer: Offer, name: str, disk_gb: int, image: str | None = None, public_key: str | None = None
    ) -> Instance:
        """The disk has the size of the type; `image` is an image's id."""
        kind, _, region = offer.id.partition("@")
        if not region:
            raise OutOfStock(f"{self.title}: {kind} is in no region now; see sojourn cloud offers lambda")
        body = {
            "region_name": region,
            "instance_type_name": kind,
            "ssh_key_names": [self._key_name(public_key)],
            "name": name,
            **({"image": {"id": image}} if image else {}),
        }

        def order() -> str:
            made = self._call(self._api.order, "POST", "/api/v1/instance-operations/launch", body)
            ids = as_dict(made).get("instance_ids")
            if not isinstance(ids, list) or not ids or not as_text(ids[0]):
                raise OutcomeUnknown(f"{self.title}: the answer to create has no instance id")
            return as_text(ids[0])

        made = create_once(self._api, name, order, self.list_instances)
        return Instance(self.name, made, name, "creating", user="ubuntu", price_per_hour=offer.price_per_hour,
                        currency=self.currency, gpu=offer.gpu, count=offer.count)  # fmt: skip

    def start(self, instance_id: str) -> None:
        raise UserError(f"{self.title}: an instance that exists runs; create one with sojourn cloud create lambda")

    def stop(self, instance_id: str) -> None:
        release = f"sojourn cloud release lambda {instance_id}"
        raise UserError(f"{self.title} cannot stop an instance, only release it, with everything on it: {release}")

    def release(self, instance_id: str) -> None:
        with suppress(NotFound):
            body = {"instance_ids": [instance_id]}
            self._call(self._api.change, "POST", "/api/v1/instance-operations/terminate", body)

    def status(self, instance_id: str) -> Instance:
        return self._instance(as_dict(self._call(self._api.get, f"/api/v1/instances/{quote(instance_id, safe='')}")))

    def balance(self) -> Balance:
        return Balance(
            None, self.currency, "its API does not tell the balance: https://cloud.lambda.ai/settings/billing"
        )

    def list_instances(self) -> list[Instance]:
        return [self._instance(row) for row in as_dicts(self._call(self._api.get, "/api/v1/instances"))]

    def _key_name(self, public_key: str | None) -> str:
        """The name, in the account, of our key; it is added there the first time."""
        keys = [key for key in as_dicts(self._call(self._api.get, "/api/v1/ssh-keys")) if as_text(key.get("name"))]
        if public_key is None:
            if len(keys) == 1:
                return as_text(keys[0]["name"])
            raise UserError(f"{self.title}: the account has {len(keys)} SSH keys, and none was named")
        for key in keys:
            if as_text(key.get("public_key")).split()[:2] == public_key.split()[:2]:
                return as_text(key["name"])
        name = f"sojourn-{hashlib.sha256(public_key.encode()).hexdigest()[:12]}"
        self._call(self._api.change, "POST", "/api/v1/ssh-keys", {"name": name, "public_key": public_key})
        return name

    def _instance(self, row: dict[str, Any]) -> Instance:
        word = as_text(row.get("status"))
        offer = next(iter(_offers({"instance_type": row.get("instance_type")})), None)
        return Instance(
            self.name, as_text(row.get("id")), as_text(row.get("name")), _STATES.get(word, "unknown"), user="ubuntu",
            address=as_text(row.get("ip")) or None, price_per_hour=offer.price_per_hour if offer else None,
            currency=self.currency, gpu=offer.gpu if offer else None, count=offer.count if offer else 0,
            message=self._api.clean(word),
        )  # fmt: skip

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            answer = call(*arguments)
        except ApiError as error:
            self._refuse(error)
        if not isinstance(answer, dict) or "data" not in answer:
            raise OutcomeUnknown(f"{self.title}: an answer without data: is this address Lambda's API?")
        return answer["data"]

    def _refuse(self, error: ApiError) -> NoReturn:
        if isinstance(error, (OutcomeUnknown, Unreachable)):
            raise error
        code = as_text(as_dict(as_dict(error.values).get("error")).get("code"))
        said = self._api.clean(said_by(error.values)) or str(error)
        if error.status == 401 or code == "global/invalid-api-key":
            raise wrong_token(self.title, "https://cloud.lambda.ai/api-keys", "LAMBDA_API_KEY") from None
        if code.endswith("/insufficient-capacity"):
            raise OutOfStock(f"{self.title}: out of stock: {said}; see sojourn cloud offers lambda") from None
        if code in _BLOCKED or error.status == 403:
            raise AccountBlocked(f"{self.title}: {_BLOCKED.get(code, 'the account may not do that')}: {said}") from None
        if code == "global/object-does-not-exist" or error.status == 404:
            raise NotFound(f"{self.title}: {said}; see sojourn cloud status lambda") from None
        raise error


def _offers(kind: dict[str, Any]) -> list[Offer]:
    """One for each region that has the type now; one that is not available where none has."""
    facts = as_dict(kind.get("instance_type"))
    name, count = as_text(facts.get("name")), int(as_number(as_dict(facts.get("specs")).get("gpus")))
    if not name or not count:
        return []
    card = catalogue_name(as_text(facts.get("gpu_description")) or name)
    price = as_number(facts.get("price_cents_per_hour")) / 100
    regions = [as_text(one.get("name")) for one in as_dicts(kind.get("regions_with_capacity_available"))]
    there = [(f"{name}@{region}", region, True) for region in regions] or [(name, "", False)]
    return [Offer("lambda", i, card, count, price, "USD", region=region, available=free) for i, region, free in there]
