#!/usr/bin/env python3
"""kvwatch exec hook: limit the requests that HAProxy lets into one server at a time.

    haproxy-maxconn.py SOCKET BACKEND/SERVER CONFIGURED

SOCKET is HAProxy's stats socket (`stats socket ... level admin`) and CONFIGURED the server's `maxconn`
in haproxy.cfg (0: none), which a restore puts back. The value is an argument, not a saved state: there
is nothing to lose when this program, kvwatch or HAProxy is killed at any moment.

What is over the limit waits in HAProxy's own queue (`timeout queue`). "Stop admission" becomes maxconn 1,
the least that HAProxy knows: its 0 means no limit. Exit: 0 applied and read back, 75 HAProxy does not
answer (it restarts), 1 it refused, 2 wrong usage. See docs/recipes/haproxy.md.
"""

import os
import re
import socket
import sys

TIMEOUT_S = 2.0
MAX_REPLY = 4 * 1024 * 1024
TRY_LATER = 75
# Names go into a command line of HAProxy, where ";" begins the next command.
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,100}/[A-Za-z0-9_.:-]{1,100}")
NUMBER = re.compile(r"[0-9]{1,9}")


class RefusedError(Exception):
    """HAProxy answered, but not as hoped."""


def ask(path, command):
    """One command on the stats socket; its answer. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.settimeout(TIMEOUT_S)
        channel.connect(path)
        channel.sendall(command.encode() + b"\n")
        reply = b""
        while piece := channel.recv(65536):
            reply += piece
            if len(reply) > MAX_REPLY:
                raise RefusedError("the answer has no end")
    return reply.decode("utf-8", "replace")


def read_back(path, name):
    """The server's maxconn as HAProxy has it now; 0: none."""
    lines = ask(path, "show stat -1 4 -1").splitlines()
    columns = lines[0].lstrip("# ").split(",") if lines else []
    for line in lines[1:]:
        row = dict(zip(columns, line.split(","), strict=False))
        if f"{row.get('pxname')}/{row.get('svname')}" == name:
            return int(row.get("slim") or 0)
    raise RefusedError(f"there is no server {name}")


def wanted(environment, configured):
    """The maxconn that the request asks for, never above the configured one."""
    if environment.get("KVWATCH_EVENT") == "restore":
        return configured
    if environment.get("KVWATCH_EVENT") != "limit":
        raise ValueError(
            "KVWATCH_EVENT is neither limit nor restore; this hook belongs under control.targets"
        )
    if environment.get("KVWATCH_ADMIT") == "false":
        return 1
    number = environment.get("KVWATCH_MAX_RUNNING", "")
    if not number:
        return configured
    if not NUMBER.fullmatch(number) or int(number) < 1:
        raise ValueError("KVWATCH_MAX_RUNNING is not a whole number above 0")
    return min(int(number), configured) if configured else int(number)


def main(arguments, environment):
    """Set, read back, and say what stands now."""
    if len(arguments) != 3 or not NAME.fullmatch(arguments[1]) or not NUMBER.fullmatch(arguments[2]):
        print("usage: haproxy-maxconn.py SOCKET BACKEND/SERVER CONFIGURED_MAXCONN")
        return 2
    path, name, configured = arguments[0], arguments[1], int(arguments[2])
    try:
        number = wanted(environment, configured)
        reply = ask(path, f"set maxconn server {name} {number}").strip()
        found = read_back(path, name)
    except ValueError as error:
        print(error)
        return 2
    except OSError as error:
        print(f"{path}: {error.strerror or error}")
        return TRY_LATER
    except RefusedError as error:
        print(error)
        return 1
    if reply or found != number:
        print(f"{name}: asked for maxconn {number}, HAProxy has {found}: {reply}")
        return 1
    print(f"{name}: maxconn {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
