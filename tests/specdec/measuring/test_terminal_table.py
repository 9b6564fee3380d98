"""Tables on a terminal: at every width they have whole figures, and fewer columns where there is less room."""

import pytest
import rich.console

from specdec.measuring.page import Table
from specdec.measuring.terminal_table import choose_columns, make_terminal_table

HEADS = ["method", "tau", "tau, replayed", "tau minus that of shipped/mtp, chain of 2", "speedup", "tokens/s", "plain"]
ROWS = [
    ["suffix", "1.76 (1.00 .. 7.50)", "-", "+0.10 (-0.88 .. +6.00)", "2.08 (1.00 .. 9.34)", "8.9", "4.3"],
    ["shipped/eagle3, chain of 2", "1.43 (1.25 .. 1.67)", "1.43 (1.25 .. 1.67)", "-0.24 (-0.25 .. -0.21)"]
    + ["1.34 (1.17 .. 1.66)", "5.7", "4.3"],
]
TABLE = Table([*HEADS, "requests"], [[*row, "2"] for row in ROWS])


def print_table(table: Table, width: int) -> list[str]:
    console = rich.console.Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(make_terminal_table("Figures", table, width))
    return capture.get().splitlines()


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (170, [*HEADS, "requests"]),
        (150, HEADS),
        (100, ["method", "tau", "speedup", "tokens/s", "plain"]),
        (95, ["method", "tau", "speedup", "tokens/s", "plain"]),
        (80, ["method", "tau", "speedup"]),
        (70, ["method", "tau", "speedup"]),  # the names get two lines
        (60, ["method", "tau"]),
        (50, ["method", "tau"]),
    ],
)
def test_less_room_means_fewer_columns_in_full(width, heads):
    assert [TABLE.heads[column] for column in choose_columns(TABLE, width)] == heads
    lines = print_table(TABLE, width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width and "…" not in text
    shown = [TABLE.heads.index(head) for head in heads]
    assert all(row[column] in text for row in TABLE.rows for column in shown[1:])
    names = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert " ".join(names) == "suffix shipped/eagle3, chain of 2"


def test_columns_without_a_place_in_the_order_are_left_out_from_the_right():
    table = Table(["method", *"abcdefgh"], [["m", *(["1.00 (0.90 .. 1.10)"] * 8)]])
    assert choose_columns(table, 100) == [0, 1, 2, 3, 4]
    assert choose_columns(table, 10) == [0, 1]  # never less than a name and a figure
    user = Table(["method", "tau", "plain, of a user", "plain"], [["m", "1.76 (1.00 .. 7.50)", "5.1", "4.3"]])
    assert choose_columns(user, 30) == [0, 1]


def test_heads_are_one_line_where_there_is_room():
    table = Table(["method", "tau, replayed"], [["m", "1"]])
    assert any("tau, replayed" in line for line in print_table(table, 100))
    assert not any("tau, replayed" in line for line in print_table(table, 20))
