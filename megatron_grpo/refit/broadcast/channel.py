"""One group for each pipeline stage of the policy: its sender, rank 0, and all generation workers."""

from __future__ import annotations

import json

import torch
from torch.distributed import Store

from megatron_grpo.refit.buckets import Bucket, plan_buckets
from megatron_grpo.refit.groups import Group, Rendezvous, join


def write_plan(store: Store, stage: int, stages: int, buckets: list[Bucket], bucket_bytes: int) -> None:
    """Tell the receivers what one of the stages will send: names, types and shapes, since both sides plan alike."""
    slots = [slot for bucket in buckets for slot in bucket.slots]
    tensors = [(slot.name, str(slot.dtype).removeprefix("torch."), slot.shape) for slot in slots]
    store.set(f"plan/{stage}", json.dumps({"bucket_bytes": bucket_bytes, "tensors": tensors}))
    store.set("stages", str(stages))


def read_plans(store: Store) -> list[list[Bucket]]:
    """What every stage will send, by stage; waits until their senders have written it."""
    plans = [json.loads(store.get(f"plan/{stage}")) for stage in range(int(store.get("stages")))]
    return [plan_buckets(plan["tensors"], plan["bucket_bytes"]) for plan in plans]


def join_stage(rendezvous: Rendezvous, stage: int, rank: int, device: torch.device) -> Group:
    """Enter the group of one stage; returns when its sender, rank 0, and all receivers have.

    Raises:
        RuntimeError: not everybody came within the timeout.
    """
    return join(rendezvous, f"stage {stage}", rank, rendezvous.receivers + 1, device)
