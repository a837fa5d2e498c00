"""The matrix of faults of a refit over NCCL, between processes with a GPU each and without models."""

from itertools import product
from typing import Any

import pytest
import torch

from tests.support.refit_faults import DROP, FAIL, FLIP, KILL_RANK, KILL_WORKER, MOMENTS, STALL_RANK, STALL_WORKER
from tests.support.refit_processes import GREETING, JOINING
from tests.unit.weight_sync import test_refit_damage as matrix

scene = matrix.scene
GROUP = "gpus" if torch.cuda.is_available() else "nccl"


def cases(faults: tuple[str, ...], moments: tuple[str, ...] = MOMENTS) -> Any:
    rows = [pytest.param(GROUP, *pair, id=", ".join(pair)) for pair in product(faults, moments)]
    return pytest.mark.parametrize(("scene", "fault", "moment"), rows, indirect=["scene"])


@cases((KILL_WORKER, STALL_WORKER))
def test_one_dead_engine_costs_one_engine(scene: matrix.Scene, fault: str, moment: str) -> None:
    matrix.test_one_dead_engine_costs_one_engine(scene, fault, moment)


@cases((KILL_WORKER, STALL_WORKER), (JOINING, GREETING))
def test_so_it_is_while_links_are_made(scene: matrix.Scene, fault: str, moment: str) -> None:
    matrix.test_so_it_is_while_links_are_made(scene, fault, moment)


@cases((DROP, FLIP, FAIL))
def test_a_message_that_is_lost_or_damaged_is_sent_again(scene: matrix.Scene, fault: str, moment: str) -> None:
    matrix.test_a_message_that_is_lost_or_damaged_is_sent_again(scene, fault, moment)


@cases((KILL_RANK, STALL_RANK), MOMENTS[:2])
def test_a_rank_that_dies_or_hangs_is_one_error(scene: matrix.Scene, fault: str, moment: str) -> None:
    matrix.test_a_rank_that_dies_or_hangs_is_one_error_and_no_engine_is_replaced(scene, fault, moment)
