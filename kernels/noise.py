"""Gumbel noise on the device, and draws with it. The formula is the sampler contract's.

Legend: r rows, K candidates, V vocabulary. On a CPU the noise comes from `octavo.kernels.random`,
elsewhere from the same generator written with torch; both give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.kernels import random

_LOW = 0xFFFFFFFF
_ELEMENTS = 2**24
_ELEMENTS_CPU = 2**20
_BLOCKS_CPU = 2**13
# A token further below the maximum than this cannot win, whatever the two draw; and what rounding
# of the sums to float32 may add, relative to the maximum.
_REACH = random.GUMBEL_MAX - random.GUMBEL_MIN + 0.01
_ROUNDING = 2.0**-22

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class DrawKeys:
    """What names the draws of r rows: seed, position, index int64[r]."""

    seed: torch.Tensor
    position: torch.Tensor
    index: torch.Tensor

    def rows(self, start: int, stop: int) -> DrawKeys:
        return DrawKeys(self.seed[start:stop], self.position[start:stop], self.index[start:stop])


def noise_at(keys: DrawKeys, token_ids: torch.Tensor) -> torch.Tensor:
    """float32[r, K] noise of the tokens int64[r, K]."""
    if token_ids.device.type == "cpu":
        seed, position, index = (
            tensor.numpy()[:, None] for tensor in (keys.seed, keys.position, keys.index)
        )
        return torch.from_numpy(random.gumbel(seed, position, index, token_ids.numpy()))
    words = philox_words(keys, token_ids >> 2)
    stacked = torch.stack(words, dim=-1)
    return gumbel_of(stacked.gather(-1, (token_ids & 3).unsqueeze(-1)).squeeze(-1))


def draw_all(scaled: torch.Tensor, keys: DrawKeys) -> torch.Tensor:
    """int64[r]: argmax of scaled float32[r, V] plus noise, over the whole vocabulary."""
    on_cpu = scaled.device.type == "cpu"
    draw = draw_where_possible if on_cpu else draw_everywhere
    step = max(1, (_ELEMENTS_CPU if on_cpu else _ELEMENTS) // scaled.shape[1])
    chosen = [
        draw(scaled[start : start + step], keys.rows(start, start + step))
        for start in range(0, len(scaled), step)
    ]
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen)


def draw_everywhere(scaled: torch.Tensor, keys: DrawKeys) -> torch.Tensor:
    """`draw_all` with noise for every token."""
    vocab_size = scaled.shape[1]
    blocks = torch.arange((vocab_size + 3) // 4, device=scaled.device).unsqueeze(0)
    words = philox_words(keys, blocks)
    noise = gumbel_of(torch.stack(words, dim=-1)).flatten(1)
    return (scaled + noise[:, :vocab_size]).argmax(dim=1)


def philox_words(keys: DrawKeys, blocks: torch.Tensor) -> Words:
    """Four tensors of int64 words for the counters (blocks[r, K], position, index, 0). The shapes
    broadcast to [r, K]."""
    m0, m1 = random.PHILOX_MULTIPLIERS
    w0, w1 = random.PHILOX_WEYL
    seed = keys.seed.unsqueeze(1)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    c0, c1, c2 = blocks, keys.position.unsqueeze(1) & _LOW, keys.index.unsqueeze(1) & _LOW
    c3 = torch.zeros_like(c1)
    for number in range(random.PHILOX_ROUNDS):
        if number:
            k0, k1 = (k0 + w0) & _LOW, (k1 + w1) & _LOW
        # Products of 32-bit words wrap in int64; the mask makes the shift of them a logical one,
        # and removes what c1 and c3 hold above bit 31.
        p0, p1 = c0 * m0, c2 * m1
        c0 = ((p1 >> 32) ^ c1 ^ k0) & _LOW
        c2 = ((p0 >> 32) ^ c3 ^ k1) & _LOW
        c1, c3 = p1, p0
    return c0, c1 & _LOW, c2, c3 & _LOW


def gumbel_of(words: torch.Tensor) -> torch.Tensor:
    """float32 noise of int64 words."""
    u = (words.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(u)).float()


def draw_where_possible(scaled: torch.Tensor, keys: DrawKeys) -> torch.Tensor:
    """`draw_all` on a CPU: only blocks of four tokens in which one can win get noise. The list of
    such blocks is cut into pieces that stay in the cache."""
    array = scaled.numpy()
    num_rows, vocab_size = array.shape
    if vocab_size % 4:
        missing = ((0, 0), (0, -vocab_size % 4))
        array = np.pad(array, missing, constant_values=-np.inf)
    fours = array.reshape(num_rows, -1, 4)
    tops = fours.max(axis=2)
    top = tops.max(axis=1, keepdims=True).astype(np.float64)
    rows, blocks = (tops >= top - (_REACH + np.abs(top) * _ROUNDING)).nonzero()
    seed, position, index = (t.numpy()[rows] for t in (keys.seed, keys.position, keys.index))
    best = np.empty(len(rows), np.float32)
    token = np.empty(len(rows), np.int64)
    for start in range(0, len(rows), _BLOCKS_CPU):
        part = slice(start, start + _BLOCKS_CPU)
        score = fours[rows[part], blocks[part]]
        score += random.gumbel_blocks(seed[part], position[part], index[part], blocks[part])
        lane = score.argmax(axis=1)
        best[part] = score[np.arange(len(lane)), lane]
        token[part] = blocks[part] * 4 + lane
    chosen = np.zeros(num_rows, np.int64)
    if not len(rows):  # every row has a NaN
        return torch.from_numpy(chosen)
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    row_best = np.full(num_rows, np.inf, np.float32)
    row_best[rows[starts]] = np.maximum.reduceat(best, starts)
    winners = np.flatnonzero(best == row_best[rows])[::-1]
    chosen[rows[winners]] = token[winners]  # reversed: the lowest id is written last
    return torch.from_numpy(chosen)
