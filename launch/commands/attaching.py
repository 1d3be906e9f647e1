"""The plan of a supervisor that drives daemons which run already."""

from pathlib import Path

from launch.drafts import NONE
from launch.plan import ATTACHED_RESTARTS, FAR_RESTARTS, Attach, Plan
from protocol.addresses import is_tcp, parse_tcp
from protocol.checkpoints.target_config import read_model_config
from protocol.instances import daemon_directory


def attach_plan(
    model: Path,
    *,
    target: str | None,
    draft: str | None,
    instance: str | None,
    keys: Path | None = None,
) -> Plan:
    """Daemons in these folders or at these addresses, or those of `instance`.

    `model` is what the clients' text is of. Raises CheckpointError, ConfigError or UsageError;
    whether daemons are there is found out later.
    """
    config = read_model_config(model)

    def place(role: str, named: str | None) -> str:
        if named is not None and is_tcp(named):
            return str(parse_tcp(named))
        return str(daemon_directory(role, instance if named is None else None, named))

    attach = Attach(
        target=place("target", target),
        draft=None if draft == NONE else place("draft", draft),
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        keys="" if keys is None else str(keys.absolute()),
    )
    is_far = is_tcp(attach.target) or is_tcp(attach.draft or "")
    restarts = FAR_RESTARTS if is_far else ATTACHED_RESTARTS
    return Plan(model=str(model), attach=attach, restarts=restarts)
