"""A report on the terminal."""

from collections.abc import Mapping
from typing import Any, Final

MEGA: Final = 1e6


def print_report(found: Mapping[str, Any]) -> None:
    """Print what `decode.report` returns, without its rounds."""
    machine, versions = found["machine"], found["machine"]["versions"]
    print(f"{machine['cpu']}, {machine['cores']} cores, fast bf16: {machine['fast_bf16']}")
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    dirty = " and uncommitted changes" if machine["uncommitted"] else ""
    print(f"commit {machine['commit'][:12]}{dirty}, python {machine['python']}")
    for name, mode in found["modes"].items():
        _print_mode(name, mode)
    for name, values in found["ratios"].items():
        print(f"{name}: {_spread(values)}")
    for name, mode in found["modes"].items():
        if "versions" in mode["facts"]:
            print(f"{name}: {mode['facts']['versions']}")
    for name, same in found["identical"].items():
        print(f"{name}: {same['identical']} of {same['prompts']} texts identical")
    if "different_forwards" in found:
        print(f"inprocess ran the same forwards: {not found['different_forwards']}")
    for role, values in found["memory_bars"].items():
        held, bar = values["held"] / MEGA, values["bar"] / MEGA
        print(f"{role} holds {held:.0f} MB of at most {bar:.0f} MB")
    for name, values in found.get("concurrent", {}).items():
        print(f"concurrent {name}: {_spread(values)}")


def _print_mode(name: str, mode: Mapping[str, Any]) -> None:
    facts = mode["facts"]
    print(f"\n{name} ({facts['dtype']}, exact: {facts['exact']})")
    print(f"  tokens/s         {_spread(mode['tokens_per_second'])}")
    print(f"  first token, s   {_spread(mode['first_token_seconds'])}")
    if mode["acceptance"]:
        length = mode["acceptance"]["mean_acceptance_length"]
        print(f"  tokens a round   {length:.3f}")
    for stage, values in mode["stages_ms"].items():
        times = ", ".join(f"{key} {value:.3f}" for key, value in values.items())
        print(f"  {stage:9} ms     {times}")
    for role, values in mode["memory"].items():
        sizes = ", ".join(f"{key} {value / MEGA:.0f}" for key, value in values.items())
        print(f"  {role:10} MB    {sizes}")
    print()


def _spread(values: Mapping[str, float]) -> str:
    return (
        f"{values['median']:.3f} (quartiles {values['p25']:.3f} to {values['p75']:.3f}, "
        f"{values['min']:.3f} to {values['max']:.3f} over {values['count']:.0f})"
    )
