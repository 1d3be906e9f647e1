"""A real child process that misbehaves as its first argument says. Run as a script."""

import json
import os
import signal
import subprocess
import sys
import time

READY = b'{"event":"ready"}\n'


def say(data):
    os.write(1, data)


def wait_for_the_parent():
    while os.read(0, 100):
        pass


def exit_at_once():
    sys.stderr.write("no such weights\n")
    sys.exit(3)


def serve():
    say(b'{"event":"loading","done":1,"total":2}\n' + READY)
    wait_for_the_parent()


def ignore_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say(READY)
    while True:
        time.sleep(60)


def print_garbage():
    say(b"hello\n\xff\xfe\x00\n{}\n[1]\n" + b"[" * 5000 + b'\n{"event":"ready","x":1}\n')
    say(b"y" * 200_000)
    say(b"\n" + READY)
    wait_for_the_parent()


def stop_itself():
    say(READY)
    os.kill(os.getpid(), signal.SIGSTOP)
    wait_for_the_parent()


def die_after_ready():
    say(READY)
    sys.stderr.write("about to die\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def fail_with_a_code():
    say(b'{"event":"failed","code":"checkpoint","detail":"no tensor `x`"}\n')
    sys.exit(78)


def flood_the_log():
    for number in range(20_000):
        sys.stderr.write(f"line {number} \x1b[31m{'z' * 100}\n")
    sys.exit(0)


def leave_a_grandchild():
    command = "import signal, time; signal.signal(15, 1); print('up', flush=True); time.sleep(60)"
    grandchild = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE)
    grandchild.stdout.readline()
    sys.stderr.write(f"{grandchild.pid}\n")
    sys.stderr.flush()
    say(READY)
    os._exit(0)


def close_its_streams():
    os.close(1)
    os.close(2)
    wait_for_the_parent()


def show_its_surroundings():
    facts = {
        "environment": {name: os.environ[name] for name in sys.argv[2:] if name in os.environ},
        "group": os.getpgid(0),
        "pid": os.getpid(),
        "isolated": sys.flags.isolated,
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd")),
    }
    sys.stderr.write("facts " + json.dumps(facts) + "\n")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
