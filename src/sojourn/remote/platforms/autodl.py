"""AutoDL's API for container instances Pro. Money is in 1/1000 CNY; success is code == "Success", whatever the HTTP
status; the token is sent as it is, without "Bearer"."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sojourn.errors import UserError
from sojourn.remote.platforms.base import (
    AccountBlocked,
    Balance,
    Instance,
    NotFound,
    Offer,
    OutOfStock,
    State,
    WrongToken,
    as_dict,
    as_dicts,
    as_number,
    as_port,
    as_text,
    catalogue_name,
    is_named,
    wrong_token,
)
from sojourn.remote.platforms.http_api import ApiError, HttpApi, OutcomeUnknown, Sleep
from sojourn.remote.platforms.renting import create_once

_PRO = "/api/v1/dev/instance/pro"
_STOCK_REGIONS = ("westDC3", "beijingDC2")  # where instances Pro are
_IMAGE = "base-image-l2t43iu6uk"  # PyTorch, CUDA 11.8, Ubuntu 20.04: the newest public one that has an id
_OLDEST_CUDA = 120  # of the machine's driver: current torch needs CUDA 12
_MOST_GPUS, _MOST_DISK_GB = 4, 500
_OFF = "shutdown"
_POWER_OFF_POLLS, _POLL = 60, 5.0

_STATES: dict[str, State] = {
    "running": "running",
    _OFF: "stopped",
    "shutting_down": "stopping",
    "releasing": "released",
    "released": "released",
    "release": "released",
    "error": "failed",
    **dict.fromkeys(
        ("creating", "created", "starting", "oss_merged", "deploying_image", "re_initializing"), "creating"
    ),
}


@dataclass(frozen=True)
class _Spec:
    """A kind of instance: its id, AutoDL's name of the card there, and its name in the list of stock."""

    id: str
    gpu: str
    stock: str
    memory_gb: int


# The API lists neither the kinds nor their prices; these are from its documentation (2026-08).
_SPECS = (
    _Spec("5090-p", "RTX 5090", "RTX 5090", 32),
    _Spec("4090D", "RTX 4090D", "RTX 4090D", 24),
    _Spec("v-48g", "RTX 4090 48GB", "vGPU-48GB", 48),
    _Spec("v-48g-350w", "RTX 3090 48GB", "vGPU-48GB-350W", 48),
    _Spec("v-32g-p", "RTX 4080 32GB", "vGPU-32GB", 32),
    _Spec("pro6000-p", "RTX PRO 6000", "RTX PRO 6000", 96),
    _Spec("h800", "H800", "H800", 80),
)


class AutoDL:
    name, title, currency, can_stop = "autodl", "AutoDL", "CNY", True
    deletes = "stop keeps the disks for 15 days, then AutoDL releases it; release deletes all but /root/autodl-fs"
    base_url = "https://api.autodl.com"

    def __init__(self, token: str, base_url: str | None = None, *, sleep: Sleep | None = None,
                 timeout: float = 30.0) -> None:  # fmt: skip
        self._api = HttpApi(
            self.title, base_url or self.base_url, {"Authorization": token}, token, sleep=sleep, timeout=timeout
        )

    def offers(self, gpu: str | None = None, count: int = 1, spot: bool = False) -> list[Offer]:
        if spot or count > _MOST_GPUS:
            return []
        idle = self._idle()
        return [_offer(spec, count, idle) for spec in _SPECS if is_named(_card(spec), gpu)]

    def create(
        self, offer: Offer, name: str, disk_gb: int, image: str | None = None, public_key: str | None = None
    ) -> Instance:
        """`public_key` is not used: AutoDL gives a password, with which the key is installed."""
        body = {
            "gpu_spec_uuid": offer.id,
            "req_gpu_amount": offer.count,
            "expand_system_disk_by_gb": min(_MOST_DISK_GB, max(0, disk_gb)),
            "image_uuid": image or _IMAGE,
            "cuda_v_from": _OLDEST_CUDA,
            "instance_name": name,
        }

        def order() -> str:
            made = self._unwrap(self._api.order, "POST", f"{_PRO}/create", body)
            if not isinstance(made, str) or not made:
                raise OutcomeUnknown(f"{self.title}: the answer to create has no instance id")
            return made

        made = create_once(self._api, name, order, self.list_instances)
        return Instance(self.name, made, name, "creating", currency=self.currency, gpu=offer.gpu, count=offer.count)

    def start(self, instance_id: str) -> None:
        self._change("power_on", {"instance_uuid": instance_id, "payload": "gpu"})

    def stop(self, instance_id: str) -> None:
        if self._state(instance_id) != _OFF:
            self._change("power_off", {"instance_uuid": instance_id})

    def release(self, instance_id: str) -> None:
        """AutoDL releases only what is switched off."""
        with suppress(NotFound):
            self.stop(instance_id)
            for _ in range(_POWER_OFF_POLLS):
                state = self._state(instance_id)
                if _STATES.get(state) == "released":
                    return
                if state == _OFF:
                    self._change("release", {"instance_uuid": instance_id})
                    return
                self._api.sleep(_POLL)
            minutes = _POWER_OFF_POLLS * _POLL / 60
            raise UserError(
                f"{self.title}: {instance_id} is not off after {minutes:.0f} minutes ({state}); it is not released"
            )

    def status(self, instance_id: str) -> Instance:
        word = self._state(instance_id)
        state = _STATES.get(word, "unknown")
        facts = self._details(instance_id) if state == "running" else {}
        price = as_number(facts.get("payg_price"))
        return Instance(
            self.name, instance_id, "", state, address=as_text(facts.get("proxy_host")) or None,
            port=as_port(facts.get("ssh_port")), password=as_text(facts.get("root_password")) or None,
            price_per_hour=price / 1000 if price else None, currency=self.currency,
            gpu=as_text(facts.get("snapshot_gpu_alias_name")) or None, message=self._api.clean(word),
        )  # fmt: skip

    def balance(self) -> Balance:
        found = as_dict(self._unwrap(self._api.query, "/api/v1/dev/wallet/balance", {}))
        voucher = as_number(found.get("voucher_balance")) / 1000
        note = f"and ¥{voucher:.2f} in vouchers" if voucher else ""
        return Balance(as_number(found.get("assets")) / 1000, self.currency, note)

    def list_instances(self) -> list[Instance]:
        found: list[Instance] = []
        for page in range(1, 101):
            answer = self._unwrap(self._api.query, f"{_PRO}/list", {"page_index": page, "page_size": 50})
            rows = as_dicts(as_dict(answer).get("list"))
            found += [self._listed(row) for row in rows]
            if not rows or page >= as_number(as_dict(answer).get("max_page")):
                break
        return found

    def _listed(self, row: dict[str, Any]) -> Instance:
        word = as_text(row.get("status"))
        spec = next((spec for spec in _SPECS if spec.id == row.get("gpu_spec_uuid")), None)
        return Instance(
            self.name, as_text(row.get("uuid")), as_text(row.get("name")), _STATES.get(word, "unknown"),
            currency=self.currency, gpu=_card(spec) if spec else None, count=int(as_number(row.get("req_gpu_amount"))),
            message=self._api.clean(word),
        )  # fmt: skip

    def _state(self, instance_id: str) -> str:
        return str(self._unwrap(self._api.get, f"{_PRO}/status", {"instance_uuid": instance_id}))

    def _details(self, instance_id: str) -> dict[str, Any]:
        return as_dict(self._unwrap(self._api.get, f"{_PRO}/snapshot", {"instance_uuid": instance_id}))

    def _change(self, verb: str, body: dict[str, Any]) -> None:
        self._unwrap(self._api.change, "POST", f"{_PRO}/{verb}", body)

    def _idle(self) -> dict[str, int] | None:
        """Idle GPUs by their name in the list of stock. It is the stock of another product, and only a hint; accounts
        that may not read it get None."""
        idle: dict[str, int] = {}
        for region in _STOCK_REGIONS:
            try:
                rows = self._unwrap(self._api.query, "/api/v1/dev/machine/region/gpu_stock", {"region_sign": region})
            except WrongToken:
                raise
            except (AccountBlocked, ApiError):
                return None
            for row in as_dicts(rows):
                for name, numbers in row.items():
                    idle[name] = idle.get(name, 0) + int(as_number(as_dict(numbers).get("idle_gpu_num")))
        return idle

    def _unwrap(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """`data` of a successful answer; the platform's own codes as errors that say what to do."""
        try:
            answer = call(*arguments)
        except ApiError as error:
            if error.status in (401, 403):
                raise self._wrong_token() from None
            refusal = self._refusal(error.values) if _has_code(error.values) else error
            raise error if isinstance(refusal, ApiError) else refusal from None
        if not _has_code(answer):
            raise OutcomeUnknown(f"{self.title}: an answer without a code: is this address AutoDL's API?")
        if answer["code"] == "Success":
            return answer.get("data")
        raise self._refusal(answer)

    def _wrong_token(self) -> UserError:
        return wrong_token(self.title, "https://www.autodl.com/console (设置 → 开发者Token)", "SOJOURN_AUTODL_TOKEN")

    def _refusal(self, answer: dict[str, Any]) -> UserError:
        """The documentation has no list of codes: each case goes by code and message."""
        code, said = str(answer["code"]), str(answer.get("msg") or "")
        text, shown = f"{code} {said}", self._api.clean(f"{said or 'no reason given'} ({code})")
        lower = text.lower()
        if "TORealName" in text or "实名" in text:
            return AccountBlocked(
                f"{self.title}: your identity is not verified, which its API requires: "
                f"verify it at https://www.autodl.com/console/account (实名认证); it says {shown}"
            )
        if any(word in lower for word in ("authoriz", "unauth", "token", "登录")):
            return self._wrong_token()
        if any(word in text for word in ("库存", "资源不足", "售罄")):
            return OutOfStock(
                f"{self.title}: out of stock: {shown}; see sojourn cloud offers autodl, or try again later"
            )
        if any(word in text for word in ("余额", "欠费")) or "balance" in lower:
            return AccountBlocked(
                f"{self.title}: not enough money in the account: {shown}; see sojourn cloud balance autodl"
            )
        if any(word in text for word in ("上限", "超过", "配额")) or "quota" in lower:
            return AccountBlocked(f"{self.title}: the account's quota is used up: {shown}")
        if "不存在" in text or "not found" in lower:
            return NotFound(f"{self.title}: no such instance: {shown}; see sojourn cloud status autodl")
        return ApiError(f"{self.title}: {shown}", 400, {"code": code})


def _has_code(answer: Any) -> bool:
    return isinstance(answer, dict) and "code" in answer


def _card(spec: _Spec) -> str:
    return catalogue_name(spec.gpu)


def _offer(spec: _Spec, count: int, idle: dict[str, int] | None) -> Offer:
    """The price is the catalogue's, and only of a card that it has with that much memory. Another product's lack of
    idle GPUs does not mean that none can be had."""
    from sojourn.catalog.prices import prices

    card = _card(spec)
    known = next((p for p in prices() if p.platform == "autodl" and p.gpu == card and p.count == 1), None)
    notes = ["price of the catalogue" if known else "price shown once it runs"]
    free = None if idle is None else idle.get(spec.stock, 0)
    if free is not None:
        notes.append(f"about {free} idle")
    price = known.cny_per_hour * count if known else None
    available = True if free is not None and free >= count else None
    return Offer("autodl", spec.id, card, count, price, "CNY", available=available, note="; ".join(notes))
