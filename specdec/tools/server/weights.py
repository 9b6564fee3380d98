"""New weights of the head while requests run: checkpoints of one folder, which the user has allowed."""

import gc
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from specdec import checkpoint
from specdec.core.devices import describe_out_of_memory
from specdec.decoding.decoder import Decoder
from specdec.loading import LoadedProposer
from specdec.options.proposers import AUTO
from specdec.tools.server.drafts import warm_up
from specdec.tools.server.engine import Engine
from specdec.tools.server.lane import ServedDrafter
from specdec.tools.server.protocol import RequestError

LOG = logging.getLogger(__name__)


def check_weights_folder(folder: str, loaded: LoadedProposer) -> None:
    """Raises ValueError for a missing folder, and where no other head can take the place of what was loaded."""
    if not Path(folder).is_dir():
        raise ValueError(f"allow_weights={folder} is no folder: name the one that holds the checkpoints.")
    if loaded.target.adapted:
        raise ValueError(f"allow_weights={folder}: this head has changed the target, so no other can follow it.")
    if loaded.checkpoint is None and loaded.name != AUTO:
        raise ValueError(f"allow_weights={folder}: proposer={loaded.name} holds no trained head.")


class WeightsFolder:
    """Puts checkpoints of a folder into an engine.

    make_drafts: function of a checkpoint's folder and its version. Returns a decoder, and what clients are told of it
        Raises ValueError for a head that cannot be served.
    rows: requests that are decoded at once
    """

    def __init__(
        self,
        folder: str,
        engine: Engine,
        make_drafts: Callable[[Path, str], tuple[Decoder, ServedDrafter]],
        rows: int,
    ):
        self.folder, self.engine, self.lock = Path(folder).resolve(), engine, threading.Lock()
        self.make_drafts, self.rows = make_drafts, rows

    def load(self, path: str, version: str) -> float:
        """Lets the head of a checkpoint draft all answers that were not begun. Returns the seconds that it took.

        Answers that run keep their head. There are two heads at most: it first waits for answers of the one before.
        Raises RequestError, after which the present head goes on.
        """
        started = time.monotonic()
        if not self.lock.acquire(blocking=False):
            raise RequestError("Other weights are being loaded: ask again once they are there.", status=409)
        try:
            self._find_checkpoint(path)
            drained = self.engine.await_drained()
            gc.collect()  # the head before the present one, whose parts refer to one another
            # The path is looked up again, as links may have changed meanwhile
            if not (drained and self._replace(self._find_checkpoint(path), version)):
                raise RequestError("The server is stopping: it takes no more weights.", status=503)
        except OSError as error:
            raise RequestError(f"{path} cannot be read ({error.strerror or error}).", parameter="folder") from None
        except ValueError as error:
            raise RequestError(str(error), parameter="folder") from None
        finally:
            self.lock.release()
        return time.monotonic() - started

    def _replace(self, folder: Path, version: str) -> bool:
        """Loads a checkpoint and lets it draft. Returns False if the engine stops."""
        try:
            decoder, drafter = self.make_drafts(folder, version)
            return self.engine.replace_drafts(decoder, drafter, warm_up(decoder, self.rows))
        except (ValueError, OSError):
            raise
        except Exception as error:  # missing memory, or a head that fails in its first passes
            LOG.exception("weights could not be loaded")
            cause = describe_out_of_memory(error) or f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise RequestError(
                f"{folder} cannot draft here, and the head before goes on ({cause}).", status=500
            ) from error

    def _find_checkpoint(self, path: str) -> Path:
        """The folder of a checkpoint. Raises RequestError if it is not inside, ValueError if it is none."""
        folder = self._resolve_inside(self.folder / path)
        if not folder.exists():
            raise ValueError(f"{path} does not exist in {self.folder}. {checkpoint.CHECKPOINT_ADVICE}.")
        return self._resolve_inside(checkpoint.resolve(folder))  # that of a run's best step

    def _resolve_inside(self, path: Path) -> Path:
        """The path without links. Raises RequestError if it is not inside, ValueError for links in a circle."""
        try:
            folder = path.resolve()
        except RuntimeError as error:  # of Python before 3.13
            raise ValueError(f"{path} is a link to itself ({error}).") from None
        if not folder.is_relative_to(self.folder):
            message = (
                f"Weights are taken from {self.folder} (allow_weights=) only, and not from {folder}: allow that one, "
                "or let the head be inside (validation.engine_folder= of a run)."
            )
            raise RequestError(message, status=403, parameter="folder")
        return folder
