"""Routes of whoever runs the server: adapters (in vLLM's form) and checkpoints, while requests are answered."""

from __future__ import annotations

import asyncio
from typing import Any

from sojourn.infer.find import adapter_folder
from sojourn.serve.errors import ApiError, bad_request
from sojourn.serve.gateway import Gateway, Record
from sojourn.serve.schemas import LoadAdapter, Reload, UnloadAdapter


def check_admin(record: Record) -> None:
    if not record.key.admin:
        raise ApiError(403, "this key may not do that; its table in the key file needs admin = true", code="not_admin")


async def load_adapter(gateway: Gateway, record: Record, body: LoadAdapter) -> dict[str, Any]:
    check_admin(record)
    deployment = gateway.deployment(body.base_model_name)
    if any(body.lora_name in one.names for one in gateway.deployments):
        raise bad_request(f"a model with the name {body.lora_name!r} is loaded already", "lora_name", "name_taken")
    async with deployment.changing():
        path = await asyncio.to_thread(adapter_folder, body.lora_path)
        await deployment.engine.load_adapter(body.lora_name, path)
    gateway.log.write("adapter_loaded", name=body.lora_name, path=str(path), model=deployment.name)
    return {"message": f"adapter {body.lora_name!r} is loaded"}


async def unload_adapter(gateway: Gateway, record: Record, body: UnloadAdapter) -> dict[str, Any]:
    check_admin(record)
    gateway.lifecycle.check_ready()
    having = [one for one in gateway.deployments if body.lora_name in one.engine.info.adapters]
    if not having:
        message = f"no adapter with the name {body.lora_name!r} is loaded"
        raise ApiError(404, message, param="lora_name", code="model_not_found")
    async with having[0].changing():
        await having[0].engine.unload_adapter(body.lora_name)
    gateway.log.write("adapter_unloaded", name=body.lora_name)
    return {"message": f"adapter {body.lora_name!r} is unloaded"}


async def reload(gateway: Gateway, record: Record, body: Reload) -> dict[str, Any]:
    check_admin(record)
    deployment = gateway.deployment(body.name)
    path = await deployment.reload(body.model, body.checkpoint)
    gateway.log.write("reloaded", path=str(path), model=deployment.name)
    return {"message": f"{deployment.name!r} is now {path}"}
