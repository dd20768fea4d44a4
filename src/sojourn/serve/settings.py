"""How the server was started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """`max_waiting`: sequences beyond those that the engine runs at a time. `origins`: of web pages that may
    use the API (CORS). `hosts`: more names in the Host header that are this machine. Times are in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    max_waiting: int = 256
    max_body_bytes: int = 16 << 20
    max_all_bodies_bytes: int = 512 << 20
    max_header_bytes: int = 64 << 10
    request_seconds: float = 600.0
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    keep_alive_seconds: float = 30.0
    grace_seconds: float = 30.0
    max_connections: int = 4096
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    log_prompts: bool = False
