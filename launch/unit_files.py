"""The unit files of systemd for the three processes: tables of directives, and nothing else.

Two ways to run an instance, which share its file of settings, ``INSTANCE.toml``:

- three units, ``dflash-target@``, ``dflash-draft@`` and ``dflash@`` (the supervisor, attached),
  each of which can be restarted without the others;
- one unit, ``dflash-single@``, whose supervisor starts both daemons itself.

``Wants=`` and ``After=`` between them, never ``Requires=`` or ``BindsTo=``: those would stop or
restart the supervisor with a daemon, and it is there to bridge that. Only directives that systemd
252 knows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.config import Deadlines

Lines = tuple[str, ...]
Section = Mapping[str, Lines]

GROUP: Final = "dflash.target"
SUPERVISOR: Final = "dflash@.service"
SINGLE: Final = "dflash-single@.service"
TARGET: Final = "dflash-target@.service"
DRAFT: Final = "dflash-draft@.service"
USER: Final = "dflash"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """For whom the files are: the command, the system's manager or a user's, with GPUs or not."""

    program: Path
    user: bool = False
    gpu: bool = False


_LIMITS: Final = Deadlines()
_LONGEST: Final = {
    "target": max(_LIMITS.open, _LIMITS.prefill, _LIMITS.replay, _LIMITS.verify, _LIMITS.close),
    "draft": max(_LIMITS.open, _LIMITS.pair, _LIMITS.ingest, _LIMITS.propose, _LIMITS.close),
    "supervisor": _LIMITS.hello,  # which waits for nobody, and has its loop for itself
}
# Seconds without a sign of life, which is given between two calls: what is still within its
# deadline is not taken for hanging.
WATCHDOG: Final = {role: round(1.25 * longest) for role, longest in _LONGEST.items()}

# What all of them have, and what can be had without privileges too.
_COMMON: Final[Lines] = (
    "Type=notify",
    "NotifyAccess=main",
    "EnvironmentFile=-%E/dflash/%i.env",
    "UMask=0077",
    "Restart=on-failure",
    "RestartSec=2",
    "# 2: arguments, 77: belongs to somebody else, 78: settings. Trying again helps none of them;",
    "# it does help 75 (not ready yet, not enough memory now, asked to leave).",
    "RestartPreventExitStatus=2 77 78",
    "KillMode=mixed",
    "TimeoutStartSec=10min",
    "TimeoutAbortSec=5",
    "LimitNOFILE=65536",
    "# A core would hold prompts, texts and keys.",
    "LimitCORE=0",
    "NoNewPrivileges=yes",
    "LockPersonality=yes",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    "SystemCallErrorNumber=EPERM",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
)

# What only the system's manager can give, and what a user has already.
_SYSTEM: Final[Lines] = (
    f"User={USER}",
    f"Group={USER}",
    "# One folder for all, since they meet in it; each takes its own part away at its end.",
    "RuntimeDirectory=dflash",
    "RuntimeDirectoryMode=0700",
    "RuntimeDirectoryPreserve=yes",
    "Environment=DFLASH_RUNTIME=%t/dflash",
    "CacheDirectory=dflash",
    "StateDirectory=dflash",
    "ConfigurationDirectory=dflash",
    "CapabilityBoundingSet=",
    "ProtectSystem=strict",
    "ProtectHome=yes",
    "PrivateTmp=yes",
    "ProtectClock=yes",
    "ProtectHostname=yes",
    "ProtectControlGroups=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "ProtectProc=invisible",
    "RemoveIPC=no",
    "# Another host, or models fetched by the service: allow the addresses in a drop-in.",
    "IPAddressDeny=any",
    "IPAddressAllow=localhost",
    "Environment=DFLASH_HOME=%C/dflash HOME=%S/dflash",
    "Environment=TORCHINDUCTOR_CACHE_DIR=%C/dflash/inductor TRITON_CACHE_DIR=%C/dflash/triton",
    "Environment=CUDA_CACHE_PATH=%C/dflash/cuda",
)

_CPU_ONLY: Final[Lines] = ("PrivateDevices=yes", "DevicePolicy=closed")
# PrivateDevices would hide the GPUs. Newer drivers have renamed a device group: both are listed.
_GPU: Final[Lines] = (
    "PrivateDevices=no",
    "DevicePolicy=closed",
    "DeviceAllow=char-nvidia rw",
    "DeviceAllow=char-nvidia-frontend rw",
    "DeviceAllow=char-nvidiactl rw",
    "DeviceAllow=char-nvidia-uvm rw",
    "DeviceAllow=char-nvidia-caps rw",
    "LimitMEMLOCK=infinity",
)
# Compiled kernels are written to memory and run there: with this on, bf16 products fail on the CPU.
_COMPUTES: Final[Lines] = ("MemoryDenyWriteExecute=no",)


def unit_files(choice: Choice) -> dict[str, str]:
    """Every file by its path below the manager's folder of settings, and its content."""
    folder = "systemd/user" if choice.user else "systemd/system"
    units = {
        GROUP: _group(choice),
        TARGET: _daemon(choice, "target"),
        DRAFT: _daemon(choice, "draft"),
        SUPERVISOR: _supervisor(choice),
        SINGLE: _single(choice),
    }
    files = {f"{folder}/{name}": _render(sections) for name, sections in units.items()}
    if not choice.user:
        files["sysusers.d/dflash.conf"] = _SYSUSERS
    return files


_SYSUSERS: Final = f"""\
u {USER} - "DFlash inference" /var/lib/dflash
m {USER} render
m {USER} video
"""


def _group(choice: Choice) -> Section:
    return {
        "Unit": ("Description=DFlash speculative decoding",),
        "Install": (f"WantedBy={'default' if choice.user else 'multi-user'}.target",),
    }


def _daemon(choice: Choice, role: str) -> Section:
    return {
        "Unit": (f"Description=DFlash {role} daemon (%i)", *_grouped(), *_devices_first(choice)),
        "Service": (
            f"ExecStart={_command(choice, role)}",
            f"WatchdogSec={WATCHDOG[role]}",
            "TimeoutStopSec=30",
            "OOMPolicy=kill",
            *(("OOMScoreAdjust=200",) if role == "draft" else ()),
            *_COMMON,
            *_COMPUTES,
            *_of_manager(choice, computes=True, roles=(role,)),
        ),
    }


def _supervisor(choice: Choice) -> Section:
    daemons = f"{TARGET} {DRAFT}".replace("@.", "@%i.")
    return {
        "Unit": (
            "Description=DFlash supervisor (%i)",
            *_grouped(),
            f"Wants={daemons}",
            f"After={daemons}",
            f"Conflicts={SINGLE.replace('@.', '@%i.')}",
        ),
        "Service": (
            f"ExecStart={_command(choice, 'supervisor')} --attach",
            f"WatchdogSec={WATCHDOG['supervisor']}",
            "TimeoutStopSec=90",
            "OOMPolicy=kill",
            *_COMMON,
            "MemoryDenyWriteExecute=yes",
            *_of_manager(choice, computes=False, roles=("supervisor",)),
        ),
        "Install": (f"WantedBy={GROUP}",),
    }


def _single(choice: Choice) -> Section:
    others = f"{SUPERVISOR} {TARGET} {DRAFT}".replace("@.", "@%i.")
    return {
        "Unit": (
            "Description=DFlash supervisor with its daemons (%i)",
            *_grouped(),
            f"Conflicts={others}",
            *_devices_first(choice),
        ),
        "Service": (
            f"ExecStart={_command(choice, 'supervisor')}",
            f"WatchdogSec={WATCHDOG['supervisor']}",
            "TimeoutStopSec=90",
            "# A daemon that the kernel ends for want of memory is started again.",
            "OOMPolicy=continue",
            *_COMMON,
            *_COMPUTES,
            *_of_manager(choice, computes=True, roles=("target", "draft", "supervisor")),
        ),
        "Install": (f"WantedBy={GROUP}",),
    }


def _command(choice: Choice, verb: str) -> str:
    return f"{choice.program} {verb} --config %E/dflash/%i.toml --instance %i"


def _grouped() -> Lines:
    return (
        f"PartOf={GROUP}",
        f"Before={GROUP}",
        "After=network.target",
        "StartLimitIntervalSec=10min",
        "StartLimitBurst=5",
    )


def _devices_first(choice: Choice) -> Lines:
    if not choice.gpu or choice.user:
        return ()
    # A group of devices whose module is not loaded yet would silently not be allowed.
    modules = "modprobe@nvidia_uvm.service"
    return (f"Wants={modules}", f"After={modules} nvidia-persistenced.service")


def _of_manager(choice: Choice, *, computes: bool, roles: Lines) -> Lines:
    if choice.user:
        return ()
    devices = _GPU if choice.gpu and computes else _CPU_ONLY
    names = (*(f"{role}.secret" for role in roles), "allowed")
    # What is set stands for a file that is not there: keys are for other hosts only.
    keys = tuple(
        line
        for name in names
        for line in (
            f"SetCredential={name}:#none",
            f"LoadCredential={name}:/etc/dflash/keys/{name}",
        )
    )
    return (*_SYSTEM, *devices, *keys)


def _render(sections: Section) -> str:
    return "\n\n".join("\n".join((f"[{name}]", *lines)) for name, lines in sections.items()) + "\n"
