"""Decodes every question plainly and with drafts, in turn, and reports what the drafts gain.

    specdec evaluate checkpoint=checkpoints/shipped/eagle3 decode.temperature=0,1 limit=16
    specdec evaluate checkpoint=checkpoints/a,checkpoints/b proposers=auto,suffix chains=2,4 trees=4x3x8 out=compared
    specdec evaluate checkpoint=checkpoints/a suite=spec_bench prompts=downloads/spec_bench chains=4
    specdec evaluate checkpoint=checkpoints/a suite=gsm8k protocol=deepspec
    specdec evaluate checkpoint=checkpoints/a batch=1,4,16,64 ignore_stop=true

Prints tau (the acceptance length: tokens emitted per target pass of a round, bonus or correction token counted),
speedup and whether answers are unchanged, with 95 % intervals over questions, and the protocol that the figures depend
on. verbose=true also prints tau by category, and as publications count it; protocol= prints the latter, too
(docs/suites.md). The folder OUT gets results.json, results.md, results.html with all of it, and rows.jsonl with each
finished request. After Ctrl-C or a kill the same command continues. A proposer that holds a trained head is decoded
with each of the heads. Without decoding, `specdec replay` has tau of a chain, and `specdec choose` predicts what pays
at which load.
"""

from specdec.options.command_line import read_command, split_list

from specdec.core import extensions, progress
from specdec.measuring import questions
from specdec.measuring.evaluate import EvaluateOptions, evaluate, predict_nothing
from specdec.options.run_command import run_command


def main(arguments: list[str] | None = None) -> None:
    suites, choice = extensions.find_tool("suites.suites"), extensions.find_tool("choose.choice")
    presets = suites.list_presets if suites else lambda texts: {}
    options = read_command("evaluate", EvaluateOptions, __doc__, arguments, presets=presets)
    read = suites.read_questions if suites else questions.read_questions
    predict = choice.read_predictions(options.predicted) if choice else predict_nothing
    evaluate(options, read(options, split_list(options.checkpoint)), predict, progress.Results())


if __name__ == "__main__":
    run_command(main, EvaluateOptions)
