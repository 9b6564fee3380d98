"""The half of scripts/compare_training.py that trains with Speculators: it runs in the engines' environment.

Speculators' own configuration, draft model, data set, collation and trainer are used; only what it takes from an
accelerator is set to the CPU. Reads one request per line of standard input, answers each with a line of JSON.
"""

import argparse
import json
import os
import sys
import time


def build(data: str, target: str, batches: list[list[int]], flags: list[str], compiled: bool, train_head: bool):
    """Speculators' trainer for the rows of `data`, one batch for each list of row numbers; flags: of its own command

    train_head: its LM head, which it starts from the target's and freezes
    """
    sys.argv = ["train", "--verifier-name-or-path", target, "--data-path", data, "--save-path", f"{data}/save", *flags]
    import torch
    from hs_connectors import FileTransfer
    from speculators.models.eagle3.data import shift_batch
    from speculators.train import cli
    from speculators.train.config import TrainConfig
    from speculators.train.data import ArrowDataset, CollateFn
    from speculators.train.trainer import Trainer, TrainerConfig

    class OnCpu(Trainer):
        def setup_model(self):
            self.device_type = self.local_rank = "cpu"  # the trainer knows accelerators only
            super().setup_model()

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    args = argparse.Namespace(**TrainConfig.resolve().flatten())
    cli.set_seed(args.seed)
    d2t, t2d, size = cli.parse_vocab_mappings(args)
    model_class = cli.SpeculatorModel.registry[args.speculator_type]
    model = cli.build_draft_model(args, model_class, t2d, d2t, size)
    model.lm_head.weight.requires_grad_(train_head)
    if compiled:  # it compiles for CUDA only
        model.forward = torch.compile(model.forward)
    dtype = getattr(torch, args.hidden_states_dtype)
    dataset = ArrowDataset(
        args.total_seq_len, data, FileTransfer(cli.Path(data) / "hidden_states"), on_missing="raise",
        hidden_states_dtype=dtype,
    )  # fmt: skip
    width = model.config.transformer_layer_config.hidden_size
    collate = CollateFn(
        args.total_seq_len, width, num_target_layers=len(model.target_layer_ids), dtype=dtype, preprocess=shift_batch
    )
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches, collate_fn=collate)
    call, _ = model_class.get_trainer_kwargs(**vars(args))
    given = {name: getattr(args, name) for name in TrainerConfig._fields if hasattr(args, name)}
    given |= {"num_epochs": 1, "train_call_kwargs": call, "hidden_states_dtype": dtype, "log_freq": 10**9}
    trainer = OnCpu(model, TrainerConfig(**given), loader)
    trainer.global_step = 1  # step 0 is always logged, which waits for an accelerator
    return trainer


def train(trainer, done: str = os.devnull) -> dict:
    """One epoch. -> seconds, CPU seconds and loss of each step. done: a file that gets one character for each of them"""
    moments, losses = [(time.perf_counter(), time.process_time())], []

    def note(module, arguments, output):
        losses.append(output[1].detach())

    trainer.model.register_forward_hook(note)
    with open(done, "w", buffering=1) as file:

        def step() -> None:
            moments.append((time.perf_counter(), time.process_time()))
            print(file=file)

        trainer.train_epoch(0, step_callback=step)
    trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    seconds, busy = ([b - a for a, b in zip(kind, kind[1:])] for kind in zip(*moments))
    return {"seconds": seconds, "cpu_seconds": busy, "losses": [float(loss) for loss in losses], "trained": trained}


def serve(options: dict) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    trainer = build(**options)
    print("{}", file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        reply = train(trainer, request.get("done", os.devnull))
        if "save" in request:
            trainer.model.save_pretrained(request["save"])
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
