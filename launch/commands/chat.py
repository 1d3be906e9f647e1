"""The arguments of ``dflashd chat``; `launch.commands.chatting` does the work."""

import click

from launch.commands.pair import connect_option, leave_loading_options, refuse_a_limit_alone
from launch.commands.sampling import chat_options
from launch.commands.settings import config_option, settings
from launch.settings import Setting
from protocol.core_dumps import refuse_core_dumps


@click.command(name="chat")
@settings("model", "draft", "draft_context", "draft_vocab")
@settings("block_width", "verify", "tree_budget")
@settings("max_tokens")
@chat_options
@click.option(
    "--system", cls=Setting, metavar="TEXT", help="A system message for the chat template."
)
@settings("target_devices", "target_layer_split")
@settings("target_device", "draft_device", "hand_over", "graphs")
@settings("dtype", "target_weights", "exact", "rollback", "threads")
@settings("prefix_store", "prefix_disk")
@connect_option("Use the supervisor that runs; with PATH or NAME, that one.")
@config_option
@click.option("--quiet", is_flag=True, help="No progress and no hints.")
def chat_command(**arguments: object) -> int:
    """Talk with a model in the terminal, turn by turn.

    Each turn computes only what is new. A line is a turn; one that ends with a backslash goes on in
    the next, and so does text between two lines of triple quotes. '/help' lists the commands. What
    comes through a pipe is answered line by line.
    """
    context = click.get_current_context()
    if arguments["connect"] is not None:
        leave_loading_options(context)
    refuse_a_limit_alone(context)
    from launch.commands.chatting import Options, chat  # noqa: PLC0415 - not for --help

    refuse_core_dumps()
    return chat(Options(**arguments))  # type: ignore[arg-type]  # click has checked them
