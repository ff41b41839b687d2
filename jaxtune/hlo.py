"""Parser of optimised HLO text: instructions in execution order, with the lines of Python that they come from."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# Bytes per element.
WIDTH = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
    "u64": 8, "f64": 8, "c64": 8, "s4": 0.5, "u4": 0.5, "s2": 0.25, "u2": 0.25, "f8e4m3fn": 1, "f8e5m2": 1, "f8e4m3": 1,
    "f8e8m0fnu": 1, "f4e2m1fn": 0.5,
}  # fmt: skip


class Frame(NamedTuple):
    """A line of Python from which an instruction comes; the file's path begins at its package."""

    file: str
    function: str
    line: int


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: without the leading %.
        shape: text, of the result.
        opcode: such as 'fusion'.
        operands: names.
        attributes: text after the operands.
        is_root: whether its value is the computation's.
        number: of a parameter; else -1.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    number: int = -1

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """Dtype and dimensions of each array of the result."""
        # XLA prints comments such as /*index=5*/ inside of long tuples.
        text = re.sub(r"/\*.*?\*/", "", self.shape)
        arrays = re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", text)
        return [(dtype, tuple(int(size) for size in sizes.split(",") if size)) for dtype, sizes in arrays]

    @property
    def bytes(self) -> float:
        """Bytes of the whole result."""
        return sum(WIDTH.get(dtype, 0) * math.prod(sizes) for dtype, sizes in self.arrays)

    @property
    def on_host(self) -> bool:
        """Whether the result is in the host's memory, as a whole or in part."""
        # S(5) is XLA's memory space for pinned host memory.
        return "S(5)" in self.shape

    @property
    def operation(self) -> str:
        """JAX's name stack, such as jit(step)/transpose(jvp())/while/body/dot_general."""
        return self.attribute(r'op_name="([^"]*)"') or ""

    @property
    def target(self) -> str:
        """The target of a custom call; "" for other instructions."""
        return self.attribute(r'custom_call_target="([^"]+)"') or ""

    @property
    def known_iterations(self) -> int | None:
        """The trip count of a loop, if XLA knows it."""
        trip_count = self.attribute(r'"known_trip_count":\{"n":"(\d+)"')
        return None if trip_count is None else int(trip_count)

    def called_name(self, key: str = "calls") -> str:
        """The name of the called computation, by attribute."""
        called = self.attribute(key + r"=%?([\w.\-]+)")
        assert called is not None, f"{self.name} has no {key}"
        return called

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern's first match in the attributes."""
        match = re.search(pattern, self.attributes)
        return match and match[1]


Computation = dict[str, Instruction]


@dataclass(frozen=True)
class Module:
    """The computations of a program, the name of its entry, and tables with the lines of Python of its instructions."""

    computations: dict[str, Computation]
    entry: str
    _tables: dict[str, dict[int, str]]

    @classmethod
    def parse(cls, text: str) -> "Module":
        """Parse the text of jax.stages.Compiled.as_text()."""
        computations: dict[str, Computation] = {}
        entry, current = "", None
        for line in text.splitlines():
            if current is not None and (match := _INSTRUCTION.match(line)):
                instruction = _instruction(*match.groups())
                computations[current][instruction.name] = instruction
            elif match := _COMPUTATION.match(line):
                current = match[2]
                computations[current] = {}
                entry = current if match[1] else entry
            elif line.startswith("}"):
                current = None
        return cls(computations, entry, _tables(text))

    def frames(self, instruction: Instruction) -> tuple[Frame, ...]:
        """The lines of Python of an instruction, innermost first."""
        number = instruction.attribute(r"stack_frame_id=(\d+)")
        return tuple(self._stack(int(number))) if number else ()

    def _stack(self, number: int) -> Iterator[Frame]:
        seen = set()
        while number not in seen and (text := self._tables["StackFrames"].get(number)):
            seen.add(number)
            location = self._tables["FileLocations"][_number(text, "file_location_id")]
            file = self._tables["FileNames"][_number(location, "file_name_id")].strip('"')
            function = self._tables["FunctionNames"][_number(location, "function_name_id")].strip('"')
            path = re.sub(r".*/(?=(jaxtune|pallas_kernels)/)|.*site-packages/", "", file)
            yield Frame(path, function.split(".")[-1], _number(location, "line"))
            number = _number(text, "parent_frame_id") - 1  # XLA prints the id plus one, so that 1 means none

    @cached_property
    def users(self) -> dict[str, dict[str, list[Instruction]]]:
        """By computation and instruction: the instructions that use its result."""
        users: dict[str, dict[str, list[Instruction]]] = {}
        for name, computation in self.computations.items():
            users[name] = {}
            for instruction in computation.values():
                for operand in instruction.operands:
                    users[name].setdefault(operand, []).append(instruction)
        return users

    def read(self, computation: str, parameter: Instruction) -> float:
        """Bytes that a fusion reads of a parameter: only the slice if it takes one, nothing for an update in place."""
        total, pending = 0.0, [parameter]
        while pending:
            value = pending.pop()
            for user in self.users[computation].get(value.name, ()):
                first = user.operands[0] == value.name
                if user.opcode in ("bitcast", "reshape"):
                    pending.append(user)
                elif first and user.opcode in ("dynamic-slice", "slice", "gather"):
                    total += user.bytes
                elif user.opcode == "fusion":
                    for place in (place for place, operand in enumerate(user.operands) if operand == value.name):
                        total += self.read(user.called_name(), self.parameters(user.called_name())[place])
                elif not (first and user.opcode in ("dynamic-update-slice", "scatter")) and user.opcode not in _TUPLES:
                    return parameter.bytes
        return min(total, parameter.bytes)

    def written(self, computation: str) -> float:
        """Bytes that a fusion writes: only the update if it updates an array in place."""
        body = self.computations[computation]

        def of(value: Instruction) -> float:
            while value.opcode in ("bitcast", "reshape"):
                value = body[value.operands[0]]
            if value.opcode == "dynamic-update-slice":
                return body[value.operands[1]].bytes
            if value.opcode == "scatter" and len(value.operands) == 3:
                return 2 * body[value.operands[2]].bytes  # scatter-add also reads the values that it adds to
            if value.opcode == "tuple":
                return sum(of(body[operand]) for operand in value.operands)
            if value.opcode == "fusion":
                return self.written(value.called_name())
            return results(value)

        return of(root(body))

    def parameters(self, computation: str) -> list[Instruction]:
        """The parameters of a computation, in order."""
        parameters = (i for i in self.computations[computation].values() if i.opcode == "parameter")
        return sorted(parameters, key=lambda parameter: parameter.number)


def root(computation: Computation) -> Instruction:
    """The instruction that gives a computation its value."""
    return next(instruction for instruction in computation.values() if instruction.is_root)


def results(value: Instruction) -> float:
    """Bytes that an instruction writes; parameters and the workspace of a cuBLAS call do not count."""
    if value.opcode == "parameter" or (value.opcode == "get-tuple-element" and value.shape.startswith("s8[")):
        return 0.0
    # A cuBLAS call returns its result and an s8 array, the workspace.
    if "__cublas" in value.target:
        return sum(WIDTH[dtype] * math.prod(sizes) for dtype, sizes in value.arrays if dtype != "s8")
    return value.bytes


# Opcodes that launch nothing.
FREE = {
    *("parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all", "add-dependency"),
    *("optimization-barrier", "partition-id", "replica-id", "async-done", "async-update", "copy-done", "fusion-done"),
    *("custom-call-done", "all-gather-done", "all-reduce-done", "reduce-scatter-done", "collective-permute-done"),
}
_TUPLES = ("tuple", "get-tuple-element")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"  +(ROOT )?%([\w.\-]+) = (.*)$")


def _instruction(root: str | None, name: str, text: str) -> Instruction:
    shape, rest = _split_parentheses(text) if text.startswith("(") else text.split(" ", 1)
    rest = rest.lstrip()
    opcode = re.match(r"[\w\-]+", rest)
    assert opcode is not None, f"no opcode in {text[:200]}"
    inside, attributes = _split_parentheses(rest[opcode.end() :])
    if opcode[0] == "parameter":
        return Instruction(name, shape, opcode[0], (), attributes, bool(root), int(inside[1:-1]))
    operands = () if opcode[0] == "constant" else re.findall(r"%([\w.\-]+)", re.sub(r"/\*.*?\*/", "", inside))
    return Instruction(name, shape, opcode[0], tuple(operands), attributes, bool(root))


def _split_parentheses(text: str) -> tuple[str, str]:
    """Split a text that begins with a parenthesis after the matching one."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[: place + 1], text[place + 1 :]
    raise ValueError(f"no parenthesis closes {text[:200]}")


def _tables(text: str) -> dict[str, dict[int, str]]:
    """The tables FileNames, FunctionNames, FileLocations and StackFrames, which precede the computations."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    rows = None
    for line in text.splitlines():
        if line in tables:
            rows = tables[line]
        elif _COMPUTATION.match(line):
            break
        elif rows is not None and (match := re.match(r"(\d+) (.*)", line)):
            rows[int(match[1])] = match[2]
    return tables


_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


def _number(text: str, key: str) -> int:
    match = re.search(key + r"=(\d+)", text)
    return int(match[1]) if match else 0
