"""The demo's verifiable task: answer with the successor of every digit, modulo ten.

A prompt is `digits` uniform, independent digits followed by a separator token; the right answer is
`(digit + 1) % 10` for each of them, in order. So `4 9 0 7 =` is answered by `5 0 1 8`. The reward is
the fraction of positions answered rightly, so it lies in [0, 1] and is decided by rule alone.

The digits are uniform and independent, hence an answer that does not depend on the prompt is right in one
position of ten whatever it is: `best_blind_reward` computes that bound exactly. A reward well above it
therefore proves that the policy reads its prompt.
"""

from fractions import Fraction

import torch
from torch import Tensor

SYMBOLS = 10
"""How many digits there are; tokens 0 to 9 stand for themselves."""

SEPARATOR = 10
"""The token that ends a prompt. A policy may also emit it, which is always wrong."""

VOCABULARY = 11
"""The digits and the separator."""


def draw_prompts(count: int, digits: int, generator: torch.Generator) -> Tensor:
    """Draw prompts of uniform, independent digits, each ended by the separator.

    Args:
        count: How many prompts.
        digits: How many digits each of them has; the answer is as long.
        generator: The only source of randomness.

    Returns:
        int64 (count, digits + 1).
    """
    if count < 1 or digits < 1:
        raise ValueError(f"need at least one prompt of one digit, not {count} of {digits}")
    drawn = torch.randint(SYMBOLS, (count, digits), generator=generator)
    return torch.cat([drawn, torch.full((count, 1), SEPARATOR)], dim=1)


def answers(prompts: Tensor) -> Tensor:
    """The right answers.

    Args:
        prompts: int64 (..., digits + 1), as `draw_prompts` makes them.

    Returns:
        int64 (..., digits).
    """
    return (prompts[..., :-1] + 1) % SYMBOLS


def rewards(prompts: Tensor, tokens: Tensor) -> Tensor:
    """Score answers: the fraction of their positions that are right.

    Args:
        prompts: int64 (..., digits + 1).
        tokens: int64 (..., digits); its leading dimensions broadcast against those of `prompts`.

    Returns:
        float32 (...), each in [0, 1].
    """
    if tokens.shape[-1] != prompts.shape[-1] - 1:
        raise ValueError(f"answers of {tokens.shape[-1]} tokens to prompts of {prompts.shape[-1] - 1} digits")
    return (tokens == answers(prompts)).float().mean(dim=-1)


def best_blind_reward(digits: int) -> Fraction:
    """The highest expected reward of any policy that ignores its prompt, computed from the distribution.

    A prompt-blind policy is a mixture of constant answers, so none beats the best constant answer. The
    reward of a constant answer is a mean over positions, so each of its tokens can be chosen on its own: the
    one that is right for the most of the (equally likely) digits in that position.
    """
    every_digit = torch.arange(SYMBOLS)
    best = Fraction(0)
    for position in range(digits):
        prompts = torch.zeros(SYMBOLS, digits + 1, dtype=torch.int64)
        prompts[:, position] = every_digit
        right = answers(prompts)[:, position]
        hits = [int((right == token).sum()) for token in range(VOCABULARY)]
        best += Fraction(max(hits), SYMBOLS)
    return best / digits


def spell(tokens: Tensor) -> str:
    """Write one row of tokens, int64 (n,), for a person to read: `4 9 0 7 =`."""
    return " ".join("=" if token == SEPARATOR else str(token) for token in tokens.tolist())
