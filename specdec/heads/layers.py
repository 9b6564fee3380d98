"""Which of the target's hidden states a head reads if it is not told, and which of its own layers see a window only."""

from collections.abc import Sequence

from specdec.target.model import Target

SHALLOW = 7  # layers: below, (2, L // 2, L - 3) does not increase


def three_layers(target: Target) -> tuple[int, ...]:
    """EAGLE-3's: near the input, in the middle, near the output, (2, L // 2, L - 3) as engines and published heads have it.

    Where that does not exist, the middle and its neighbours; for three layers these are 0, 1, 2, and 0 is the embedding.
    """
    num = _check(target)
    middle = num // 2
    return (middle - 1, middle, middle + 1) if num < SHALLOW else (2, middle, num - 3)


def five_layers(target: Target) -> tuple[int, ...]:
    """DFlash's: five, evenly from 2 to L - 2 (the outputs of layers 1 to L - 3); fewer if there are not so many."""
    last = _check(target) - 2
    return tuple(sorted({2 + round(number * (last - 2) / 4) for number in range(5)}))


def _check(target: Target) -> int:
    """The number of layers. Raises ValueError if there are too few."""
    if target.num_layers < 3:
        raise ValueError(
            f"{target.name} has {target.num_layers} layers, and the default of target_layers needs three: name the hidden "
            f"states to read (0..{target.num_layers}), or train a head that reads the last one only, such as eagle or mtp."
        )
    return target.num_layers


def windows(window: int | None, full_layers: Sequence[int] | None, num_layers: int) -> list[int | None]:
    """Positions that each layer of a head sees; None: all. full_layers: those that see all of them all the same

    Raises ValueError for a window below 2 positions, and for layers that the head does not have.
    """
    if window is not None and window < 2:
        raise ValueError(f"window={window} must be 2 positions or more; null: all.")
    full_layers = full_layers or ()
    if not set(full_layers) <= set(range(num_layers)):
        raise ValueError(f"full_layers={list(full_layers)} must be layers of this head, 0 .. {num_layers - 1}.")
    return [None if layer in full_layers else window for layer in range(num_layers)]
