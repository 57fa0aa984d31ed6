"""A small causal transformer in plain torch, the policy that the demo trains and its engines sample from.

Its `state_dict` has what a weight hand-over has to cope with in real models: two names for one tensor
(`embedding.weight` and `head.weight` are tied) and a buffer that no optimizer touches (`positions`).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .task import VOCABULARY

KeysValues = tuple[Tensor, Tensor]
"""One layer's cached keys and values, each float (batch, heads, length, width / heads)."""


@dataclass(frozen=True)
class PolicyShape:
    """The sizes of a policy; the default one has about 0.9 M parameters."""

    width: int = 192
    heads: int = 6
    layers: int = 2
    vocabulary: int = VOCABULARY
    longest: int = 32
    """The most tokens that prompt and answer may have together."""

    def __post_init__(self) -> None:
        if self.width % self.heads or self.width % 2:
            raise ValueError(f"width {self.width} must be even and divide into {self.heads} heads")


def sinusoids(length: int, width: int) -> Tensor:
    """Fixed position encodings (sine and cosine halves), float32 (length, width)."""
    steps = torch.arange(length, dtype=torch.float64)
    rates = torch.exp(-math.log(1000.0) * torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    angles = steps[:, None] * rates[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


class Block(nn.Module):
    """A pre-norm transformer layer: causal attention, then a feed-forward net of four times the width."""

    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.feed_norm = nn.LayerNorm(shape.width)
        self.feed_up = nn.Linear(shape.width, 4 * shape.width)
        self.feed_down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, hidden: Tensor, past: KeysValues | None) -> tuple[Tensor, KeysValues]:
        """Run the layer.

        Args:
            hidden: float (batch, length, width). With a past, length must be 1: then no mask is needed.
            past: The keys and values of the positions before, or None at the start of a sequence.

        Returns:
            The new hidden states, shaped like `hidden`, and the keys and values up to here.
        """
        mixed, kept = self._attend(self.attention_norm(hidden), past)
        hidden = hidden + mixed
        fed: Tensor = self.feed_down(functional.gelu(self.feed_up(self.feed_norm(hidden))))
        return hidden + fed, kept

    def _attend(self, hidden: Tensor, past: KeysValues | None) -> tuple[Tensor, KeysValues]:
        batch, length, width = hidden.shape
        split = self.qkv(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=past is None)
        mixed: Tensor = self.out(seen.transpose(1, 2).reshape(batch, length, width))
        # No views of what is within: a layer that is sharded by FSDP2 is not to hand those out.
        return mixed, (key.contiguous(), value.contiguous())


class Policy(nn.Module):
    """A distribution over answers to a prompt, one token at a time.

    The weights depend on `shape` and `seed` alone; torch's global generator is neither asked nor changed.
    There is no dropout, so training and evaluation mode are the same.
    """

    positions: Tensor

    def __init__(self, shape: PolicyShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        with torch.random.fork_rng(devices=[]):
            self.embedding = nn.Embedding(shape.vocabulary, shape.width)
            self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
            self.norm = nn.LayerNorm(shape.width)
            self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", sinusoids(shape.longest, shape.width))
        self._initialise(torch.Generator().manual_seed(seed))

    def forward(
        self, tokens: Tensor, past: list[KeysValues] | None = None
    ) -> tuple[Tensor, list[KeysValues]]:
        """Score every next token.

        Args:
            tokens: int64 (batch, length); with a past, length must be 1.
            past: What an earlier call returned for the tokens before these.

        Returns:
            Logits, float32 (batch, length, vocabulary), and the cache that a next call can go on from.
        """
        start = 0 if past is None else past[0][0].shape[2]
        if past is not None and tokens.shape[1] != 1:
            raise ValueError(f"one token at a time after a cached past, not {tokens.shape[1]}")
        # Embeddings are small (they are the head too), so they are scaled up to the size of the positions.
        scale = math.sqrt(self.shape.width)
        hidden = self.embedding(tokens) * scale + self.positions[start : start + tokens.shape[1]]
        kept = []
        for index, block in enumerate(self.blocks):
            hidden, keys_values = block(hidden, None if past is None else past[index])
            kept.append(keys_values)
        return self.head(self.norm(hidden)).float(), kept

    def distribution(self, prompts: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
        """The log-probabilities of every token at each position of given answers.

        Args:
            prompts: int64 (batch, prompt length).
            tokens: int64 (batch, answer length).
            temperature: What the logits are divided by.

        Returns:
            float32 (batch, answer length, vocabulary), normalised over the last dimension.
        """
        return distribution(self, prompts, tokens, temperature)

    def logprobs(self, prompts: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
        """The log-probabilities of given answers' own tokens, float32 (batch, answer length).

        Arguments as for `distribution`.
        """
        return pick(self.distribution(prompts, tokens, temperature), tokens)

    @torch.no_grad()
    def sample(
        self,
        prompts: Tensor,
        generator: torch.Generator,
        temperature: float = 1.0,
        *,
        length: int | None = None,
        copies: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Sample answers, reading each prompt once however many answers it gets.

        Args:
            prompts: int64 (batch, prompt length).
            generator: The only source of randomness.
            temperature: What the logits are divided by before sampling.
            length: Tokens an answer has; by default one fewer than the prompt, as the task wants.
            copies: Answers per prompt.

        Returns:
            Tokens, int64 (batch * copies, length), those of one prompt next to each other; and their
            log-probabilities at that temperature, float32, shaped alike.
        """
        logits, past = self(prompts)
        logits = logits[:, -1].repeat_interleave(copies, dim=0)
        past = [(k.repeat_interleave(copies, dim=0), v.repeat_interleave(copies, dim=0)) for k, v in past]
        tokens: list[Tensor] = []
        scores: list[Tensor] = []
        for position in range(prompts.shape[1] - 1 if length is None else length):
            if position:
                logits, past = self(tokens[-1], past)
                logits = logits[:, -1]
            spread = functional.log_softmax(logits / temperature, dim=-1)
            tokens.append(torch.multinomial(spread.exp(), 1, generator=generator))
            scores.append(spread.gather(1, tokens[-1]))
        return torch.cat(tokens, dim=1), torch.cat(scores, dim=1)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Draw all weights: small embeddings so that the first answers are near uniform, and no biases."""
        for module in self.modules():
            if isinstance(module, nn.Linear) and module is not self.head:
                module.weight.normal_(0.0, module.in_features**-0.5, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
        for module in self.modules():
            if isinstance(module, Block):
                # What a layer adds starts smaller the more layers there are: their sum should not grow.
                for closing in (module.out, module.feed_down):
                    closing.weight.mul_((2 * self.shape.layers) ** -0.5)
        self.embedding.weight.normal_(0.0, 1.0 / self.shape.width, generator=generator)


def distribution(model: nn.Module, prompts: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """As `Policy.distribution`, of a policy or of what wraps one, whose forward it is.

    A model that is sharded has to be called as a whole: only then are its weights put together for the pass.
    """
    # The last answer token is predicted but never read, so it need not be fed.
    logits, _ = model(torch.cat([prompts, tokens[:, :-1]], dim=1))
    return functional.log_softmax(logits[:, prompts.shape[1] - 1 :] / temperature, dim=-1)


def pick(distribution: Tensor, tokens: Tensor) -> Tensor:
    """Take the tokens' own entries: float (..., vocabulary) and int64 (...) give float (...)."""
    return distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
