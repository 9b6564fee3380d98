"""When the state of a run is saved, and the thread that writes it while training goes on."""

import copy
import time
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from train.run_folder import RunFolder


class Saving:
    """Used in the main process while it trains; leaving it waits for what is being written.

    every: steps between two states; minutes: between two states; None or 0: not by these
    """

    def __init__(self, folder: RunFolder, *, every: int | None, minutes: float | None):
        self.folder, self.every, self.minutes = folder, every, minutes
        self.thread = ThreadPoolExecutor(1, "saving")
        self.coming: Future[None] | None = None
        self.saved = time.monotonic()

    def __enter__(self) -> "Saving":
        self.saved = time.monotonic()
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self.wait()
        except Exception:
            if kind is None:  # else training ends by an error already
                raise
        finally:
            self.thread.shutdown()

    def after(self, step: int) -> bool:
        """Whether the state of a step is to be saved; the same in all processes."""
        return step % self.every == 0 if self.every else False

    def overdue(self) -> bool:
        """Whether the minutes are over. Raises ValueError if the last state could not be written."""
        if self.coming is not None and self.coming.done():
            self.wait()
        return time.monotonic() - self.saved >= 60 * self.minutes if self.minutes else False

    def write(self, step: int, *, weights: dict[str, Tensor], optimizer: dict, document: dict) -> None:
        """Begins to write a state, when the one before it is written: `RunFolder.save_state`. Training must not change the
        tensors. Raises ValueError if the one before could not be written."""
        self.wait()
        self.saved = time.monotonic()
        more = {"weights": weights, "optimizer": optimizer, "document": copy.deepcopy(document)}
        self.coming = self.thread.submit(self.folder.save_state, step, **more)

    def wait(self) -> None:
        """Until the last state is written. Raises ValueError if it could not be."""
        coming, self.coming = self.coming, None
        if coming is not None:
            coming.result()
