"""Hosts joined by shaped Ethernet, on one machine: network namespaces on a bridge. Needs root and iproute2."""

import contextlib
import os
import shutil
import subprocess

SUBNET = "10.77.0"


def reason_to_skip():
    """Why there can be no hosts here, or None."""
    if os.geteuid():
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"network namespaces need iproute2: there is no {missing[0]}"
    name = f"ibn{os.getpid()}try"
    made = _ip("netns", "add", name, check=False)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None


@contextlib.contextmanager
def hosts(count, rate):
    """Makes hosts whose links are shaped in both directions, such as to 50mbit; gives their names.

    Host i has the address SUBNET.(i + 1) on eth0. All exist inside of the namespaces alone, and go with them.
    """
    prefix = f"ibn{os.getpid()}"
    switch, names = f"{prefix}sw", [f"{prefix}h{number}" for number in range(count)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", switch, "link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "set", f"p{number}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{SUBNET}.{number + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            for place, device in ((name, "eth0"), (switch, f"p{number}")):
                shape = ("root", "tbf", "rate", rate, "burst", "128kb", "latency", "100ms")
                _run("tc", "-n", place, "qdisc", "add", "dev", device, *shape)
        yield names
    finally:
        for name in (*names, switch):
            _ip("netns", "del", name, check=False)


def start(host, *command, **more):
    """Starts a program in a host."""
    return subprocess.Popen(["ip", "netns", "exec", host, *command], **more)


def _ip(*arguments, check=True):
    return _run("ip", *arguments, check=check)


def _run(*command, check=True):
    return subprocess.run(command, check=check, capture_output=True, text=True)
