"""The training loop of a DFlash drafter."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from kdtree_engine.checkpoints import check_drafter, open_model
from kdtree_engine.checkpoints.drafter_config import parse_drafter_config
from kdtree_engine.checkpoints.write import write_model
from kdtree_engine.drafter.dflash_model import DFlashModel
from kdtree_engine.drafter.load import build_drafter, drafter_tensors
from kdtree_engine.engine.build import open_tokenizer, resolve_device, stop_ids
from kdtree_engine.errors import OptionError
from kdtree_engine.log import progress
from kdtree_engine.model import Kimi, load_target
from kdtree_engine.training.blocks import BlockBatch, block_loss, right_guesses, run_blocks
from kdtree_engine.training.data import read_tokens
from kdtree_engine.training.lessons import Lesson, Lessons
from kdtree_engine.training.new_drafter import drafter_config, random_weights
from kdtree_engine.training.options import TrainOptions, TrainReport
from kdtree_engine.training.teacher import Teacher

log = logging.getLogger(__name__)

_CPU_LESSONS = 1 << 30  # bytes of kept hidden states
_CUDA_LESSONS_SHARE = 0.5  # of free memory


def train_drafter(
    model: Path, data: Sequence[Path], out: Path, options: TrainOptions
) -> TrainReport:
    """Train a drafter for the target in `model` on `data` and write it to the new folder `out`.

    Raises KDTreeError subclasses before any work for a folder, file or option that cannot be used.
    """
    if not data:
        raise OptionError("no training data; give at least one file")
    checkpoint = open_model(model)
    options.check(checkpoint.config.max_positions)
    device = resolve_device(options.device)
    settings = drafter_config(checkpoint.config, options)
    config = parse_drafter_config(settings, "the new drafter's config.json")
    check_drafter(config, checkpoint.config)
    tokenizer = open_tokenizer(model)
    end = min(stop_ids(checkpoint.config, tokenizer), default=None)
    with _new_folder(out):
        tokens = read_tokens(data, tokenizer, checkpoint.config.vocab_size, end)
        target = load_target(checkpoint, torch.float32, device, kernels=False)
        weights = random_weights(config, options.seed)
        student = build_drafter(config, weights, torch.float32, device)
        teacher = Teacher(target, options.batch, options.length, config.tap_layers)
        capacity = _CPU_LESSONS
        if device.type == "cuda":
            capacity = int(torch.cuda.mem_get_info(device)[0] * _CUDA_LESSONS_SHARE)
        lessons = Lessons(tokens, teacher, capacity, options.seed)
        report = Trainer(student, target, lessons, options).run()
        trained = drafter_tensors(student)
        write_model(
            out,
            settings,
            {name: tensor.to("cpu", torch.bfloat16) for name, tensor in trained.items()},
        )
    return report


@contextmanager
def _new_folder(out: Path) -> Iterator[None]:
    """Make the folder `out` before any work, since hours later is too late to find that it cannot
    be written. What was made here and is still empty at the end is removed. Raises OptionError.
    """
    try:
        made = [folder for folder in (out, *out.parents) if not folder.exists()]
        if out.is_dir() and any(out.iterdir()):
            raise OptionError(f"{out}: exists and is not empty; choose another folder")
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise OptionError(f"{out}: cannot be written ({error.strerror})") from error
    try:
        yield
    finally:
        for folder in made:
            with suppress(OSError):  # not empty
                folder.rmdir()


class Trainer:
    """One run: AdamW, warm-up, constant rate, then decay to zero; clipped gradients."""

    def __init__(
        self, student: DFlashModel, target: Kimi, lessons: Lessons, options: TrainOptions
    ) -> None:
        self.student, self.target, self.lessons, self.options = student, target, lessons, options
        self.parameters = [tensor.requires_grad_() for tensor in student.parameters()]
        self.random = torch.Generator().manual_seed(options.seed)
        decayed = [tensor for tensor in self.parameters if tensor.dim() > 1]
        others = [tensor for tensor in self.parameters if tensor.dim() == 1]
        self.optimiser = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": options.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=options.learning_rate,
            betas=(0.9, 0.95),
            fused=target.device.type == "cuda",
        )

    def run(self) -> TrainReport:
        """Train to the last step or second, then measure."""
        options = self.options
        self.lessons.fill()
        begun = time.monotonic()
        loss, step = math.nan, 0
        running: Tensor | None = None
        with progress("training", options.steps) as meter:
            while step < options.steps:
                elapsed = time.monotonic() - begun
                if options.seconds and elapsed >= options.seconds:
                    break
                done = max(
                    step / options.steps, elapsed / options.seconds if options.seconds else 0
                )
                latest = self.step(done)
                running = latest if running is None else 0.98 * running + 0.02 * latest
                step += 1
                note = ""
                if step % options.log_every == 0:
                    loss = self._checked(float(running), step)
                    note = f"loss {loss:.3f}"
                    log.info("step %d, %.0f s: %s", step, elapsed, note)
                meter.advance(1, note)
        loss = loss if running is None else self._checked(float(running), step)
        accuracy, chain = self.measure()
        return TrainReport(
            step,
            time.monotonic() - begun,
            step * options.batch * options.length,
            sum(tensor.numel() for tensor in self.parameters),
            loss,
            accuracy,
            chain,
        )

    def _checked(self, loss: float, step: int) -> float:
        """The loss; OptionError where it, or a weight, is no longer a number."""
        if math.isfinite(loss) and all(bool(one.isfinite().all()) for one in self.parameters):
            return loss
        raise OptionError(
            f"after step {step} the loss is {loss:g}, and it or a weight is no finite number any "
            f"more; nothing was written: lower learning_rate ({self.options.learning_rate:g}) or "
            f"weight_decay ({self.options.weight_decay:g})"
        )

    def step(self, done: float) -> Tensor:
        """One optimiser step, `done` (0..1) of the way through; the loss, detached."""
        options = self.options
        for group in self.optimiser.param_groups:
            group["lr"] = options.learning_rate * self.rate(done)
        blocks = self.blocks(self.lessons.next())
        loss = block_loss(blocks, options.gamma, options.distil)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters, options.clip)
        self.optimiser.step()
        return loss.detach()

    def rate(self, done: float) -> float:
        """Warm up, stay, decay linearly: a fraction of the learning rate."""
        options = self.options
        return min(1.0, (done + 1e-3) / options.warm_up, max(0.0, 1.0 - done) / options.decay)

    def anchors(self, device: torch.device) -> Tensor:
        """Random root positions [B, N] whose blocks lie inside the window."""
        options = self.options
        most = options.length - options.block_size
        shape = (options.batch, options.anchors)
        return torch.randint(most + 1, shape, generator=self.random).to(device)

    def blocks(self, lesson: Lesson) -> BlockBatch:
        """Blocks at random anchors of a lesson."""
        anchors = self.anchors(lesson.tokens.device)
        return run_blocks(self.student, self.target, lesson, anchors)

    @torch.no_grad()
    def measure(self) -> tuple[list[float], float]:
        """Right first guesses per slot and tokens per chain step, on held-out sequences."""
        right = torch.cat(
            [right_guesses(self.blocks(lesson)) for lesson in self.lessons.held()]
        ).float()
        chain = 1.0 + float(torch.cumprod(right, 1).sum(1).mean())
        return [float(share) for share in right.mean(0)], chain
