"""Clients of many processes reach a store at the same time."""

import os
import subprocess
import sys

CLIENTS = """
import os, resource, threading, time
from megatron_grpo.cluster.machines import prepare_network
prepare_network("127.0.0.1")
assert os.environ["GLOO_SOCKET_IFNAME"] == "lo", os.environ["GLOO_SOCKET_IFNAME"]
from megatron_grpo.platform.device import connect_store, open_store
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
store, clients, start = open_store("127.0.0.1", 60.0), [], threading.Barrier(512)
def connect():
    start.wait()
    clients.append(connect_store(store.host, store.port, 10.0))
threads = [threading.Thread(target=connect) for _ in range(512)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(clients), flush=True)
os._exit(0)
"""


def test_clients_of_512_processes_reach_a_store_at_once() -> None:
    """Each asks a resolver for the name of the address, which drops some of so many questions."""
    variables = {name: text for name, text in os.environ.items() if name not in ("RES_OPTIONS", "GLOO_SOCKET_IFNAME")}
    result = subprocess.run([sys.executable, "-c", CLIENTS], env=variables, capture_output=True, text=True, timeout=120)
    assert result.stdout == "512\n", result.stderr
