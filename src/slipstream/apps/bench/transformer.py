"""A small GPT: a decoder-only transformer with layer norms before each part, learnt positions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.errors import ConfigError

INITIAL_STD = 0.02
MLP_FACTOR = 4


class Attention(nn.Module):
    """Attention with several heads; each position sees itself and earlier ones."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)  # queries, keys, values
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.inputs(x).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        output: Tensor = self.output(attended.transpose(1, 2).reshape(batch, length, width))
        return output


class Block(nn.Module):
    """A block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up = nn.Linear(width, MLP_FACTOR * width)
        self.down = nn.Linear(MLP_FACTOR * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return output


class Gpt(nn.Module):
    """A model from characters' numbers to (rows, positions, symbols) logits of the next character.

    A tied head has the embedding's own weights (Press and Wolf, 2017).
    """

    def __init__(
        self, symbols: int, *, layers: int, width: int, heads: int, context: int, tied: bool = False
    ) -> None:
        check_sizes(layers=layers, width=width, heads=heads, context=context)
        super().__init__()
        self.characters = nn.Embedding(symbols, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)
        self._initialise(layers)
        if tied:
            self.head.weight = self.characters.weight

    def _initialise(self, layers: int) -> None:
        """Initialise as GPT-2: the more layers, the less each adds to the residual stream."""
        nn.init.normal_(self.positions, std=INITIAL_STD)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                adds = name.endswith(("attention.output", "down"))
                std = INITIAL_STD / math.sqrt(2 * layers) if adds else INITIAL_STD
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.characters(characters) + self.positions[: characters.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def check_sizes(*, layers: int, width: int, heads: int, context: int) -> None:
    """Check the sizes of a net.

    Raises:
        ConfigError: A size is less than 1, or heads do not divide the width.
    """
    for name, size in (
        ("layers", layers),
        ("width", width),
        ("heads", heads),
        ("context", context),
    ):
        if size < 1:
            raise ConfigError(f"gpt: {name}={size}; take at least 1")
    if width % heads:
        near = max(1, round(width / heads)) * heads
        raise ConfigError(
            f"gpt: a width of {width} does not divide into {heads} heads; take width={near}"
        )
