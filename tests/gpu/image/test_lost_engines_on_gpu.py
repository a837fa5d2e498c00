"""Faults of whole engines on GPUs: the tests of the CPU over NCCL, with two ranks and two engines."""

from tests.integration.test_refit_faults import (
    folders,
    generation,
    lasting_policy,
    ray_cluster,
    scene,
    test_a_message_that_is_lost_or_damaged_is_sent_again,
    test_an_engine_that_dies_or_hangs_is_replaced,
)

__all__ = [
    "folders",
    "generation",
    "lasting_policy",
    "ray_cluster",
    "scene",
    "test_a_message_that_is_lost_or_damaged_is_sent_again",
    "test_an_engine_that_dies_or_hangs_is_replaced",
]
