"""The folders from which an engine reads the heads of a run's validations."""

from dataclasses import dataclass, field
from pathlib import Path

from specdec import checkpoint
from specdec.core import files
from specdec.core.progress import Results
from specdec.export.engines import make_form
from specdec.export.folder import write_folder
from specdec.heads.base import Drafter, Head

CHECKPOINT = "checkpoint"  # format of the folder that this project's server reads
OWNER = "RUN"  # file of such a folder: the path of the run that wrote it
CARD = "A head of a training run, for the engine of its validations.\n"


@dataclass
class HeadFolders:
    """Writes heads as folders of `parent`, and removes those that it has written.

    run: the run's folder; spec: drafter's class and arguments, as `checkpoint.save` writes them
    written: folders that were new when this object wrote them; an engine may have been started with an older one
    """

    run: Path
    parent: Path
    spec: dict
    console: Results
    written: list[Path] = field(default_factory=list)

    def write(self, name: str, frozen: Head, form: str, num_drafts: int) -> Path:
        """The new folder `name` with a head. form: an engine's `DraftWeights.format`

        A folder of an earlier launch of the run is replaced. Raises ValueError for one of somebody else, and for a
        head without such a form.
        """
        folder = self.parent / name
        exists = folder.exists() or folder.is_symlink()
        if exists and not self._owns(folder):
            raise ValueError(
                f"{folder} exists, and {self.run} has not written it: move it away, or give another "
                "validation.engine_folder=."
            )
        if form == CHECKPOINT:
            checkpoint.save(folder, frozen, self.spec)
        else:
            assert isinstance(frozen, Drafter)  # others adapt the target, and options refuse them
            exported = make_form(frozen, form)
            if exists:
                files.remove_folder(folder)
            write_folder(exported, folder, dtype=frozen.target.dtype, num_drafts=num_drafts, card=CARD)
        files.write_text(folder / OWNER, f"{self.run.resolve()}\n")
        if not exists:
            self.written.append(folder)
        return folder

    def remove_others(self, served: Path) -> None:
        """Removes what was written besides the folder that is served now. What cannot be removed stays."""
        for folder in [folder for folder in self.written if folder != served]:
            self.written.remove(folder)
            try:
                if self._owns(folder):
                    files.remove_folder(folder)
            except OSError as error:
                self.console.say(f"A head that is not served any more stays: {files.describe_error(error)}")

    def _owns(self, folder: Path) -> bool:
        """Whether the run has written a folder, in this launch or an earlier one."""
        owner = folder / OWNER
        return owner.is_file() and owner.read_text().strip() == str(self.run.resolve())
