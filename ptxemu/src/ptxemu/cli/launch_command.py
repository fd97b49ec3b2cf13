"""`ptxemu run` and `ptxemu check`: launch a kernel of a PTX file on seeded inputs, or run a .cu."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu import api
from ptxemu.cli import argument_spec, report
from ptxemu.cli.argument_spec import Argument
from ptxemu.cli.help_text import HelpFormatter, folded
from ptxemu.cli.host_report import add_report_options, carry_out_host
from ptxemu.cli.interruption import add_time_limit_option, interruptible
from ptxemu.cli.kernel_names import for_people, readable
from ptxemu.cli.kinds import SOURCE, is_host_code, launch_options, ptx_of
from ptxemu.cli.merging import of_orders, seed_names
from ptxemu.cli.options import (
    add_failure_option,
    add_finding_options,
    add_lanes_option,
    add_schedule_options,
    add_unchecked_option,
    policy_of,
)
from ptxemu.cli.outcome import Explored, Outcome, Results
from ptxemu.cli.output_paths import output_folder
from ptxemu.cli.progress import Progress
from ptxemu.cli.schedules import add_seeds_option, positive, run_all
from ptxemu.cli.terminal import write_err, write_out
from ptxemu.errors import ExecutionError, Interruption, LaunchError
from ptxemu.exploration import MOST_ORDERS, Exploration, Order
from ptxemu.launch_setup import LaunchSetup
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.saved_launch import is_saved_launch, load_launch

PTX_HELP = "a PTX file, or a saved launch (ptxemu exec --save), which needs no launch options"
_SOURCE_HELP = (
    ", or host\ncode as of ptxemu exec: a program, a script, a CUDA source (.cu), which nvcc\n"
    "compiles first; of a source with launch options its kernel is launched, without host code"
)
_SHOWN_ELEMENTS = 6

_HELP = {
    "run": "Launch a kernel on random, seeded inputs and show what it did to its arrays.",
    "check": (
        "Launch a kernel on random, seeded inputs and report missing synchronisation: races, "
        "missing waits and proxy fences, deadlocks, out-of-bounds accesses.\n"
        "Exit code 1 if an error is found (--fail-on says which)."
    ),
}
_EXAMPLE = """
examples:
  ptxemu {command} axpy.ptx --grid 4 --block 256 \\
      --arg f32[1024]=random --arg f32[1024]=zeros \\
      --arg f32=2.5 --arg i32=1024
  ptxemu {command} gemm.0.launch       a launch that `ptxemu exec --save` wrote
  ptxemu {command} gemm.cu -- 256 256  a program from its source, with its arguments"""


def add_parser(commands: Any, name: str) -> None:
    """Add `run` or `check` to the parser."""
    check = name == "check"
    parser = commands.add_parser(
        name,
        help="launch a kernel" + (" and look for missing synchronisation" if check else ""),
        description=_HELP[name] + "\n" + _EXAMPLE.format(command=name),
        formatter_class=HelpFormatter,
    )
    parser.add_argument("ptx", type=Path, help=PTX_HELP + _SOURCE_HELP)
    add_launch_options(parser)
    parser.add_argument(
        "--arch",
        help="device: sm_90a, sm_100a or sm_103a (default: the PTX's .target; of a source sm_90a)",
    )
    add_schedule_options(parser)
    add_seeds_option(parser)
    add_time_limit_option(parser)
    parser.add_argument(
        "--save",
        type=output_folder,
        metavar="DIR",
        help="write the arrays there as .npy; of a source its launches",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable report")
    add_report_options(parser)
    parser.add_argument(
        "--nvcc", default="", metavar="OPTIONS", help="of a source: options of nvcc, in one string"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    add_finding_options(parser)
    if check:
        add_failure_option(parser)
        add_unchecked_option(parser)
        add_lanes_option(parser)
        _add_order_options(parser)
    parser.set_defaults(
        carry_out=carry_out,
        check=check,
        fail_on="isa",
        arguments=[],
        unchecked=None,
        is_module=False,
        is_check=True,
        program=None,
        explore=None,
        order=None,
    )


def _add_order_options(parser: argparse.ArgumentParser) -> None:
    """The options that choose orders of synchronisation."""
    parser.add_argument(
        "--explore",
        type=positive,
        nargs="?",
        const=MOST_ORDERS,
        metavar="N",
        help="run a small launch in all orders of its atomics and of strong loads and stores, at\n"
        f"most N of them (default {MOST_ORDERS:,}): a proof for its data, or the order that fails",
    )
    parser.add_argument(
        "--order",
        type=_order,
        metavar="LIST",
        help="run it in one of these orders, as a report of --explore names it",
    )


def _order(text: str) -> list[int]:
    if text == "-":
        return []
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"expected numbers, or - for none; got {text!r}")
    return [int(word) for word in words]


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """The options that say how a kernel of a PTX file is launched."""
    parser.add_argument("--kernel", help="entry point (not needed if there is only one)")
    parser.add_argument("--grid", type=_dim3, help="CTAs: X or X,Y,Z (default 1)")
    parser.add_argument("--block", type=_dim3, help="threads: X or X,Y,Z (default: .reqntid)")
    parser.add_argument("--cluster", type=_dim3, help="CTAs of a cluster: X or X,Y,Z")
    parser.add_argument("--smem", type=int, help="bytes of dynamic shared memory (default 0)")
    parser.add_argument(
        "--arg", action="append", default=[], metavar="SPEC", help=argument_spec.HELP
    )


def prepare(options: argparse.Namespace) -> tuple[LaunchSetup, list[Argument]]:
    """The launch that the options ask for, and its arguments.

    Raises:
        LaunchError, ValueError: naming the option that is wrong.
    """
    if is_saved_launch(options.ptx):
        return _saved(options)
    module = api.load(options.ptx, arch=options.arch)
    kernel = _kernel(module, options.kernel)
    rng = np.random.default_rng(options.seed)
    arguments = [argument_spec.parse(text, rng) for text in options.arg]
    _check_count(module, kernel, arguments)
    memory = GlobalMemory()
    for index, argument in enumerate(arguments):
        if argument.array is not None:
            argument.before = argument.array.copy()
            memory.register(api.array_bytes(argument.array), f"argument {index} ({argument.text})")
    block = options.block or _required_block(module, kernel)
    values = tuple(argument.value for argument in arguments)
    grid, cluster, smem = options.grid or (1, 1, 1), options.cluster, options.smem or 0
    return LaunchSetup(module, kernel, grid, block, values, memory, cluster, smem), arguments


def _saved(options: argparse.Namespace) -> tuple[LaunchSetup, list[Argument]]:
    """The launch in a file, with its memory in the place of arguments."""
    given = launch_options(options)
    given += [f"--{name}" for name in ("arch", "sms") if getattr(options, name, None)]
    if given:
        raise LaunchError(f"{options.ptx} is a saved launch, which leaves no choice of {given[0]}")
    setup = load_launch(options.ptx)
    return setup, [
        Argument(f"memory {a.base:#x}: {a.name}", "u8", None, a.data, a.data.copy())
        for a in setup.memory.allocations
    ]


def carry_out(options: argparse.Namespace) -> int:
    """Launch and report; 1 if the check found an error."""
    if options.seeds is not None and options.save is not None:
        raise LaunchError("--save: of one schedule; leave out --seeds")
    if options.explore is not None or options.order is not None:
        if is_host_code(options.ptx) and not launch_options(options):
            raise LaunchError("--explore, --order: of one launch; save it (ptxemu exec --save)")
        if options.seeds is not None or options.save is not None:
            raise LaunchError("--explore, --order: leave out --seeds and --save")
    is_source = options.ptx.suffix == SOURCE
    if is_host_code(options.ptx) and not (is_source and launch_options(options)):
        return _carry_out_host(options)
    of_host_code = (options.arguments, options.junit, options.sarif, options.nvcc * (not is_source))
    if any(of_host_code) or options.unchecked or options.require_launch or options.allow_no_launch:
        given = "arguments, --nvcc, --junit, --sarif, --unchecked and what is said of launches"
        raise LaunchError(f"{given} are for host code")
    with interruptible(options.time_limit), ptx_of(options) if is_source else nullcontext():
        outcome = run_all(options, _run_kernel, output_to_stderr=options.json)
    return _report(options, outcome)


def _run_kernel(options: argparse.Namespace) -> Outcome:
    """Launch a kernel of a PTX file under one schedule."""
    setup, arguments = prepare(options)
    if options.explore is not None or options.order is not None:
        return _explore(options, setup)
    kernel = setup.kernel
    progress = Progress(quiet=options.quiet)
    results = Results()
    stopped: Interruption | None = None
    try:
        result = setup.launch(
            policy=policy_of(options),
            check=options.check,
            on_progress=lambda now: progress(kernel, now),
        )
        results.launches.append(result)
        results.findings = [*result.findings]
    except ExecutionError as error:
        results.failures.append(f"kernel {kernel}: {error}")
        results.findings, results.unfinished = [*error.findings], error.warp_instructions
    except Interruption as error:
        stopped = error
        results.failures.append(f"kernel {kernel}: {error.reason}")
        results.findings = results.findings or [*error.findings]
        results.unfinished = error.warp_instructions
    finally:
        progress.finish()
    if options.save is not None and stopped is None:
        _save(options.save, arguments)
    elif options.save is not None:
        results.failures.append(f"the arrays are not saved in {options.save}: half of them is done")
    shown = [(i, a) for i, a in enumerate(arguments) if a.array is not None]
    return Outcome(
        str(options.ptx),
        setup.module.device.arch,
        0,
        results,
        interruption=stopped,
        arrays=[_array_facts(index, argument) for index, argument in shown],
        array_lines=[line for index, argument in shown for line in _array_lines(index, argument)],
    )


def _explore(options: argparse.Namespace, setup: LaunchSetup) -> Outcome:
    """Launch a kernel in all orders of synchronisation, or in one."""
    exploration = Exploration(setup, policy=policy_of(options), fixed=options.order or ())
    most = options.explore if options.order is None else 1
    orders: list[Order] = []
    stopped: Interruption | None = None
    try:
        for order in exploration.run(most):
            orders.append(order)
            stopped = order.interruption
    except Interruption as error:  # between two runs
        stopped = error
    findings, failures = of_orders(orders)
    failures = [f"kernel {setup.kernel}: {failure}" for failure in failures]
    launches = [order.result for order in orders if order.result is not None][:1]
    explored = None
    if options.order is None:
        explored = Explored(exploration.orders, exploration.is_complete, exploration.left_out)
    results = Results([replace(one, findings=findings) for one in launches], findings, failures)
    return Outcome(
        str(options.ptx),
        setup.module.device.arch,
        0,
        results,
        interruption=stopped,
        explored=explored,
    )


def _report(options: argparse.Namespace, outcome: Outcome) -> int:
    """Write the report on a kernel; returns the exit code."""
    ran, stopped, explored = outcome.ran, outcome.interruption, outcome.explored
    reason = None if stopped is None else stopped.reason
    if reason is not None:
        write_err(f"ptxemu: {reason}\n")
        if not ran.failures:
            ran.failures.append(reason)
    if options.json:
        text = report.as_json(
            ran.launches,
            ran.findings,
            arrays=list(outcome.arrays),
            failure=for_people("\n".join(ran.failures)) or None,
            stopped=reason,
            **report.seed_facts(outcome.seeds),
            **({} if explored is None else {"orders": explored.to_json_dict()}),
        )
    else:
        lines = report.launch_lines(ran.launches)
        if outcome.seeds:
            tried = f"  {len(outcome.seeds)} schedules: {seed_names(outcome.seeds)}"
            lines.append(f"{tried}; of the first:" if outcome.array_lines else tried)
        if explored is not None:
            lines.append(f"  {explored.line}")
        lines += outcome.array_lines
        lines += report.result_lines(options, ran)
        lines.append(report.summary_line(ran, checked=options.check))
        text = "\n".join(folded(lines)) + "\n"
    write_out(text)
    if stopped is not None:
        return stopped.exit_code
    return int(bool(ran.failures) or report.is_failure(ran.findings, options.fail_on))


def _carry_out_host(options: argparse.Namespace) -> int:
    """Run host code, of a source its program, and report on its launches."""
    if given := launch_options(options):
        raise LaunchError(f"{options.ptx}: its host code launches, so there is no {given[0]}")
    options.script, options.json = str(options.ptx), "-" if options.json else None
    return carry_out_host(options)


def _dim3(text: str) -> tuple[int, int, int]:
    try:
        parts = [int(part) for part in text.replace("x", ",").split(",")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or any(part < 1 for part in parts):
        raise argparse.ArgumentTypeError(f"expected X or X,Y,Z, positive; got {text!r}")
    x, y, z = (*parts, 1, 1)[:3]
    return x, y, z


def _kernel(module: api.Module, asked: str | None) -> str:
    if asked is not None:
        named = [name for name in module.kernels if readable(name, len(name)) == asked]
        return named[0] if len(named) == 1 else asked
    if len(module.kernels) != 1:
        raise LaunchError(f"--kernel: choose one of {', '.join(module.kernels)}")
    return module.kernels[0]


def _required_block(module: api.Module, kernel: str) -> tuple[int, ...]:
    directives = module.syntax.kernels[kernel].directives
    if "reqntid" not in directives:
        raise LaunchError("--block: needed, for the kernel has no .reqntid")
    return directives["reqntid"]


def _check_count(module: api.Module, kernel: str, arguments: list[Argument]) -> None:
    if kernel not in module.syntax.kernels:
        raise LaunchError(f"--kernel: expected one of {', '.join(module.kernels)}; got {kernel!r}")
    parameters = module.syntax.kernels[kernel].parameters
    if len(arguments) != len(parameters):
        wanted = "; ".join(f"{p.name} (.{p.type}, {p.size} bytes)" for p in parameters)
        raise LaunchError(
            f"--arg: {kernel} has {len(parameters)} parameters, {len(arguments)} given: {wanted}"
        )


def _array_facts(index: int, argument: Argument) -> dict[str, Any]:
    assert argument.array is not None and argument.before is not None
    numbers = argument.numbers()
    finite = numbers[np.isfinite(numbers)] if numbers.dtype.kind == "f" else numbers.reshape(-1)
    changed = argument.array.view(np.uint8) != argument.before.view(np.uint8)
    changed = changed.reshape(argument.array.size, -1).any(axis=1)
    return {
        "argument": index,
        "type": argument.type,
        "shape": list(argument.array.shape),
        "changed": int(changed.sum()),
        "min": float(finite.min()) if finite.size else None,
        "max": float(finite.max()) if finite.size else None,
        "mean": float(finite.mean(dtype=np.float64)) if finite.size else None,
        "nan_or_inf": int(numbers.size - finite.size),
        "first": _json_numbers(numbers.reshape(-1)[:_SHOWN_ELEMENTS]),
    }


def _json_numbers(values: NDArray[Any]) -> list[Any]:
    return [value if np.isfinite(value) else str(value) for value in values.tolist()]


def _array_lines(index: int, argument: Argument) -> list[str]:
    facts = _array_facts(index, argument)
    size = argument.array.size if argument.array is not None else 0
    if argument.value is None:  # saved memory: what its bytes mean is not known
        return [f"  {argument.text}: {facts['changed']} of {size} bytes changed"]
    shape = ",".join(map(str, facts["shape"]))
    line = f"  argument {index} {facts['type']}[{shape}]: {facts['changed']} of {size} changed"
    if facts["min"] is not None:
        line += f", min {facts['min']:.6g}, max {facts['max']:.6g}, mean {facts['mean']:.6g}"
    if facts["nan_or_inf"]:
        line += f", {facts['nan_or_inf']} nan or inf"
    first = " ".join(
        f"{value:.6g}" if not isinstance(value, str) else value for value in facts["first"]
    )
    return [f"{line}; starts {first}"]


def _save(folder: Path, arguments: list[Argument]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index, argument in enumerate(arguments):
        if argument.array is not None:
            np.save(folder / f"arg{index}.npy", argument.array)
