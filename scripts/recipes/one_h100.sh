#!/bin/sh
# An EAGLE-3 head for Qwen3-8B on one H100, from public prompts to vLLM. Run from the root of the clone, in an environment of its own: pip install vllm==0.33.0 -e .
# Never run by this project: its figures are counted (plan=h100). It stops at the first error; the same command continues.
set -e
TARGET=qwen3-8b NAME=Qwen/Qwen3-8B
PROMPTS=HuggingFaceH4/ultrachat_200k # 200,000 first turns (MIT); or Magpie-Align/Magpie-Qwen2.5-Pro-300K-Filtered, or your own traffic
ANSWERS=checkpoints/$TARGET-answers.jsonl

# 1 The target's answers. The server takes the whole GPU, and ends before training begins
vllm serve $NAME --max-model-len 8192 > checkpoints/vllm.log 2>&1 &
SERVER=$!
trap 'kill $SERVER 2> /dev/null || true' EXIT
until curl -sf localhost:8000/health > /dev/null; do kill -0 $SERVER && sleep 5; done # ends if the server has
specdec answer engine=http://localhost:8000 target.name=$NAME prompts=$PROMPTS split=train_sft limit=50000 max_new_tokens=2048 \
  in_flight=256 template.enable_thinking=false decode.temperature=0.7 out=$ANSWERS
kill $SERVER; wait $SERVER 2> /dev/null || true

# 2 Held-out prompts that no answer belongs to: the last ones of the same set
python -c "
import datasets, json
rows = datasets.load_dataset('$PROMPTS', split='test_sft').select(range(200))
open('checkpoints/$TARGET-heldout.jsonl', 'w').writelines(json.dumps({'prompt': row['prompt']}) + '\n' for row in rows)"

# 3 What the run will read, need and take, then the run
OPTIONS="head=eagle3 target=$TARGET machine=h100 data.train=$ANSWERS data.heldout=checkpoints/$TARGET-heldout.jsonl run=eagle3-$TARGET"
python train.py $OPTIONS plan=true
accelerate launch --num_processes 1 train.py $OPTIONS resume=auto

# 4 What it is worth, and the launch line of vLLM
specdec evaluate checkpoint=checkpoints/eagle3-$TARGET prompts=checkpoints/$TARGET-heldout.jsonl chains=3,5 limit=64 decode.temperature=0,1
[ -d checkpoints/eagle3-$TARGET-vllm ] || specdec export checkpoint=checkpoints/eagle3-$TARGET format=vllm out=checkpoints/eagle3-$TARGET-vllm
