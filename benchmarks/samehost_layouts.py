"""What is handed over: the parameter lists of two small models, as their checkpoints have them, in bf16.

The bytes are random: a page of zeros may be dealt with faster than any weights are. ``renew`` changes every
one of them before a round, so that a receiver that missed a piece of any round has another checksum.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

__all__ = ["LAYOUTS", "MIB", "Layout", "checksum", "renew", "tensors"]

MIB = 1 << 20
_BYTES = 2  # of one bf16


@dataclass(frozen=True, slots=True)
class Layout:
    """Names and shapes of a model whose embedding is tied to its head.

    Args:
        name: what it is called here.
        model: whose list it is.
        layers: how many blocks.
        hidden: width of the model.
        inner: width inside a block's perceptron.
        keys: width of keys and values.
        vocabulary: rows of the embedding.
        biases: whether queries, keys and values have some.
    """

    name: str
    model: str
    layers: int
    hidden: int
    inner: int
    keys: int
    vocabulary: int
    biases: bool

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every parameter, in the checkpoint's order."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            for name, shape in self._block():
                yield f"model.layers.{layer}.{name}", shape
        yield "model.norm.weight", (self.hidden,)

    def _block(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for letter, rows in (("q", self.hidden), ("k", self.keys), ("v", self.keys)):
            yield f"self_attn.{letter}_proj.weight", (rows, self.hidden)
            if self.biases:
                yield f"self_attn.{letter}_proj.bias", (rows,)
        yield "self_attn.o_proj.weight", (self.hidden, self.hidden)
        yield "mlp.gate_proj.weight", (self.inner, self.hidden)
        yield "mlp.up_proj.weight", (self.inner, self.hidden)
        yield "mlp.down_proj.weight", (self.hidden, self.inner)
        yield "input_layernorm.weight", (self.hidden,)
        yield "post_attention_layernorm.weight", (self.hidden,)

    @property
    def count(self) -> int:
        """How many tensors."""
        return sum(1 for _ in self.shapes())

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return sum(prod(shape) for _, shape in self.shapes()) * _BYTES


LAYOUTS: Mapping[str, Layout] = {
    each.name: each
    for each in (
        Layout("smol", "SmolLM-135M", 30, 576, 1536, 192, 49152, biases=False),
        Layout("qwen", "Qwen2.5-0.5B", 24, 896, 4864, 128, 151936, biases=True),
        Layout("tiny", "none: for trying the benchmark itself", 2, 64, 128, 16, 512, biases=True),
    )
}


def tensors(layout: Layout, seed: int) -> dict[str, torch.Tensor]:
    """The model, every byte drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator).view(
            torch.bfloat16
        )
        for name, shape in layout.shapes()
    }


def renew(held: Mapping[str, torch.Tensor], step: int) -> None:
    """Change every byte: the weights of another step."""
    mask = (step % 0x7F + 1) * 0x0101  # no byte of it is zero
    for tensor in held.values():
        tensor.view(torch.int16).bitwise_xor_(mask)


def checksum(held: Mapping[str, torch.Tensor]) -> int:
    """Of names and bytes, in the order of the names; nothing is copied for it."""
    total = 0
    for name in sorted(held):
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(held[name].detach().contiguous().view(torch.uint8).numpy().data, total)
    return total
