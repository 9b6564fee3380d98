"""The model card of a checkpoint that is shared on the Hugging Face Hub."""

from specdec.export.serving import (
    WHOLE_VOCABULARY,
    Form,
    Provenance,
    by_replay,
    expected,
    heading,
    launch_lines,
    num_drafts,
    origin,
    table,
)
from specdec.measuring.report import Report, Training, verdict

MISSING = "not recorded"
FOLDER = "exported"  # of an export, in the commands
USE = """```
python scripts/generate.py checkpoint={repo} prompt="Why is the sky blue?"
accelerate launch train.py head=... start={repo}
```

```python
from specdec.generate import Speculative

model.generate(**inputs, custom_generate=Speculative("{repo}"))
```

`{repo}@REVISION` is the head of one commit, tag or branch. To train it further, `head=` is its family, as in the command above."""


def card(provenance: Provenance, about: dict, forms: dict[str, Form], *, repo: str, adapts: bool) -> str:
    """What a checkpoint is worth, how it was trained, and the commands that use it. What is not known is said to be missing.

    about: the run's about.json, {} if there is none; forms: by the format of scripts/export.py, those that the head has
    repo: user/name; adapts: whether the head changes its target
    """
    parts = [
        *heading(provenance, library="specdec", adapts=adapts),
        "## How it was trained",
        table({**origin(provenance), **_training(provenance, about)}),
        "## What to expect",
        expected(provenance),
        *_figures(provenance.report, about),
        "## Use it with specdec",
        USE.format(repo=repo),
        "## Serve it in an engine",
    ]
    for name, form in forms.items():
        export = f"python scripts/export.py checkpoint={repo} format={name} out={FOLDER}"
        parts += [f"### format={name}", f"```\n{export}\n```"]
        for engine, line in launch_lines(form, FOLDER, num_drafts(form, provenance)).items():
            parts.append(f"{engine}:\n\n```\n{line}\n```")
        if form.whole_vocabulary:
            parts.append(WHOLE_VOCABULARY)
        if form.notes:
            parts.append("\n".join(f"- {note}" for note in form.notes))
    if not forms:
        parts.append("No engine has a form for this head.")
    return "\n\n".join(parts) + "\n"


def _training(provenance: Provenance, about: dict) -> dict[str, str]:
    """Rows of the table: size, tokens, time, machine, command, versions."""
    spent = (provenance.report and provenance.report.training) or Training()
    environment, data, start = (about.get(name) or {} for name in ("environment", "data", "start"))
    machine, processes = environment.get("machine"), environment.get("processes")
    versions = {**provenance.document["versions"], **({"python": environment["python"]} if environment else {})}
    tokens = _millions(spent.tokens)
    if spent.tokens and spent.unique_tokens:
        tokens += f", of {_millions(spent.unique_tokens)} different ones"
    return {
        "trained parameters": _millions(spent.parameters),
        "conversations": f"{data['conversations']:,}" if data.get("conversations") else MISSING,
        "tokens read in training": tokens,
        "minutes of training": f"{spent.seconds / 60:.1f}" if spent.seconds else MISSING,
        "machine": f"{machine}, {environment.get('threads')} threads, {processes} processes" if machine else MISSING,
        **({"started from": start["used"]} if start else {}),
        "command": f"`{about['command']}`" if about.get("command") else MISSING,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def _figures(report: Report | None, about: dict) -> list[str]:
    """Survival by depth, speedup with its conditions, and whether answers are unchanged."""
    if report is None:
        return []
    survival = report.replayed_survival if by_replay(report) else report.survival
    parts = []
    if survival:
        depths = " | ".join(map(str, range(1, 1 + len(survival))))
        shares = " | ".join(f"{share:.2f}" for share in survival)
        rows = [f"| drafts | {depths} |", f"|---|{'---|' * len(survival)}", f"| share of the rounds | {shares} |"]
        parts.append("Survival, the share of the rounds that accept at least so many drafts:\n\n" + "\n".join(rows))
    if report.speedup is None or report.speedup_ci is None:
        return [*parts, "The speedup was not measured: nothing was decoded with the clock running."]
    environment, dtype = about.get("environment") or {}, (about.get("target") or {}).get("dtype")
    machine = (
        f"{environment['machine']}, {environment['threads']} threads"
        if environment
        else "a machine that is not recorded"
    )
    shape = report.shape or f"chain of {len(report.survival or [])}"
    fast = f"{report.speedup:.2f} ({report.speedup_ci[0]:.2f} .. {report.speedup_ci[1]:.2f}) with a {shape}"
    if report.auto:
        low, high = report.auto["speedup_ci"]
        fast += f", {report.auto['speedup']:.2f} ({low:.2f} .. {high:.2f}) with proposer=auto"
    return [
        *parts,
        f"Speedup over plain decoding, with 95 % intervals over prompts: {fast}. {report.num_prompts} prompts, one stream, "
        f"temperature {report.temperature:g}, {dtype or 'a dtype that is not recorded'}, {machine}.",
        f"Answers: {verdict(report)}.",
    ]


def _millions(number: int | None) -> str:
    return f"{number / 1e6:.2f} M" if number else MISSING
