"""A character transformer: 6 layers, 6 heads, 256 dimensions, sequences of 64.

256 is not divisible by 6, and the paper does not say how its heads are cut. Here each of the 6 heads has 42
dimensions: attention works in 252 and is projected back to 256.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Causal attention, then a two-layer network at each position; both normalised first and added."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inner = dim // heads * heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * self.inner, bias=False)
        self.out = nn.Linear(self.inner, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, hidden: Tensor) -> Tensor:
        """The hidden states of the next layer."""
        batch, length, _ = hidden.shape
        query, key, value = (
            part.reshape(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(hidden)).chunk(3, -1)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(batch, length, self.inner))
        return hidden + self.mlp(self.norm2(hidden))


class CharTransformer(nn.Module):
    """Scores of the next character at each position."""

    def __init__(self, vocabulary: int, dim: int = 256, layers: int = 6, heads: int = 6, length: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.register_buffer("positions", torch.arange(length), persistent=False)
        self.position = nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, characters: Tensor) -> Tensor:
        """Scores, one row of the vocabulary for each position."""
        hidden = self.embed(characters) + self.position(self.positions[: characters.shape[1]])
        return self.head(self.norm(self.blocks(hidden)))
