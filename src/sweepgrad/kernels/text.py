"""The text of a kernel as it grows, line by line, and the statements in it that compute expressions."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from sweepgrad.kernels.emit import Slot, literal
from sweepgrad.kernels.expr import Expr
from sweepgrad.kernels.passes import Regions


class Text(Regions):
    """Writes what `Regions` has put in order."""

    def begin(self) -> None:
        """Forget what was written, for another function."""
        self.lines: list[str] = []
        self.indent = 0
        self.count = 0

    def put(self, line: str) -> None:
        """Add one line."""
        self.lines.append("    " * self.indent + line)

    @contextmanager
    def block(self, line: str) -> Iterator[None]:
        """Add one line, and indent those that are added within."""
        self.put(line)
        self.indent += 1
        yield
        self.indent -= 1

    def written(self) -> str:
        """All lines."""
        return "\n".join(self.lines) + "\n"

    def compute(self, exprs: Iterable[Expr], texts: dict[Expr, str], templates: Mapping[str, str]) -> None:
        """Statements for those of `exprs`, in topological order, that have no text yet; all that they need has one."""
        for expr in exprs:
            if expr in texts:
                continue
            if expr.op == "const":
                texts[expr] = literal(expr.value)  # type: ignore[arg-type]
            elif expr.op == "symbol":
                slot = self.slots.get(str(expr.value))
                texts[expr] = str(expr.value) if slot is None else self.read(slot, slot.name)
            else:
                assert expr.op != "reduce", f"{expr} is needed before it is there"
                name = f"t{self.count}"
                self.count += 1
                self.put(f"{name} = {templates[expr.op].format(*(texts[arg] for arg in expr.args))}")
                texts[expr] = name

    def read(self, slot: Slot, text: str) -> str:
        """An input's element in the nest's own dtype."""
        return f"T({text})" if slot.dtype != self.dtype and slot.dtype.startswith("float") else text
