"""Features of a shard that lies there without them: made by the target's process, when needed.

``python -m target_daemon.collecting CONFIG.json --features N`` writes them beside a link to the
shard in a folder of this rank's own. The file is mapped and its name removed at once, so that it
takes room only for as long as it is used.
"""

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

import msgspec

from protocol.checkpoints.shards import Array, Shard, map_features
from protocol.closing import Closing
from protocol.config import Deadlines, read_config, write_config
from protocol.ending import EndingSignals
from protocol.errors import DaemonDied, ProtocolError, from_wire
from protocol.lifeline import PARENT_VARIABLE
from protocol.training import (
    FEATURES,
    MAX_LINE,
    SHARD,
    CollectConfig,
    CollectLine,
    Problem,
    Report,
    TrainConfig,
    TrainLine,
)

FOLDER: Final = "work/features-{}"  # of a rank, in the folder that is being made
LOOK_SECONDS: Final = 0.5


class Maker(Closing):
    """Makes features by the config at `config.collect`; its folder is there while this is open."""

    def __init__(
        self,
        config: TrainConfig,
        rank: int,
        endings: EndingSignals,
        say: Callable[[TrainLine], None],
    ) -> None:
        """Raises ConfigError for a config that is none. What an earlier run left is removed."""
        self._collect = read_config(CollectConfig, Path(config.collect))
        self._data = Path(self._collect.folder)
        self._folder = Path(config.folder) / FOLDER.format(rank)
        self._endings, self._say = endings, say
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def make(self, number: int, shard: Shard) -> Array:
        """Features [n, taps * hidden] of one shard, mapped.

        Raises what the target's process reports, DaemonDied where it reports nothing, and Ended.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700)
        linked = self._folder / SHARD.format(number)
        linked.symlink_to((self._data / linked.name).absolute())
        file = self._folder / "config.json"
        write_config(msgspec.structs.replace(self._collect, folder=str(self._folder)), file)
        self._run(file, number)
        found = map_features(self._folder, number, shard, self._collect.taps)
        if found is None:
            raise DaemonDied(f"{FEATURES.format(number)} was not made, and nothing says why")
        shutil.rmtree(self._folder)
        return found

    def _run(self, file: Path, number: int) -> None:
        line = (sys.executable, "-I", "-m", "target_daemon.collecting", str(file))
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        process = subprocess.Popen(  # noqa: S603 - our own module
            (*line, "--features", str(number)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=environment,
        )
        try:
            if process.stdout is not None:
                self._listen(process.stdout, number)
            code = process.wait(Deadlines().terminate)
        finally:
            _end(process)
        if code:
            raise DaemonDied(f"features of shard {number}: the target's process ended with {code}")

    def _listen(self, stream: IO[bytes], number: int) -> None:
        """Pass on what it reports, to the end of its output."""
        begun = b""
        while True:
            ready, _, _ = select.select([stream], [], [], LOOK_SECONDS)
            self._endings.check()
            if not ready:
                continue
            piece = os.read(stream.fileno(), MAX_LINE)
            if not piece:
                return
            *lines, begun = (begun + piece).split(b"\n")
            if len(begun) > MAX_LINE:
                raise ProtocolError(f"a line of more than {MAX_LINE:,} bytes")
            for line in lines:
                self._hear(line, number)

    def _hear(self, line: bytes, number: int) -> None:
        try:
            said = msgspec.json.decode(line, type=CollectLine)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"not a line of the collecting process: {error}") from error
        match said:
            case Problem():
                raise from_wire(said.code, said.detail)
            case Report(stage="features"):
                self._say(msgspec.structs.replace(said, detail=f"shard {number}"))
            case _:
                pass


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have it gone, whether it still runs or not."""
    process.terminate()
    try:
        process.wait(Deadlines().terminate)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
