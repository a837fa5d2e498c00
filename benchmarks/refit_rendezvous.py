"""What the driver's store carries when a refit links 1,024 ranks to 512 workers, and prints JSON.

    python benchmarks/refit_rendezvous.py

Plans DeepSeek-V3 between the largest layouts of refit_large.py and writes the plan of every rank into a store, as the
driver does when it links policy and engines; reads all of them; and lets clients look for a failure, one look after the
other. Beside it: what it took when every rank was sent the shards of all ranks, pickled once for each, and when plans
were not compressed.
"""

from __future__ import annotations

import json
import pickle
import time
from typing import Any

from header import header
from refit_large import CASES

from megatron_grpo.config.generation_schema import RefitConfig
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.planning.engine_shards import assume_boxes
from megatron_grpo.platform.device import open_store
from megatron_grpo.weight_sync.refit_group import FAILURE, FAILURE_CHECK_S, Rendezvous
from megatron_grpo.weight_sync.transfer_plan import choose_wire_dtypes, plan_messages, write_plan

HOST = "127.0.0.1"
CLIENTS, LOOKS = 100, 50
"""Clients that look for a failure, and looks of each."""


class CountingStore:
    """Counts the bytes that are written to a store."""

    def __init__(self, store: Any) -> None:
        self._store, self.nbytes = store, 0

    def set(self, key: str, value: Any) -> None:
        self.nbytes += len(value)
        self._store.set(key, value)


def main() -> None:
    raw, training, generation = CASES["DeepSeek-V3, 1,024 to 512 ranks"]
    shape, bucket = parse_model_shape(raw), int(RefitConfig().bucket_mib * 2**20)
    shards, engine = split_policy(training, shape), assume_boxes(shape, generation)
    dtypes, workers = choose_wire_dtypes(shape, "bfloat16", False), len(engine) * generation.data
    planned, planning_s = _time_action(lambda: plan_messages(shape, shards, engine, generation.data, dtypes, bucket))
    store = open_store(HOST, 600.0)
    counting: Any = CountingStore(store)
    _, writing_s = _time_action(lambda: write_plan(counting, planned, len(shards), workers, dtypes, False))
    rendezvous = Rendezvous(host=HOST, port=store.port, receivers=workers, timeout_s=600.0)
    reader = rendezvous.connect()
    keys = [f"source/{rank}" for rank in range(len(shards))] + [f"target/{rank}" for rank in range(workers)]
    _, reading_s = _time_action(lambda: [reader.get(key) for key in keys])
    clients = [rendezvous.connect() for _ in range(CLIENTS)]
    _, looking_s = _time_action(lambda: [client.check([FAILURE]) for client in clients * LOOKS])
    _, before_s = _time_action(lambda: [pickle.dumps(shards) for _ in shards])
    result = {
        **header("refit_rendezvous"),
        "ranks": len(shards),
        "workers": workers,
        "pieces": len(planned),
        "planning_s": round(planning_s, 2),
        "plans": {
            "plain_bytes": 2 * planned.nbytes,
            "bytes": counting.nbytes,
            "writing_s": round(writing_s, 2),
            "reading_all_s": round(reading_s, 2),
        },
        "looks_for_a_failure_per_s": {
            "one_after_the_other": round(CLIENTS * LOOKS / looking_s),
            "needed": len(keys) / FAILURE_CHECK_S,
        },
        "shards_for_every_rank_before": {
            "bytes": len(pickle.dumps(shards)) * len(shards),
            "pickling_s": round(before_s, 2),
        },
    }
    print(json.dumps(result, indent=2))


def _time_action(action: Any) -> tuple[Any, float]:
    began = time.perf_counter()
    return action(), time.perf_counter() - began


if __name__ == "__main__":
    main()
