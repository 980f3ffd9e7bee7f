"""How likely the model found tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dataplane.engine.messages import Logprobs


def report(logits: Tensor, tokens: Tensor, num_top: Sequence[int]) -> list[Logprobs]:
    """Returns logarithms of probabilities by the model's own distribution, `logits - log(sum(exp(logits)))` in float32.

    Args:
        logits: [R, vocab] as the model gave them.
        tokens: int64 [R], the token of each row that is reported whatever its rank.
        num_top: How many of each row's likeliest tokens are reported; of equal ones any.
    """
    scores = logits.float().log_softmax(dim=-1)
    of_tokens = scores.gather(1, tokens[:, None]).squeeze(1).tolist()
    if not (most := max(num_top, default=0)):
        return [Logprobs(number) for number in of_tokens]
    numbers, ids = (half.tolist() for half in scores.topk(min(most, scores.shape[1]), dim=-1))
    return [
        Logprobs(number, tuple(zip(ids[row][:count], numbers[row][:count], strict=True)))
        for row, (number, count) in enumerate(zip(of_tokens, num_top, strict=True))
    ]
