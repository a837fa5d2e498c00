"""The refit's half of vLLM's worker, over a group that fails as NCCL's does: for an engine's `worker_extension_cls`."""

from megatron_grpo.weight_sync.engine_worker import RefitWorker
from tests.support import nccl_like

nccl_like.install()


class NcclLikeWorker(RefitWorker):
    """Importing this module is what makes the difference."""
