"""This project's half of scripts/compare_training.py: train.py as it is, but its loop answers requests.

Reads one request per line of standard input, {"steps": N} or {"export": FOLDER, "cached": BOOL}, and answers each with a line of JSON.
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import datasets
import numpy
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import save_file

from specdec.target.model import Target
from train.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]


class Answering(Trainer):
    """A trainer whose `fit` takes the steps that it is asked for. Nothing is saved or validated."""

    replies = None  # where answers go

    def fit(self, record=None) -> None:
        say(self.replies, {})
        self.objective.train()
        for line in sys.stdin:
            request = json.loads(line)
            say(
                self.replies,
                self.export(Path(request["export"]), request["cached"])
                if "export" in request
                else self.run(request["steps"]),
            )
        self.replies.flush()
        os._exit(0)  # nothing of this run is kept

    def run(self, steps: int) -> dict:
        """-> seconds, CPU seconds and loss of each step, and all tokens"""
        seconds, busy, losses, before = [], [], [], self.seen
        for _ in range(steps):
            start, begun = time.perf_counter(), time.process_time()
            step = self.take_step(compare=self.step % self.settings.log_every == 0)
            losses.append(float(step.loss))
            self.step, self.seen = self.step + 1, self.seen + step.tokens
            seconds.append(time.perf_counter() - start)
            busy.append(time.process_time() - begun)
        trained = sum(parameter.numel() for parameter in self.drafter.parameters() if parameter.requires_grad)
        tokens = self.seen - before
        return {"seconds": seconds, "cpu_seconds": busy, "losses": losses, "tokens": tokens, "trained": trained}

    @torch.no_grad()
    def export(self, folder: Path, cached: bool) -> dict:
        """Writes what Speculators reads: rows, the target's states for them, and the draft vocabulary.

        -> the rows' numbers of each step, and each step's tokens. cached: this project's cache of features is filled on the way.
        """
        drafter, material = self.drafter, self.material
        (folder / "hidden_states").mkdir(parents=True)
        rows, batches, tokens = [], [], []
        for step in range(self.settings.steps):
            indices = self.indices(step, 0)
            batch = material.collate(indices)
            if cached:
                material.features(batch)
            batches.append([])
            for document in range(int(batch.documents.max()) + 1):
                inside = batch.documents[0] == document
                ids, mask = batch.tokens[0, inside], batch.loss_mask[0, inside]
                hidden = {"hidden_states": states(drafter.target, drafter.target_layers, ids), "token_ids": ids}
                save_file(hidden, folder / "hidden_states" / f"hs_{len(rows)}.safetensors")
                batches[-1].append(len(rows))
                rows.append({"input_ids": ids.tolist(), "loss_mask": mask.int().tolist(), "seq_len": len(ids)})
            tokens.append(int((batch.documents >= 0).sum()))
        dataset = datasets.Dataset.from_list(rows)
        dataset.set_format("torch", columns=["input_ids", "loss_mask"], output_all_columns=True)
        dataset.save_to_disk(str(folder))
        vocab = drafter.draft_to_target
        chosen = torch.zeros(drafter.target.vocab_size, dtype=torch.bool)
        chosen[vocab] = True
        numpy.save(folder / f"d2t-{len(vocab)}.npy", (vocab - torch.arange(len(vocab))).numpy())
        numpy.save(folder / f"t2d-{len(vocab)}.npy", chosen.numpy())
        return {"batches": batches, "tokens": tokens}


def states(target: Target, layers: tuple[int, ...], ids: torch.Tensor) -> torch.Tensor:
    """ids [S] of one document -> [S, F + 1, D]: the hidden states asked for, then the last before its norm.

    Speculators applies the norm itself.
    """
    last = []
    handle = target.norm.register_forward_pre_hook(lambda module, arguments: last.append(arguments[0]))
    output = target.read(ids[None], layers)
    handle.remove()
    return torch.cat([output.features[0].unflatten(-1, (-1, target.width)), last[0][0][:, None]], dim=1).contiguous()


def say(replies, reply: dict) -> None:
    print(json.dumps(reply), file=replies, flush=True)


def main() -> None:
    options = json.loads(sys.argv[1])
    Answering.replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec = importlib.util.spec_from_file_location("train_command", ROOT / "train.py")  # `train` is the package
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    command.build.Trainer = Answering
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("train", overrides=options["overrides"])
    os.chdir(options["folder"])  # the run's folder is made here
    Path("checkpoints", config.run).mkdir(parents=True, exist_ok=True)
    command.fit(config)


if __name__ == "__main__":
    main()
