"""Train a small diffusion transformer on videos that are split over ranks, and generate with it.

    torchrun --nproc-per-node 2 examples/video_transformer.py

Text and video go through the same blocks, as in Flux or HunyuanVideo. Every rank holds the text and
some rows of the video. Only attention mixes rows, so (1) to (5) are all that a training loop needs.

Rank 0 then trains the twin in one process, and generates with it. The exit status is 1 if losses
or video are farther from float64 than those of twins with random roundings.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import ring_attn
from common import rope, start
from ring_attn import JointLayout, SequenceLayout, testing

FRAMES, HEIGHT, WIDTH, CHANNELS, TEXT = 3, 5, 5, 4, 6
ROWS = FRAMES * HEIGHT * WIDTH
DIM, HEADS = 32, 4

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute torch's attention over a whole sequence; (batch, rows, heads, headdim) each."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class Block(nn.Module):
    """Joint attention and an MLP, both modulated by the time."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.time = nn.Linear(DIM, 2 * DIM)
        self.norm = nn.LayerNorm(DIM, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor, time: Tensor, positions: Tensor) -> Tensor:
        shift, scale = self.time(time)[:, None].chunk(2, -1)
        normed = self.norm(x) * (1 + scale) + shift
        # (batch, rows, 3 * dim) -> three of (batch, rows, heads, headdim)
        q, k, v = self.qkv(normed).unflatten(-1, (3, HEADS, DIM // HEADS)).unbind(2)
        out = self.attention(rope(q, positions), rope(k, positions), v)
        x = x + self.out(out.flatten(2))
        return x + self.mlp(self.norm(x))


class VideoTransformer(nn.Module):
    """A small transformer with the same initial weights in every process."""

    def __init__(self, attention: Attention = dense_attention) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            self.embed, self.text = nn.Linear(CHANNELS, DIM), nn.Embedding(16, DIM)
            self.time = nn.Linear(1, DIM)
            self.blocks = nn.ModuleList([Block(attention) for _ in range(2)])
            self.head = nn.Linear(DIM, CHANNELS)

    def forward(self, video: Tensor, text: Tensor, time: Tensor, positions: Tensor) -> Tensor:
        """Return the velocity of the rows of the video, (batch, rows, channels)."""
        x = torch.cat([self.text(text), self.embed(video)], dim=1)
        time = self.time(time[:, None])
        for block in self.blocks:
            x = block(x, time, positions[None])
        return self.head(x[:, text.size(1) :])


class Process:
    """A model and the rows of its process; with a layout of one rank, all rows."""

    def __init__(self, model: VideoTransformer, video: SequenceLayout) -> None:
        self.model, self.video = model, video
        self.rank = dist.get_rank() if video.world_size > 1 else 0
        # (1) Text first: every rank holds its TEXT rows, and some rows of the video.
        self.weight = model.head.weight  # for its dtype and device
        self.positions = JointLayout([TEXT, video]).position_ids(self.rank, self.weight.device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def noise(self, seed: int, batch: int) -> Tensor:
        """Return this process's rows of one noise, which depends on the seed alone."""
        # (2) Every rank draws the whole noise, which is small, and keeps its rows.
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(batch, ROWS, CHANNELS, generator=generator, dtype=torch.float64)
        return self.video.shard(whole.float().to(self.weight), self.rank)

    def step(self, seed: int, batch: int = 2) -> float:
        """Update the weights by flow matching on a batch; return the loss before."""
        generator = torch.Generator().manual_seed(1000 + seed)
        text = torch.randint(16, (batch, TEXT), generator=generator).to(self.weight.device)
        time = torch.rand(batch, generator=generator).to(self.weight)
        clean, noise = self.noise(2 * seed, batch).cumsum(-1), self.noise(2 * seed + 1, batch)
        mixed = torch.lerp(clean, noise, time[:, None, None])
        velocity = self.model(mixed, text, time, self.positions)
        # (3) The mean over the rows of all ranks, not of this rank.
        loss = (velocity - (noise - clean)).square().double().sum() / (batch * ROWS * CHANNELS)
        self.optimizer.zero_grad()
        loss.backward()
        if self.video.world_size > 1:
            # (4) Gradients are sums over the ranks, also those of the text, which all ranks hold.
            ring_attn.sync_gradients(self.model)
            dist.all_reduce(loss.detach())
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def generate(self, text: Tensor, num_steps: int = 4) -> Tensor:
        """Return the whole generated video, (batch, rows, channels)."""
        x = self.noise(seed=7, batch=len(text))
        for step in range(num_steps, 0, -1):
            time = x.new_full((len(text),), step / num_steps)
            x = x - self.model(x, text, time, self.positions) / num_steps
        # (5) The rows of all ranks, for the decoder.
        return ring_attn.unshard(x, self.video) if self.video.world_size > 1 else x


def run(process: Process, num_steps: int) -> Tensor:
    """Train, and return the losses and a generated video as one tensor."""
    losses = torch.tensor([process.step(seed) for seed in range(num_steps)], dtype=torch.float64)
    video = process.generate(torch.arange(TEXT, device=process.weight.device)[None])
    return torch.cat([losses.to(video.dtype), video.flatten()])


def main(args: argparse.Namespace, device: torch.device) -> bool:
    video = SequenceLayout.contiguous(ROWS, dist.get_world_size())
    attention = partial(ring_attn.ring_attention, layout=JointLayout([TEXT, video]))
    got = run(Process(VideoTransformer(attention).to(device), video), args.steps)
    if dist.get_rank() != 0:
        return True

    def twin(dtype: torch.dtype = torch.float32) -> Tensor:
        model = VideoTransformer().to(device, dtype)
        return run(Process(model, SequenceLayout.contiguous(ROWS, 1)), args.steps)

    verdict = testing.check_rounded(
        "losses and video", got, twin(torch.float64), testing.noisy_runs(twin, num=8)
    )
    print("losses", [round(loss, 6) for loss in got[: args.steps].tolist()])
    print(f"{'ok' if verdict.ok else 'FAILED'}: {verdict}, compared with float64")
    return verdict.ok


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2)
    start(partial(main, parser.parse_args()))
