"""The forms in which the demo's trainer holds its policy, and whole weights as torch gathers them."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from .policy import Block, Policy

__all__ = ["FORMS", "PLAIN", "WORLD", "whole", "wrapped"]

PLAIN = "plain"
FORMS = (PLAIN, "fsdp1", "fsdp2")
"""One process with the policy as it is; or ranks among which FSDP of one kind or the other spreads it."""

WORLD = 2
"""Ranks of a trainer that shards."""


def wrapped(form: str, policy: Policy) -> nn.Module:
    """The policy as this form trains it. For a sharded one each layer is a unit, and so is what is left.

    The two names of one tensor stay in one unit: there FSDP of either kind keeps them one tensor.
    """
    if form == PLAIN:
        return policy
    if form == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in policy.modules():
            if isinstance(block, Block):
                fully_shard(block)
        fully_shard(policy)
        return policy
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is the older of the two is why it is here
        return FullyShardedDataParallel(
            policy, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"),
            use_orig_params=True,
        )  # fmt: skip


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All weights, whole, on every rank: to compare with what an engine has.

    A sharded policy is gathered by torch's own checkpoints, which know nothing of the export that is sent.
    """
    if isinstance(model, Policy) and not any(hasattr(each, "placements") for each in model.parameters()):
        return dict(model.state_dict())
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: each for name, each in found.items() if isinstance(each, Tensor)}
