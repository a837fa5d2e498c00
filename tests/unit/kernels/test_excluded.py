"""Log-probabilities without entries that are never drawn, against a softmax over the others."""

import pytest
import torch

from megatron_grpo_kernels.logprob import linear_logprobs

EXCLUDED = (3, 17)


@pytest.mark.parametrize("scale", [1.0, 1.7])
@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_the_distribution_is_over_the_other_entries(scale: float, chunk_tokens: int | None) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(11, 8), torch.randn(24, 8)
    targets = torch.tensor([0, 1, 2, 4, 5, 22, 7, 8, 16, 18, 19])
    factors = torch.randn(2, 11)
    outputs = []
    for is_ours in (True, False):
        operands = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        if is_ours:
            logprobs, entropy = linear_logprobs(
                *operands, targets, columns=23, scale=scale, chunk_tokens=chunk_tokens, excluded=EXCLUDED
            )
        else:
            logits = scale * operands[0] @ operands[1][:23].T
            columns = [column for column in range(23) if column not in EXCLUDED]
            logp = logits[:, columns].log_softmax(-1)
            entropy = -(logp.exp() * logp).sum(-1)
            logprobs = torch.stack([logp[row, columns.index(int(target))] for row, target in enumerate(targets)])
        (factors[0] * logprobs + factors[1] * entropy).sum().backward()
        outputs.append((logprobs, entropy, *(operand.grad for operand in operands)))
    for ours, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)
    assert not outputs[0][3][list(EXCLUDED)].any(), "their rows get no gradient"
