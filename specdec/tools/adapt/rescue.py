"""The MTP module of a whole model: diagnosed, repaired or taken from its base, and diagnosed again after training."""

import shutil
from pathlib import Path

from specdec import checkpoint
from specdec.core import files, hub, progress
from specdec.export import published
from specdec.export.grafted import repair_model
from specdec.heads.native_modules.diagnosis import Diagnosis, diagnose_module, split_name
from specdec.tools.adapt.folder import AdaptationFolder


def prepare_module(
    home: AdaptationFolder, option: str, source: str | None, target: str | None, console: progress.Results
) -> str:
    """The head to start from: checkpoint=, or of a whole model with a damaged module a copy with a sound one.

    option: checkpoint=; source: the model's base; target: target.name=, for which a module of another model is as it is
    Raises ValueError, with what to do, where a base is needed, does not fit or cannot be used.
    """
    folder = checkpoint.resolve(option)
    if not has_own_module(folder, source, target) or (source is None and home.was_begun_undiagnosed):
        return option
    options = {"checkpoint": option, "base": None if source is None else files.expand_home(source)}
    if home.diagnosis_record is None:
        home.check_new()
        name = str(folder) if hub.is_folder(files.expand_home(option)) else option
        repair_copy(home, options, diagnose_module(name, base=options["base"]), console)
    record = home.diagnosis_record or {}
    if any(locate_model(record[name]) != locate_model(value) for name, value in options.items()):
        raise ValueError(
            f"out={home.path} was begun with checkpoint={record['checkpoint']} source={record['base']}: give those "
            "again, or choose another out=."
        )
    return str(home.repaired_model or option)


def locate_model(name: str | None) -> str | None:
    """The absolute path of a folder; a name on the Hub unchanged."""
    path = None if name is None else Path(files.expand_home(name))
    return str(path.resolve()) if path is not None and hub.is_folder(str(path)) else name


def has_own_module(folder: Path, source: str | None, target: str | None) -> bool:
    """Whether checkpoint= is a whole model that keeps its module. Arguments as of `prepare_module`

    Raises ValueError for a source of anything else.
    """
    is_model = published.is_published(folder) and published.is_whole_model(folder)
    if source is not None and not (is_model and target is None):
        advice = "leave target.name= out" if is_model else "give such a model, or leave source= out"
        raise ValueError(f"source= gives an MTP module to a whole model, checkpoint=MODEL: {advice}.")
    return is_model and target is None


def repair_copy(home: AdaptationFolder, options: dict, diagnosis: Diagnosis, console: progress.Results) -> None:
    """Repairs the module in a copy of the model, if it needs that, and records what was done.

    options: checkpoint and base, as they are recorded
    Raises ValueError as `repair_model`, and for a revision on the Hub of a model that needs no repair.
    """
    show_diagnosis(diagnosis, console)
    partial = home.path / "export" / "0001.partial"
    for path in (partial, partial.with_suffix("")):  # of a launch that was interrupted
        shutil.rmtree(path, ignore_errors=True)
    changes = repair_model(diagnosis, partial, base=options["base"])
    if changes:
        partial.rename(partial.with_suffix(""))
        console.say(f"Repaired in {partial.with_suffix('')}: {' '.join(changes)}")
    elif split_name(diagnosis.name)[1] is not None:
        raise ValueError(
            f"checkpoint={diagnosis.name} needs no repair, and a target is not loaded from a revision: download that "
            "revision into a folder, and give the folder."
        )
    elif options["base"] is not None:
        console.say(f"The module of {diagnosis.name} needs no repair, so source= serves its diagnosis only.")
    home.record_diagnosis({**options, "before": diagnosis.to_json(), "changes": changes})


def show_diagnosis(diagnosis: Diagnosis, console: progress.Results) -> None:
    for line in diagnosis.lines():
        console.say(line)


def diagnose_result(home: AdaptationFolder, console: progress.Results) -> None:
    """Prints the diagnosis before an adaptation and after it, and records the latter, unless that was done."""
    history = home.read_history()
    record = history[-1].get("diagnosis") if history else None
    if record is None or "after" in record:
        return
    before = Diagnosis.from_json(record["before"])
    folder = home.path / "export" / Path(history[-1]["in_use"]).name
    after = diagnose_module(str(folder), base=record["base"]) if folder.exists() else before
    for diagnosis in (before, after):
        show_diagnosis(diagnosis, console)
    home.record_result(after.to_json())
