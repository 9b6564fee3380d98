"""The shape of the code: its size by folder, and what makes it hard to read.

    python -m tests.shape                     sizes of the folders, as they are now
    python -m tests.shape --before 49a6e512   beside those of a git revision
    python -m tests.shape specdec/core        what tests/test_shape.py finds in these paths

A syntax node is one object that ast.walk visits. A code line is neither blank nor a comment. Complexity is McCabe's. It
also counts what ruff's C901 leaves out: 1, plus one for each branch, loop, handler, case, conditional expression, part
and condition of a comprehension, and further Boolean operand. A nested function counts by itself.
"""

import argparse
import ast
import collections
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOTS = ("specdec", "train", "scripts", "benchmarks", "tests", "train.py")
SPLIT = "specdec"  # the root whose folders get a line each
COMPLEXITY_LIMIT = 12  # of a function; above it, readers lose the thread (McCabe 1976 proposes 10, without expressions)
LOCAL_LIFE = 5  # lines between the first and the last use of a local that may have any name
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
HEADINGS = ("files", "lines", "nodes", "nodes/line", f"complex>{COMPLEXITY_LIMIT}", "longest", "parameters")

# Participles, pronouns and empty nouns: as a whole name they do not say what they hold.
BANNED_NAMES = frozenset(
    """
    about ahead asked at begun behind beside both case chosen counted data done each few found given info inner judged
    kept known left made more most now of one other others own part parts piece place rest said some taken then thing
    to told wanted way what where which
    """.split()
)

# Keys of YAML files and of command lines, which users write: {path: names}
USER_NAMES = {
    "benchmarks/gpu/options.py": {"part"},
    "scripts/datastore.py": {"data"},
    "scripts/show_data.py": {"data"},
    "scripts/launch_engine.py": {"more"},
    "specdec/experiments/cascade/proposer.py": {"inner"},
    "specdec/measuring/model_card.py": {"data"},
    "train/settings/options.py": {"data"},
}
# A remark that begins so continues the grammar of its name, and cannot be read by itself.
RIDDLE = re.compile(r"(of|that|by|as|whether it|what|which|those|these|so|and) ", re.IGNORECASE)
PARAMETER = re.compile(r"(?:^|; |\. )([a-z_]\w*(?:, [a-z_]\w*)*(?: \[[^\]]*\])?): (\S[^\n]*)", re.MULTILINE)


@dataclass
class Shape:
    """Sizes of a folder."""

    files: int = 0
    lines: int = 0
    nodes: int = 0
    code_lines: int = 0
    complex_functions: int = 0
    longest_function: int = 0
    most_parameters: int = 0

    def add(self, source: str) -> None:
        """Adds one file."""
        nodes = list(ast.walk(ast.parse(source)))
        self.files += 1
        self.lines += source.count("\n")
        self.nodes += len(nodes)
        self.code_lines += sum(not line.lstrip().startswith("#") for line in source.split("\n") if line.strip())
        for function in nodes:
            if isinstance(function, FUNCTIONS):
                self.complex_functions += count_complexity(function) > COMPLEXITY_LIMIT
                self.longest_function = max(self.longest_function, function.end_lineno - function.lineno + 1)
                self.most_parameters = max(self.most_parameters, count_parameters(function.args))

    def cells(self) -> list[str]:
        """The figures below HEADINGS, as text."""
        sizes = [f"{number:,}" for number in (self.files, self.lines, self.nodes)]
        density = f"{self.nodes / max(1, self.code_lines):.1f}"
        return [*sizes, density, *map(str, (self.complex_functions, self.longest_function, self.most_parameters))]


@dataclass
class Faults:
    """What a file has against the rules of CONTRIBUTING.md, as lines `path:number: sentence`."""

    path: str
    complexities: dict[str, int] = field(default_factory=dict)  # {path:name: complexity}, above the limit
    sentences: list[str] = field(default_factory=list)

    def add(self, node: ast.AST, sentence: str) -> None:
        self.sentences.append(f"{self.path}:{node.lineno}: {sentence}")


def count_complexity(function: ast.AST) -> int:
    """McCabe's complexity of one function, expressions included."""
    complexity = 1
    pending = list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        if isinstance(node, FUNCTIONS):
            continue
        complexity += isinstance(node, BRANCHES)
        if isinstance(node, ast.BoolOp):
            complexity += len(node.values) - 1
        if isinstance(node, ast.comprehension):
            complexity += 1 + len(node.ifs)
        pending.extend(ast.iter_child_nodes(node))
    return complexity


def count_parameters(arguments: ast.arguments) -> int:
    """Parameters that a caller may give by name."""
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in named)


def find_faults(path: str, source: str) -> Faults:
    """Functions above the limit, folded expressions and banned names of one file."""
    faults = Faults(path)
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            complexity = count_complexity(node)
            if complexity > COMPLEXITY_LIMIT:
                name = f"{path}:{node.name}"
                faults.complexities[name] = max(complexity, faults.complexities.get(name, 0))
        add_folded_expressions(faults, node)
    for line, kind, name in sorted(find_banned_names(tree)):
        if name in USER_NAMES.get(path, ()):
            continue
        faults.sentences.append(f"{path}:{line}: the {kind} {name!r} does not say what it holds")
    for line, remark in find_remarks(tree, source):
        if RIDDLE.match(remark):
            faults.sentences.append(f"{path}:{line}: the remark {remark[:40]!r} is no noun phrase")
    return faults


def find_remarks(tree: ast.Module, source: str) -> Iterator[tuple[int, str]]:
    """(line, remark) of the comments beside fields, and of the parameters in docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and node.end_lineno in comments:
            yield node.lineno, comments[node.end_lineno]
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            for match in PARAMETER.finditer(ast.get_docstring(node) or ""):
                yield node.lineno, match[2]


def add_folded_expressions(faults: Faults, node: ast.AST) -> None:
    """Adds what `node` folds into one expression that wants to be several statements."""
    if isinstance(node, ast.IfExp) and has_within(node, ast.IfExp):
        faults.add(node, "a conditional expression inside another")
    if isinstance(node, COMPREHENSIONS):
        add_folded_comprehensions(faults, node)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
        num_calls = sum(isinstance(value, ast.Call) for value in node.value.elts)
        if num_calls > 2:
            faults.add(node, "three calls unpacked in one statement")


def add_folded_comprehensions(faults: Faults, comprehension: ast.expr) -> None:
    """Adds what a comprehension repeats or binds and a loop would show."""
    if len(comprehension.generators) > 1 and any(generator.ifs for generator in comprehension.generators):
        faults.add(comprehension, "a comprehension with two loops and a condition")
    is_dict = isinstance(comprehension, ast.DictComp)
    elements = [comprehension.key, comprehension.value] if is_dict else [comprehension.elt]
    if any(has_within(element, COMPREHENSIONS, itself=True) for element in elements):
        faults.add(comprehension, "a comprehension inside another's element")
    if has_within(comprehension, ast.NamedExpr):
        faults.add(comprehension, "a walrus inside a comprehension")


def has_within(node: ast.AST, kinds: type | tuple[type, ...], itself: bool = False) -> bool:
    """Whether a node of these kinds is below `node` (`itself`: or is it)."""
    return any(isinstance(child, kinds) and (itself or child is not node) for child in ast.walk(node))


def find_banned_names(tree: ast.Module) -> set[tuple[int, str, str]]:
    """{(line, kind, name)} of parameters, fields, attributes, definitions, and locals with a life of some lines."""
    names: set[tuple[int, str, str]] = set()
    for node in ast.walk(tree):
        names.update(list_names(node))
    for statement in tree.body:
        for target in getattr(statement, "targets", ()):
            if isinstance(target, ast.Name):
                names.add((statement.lineno, "constant", target.id))
    return {fault for fault in names if fault[2] in BANNED_NAMES}


def list_names(node: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, kind, name) of what `node` itself binds."""
    match node:
        case ast.arg():
            yield node.lineno, "parameter", node.arg
        case ast.AnnAssign(target=ast.Name()):
            yield node.lineno, "field", node.target.id
        case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
            yield node.lineno, "attribute", node.attr
        case ast.ClassDef():
            yield node.lineno, "definition", node.name
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield node.lineno, "definition", node.name
            yield from find_long_locals(node)


def find_long_locals(function: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, "local", name) of the locals that live longer than LOCAL_LIFE lines."""
    uses: dict[str, list[int]] = collections.defaultdict(list)
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            uses[node.id].append(node.lineno)
    for name, lines in uses.items():
        if max(lines) - min(lines) > LOCAL_LIFE:
            yield min(lines), "local", name


def read_sources(revision: str | None = None, paths: tuple[str, ...] = ROOTS) -> Iterator[tuple[str, str]]:
    """(path, source) of every tracked Python file, of the working tree or of a revision."""
    command = (
        ["git", "ls-tree", "-r", "--name-only", revision]
        if revision
        else ["git", "ls-files", "-co", "--exclude-standard"]
    )
    listed = subprocess.run([*command, "--", *paths], check=True, capture_output=True, text=True).stdout
    for path in sorted(name for name in listed.splitlines() if name.endswith(".py")):
        if revision:
            shown = subprocess.run(["git", "show", f"{revision}:{path}"], check=True, capture_output=True)
            yield path, shown.stdout.decode()
        elif Path(path).exists():
            yield path, Path(path).read_text(encoding="utf-8")


def measure(revision: str | None) -> dict[str, Shape]:
    """Shapes by folder. A root folder, and "all but tests", are sums."""
    shapes: dict[str, Shape] = collections.defaultdict(Shape)
    for path, source in read_sources(revision):
        root, *below = path.split("/")
        names = [root]
        if root == SPLIT:
            names.append(f"{root}/{below[0] if len(below) > 1 else '*.py'}")
        if root not in ("tests", "benchmarks"):
            names.append("all but tests")
        for name in names:
            shapes[name].add(source)
    return shapes


def print_shapes(before: str | None) -> None:
    """Prints a line for each folder, beside those of revision `before`."""
    new_shapes = measure(None)
    old_shapes = measure(before) if before else {}
    width = 24 if before else 13
    print(f"{'':<24}" + "".join(f"{heading:>{width}}" for heading in HEADINGS))
    for name in sorted(new_shapes.keys() | old_shapes.keys(), key=lambda name: (name == "all but tests", name)):
        cells = new_shapes[name].cells() if name in new_shapes else ["-"] * len(HEADINGS)
        if before:
            old_cells = old_shapes[name].cells() if name in old_shapes else ["-"] * len(HEADINGS)
            cells = [f"{old} -> {new}" for old, new in zip(old_cells, cells)]
        print(f"{name:<24}" + "".join(f"{cell:>{width}}" for cell in cells))


def print_faults(paths: tuple[str, ...]) -> None:
    """Prints what the files of `paths` have against the rules."""
    for path, source in read_sources(paths=paths):
        faults = find_faults(path, source)
        print(*faults.sentences, sep="\n", end="\n" if faults.sentences else "")
        for name, complexity in faults.complexities.items():
            print(f"{name}: complexity {complexity}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="REV", help="a git revision to print beside the working tree")
    parser.add_argument("paths", nargs="*", help="paths whose faults are printed in place of sizes")
    options = parser.parse_args()
    if options.paths:
        print_faults(tuple(options.paths))
    else:
        print_shapes(options.before)


if __name__ == "__main__":
    main()
