"""Several boxes that train one run together: one supervisor on each, the first box keeps the run.

Rented boxes often map a single port. So the ranks' port is tried from every box before anything is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal

from sojourn.config.quantities import Money
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.remote.bootstrap import bootstrap
from sojourn.remote.box_client import Box
from sojourn.remote.job import Job
from sojourn.remote.portability import make_shipment
from sojourn.remote.spec import write_job
from sojourn.remote.start import Options, destination, send_shipment, start_supervisor

Say = Callable[[str], None]
_LISTEN = """
import socket, subprocess, sys, threading
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("", int(sys.argv[1])))
server.listen(64)
try:
    names = subprocess.run(["hostname", "-I"], stdout=subprocess.PIPE, universal_newlines=True).stdout.split()
except OSError:
    names = [socket.gethostbyname(socket.gethostname())]
def serve():
    while True:
        server.accept()[0].close()
threading.Thread(target=serve, daemon=True).start()
print("listening " + " ".join(name for name in names if not name.startswith("127.")), flush=True)
sys.stdin.read()  # until the laptop closes the channel
"""
_TRY = """
import socket, sys
for address in sys.argv[2:]:
    try:
        socket.create_connection((address, int(sys.argv[1])), 3).close()
    except OSError:
        continue
    print("reached " + address)
    break
"""


def find_master_address(boxes: list[Box], port: int) -> str:
    """The address of the first box that all others reach. Raises UserError where there is none."""
    first, others = boxes[0], boxes[1:]
    channel = first.connection().open([first.host.python or "python3", "-u", "-c", _LISTEN, str(port)])
    try:
        said = b""
        while b"\n" not in said and (data := channel.read(4096)):
            said += data
        listening = [line for line in said.decode(errors="replace").splitlines() if line.startswith("listening ")]
        if not listening:
            raise UserError(f"{first.host.name}: port {port} is taken there; give another one: parallel.port=29501")
        addresses = [*listening[0].split()[1:], first.host.address]
        for address in addresses:
            if all(_reaches(box, address, port) for box in others):
                return address
    finally:
        channel.close()
    names = ", ".join(box.host.name for box in others)
    raise UserError(
        f"--nodes: {names} cannot reach {first.host.name} on port {port} (tried {', '.join(addresses)}); boxes of one "
        "private network can, most rented boxes map no such port: rent one box with several GPUs instead"
    )


def _price(boxes: list[Box], options: Options) -> Money | None:
    """Of all boxes together: the first keeps the budget."""
    prices = [options.terms.price_on(box.host) for box in boxes]
    known = [price for price in prices if price is not None]
    if len(known) < len(prices):
        return None
    return Money(sum((price.amount for price in known), Decimal(0)), known[0].currency)


def _reaches(box: Box, address: str, port: int) -> bool:
    done = box.run([box.host.python or "python3", "-c", _TRY, str(port), address], timeout=30)
    return b"reached " in done.stdout


def start_nodes(boxes: list[Box], job: Job, config: RunConfig, options: Options, say: Say) -> None:
    """Prepares every box, then starts them; the last started is the first, whose run is followed."""
    port = config.parallel.port
    master = find_master_address(boxes, port)
    say(f"{len(boxes)} boxes meet at {master}:{port}")
    nodes = len(boxes)
    ready: list[tuple[Box, str]] = []
    for rank, box in enumerate(boxes):
        host = box.host
        shipment = make_shipment(config, destination(host), allow_secrets=options.allow_secrets, say=say)
        shipment.check()
        python = bootstrap(box, host, say, install_torch=options.install_torch)
        send_shipment(box, shipment)
        extra = ["--nnodes", str(nodes), "--node_rank", str(rank), "--master_addr", f"{master}:{port}"]
        terms = (
            replace(options.terms, price=_price(boxes, options)) if rank == 0 else replace(options.terms, budget=None)
        )
        write_job(box, job, terms, shipment, python, extra)
        ready.append((box, python.python))
    for box, python_path in reversed(ready):
        start_supervisor(box, job, python_path)
