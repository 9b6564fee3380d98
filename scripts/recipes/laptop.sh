#!/bin/sh
# From prompts to a served head on a laptop, with the default target. Run from the root of the clone, after `make setup`.
# It stops at the first error; the same command continues, as each step does. About 30 minutes on two cores with bfloat16 units.
set -e
. .venv/bin/activate
TARGET=targets/smollm2-135m

# 1 What the target itself answers, at the temperatures that are served
specdec answer target.name=$TARGET prompts=data/prompts_train.jsonl out=checkpoints/laptop-answers.jsonl limit=200 decode.temperature=0,1

# 2 What the run will read, need and take; change options until it suits
python train.py head=eagle3 run=laptop data.train=checkpoints/laptop-answers.jsonl plan=true

# 3 Train. Everything that is not given is decided from this machine and these answers, and printed
accelerate launch train.py head=eagle3 run=laptop data.train=checkpoints/laptop-answers.jsonl resume=auto

# 4 What it is worth, beside drafting that needs no training
specdec evaluate checkpoint=checkpoints/laptop proposers=suffix,auto chains=2,4 limit=8 out=checkpoints/laptop-comparison

# 5 An export for an engine, and a server to try it (Ctrl-C ends it)
[ -d checkpoints/laptop-vllm ] || specdec export checkpoint=checkpoints/laptop format=vllm out=checkpoints/laptop-vllm
specdec serve checkpoint=checkpoints/laptop
