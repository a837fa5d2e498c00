"""The keys of a layout: how a model that is trained is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_grpo.config.section import Positive, Section


@dataclass(kw_only=True)
class ParallelConfig(Section):
    """How a model is laid out over ranks: world size = tensor * pipeline * context * data."""

    tensor: Positive = 1
    """Ranks that split every weight matrix (TP). Must divide the attention heads; and divide the key/value heads, or be
    a multiple of them."""

    pipeline: Positive = 1
    """Ranks that split the layers (PP)."""

    virtual_pipeline: Positive = 1
    """Parts of the model on each pipeline rank, which microbatches pass in turn (interleaved pipeline, VPP): the
    pipeline fills and empties sooner, and ranks send more often. Needs pipeline > 1."""

    first_stage_layers: Positive | None = None
    """Layers of the first pipeline rank, when it is not to have as many as the others: it has the embedding too."""

    last_stage_layers: Positive | None = None
    """Layers of the last pipeline rank, when it is not to have as many as the others: it has the head too."""

    count_embedding: bool = False
    """Count the embedding as a layer when layers are split over the pipeline: the first rank gets one less."""

    count_loss: bool = False
    """Count the head and the loss as a layer when layers are split over the pipeline: the last rank gets one less."""

    context: Positive = 1
    """Ranks that split each sequence (CP)."""

    expert: Positive = 1
    """Ranks that share the experts of a mixture-of-experts model (EP): ranks of tensor * context * data."""

    expert_tensor: Positive = 1
    """Ranks that split every matrix of an expert (ETP). expert * expert_tensor must divide tensor * context * data."""

    data: Positive = 1
    """Replicas of the model, each training on its share of the samples (DP)."""

    sequence: bool = False
    """Also split the activations between tensor-parallel regions along the sequence. Needs tensor > 1; a mixture of
    experts with tensor > 1 needs it."""

    @property
    def world_size(self) -> int:
        """Ranks of the model."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def chunk_multiple(self) -> int:
        """What the tokens of a packed sequence are a multiple of: two chunks for each context-parallel rank."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def sequence_multiple(self) -> int:
        """What the widths of rectangles are a multiple of: sequence parallelism also splits what a rank holds."""
        return self.chunk_multiple * (self.tensor if self.sequence else 1)
