"""Calls of functions of the module, replaced by the functions' bodies.

The emulator has no call stack: a call's parameters are variables of the caller, so the body reads
and writes those in place of its own. An indirect call becomes a chain of comparisons with the
addresses of the functions that its list names, or that its prototype fits. Recursive calls stay as
they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from ptxemu.errors import ModuleError
from ptxemu.syntax import ast

MOST_COPIED = 1_000_000
"""Instructions that calls of one module may be replaced by, those of inner calls counted again."""

_Operand = TypeVar("_Operand", bound=ast.Operand)
_ANY = ""
"""In place of a function's name: a call that may be of any function."""
_PER_CALL = ("local", "param")
"""State spaces whose variables every call has for itself."""


class Inliner:
    """Puts bodies of a module's functions in place of their calls, each function's own only once.

    Functions that call themselves, in whatever way, are expanded at each place.
    """

    def __init__(self, module: ast.Module) -> None:
        """Expand nothing yet."""
        self._module = module
        self._expanded: dict[str, ast.Function] = {}
        self._copied = 0
        self._sites = Counter(
            operand.name if isinstance(operand := one.operands[1], ast.Symbol) else _ANY
            for function in module.functions.values()
            for one in function.instructions
            if one.modifiers[0] == "call"
        )
        """Number of calls by the function that they name."""

    def inlined(self, function: ast.Function) -> ast.Function:
        """`function` with the bodies of the functions that it calls in place of the calls.

        Raises:
            ModuleError: that takes more than `MOST_COPIED` instructions for this module.
        """
        frames = [_Frame(self._module, function)]
        names = {function.name}
        while True:
            frame = frames[-1]
            missing = self._advance(frame, names)
            if missing is not None:
                self._count(frame.function, len(missing.instructions))
                frames.append(_Frame(self._module, missing))
                names.add(missing.name)
                continue
            frames.pop()
            names.discard(frame.function.name)
            done = frame.result()
            if not frames:
                return done
            frames[-1].is_recursive = frames[-1].is_recursive or frame.is_recursive
            if frame.is_recursive or self._sites[done.name] + self._sites[_ANY] < 2:
                frames[-1].bodies[done.name] = done  # and no longer
            else:
                self._expanded[done.name] = done

    def _advance(self, frame: _Frame, names: set[str]) -> ast.Function | None:
        """Expand calls until a function is needed that is not expanded; return that one.

        Args:
            names: functions that are being expanded, which calls them.
        """
        for instruction in frame.waiting():
            callees = frame.callees_of(instruction, names)
            bodies = []
            for callee in callees:
                body = frame.bodies.get(callee.name) or self._expanded.get(callee.name)
                if body is None:
                    return callee
                bodies.append(body)
            self._count(frame.function, sum(len(body.instructions) for body in bodies))
            frame.expand(instruction, bodies)
        return None

    def _count(self, function: ast.Function, instructions: int) -> None:
        self._copied += instructions
        if self._copied > MOST_COPIED:
            raise ModuleError(
                f"{function.name}: its calls are inlined, which takes more than {MOST_COPIED:,} "
                "instructions in this module"
            )


class _Frame:
    """A function that is being expanded."""

    def __init__(self, module: ast.Module, function: ast.Function) -> None:
        """Nothing of it is done."""
        self.function = function
        self.bodies: dict[str, ast.Function] = {}
        """Expanded functions, as they are here alone, by name."""
        self.is_recursive = False
        """A call was left, because its function is being expanded."""
        self._module = module
        self._merged = _Merged(function)
        self._is_changed = False
        self._done = 0
        self._callees: list[ast.Function] | None = None

    def waiting(self) -> Iterator[ast.Instruction]:
        """Instructions that are not expanded yet."""
        if not any(one.modifiers[0] == "call" for one in self.function.instructions):
            return
        while self._done < len(self.function.instructions):
            yield self.function.instructions[self._done]

    def callees_of(self, instruction: ast.Instruction, names: set[str]) -> list[ast.Function]:
        """Return the functions whose bodies can stand for the next instruction."""
        if self._callees is None:
            found = _callees(self._module, self.function, instruction)
            self._callees = [callee for callee in found if callee.name not in names]
            self.is_recursive = self.is_recursive or len(self._callees) < len(found)
        return self._callees

    def expand(self, instruction: ast.Instruction, bodies: list[ast.Function]) -> None:
        """Put bodies in place of the next instruction, or keep it if there are none."""
        if not bodies:
            self._merged.keep(instruction)
        elif isinstance(instruction.operands[1], ast.Register):
            self._merged.insert_choice(bodies, instruction)
        else:
            self._merged.insert(bodies[0], instruction)
        self._is_changed = self._is_changed or bool(bodies)
        self._done, self._callees = self._done + 1, None

    def result(self) -> ast.Function:
        """Return the function as it is after the last instruction."""
        return self._merged.function() if self._is_changed else self.function


def _callees(
    module: ast.Module, caller: ast.Function, instruction: ast.Instruction
) -> list[ast.Function]:
    """The functions whose bodies can stand for a call; none for all other instructions."""
    if instruction.modifiers[0] != "call":
        return []
    if not isinstance(instruction.operands[1], ast.Register):
        callee = _callee(module, instruction)
        return [] if callee is None else [callee]
    listed = instruction.operands[3] if len(instruction.operands) > 3 else None
    if not isinstance(listed, ast.Symbol):
        return []
    names = caller.call_targets.get(listed.name, tuple(module.functions))
    prototype = caller.prototypes.get(listed.name)
    found = []
    for name in names:
        direct = replace(
            instruction,
            operands=(instruction.operands[0], ast.Symbol(name), instruction.operands[2]),
        )
        callee = _callee(module, direct)
        if callee is None or callee.is_entry:
            continue
        if prototype is None or _fits(callee, prototype):
            found.append(callee)
    return found


def _fits(function: ast.Function, prototype: ast.Prototype) -> bool:
    """Whether the function's parameters and results have the prototype's sizes."""
    pairs = ((function.parameters, prototype.parameters), (function.returns, prototype.returns))
    return all([p.size for p in own] == [p.size for p in asked] for own, asked in pairs)


def _callee(module: ast.Module, instruction: ast.Instruction) -> ast.Function | None:
    """The function whose body can stand for a direct call, if it can."""
    returns, target, arguments = instruction.operands[:3]
    callee = module.functions.get(target.name) if isinstance(target, ast.Symbol) else None
    if callee is None or not callee.instructions:
        return None
    for actual, formal in ((arguments, callee.parameters), (returns, callee.returns)):
        if not isinstance(actual, ast.Vector) or len(actual.elements) != len(formal):
            return None
        if not all(isinstance(element, ast.Symbol) for element in actual.elements):
            return None
    return callee


class _Merged:
    """A function under construction: the caller's instructions and the inserted bodies."""

    def __init__(self, caller: ast.Function) -> None:
        self._caller = caller
        self._instructions: list[ast.Instruction] = []
        self._registers = list(caller.registers)
        self._variables = {variable.name: variable for variable in caller.variables}
        self._labels: dict[str, int] = {}
        self._branch_targets = dict(caller.branch_targets)
        self._places: list[int] = []
        self._calls = 0

    def keep(self, instruction: ast.Instruction) -> None:
        """Add an instruction of the caller."""
        self._places.append(len(self._instructions))
        self._add(instruction)

    def insert(self, body: ast.Function, call: ast.Instruction) -> None:
        """Add `body` in place of `call`."""
        self._calls += 1
        self._places.append(len(self._instructions))
        names = _Names(body, call, f"@call{self._calls}", len(self._registers))
        self._registers += [names.register(register) for register in body.registers]
        for variable in body.variables:
            self._add_variable(replace(variable, name=names.name(variable.name)))
        end = f"end@call{self._calls}"
        if call.guard is not None:
            skip = ast.Guard(call.guard.register, not call.guard.negated)
            self._add(_branch(call, end, skip))
        start = len(self._instructions)
        for label, pc in body.labels.items():
            self._labels[names.name(label)] = start + pc
        for name, targets in body.branch_targets.items():
            self._branch_targets[names.name(name)] = tuple(names.name(t) for t in targets)
        for instruction in body.instructions:
            renamed = names.instruction(instruction)
            is_return = instruction.modifiers[0] == "ret"
            self._add(_branch(renamed, end, renamed.guard) if is_return else renamed)
        self._labels[end] = len(self._instructions)

    def insert_choice(self, bodies: list[ast.Function], call: ast.Instruction) -> None:
        """Add the body of whichever function the register of an indirect `call` points to."""
        returns, target, arguments = call.operands[:3]
        differs = ast.Register(f"differs@{len(self._registers)}", len(self._registers), "pred")
        self._registers.append(differs)
        place, end = len(self._places), f"end@choice{len(self._registers)}"
        if call.guard is not None:
            self._add(_branch(call, end, ast.Guard(call.guard.register, not call.guard.negated)))
        plain = replace(call, guard=None)
        start = len(self._instructions)
        for number, body in enumerate(bodies):
            other = f"{end}.{number}"
            operands: tuple[ast.Operand, ...] = (differs, target, ast.Symbol(body.name))
            self._add(
                replace(
                    plain, opcode="setp.ne.u64", modifiers=("setp", "ne", "u64"), operands=operands
                )
            )
            self._add(_branch(plain, other, ast.Guard(differs, negated=False)))
            direct = replace(plain, operands=(returns, ast.Symbol(body.name), arguments))
            self.insert(body, direct)
            self._add(_branch(plain, end, None))
            self._labels[other] = len(self._instructions)
        self._add(replace(plain, opcode="trap", modifiers=("trap",), operands=()))
        self._labels[end] = len(self._instructions)
        self._places[place:] = [start if call.guard is None else start - 1]

    def function(self) -> ast.Function:
        """The result."""
        places = [*self._places, len(self._instructions)]
        labels = {label: places[pc] for label, pc in self._caller.labels.items()}
        return replace(
            self._caller,
            instructions=tuple(self._instructions),
            registers=tuple(self._registers),
            variables=tuple(self._variables.values()),
            labels={**labels, **self._labels},
            branch_targets=self._branch_targets,
        )

    def _add(self, instruction: ast.Instruction) -> None:
        self._instructions.append(replace(instruction, pc=len(self._instructions)))

    def _add_variable(self, variable: ast.Variable) -> None:
        self._variables.setdefault(variable.name, variable)


def _branch(like: ast.Instruction, label: str, guard: ast.Guard | None) -> ast.Instruction:
    """A branch that stands where `like` stood."""
    target = ast.Symbol(label)
    return replace(like, opcode="bra", modifiers=("bra",), operands=(target,), guard=guard)


class _Names:
    """The registers and names of one inserted body."""

    def __init__(
        self, body: ast.Function, call: ast.Instruction, suffix: str, first_slot: int
    ) -> None:
        self._suffix = suffix
        self._first_slot = first_slot
        self._map = {name: name + suffix for name in (*body.labels, *body.branch_targets)}
        for variable in body.variables:
            own = variable.name + suffix
            shared = f"{body.name}::{variable.name.removeprefix(f'{body.name}::')}"
            self._map[variable.name] = own if variable.space in _PER_CALL else shared
        returns, _, arguments = call.operands[:3]
        for actual, formal in ((arguments, body.parameters), (returns, body.returns)):
            assert isinstance(actual, ast.Vector)
            for element, parameter in zip(actual.elements, formal, strict=True):
                assert isinstance(element, ast.Symbol)
                self._map[parameter.name] = element.name

    def name(self, name: str) -> str:
        """A label, variable or parameter of the body as the caller has it."""
        return self._map.get(name, name)

    def register(self, register: ast.Register) -> ast.Register:
        """A register of the body."""
        return ast.Register(
            register.name + self._suffix, register.slot + self._first_slot, register.type
        )

    def instruction(self, instruction: ast.Instruction) -> ast.Instruction:
        """An instruction of the body."""
        guard = instruction.guard
        if guard is not None:
            guard = ast.Guard(self.register(guard.register), guard.negated)
        operands = tuple(self.operand(operand) for operand in instruction.operands)
        return replace(instruction, operands=operands, guard=guard)

    def operand(self, operand: _Operand) -> _Operand:
        """An operand of the body."""
        result: ast.Operand = operand
        if isinstance(operand, ast.Register):
            result = self.register(operand)
        elif isinstance(operand, ast.NegatedRegister):
            result = ast.NegatedRegister(self.register(operand.register))
        elif isinstance(operand, ast.Symbol):
            result = replace(operand, name=self.name(operand.name))
        elif isinstance(operand, ast.Vector):
            result = ast.Vector(tuple(self.operand(element) for element in operand.elements))
        elif isinstance(operand, ast.Pair):
            result = ast.Pair(self.operand(operand.first), self.operand(operand.second))
        elif isinstance(operand, ast.Address):
            coordinates = operand.coordinates
            if coordinates is not None:
                coordinates = tuple(self.operand(element) for element in coordinates)
            result = replace(operand, base=self.operand(operand.base), coordinates=coordinates)
        return result  # type: ignore[return-value]  # an operand of the same class
