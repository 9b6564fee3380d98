"""Tables on a terminal: they have the columns that its width has room for, in full."""

import rich.table

from specdec.measuring.page import Table

# Beginnings of the heads of columns, in the order in which they are left out. The others follow from the right.
LEFT_OUT_FIRST = (
    "tokens trained on",
    "verify, ms",
    "draft, ms",
    "tau, best",
    "requests",
    "tau minus",
    "first token",
    "plain, of a user",
    "tau, replayed",
    "measured / predicted",
    "tokens/s of a user",
    "plain",
    "tokens/s",
    "accepted by position",
    "speedup, auto",
)
NAMES = (
    "results",
    "method",
    "best",
    "record",
    "drafter",
    "engine",
)  # heads of columns with names, which get several lines before columns are lost
MIN_COLUMNS = 2  # columns that are always there


def make_terminal_table(heading: str, table: Table, width: int) -> rich.table.Table:
    """The table without the columns that `width` characters have no room for. Figures are never cut or broken."""
    columns = choose_columns(table, width)
    widths = [measure_column(table, column) for column in columns]
    names = [measure_column(table, column, broken=table.heads[column] in NAMES) for column in columns]
    if count_width(widths) > width:
        spare = width - count_width(names)
        for index, (whole, name) in enumerate(zip(widths, names, strict=True)):
            widths[index] = min(whole, name + max(0, spare))
            spare -= widths[index] - name
    for index, column in enumerate(columns):  # heads that have room stay one line
        head = len(table.heads[column])
        if count_width(widths) + head - widths[index] <= width:
            widths[index] = max(widths[index], head)
    terminal_table = rich.table.Table(title=heading, title_justify="left")
    for column, column_width in zip(columns, widths, strict=True):
        terminal_table.add_column(table.heads[column], width=column_width)
    for row in table.rows:
        terminal_table.add_row(*(row[column] for column in columns))
    return terminal_table


def choose_columns(table: Table, width: int) -> list[int]:
    """The columns, from 0, that `width` characters have room for; MIN_COLUMNS at least."""
    columns = [*range(len(table.heads))]
    for beginning in LEFT_OUT_FIRST:
        for column in [column for column in columns if table.heads[column].startswith(beginning)]:
            if count_width([measure_column(table, column) for column in columns]) > width:
                columns.remove(column)
    for column in reversed(columns[MIN_COLUMNS:]):
        names = [measure_column(table, column, broken=table.heads[column] in NAMES) for column in columns]
        if count_width(names) > width:
            columns.remove(column)
    return columns


def measure_column(table: Table, column: int, *, broken: bool = False) -> int:
    """The characters that a column needs, with a head of several lines. broken: whether its cells are so, too"""
    words, cells = table.heads[column].split(), [row[column] for row in table.rows]
    if broken:
        cells = [word for cell in cells for word in cell.split()]
    return max(map(len, [*words, *cells]), default=1)


def count_width(widths: list[int]) -> int:
    """The characters of a line of a table, with its frame."""
    return sum(widths) + 3 * len(widths) + 1
