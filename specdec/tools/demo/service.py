"""The recorded answers of a service by days: those to train on, those that choose the step, and those that judge."""

from dataclasses import dataclass
from typing import Any

from specdec.text import reading

SECONDS_OF_DAY = 86400
JUDGED_DAYS = 6  # last days, which judge both heads
CHOOSING_DAYS = 1  # days before these, which choose the step of the training


@dataclass(frozen=True)
class ServiceRows:
    """Conversations of a service, the oldest first. num_days: days from the first question to the last one"""

    training: list[dict]
    choosing: list[dict]
    judging: list[dict]
    num_days: int

    def describe_split(self, num_rows: int) -> str:
        """The sentence on the days. num_rows: newest rows that are trained on"""
        end = self.num_days - JUDGED_DAYS
        return (
            f"Split by time: the newest {num_rows} answers of days 1 to {end - CHOOSING_DAYS} are trained on, "
            f"{len(self.choosing)} of day {end} choose the step, {len(self.judging)} of days {end + 1} to "
            f"{self.num_days} judge."
        )


def read_field(row: dict, name: str, kind: Any, location: str) -> Any:
    """A value of a row. Raises ValueError, naming file and line, where it is missing or of another type."""
    value = row.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(
            f"{location}: {name!r} is missing or of another type: the rows are described in data/README.md."
        )
    return value


def read_service(prompts: str, answers: str) -> ServiceRows:
    """The answered questions, split by days. Raises ValueError for rows without a field, and for too few days.

    prompts: file of questions with id, time and messages; answers: file of their answers with id, completion and finish
    """
    answer_of_id = {
        read_field(row, "id", str, location): (location, row) for location, row in reading.read_rows(answers, None)
    }
    rows = []
    for location, row in reading.read_rows(prompts, None):
        time, messages = read_field(row, "time", (int, float), location), read_field(row, "messages", list, location)
        answer_location, answer = answer_of_id.pop(read_field(row, "id", str, location), (location, None))
        if answer:
            content = read_field(answer, "completion", str, answer_location)
            kept = {key: row[key] for key in ("id", "category", "conversation") if key in row}
            kept |= {"time": time, "temperature": 0.0, "finish": read_field(answer, "finish", str, answer_location)}
            rows.append({**kept, "messages": [*messages, {"role": "assistant", "content": content}]})
    if answer_of_id:
        raise ValueError(f"{answers}: {next(iter(answer_of_id))!r} is no id of {prompts}: give the file it answers.")
    return split_days(sorted(rows, key=lambda row: row["time"]), answers)


def split_days(rows: list[dict], source: str) -> ServiceRows:
    """The rows by their days. rows: the oldest first; source: their file, for messages"""
    days = [int((row["time"] - rows[0]["time"]) // SECONDS_OF_DAY) for row in rows]
    num_days = days[-1] + 1 if days else 0
    end = num_days - JUDGED_DAYS
    start = end - CHOOSING_DAYS
    service = ServiceRows(
        [row for row, day in zip(rows, days) if day < start],
        [row for row, day in zip(rows, days) if start <= day < end],
        [row for row, day in zip(rows, days) if day >= end],
        num_days,
    )
    if not (service.training and service.choosing and service.judging):
        raise ValueError(
            f"{source}: answers of {num_days} days cannot be split: some are needed before the last "
            f"{JUDGED_DAYS + CHOOSING_DAYS} days, some on day {max(end, 1)}, and some on the last {JUDGED_DAYS}."
        )
    return service
