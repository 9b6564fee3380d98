"""Serves a target with drafts over OpenAI's HTTP interface, for trying a head and for measuring it.

    specdec serve checkpoint=checkpoints/shipped/eagle3
    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}'

http://localhost:8000 is a page on which drafted and plain answers are written side by side. Beside OpenAI's fields,
requests may have top_k, repetition_penalty, ignore_eos, structured_outputs, chat_template_kwargs, and speculate=false
for an answer without drafts. record=FOLDER records conversations, to train on them (docs/adapting.md); nothing is
recorded without it. allow_weights=FOLDER: POST /v1/draft_weights {"folder": .., "version": ..} loads another head from
there, which drafts all later answers. Ctrl-C or SIGTERM: running answers are finished, a second one ends them.
docs/serving.md says when to serve with vLLM, SGLang or llama.cpp instead.
"""

from specdec.options.command_line import read_command

from specdec.options.run_command import run_command
from specdec.tools.server.serve import ServeOptions, find_presets, run_server


def main(arguments: list[str] | None = None) -> None:
    run_server(read_command("serve", ServeOptions, __doc__, arguments, presets=find_presets))


if __name__ == "__main__":
    run_command(main, ServeOptions)
