"""Count what docs/design.md says of the code's size: code lines by folder, long files and functions, imports that break cycles.

    python tools/count_lines.py            a table
    python tools/count_lines.py --list     and what each count is made of

A code line holds code: no blank line, comment or docstring counts.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("src/fedbraid", "src/fedbraid_native", "experiments", "benchmarks", "tests")
LONG_FILE, LONG_FUNCTION, MANY_PARAMETERS = 400, 60, 6
Function = ast.FunctionDef | ast.AsyncFunctionDef
NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER)  # fmt: skip


def code_lines(text: str, tree: ast.Module) -> set[int]:
    """The numbers of the lines that hold code."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in NOT_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | Function)
            and ast.get_docstring(node, clean=False) is not None
        ):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def parameters(function: Function) -> int:
    """How many it has, besides self and cls."""
    a = function.args
    named = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return (
        len([n for n in named if n not in ("self", "cls")]) + (a.vararg is not None) + (a.kwarg is not None)
    )


def measured(path: Path) -> tuple[int, dict[str, list[str]]]:
    """(code lines, what is long, wide or breaks a cycle) of one file."""
    text = path.read_text()
    tree, name = ast.parse(text), str(path.relative_to(ROOT))
    lines, found = code_lines(text, tree), dict[str, list[str]]()
    if len(lines) > LONG_FILE:
        found["files"] = [f"{name}: {len(lines)}"]
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    for f in functions:
        length = len([n for n in lines if f.lineno <= n <= (f.end_lineno or 0)])
        if length > LONG_FUNCTION:
            found.setdefault("functions", []).append(f"{name}:{f.lineno} {f.name}: {length}")
        if (count := parameters(f)) > MANY_PARAMETERS:
            found.setdefault("parameters", []).append(f"{name}:{f.lineno} {f.name}: {count}")
        found.setdefault("imports", []).extend(
            f"{name}:{node.lineno} {node.module}"
            for node in ast.walk(f)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedbraid")
        )
    guarded = any(
        isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for node in tree.body
    )
    if guarded and path.name != "__init__.py":
        found["checking"] = [name]
    return len(lines), found


WHAT = {
    "files": f"files over {LONG_FILE} code lines",
    "functions": f"functions over {LONG_FUNCTION} code lines",
    "parameters": f"functions with more than {MANY_PARAMETERS} parameters",
    "imports": "imports of fedbraid inside functions",
    "checking": "modules with TYPE_CHECKING",
}


def main() -> None:
    """Print the table."""
    sizes, of_src = Counter[str](), dict[str, list[str]]()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            inside = path.relative_to(ROOT / package).parts
            folder = inside[0] if len(inside) > 1 and package == "src/fedbraid" else ""
            count, found = measured(path)
            sizes[f"{package}/{folder}"] += count
            if package.startswith("src/"):
                for kind, each in found.items():
                    of_src.setdefault(kind, []).extend(each)
    totals = {p: sum(n for name, n in sizes.items() if name.startswith(f"{p}/")) for p in PACKAGES}
    print("| folder | code lines |\n| :-- | --: |")
    for name, count in sorted(sizes.items()):
        print(f"| `{name}` | {count:,} |")
    for package, count in totals.items():
        print(f"| **{package}** | **{count:,}** |")
    print("\n| in `src/` | count |\n| :-- | --: |")
    for kind, what in WHAT.items():
        print(f"| {what} | {len(of_src.get(kind, []))} |")
    if "--list" in sys.argv:
        for kind, what in WHAT.items():
            print(f"\n{what}:", *sorted(of_src.get(kind, [])), sep="\n  ")


if __name__ == "__main__":
    main()
