"""The learning half of the demo: a task that cannot be guessed, a policy that can be synced, a learner."""

import itertools
import math
import pickle
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from xml.etree import ElementTree as ET

import pytest
import torch

from weightsync.demo import task
from weightsync.demo.grpo import (
    Batch,
    Learner,
    Settings,
    StepStats,
    clipped_objective,
    derive_seed,
    group_advantages,
    rollout,
)
from weightsync.demo.plot import Curve, Level, reward_svg, smoothed, ticks
from weightsync.demo.policy import Policy, PolicyShape

SMALL = PolicyShape(width=32, heads=2, layers=2)
TINY = replace(Settings.quick(), steps=30, digits=1, shape=PolicyShape(width=32, heads=2, layers=1))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, as in the demo's processes: sums of floats come out the same, and nobody is starved."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def generator(seed: int = 0) -> torch.Generator:
    """A source of randomness."""
    return torch.Generator().manual_seed(seed)


def sampled(
    learner: Learner, engine: Policy, step: int, engines: tuple[str, ...] = ("a", "b")
) -> list[Batch]:
    """What engines with these weights make of their halves of a step's prompts."""
    halves = dict(zip(("a", "b"), learner.prompts(step).chunk(2), strict=True))
    settings = learner.settings
    return [
        rollout(
            engine,
            halves[name],
            settings.group_size,
            derive_seed(settings.seed, step, name),
            version=learner.version,
            engine=name,
        )
        for name in engines
    ]


def run(settings: Settings, *, synced: bool = True) -> tuple[list[StepStats], Learner]:
    """Train; the engines' weights follow the learner's, or stay what they were at the start."""
    learner, engine = Learner(settings), Policy(settings.shape)
    engine.load_state_dict(learner.model.state_dict())
    stats = []
    for step in range(settings.steps):
        if synced:
            engine.load_state_dict(learner.model.state_dict())
        stats.append(learner.learn(sampled(learner, engine, step)))
    return stats, learner


def mean_reward(stats: list[StepStats]) -> float:
    """Over some steps."""
    return sum(step.reward for step in stats) / len(stats)


class TestTask:
    def test_rewards_count_the_right_positions(self) -> None:
        """A right answer earns 1, a half right one 0.5, and the separator is never right."""
        prompts = torch.tensor([[4, 9, 10]] * 3)
        tokens = torch.tensor([[5, 0], [5, 9], [10, 10]])
        assert task.rewards(prompts, tokens).tolist() == [1.0, 0.5, 0.0]
        assert task.rewards(prompts, task.answers(prompts)).tolist() == [1.0] * 3

    @pytest.mark.parametrize("digits", [1, 2, 4])
    def test_no_blind_policy_earns_more_than_a_tenth(self, digits: int) -> None:
        """The best answer that ignores its prompt is right in one position of ten, exactly."""
        assert task.best_blind_reward(digits) == Fraction(1, 10) < Fraction(3, 10)

    def test_the_blind_bound_is_what_enumeration_finds(self) -> None:
        """All answers of two tokens to all prompts of two digits: none earns more than the bound."""
        digits = itertools.product(range(task.SYMBOLS), repeat=2)
        prompts = torch.tensor([[*pair, task.SEPARATOR] for pair in digits])
        constant = torch.tensor(list(itertools.product(range(task.VOCABULARY), repeat=2)))
        earned = task.rewards(prompts[:, None], constant[None]).double().mean(dim=0)
        assert earned.max().item() == pytest.approx(float(task.best_blind_reward(2)), abs=1e-12)

    def test_prompts_are_uniform_and_end_in_the_separator(self) -> None:
        """Every digit comes up in every position about as often as any other: the bound's one premise."""
        prompts = task.draw_prompts(20_000, 3, generator())
        assert prompts.dtype == torch.int64
        assert (prompts[:, -1] == task.SEPARATOR).all()
        for position in range(3):
            counts = torch.bincount(prompts[:, position], minlength=task.VOCABULARY)
            assert counts[task.SEPARATOR] == 0
            assert (counts[:-1] - 2000).abs().max() < 250

    def test_an_answer_of_the_wrong_length_is_refused(self) -> None:
        """Broadcasting must not turn one token into a whole answer."""
        with pytest.raises(ValueError, match="1 tokens"):
            task.rewards(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64))

    def test_prompts_without_digits_are_refused(self) -> None:
        """There is nothing to answer in them."""
        with pytest.raises(ValueError, match="at least one"):
            task.draw_prompts(4, 0, generator())

    def test_tokens_can_be_read(self) -> None:
        """A prompt is written as a person would."""
        assert task.spell(torch.tensor([4, 9, task.SEPARATOR])) == "4 9 ="


class TestPolicy:
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_sampling_and_scoring_agree(self, temperature: float) -> None:
        """One token at a time through the cache, or all at once: the log-probabilities are the same."""
        policy = Policy(SMALL, seed=3)
        prompts = task.draw_prompts(6, 4, generator())
        tokens, scores = policy.sample(prompts, generator(1), temperature, copies=3)
        again = policy.logprobs(prompts.repeat_interleave(3, dim=0), tokens, temperature)
        assert tokens.shape == scores.shape == (18, 4)
        assert tokens.dtype == torch.int64
        torch.testing.assert_close(scores, again.detach(), atol=1e-5, rtol=1e-5)

    def test_the_seed_decides_what_is_sampled(self) -> None:
        """Equal seeds give equal samples, others do not, and torch's global generator is left alone."""
        prompts = task.draw_prompts(8, 4, generator())
        state = torch.get_rng_state()
        first, second, other = (Policy(SMALL, 5).sample(prompts, generator(seed))[0] for seed in (1, 1, 2))
        assert torch.equal(first, second)
        assert not torch.equal(first, other)
        assert torch.equal(state, torch.get_rng_state())

    def test_the_seed_decides_the_weights(self) -> None:
        """Equal seeds give equal weights, others do not."""
        first, second, other = (Policy(SMALL, seed).state_dict() for seed in (5, 5, 6))
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert not torch.equal(first["embedding.weight"], other["embedding.weight"])

    def test_the_head_is_tied_and_stays_so(self) -> None:
        """Two names, one tensor: also after a load, an update and a trip through pickle."""
        learner = Learner(TINY)
        learner.model.load_state_dict(Policy(TINY.shape, 9).state_dict())
        learner.learn(sampled(learner, learner.policy, 0))
        for policy in (learner.policy, pickle.loads(pickle.dumps(learner.policy))):
            assert policy.head.weight is policy.embedding.weight
            state = policy.state_dict()
            assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()

    def test_a_buffer_travels_with_the_weights(self) -> None:
        """The positions are in the state, matter to the answers, and are no parameter."""
        policy = Policy(SMALL)
        assert "positions" in policy.state_dict()
        assert "positions" not in dict(policy.named_parameters())
        prompts = task.draw_prompts(4, 3, generator())
        before = policy.logprobs(prompts, task.answers(prompts))
        policy.positions.zero_()
        assert not torch.allclose(before, policy.logprobs(prompts, task.answers(prompts)))

    def test_the_default_policy_has_about_a_million_parameters(self) -> None:
        """Large enough that handing it over is work, small enough for a laptop."""
        assert 8e5 < sum(p.numel() for p in Policy(PolicyShape()).parameters()) < 1.2e6

    def test_later_tokens_do_not_leak_into_earlier_scores(self) -> None:
        """The transformer is causal: what follows a token does not change its probability."""
        policy, prompts = Policy(SMALL), task.draw_prompts(4, 3, generator())
        tokens = task.answers(prompts)
        changed = tokens.clone()
        changed[:, -1] = 0
        before, after = policy.logprobs(prompts, tokens), policy.logprobs(prompts, changed)
        torch.testing.assert_close(before[:, :-1], after[:, :-1])

    def test_a_shape_that_does_not_divide_is_refused(self) -> None:
        """Each head gets the same share of the width."""
        with pytest.raises(ValueError, match="5 heads"):
            PolicyShape(width=32, heads=5)

    def test_the_cache_takes_one_token_at_a_time(self) -> None:
        """More would need a mask that is not there, so they are refused, not answered wrongly."""
        policy, prompts = Policy(SMALL), task.draw_prompts(2, 3, generator())
        _, past = policy(prompts)
        with pytest.raises(ValueError, match="one token at a time"):
            policy(prompts, past)


class TestRollout:
    def test_a_batch_carries_its_origin_and_its_shapes(self) -> None:
        """What the learner needs is all there, on the CPU, without a graph, and survives pickle."""
        prompts = task.draw_prompts(3, 2, generator())
        batch = rollout(Policy(SMALL), prompts, 4, 7, version=11, engine="b")
        batch = pickle.loads(pickle.dumps(batch))
        assert (batch.version, batch.engine) == (11, "b")
        assert batch.tokens.shape == batch.logprobs.shape == (3, 4, 2)
        assert batch.rewards.shape == (3, 4)
        assert torch.equal(batch.rewards, task.rewards(prompts[:, None], batch.tokens))
        assert batch.logprobs.dtype == batch.rewards.dtype == torch.float32
        assert not batch.logprobs.requires_grad

    def test_fields_that_do_not_belong_together_are_refused(self) -> None:
        """A batch put together wrongly is noticed where it is made, not in the learner."""
        batch = rollout(Policy(SMALL), task.draw_prompts(3, 2, generator()), 4, 7, version=0, engine="a")
        with pytest.raises(ValueError, match="belong together"):
            replace(batch, rewards=batch.rewards[:, :-1])
        with pytest.raises(ValueError, match="3 groups"):
            replace(batch, prompts=batch.prompts[:-1])

    def test_seeds_differ_by_every_part(self) -> None:
        """Step, engine and purpose each make another seed, and one that a generator accepts."""
        seeds = {derive_seed(0, step, engine) for step in range(50) for engine in ("a", "b")}
        assert len(seeds) == 100
        assert all(0 <= seed < 2**63 for seed in seeds)


class TestLearner:
    def test_advantages_are_centred_in_their_group(self) -> None:
        """The mean of each group is zero, its deviation one, and equal scores give no advantage at all."""
        scores = torch.rand(5, 8, generator=generator())
        scores[2] = 0.5
        advantages = group_advantages(scores)
        torch.testing.assert_close(advantages.mean(dim=1), torch.zeros(5), atol=1e-6, rtol=0)
        assert (advantages[2] == 0).all()
        deviations = advantages[[0, 1, 3, 4]].std(dim=1, correction=0)
        torch.testing.assert_close(deviations, torch.ones(4), atol=1e-2, rtol=0)

    @pytest.mark.parametrize(
        ("ratio", "advantage", "pushes"),
        [(1.0, 1.0, True), (1.5, 1.0, False), (0.5, -1.0, False), (1.5, -1.0, True), (0.5, 1.0, True)],
    )
    def test_a_sample_pushes_no_further_than_the_clip(
        self, ratio: float, advantage: float, pushes: bool
    ) -> None:
        """Beyond the clip a sample is felt only if it pushes back."""
        logratio = torch.tensor([math.log(ratio)], requires_grad=True)
        (slope,) = torch.autograd.grad(
            clipped_objective(logratio, torch.tensor([advantage]), 0.2).sum(), logratio
        )
        assert bool(slope.item()) is pushes

    def test_a_ratio_beyond_all_bounds_stays_finite(self) -> None:
        """Engines that are never synced make ratios that exp cannot hold; the loss must survive them."""
        assert torch.isfinite(clipped_objective(torch.tensor([500.0]), torch.tensor([-1.0]), 0.2)).all()

    def test_prompts_depend_on_seed_and_step_alone(self) -> None:
        """A learner asked twice gives the same prompts; another step or seed has others."""
        first, second, other = Learner(TINY), Learner(TINY), Learner(replace(TINY, seed=1))
        second.prompts(0)
        assert torch.equal(first.prompts(3), second.prompts(3))
        assert not torch.equal(first.prompts(3), first.prompts(4))
        assert not torch.equal(first.prompts(3), other.prompts(3))

    def test_it_learns_a_task_of_one_token(self) -> None:
        """Thirty steps on prompts of one digit at least double the reward."""
        stats, _ = run(TINY)
        assert mean_reward(stats[-5:]) > 2 * mean_reward(stats[:5])

    def test_without_sync_the_engines_stay_where_they_were(self) -> None:
        """Frozen engines earn the same to the end, however long the learner trains, and nothing blows up."""
        stats, learner = run(TINY, synced=False)
        assert mean_reward(stats[-10:]) < 1.3 * mean_reward(stats[:10]) < 0.2
        assert all(torch.isfinite(weight).all() for weight in learner.model.parameters())

    def test_a_run_repeats_bit_for_bit(self) -> None:
        """One seed, one history: the same rewards and the same weights."""
        (first, one), (second, two) = (run(replace(TINY, steps=4)) for _ in range(2))
        assert [replace(s, seconds=0) for s in first] == [replace(s, seconds=0) for s in second]
        state = two.model.state_dict()
        assert all(torch.equal(weight, state[name]) for name, weight in one.model.state_dict().items())

    def test_the_order_of_arrival_does_not_matter(self) -> None:
        """Whichever engine answers first, the weights come out the same."""
        learners = Learner(TINY), Learner(TINY)
        batches = sampled(learners[0], learners[0].policy, 0)
        learners[0].learn(batches)
        learners[1].learn(batches[::-1])
        state = learners[1].model.state_dict()
        assert all(
            torch.equal(weight, state[name]) for name, weight in learners[0].model.state_dict().items()
        )

    def test_half_a_batch_and_old_samples_will_do(self) -> None:
        """A missing engine and one that is a version behind are reported, and learned from."""
        learner = Learner(TINY)
        whole = learner.learn(sampled(learner, learner.policy, 0))
        half = sampled(learner, learner.policy, 1, engines=("a",))
        stale = learner.learn([replace(half[0], version=0)])
        assert (whole.samples, stale.samples) == (256, 128)
        assert (stale.oldest, learner.version) == (0, 2)

    def test_nothing_to_learn_from_is_an_error(self) -> None:
        """A step without any batch is for the caller to skip; the version does not move."""
        learner = Learner(TINY)
        with pytest.raises(ValueError, match="no batch"):
            learner.learn([])
        assert learner.version == 0

    def test_the_quick_run_learns_to_read(self) -> None:
        """The run for tests ends far above anything that a prompt-blind policy could earn."""
        settings = Settings.quick()
        stats, _ = run(settings)
        tenth = settings.steps // 10
        assert mean_reward(stats[-tenth:]) > 3 * mean_reward(stats[:tenth])
        assert mean_reward(stats[-tenth:]) > 5 * task.best_blind_reward(settings.digits)


class TestPlot:
    CURVES = (Curve("synced", [0.1, 0.2, math.nan, 0.8]), Curve("frozen", [0.1, 0.1, 0.1, 0.1]))

    def draw(self, title: str = "Reward") -> str:
        """The plot of some curves with marks."""
        level = Level("without reading the prompt", 0.1)
        return reward_svg(self.CURVES, title=title, failed={2, 1, 99}, level=level)

    def test_it_is_the_same_bytes_each_time(self) -> None:
        """Equal input, equal bytes: the picture can be checked in and compared."""
        assert self.draw() == self.draw()

    def test_it_is_valid_xml_with_all_that_was_asked_for(self) -> None:
        """Title, labels, a legend, two lines per curve and a cross per failed step on the axis."""
        root = ET.fromstring(self.draw())
        texts = [element.text for element in root.iter(f"{SVG}text")]
        wanted = ["Reward", "synced", "frozen", "failed round", "training step", "mean reward"]
        assert set(wanted) <= set(texts)
        curves = [path for path in root.iter(f"{SVG}path") if path.get("fill") == "none"]
        crosses = [path for path in root.iter(f"{SVG}path") if path.get("fill") is None]
        assert (len(curves), len(crosses)) == (4, 2 + 1)

    def test_labels_are_escaped(self) -> None:
        """A title may hold what XML forbids, and reads the same afterwards."""
        root = ET.fromstring(self.draw("a < b & \"c\" 'd' \x00"))
        assert root.findtext(f"{SVG}title") == "a < b & \"c\" 'd' \N{REPLACEMENT CHARACTER}"

    def test_a_gap_breaks_the_line(self) -> None:
        """Where nothing was measured, no line is drawn across."""
        (measured, *_) = (p for p in ET.fromstring(self.draw()).iter(f"{SVG}path") if p.get("fill") == "none")
        assert (measured.get("d") or "").count("M") == 2

    def test_no_curve_and_too_many_are_refused(self) -> None:
        """There is one colour for each."""
        for curves in ([], [Curve("x", [0.5])] * 5):
            with pytest.raises(ValueError, match="1 to 4 curves"):
                reward_svg(curves, title="")

    @pytest.mark.parametrize("last", [1, 5, 9, 40, 59, 119, 999, 12_345])
    def test_ticks_are_few_and_round(self, last: int) -> None:
        """Between two and ten steps are named, from 0 on."""
        found = ticks(last)
        assert found[0] == 0
        assert found[-1] <= last
        assert 2 <= len(found) <= 10

    def test_the_average_keeps_a_constant_curve(self) -> None:
        """Smoothing neither lifts nor lowers, not at the ends either, and leaves nan only where all is."""
        assert smoothed([0.25] * 60) == [0.25] * 60
        assert all(math.isnan(value) for value in smoothed([math.nan] * 60))
