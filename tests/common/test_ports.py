"""Ports that are named before somebody listens there."""

import socket

from common.ports import EPHEMERAL_RANGE, FIRST_PORT, LOOPBACK, MIN_CHOICE, free_ports


def test_free_ports_differ_can_be_listened_on_and_are_none_that_the_kernel_gives_away() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        socket.create_server((LOOPBACK, port)).close()
    first, last = map(int, EPHEMERAL_RANGE.read_text().split())
    if first - FIRST_PORT >= MIN_CHOICE:
        assert not [port for port in ports if first <= port <= last]
