"""A GRPO-like learner: group-relative advantages, and a clipped ratio against the sampling log-probabilities.

Engines call `rollout`, which is pure; the trainer holds a `Learner` and gives it what they made. Samples may
come from weights that are a version or so old, from any number of engines, in any order: the ratio is taken
against the log-probabilities that the engine recorded, and batches are put in a fixed order before use. For
one seed and the same batches the resulting weights are the same, bit for bit, on one machine with one thread.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from ..fsm.spans import SampleVersions
from .policy import Policy, PolicyShape, distribution, pick
from .task import answers, draw_prompts, rewards


@dataclass(frozen=True)
class Settings:
    """All that a run's learning depends on; the defaults are the tuned full-size run."""

    seed: int = 0
    steps: int = 120
    digits: int = 3
    """Digits per prompt, and tokens per answer."""
    groups: int = 24
    """Prompts per step, over all engines."""
    group_size: int = 16
    """Answers per prompt; each is judged against the others of its group."""
    temperature: float = 1.0
    learning_rate: float = 1e-3
    warmup: int = 5
    """Optimizer updates over which the learning rate rises to its full value."""
    epochs: int = 1
    """How often the samples of a step are gone over."""
    minibatches: int = 3
    """Optimizer updates per epoch."""
    clip: float = 0.2
    """How far the probability ratio may leave 1 before a sample stops pushing it further."""
    entropy_bonus: float = 0.01
    largest_gradient: float = 1.0
    """The norm that gradients are clipped to."""
    enough: int = 50
    """Steps after which every seed that was tried earned more than three times what it began with. A shorter
    run cannot be blamed for a reward that has not risen yet."""
    shape: PolicyShape = field(default_factory=PolicyShape)

    @classmethod
    def quick(cls, seed: int = 0) -> Self:
        """A run of a few seconds that still learns: two digits, and a policy of about 0.1 M parameters."""
        return cls(
            seed=seed,
            steps=60,
            digits=2,
            groups=16,
            learning_rate=2e-3,
            minibatches=4,
            enough=30,
            shape=PolicyShape(width=64, heads=4),
        )


@dataclass(frozen=True, eq=False)
class Batch:
    """What one engine sampled with one version of the weights; every tensor is on the CPU.

    Two batches are equal only if they are the same one: tensors have no single truth value to compare by.

    Attributes:
        version: The version of the weights that made the samples.
        engine: The engine that made them.
        prompts: int64 (groups, prompt length).
        tokens: int64 (groups, group size, answer length).
        logprobs: float32, shaped like `tokens`: what the sampling weights gave each token.
        rewards: float32 (groups, group size), each in [0, 1].
        versions: What the receiving side says of the segments they were made in.
    """

    version: int
    engine: str
    prompts: Tensor
    tokens: Tensor
    logprobs: Tensor
    rewards: Tensor
    versions: SampleVersions = SampleVersions()

    def __post_init__(self) -> None:
        shape = self.tokens.shape
        if len(shape) != 3 or self.logprobs.shape != shape or self.rewards.shape != shape[:2]:
            raise ValueError(
                f"tokens {tuple(shape)}, logprobs {tuple(self.logprobs.shape)} and rewards "
                f"{tuple(self.rewards.shape)} do not belong together"
            )
        if self.prompts.ndim != 2 or self.prompts.shape[0] != shape[0]:
            raise ValueError(f"{shape[0]} groups of answers to prompts {tuple(self.prompts.shape)}")


@dataclass(frozen=True)
class StepStats:
    """What one call of `Learner.learn` did; a mean over its optimizer updates where it made several."""

    loss: float
    reward: float
    """Mean reward of the samples, hence of the weights that made them."""
    kl: float
    """Estimated divergence of the sampling weights from those being trained, per token."""
    entropy: float
    """Of the trained policy, per token, in nats."""
    gradient: float
    """Norm of the gradient before clipping."""
    samples: int
    oldest: int
    """The oldest version of the weights among the batches."""
    seconds: float


def derive_seed(*parts: int | str) -> int:
    """Mix numbers and names into a seed, the same one in every process (which `hash` is not)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def rollout(
    model: Policy,
    prompts: Tensor,
    group_size: int,
    seed: int,
    *,
    version: int,
    engine: str,
    temperature: float = 1.0,
) -> Batch:
    """Sample a group of answers to each prompt and score them; changes neither the model nor global state.

    Args:
        model: The weights to sample from.
        prompts: int64 (groups, prompt length).
        group_size: Answers per prompt.
        seed: Decides the samples; take one per step and engine, as `derive_seed` makes them.
        version: The version of the weights in `model`, kept in the batch.
        engine: Who samples, kept in the batch.
        temperature: What the logits are divided by; the learner must use the same.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, logprobs = model.sample(prompts, generator, temperature, copies=group_size)
    tokens = tokens.view(prompts.shape[0], group_size, -1)
    scores = rewards(prompts.unsqueeze(1), tokens)
    return Batch(version, engine, prompts, tokens, logprobs.view(tokens.shape), scores)


def group_advantages(scores: Tensor) -> Tensor:
    """How much better than its group each answer is, in standard deviations of the group.

    Args:
        scores: float (groups, group size).

    Returns:
        The same shape, with mean zero in each group; all zero in a group whose answers scored alike.
    """
    centred = scores - scores.mean(dim=1, keepdim=True)
    # The constant only guards against dividing by zero: the smallest real deviation is far above it.
    return centred / (scores.std(dim=1, keepdim=True, correction=0) + 1e-4)


def clipped_objective(logratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """PPO's pessimistic surrogate, to be maximised; all three tensors are float of one shape.

    Args:
        logratio: Log-probability under the trained weights minus that under the sampling weights.
        advantages: What each token's probability should move along.
        clip: How far the ratio may leave 1.
    """
    # Weights that were never synced drift without end from those that sampled; exp must not overflow then.
    ratio = logratio.clamp(max=10.0).exp()
    return torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages)


class _Samples(NamedTuple):
    """Answers in rows: prompts (n, p), tokens and sampling log-probabilities (n, a), advantages (n, 1)."""

    prompts: Tensor
    tokens: Tensor
    logprobs: Tensor
    advantages: Tensor

    @classmethod
    def gather(cls, batches: Sequence[Batch]) -> Self:
        """Take all answers of some batches."""
        # Arrival order must not matter: sums of floats depend on it.
        ordered = sorted(batches, key=lambda batch: (batch.engine, batch.version))
        return cls(
            torch.cat([b.prompts.repeat_interleave(b.tokens.shape[1], dim=0) for b in ordered]),
            torch.cat([b.tokens.flatten(0, 1) for b in ordered]),
            torch.cat([b.logprobs.flatten(0, 1) for b in ordered]),
            torch.cat([group_advantages(b.rewards).flatten() for b in ordered]).unsqueeze(1),
        )

    def rows(self, index: Tensor) -> "_Samples":
        """Take some of the rows; `index` is int64 (m,)."""
        return _Samples(*(column[index] for column in self))


class Share(NamedTuple):
    """Which part of each update's samples one of several ranks goes over; all ranks together go over all."""

    rank: int = 0
    world: int = 1


class Learner:
    """The trainer's half: owns the weights that are trained and learns from what the engines sampled.

    Each of several ranks is given all samples and goes over its share of them; whatever wraps the policy then
    takes the mean of the ranks' gradients. Each share weighs as many samples as it has, so that this mean is
    the gradient over all of them.

    Args:
        settings: All that learning depends on.
        wrap: What becomes of the policy before it is trained, such as its sharding.
        share: This rank's.

    Attributes:
        settings: What it was made with.
        policy: What is trained, updated in place by `learn`.
        model: The same as it is wrapped, by which it is called.
        version: How many times `learn` has run, hence which weights `model` holds.
    """

    def __init__(
        self,
        settings: Settings,
        wrap: Callable[[Policy], nn.Module] = lambda policy: policy,
        share: Share = Share(),  # noqa: B008 - nobody can change it
    ) -> None:
        self.settings = settings
        self.policy = Policy(settings.shape, derive_seed(settings.seed, "weights"))
        self.model = wrap(self.policy)
        self.version = 0
        self._share = share
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95)
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda update: min(1.0, (update + 1) / settings.warmup)
        )

    def prompts(self, step: int) -> Tensor:
        """The prompts of a step, int64 (groups, digits + 1); the same ones whenever it is asked."""
        generator = torch.Generator().manual_seed(derive_seed(self.settings.seed, "prompts", step))
        return draw_prompts(self.settings.groups, self.settings.digits, generator)

    def rightness(self, step: int) -> float:
        """How often the likeliest token is the right one, on a step's prompts, with the weights of now."""
        prompts = self.prompts(step)
        wanted = answers(prompts)
        with torch.no_grad():
            likeliest = distribution(self.model, prompts, wanted).argmax(dim=-1)
        return float((likeliest == wanted).float().mean())

    def learn(self, batches: Sequence[Batch]) -> StepStats:
        """Improve the policy on a step's samples, in place. Losses are those of this rank's share.

        Args:
            batches: At least one; fewer than usual (an engine is missing) or older ones will do.
        """
        if not batches:
            raise ValueError("nothing to learn from: no batch")
        start = time.monotonic()
        samples = _Samples.gather(batches)
        count = samples.tokens.shape[0]
        updates = [self._update(samples.rows(index)) for index in self._minibatches(count)]
        self.version += 1
        loss, kl, entropy, gradient = (sum(column) / len(updates) for column in zip(*updates, strict=True))
        total = sum(float(batch.rewards.sum(dtype=torch.float64)) for batch in batches)
        return StepStats(
            loss=loss,
            reward=total / count,
            kl=kl,
            entropy=entropy,
            gradient=gradient,
            samples=count,
            oldest=min(batch.version for batch in batches),
            seconds=time.monotonic() - start,
        )

    def _minibatches(self, samples: int) -> Iterator[Tensor]:
        """Random parts of the samples' indices, each int64 (about samples / minibatches,)."""
        generator = torch.Generator().manual_seed(derive_seed(self.settings.seed, "shuffle", self.version))
        for _ in range(self.settings.epochs):
            yield from torch.randperm(samples, generator=generator).chunk(self.settings.minibatches)

    def _update(self, samples: _Samples) -> tuple[float, float, float, float]:
        """Make one optimizer update; returns loss, divergence, entropy and gradient norm."""
        settings, (rank, world) = self.settings, self._share
        count = len(samples.tokens)
        samples = samples.rows(torch.arange(rank, count, world))
        weight = len(samples.tokens) * world / count
        spread = distribution(self.model, samples.prompts, samples.tokens, settings.temperature)
        logratio = pick(spread, samples.tokens) - samples.logprobs
        objective = clipped_objective(logratio, samples.advantages.expand_as(logratio), settings.clip).mean()
        entropy = -(spread.exp() * spread).sum(dim=-1).mean()
        loss = -objective - settings.entropy_bonus * entropy
        self.optimizer.zero_grad()
        (loss * weight).backward()
        gradient = self._clip()
        self.optimizer.step()
        self._schedule.step()
        with torch.no_grad():
            # The low-variance estimator of KL(sampling || trained): its terms are never negative.
            kl = (logratio.clamp(max=10.0).exp() - 1.0 - logratio).mean()
        return float(loss.detach()), float(kl), float(entropy.detach()), gradient

    def _clip(self) -> float:
        """The norm of the gradient of all ranks, to which each of them clips its part."""
        clip = getattr(self.model, "clip_grad_norm_", None)  # of FSDP1, whose parts no rank can add up alone
        if clip is not None:
            return float(clip(self.settings.largest_gradient))
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.largest_gradient)
        return float(getattr(norm, "full_tensor", lambda: norm)())  # of FSDP2, each rank has a part of it
