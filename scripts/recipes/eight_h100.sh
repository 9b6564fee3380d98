#!/bin/sh
# An EAGLE-3 head for Llama-3.3-70B on eight H100: four serve the target, four train. Run from the root of the clone, in an environment of its own: pip install vllm==0.33.0 -e .
# Never run by this project: its figures are counted (plan=true). It stops at the first error; the same command continues.
# A target that fits into one GPU needs no server: target=qwen3-8b machine=h100x8, and accelerate launch --num_processes 8.
set -e
TARGET=llama-3.3-70b NAME=meta-llama/Llama-3.3-70B-Instruct
PROMPTS=HuggingFaceH4/ultrachat_200k # 200,000 first turns (MIT)
ANSWERS=checkpoints/$TARGET-answers.jsonl ENGINE=http://localhost:8000

# 1 One server for answers and hidden states, on GPUs 0 to 3
CUDA_VISIBLE_DEVICES=0,1,2,3 specdec launch_engine target.name=$NAME heads=eagle3 python="$(command -v python)" max_model_len=8192 \
  more="--tensor-parallel-size 4" > checkpoints/engine.log 2>&1 &
SERVER=$!
trap 'kill $SERVER 2> /dev/null || true' EXIT
until curl -sf localhost:8000/health > /dev/null; do kill -0 $SERVER && sleep 5; done # ends if the server has

# 2 The target's answers, and held-out prompts that none of them belongs to
specdec answer engine=$ENGINE target.name=$NAME prompts=$PROMPTS split=train_sft limit=100000 max_new_tokens=2048 in_flight=256 \
  decode.temperature=0.7 out=$ANSWERS
python -c "
import datasets, json
rows = datasets.load_dataset('$PROMPTS', split='test_sft').select(range(200))
open('checkpoints/$TARGET-heldout.jsonl', 'w').writelines(json.dumps({'prompt': row['prompt']}) + '\n' for row in rows)"

# 3 Train beside the server, on GPUs 4 to 7
OPTIONS="head=eagle3 target=$TARGET machine=h100_engine machine.num=4 features.engine=$ENGINE data.train=$ANSWERS"
OPTIONS="$OPTIONS data.heldout=checkpoints/$TARGET-heldout.jsonl run=eagle3-$TARGET"
python train.py $OPTIONS plan=true
CUDA_VISIBLE_DEVICES=4,5,6,7 accelerate launch --num_processes 4 train.py $OPTIONS resume=auto

# 4 The launch line of vLLM; tau is in the run's report
[ -d checkpoints/eagle3-$TARGET-vllm ] || specdec export checkpoint=checkpoints/eagle3-$TARGET format=vllm out=checkpoints/eagle3-$TARGET-vllm
