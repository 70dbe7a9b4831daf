"""The package's layers: a module imports only from those above it, and the graph knows nothing of arrays."""

import ast
from pathlib import Path

import pytest

import sweepgrad

ROOT = Path(sweepgrad.__file__).parent

LAYERS = [
    ["errors", "_version"],
    ["atomic", "config", "dtypes", "grad_mode", "shards"],
    ["graph.node"],
    ["graph.report"],
    ["graph.registry"],
    ["graph.backward", "graph.sweeper"],
    ["graph.process"],
    ["graph"],
    ["kernels"],
    ["kernels.expr"],
    ["kernels.scalars", "kernels.primitives", "kernels.machine", "kernels.coefficients"],
    ["kernels.functions_exp", "kernels.functions_trig"],
    ["kernels.functions_log"],
    ["kernels.functions"],
    ["kernels.cache", "kernels.loader"],
    ["kernels.compiler"],
    ["kernels.emit", "kernels.cpu", "kernels.buffers"],
    ["kernels.passes", "kernels.workers"],
    ["kernels.text"],
    ["kernels.nest", "kernels.grid", "kernels.assembly"],
    ["kernels.nvidia", "kernels.simulator"],
    ["kernels.gpu"],
    ["arrays"],
    ["shortage", "pool", "hooks"],
    ["sharing"],
    ["sums", "elements"],
    ["tensor"],
    ["anomaly"],
    ["ops"],
    ["ops.op", "ops.loop"],
    ["ops.plan"],
    ["ops.short", "ops.device", "ops.structural", "ops.reducer"],
    ["ops.elementwise"],
    ["ops.traced", "ops.program"],
    ["fusion"],
    ["ops.shape", "ops.indexing"],
    ["ops.reductions"],
    ["ops.linalg", "ops.creation"],
    ["ops.operators"],
    ["transforms", "optim.optimizers"],
    ["optim"],
    [""],
    ["warmup"],
    ["cli"],
    ["__main__"],
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path):
    """Modules of this package that the file imports when it is run, at the top or later."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                longer = f"{node.module}.{alias.name}"
                yield longer if longer.removeprefix("sweepgrad.") in RANK else node.module


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_upwards(path):
    own = name_of(path)
    assert own in RANK, "a new module has to be given its layer"
    for imported in imports(path):
        if imported.split(".")[0] == "sweepgrad":
            name = imported.removeprefix("sweepgrad").removeprefix(".")
            assert RANK[name] < RANK[own], f"{own} imports {name}"


@pytest.mark.parametrize("path", [p for p in MODULES if name_of(p).startswith("graph")], ids=name_of)
def test_graph_knows_no_arrays(path):
    assert not {name.split(".")[0] for name in imports(path)} & {"numpy", "numba"}


def test_graph_can_be_read_in_one_sitting():
    paths = [p for p in MODULES if name_of(p).startswith("graph.") and p.stem != "report"]
    code = [line for p in paths for line in p.read_text().splitlines() if line.strip()]
    assert len(code) <= 800
    assert all(len(p.read_text().splitlines()) <= 600 for p in MODULES)
