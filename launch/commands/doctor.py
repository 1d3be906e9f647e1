"""``dflashd doctor``: print the facts of `launch.doctor`, for people or as JSON."""

import json

import click

from launch import doctor, exit_codes
from launch.doctor import Facts

GIB = 1 << 30


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quick", is_flag=True, help="Start no other process and do not load torch.")
def doctor_command(*, as_json: bool, quick: bool) -> int:
    """Say what this machine offers and what would be used, and why.

    Exit code 0 when nothing stands in the way, 78 when something does.
    """
    facts = doctor.quick() if quick else doctor.full()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        lines = _lines(facts)
        widest = max(len(name) for name, _ in lines)
        for name, value in lines:
            click.echo(f"{name:<{widest}} {value}")
        for problem in facts["problems"]:
            click.echo(f"problem: {problem}")
    return exit_codes.CONFIG if facts["problems"] else exit_codes.OK


def _lines(facts: Facts) -> list[tuple[str, str]]:
    python, cpu, memory = facts["python"], facts["cpu"], facts["memory"]
    packages = facts["packages"]
    threads = [f"{name}={value}" for name, value in facts["threads"].items() if value]
    lines = [
        ("dflashd", facts["version"]),
        ("python", f"{python['version']}, {python['executable']}"),
        ("platform", python["platform"]),
        ("import names", _import_names(facts)),
        ("installed", ", ".join(f"{name} {found}" for name, found in packages.items() if found)),
        ("not installed", ", ".join(name for name, found in packages.items() if not found) or "-"),
        ("processor", f"{cpu['model']}, {cpu['usable_cores']} usable cores"),
        ("features", f"{' '.join(cpu['flags']) or 'none of interest'}"),
        ("dtype", f"{cpu['auto_dtype']} ({'fast' if cpu['fast_bf16'] else 'no fast'} bf16 here)"),
        ("threads", " ".join((f"{cpu['usable_cores']} a daemon;", *threads))),
        ("memory", _memory(memory)),
        ("devices", ", ".join(facts["devices"])),
        ("gpu sharing", _gpu(facts["gpu"])),
        ("transport", f"{facts['transport']['name']}: {facts['transport']['reason']}"),
        ("models", facts["home"]),
        ("run folders", facts["runtime"]["folder"] or facts["runtime"]["error"]),
    ]
    lines += [
        (f"target {name.replace('_', ' ')}", _plain(value))
        for name, value in facts.get("target_daemon", {}).items()
        if name != "error"
    ]
    return lines


def _gpu(facts: Facts) -> str:
    mps = "under MPS, where a fault of one daemon can end the other" if facts["mps"] else "no MPS"
    names = f"{facts['pid_namespace']} {facts['ipc_namespace']}, which both daemons must share"
    return f"{facts['obstacle'] or 'nothing known against it'}; {mps}; {names}"


def _plain(value: object) -> str:
    """A fact in words: no brackets, and a dash where there is nothing."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_plain(found)}" for name, found in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(_plain(found) for found in value) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def _import_names(facts: Facts) -> str:
    return ", ".join(
        f"{name} {'ours' if entry['ours'] else 'NOT ours'}"
        for name, entry in facts["import_names"].items()
    )


def _memory(memory: Facts) -> str:
    parts = [
        f"{memory[key] / GIB:.1f} GiB {words}"
        for key, words in (
            ("total_bytes", "in all"),
            ("available_bytes", "available"),
            ("limit_bytes", "limit of this group"),
        )
        if memory[key] is not None
    ]
    return ", ".join(parts) or "unknown"
