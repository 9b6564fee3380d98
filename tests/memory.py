"""python -m tests.memory [minutes=60] [every=10] COMMAND ...    whether the memory of a command grows

Runs the command for so many minutes, samples its memory and that of its children every so many seconds, and ends it by
SIGTERM, upon which a training run saves and ends well. Prints a line a minute, and at the end the growth: the slope of a
straight line through the samples, without those of the first quarter. One hour of training with validation:

    python -m tests.memory minutes=60 python train.py run=hour features.folder=/tmp/hour train.steps=1000000 \
        train.validate_every=50 train.save_every=50
"""

import signal
import subprocess
import sys
import time

import numpy
import psutil


def memory(process: psutil.Process) -> int:
    """Bytes that the process and its children hold for themselves, without mapped files."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        try:
            info = each.memory_info()
        except psutil.NoSuchProcess:
            continue
        total += info.rss - info.shared
    return total


def growth(samples: list[tuple[float, float]]) -> float:
    """(seconds, megabytes) -> megabytes an hour, without the first quarter"""
    seconds, megabytes = zip(*samples[len(samples) // 4 :])
    return float(numpy.polyfit(numpy.array(seconds) / 3600, megabytes, 1)[0])


def sample(process: subprocess.Popen, *, minutes: float, every: float) -> list[tuple[float, float]]:
    """Until the process ends or the time is up. -> (seconds, megabytes) of each sample"""
    start = time.perf_counter()
    samples: list[tuple[float, float]] = []
    while process.poll() is None and (elapsed := time.perf_counter() - start) < 60 * minutes:
        samples.append((elapsed, memory(psutil.Process(process.pid)) / 1e6))
        if not samples[:-1] or int(elapsed / 60) > int(samples[-2][0] / 60):
            print(f"minute {elapsed / 60:4.0f}  {samples[-1][1]:8.1f} MB", flush=True)
        time.sleep(every)
    return samples


def main() -> None:
    arguments = sys.argv[1:]
    given = {"minutes": 60.0, "every": 10.0}
    while arguments and arguments[0].partition("=")[0] in given:
        key, _, value = arguments.pop(0).partition("=")
        given[key] = float(value)
    if not arguments:
        raise SystemExit(__doc__)
    with open("memory.log", "w") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT)
        samples = sample(process, **given)
        process.send_signal(signal.SIGTERM)
        status = process.wait()
    largest = max(megabytes for _, megabytes in samples)
    print(
        f"{len(samples)} samples, largest {largest:.1f} MB, growth {growth(samples):+.1f} MB an hour; the command's status "
        f"is {status}, its output is in memory.log"
    )


if __name__ == "__main__":
    main()
