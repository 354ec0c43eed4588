"""The sandbox with protections taken away: what an attempt then reaches shows that the attempt is one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.environments.sandbox import Execution, Limits, execution
from megatron_rl.environments.sandbox.plan import NAMESPACES, Plan, plan_for

LAUNCHER = Path(execution.LAUNCHER).read_text(encoding="utf-8")

Mutation = Callable[[Plan], Plan]


def without_limit(name: str) -> Mutation:
    return lambda plan: replace(plan, limits={key: plan.limits[key] for key in plan.limits if key != name})


def without_namespace(name: str) -> Mutation:
    return lambda plan: replace(plan, namespaces=plan.namespaces & ~NAMESPACES[name])


def home_without(option: str) -> Mutation:
    def changed(plan: Plan) -> Plan:
        kept = [each for each in plan.home.split(",") if not each.startswith(f"{option}=")]
        return replace(plan, home=",".join(kept))

    return changed


PLAN: Mapping[str, Mutation] = {
    "hidden": lambda plan: replace(plan, hidden=()),
    "devices": lambda plan: replace(plan, devices=[*plan.devices, ("/dev/full", "/dev/full")]),
    "environment": lambda plan: replace(plan, environment=plan.environment | {"SECRET": "of the trainer"}),
    "disk": home_without("size"),
    "inodes": home_without("nr_inodes"),
    **{name: without_namespace(name) for name in ("ipc", "process", "network")},
    **{name: without_limit(name) for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NPROC")},
    **{name: without_limit(name) for name in ("RLIMIT_CORE", "RLIMIT_NOFILE", "RLIMIT_SIGPENDING")},
}
"""Protections that the plan names."""
TEXT: Mapping[str, tuple[str, str]] = {
    "filter": ('        _install(plan["filter"])\n', ""),
    "umount": ('    _call("umount", LIBC.umount2, OLD.encode(), MNT_DETACH)\n    os.rmdir(OLD)\n', ""),
    "no_new_privs": ('_call("no_new_privs", LIBC.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)', "pass"),
    "nosuid": ("_show(OLD + source, place, READ_ONLY | NOSUID | NODEV)", "_show(OLD + source, place, READ_ONLY)"),
    "read-only": ("_show(OLD + source, place, READ_ONLY | NOSUID | NODEV)", "_show(OLD + source, place, NOSUID)"),
    "read-only root": ('    _restrict("/", READ_ONLY | NOSUID | NODEV, 0)\n', '    os.chmod("/", 0o777)\n'),
    "noexec": ("MS_NOSUID | MS_NODEV | MS_NOEXEC", "MS_NOSUID | MS_NODEV"),
    "close_range": ('_call("close_range", LIBC.syscall, CLOSE_RANGE, 4, ctypes.c_uint(2**32 - 1), 0)', "pass"),
    "user": ("drops = os.geteuid() == 0 and _is_mapped(NOBODY)", "drops = False"),
    "number": ("INSIDE, NOBODY = 1000, 65534", "INSIDE, NOBODY = 0, 65534"),
    "capset": ('_call("capset", LIBC.capset, struct.pack("<Ii", CAPABILITY_VERSION_3, 0), bytes(24))', "pass"),
    "groups": ("os.setgroups([])", "pass"),
    "setsid": ("        os.setsid()", "        pass"),
    "host name": ('    _call("sethostname", LIBC.sethostname, b"sandbox", 7)\n', ""),
    "covered": ("        _restrict(place, READ_ONLY | NOSUID | NODEV, 0)\n", ""),
    "die with parent": ("    LIBC.prctl(PR_SET_PDEATHSIG, SIGKILL)\n    if", "    if"),
}
"""Protections that are lines of the launcher."""


def run(
    code: str, limits: Limits, without: Collection[str], tmp_path: Path, patch: pytest.MonkeyPatch,
    shown: Collection[tuple[str, str]] = (),
) -> Execution:  # fmt: skip
    """``run_python`` less the protections named; ``shown`` are further paths outside and inside."""
    plan = plan_for(code, limits, {}, ())
    plan = replace(plan, shown=[*plan.shown, *shown])
    text = LAUNCHER
    for name in without:
        if name in PLAN:
            plan = PLAN[name](plan)
        else:
            present, instead = TEXT[name]
            assert text.count(present) == 1, name
            text = text.replace(present, instead)
    if text is not LAUNCHER:
        launcher = tmp_path / "launcher.py"
        launcher.write_text(text, encoding="utf-8")
        patch.setattr(execution, "LAUNCHER", str(launcher))
    return execution.execute(plan, b"", limits)
